"""The clock of a step: phases never overlap, leave no gap, and only those who own the step may name one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.phases import OTHER, PHASES, Clock, during, silence

CPU = torch.device("cpu")


class Time:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    silence()


NAMES = st.sampled_from([name for name in PHASES if name != OTHER])
TREES = st.recursive(
    st.integers(0, 50),
    lambda inner: st.tuples(NAMES, st.lists(inner, max_size=4)),
    max_leaves=20,
)


@given(st.lists(st.lists(TREES, max_size=4), min_size=1, max_size=4))
def test_every_moment_has_one_owner(steps: list[list[object]]) -> None:
    """Parts within phases, over several steps: what a part waits for itself is its own, what is inside is not."""
    time = Time()
    clock = Clock(CPU, time)
    expected: list[dict[str, float]] = []

    def go(tree: object, owner: str) -> None:
        if isinstance(tree, int):
            time.at += tree
            expected[-1][owner] = expected[-1].get(owner, 0) + tree
            return
        assert isinstance(tree, tuple)
        name, inner = tree
        with during(name):
            for each in inner:
                go(each, name)

    for step in steps:
        clock.lap()
        expected.append({})
        for tree in step:
            go(tree, OTHER)
    clock.stop()
    found = clock.steps()
    assert [{k: v for k, v in each.items() if v} for each in found] == [
        {k: float(v) for k, v in each.items() if v} for each in expected
    ]
    assert sum(sum(each.values()) for each in found) == time.at
    assert all(list(each) == [name for name in PHASES if name in each] for each in found)
    assert clock.steps() == []


def test_without_a_clock_nothing_is_kept() -> None:
    time = Time()
    clock = Clock(CPU, time)
    with during("loss"):
        time.at += 1
    assert clock.steps() == []
    clock.lap()
    clock.stop()
    with during("loss"):
        time.at += 1
    assert clock.steps() == [{OTHER: 0.0}]


def test_a_part_ends_where_it_raises() -> None:
    time = Time()
    clock = Clock(CPU, time)
    clock.lap()
    with pytest.raises(ValueError, match="planted"), during("forward"):
        time.at += 1
        raise ValueError("planted")
    time.at += 2
    clock.stop()
    assert clock.steps() == [{"forward": 1.0, OTHER: 2.0}]


def test_other_threads_and_processes_name_nothing() -> None:
    time = Time()
    clock = Clock(CPU, time)
    clock.lap()

    def elsewhere() -> None:
        with during("backward"):
            time.at += 1

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    child = os.fork()
    if child == 0:
        elsewhere()
        os._exit(len(clock._laps[-1]) - 1)  # what the child wrote down
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    clock.stop()
    assert clock.steps() == [{OTHER: 1.0}]


def test_steps_that_are_done_can_be_read_on_the_way() -> None:
    time = Time()
    clock = Clock(CPU, time)
    for seconds in (1, 2, 3):
        clock.lap()
        with during("wait"):
            time.at += seconds
    assert [each["wait"] for each in clock.steps()] == [1, 2]
    clock.stop()
    assert [each["wait"] for each in clock.steps()] == [3]


def test_another_clock_takes_over_and_silence_forgets_the_step() -> None:
    time = Time()
    first, second = Clock(CPU, time), Clock(CPU, time)
    first.lap()
    second.lap()
    with during("loss"):
        time.at += 1
    first.stop()
    second.lap()
    silence()
    with during("loss"):
        time.at += 1
    assert second.steps() == [{"loss": 1.0, OTHER: 0.0}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_work_is_timed_where_it_was_named() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)
    clock = Clock(device)
    for _ in range(3):
        clock.lap()
        with during("forward"):
            for _ in range(20):
                a @ a
        with during("loss"):
            a + 1
    clock.stop()
    for step in clock.steps()[1:]:
        assert step["forward"] > 10 * step["loss"] > 0
