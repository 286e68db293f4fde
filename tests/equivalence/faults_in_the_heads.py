"""Faults in the heads of a chain of thought: contexts of the wrong questions, stages that are not trained."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from catalogue import SHARED, planted

from sameday.models.heads import Stages
from sameday.tasks.vqa.task import VqaTask

CUT = SHARED | {"token_budget": 60}
"""A budget that an image's questions do not fit into."""


def _stages(change: Any) -> Any:
    """`change` takes stages, images and what should have been made of them."""
    right = Stages.of

    def of(stages: Sequence[int], images: Sequence[Hashable]) -> Stages:
        wrong: Stages = change(stages, images, right)
        return wrong

    return patch.object(Stages, "of", of)


@planted(SHARED, "context", "models.heads", task="cot")
def context_leaks_between_images(_task: Any, _ranks: Any) -> Any:
    """The mean over stage 1 is taken over all questions of a micro-batch, whichever image they are about."""
    return _stages(lambda stages, images, right: right(stages, ["one"] * len(images)))


@planted(SHARED, "context", "models.heads", task="cot")
def context_of_all_questions(_task: Any, _ranks: Any) -> Any:
    """An image's context of stage 1 is the mean over all of its questions, and not over those of stage 1."""

    def change(stages: Sequence[int], images: Sequence[Hashable], right: Any) -> Stages:
        return replace(right(stages, images), share=right([1] * len(stages), images).share)

    return _stages(change)


@planted(SHARED, "gradient", "models.heads", task="cot")
def contexts_of_other_images(task: Any, _ranks: Any) -> Any:
    """The table of contexts is read one image too far: questions get the next image's."""
    contexts = task.heads.contexts
    return patch.object(task.heads, "contexts", lambda *how: tuple(each.roll(1, 0) for each in contexts(*how)))


@planted(SHARED, "gradient", "models.heads", task="cot")
def context_without_gradient(task: Any, _ranks: Any) -> Any:
    """Contexts are detached, so that nothing is learned through the means."""
    contexts = task.heads.contexts
    return patch.object(task.heads, "contexts", lambda *how: tuple(each.detach() for each in contexts(*how)))


@planted(SHARED, "gradient", "tasks.cot.task", task="cot")
def only_the_last_of_stage_two(task: Any, _ranks: Any) -> Any:
    """A misplaced indent: of a micro-batch's questions of stage 2 only the last one is in the loss."""
    loss_sum = task.loss_sum

    def indented(batch: Any, step: int) -> Any:
        second = (batch.stage == 2).nonzero().flatten()
        left_out = torch.isin(batch.owner, second[:-1])
        return loss_sum(replace(batch, weight=batch.weight * ~left_out), step)

    return patch.object(task, "loss_sum", indented)


@planted(SHARED, "weights", "tasks.cot.batch", task="cot")
def a_stage_left_out(task: Any, _ranks: Any) -> Any:
    """Questions of stage 3 weigh nothing."""
    build = task._build

    def without(*how: Any) -> Any:
        batch = build(*how)
        return replace(batch, weight=batch.weight * (batch.stage[batch.owner] != 3))

    return patch.object(task, "_build", without)


@planted(CUT, "context", "tasks.cot.task", task="cot")
def an_image_in_two_micro_batches(task: Any, _ranks: Any) -> Any:
    """A group above the budget is split, and each part has the context of its own questions."""
    return patch.object(task, "_partition", lambda *how: VqaTask._partition(task, *how))
