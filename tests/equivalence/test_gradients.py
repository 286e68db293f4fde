"""The same gradients in every plan: what a step computes depends on the recipe, never on how it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import worlds
from torch import Tensor
from worlds import FAMILIES

from sameday.data.questions.batch import Batch
from sameday.data.questions.encode import Encoder
from sameday.hardware.machine import detect_machine
from sameday.hardware.ranks import Ranks
from sameday.kernels import attention
from sameday.models.families import family_of
from sameday.models.load import load_base
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.plan import Plan
from sameday.tasks.vqa import task as vqa
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
WHOLE, EACH, LOSS = 1e-5, 1e-4, 1e-6
"""Largest relative differences: of the whole gradient, of each tensor's, of the loss."""


@dataclass(frozen=True)
class Scenario:
    """A recipe and the questions it is about."""

    family: str
    seed: int
    counts: tuple[int, ...]
    chats: bool
    recipe: dict[str, Any]


def scenario(
    family: str, seed: int, counts: tuple[int, ...] = (17, 1, 5, 3), chats: bool = False, **recipe: Any
) -> Scenario:
    return Scenario(family, seed, counts, chats, recipe)


SCENARIOS = {
    "qwen3 by image, token": scenario("qwen3_vl", 0, order="by_image", loss_weight="token"),
    "qwen3 shuffled, sample, cut": scenario("qwen3_vl", 1, (9, 4, 1), loss_weight="sample", max_length=64),
    "qwen3 chats, prompt": scenario(
        "qwen3_vl", 2, (6, 2), True, order="by_image", loss_weight="sample", system_prompt="see and say"
    ),
    "qwen25 by image, sample, cut": scenario(
        "qwen2_5_vl", 3, (3, 17, 6), order="by_image", loss_weight="sample", max_length=68
    ),
    "qwen25 shuffled, token, chats": scenario("qwen2_5_vl", 4, (8, 3, 2, 1), True, loss_weight="token"),
    "qwen2 by image, token, chats": scenario("qwen2_vl", 10, (6, 3), True, order="by_image", loss_weight="token"),
}
SHARED = {"share_images": True, "max_questions": None}
PLANS: dict[str, dict[str, Any]] = {
    "4x4": {"max_questions": 4},
    "padded": {"max_questions": 5, "pad_to_multiple": 32},
    "packed": {"packing": True, "max_questions": None},
    "packed, split": {"packing": True, "max_questions": None, "attention": "split", "pad_to_multiple": 16},
    "shared": SHARED,
    "shared, checkpointing": SHARED | {"checkpointing": "full", "token_budget": 400},
    "shared, selective": SHARED | {"checkpointing": "selective", "token_budget": 400},
    "shared, packed": SHARED | {"packing": True, "attention": "sdpa", "pad_to_multiple": 64},
    "shared, packed, split": SHARED | {"packing": True, "attention": "split", "label_only_logits": True},
    "shared, packed, groups split": SHARED | {"packing": True, "token_budget": 90, "label_only_logits": True},
    "shared, groups split": SHARED | {"token_budget": 110},
    "shared, packed, split, selective": SHARED
    | {"packing": True, "attention": "split", "checkpointing": "selective", "pad_to_multiple": 16},
    "checkpointing": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective"},
    "label-only logits": {"label_only_logits": True},
}
RANKED = {"4x4", "shared, packed", "shared, packed, groups split"}
"""Plans that are run on two ranks as well."""


@dataclass
class Result:
    """One step: loss, flat gradient and its tensors by name; and how the work was cut."""

    loss: float
    flat: Tensor
    tensors: dict[str, Tensor]
    batches: list[Batch] = field(default_factory=list)


def work(task: VqaTask, step: int = 0, size: int = 1, change: Callable[[Batch], Batch] | None = None) -> Result:
    """The step's gradient as training computes it. Ranks run one after another and add to the same buffer."""
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    batches = [b for rank in range(size) for b in task.batches(step, None, Ranks(rank, size))]
    if change is not None:
        batches = [change(batch) for batch in batches]
    steps.accumulate(batches, step)
    loss, out_of_memory, *_ = steps.gradients.tail.tolist()
    assert not out_of_memory
    tensors = {name: p.grad.clone() for name, p in task.trained().items() if p.grad is not None}
    return Result(loss, steps.gradients.all.clone(), tensors, batches)


def distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def assert_same(result: Result, expected: Result) -> None:
    assert expected.flat.norm() > 1e-3 and expected.flat.isfinite().all()
    assert result.loss == pytest.approx(expected.loss, rel=LOSS)
    assert distance(result.flat, expected.flat) < WHOLE
    assert result.tensors.keys() == expected.tensors.keys()
    apart = {name: distance(result.tensors[name], tensor) for name, tensor in expected.tensors.items()}
    assert max(apart.values()) < EACH, max(apart, key=apart.__getitem__)


class Bench:
    """Builds tasks in one folder per question set, and keeps the plain plan's results."""

    def __init__(self, root: Path, models: dict[str, Path]) -> None:
        self.root, self.models = root, models
        self._bases: dict[str, Any] = {}
        self._loaded: dict[str, VqaTask] = {}
        self._plain: dict[tuple[str, int], Result] = {}

    def task(self, scene: Scenario, plan: dict[str, Any] | None = None) -> VqaTask:
        """As VqaTask.load makes it, but files are read once for all plans."""
        recipe = worlds.tiny_recipe(self.models[scene.family], **scene.recipe)
        asked = VqaSetup(recipe, self.root).resolve_auto(Plan(**(plan or {})), detect_machine("cpu")).plan
        first = self._first(scene)
        base, processor = deepcopy(self._base(scene)), first.processor
        model = VisionLanguageModel(base, family_of(scene.family), recipe, asked, CPU, processor.byte_table)
        task = VqaTask(recipe, asked, model, first.encoder, first.processor, first.splits)
        worlds.stir(task)
        return task

    def _base(self, scene: Scenario) -> Any:
        if scene.family not in self._bases:
            recipe = worlds.tiny_recipe(self.models[scene.family], **scene.recipe)
            self._bases[scene.family] = load_base(recipe.model, recipe, CPU)
        return self._bases[scene.family]

    def _first(self, scene: Scenario) -> VqaTask:
        if repr(scene) not in self._loaded:
            folder = self.root / f"{scene.seed}-{'-'.join(map(str, scene.counts))}-{scene.chats}"
            if not folder.exists():
                worlds.write_world(folder, scene.seed, scene.counts, chats=scene.chats)
            recipe = worlds.tiny_recipe(self.models[scene.family], **scene.recipe)
            with patch.object(vqa, "load_base", lambda *_: deepcopy(self._base(scene))):
                self._loaded[repr(scene)] = worlds.make_task(folder, recipe, Plan())
        return self._loaded[repr(scene)]

    def plain(self, scene: Scenario, step: int = 0) -> Result:
        """One question at a time."""
        known = (repr(scene), step)
        if known not in self._plain:
            result = work(self.task(scene), step)
            assert len(result.batches) > 1 and all(b.tokens.shape[0] == 1 for b in result.batches)
            self._plain[known] = result
        return self._plain[known]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Bench:
    return Bench(tmp_path_factory.mktemp("worlds"), tiny_models)


# Every plan against the plain one


FIRST, *OTHERS = SCENARIOS


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_plan_gives_the_gradient_of_one_question_at_a_time(bench: Bench, name: str, plan: str) -> None:
    scene = SCENARIOS[name]
    task = bench.task(scene, PLANS[plan])
    for step in range(task.steps_per_epoch() if task.plan.share_images else 1):
        assert_same(work(task, step), bench.plain(scene, step))
    if plan in RANKED:
        assert_same(work(task, 0, size=2), bench.plain(scene))


TEMPLATES = {
    "1": "look at the left wall near here, then say: {question}",
    "2": "look at the left wall near the red polyp and say what you can see there, in a size: {question}",
    "3": "look at the left wall near the red polyp and say what you can see there, in a colour: {question}",
}
"""All begin with the same words, and two of them go on with the same ones."""
TEXTS = {
    "rows": SHARED,
    "packed": SHARED | {"packing": True, "attention": "sdpa", "pad_to_multiple": 64},
    "packed, split": SHARED | {"packing": True, "attention": "split", "label_only_logits": True},
    "groups split": SHARED | {"packing": True, "attention": "split", "token_budget": 150},
}


def templated(family: str) -> Scenario:
    prompt = {"by": "stage", "templates": TEMPLATES}
    return scenario(family, 12, (9, 4), True, order="by_image", loss_weight="sample", prompt=prompt)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *((FAMILIES[0], plan) for plan in TEXTS),
        *(pytest.param(family, "groups split", marks=pytest.mark.slow) for family in FAMILIES[1:]),
    ],
)
def test_templates_are_shared_as_exactly_as_images(bench: Bench, family: str, plan: str) -> None:
    scene = templated(family)
    found = work(bench.task(scene, TEXTS[plan] | {"share_text": True}), size=1 + (plan == "groups split"))
    assert_same(found, bench.plain(scene))
    images_alone = bench.task(scene, TEXTS[plan]).batches(0, None, Ranks())
    assert tokens_of(found.batches) < 0.85 * tokens_of(images_alone)
    assert max(int(batch.fork.max()) for batch in found.batches) > 1, "a group with several forks"


