"""Families whose images are squares of one size: the same loss, gradients, logits and answers in every layout, and as
transformers' own processor, forward and `generate` and plain PEFT give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_gradients import PLANS, Bench, Result, Scenario, assert_same, distance, scenario, work
from worlds import SQUARE

from sameday.data.questions.sample import Sample
from sameday.hardware.ranks import Ranks
from sameday.models.families import family_of
from sameday.tasks.base import Answer
from sameday.tasks.vqa.task import VqaTask
from sameday.verify.peer import loop

pytestmark = pytest.mark.slow

NEW = 6
"""Tokens of an answer."""
RECOMPUTED = ("shared, checkpointing", "shared, selective")
WITHOUT_SPLIT = ("4x4", "packed", "shared", *RECOMPUTED, "shared, packed", "shared, packed, groups split")
WITH_SPLIT = (*WITHOUT_SPLIT, "packed, split", "shared, packed, split", "shared, packed, split, selective")
POSSIBLE = {"gemma3": WITHOUT_SPLIT, "llava": WITH_SPLIT}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Bench:
    return Bench(tmp_path_factory.mktemp("worlds"), dict(tiny_models))


def scene(family: str, **recipe: Any) -> Scenario:
    """Two images in a question, system prompts, conversations, and a question about none are among them."""
    return scenario(family, 2, (6, 2), True, order="by_image", **recipe)


@pytest.mark.parametrize("family", SQUARE)
def test_every_plan_gives_the_gradient_of_one_question_at_a_time(bench: Bench, family: str) -> None:
    here = scene(family, loss_weight="token")
    for plan in POSSIBLE[family]:
        task = bench.task(here, PLANS[plan])
        assert_same(work(task), bench.plain(here))
        assert_same(work(task, size=2), bench.plain(here))


@pytest.mark.parametrize("family", SQUARE)
def test_all_weights_and_the_tower_trained(bench: Bench, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    here = scenario(family, 5, (3, 2), train="all", train_vision=True, loss_weight="sample", effective_batch=6)
    expected = bench.plain(here)
    trained = {name for name, tensor in expected.tensors.items() if tensor.any()}
    for part in ("vision_tower", "multi_modal_projector", "embed_tokens"):
        assert any(part in name for name in trained), part
    task = bench.task(here, PLANS["shared, packed"])
    found = work(task)
    # What is added to all keys changes no softmax: the gradient of such a bias is nothing but rounding.
    for each in (found, expected):
        each.tensors = {name: tensor for name, tensor in each.tensors.items() if not name.endswith("k_proj.bias")}
    assert_same(found, expected)
    task.save(tmp_path)
    library = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(library[name], tensor) for name, tensor in task.model.module.state_dict().items())


def test_a_window_counts_places_of_the_question_and_not_of_the_row(bench: Bench) -> None:
    """A fault of one layout alone, which a comparison with the other finds."""
    here = scene("gemma3", loss_weight="token")
    family, made = family_of("gemma3"), family_of("gemma3").sight

    def of_the_row(text: Any, batch: Any, kind: str) -> Any:
        sight = made(text, batch, kind)
        assert sight is not None
        return sight._replace(position=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens))

    with patch.object(family, "sight", of_the_row):
        wrong = work(bench.task(here, PLANS["shared, packed"]))
        alone = work(bench.task(here))
    assert distance(wrong.flat, bench.plain(here).flat) > 1e-3
    assert_same(alone, bench.plain(here))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_follows_the_same_rule(bench: Bench) -> None:
    """Plans refuse it on a CPU, where torch has no backward pass for it; the forward pass can be compared."""
    task = bench.task(scene("gemma3"), PLANS["shared, packed"])
    (batch, *_) = task.batches(0, None, Ranks())
    losses = []
    for task.model.kernel in ("sdpa", "flex"):
        losses.append(task.loss_sum(batch, 0)[1])
    assert distance(losses[1], losses[0]) < 1e-6


# transformers' own


def their_questions(task: VqaTask, ids: Sequence[int], closing: str) -> Iterator[dict[str, Any]]:
    """Through the library's processor for text and images together, its chat template included."""
    recipe = task.recipe
    fields = ("revision", "min_pixels", "max_pixels", "image_backend", "system_prompt", "answer_end", "max_length")
    job = {"model": recipe.model, "closing": closing} | {name: getattr(recipe, name) for name in fields}
    processor = loop.load_processor(job)
    for question in task.conversations(ids):
        yield loop.prepare(processor, question, job)


