"""Multi-head chain of thought: batched over an image's questions and one question at a time are the same mathematics,
and no image's context reaches another's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import worlds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sameday.data.order import Place
from sameday.data.questions import tree
from sameday.data.questions.batch import make_batch
from sameday.data.questions.layout import lay_out
from sameday.data.questions.sample import Sample
from sameday.hardware.machine import Machine, detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models.heads import Stages
from sameday.models.vlm import VisionLanguageModel, load_base
from sameday.spec.errors import BadInput
from sameday.spec.evaluation import Evaluation
from sameday.spec.plan import Plan
from sameday.tasks.base import Answer, lower_budget
from sameday.tasks.cot.batch import CotBatch
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.cot.task import CotTask
from sameday.train.steps import Steps

NEAR = 1e-5
"""The largest relative difference of a loss, or of the gradient of one kind of tensor."""
SHARED = {"share_images": True, "max_questions": None, "packing": True, "label_only_logits": True}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared, packed": SHARED,
    "shared, split attention, padded": SHARED | {"attention": "split", "pad_to_multiple": 16},
    "shared rows, checkpointing": {"share_images": True, "max_questions": None, "checkpointing": "full"},
    "packed, small budget": {"packing": True, "max_questions": None, "token_budget": 90},
    "shared, a budget of one": SHARED | {"token_budget": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_tiny(tmp_path_factory.mktemp("model"), text={"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about one and about two images and about none, other system prompts, conversations of two turns."""
    return worlds.write_world(tmp_path_factory.mktemp("world"), 3, (5, 4, 3, 2), chats=True, sizes=((48, 32), (32, 64)))


Make = Callable[..., CotTask]


@pytest.fixture(scope="module")
def make(world: Path, model: Path) -> Make:
    """A task of this world, its weights away from their start. Files are read once."""
    first, cpu = worlds.make_cot(world, worlds.cot_recipe(model), Plan()), torch.device("cpu")
    base = load_base(str(model), first.recipe, cpu)

    def made(plan: dict[str, Any] | None = None, stirred: bool = True, **changes: Any) -> CotTask:
        recipe = worlds.cot_recipe(model, **changes)
        asked = CotSetup(recipe, world).resolve_auto(Plan(**(plan or {})), detect_machine("cpu")).plan
        table = first.processor.byte_table
        computing = VisionLanguageModel(deepcopy(base), first.model.family, recipe, asked, cpu, table)
        task = CotTask(recipe, asked, computing, first.encoder, first.processor, dict(first.splits))
        if stirred:
            worlds.stir(task)
        return task

    return made


# One question at a time, written out


def reference(task: CotTask, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    """The step's loss and gradients: a loop over images and their questions, each through the backbone by itself."""
    heads, recipe = dict(task.heads.named_parameters()), task.recipe
    images: dict[Any, list[Sample]] = {}
    for sample in samples:
        pixels = tuple(np.asarray(task.source.read_image(image).tensor).tobytes() for image in sample.images)
        images.setdefault(pixels or ("no image", sample.id), []).append(sample)
    total, divisor = torch.zeros(()), 0.0
    for members in images.values():
        states, answers = [], []
        for sample in members:
            encoded = task.encoder.encode(sample)
            layout = lay_out(
                [[encoded]],
                packing=False,
                family=task.encoder.family,
                merge_size=task.encoder.merge_size,
                loss_weight="token",
                pad_token=0,
            )
            states.append(task.model.hidden(make_batch(layout, task.source.read_image)))
            answers.append((np.flatnonzero(encoded.targets), encoded.tokens))

        def prompt_end(at: np.ndarray) -> int:
            """The place before the first token of the last answer."""
            return next(int(t) for t in reversed(at) if t - 1 not in at) - 1

        def mean(stage: int) -> Tensor:
            of = [
                state[prompt_end(at)]
                for state, (at, _), sample in zip(states, answers, members, strict=True)  # noqa: B023
                if sample.stage == stage
            ]
            return sum(of) / len(of) if of else torch.zeros(task.heads.width)  # type: ignore[return-value]

        first, second = mean(1), mean(2)
        for state, (at, tokens), sample in zip(states, answers, members, strict=True):
            h = state[torch.from_numpy(at - 1)]
            if sample.stage == 2:
                h = h + heads["P.21"] @ first
            if sample.stage == 3:
                h = h + heads["P.31"] @ first + heads["P.32"] @ second
            a, b = heads[f"A.{sample.stage}"], heads[f"B.{sample.stage}"]
            logits = task.model.head(h) + (h @ a.T) @ b.T
            each = F.cross_entropy(logits, torch.from_numpy(tokens[at]), reduction="none")
            by_sample = recipe.loss_weight == "sample"
            total = total + recipe.heads.weights[sample.stage or 0] * (each.mean() if by_sample else each.sum())
            divisor += 1 if by_sample else len(at)
    loss = total / divisor
    trained = task.trained()
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return loss.detach(), {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), gradients, strict=True)
    }