def tokens_of(batches: Iterable[Batch]) -> int:
    return sum(int((batch.group >= 0).sum()) for batch in batches)


def test_more_ranks_than_work_change_nothing(bench: Bench) -> None:
    scene = SCENARIOS["qwen3 by image, token"]
    task = bench.task(scene, PLANS["shared, packed"])
    last = task.steps_per_epoch() - 1
    parts = [list(task.batches(last, None, Ranks(rank, 20))) for rank in range(20)]
    assert [] in parts, "some rank has nothing to do"
    assert_same(work(task, last, size=20), bench.plain(scene, last))


def test_the_scenarios_hold_what_they_are_for(bench: Bench) -> None:
    """Sharing, splitting, padding and truncation happen in them, so that agreement says something."""
    cut, two, later, textual, keys = 0, 0, 0, 0, 0
    for scene in SCENARIOS.values():
        task = bench.task(scene, PLANS["shared, packed"])
        old = task.encoder
        no_limit = Encoder(old.tokenizer, old.processor, old.system_prompt)
        whole = [no_limit.encode(sample) for sample in task.splits["train"]]
        encoded = [task.encoder.encode(sample) for sample in task.splits["train"]]
        cut += sum(a.target_count < b.target_count for a, b in zip(encoded, whole, strict=True))
        two += sum(len(e.grids) == 2 for e in encoded)
        later += sum(bool(e.image_spans) and e.prefix < e.image_spans[-1][0] for e in encoded)
        textual += sum(not e.grids for e in encoded)
        keys = max(keys, len({e.key for e in encoded if [i.digest for i in e.sample.images] == [zero(task)]}))
        shared, plain = work(task).batches, bench.plain(scene).batches
        assert sum(b.tokens.numel() for b in shared) < 0.9 * sum(b.tokens.numel() for b in plain)
        assert sum(len(b.pixels) for b in shared) < sum(len(b.pixels) for b in plain)
        split = list(bench.task(scene, PLANS["shared, packed, groups split"]).batches(0, None, Ranks()))
        assert len(split) > len(shared) and any((b.branch == 0).any() for b in split)
        assert any((b.group == -1).any() for b in bench.task(scene, PLANS["4x4"]).batches(0, None, Ranks()))
    assert cut >= 2 and two >= 4 and later >= 4 and textual >= 2
    assert keys >= 2, "one image under two system prompts"


def zero(task: VqaTask) -> str:
    return next(i.digest for s in task.splits["train"] for i in s.images if i.path.name == "0.png")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_follows_the_same_rule(bench: Bench) -> None:
    """Plans refuse it on a CPU, where torch has no backward pass for it; the forward pass can be compared."""
    task = bench.task(templated("qwen3_vl"), PLANS["shared, packed"] | {"share_text": True})
    for batch in task.batches(0, None, Ranks()):
        assert batch.fork.any()
        outputs = {}
        for task.model.kernel in ("sdpa", "flex"):
            outputs[task.model.kernel] = task.loss_sum(batch, 0)[1]
        assert distance(outputs["flex"], outputs["sdpa"]) < LOSS


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_and_the_tower_trained(bench: Bench, family: str) -> None:
    scene = scenario(family, 5, (5, 3), train="all", train_vision=True, loss_weight="sample")
    expected = bench.plain(scene)
    assert any(".visual." in name for name in expected.tensors)
    assert any("embed_tokens" in name for name in expected.tensors)
    for name in ("shared, packed, split", "shared, checkpointing", "shared, packed, split, selective", "4x4"):
        assert_same(work(bench.task(scene, PLANS[name])), expected)


def test_the_loss_is_that_of_the_recipe_not_of_the_micro_batches(bench: Bench) -> None:
    """The two weightings differ where answers are of different lengths, and each holds in every plan."""
    both = {weight: bench.plain(scenario("qwen3_vl", 6, (4, 3), loss_weight=weight)) for weight in ("token", "sample")}
    assert abs(both["token"].loss / both["sample"].loss - 1) > 1e-3
    assert distance(both["token"].flat, both["sample"].flat) > 1e-2


