"""Faults where micro-batches are padded to shapes and recorded: what is replayed reads something old, or at a wrong
place. Planted without a GPU, where the same tensors are filled and the same way is gone, and launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from catalogue import SPLIT, planted
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.tasks.vqa import recorded

PACKED = {"packing": True, "max_questions": 3, "attention": "split"}
"""Several micro-batches to a step; nothing is shared, so that masks are those of the plain plan."""


@contextmanager
def padded(task: Any, *faults: Any) -> Iterator[None]:
    """An arm whose micro-batches are padded and read from tensors that stay, which a plan for a CPU cannot ask for."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(task, "plan", task.plan.model_copy(update={"cuda_graphs": True})))
        for fault in faults:
            stack.enter_context(fault)
        yield
        assert task.recorder._made, "no micro-batch had a shape"


@planted(PACKED, "gradient", "tasks.vqa.recorded")
def positions_of_an_earlier_micro_batch(task: Any, _ranks: Any) -> Any:
    """One of the copies is missing: a graph reads the positions of the first micro-batch of its shape."""
    fill = recorded._Program.fill

    def stale(program: Any, batch: Batch, features: list[Tensor], key: Tensor) -> None:
        before = program._batch.positions.clone()
        fill(program, batch, features, key)
        program._batch.positions.copy_(before)

    return padded(task, patch.object(recorded._Program, "fill", stale))


@planted(SPLIT, "gradient", "data.questions.shapes")
def a_wrong_offset_of_a_shape(task: Any, _ranks: Any) -> Any:
    """Branches see the keys of their prefix from its second token on, and one that is behind it."""
    build, first_key, last_key = task._build, 3, 4  # of the first call, behind the longest piece and its queries

    def shifted(*how: Any) -> Batch:
        batch: Batch = build(*how)
        if batch.shape is not None and batch.segments is not None:
            batch.segments.at[[first_key, last_key]] += 1
        return batch

    return padded(task, patch.object(task, "_build", shifted))


@planted(PACKED, "gradient", "tasks.vqa.recorded")
def masks_that_are_recorded(task: Any, _ranks: Any) -> Any:
    """Dropout's masks are those of the step in which a shape was recorded."""
    return padded(task, patch.object(recorded, "step_key", lambda seed, step: torch.iinfo(torch.int32).max))
