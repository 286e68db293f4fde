"""Jobs and the machine that they run on, as schedules see them: its GPUs and CPU slots, a first schedule, and how soon
all can be done at the earliest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

SAME = 1e-9
"""Share of a time below which two are one: sums of numbers differ by their order."""


@dataclass(frozen=True)
class Task:
    """A job as the schedule sees it. `pinned` are the very GPUs that it runs on, where that is fixed; one without a GPU
    takes a CPU slot. One that is `running` is not moved: it starts at once, and needs nothing any more."""

    seconds: float
    needs: tuple[str, ...] = ()
    gpus: int = 1
    pinned: tuple[int, ...] | None = None
    running: bool = False


@dataclass(frozen=True)
class Placed:
    """`gpus` is empty for a job that has none."""

    start: float
    end: float
    gpus: tuple[int, ...]


def paths(jobs: Mapping[str, Task]) -> dict[str, float]:
    """Seconds from the start of each job to the end of all that waits for it."""
    behind: dict[str, list[str]] = {name: [] for name in jobs}
    for name, task in jobs.items():
        for each in task.needs:
            behind[each].append(name)
    longest: dict[str, float] = {}
    for name in reversed(topological(jobs)):
        longest[name] = jobs[name].seconds + max((longest[each] for each in behind[name]), default=0.0)
    return longest


def topological(jobs: Mapping[str, Task]) -> list[str]:
    return list(TopologicalSorter({name: task.needs for name, task in jobs.items()}).static_order())


class Machine:
    """Jobs on a machine's units: its GPUs by number, and behind them its CPU slots."""

    def __init__(self, jobs: Mapping[str, Task], gpus: int, slots: int) -> None:
        self.jobs, self.gpus, self.slots = jobs, gpus, slots
        self.path = paths(jobs)
        self.order = sorted(topological(jobs), key=lambda name: -self.path[name])
        self.units = range(gpus + slots)
        self.begun: dict[str, Placed] = {}
        self.free = [0.0] * len(self.units)
        for name in (name for name, task in jobs.items() if task.running):
            count, among = self.allowed(name)
            units = tuple([unit for unit in among if not self.free[unit]][:count])
            self.begun[name] = self.placed(0.0, name, units)
            for unit in units:
                self.free[unit] = self.begun[name].end

    def allowed(self, name: str) -> tuple[int, range | tuple[int, ...]]:
        """How many units, and of which."""
        task = self.jobs[name]
        if not task.gpus:
            return 1, range(self.gpus, self.gpus + self.slots)
        return task.gpus, task.pinned or range(self.gpus)

    def placed(self, start: float, name: str, units: tuple[int, ...]) -> Placed:
        on = tuple(sorted(unit for unit in units if unit < self.gpus))
        return Placed(start, start + self.jobs[name].seconds, on)

    def waiting_for(self, left: Iterable[str]) -> dict[int, float]:
        """Seconds of jobs that wait for this very GPU."""
        seconds: dict[int, float] = {}
        for name in left:
            for unit in self.jobs[name].pinned or ():
                seconds[unit] = seconds.get(unit, 0.0) + self.jobs[name].seconds
        return seconds


def bound_of(machine: Machine) -> float:
    """The longest path; all work over all GPUs, and over all slots; and the work that is pinned to a GPU."""
    jobs = machine.jobs.values()
    work = sum(task.seconds * task.gpus for task in jobs)
    waits = sum(task.seconds for task in jobs if not task.gpus)
    shares = [work / machine.gpus] if machine.gpus else []
    shares += [waits / machine.slots] if machine.slots else []
    pinned = machine.waiting_for(machine.jobs).values()
    longest = sorted((task for task in jobs if task.gpus), key=lambda task: -task.seconds)
    crowd = [crowded([(task.seconds, task.gpus) for task in longest], machine.gpus)] if machine.gpus else []
    slots = sorted((task.seconds for task in jobs if not task.gpus), reverse=True)
    crowd += [crowded([(seconds, 1) for seconds in slots], machine.slots)] if machine.slots else []
    return max([*machine.path.values(), *shares, *pinned, *crowd], default=0.0)


def crowded(longest: Iterable[tuple[float, int]], units: int) -> float:
    """Jobs as seconds and number of units, the longest first. Those that take all units go one after another; of the
    longest of the others so many meet on one unit that these take at least as long as the shortest among them."""
    alone, most, pieces, lengths = 0.0, 0.0, 0, [0.0]
    for seconds, count in longest:
        if count == units:
            alone += seconds
            continue
        pieces += count
        lengths.append(lengths[-1] + seconds)
        meet = -(-pieces // units)
        most = max(most, lengths[-1] - lengths[-1 - meet])
    return alone + most


def listed(machine: Machine) -> dict[str, Placed]:
    """Whenever something is free, the ready job with the longest path behind it that fits."""
    placed, free, now = dict(machine.begun), list(machine.free), 0.0
    while len(placed) < len(machine.jobs):
        left = [name for name in machine.order if name not in placed]
        for name in left:
            needs = machine.jobs[name].needs
            if not all(each in placed and placed[each].end <= now for each in needs):
                continue
            count, among = machine.allowed(name)
            waiting = machine.waiting_for(each for each in left if each not in placed and each != name)
            here = sorted((unit for unit in among if free[unit] <= now), key=lambda unit: waiting.get(unit, 0.0))
            if len(here) >= count:
                units = tuple(here[:count])
                placed[name] = machine.placed(now, name, units)
                for unit in units:
                    free[unit] = placed[name].end
        later = [each.end for each in placed.values() if each.end > now]
        if len(placed) < len(machine.jobs) and later:
            now = min(later)
    return placed
