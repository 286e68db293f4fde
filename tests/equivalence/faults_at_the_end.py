"""Faults in what comes after the steps: resume, validation, the files of a finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from catalogue import SHARED, UNEVEN, planted
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.kernels.dropout import dropouts
from sameday.train import loop
from sameday.train.state import LoopState

# What a kill and a resume leave


def _resumed(change: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`change` gets the optimizer and what it trains, once they are restored, and may give other steps done."""
    restore = loop.restore

    def restored(recipe: Any, task: Any, run: Any, steps: Any, say: Any) -> LoopState:
        state = restore(recipe, task, run, steps, say)
        start = change(state.step, steps.optimizer, steps.trained) if state.step else None
        return replace(state, step=start or state.step)

    return patch.object(loop, "restore", restored)


@planted(SHARED, "after the resume", "train.state")
def optimizer_state_lost(_task: Any, _ranks: Any) -> Any:
    """A resumed run starts with empty moments."""
    return _resumed(lambda _start, optimizer, _trained: optimizer.state.clear())


@planted(SHARED, "after the resume", "train.optim")
def optimizer_step_lost(_task: Any, _ranks: Any) -> Any:
    """A resumed run has its moments, and corrects them as if they were new."""

    def change(_start: int, optimizer: Any, _trained: Any) -> None:
        for state in optimizer.state.values():
            state["step"].zero_()

    return _resumed(change)


@planted(SHARED, "after the resume", "record.checkpoint")
def saved_in_half_precision(_task: Any, _ranks: Any) -> Any:
    """A checkpoint holds the trained weights in bf16."""

    def change(_start: int, _optimizer: Any, trained: dict[str, Any]) -> None:
        for parameter in trained.values():
            parameter.data.copy_(parameter.data.bfloat16())

    return _resumed(change)


@planted(SHARED, "resume: the first step", "train.state")
def a_step_is_skipped(_task: Any, _ranks: Any) -> Any:
    """A resumed run leaves out the step after its checkpoint."""
    return _resumed(lambda start, _optimizer, _trained: start + 1)


@planted(SHARED, "resume: the first step", "train.state")
def a_step_is_done_again(_task: Any, _ranks: Any) -> Any:
    """A resumed run starts with the step that its checkpoint holds already."""
    return _resumed(lambda start, _optimizer, _trained: start - 1)


@planted(SHARED, "after the resume", "train.state")
def a_tensor_is_frozen_by_a_resume(_task: Any, _ranks: Any) -> Any:
    """After a resume one of the adapters gets no gradient any more."""

    def change(_start: int, _optimizer: Any, trained: dict[str, Any]) -> None:
        list(trained.values())[3].register_hook(torch.zeros_like)

    return _resumed(change)


@planted(SHARED, "after the resume", "train.state")
def gradients_are_scaled_by_a_resume(_task: Any, _ranks: Any) -> Any:
    """After a resume gradients are less than half of what they should be. AdamW hides it, and clipping may."""

    def change(_start: int, _optimizer: Any, trained: dict[str, Any]) -> None:
        for parameter in trained.values():
            parameter.register_hook(lambda gradient: 0.4 * gradient)

    return _resumed(change)


@planted(SHARED, "learning rate (after the resume)", "train.loop")
@contextmanager
def schedule_starts_again(_task: Any, _ranks: Any) -> Iterator[None]:
    """A resumed run starts its schedule from the beginning."""
    rate, before = loop.learning_rate, 0

    def keep(start: int, *_others: Any) -> None:
        nonlocal before
        before = start

    def again(recipe: Any, step: int, total: int) -> float:
        return rate(recipe, step - before, total)

    with _resumed(keep), patch.object(loop, "learning_rate", again):
        yield


# Validation


@planted(SHARED, "modules in training mode", "tasks.vqa")
def dropout_in_evaluation(task: Any, _ranks: Any) -> Any:
    """The model is not put into evaluation mode."""
    train = task.training
    return patch.object(task, "training", lambda _on: train(True))


@planted(SHARED, "train flags", "tasks.vqa")
def evaluation_mode_is_left_on(task: Any, _ranks: Any) -> Any:
    """After a validation the model is not put back into training mode, and dropout is over."""
    evaluate = task.evaluate

    def stays(*args: Any) -> Any:
        scores = evaluate(*args)
        task.training(False)
        return scores

    return patch.object(task, "evaluate", stays)


@planted(SHARED, "samples", "tasks.vqa")
def validation_on_a_part(task: Any, _ranks: Any) -> Any:
    """The last questions of the validation set are left out."""
    return patch.dict(task.splits, {"val": task.splits["val"][:-2]})


@planted(UNEVEN, "validation", "tasks.vqa")
def validation_averages_averages(task: Any, _ranks: Any) -> Any:
    """Each micro-batch's mean loss weighs the same in the validation loss."""
    score = task.score

    def mean(batch: Batch) -> Tensor:
        loss, weight, *others = score(batch)
        return torch.stack([loss / weight, torch.ones_like(weight), *others])

    return patch.object(task, "score", mean)


@planted(SHARED, "exact_match", "tasks.vqa")
def every_answer_counts_as_right(task: Any, _ranks: Any) -> Any:
    """Exact match is one whatever the answers are."""
    score = task.score

    def all_right(batch: Batch) -> Tensor:
        loss, weight, _right, questions = score(batch)
        return torch.stack([loss, weight, questions, questions])

    return patch.object(task, "score", all_right)


# What is left in the end


@planted(SHARED, "saved weights", "train.state")
def an_empty_adapter_is_saved(_task: Any, _ranks: Any) -> Any:
    """The finished run's adapter is zero; its checkpoints are right."""
    finish = loop.finish_run

    def empty(plan: Any, run: Any, task: Any, *others: Any) -> Any:
        for parameter in task.trained().values():
            parameter.data.zero_()
        return finish(plan, run, task, *others)

    return patch.object(loop, "finish_run", empty)


@planted(SHARED, "dropout", "models.adapters")
@contextmanager
def another_dropout(task: Any, _ranks: Any) -> Iterator[None]:
    """Half of an adapter's input is dropped where the recipe says a tenth."""
    for layer in dropouts(task.module()):
        layer.p = 0.5
    yield