def choose(task: CotTask, samples: list[Sample]) -> None:
    """Train on these alone."""
    task.splits = {"train": samples, "val": samples}
    task.places = [Place(s.id, s.image_key, s.stage) for s in samples]
    task._epoch.cache_clear()
    task._starts = [0]


def batched(task: CotTask, ranks: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The first step as training computes it. Ranks run one after another and add to the same buffer."""
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    steps.accumulate((batch for rank in range(ranks) for batch in task.batches(0, None, Ranks(rank, ranks))), 0)
    gradients = {name: p.grad.clone() for name, p in task.trained().items() if p.grad is not None}
    return float(steps.gradients.tail[0]), gradients


def kind(name: str) -> str:
    return name.split(".")[1] if name.startswith("heads") else "lora_A" if ".lora_A." in name else "lora_B"


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of the gradients of each kind of tensor."""
    found = {}
    for which in sorted({kind(name) for name in b}):
        x, y = (torch.cat([g[name].flatten() for name in b if kind(name) == which]) for g in (a, b))
        found[which] = float((x - y).norm() / y.norm().clamp_min(1e-12)) if y.any() else float(x.abs().max())
    return found


@pytest.fixture(scope="module")
def tasks(make: Make) -> dict[str, CotTask]:
    weights = {"rank": 3, "weights": {1: 0.5, 3: 2.0}}
    some: dict[str, Any] = {"plain": {"loss_weight": "sample"}, "shared, packed": {"heads": weights}}
    return {name: make(plan, effective_batch=10**6, **some.get(name, {})) for name, plan in PLANS.items()}


@pytest.fixture(scope="module")
def everyone(make: Make) -> list[Sample]:
    return list(make().splits["train"])


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), plan=st.sampled_from(sorted(PLANS)))
def test_batched_is_one_question_at_a_time(
    tasks: dict[str, CotTask], everyone: list[Sample], data: st.DataObject, plan: str
) -> None:
    """Over random mixtures of stages, images without a stage, and numbers of images."""
    chosen = data.draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=8, unique_by=lambda sample: sample.id))
    stages = data.draw(st.lists(st.sampled_from((1, 2, 3)), min_size=len(chosen), max_size=len(chosen)))
    samples = [replace(sample, stage=stage) for sample, stage in zip(chosen, stages, strict=True)]
    task = tasks[plan]
    choose(task, samples)
    loss, gradients = batched(task)
    expected, theirs = reference(task, samples)
    assert loss == pytest.approx(float(expected), rel=NEAR)
    off = apart(gradients, theirs)
    assert max(off.values()) < NEAR, off


