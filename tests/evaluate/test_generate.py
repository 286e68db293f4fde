"""Greedy answers of questions that share their images: the tokens of one question at a time, and of transformers' own
`generate` on the saved weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sameday.data.questions.batch import Batch, make_batch
from sameday.data.questions.encode import Encoded, Encoder
from sameday.data.questions.partition import Cut, Item, image_batches, size
from sameday.data.questions.sample import Sample
from sameday.hardware.ranks import Ranks
from sameday.models.families import DEFAULT
from sameday.models.generate import RecordedStep, generate, generate_alone
from sameday.spec.errors import BadInput, EvaluationGivenUp, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.base import ASKED_TO_STOP, FAILED, Answer
from sameday.tasks.vqa.answers import batches_of
from sameday.tasks.vqa.task import VqaTask

NEW = 7
SHARED: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None}
PLANS: dict[str, dict[str, Any]] = {
    "alone": {"eval_token_budget": 1},
    "padded": {"eval_token_budget": 900},
    "shared rows": {"share_images": True, "eval_token_budget": 2000},
    "packed": SHARED,
    "packed, small": SHARED | {"eval_token_budget": 300},
    "split": SHARED | {"attention": "split", "pad_to_multiple": 16},
}


@dataclass(frozen=True)
class World:
    """Questions about one image, about several and about none, of one turn and of two."""

    folder: Path
    recipe: VqaRecipe
    samples: list[Sample]
    ends: frozenset[int]
    """Random weights seldom end an answer: the tokens that they give most often are ends here."""
    expected: list[list[int]]
    """One question at a time, everything computed anew for each token; for most families, where transformers'
    `generate` is compared with them too, together."""

    def task(self, plan: dict[str, Any], device: str = "cpu") -> VqaTask:
        task = worlds.make_task(self.folder, self.recipe, Plan(**plan), device)
        worlds.stir(task)
        task.model.end_tokens = self.ends
        return task


@pytest.fixture(scope="module")
def worlds_of(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Callable[[str], World]:
    sizes = ((48, 48), (64, 32), (32, 32))
    folder = worlds.write_world(tmp_path_factory.mktemp("world"), 3, (3, 1, 2), chats=True, sizes=sizes)

    @cache
    def made(family: str) -> World:
        free = World(folder, worlds.tiny_recipe(tiny_models[family]), [], frozenset(), [])
        task = free.task(SHARED)
        samples = [sample for sample in task.splits["train"] if len(sample.answer) < 99]
        counts = np.bincount([token for each in all_answers(task, samples) for token in each])
        task.model.end_tokens = ends = frozenset(np.argsort(counts)[-3:].tolist())
        expected = [alone(task, sample) for sample in samples] if family == DEFAULT else all_answers(task, samples)
        lengths = {len(tokens) for tokens in expected}
        assert len(lengths) > 2 and max(lengths) == NEW, "answers of uneven length"
        return replace(free, samples=samples, ends=ends, expected=expected)

    return made


@pytest.fixture(scope="module")
def world(worlds_of: Callable[[str], World]) -> World:
    return worlds_of(DEFAULT)


def all_answers(task: VqaTask, samples: Sequence[Sample], done: Sequence[int] = ()) -> list[list[int]]:
    """As tokens."""
    tokens: dict[int, list[int]] = {}
    task.answer = lambda each: Answer(json.dumps(list(each)), len(each))  # type: ignore[method-assign]
    for part in task.answers(samples, NEW, Ranks(), done):
        tokens |= {index: json.loads(each.text) for index, each in part.items()}
    del task.answer
    return [tokens[index] for index in sorted(tokens)]


def alone(task: VqaTask, sample: Sample) -> list[int]:
    prompt = task.encoder.prompt(sample)

    def batch_of(answer: list[int]) -> Any:
        tokens = np.concatenate([prompt.tokens, np.asarray(answer, np.int64)])
        longer = Encoded(sample, tokens, np.zeros(len(tokens), bool), 0, prompt.grids, prompt.image_spans)
        (part,) = task._partition([longer], Cut(False, False, 1), 1)[0]
        return make_batch(task.lay_out([longer], part), task.source.read_image)

    task.training(False)
    return generate_alone(task.model, batch_of, lambda hidden, _: task.model.head(hidden), task.end_tokens, NEW)


@pytest.mark.slow
def test_together_and_one_by_one_give_the_same_tokens(world: World) -> None:
    for name, plan in PLANS.items():
        task = world.task(plan)
        assert all_answers(task, world.samples) == world.expected, name
        assert task.model.module.training, "as it was"


@pytest.mark.slow
def test_shared_keys_are_read_group_by_group(world: World) -> None:
    """As flash attention does it on a GPU, in plain PyTorch here."""
    task = world.task(SHARED)
    task.model.flash = True
    assert all_answers(task, world.samples) == world.expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
def test_a_recorded_forward_pass_is_the_one_that_is_launched(
    worlds_of: Callable[[str], World], tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every family; batches get smaller meanwhile, and memory is used again."""
    made: list[str] = []  # not the steps themselves: memory of those that are gone is to be used again
    first = RecordedStep.__init__

    def counted(self: RecordedStep, *what: Any) -> None:
        made.append("one")
        first(self, *what)

    for family in tiny_models:
        world = worlds_of(family)
        task = world.task(SHARED, "cuda")
        monkeypatch.setattr(RecordedStep, "__init__", counted)
        recorded = all_answers(task, world.samples)
        assert made, "nothing was recorded"
        assert all_answers(task, world.samples) == recorded
        made.clear()
        # Now and then a block is cut otherwise, and one more is taken; recordings that stay would take one each time.
        held, times, block = torch.cuda.memory_reserved(), 4, 2**21
        assert [all_answers(task, world.samples) for _ in range(times)] == [recorded] * times
        assert torch.cuda.memory_reserved() - held < times * block
        made.clear()
        monkeypatch.setattr("sameday.tasks.vqa.answers.generate", partial(generate, record=False))
        assert all_answers(task, world.samples) == recorded, family
        assert not made
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "split"])
def test_compiled_layers_hand_out_their_keys(world: World, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr("sameday.models.vlm.COMPILE_BACKEND", counted)
    compiled = world.task(SHARED | {"compile": "layers", "attention": attention})
    few = all_answers(compiled, world.samples)
    before = len(graphs)
    monkeypatch.setattr("sameday.tasks.vqa.answers.WORTH_COMPILING", len(world.samples))
    assert few == all_answers(compiled, world.samples) == world.expected
    assert len(graphs) > before, "the prefill of many questions is compiled, of few it is not"
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "all"])
def test_in_half_precision_nearly_all_tokens_are_the_same(world: World, train: str) -> None:
    """Where two tokens are about as likely, rounding decides, and what follows differs."""
    half = replace(world, recipe=world.recipe.model_copy(update={"precision": "bf16", "train": train}))
    some = [sample for sample in world.samples if len(sample.images) == 1][:6]
    (one,), (*each,) = (
        list(half.task(plan).answers(some, 2, Ranks())) for plan in (SHARED, SHARED | {"eval_token_budget": 1})
    )
    assert len(each) == len(some) == len(one)
    assert sum(one[i] == answer for part in each for i, answer in part.items()) > 0.6 * len(some)