@pytest.mark.parametrize(
    ("family", "plan"),
    [*((family, plan) for family in SQUARE for plan in (None, "shared, packed")), ("llava", "shared, packed, split")],
)
def test_a_step_is_that_of_transformers_and_peft(bench: Bench, family: str, plan: str | None) -> None:
    here = scenario(family, 8, (7, 2, 1), order="by_image", loss_weight="sample")
    task = bench.task(here, PLANS[plan] if plan else None)
    ids = task.step_ids(0)
    model = theirs(task, bench.models[family])
    total = 0.0
    for inputs in their_questions(task, ids, task.encoder.closing):
        loss = model(**inputs).loss / len(ids)
        loss.backward()
        total += float(loss.detach())
    tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = work(task)
    assert tensors.keys() == ours.tensors.keys()
    assert_same(ours, Result(total, torch.cat([tensors[name].flatten() for name in ours.tensors]), tensors))


def theirs(task: VqaTask, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    lora = task.recipe.lora
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    targets = task.model.module.peft_config["default"].target_modules
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, bias="none")
    model = get_peft_model(base, config)
    state = {name: p.detach().clone() for name, p in task.trained().items()}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    return model.train()


@torch.no_grad()
@pytest.mark.parametrize("family", SQUARE)
def test_a_saved_adapter_has_the_same_logits_in_plain_peft(bench: Bench, family: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    task = bench.task(scene(family))
    task.save(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(bench.models[family], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    task.training(False)
    ids = range(0, len(task.splits["train"]), 2)
    for i, inputs in zip(ids, their_questions(task, ids, task.encoder.closing), strict=True):
        encoded = task._encode(task.splits["train"][i])
        assert inputs["input_ids"][0].tolist() == encoded.tokens.tolist()
        assert (inputs["labels"][0] != loop.IGNORED).tolist() == encoded.targets.tolist()
        [[part]] = task._partition([encoded], task._cut(None), 1)
        mine = task.model.logits(task.model.hidden(task._build([encoded], part)), torch.arange(encoded.length))
        del inputs["labels"]
        torch.testing.assert_close(model(**inputs).logits[0], mine, atol=1e-5, rtol=1e-5)


def answers(task: VqaTask, samples: Sequence[Sample]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {}
    task.answer = lambda each: Answer(repr(list(each)), len(each))  # type: ignore[method-assign]
    for part in task.answers(samples, NEW, Ranks()):
        tokens |= {index: eval(each.text) for index, each in part.items()}
    return [tokens[index] for index in sorted(tokens)]


@torch.no_grad()
@pytest.mark.parametrize("family", SQUARE)
def test_generated_answers_are_those_of_generate(bench: Bench, family: str) -> None:
    task = bench.task(scene(family), PLANS["shared, packed"])
    samples = task.splits["train"][::2]
    counts = np.bincount([token for each in answers(task, samples) for token in each])
    task.model.end_tokens = frozenset(np.argsort(counts)[-2:].tolist())  # random weights seldom end an answer
    found = answers(task, samples)
    assert len({len(tokens) for tokens in found}) > 1, "answers of uneven length"
    plain = bench.task(scene(family))
    plain.model.end_tokens = task.model.end_tokens
    assert answers(plain, samples) == found
    model = theirs(task, bench.models[family]).eval()
    given = their_questions(task, range(0, len(task.splits["train"]), 2), task.encoder.closing)
    for inputs, tokens in zip(given, found, strict=True):
        asked = int((inputs.pop("labels")[0] == loop.IGNORED).nonzero().max()) + 1
        length = inputs["input_ids"].shape[1]
        cut = {name: x[:, :asked] if x.shape == (1, length) else x for name, x in inputs.items()}
        how = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
        out = model.generate(**cut, **how, eos_token_id=sorted(task.end_tokens))
        assert out[0, asked:].tolist() == tokens