def test_forks_leave_stages_and_contexts_as_they_are(
    make: Make, everyone: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few words in these questions a fork must be worth one token to be there at all."""
    monkeypatch.setattr(tree, "LEAST", 1)
    task = make(SHARED | {"share_text": True, "attention": "split"}, effective_batch=10**6)
    assert any(batch.fork.any() for batch in task.batches(0, None, Ranks()))
    loss, gradients = batched(task)
    expected, theirs = reference(task, everyone)
    assert loss == pytest.approx(float(expected), rel=NEAR)
    assert max(apart(gradients, theirs).values()) < NEAR


def test_full_heads_are_the_same_mathematics(make: Make, everyone: list[Sample]) -> None:
    """B·A as one matrix gives the same logits, and the loss the same gradient of everything else."""
    low, full = make(SHARED, effective_batch=10**6), make(SHARED, effective_batch=10**6, heads={"rank": "full"})
    with torch.no_grad():
        for name, parameter in full.trained().items():
            if not name.startswith("heads.W"):
                parameter.copy_(low.trained()[name])
        for stage in "123":
            full.heads.W[stage].copy_(low.heads.B[stage] @ low.heads.A[stage])
    (loss, ours), (same, theirs) = batched(low), batched(full)
    assert loss == pytest.approx(same, rel=NEAR)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 8 and not {f"heads.A.{stage}" for stage in "123"} & shared
    off = apart({name: ours[name] for name in shared}, {name: theirs[name] for name in shared})
    assert max(off.values()) < NEAR, off


def test_training_starts_from_the_base_model(make: Make, world: Path, model: Path) -> None:
    task = make(SHARED, stirred=False, effective_batch=10**6)
    plain = worlds.make_task(world, worlds.tiny_recipe(model, effective_batch=10**6, order="listed"), Plan(**SHARED))
    (ours,), (theirs,) = (list(each.batches(0, None, Ranks())) for each in (task, plain))
    assert set(ours.sample_ids) == set(theirs.sample_ids)
    (loss, _), (same, _) = task.loss_sum(ours, 0), plain.loss_sum(theirs, 0)
    assert loss.item() == pytest.approx(same.item(), rel=1e-6)
    zero = {name for name, p in task.trained().items() if name.startswith("heads") and not p.any()}
    assert zero == {f"heads.{name}" for name in ("B.1", "B.2", "B.3", "P.21", "P.31", "P.32")}
    again = make(SHARED, stirred=False)
    assert all(torch.equal(p, again.trained()[name]) for name, p in task.trained().items()), "keyed by seed and name"
    assert not torch.equal(task.heads.A["1"], task.heads.A["2"])
    assert not torch.equal(task.heads.A["1"], make(stirred=False, seed=1).heads.A["1"])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("rank", [3, "full"])
def test_other_formats(make: Make, rank: Any) -> None:
    """bf16 as autocast computes it, and float64, which `sameday verify` asks where float32 leaves a doubt."""
    exact = make({}, heads={"rank": rank})
    half = make({"label_only_logits": True}, precision="bf16", heads={"rank": rank})
    batches = [next(iter(each.batches(0, None, Ranks()))) for each in (exact, half)]
    near, _ = half.loss_sum(batches[1], 0)
    loss, _ = exact.loss_sum(batches[0], 0)
    exact.module().double()
    double, losses = exact.loss_sum(batches[0], 0)
    double.backward()
    assert exact.heads.P["21"].dtype == torch.float64 and losses.dtype == torch.float32
    assert loss.item() == pytest.approx(double.item(), rel=1e-5) == pytest.approx(near.item(), rel=0.05)
    near.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in half.trained().values())


# Contexts


def two_images(task: CotTask, everyone: list[Sample]) -> CotBatch:
    """Both have questions of all stages, in one row."""
    images: dict[str, list[Sample]] = {}
    for sample in everyone:
        images.setdefault(sample.image_key, []).append(sample)
    whole = [members[:3] for members in images.values() if len(members) >= 3][:2]
    samples = [replace(sample, stage=stage) for members in whole for stage, sample in enumerate(members, 1)]
    choose(task, samples)
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch) and batch.images == 2
    return batch


def reach(task: CotTask, batch: CotBatch) -> dict[tuple[int, int], float]:
    """The largest derivative of the losses of one image's questions with respect to the states of another's."""
    found = {}
    hidden = task.model.hidden(batch).detach().requires_grad_()
    losses = F.cross_entropy(task.logits(batch, hidden), batch.target, reduction="none")
    of_target = torch.tensor([0, 0, 0, 1, 1, 1])[batch.owner]
    for image in (0, 1):
        (gradient,) = torch.autograd.grad(losses[of_target == image].sum(), hidden, retain_graph=True)
        for other in (0, 1):
            found[image, other] = float(gradient[batch.target_at[of_target == other]].abs().max())
    return found


def test_contexts_never_cross_images(tasks: dict[str, CotTask], everyone: list[Sample]) -> None:
    task = tasks["shared, packed"]
    found = reach(task, two_images(task, everyone))
    assert found[0, 1] == found[1, 0] == 0.0, "exactly nothing"
    assert min(found[0, 0], found[1, 1]) > 1e-3
    # And it shows where they do.
    of = Stages.of
    with patch.object(Stages, "of", lambda stages, images: of(stages, ["one"] * len(images))):
        (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch) and batch.images == 1
    found = reach(task, batch)
    assert min(found[0, 1], found[1, 0]) > 1e-3


def test_images_of_equal_content_are_one_whatever_their_names(tmp_path: Path, model: Path) -> None:
    home = worlds.write_world(tmp_path, 0, (2,), hard=False)
    shutil.copy(home / "images/0.png", home / "images/copy.png")
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    rows = [rows[0] | {"stage": 1}, rows[1] | {"stage": 3, "image": "copy.png"}]
    chat = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "no"}]
    rows += [{"messages": chat, "images": [], "stage": 2}] * 2
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = worlds.make_cot(home, worlds.cot_recipe(model, effective_batch=4, order="listed"), Plan(**SHARED))
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch)
    assert batch.sample_ids == (1, 2, 3, 4) and batch.image.tolist() == [0, 0, 1, 2]
    assert batch.share.tolist() == [[1, 0], [0, 0], [0, 1], [0, 1]]
    assert len(batch.grids) == 1, "the tower sees it once"


# Whole images in steps and micro-batches


def test_epochs_of_whole_images(make: Make) -> None:
    task = make(effective_batch=5, num_epochs=4)
    images = {place.id: place.image for place in task.places}
    starts = [task.epoch_start(epoch) for epoch in range(6)]
    assert starts == sorted(set(starts)) and task.steps_per_epoch() == starts[1]
    ends = task.epoch_ends(starts[4])
    assert [step for step in range(1, starts[4] + 1) if step in ends] == starts[1:5]
    for epoch in range(4):
        steps = [task.step_ids(step) for step in range(starts[epoch], starts[epoch + 1])]
        assert sorted(i for step in steps for i in step) == list(range(len(task.places)))
        for step in steps[:-1]:
            last = images[task.places[step[-1]].id]
            without = [i for i in step if task.places[i].image != last]
            assert len(without) < 5 <= len(step), "images are taken until the batch is reached, and no further"
        of_step = [{task.places[i].image for i in step} for step in steps]
        assert sum(map(len, of_step)) == len(set(images.values())), "no image is in two steps"
    assert task.step_ids(starts[1]) != task.step_ids(0), "images are shuffled anew"
    assert make(effective_batch=5).step_ids(starts[2]) == task.step_ids(starts[2]), "asked for without those before"


@pytest.mark.parametrize("plan", [{}, SHARED, SHARED | {"token_budget": 1}, {"packing": True, "max_questions": 4}])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_micro_batch_holds_whole_images(make: Make, plan: dict[str, Any], ranks: int) -> None:
    task = make(plan, effective_batch=9)
    for step in range(task.steps_per_epoch()):
        keys = {task.splits["train"][i].id: task.places[i].image for i in task.step_ids(step)}
        batches = [b for rank in range(ranks) for b in task.batches(step, None, Ranks(rank, ranks))]
        seen = [i for batch in batches for i in batch.sample_ids]
        assert sorted(seen) == sorted(keys)
        held = [{keys[i] for i in batch.sample_ids} for batch in batches]
        assert sum(map(len, held)) == len(set(keys.values())), "an image is in one micro-batch"
        if plan in ({}, SHARED | {"token_budget": 1}):
            assert all(len(images) == 1 for images in held)


def test_ranks_share_whole_images(make: Make) -> None:
    """More ranks than a step has images: some have nothing to do, and the sum is the same."""
    task = make(SHARED, effective_batch=6)
    (loss, gradients), (alone, theirs) = batched(task, ranks=9), batched(task)
    assert loss == pytest.approx(alone, rel=NEAR) and max(apart(gradients, theirs).values()) < NEAR
    assert any(not list(task.batches(0, None, Ranks(rank, 9))) for rank in range(9))


def test_memory_that_runs_out_with_one_image(make: Make) -> None:
    task = make(SHARED, effective_batch=9)
    whole = task.smaller_budget(0, None, Ranks())
    assert whole is not None and len(list(task.batches(0, whole, Ranks()))) > 1
    assert task.smaller_budget(0, 1, Ranks()) is None
    with pytest.raises(Exception, match="out of memory with a single image with all of its questions in a micro-batch"):
        lower_budget("question", task, 0, 1, Ranks(), print)


# Losses and scores by stage


def test_losses_by_stage_are_parts_of_the_loss(make: Make, everyone: list[Sample]) -> None:
    weights = {1: 0.5, 2: 0.0, 3: 2.0}
    task = make(SHARED, effective_batch=6, heads={"rank": 3, "weights": weights})
    steps = Steps(task.recipe, task.plan, task, Ranks())
    for good in steps.run(range(task.steps_per_epoch())):
        ids = task.step_ids(good.step)
        counts = dict(zip((1, 2, 3), task.part_counts(ids), strict=True))
        assert sum(counts.values()) == task.count(ids)
        assert set(good.parts) == {f"loss_stage{stage}" for stage, n in counts.items() if n}
        parts = sum(weights[s] * n * good.parts[f"loss_stage{s}"] for s, n in counts.items() if n)
        assert good.loss == pytest.approx(parts / task.count(ids), rel=1e-5)
    steps.close()


def test_scores_by_stage(make: Make) -> None:
    task = make(SHARED)
    scores = task.evaluate("val", Ranks())
    parts = make({}).evaluate("val", Ranks())
    assert scores.keys() == parts.keys() and scores["samples"] == len(task.splits["val"])
    assert scores["loss"] == pytest.approx(parts["loss"], rel=1e-5)
    asked = {stage: sum(s.stage == stage for s in task.splits["val"]) for stage in (1, 2, 3)}
    assert {name for name in scores if "stage" in name} == {f"exact_match_stage{s}" for s, n in asked.items() if n}
    with patch.object(task, "_judged", lambda batch: (torch.ones(len(batch.target)), batch.stage != 2)):
        scores = task.evaluate("val", Ranks())
    assert scores["loss"] == pytest.approx(1.0) and scores["exact_match"] == 1 - asked[2] / sum(asked.values())
    assert all(scores[f"exact_match_stage{s}"] == float(s != 2) for s, n in asked.items() if n)


# Generation


def test_what_generation_asks_is_what_training_computes(tasks: dict[str, CotTask], everyone: list[Sample]) -> None:
    task = tasks["shared rows, checkpointing"]
    choose(task, everyone)
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch) and task.whole_images and batch.images > 4
    by_id = {sample.id: sample for sample in everyone}
    with torch.no_grad():
        hidden = task.model.hidden(batch)
        expected = task.logits(batch, hidden)
        logits = task.answer_logits(hidden[batch.prompt_at], [by_id[i] for i in batch.sample_ids])
        given = logits(hidden[batch.target_at], batch.owner)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


# What a step costs


@pytest.mark.parametrize("plan", [{}, SHARED], ids=["plain", "shared"])
def test_answers_are_generated_with_heads_and_contexts(make: Make, plan: dict[str, Any]) -> None:
    """The first token of every answer is the likeliest that training computes, which without heads is another one."""
    task = make(plan)
    samples = task.splits["train"]
    with patch.object(CotTask, "answer", lambda _self, tokens: Answer("", int(tokens[0]))):
        parts = list(task.answers(samples, 1, Ranks()))
    first = {number: answer.tokens for part in parts for number, answer in part.items()}
    encoded = [task.encoder.encode(sample) for sample in samples]
    likeliest, headless = {}, {}
    for part in task._partition(encoded, task._cut(None), 1)[0]:
        batch = task._build(encoded, part)
        with torch.no_grad():
            hidden = task.model.hidden(batch)
            with_heads, base = task.logits(batch, hidden), task.model.logits(hidden, batch.target_at)
        owners = batch.owner.tolist()
        for number, index in enumerate(index for unit in part for index in unit.members):
            if sum(message.role == "assistant" for message in samples[index].messages) == 1:
                at = owners.index(number)
                likeliest[index], headless[index] = int(with_heads[at].argmax()), int(base[at].argmax())
    assert {index: first[index] for index in likeliest} == likeliest != headless
    assert len(first) == len(samples) and len(likeliest) > len(samples) // 2


def test_a_cascade_is_of_another_kind(make: Make, world: Path) -> None:
    task = make()
    with pytest.raises(BadInput, match="cascade asks stage by stage, and here all questions of an image are asked"):
        CotSetup(task.recipe, world).check_evaluation(Evaluation(split="train", cascade=True), task.splits)


@pytest.mark.parametrize("rank", [3, "full"])
def test_the_heads_are_counted(make: Make, rank: Any) -> None:
    task = make(SHARED, effective_batch=8, heads={"rank": rank})
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch)
    hidden = task.model.hidden(batch).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        task.logits(batch, hidden).sum().backward()
    heads, targets = task.heads, len(batch.target_at)
    frozen = 4 * targets * heads.width * heads.vocabulary  # forward, and the gradient of its input
    executed, needed = heads.flops(targets, batch.images)
    assert executed.total + frozen == counter.get_total_flops()
    counted, cost = task.flops(batch), task.cost(0, None, Ranks())
    assert counted.executed.head.total == executed.total + frozen
    assert counted.needed.head.total == needed.total + frozen < counted.executed.head.total
    assert (cost.executed_flop, cost.flop) == (counted.executed.total, counted.needed.total)


def test_an_automatic_plan_leaves_room_for_the_heads(world: Path, model: Path) -> None:
    small, large = (CotSetup(worlds.cot_recipe(model, heads={"rank": rank}), world) for rank in (1, "full"))
    pairs = [
        tuple(
            setup.choose_plan(Machine("cuda", "a GPU", memory, 8, True), 1)[0].checkpointing for setup in (small, large)
        )
        for memory in range(30_000_000, 60_000_000, 500_000)
    ]
    assert set(pairs) == {("full", "full"), ("none", "full"), ("none", "none")}


# Refusals


def refused(**recipe: Any) -> str:
    with pytest.raises(ValueError) as error:
        worlds.cot_recipe(Path("model"), **recipe)
    return str(error.value)


def test_orders_that_take_an_image_apart_are_refused() -> None:
    assert "order shuffle spreads an image's questions over the epoch" in refused(order="shuffle")
    assert "order curriculum takes stages apart" in refused(order="curriculum")
    assert "allowed: by_image (images at random), listed (images as in the file)" in refused(order="shuffle")
    assert "order.max_per_image 4 would take an image's questions apart" in refused(
        order={"kind": "by_image", "max_per_image": 4}
    )
    assert worlds.cot_recipe(Path("m")).order.kind == "by_image"
    assert worlds.cot_recipe(Path("m"), order="listed").order.kind == "listed"


def test_heads_that_make_no_sense_are_refused() -> None:
    assert "must be 1 to 8192, or 'full'" in refused(heads={"rank": 0})
    assert "there is no stage 4; allowed: 1, 2, 3" in refused(heads={"weights": {4: 1.0}})
    assert "each must be at least 0, and one of them more" in refused(heads={"weights": {1: -1.0}})
    assert "each must be at least 0, and one of them more" in refused(heads={"weights": {1: 0, 2: 0, 3: 0}})
    some = worlds.cot_recipe(Path("m"), heads={"weights": {3: 2}})
    assert some.heads.weights == {1: 1.0, 2: 1.0, 3: 2.0}
    again = type(some).model_validate(some.model_dump(mode="json"))
    assert again == some and again.fingerprint == some.fingerprint
    assert (
        worlds.cot_recipe(Path("m")).fingerprint
        == worlds.cot_recipe(Path("m"), heads={"rank": 3, "weights": {1: 1}}).fingerprint
    )


def test_a_line_without_a_stage_is_refused_with_its_place(tmp_path: Path, model: Path) -> None:
    home = worlds.write_world(tmp_path, 0, (5,), hard=False)
    rows = [json.loads(line) | {"stage": 2} for line in (home / "train.jsonl").read_text().splitlines()]
    rows[1]["stage"], rows[3]["stage"] = None, 4
    rows[4]["answer"] = 7.5
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = worlds.cot_recipe(model)
    with pytest.raises(BadInput) as error:
        CotSetup(recipe, home).audit(print, ("train",))
    assert str(error.value).splitlines() == [
        "2 problems in 2 lines:",
        "train.jsonl:2: has no 'stage'; needed: 1, 2, 3",
        "train.jsonl:4: 'stage' is 4; allowed: 1, 2, 3",
        "recipe.data.on_bad=skip leaves them out",
    ]
    skip = recipe.model_copy(update={"data": recipe.data.model_copy(update={"on_bad": "skip"})})
    said: list[str] = []
    audited = CotSetup(skip, home).audit(said.append, ("train",))
    assert audited.sizes == {"train": 3} and "has no 'stage'; needed: 1, 2, 3" in said[-1]


def test_the_best_weights_of_a_stage_need_questions_of_it(tmp_path: Path, model: Path) -> None:
    home = worlds.write_world(tmp_path, 0, (4,), hard=False)
    rows = [json.loads(line) | {"stage": 1} for line in (home / "val.jsonl").read_text().splitlines()]
    (home / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stage in (1, 3):
        setup = CotSetup(worlds.cot_recipe(model, best=f"exact_match_stage{stage}"), home)
        if stage == 1:
            assert setup.audit(print).sizes == {"train": 4, "val": 4}
        else:
            with pytest.raises(BadInput) as error:
                setup.audit(print)
            said = "recipe.best.metric exact_match_stage3: data.val has no question of stage 3"
            assert str(error.value) == said