@pytest.mark.slow
@pytest.mark.parametrize("family", worlds.FAMILIES)
def test_the_tokens_are_those_of_generate_on_the_saved_adapter(
    worlds_of: Callable[[str], World], family: str, tmp_path: Path
) -> None:
    """Loaded by plain PEFT, one question at a time."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    world = worlds_of(family)
    task = world.task(SHARED)
    task.save(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(world.recipe.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(tmp_path)).eval()
    for sample, tokens in zip(world.samples, world.expected, strict=True):
        prompt = task.encoder.prompt(sample)
        given: dict[str, Any] = {"input_ids": torch.from_numpy(prompt.tokens)[None]}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if prompt.grids:
            images = [task.source.read_image(image).tensor.flatten() for image in sample.images]
            given["pixel_values"] = task.model.patches(torch.cat(images), prompt.grids)
            given["image_grid_thw"] = torch.tensor([(1, *grid) for grid in prompt.grids])
            is_image = given["input_ids"] == task.encoder.image_token
            given["mm_token_type_ids"] = is_image.long()
        out = model.generate(
            **given, do_sample=False, max_new_tokens=NEW, eos_token_id=sorted(task.end_tokens), pad_token_id=0
        )
        assert out[0, len(prompt.tokens) :].tolist() == tokens, sample.where


def test_a_prompt_is_what_stands_before_the_last_answer(world: World) -> None:
    """Of the same tokens as in training, whatever ends an answer there; and never cut."""
    task = world.task({})
    short = Encoder(task.encoder.tokenizer, task.processor, max_length=60, answer_end="turn")
    for sample in world.samples:
        whole, prompt = task.encoder.encode(sample), task.encoder.prompt(sample)
        answer = whole.length - int(whole.targets[::-1].argmin())
        assert prompt.tokens.tolist() == whole.tokens[:answer].tolist() == short.prompt(sample).tokens.tolist()
        assert not prompt.targets.any() and prompt.prefix < prompt.length
        assert (prompt.prefix > 0) == bool(sample.images)


# The hook through which a task reads answers out of states


def test_answers_are_read_out_as_the_task_says(world: World) -> None:
    """Rows are a question's number in the batch, also after others have left it."""
    seen: list[tuple[int, Tensor]] = []

    class Shifted(VqaTask):
        def answer_logits(self, states: Tensor, samples: Sequence[Sample]) -> Any:
            assert len(states) == len(samples)
            wanted = torch.tensor([sample.id % 5 for sample in samples])

            def logits(hidden: Tensor, rows: Tensor) -> Tensor:
                seen.append((len(samples), rows))
                return torch.nn.functional.one_hot(wanted[rows] + 300 - len(seen), 512).float()

            return logits

    task = world.task(SHARED)
    task.__class__ = Shifted
    task.model.end_tokens = frozenset({300})
    found = all_answers(task, world.samples)
    assert len(seen) == NEW and len(seen[-1][1]) < seen[-1][0]
    for sample, tokens in zip(world.samples, found, strict=True):
        free = [sample.id % 5 + 299 - step for step in range(NEW)]
        assert tokens == (free[: free.index(300) + 1] if 300 in free else free)


