"""Processes that prepare batches: in order, and none left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch

from sameday.data.loader import feed, supply
from sameday.spec.plan import Plan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Made:
    job: int
    process: int

    def to(self, _device: torch.device, non_blocking: bool = False) -> Made:
        return self


def build(job: int) -> list[Made]:
    return [Made(job, os.getpid())]


def round_of(plan: Plan, jobs: list[int]) -> set[int]:
    """The processes that did it."""
    with closing(feed(plan, CPU, jobs, build)) as batches:
        found = list(chain.from_iterable(batches))
    assert [made.job for made in found] == jobs
    return {made.process for made in found}


@pytest.fixture
def before() -> Iterator[set[multiprocessing.process.BaseProcess]]:
    yield set(multiprocessing.active_children())


def test_without_workers_this_process_does_it() -> None:
    assert round_of(Plan(), [1, 2, 3]) == round_of(Plan(), [4]) == {os.getpid()}


def test_workers_end_with_their_round(before: set[multiprocessing.process.BaseProcess]) -> None:
    plan = Plan(workers=2)
    first, second = round_of(plan, [1, 2, 3, 4]), round_of(plan, [1, 2, 3, 4])
    assert len(first) == len(second) == 2 and not first & second
    assert set(multiprocessing.active_children()) <= before


class Remembered:
    """Garbage that says where it was collected."""

    def __init__(self, where: Path) -> None:
        self.where, self.itself = where, self

    def __del__(self) -> None:
        with self.where.open("a") as file:
            print(os.getpid(), file=file)


def test_a_worker_collects_nothing_that_it_was_forked_with(tmp_path: Path) -> None:
    """A CUDA graph that the training process is done with would abort it."""
    gc.collect()
    gc.disable()
    try:
        Remembered(tmp_path / "collected")

        def collect(job: int) -> list[Made]:
            gc.collect()
            return build(job)

        with closing(feed(Plan(workers=1), CPU, [1, 2], collect)) as batches:
            assert len(list(chain.from_iterable(batches))) == 2
        assert not (tmp_path / "collected").exists()
        gc.collect()
        assert (tmp_path / "collected").read_text().split() == [str(os.getpid())]
    finally:
        gc.enable()


def test_a_round_that_is_given_up_ends_its_workers(before: set[multiprocessing.process.BaseProcess]) -> None:
    plan = Plan(workers=1, prefetch=4)
    with closing(feed(plan, CPU, [1, 2, 3, 4], build)) as batches:
        assert [made.job for made in next(batches)] == [1]
    assert set(multiprocessing.active_children()) <= before
    round_of(plan, [1, 2, 3, 4])


def test_a_process_that_leaves_in_a_round_ends() -> None:
    """Workers ignore the signal that Python's own exit sends them, and would be waited for without an end."""
    code = """
import sys
import torch
from contextlib import closing
from sameday.data.loader import feed
from sameday.spec.plan import Plan
with closing(feed(Plan(workers=2), torch.device("cpu"), [1, 2, 3], lambda _job: [])) as batches:
    print(list(next(batches)))
    sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "[]\n"), done.stderr


def test_only_a_gpu_has_its_input_pinned() -> None:
    plan = Plan(pin_memory=True, workers=3, prefetch=5)
    assert supply(plan, CPU) == {"workers": 3, "prefetch": 5, "pin_memory": False}
    assert supply(plan, torch.device("cuda")) == {"workers": 3, "prefetch": 5, "pin_memory": True}