def test_where_an_answer_ends_is_the_same_in_every_layout(bench: Bench) -> None:
    """With conversations of several turns, whose answers all end so."""
    ends = {
        end: scenario("qwen3_vl", 2, (6, 2), True, order="by_image", loss_weight="token", answer_end=end)
        for end in ("end_token", "turn")
    }
    expected = bench.plain(ends["turn"])
    for plan in ("4x4", "shared, packed", "shared, packed, split", "shared, packed, groups split"):
        assert_same(work(bench.task(ends["turn"], PLANS[plan])), expected)
    assert distance(expected.flat, bench.plain(ends["end_token"]).flat) > 1e-2


# Dropout is keyed, so that cutting and recomputing draw the same masks

DROPOUT = scenario("qwen3_vl", 7, (5, 3, 2), lora={"r": 4, "alpha": 8, "dropout": 0.1})


@pytest.mark.parametrize("plan", ["4x4", "padded", "packed", "packed, split", "checkpointing", "selective"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_same_elements_are_dropped_however_a_step_is_cut(bench: Bench, plan: str, size: int) -> None:
    assert_same(work(bench.task(DROPOUT, PLANS[plan]), size=size), bench.plain(DROPOUT))


def test_dropout_is_there_and_another_in_each_step(bench: Bench) -> None:
    without = scenario("qwen3_vl", 7, (5, 3, 2), lora={"r": 4, "alpha": 8, "dropout": 0.0})
    assert distance(bench.plain(DROPOUT).flat, bench.plain(without).flat) > 1e-2
    task = bench.task(DROPOUT)
    (batch, *_) = task.batches(0, None, Ranks())
    task.training(True)
    losses = [float(task.loss_sum(batch, step)[0].detach()) for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


def test_sharing_under_dropout_is_another_draw(bench: Bench) -> None:
    """One mask serves a shared prefix: close in kind, not equal. With dropout off the same plan is exact."""
    task = bench.task(DROPOUT, PLANS["shared, packed"])
    assert distance(work(task).flat, bench.plain(DROPOUT).flat) > 1e-3


# The comparison sees faults


def own_branch_lost(batch: Batch) -> Batch:
    """Branches see the branches before them."""
    return replace(batch, branch=torch.zeros_like(batch.branch))


def groups_merged(batch: Batch) -> Batch:
    return replace(batch, group=batch.group.clamp(max=0))


def positions_counted_on(batch: Batch) -> Batch:
    """A later branch goes on after the one before it instead of after the prefix."""
    return replace(batch, positions=batch.positions + 3 * batch.branch)


def images_swapped(batch: Batch) -> Batch:
    return replace(batch, image_source=batch.image_source.roll(1))


def targets_shifted(batch: Batch) -> Batch:
    return replace(batch, target_at=(batch.target_at - 1).clamp(min=0))


def averages_averaged(batch: Batch) -> Batch:
    """Each micro-batch weighs the same, however many answer tokens it holds."""
    return replace(batch, weight=batch.weight / batch.weight.sum() * 16)


FAULTS = {
    fault.__name__: (fault, plan)
    for fault, plan in (
        (own_branch_lost, "shared, packed"),
        (groups_merged, "shared, packed"),
        (positions_counted_on, "shared, packed"),
        (images_swapped, "shared, packed"),
        (targets_shifted, "shared, packed"),
        (averages_averaged, "shared, packed, groups split"),
    )
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(bench: Bench, fault: str) -> None:
    change, plan = FAULTS[fault]
    scene = SCENARIOS["qwen3 by image, token"]
    task = bench.task(scene, PLANS[plan])
    assert distance(work(task).flat, bench.plain(scene).flat) < WHOLE
    assert distance(work(task, change=change).flat, bench.plain(scene).flat) > 1e-3


def test_plain_causal_attention_over_a_packed_row_shows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = SCENARIOS["qwen25 by image, sample, cut"]
    task = bench.task(scene, PLANS["shared, packed"])
    monkeypatch.setattr(attention, "make_mask", lambda *_args, **_named: None)
    assert distance(work(task).flat, bench.plain(scene).flat) > 1e-3


def test_random_dropout_would_show(bench: Bench) -> None:
    """With masks drawn from a stream, as PEFT's own are, another cut of the step is another gradient."""
    from peft.tuners.lora import LoraLayer

    task = bench.task(DROPOUT, PLANS["4x4"])
    for module in task.model.module.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert distance(work(task).flat, bench.plain(DROPOUT).flat) > 1e-3


# Against transformers and PEFT themselves


def plain_transformers(task: VqaTask, folder: Path) -> Any:
    """A model that this package never touched, with the same adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    lora = task.recipe.lora
    config = LoraConfig(r=lora.r, lora_alpha=int(lora.alpha), target_modules=list(lora.target_modules))
    model = get_peft_model(base, config)
    missing = {name for name, p in model.named_parameters() if p.requires_grad} ^ task.trained().keys()
    assert not missing
    state = {name: p.detach().clone() for name, p in task.trained().items()}
    model.load_state_dict(state, strict=False)
    return model.train()


def their_inputs(task: VqaTask, ids: Iterable[int], behind: str = "") -> Iterator[dict[str, Tensor]]:
    """Each question as a script around transformers would prepare it; `behind` follows the end of the answer."""
    from PIL import Image

    tokenizer, processor = task.encoder.tokenizer, task.processor._processor
    markers = task.encoder.family.markers
    for i in ids:
        sample = task.splits["train"][i]
        chat = [
            {
                "role": m.role,
                "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in m.parts],
            }
            for m in sample.messages
        ]
        images = [Image.open(image.path).convert("RGB") for image in sample.images]
        seen = processor(images=images, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(1) // processor.merge_size**2).tolist()
        prompt = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        pieces = prompt.split(markers.image)
        prompt = pieces[0] + "".join(markers.image * n + text for n, text in zip(counts, pieces[1:], strict=True))
        context = tokenizer(prompt, return_tensors="pt")["input_ids"]
        tokens = tokenizer(prompt + sample.answer + markers.end_of_turn + behind, return_tensors="pt")["input_ids"]
        labels = tokens.clone()
        labels[:, : context.shape[1]] = -100
        image_token = tokenizer.convert_tokens_to_ids(markers.image)
        yield {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == image_token).int(),
            "labels": labels,
            **seen,
        }


@pytest.mark.parametrize("plan", [None, "shared, packed, split"], ids=["plain", "shared"])
@pytest.mark.parametrize(
    ("family", "answer_end"), [*((family, "end_token") for family in FAMILIES), (FAMILIES[0], "turn")]
)
def test_a_step_is_that_of_transformers_and_peft(bench: Bench, family: str, answer_end: str, plan: str | None) -> None:
    """`sample`: the mean of the questions' own mean losses, as batch 1 with accumulation gives it. `turn`: labels are
    all that follows the prompt, as a script that masks the prompt alone has them."""
    scene = scenario(family, 8, (7, 2, 1), order="by_image", loss_weight="sample", answer_end=answer_end)
    task = bench.task(scene, PLANS[plan] if plan else None)
    ids = task.step_ids(0)
    model = plain_transformers(task, bench.models[family])
    total = 0.0
    for inputs in their_inputs(task, ids, "\n" if answer_end == "turn" else ""):
        loss = model(**inputs).loss / len(ids)
        loss.backward()
        total += float(loss.detach())
    tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = work(task)
    assert tensors.keys() == ours.tensors.keys()
    flat = torch.cat([tensors[name].flatten() for name in ours.tensors])
    assert_same(ours, Result(total, flat, tensors))


@pytest.mark.parametrize("family", FAMILIES)
def test_token_weighting_is_that_of_num_items_in_batch(bench: Bench, family: str) -> None:
    scene = scenario(family, 8, (7, 2, 1), order="by_image", loss_weight="token")
    task = bench.task(scene, PLANS["shared, packed"])
    ids = task.step_ids(0)
    model = plain_transformers(task, bench.models[family])
    prepared = list(their_inputs(task, ids))
    answers = sum(int((inputs["labels"] != -100).sum()) for inputs in prepared)
    with torch.no_grad():
        total = sum(float(model(**inputs, num_items_in_batch=answers).loss) for inputs in prepared)
    assert answers == task.count(ids)
    assert work(task).loss == pytest.approx(total, rel=LOSS)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_question_alone(bench: Bench, family: str) -> None:
    """Loss and gradients of each question by itself, two images and a system prompt among them."""
    scene = scenario(family, 9, (2, 1), loss_weight="token", effective_batch=1)
    task = bench.task(scene)
    model = plain_transformers(task, bench.models[family])
    for step in range(task.steps_per_epoch()):
        (inputs,) = their_inputs(task, task.step_ids(step))
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        ours = work(task, step)
        flat = torch.cat([tensors[name].flatten() for name in ours.tensors])
        assert_same(ours, Result(float(loss.detach()), flat, tensors))