# Which questions are answered together


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=30),
    st.integers(1, 150),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_an_image_stands_in_one_batch(
    asked: list[tuple[int, int]], budget: int, whole: bool, share: bool, packing: bool
) -> None:
    items = [Item(i, 20 + image + branch, 20 + image, image) for i, (image, branch) in enumerate(asked)]
    images = [image for image, _ in asked]
    cut = Cut(share, packing, budget)
    batches = image_batches(items, images, cut, whole)
    members = [[index for unit in batch for index in unit.members] for batch in batches]
    assert sorted(index for batch in members for index in batch) == list(range(len(asked)))
    for image in set(images):
        holding = [
            batch for batch, inside in zip(batches, members, strict=True) if image in {images[i] for i in inside}
        ]
        alone = [item for item in items if images[item.index] == image]
        fits = all(size(batch, packing) <= budget for batch in image_batches(alone, images, cut, True))
        assert len(holding) == 1 or not (whole or fits)
    for batch, inside in zip(batches, members, strict=True):
        assert size(batch, packing) <= budget or len({images[i] for i in inside}) == 1


def test_tokens_that_may_come_count(world: World) -> None:
    task = world.task(SHARED | {"eval_token_budget": 200})
    prompts = [task.encoder.prompt(sample) for sample in world.samples]
    few, many = (len(batches_of(task, prompts, new)) for new in (1, 100))
    assert few < many


