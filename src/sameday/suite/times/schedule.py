"""Which job runs when and on which GPUs: pure functions of seconds, needs and resources. Up to `EXACT` jobs no schedule
is shorter; beyond, the job with the longest path behind it goes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from sameday.suite.times.machine import SAME, Machine, Placed, Task, bound_of, listed, topological
from sameday.suite.times.shortest import Search

EXACT = 10
"""So many jobs are searched through; the time for it grows with their factorial."""


@dataclass(frozen=True)
class Schedule:
    """`bound`: no schedule on such a machine ends earlier. `best`: none ends earlier than this one."""

    placed: dict[str, Placed]
    bound: float
    best: bool
    tasks: Mapping[str, Task] = field(repr=False)

    @cached_property
    def seconds(self) -> float:
        return max((each.end for each in self.placed.values()), default=0.0)

    @property
    def order(self) -> list[str]:
        """As jobs start."""
        rank = {name: number for number, name in enumerate(topological(self.tasks))}
        return sorted(self.placed, key=lambda name: (self.placed[name].start, rank[name]))

    def critical(self) -> list[tuple[str, str]]:
        """The chain of jobs that the end waits for, from the first: each with what it waited for before, `needs` or
        `gpu` (or `slot`); the first with an empty word."""
        chain: list[tuple[str, str]] = []
        name = max(self.placed, key=lambda each: self.placed[each].end, default=None)
        while name is not None:
            here, task = self.placed[name], self.tasks[name]
            ended = [each for each in self.placed if each != name and _same(self.placed[each].end, here.start)]
            ended = [each for each in ended if here.start > 0 and each not in {one for one, _ in chain}]
            before = next((each for each in ended if each in task.needs), None)
            why = "needs"
            if before is None:
                gpus, why = set(here.gpus), "gpu" if here.gpus else "slot"
                taken = [e for e in ended if gpus & {*self.placed[e].gpus} or (not gpus and not self.placed[e].gpus)]
                before = next(iter(taken), None)
            chain.append((name, why if before is not None else ""))
            name = before
        return chain[::-1]


def schedule(jobs: Mapping[str, Task], gpus: int, slots: int, search: bool = True) -> Schedule:
    """The best possible up to `EXACT` jobs that take time, longest path first beyond, and without a `search`, which may
    take seconds. ValueError where a job asks for GPUs that are not there."""
    _check(jobs, gpus, slots)
    machine = Machine(_without_empty(jobs), gpus, slots)
    placed, bound = listed(machine), bound_of(machine)
    best = _end(placed) <= bound * (1 + SAME)
    if search and not best and len(machine.jobs) <= EXACT:
        placed, best = Search(machine, placed).run(), True
    for name in topological(jobs):
        if name not in placed:
            at = max((placed[each].end for each in jobs[name].needs), default=0.0)
            placed[name] = Placed(at, at, jobs[name].pinned or tuple(range(jobs[name].gpus)))
    return Schedule({name: placed[name] for name in jobs}, bound, best, jobs)


def priority(jobs: Mapping[str, Task], gpus: int, slots: int) -> list[str]:
    """All jobs in the order in which a runner should take those that are ready: as the schedule starts them."""
    return schedule(jobs, gpus, slots).order


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


def _end(placed: Mapping[str, Placed]) -> float:
    return max((each.end for each in placed.values()), default=0.0)


def _check(jobs: Mapping[str, Task], gpus: int, slots: int) -> None:
    for name, task in jobs.items():
        asked = task.gpus if task.pinned is None else max(task.pinned, default=-1) + 1
        if asked > gpus:
            what = f"GPU {asked - 1}" if task.pinned is not None else f"{asked} GPUs"
            raise ValueError(f"{name} asks for {what}, and there are {gpus}")
        if not task.gpus and slots < 1:
            raise ValueError(f"{name} asks for a CPU slot, and there is none")


def _without_empty(jobs: Mapping[str, Task]) -> dict[str, Task]:
    """Jobs that take time; what one without time waits for, those behind it wait for."""
    needs: dict[str, tuple[str, ...]] = {}
    for name in topological(jobs):
        each = ((other,) if jobs[other].seconds > 0 else needs[other] for other in jobs[name].needs)
        needs[name] = tuple(dict.fromkeys(other for part in each for other in part))
    return {
        name: replace(task, needs=() if task.running else needs[name])
        for name, task in jobs.items()
        if task.seconds > 0
    }
