"""Schedules: nothing twice at once, nothing before what it needs, and none shorter where that is promised."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.suite.times.machine import Machine, Task, listed, paths
from sameday.suite.times.schedule import EXACT, Schedule, priority, schedule
from sameday.suite.times.shortest import Search


@st.composite
def suites(draw: st.DrawFn, most: int) -> tuple[dict[str, Task], int, int]:
    gpus, slots = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    jobs: dict[str, Task] = {}
    for number in range(draw(st.integers(1, most))):
        needs = tuple(name for name in jobs if draw(st.integers(0, 3)) == 0)
        count = draw(st.sampled_from([0, 1, 1, 1, gpus]))
        pinned = (draw(st.integers(0, gpus - 1)),) if count == 1 and draw(st.booleans()) else None
        seconds = draw(st.one_of(st.integers(0, 6), st.floats(0.5, 9)))
        jobs[f"j{number}"] = Task(float(seconds), needs, count, pinned)
    return jobs, gpus, slots


def shortest(jobs: dict[str, Task], gpus: int, slots: int) -> float:
    """Of all orders in which jobs can be put behind each other, on all units. One that takes no time needs none."""
    least = float("inf")

    def extend(free: list[float], ends: dict[str, float]) -> None:
        nonlocal least
        if max(ends.values(), default=0.0) >= least:
            return
        if len(ends) == len(jobs):
            least = max(ends.values())
            return
        for name, task in jobs.items():
            if name in ends or any(each not in ends for each in task.needs):
                continue
            among = range(gpus, len(free)) if not task.gpus else task.pinned or range(gpus)
            for units in combinations(among, max(1, task.gpus)) if task.seconds else [()]:
                start = max([0.0, *(free[unit] for unit in units), *(ends[each] for each in task.needs)])
                end = start + task.seconds
                extend([end if unit in units else at for unit, at in enumerate(free)], {**ends, name: end})

    extend([0.0] * (gpus + slots), {})
    return least


def check(made: Schedule, jobs: dict[str, Task], gpus: int, slots: int) -> None:
    assert made.placed.keys() == jobs.keys()
    for name, task in jobs.items():
        here = made.placed[name]
        assert here.end == pytest.approx(here.start + task.seconds)
        assert all(made.placed[each].end <= here.start for each in task.needs)
        assert len(here.gpus) == task.gpus and all(0 <= gpu < gpus for gpu in here.gpus)
        assert task.pinned is None or here.gpus == task.pinned
    for one, other in combinations(made.placed.values(), 2):
        if min(one.end, other.end) > max(one.start, other.start):
            assert not set(one.gpus) & set(other.gpus), "two jobs on a GPU at once"
    plain = [each for name, each in made.placed.items() if not jobs[name].gpus and each.end > each.start]
    for each in plain:
        assert sum(other.start <= each.start < other.end for other in plain) <= slots
    assert made.seconds >= made.bound * (1 - 1e-9)
    chain = [name for name, _ in made.critical()]
    assert sum(jobs[name].seconds for name in chain) == pytest.approx(made.seconds)


@settings(max_examples=100, deadline=None)
@given(suites(5))
def test_no_schedule_is_shorter(given_suite: tuple[dict[str, Task], int, int]) -> None:
    jobs, gpus, slots = given_suite
    made = schedule(jobs, gpus, slots)
    check(made, jobs, gpus, slots)
    assert made.best and made.seconds == pytest.approx(shortest(jobs, gpus, slots))


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 3), st.lists(st.floats(1, 9), min_size=10, max_size=10))
def test_nor_for_ten_jobs_that_wait_for_nothing(gpus: int, seconds: list[float]) -> None:
    """All ways to share them out, the first job on the first GPU."""
    on = np.array([(0, *way) for way in product(range(gpus), repeat=9)])
    least = float(np.max([(on == gpu) @ np.array(seconds) for gpu in range(gpus)], axis=0).min())
    jobs = {f"j{n}": Task(each) for n, each in enumerate(seconds)}
    made = schedule(jobs, gpus, 1)
    check(made, jobs, gpus, 1)
    assert made.best and made.seconds == pytest.approx(least)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([(5, 5), (4, 3, 3)]),
    st.lists(st.tuples(st.floats(1, 9), st.integers(0, 1)), min_size=10, max_size=10),
)
def test_nor_for_ten_jobs_in_chains_on_gpus_that_they_name(
    lengths: tuple[int, ...], each: list[tuple[float, int]]
) -> None:
    """All orders of chains whose jobs want one GPU or the other."""
    chains = [chain for chain, length in enumerate(lengths) for _ in range(length)]
    jobs = {
        f"j{n}": Task(seconds, (f"j{n - 1}",) if n and chains[n - 1] == chains[n] else (), 1, (gpu,))
        for n, (seconds, gpu) in enumerate(each)
    }
    made = schedule(jobs, 2, 1)
    check(made, jobs, 2, 1)
    assert made.best and made.seconds == pytest.approx(shortest(jobs, 2, 1))


def test_the_search_is_short() -> None:
    """Ten jobs for which a search without rules keeps tens of thousands of schedules of some of them."""
    close = (3.41, 3.89, 3.71, 3.02, 3.47, 3.18, 3.19, 3.67, 3.66, 3.7)
    mixed = (6.11, 4.91, 8.77, 7.2, 4.4, 0.91, 7.07, 6.58, 1.19, 7.17)
    sets: list[tuple[dict[str, Task], int, int]] = [
        ({f"j{n}": Task(each, gpus=2 if n == 1 else 1) for n, each in enumerate(close)}, 2, 500),
        ({f"j{n}": Task(each) for n, each in enumerate(mixed)}, 3, 2),
        ({f"j{n}": Task(each, {6: ("j4",), 9: ("j1",)}.get(n, ())) for n, each in enumerate(mixed)}, 2, 10000),
    ]
    for jobs, gpus, most in sets:
        machine = Machine(jobs, gpus, 1)
        search = Search(machine, listed(machine))
        search.run()
        assert sum(map(len, search.seen.values())) < most


@settings(max_examples=40, deadline=None)
@given(suites(24))
def test_larger_ones_keep_every_rule(given_suite: tuple[dict[str, Task], int, int]) -> None:
    jobs, gpus, slots = given_suite
    if EXACT // 2 < len(jobs) <= EXACT:  # searched through: the test above does that, and more quickly
        return
    check(schedule(jobs, gpus, slots), jobs, gpus, slots)
    order = priority(jobs, gpus, slots)
    assert all(order.index(each) < order.index(name) for name in jobs for each in jobs[name].needs)


def test_ten_jobs_are_searched_through_and_eleven_go_by_their_path() -> None:
    """Two GPUs and jobs of 3, 3, 2, 2, 2: longest first takes 7, the best is 6."""
    jobs = {f"j{n}": Task(seconds) for n, seconds in enumerate((3, 3, 2, 2, 2))}
    assert (made := schedule(jobs, 2, 1)).seconds == 6 and made.best
    many = jobs | {f"more{n}": Task(0.01) for n in range(EXACT)}
    made = schedule(many, 2, 1)
    assert made.seconds == pytest.approx(7) and not made.best and made.bound == pytest.approx(6.05)


def test_a_job_waits_idle_where_that_is_shorter() -> None:
    """A GPU that is free at once is left so, for a job behind which there is a long path."""
    jobs = {"data": Task(1, gpus=0), "long": Task(9, ("data",)), "other": Task(5), "last": Task(9, ("long",), 0)}
    made = schedule(jobs, 1, 1)
    assert made.seconds == 19 and made.best and made.placed["other"].start == 10
    assert made.critical() == [("data", ""), ("long", "needs"), ("last", "needs")]
    assert priority(jobs, 1, 1) == ["data", "long", "other", "last"]


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(ValueError, match="a asks for 2 GPUs, and there are 1"):
        schedule({"a": Task(1, gpus=2)}, 1, 1)
    with pytest.raises(ValueError, match="a asks for GPU 3, and there are 2"):
        schedule({"a": Task(1, pinned=(3,))}, 2, 1)


def test_paths() -> None:
    jobs = {"a": Task(1), "b": Task(2, ("a",)), "c": Task(5, ("a",)), "d": Task(1, ("b", "c"))}
    assert paths(jobs) == {"a": 7, "b": 3, "c": 6, "d": 1}


def test_nothing_to_do() -> None:
    made = schedule({}, 0, 1)
    assert (made.seconds, made.bound, made.best, made.critical()) == (0, 0, True, [])


def test_what_runs_is_not_moved() -> None:
    """Though all would end sooner if it had not begun."""
    ends = {}
    for running in (False, True):
        jobs = {"begun": Task(5, pinned=(0,), running=running), "a": Task(1, pinned=(0,)), "b": Task(9, ("a",))}
        made = schedule(jobs, 2, 1)
        check(made, jobs, 2, 1)
        ends[running] = made.seconds
    assert ends == {False: 10, True: 15} and made.placed["begun"].start == 0