def test_what_is_done_changes_no_other_batch(world: World) -> None:
    """A batch that is done in part comes whole, with the same questions beside each other."""
    task = world.task(SHARED | {"eval_token_budget": 200})
    parts = [sorted(part) for part in task.answers(world.samples, 2, Ranks())]
    assert len(parts) > 2
    done = [*parts[0], parts[1][0]]
    assert [sorted(part) for part in task.answers(world.samples, 2, Ranks(), done)] == parts[1:]


# Memory, and requests to stop


class Small:
    """A model that has memory for so many questions at a time."""

    def __init__(self, task: VqaTask, most: int) -> None:
        self.hidden, self.most, self.sizes = task.model.hidden, most, list[int]()

    def __call__(self, batch: Batch, *args: Any, **more: Any) -> Tensor:
        self.sizes.append(len(batch.sample_ids))
        if len(batch.sample_ids) > self.most:
            raise torch.OutOfMemoryError("planted")
        return self.hidden(batch, *args, **more)


def test_without_room_it_goes_on_in_halves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    task = world.task(SHARED)
    small = Small(task, 2)
    monkeypatch.setattr(task.model, "hidden", small)
    assert all_answers(task, world.samples) == world.expected
    assert max(small.sizes) > 2 and sum(size for size in small.sizes if size <= 2) == len(world.samples)


def test_one_question_that_is_too_large_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's questions are not separated where they must stay together."""
    task = world.task(SHARED)
    monkeypatch.setattr(VqaTask, "whole_images", True)
    small = Small(task, 2)
    monkeypatch.setattr(task.model, "hidden", small)
    with pytest.raises(RunStopped, match=r"out of memory in evaluation with a single question, train\.jsonl:"):
        all_answers(task, world.samples)
    assert small.sizes[-1] > 2 and task.model.module.training


def test_a_request_to_stop_is_heeded_between_tokens(world: World) -> None:
    task = world.task(SHARED | {"eval_token_budget": 200})
    parts = list(task.answers(world.samples, NEW, Ranks()))
    asked = iter(range(10**6))
    task.stop_asked = lambda: next(asked) >= NEW + 2  # type: ignore[method-assign]
    found: list[dict[int, Answer]] = []
    with pytest.raises(EvaluationGivenUp):
        found.extend(task.answers(world.samples, NEW, Ranks()))
    assert found[0] == parts[0] and not any(found[-1:][0]) and len(found) < len(parts)


class OtherRank(Ranks):
    """The second of two, which was ended in its first batch: asked to stop, or by what `failed` says."""

    def __init__(self, failed: BadInput | None = None) -> None:
        super().__init__(0, 2)
        self.failed = failed

    def gather(self, value: Any) -> list[Any]:
        if value is None:
            return [None, self.failed]
        return [value, replace(value, answers={}, flags=ASKED_TO_STOP if self.failed is None else FAILED)]


def test_all_ranks_stop_where_one_was_asked_to(world: World) -> None:
    """Between two rounds of batches; what the others have is not lost."""
    task = world.task(SHARED | {"eval_token_budget": 200})
    found: list[dict[int, Answer]] = []
    with pytest.raises(EvaluationGivenUp):
        found.extend(task.answers(world.samples, 2, OtherRank()))
    assert found == list(task.answers(world.samples, 2, Ranks()))[:1]


def test_all_ranks_stop_where_one_cannot_read_an_image(world: World) -> None:
    task = world.task(SHARED | {"eval_token_budget": 200})
    found: list[dict[int, Answer]] = []
    with pytest.raises(BadInput, match="unreadable") as raised:
        found.extend(task.answers(world.samples, 2, OtherRank(BadInput("unreadable"))))
    assert not raised.value.alone
    assert found == list(task.answers(world.samples, 2, Ranks()))[:1]
