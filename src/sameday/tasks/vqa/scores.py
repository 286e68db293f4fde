"""Scores of answers that are known: their loss, and whether each would be generated, without generating it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sameday.data.loader import feed
from sameday.data.questions.batch import Batch
from sameday.data.questions.encode import Encoded
from sameday.data.questions.partition import MicroBatch
from sameday.hardware.ranks import Ranks
from sameday.spec.words import tell
from sameday.tasks.base import ASKED_TO_STOP, FAILED, NO_MEMORY

if TYPE_CHECKING:
    from sameday.tasks.vqa.task import VqaTask

SUMS = ("loss", "weight", "right", "questions")
"""What evaluation sums up."""


@torch.no_grad()
def evaluate(task: VqaTask, split: str, ranks: Ranks, budget: int | None) -> dict[str, float]:
    """Loss in the recipe's own weighting, and exact match without decoding: greedy decoding gives the answer exactly
    when the argmax is right at every answer token, the end included."""
    if not task.splits.get(split):
        return {}
    encoded = [task._encode(sample) for sample in task.splits[split]]
    # A budget that training had to lower holds here too, unless the plan sets one for evaluation.
    cut = task._cut(task.plan.eval_token_budget or budget)
    mine = task._partition(encoded, cut, ranks.size)[ranks.rank]
    task.training(False)
    sums = torch.zeros(len(SUMS) * (1 + len(task.score_groups)) + 1, dtype=torch.float64, device=task.device)
    short: list[str] = []
    failed: Exception | None = None
    # The other ranks wait for this one's sums, and learn from them what ended it.
    try:
        with closing(feed(task.plan, task.device, mine, lambda part: [task._build(encoded, part)])) as batches:
            for part, made in zip(mine, batches, strict=True):
                if task.stop_asked():
                    sums[-1] = ASKED_TO_STOP
                    break
                scores = _score_or_halve(task, encoded, part, partial(next, made))
                if isinstance(scores, str):
                    short, sums[-1] = [scores], NO_MEMORY
                    break
                sums[:-1] += scores.flatten()
    except Exception as error:
        failed, sums[-1] = error, FAILED
    task.training(True)
    *numbers, flags = ranks.sum_(sums).tolist()
    if flags:
        raise task.evaluation_stopped(task.recipe.sample, short, ranks, flags, failed)
    loss, weight, right, questions = numbers[: len(SUMS)]
    shares = {"exact_match": right / questions}
    for number, name in enumerate(task.score_groups, 1):
        *_, right, asked = numbers[number * len(SUMS) : (number + 1) * len(SUMS)]
        shares |= {f"exact_match_{name}": right / asked} if asked else {}
    return {"loss": loss / weight, **shares, "samples": int(questions)}


def _score_or_halve(
    task: VqaTask, encoded: Sequence[Encoded], part: MicroBatch, made: Callable[[], Batch]
) -> Tensor | str:
    """A micro-batch's scores, in halves where memory runs out; where a single question is too much, its name."""
    with suppress(torch.OutOfMemoryError):
        return task.score(made())
    if (what := task.let_go()) is not None:
        tell(f"out of memory in validation: {what} are let go of", sys.stderr)
        return _score_or_halve(task, encoded, part, partial(_sent, task, encoded, part))
    halves = task.halves(encoded, part)
    if halves is None:
        return encoded[part[0].members[0]].sample.where
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
    sums: list[Tensor] = []
    for half in halves:
        scores = _score_or_halve(task, encoded, half, partial(_sent, task, encoded, half))
        if isinstance(scores, str):
            return scores
        sums.append(scores)
    return torch.stack(sums).sum(0)


def _sent(task: VqaTask, encoded: Sequence[Encoded], part: MicroBatch) -> Batch:
    return task._build(encoded, part).to(task.device)


def judged(task: VqaTask, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of each target, and whether each question's answer is right."""
    with task.model.numeric_format():
        logits = task.logits(batch, task.model.hidden(batch))
    losses = F.cross_entropy(logits, batch.target, reduction="none")
    wrong, ends = torch.zeros(2, len(batch.sample_ids), device=task.device)
    is_end = batch.target == task.encoder.end_token
    behind = torch.zeros_like(is_end)
    for n in range(1, task.encoder.learned_behind_end + 1):
        behind[n:] |= is_end[:-n] & (batch.owner[n:] == batch.owner[:-n])
    wrong.index_add_(0, batch.owner, ((logits.argmax(-1) != batch.target) & ~behind).float())
    # An answer that was cut has no end, and is never counted as matched; ends of earlier turns are not its own. A
    # question's targets stand together.
    last = torch.ones_like(is_end)
    last[:-1] = batch.owner[1:] != batch.owner[:-1]
    for _ in range(task.encoder.learned_behind_end):
        last[:-1] |= last[1:] & behind[1:]
    ends.index_add_(0, batch.owner, (last & is_end).float())
    return losses, (wrong == 0) & (ends > 0)
