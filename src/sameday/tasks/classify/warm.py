"""A micro-batch of each size that a run will meet: compiled layers may have a graph for each, recorded ones do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sameday.hardware.ranks import Ranks
from sameday.spec.words import count
from sameday.tasks.base import WarmUpBatch

if TYPE_CHECKING:
    from sameday.tasks.classify.task import ClassifyTask


def warm_up_batches(task: ClassifyTask, steps: range, budget: int | None, ranks: Ranks) -> list[WarmUpBatch]:
    """Sizes of any rank. Only an epoch's last step has other ones than the first; a graph is recorded when a size comes
    for the second time."""
    plan, trained, scored = task.plan, dict[int, WarmUpBatch](), dict[int, WarmUpBatch]()
    if not steps or (plan.compile == "none" and not plan.cuda_graphs):
        return []
    for step in dict.fromkeys((steps[0], min(_epoch_end(task, steps[0]), steps[-1]))):
        for rank in range(ranks.size):
            for ids in task.cut(step, budget, Ranks(rank, ranks.size)):
                make = partial(task._build, "train", ids, task.turn(step))
                name = f"training with {count(len(ids), task.recipe.sample)}"
                trained.setdefault(len(ids), WarmUpBatch(name, make, step))
    for rank in range(ranks.size) if "val" in task.splits else ():
        for ids in task.eval_parts("val", Ranks(rank, ranks.size), budget):
            make = partial(task._build, "val", ids, (0, 0))
            name = f"validation with {count(len(ids), task.recipe.sample)}"
            scored.setdefault(len(ids), WarmUpBatch(name, make, score=task.score_val))
    return [each for one in trained.values() for each in [one] * (2 if plan.cuda_graphs else 1)] + [*scored.values()]


def _epoch_end(task: ClassifyTask, step: int) -> int:
    """The last step of the epoch that a step is in."""
    per_epoch = task.steps_per_epoch()
    return step // per_epoch * per_epoch + per_epoch - 1
