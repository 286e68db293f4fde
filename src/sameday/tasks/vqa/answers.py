"""Answers to questions about images, generated in batches that hold all questions of an image."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from sameday.data.loader import feed
from sameday.data.questions.encode import Encoded
from sameday.data.questions.partition import Cut, Item, MicroBatch, halve, image_batches
from sameday.data.questions.prompts import Prompts, make_prompts
from sameday.data.questions.sample import Sample
from sameday.hardware.ranks import Ranks
from sameday.models.generate import Interrupted, generate
from sameday.tasks.base import ASKED_TO_STOP, FAILED, NO_MEMORY, Answer

if TYPE_CHECKING:
    from sameday.tasks.vqa.task import VqaTask

WITHOUT_BACKWARD = 4
"""So many times a training step's tokens are taken at once on a GPU where the plan says nothing: no activations are
kept, and few questions at a time would leave it waiting for the host. Not with a dense mask, which grows with the
square of a row."""

WORTH_COMPILING = 10_000
"""Questions from which on their prompts go through compiled layers, where the plan has them: at 8B shapes the graphs
take 13 s, and save 0.6 to 1.4 ms per question."""


@dataclass
class _Outcome:
    """Of one batch on one rank; what ended it: where memory ran out, the question that was too much, where it failed,
    why."""

    answers: dict[int, Answer] = field(default_factory=dict)
    flags: float = 0.0
    short: list[str] = field(default_factory=list)
    failed: Exception | None = None


def answers(
    task: VqaTask, questions: Sequence[Sample], max_new_tokens: int, ranks: Ranks, done: Collection[int]
) -> Iterator[dict[int, Answer]]:
    """See Task.answers. Ranks take batches in turn, and exchange what they have after each round of them."""
    encoded = [task.encoder.prompt(sample) for sample in questions]
    there = set(done)
    parts = [part for part in batches_of(task, encoded, max_new_tokens) if not there.issuperset(_members(part))]
    mine = parts[ranks.rank :: ranks.size]
    eager = len(questions) < WORTH_COMPILING
    task.training(False)
    made = feed(task.plan, task.device, mine, lambda part: [_built(task, encoded, part)])
    try:
        with closing(made) as batches:
            for number in range(-(-len(parts) // ranks.size)):
                outcome = _Outcome()
                try:
                    if number < len(mine):
                        batch = partial(next, next(batches))
                        outcome = _answered(task, encoded, mine[number], batch, max_new_tokens, eager)
                except Exception as error:
                    outcome = _Outcome(flags=FAILED, failed=error)
                every = ranks.gather(outcome)
                yield {index: answer for each in every for index, answer in each.answers.items()}
                if flags := sum(each.flags for each in every):
                    raise task.evaluation_stopped(task.recipe.sample, outcome.short, ranks, flags, outcome.failed)
    finally:
        task.training(True)


def batches_of(task: VqaTask, encoded: Sequence[Encoded], max_new_tokens: int) -> list[MicroBatch]:
    """Every token that may come takes a place of the budget."""
    plan = task.plan
    more = task.device.type == "cuda" and task.model.kernel != "sdpa"
    usual = plan.token_budget * (WITHOUT_BACKWARD if more else 1)
    cut = Cut(plan.share_images, plan.packing, plan.eval_token_budget or usual)
    items = [Item(i, each.length + max_new_tokens, each.prefix, each.key) for i, each in enumerate(encoded)]
    return image_batches(items, [each.sample.image_key for each in encoded], cut, task.whole_images)


def _members(part: MicroBatch) -> list[int]:
    return [index for unit in part for index in unit.members]


def _built(task: VqaTask, encoded: Sequence[Encoded], part: MicroBatch) -> Prompts:
    return make_prompts(task.lay_out(encoded, part), task.source.read_image)


def _answered(
    task: VqaTask,
    encoded: Sequence[Encoded],
    part: MicroBatch,
    made: Callable[[], Prompts],
    max_new_tokens: int,
    eager: bool,
) -> _Outcome:
    """A batch's answers, in halves where memory runs out."""
    members = _members(part)
    samples = [encoded[index].sample for index in members]
    try:
        tokens = generate(
            task.model,
            made(),
            partial(task.answer_logits, samples=samples),
            task.end_tokens,
            max_new_tokens,
            task.stop_asked,
            eager,
        )
        return _Outcome({index: task.answer(each) for index, each in zip(members, tokens, strict=True)})
    except Interrupted:
        return _Outcome(flags=ASKED_TO_STOP)
    except torch.OutOfMemoryError:
        pass
    halves = _halves(part, encoded, task.whole_images)
    if halves is None:
        return _Outcome(flags=NO_MEMORY, short=[samples[0].where])
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
    whole = _Outcome()
    for half in halves:
        built = partial(lambda half: _built(task, encoded, half).to(task.device), half)
        outcome = _answered(task, encoded, half, built, max_new_tokens, eager)
        whole = replace(outcome, answers=whole.answers | outcome.answers)
        if outcome.flags:
            break
    return whole


def _halves(part: MicroBatch, encoded: Sequence[Encoded], whole: bool) -> Sequence[MicroBatch] | None:
    """Of its images; or, unless they must stay whole, of its units, or of the questions of a single one."""
    images = list(dict.fromkeys(encoded[index].sample.image_key for index in _members(part)))
    if len(images) > 1:
        first = set(images[: len(images) // 2])
        inside = [encoded[unit.members[0]].sample.image_key in first for unit in part]
        return [tuple(u for u, here in zip(part, inside, strict=True) if here is side) for side in (True, False)]
    return None if whole else halve(part)


@torch.no_grad()
def generation_gaps(task: VqaTask, questions: Sequence[Sample], tokens: int = 3) -> list[float]:
    """See Task.generation_gaps: so many tokens of each answer, whether or not they end it."""
    prompts = [task.encoder.prompt(sample) for sample in questions]
    answered: dict[int, Encoded] = {}
    task.training(False)
    try:
        for part in batches_of(task, prompts, tokens):
            members = _members(part)
            head = partial(task.answer_logits, samples=[questions[index] for index in members])
            made = _built(task, prompts, part).to(task.device)
            for index, each in zip(members, generate(task.model, made, head, (), tokens), strict=True):
                answered[index] = _with_answer(prompts[index], each)
        encoded = [answered[index] for index in range(len(questions))]
        gaps = [0.0] * len(questions)
        for part in task._partition(encoded, task._cut(None), 1)[0]:
            batch = task._build(encoded, part).to(task.device)
            with task.model.numeric_format():
                logits = task.logits(batch, task.model.hidden(batch))
            below = (logits.max(-1).values - logits.gather(1, batch.target[:, None])[:, 0]) / logits.std(-1)
            for owner, gap in zip(batch.owner.tolist(), below.tolist(), strict=True):
                index = _members(part)[owner]
                gaps[index] = max(gaps[index], gap)
        return gaps
    finally:
        task.training(True)


def _with_answer(prompt: Encoded, tokens: Sequence[int]) -> Encoded:
    """As a question to learn from, whose answer this is."""
    whole = np.concatenate([prompt.tokens, np.asarray(tokens, prompt.tokens.dtype)])
    targets = np.arange(len(whole)) >= len(prompt.tokens)
    return replace(prompt, tokens=whole, targets=targets)
