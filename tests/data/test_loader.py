"""Processes that prepare batches: the same ones for the next round where the plan keeps them, and none left behind."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import pytest
import torch

from sameday.data.loader import Rounds, supply
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


def round_of(rounds: Rounds, jobs: list[int], name: str = "val") -> set[int]:
    """The processes that did it."""
    with closing(rounds.feed(name, jobs, build)) as feed:
        found = list(chain.from_iterable(feed))
    assert [made.job for made in found] == jobs
    return {made.process for made in found}


@pytest.fixture
def before() -> Iterator[set[multiprocessing.process.BaseProcess]]:
    yield set(multiprocessing.active_children())


@pytest.mark.parametrize("keep", [False, True])
def test_without_workers_this_process_does_it(keep: bool) -> None:
    rounds = Rounds(Plan(keep_workers=keep), CPU)
    assert round_of(rounds, [1, 2, 3]) == round_of(rounds, [4]) == {os.getpid()}


def test_workers_end_with_their_round(before: set[multiprocessing.process.BaseProcess]) -> None:
    rounds = Rounds(Plan(workers=2), CPU)
    first, second = round_of(rounds, [1, 2, 3, 4]), round_of(rounds, [1, 2, 3, 4])
    assert len(first) == len(second) == 2 and not first & second
    assert set(multiprocessing.active_children()) <= before


def test_kept_workers_are_replaced_when_the_jobs_change(before: set[multiprocessing.process.BaseProcess]) -> None:
    """A budget that was lowered cuts an evaluation into other micro-batches. Another split's workers are its own."""
    rounds = Rounds(Plan(workers=2, keep_workers=True), CPU)
    try:
        first = round_of(rounds, [1, 2, 3, 4])
        other = round_of(rounds, [7, 8], name="test")
        assert round_of(rounds, [1, 2, 3, 4]) == first
        changed = round_of(rounds, [1, 2, 3, 4, 5, 6])
        assert len(first | other | changed) == 6
        assert round_of(rounds, [7, 8], name="test") == other
        assert {child.pid for child in set(multiprocessing.active_children()) - before} == other | changed
    finally:
        for kept in rounds._kept.values():
            kept.close()
    assert set(multiprocessing.active_children()) <= before


def test_a_round_that_is_given_up_leaves_nothing_for_the_next() -> None:
    rounds = Rounds(Plan(workers=1, keep_workers=True, prefetch=4), CPU)
    with closing(rounds.feed("val", [1, 2, 3, 4], build)) as feed:
        assert [made.job for made in next(feed)] == [1]
    try:
        round_of(rounds, [1, 2, 3, 4])
    finally:
        rounds._kept["val"].close()


def test_kept_workers_end_with_their_process() -> None:
    """They ignore the signal that Python's own exit sends them, and would be waited for without an end."""
    code = """
import torch
from sameday.data.loader import Rounds
from sameday.spec.plan import Plan
rounds = Rounds(Plan(workers=2, keep_workers=True), torch.device("cpu"))
print([list(batches) for batches in rounds.feed("val", [1, 2], lambda _job: [])])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "[[], []]\n"), done.stderr


def test_only_a_gpu_has_its_input_pinned() -> None:
    plan = Plan(pin_memory=True, workers=3, prefetch=5)
    assert supply(plan, CPU) == {"workers": 3, "prefetch": 5, "pin_memory": False}
    assert supply(plan, torch.device("cuda")) == {"workers": 3, "prefetch": 5, "pin_memory": True}
