"""Which job runs when and on which GPUs: pure functions of seconds, needs and resources. Up to `EXACT` jobs no schedule
is shorter; beyond, the job with the longest path behind it goes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import product
from operator import le
from typing import Any, NamedTuple

EXACT = 10
"""So many jobs are searched through; the time for it grows with their factorial."""
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
        rank = {name: number for number, name in enumerate(_topological(self.tasks))}
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
    machine = _Machine(_without_empty(jobs), gpus, slots)
    placed, bound = _listed(machine), _bound(machine)
    best = _end(placed) <= bound * (1 + SAME)
    if search and not best and len(machine.jobs) <= EXACT:
        placed, best = _Search(machine, placed).run(), True
    for name in _topological(jobs):
        if name not in placed:
            at = max((placed[each].end for each in jobs[name].needs), default=0.0)
            placed[name] = Placed(at, at, jobs[name].pinned or tuple(range(jobs[name].gpus)))
    return Schedule({name: placed[name] for name in jobs}, bound, best, jobs)


def priority(jobs: Mapping[str, Task], gpus: int, slots: int) -> list[str]:
    """All jobs in the order in which a runner should take those that are ready: as the schedule starts them."""
    return schedule(jobs, gpus, slots).order


def paths(jobs: Mapping[str, Task]) -> dict[str, float]:
    """Seconds from the start of each job to the end of all that waits for it."""
    behind: dict[str, list[str]] = {name: [] for name in jobs}
    for name, task in jobs.items():
        for each in task.needs:
            behind[each].append(name)
    longest: dict[str, float] = {}
    for name in reversed(_topological(jobs)):
        longest[name] = jobs[name].seconds + max((longest[each] for each in behind[name]), default=0.0)
    return longest


def _topological(jobs: Mapping[str, Task]) -> list[str]:
    return list(TopologicalSorter({name: task.needs for name, task in jobs.items()}).static_order())


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
    for name in _topological(jobs):
        each = ((other,) if jobs[other].seconds > 0 else needs[other] for other in jobs[name].needs)
        needs[name] = tuple(dict.fromkeys(other for part in each for other in part))
    return {
        name: replace(task, needs=() if task.running else needs[name])
        for name, task in jobs.items()
        if task.seconds > 0
    }


class _Machine:
    """Jobs on a machine's units: its GPUs by number, and behind them its CPU slots."""

    def __init__(self, jobs: Mapping[str, Task], gpus: int, slots: int) -> None:
        self.jobs, self.gpus, self.slots = jobs, gpus, slots
        self.path = paths(jobs)
        self.order = sorted(_topological(jobs), key=lambda name: -self.path[name])
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


def _bound(machine: _Machine) -> float:
    """The longest path; all work over all GPUs, and over all slots; and the work that is pinned to a GPU."""
    jobs = machine.jobs.values()
    work = sum(task.seconds * task.gpus for task in jobs)
    waits = sum(task.seconds for task in jobs if not task.gpus)
    shares = [work / machine.gpus] if machine.gpus else []
    shares += [waits / machine.slots] if machine.slots else []
    pinned = machine.waiting_for(machine.jobs).values()
    longest = sorted((task for task in jobs if task.gpus), key=lambda task: -task.seconds)
    crowded = [_crowded([(task.seconds, task.gpus) for task in longest], machine.gpus)] if machine.gpus else []
    slots = sorted((task.seconds for task in jobs if not task.gpus), reverse=True)
    crowded += [_crowded([(seconds, 1) for seconds in slots], machine.slots)] if machine.slots else []
    return max([*machine.path.values(), *shares, *pinned, *crowded], default=0.0)


def _crowded(longest: Iterable[tuple[float, int]], units: int) -> float:
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


def _listed(machine: _Machine) -> dict[str, Placed]:
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


def _shared(seconds: list[float], free: list[float], below: float) -> tuple[float, list[int]] | None:
    """The earliest end of jobs, the longest first, on units that are free then, and the unit of each; None where it is
    not `below`."""
    loads, on, best = list(free), [0] * len(seconds), None
    left = [sum(seconds[n:]) for n in range(len(seconds))]

    def put(n: int) -> None:
        nonlocal below, best
        if n == len(seconds):
            below = max(loads)
            best = (below, list(on))
            return
        if (sum(loads) + left[n]) / len(loads) >= below:
            return
        tried = set()
        for unit in sorted(range(len(loads)), key=loads.__getitem__):
            before = loads[unit]
            if before + seconds[n] >= below:
                return
            if before not in tried:
                tried.add(before)
                loads[unit], on[n] = before + seconds[n], unit
                put(n + 1)
                loads[unit] = before

    put(0)
    return best


class _Way(NamedTuple):
    """A schedule of some jobs, in the order in which they start: no other starts before `last`."""

    done: int
    ends: list[float]
    free: list[float]
    """Since when each unit has nothing to do."""
    behind: list[tuple[float, float]]
    """Start and seconds of the job that each unit had last, where it had this one alone and nothing waits for it."""
    last: float
    end: float
    starts: float
    """Their sum."""
    way: list[tuple[float, int, tuple[int, ...]]]


class _Search:
    """Branch and bound over jobs in the order in which they start. Of the shortest schedules one is looked for whose
    starts add up to the least: in it no job could start earlier while all others stay, and on one unit the shorter of
    two jobs goes before the longer where they could change places. What cannot become that one is left out. Once no
    order matters any more, the jobs that are left are shared out. Jobs are numbers here, and sets of jobs the bits of a
    number."""

    def __init__(self, machine: _Machine, first: dict[str, Placed]) -> None:
        self.machine, self.least = machine, _end(first)
        self.best = first
        names = _topological(machine.jobs)
        tasks = [machine.jobs[name] for name in names]
        number = {name: each for each, name in enumerate(names)}
        self.names, self.all = names, (1 << len(names)) - 1
        self.seconds = [task.seconds for task in tasks]
        self.needs = [[number[each] for each in task.needs] for task in tasks]
        self.needed = [sum(1 << each for each in needs) for needs in self.needs]
        self.behind = [sum(1 << m for m, needs in enumerate(self.needs) if n in needs) for n in range(len(names))]
        self.path = [machine.path[name] for name in names]
        self.count, self.among = zip(*(machine.allowed(name) for name in names), strict=True)
        self.pinned = [[task.pinned for task in tasks].index(task.pinned) if task.pinned else None for task in tasks]
        self.gpu_work = [task.seconds * task.gpus for task in tasks]
        self.waits = [0.0 if task.gpus else task.seconds for task in tasks]
        alike = [(task.seconds, task.gpus, task.pinned, self.needed[n], self.behind[n]) for n, task in enumerate(tasks)]
        self.twins = [sum(1 << m for m in range(n) if alike[m] == alike[n]) for n in range(len(names))]
        """Earlier jobs that are the same in every way: they go first."""
        self.on_gpus = [n for n in sorted(range(len(names)), key=lambda n: -self.seconds[n]) if tasks[n].gpus]
        self.on_slots = [n for n in sorted(range(len(names)), key=lambda n: -self.seconds[n]) if not tasks[n].gpus]
        alone = [n for n, task in enumerate(tasks) if task.gpus < 2 and not task.pinned and not self.behind[n]]
        self.alone = sum(1 << n for n in alone)
        """Jobs on one unit, whichever, for which nothing waits."""
        self.first = sorted(range(len(names)), key=lambda n: -self.path[n])
        self.seen: dict[int, list[tuple[float, ...]]] = {}
        self.grouped: dict[int, list[list[int]]] = {}

    def run(self) -> dict[str, Placed]:
        begun, free = self.machine.begun, list(self.machine.free)
        done = sum(1 << n for n, name in enumerate(self.names) if name in begun)
        ends = [begun[name].end if name in begun else 0.0 for name in self.names]
        self._extend(_Way(done, ends, free, [(0.0, 0.0)] * len(free), 0.0, max(ends, default=0.0), 0.0, []))
        return self.best

    def _extend(self, so_far: _Way) -> None:
        done, ends, last = so_far.done, so_far.ends, so_far.last
        if done == self.all:
            if so_far.end < self.least:
                self.least = so_far.end
                self.best = self._moved_up(so_far.way)
            return
        free = [max(each, last) for each in so_far.free]
        if self._at_least(done, ends, free, so_far.end) >= self.least * (1 - SAME):
            return
        if not self.all & ~done & ~self.alone and self._all_ready(so_far, free):
            self._share_out(so_far, free)
            return
        groups = [sorted(group, key=so_far.free.__getitem__) for group in self._groups(done)]
        if self._dominated(so_far, free, groups):
            return
        ways, soonest = [], math.inf
        for n in self.first:
            if done >> n & 1 or self.needed[n] & ~done or self.twins[n] & ~done:
                continue
            ready = max([ends[each] for each in self.needs[n]], default=0.0)
            for units in self._ways(n, groups):
                start = max(ready, max([so_far.free[unit] for unit in units]))
                # A job that could end before another starts would have been started first.
                soonest = min(soonest, max(start, last) + self.seconds[n])
                if start >= last and not self._swapped(so_far, n, units, ready):
                    ways.append((start, n, units))
        for start, n, units in ways:
            if start < soonest:  # seconds are above zero, so that at least one starts before the soonest end
                self._extend(self._with(so_far, start, n, units))

    def _all_ready(self, so_far: _Way, free: list[float]) -> bool:
        """Whether all that the others wait for has ended before a unit is free for them."""
        gpus, done = self.machine.gpus, so_far.done
        ready = {True: min(free[:gpus], default=0.0), False: min(free[gpus:], default=0.0)}
        left = [n for n in range(len(self.names)) if not done >> n & 1]
        return all(so_far.ends[each] <= ready[self.gpu_work[n] > 0] for n in left for each in self.needs[n])

    def _share_out(self, so_far: _Way, free: list[float]) -> None:
        gpus, end, way = self.machine.gpus, so_far.end, list(so_far.way)
        for jobs, units in ((self.on_gpus, range(gpus)), (self.on_slots, range(gpus, len(free)))):
            left = [n for n in jobs if not so_far.done >> n & 1]
            if left:
                lengths, free_then = [self.seconds[n] for n in left], [free[unit] for unit in units]
                shared = _shared(lengths, free_then, self.least * (1 - SAME))
                if shared is None:
                    return
                end = max(end, shared[0])
                way += [(0.0, n, (units[on],)) for n, on in zip(left, shared[1], strict=True)]
        if end < self.least:
            self.least, self.best = end, self._moved_up(way)

    def _swapped(self, so_far: _Way, n: int, units: tuple[int, ...], ready: float) -> bool:
        """Whether the job goes behind a longer one that nothing waits for, on one unit, and could change places."""
        began, took = so_far.behind[units[0]]
        return took > self.seconds[n] and len(units) == 1 and ready <= began

    def _with(self, so_far: _Way, start: float, n: int, units: tuple[int, ...]) -> _Way:
        ends, free, behind = list(so_far.ends), list(so_far.free), list(so_far.behind)
        ends[n] = start + self.seconds[n]
        for unit in units:
            free[unit] = ends[n]
            behind[unit] = (start, 0.0 if self.behind[n] or len(units) > 1 else self.seconds[n])
        end, starts, way = max(so_far.end, ends[n]), so_far.starts + start, [*so_far.way, (start, n, units)]
        return _Way(so_far.done | 1 << n, ends, free, behind, start, end, starts, way)

    def _moved_up(self, way: list[tuple[Any, ...]]) -> dict[str, Placed]:
        """Each job as early as those before it allow: what does not make the end later may have been put off."""
        placed, free = dict(self.machine.begun), list(self.machine.free)
        for _, n, units in way:
            ends = (placed[self.names[each]].end for each in self.needs[n])
            placed[self.names[n]] = here = self.machine.placed(
                max([*ends, *(free[unit] for unit in units)]), self.names[n], units
            )
            for unit in units:
                free[unit] = here.end
        return placed

    def _groups(self, done: int) -> list[list[int]]:
        """Units for which the same jobs wait: slots, GPUs that any job may take, and those that some job must have."""
        if done not in self.grouped:
            kinds: dict[tuple[int, ...], list[int]] = {}
            for unit in self.machine.units:
                own = [n for n, kind in enumerate(self.pinned) if kind is not None and not done >> n & 1]
                kind = tuple(n for n in own if unit in self.among[n]) if unit < self.machine.gpus else (-1,)
                kinds.setdefault(kind, []).append(unit)
            self.grouped[done] = list(kinds.values())
        return self.grouped[done]

    def _ways(self, n: int, groups: list[list[int]]) -> Iterator[tuple[int, ...]]:
        """Units for a job: of each group those that are free first."""
        count, among = self.count[n], self.among[n]
        fitting = [group for group in groups if group[0] in among]
        for numbers in product(*(range(min(count, len(group)) + 1) for group in fitting)):
            if sum(numbers) == count:
                yield tuple(u for group, number in zip(fitting, numbers, strict=True) for u in group[:number])

    def _at_least(self, done: int, ends: list[float], free: list[float], end: float) -> float:
        """When this can end at the earliest."""
        gpus = self.machine.gpus
        ends, least = list(ends), end
        work, waits = sum(free[:gpus]), sum(free[gpus:])
        pinned: dict[int, float] = {}
        any_gpu, any_slot = min(free[:gpus], default=0.0), min(free[gpus:], default=0.0)
        for n, seconds in enumerate(self.seconds):
            if done >> n & 1:
                continue
            ready = any_gpu if self.gpu_work[n] else any_slot if self.waits[n] else 0.0
            if self.pinned[n] is not None:
                ready = max(free[unit] for unit in self.among[n])
                for unit in self.among[n]:
                    pinned[unit] = pinned.get(unit, free[unit]) + seconds
            for each in self.needs[n]:
                ready = max(ready, ends[each])
            ends[n] = ready + seconds
            least = max(least, ready + self.path[n])
            work, waits = work + self.gpu_work[n], waits + self.waits[n]
        shares = (work / gpus if gpus else 0.0, waits / self.machine.slots if self.machine.slots else 0.0)
        lists = (self.on_gpus, gpus, any_gpu), (self.on_slots, self.machine.slots, any_slot)
        crowded = [
            at + _crowded([(self.seconds[n], self.count[n]) for n in each if not done >> n & 1], units)
            for each, units, at in lists
            if each
        ]
        # Free times are part of both sums: where nothing is left to be done they say nothing.
        left = self.all & ~done
        on_gpus = any(left >> n & 1 and each for n, each in enumerate(self.gpu_work))
        on_slots = any(left >> n & 1 and each for n, each in enumerate(self.waits))
        return max(least, on_gpus and shares[0], on_slots and shares[1], *pinned.values(), *crowded)

    def _dominated(self, so_far: _Way, free: list[float], groups: list[list[int]]) -> bool:
        """Whether the same jobs were done before so that everything is free, and started and ended, no later."""
        done = so_far.done
        waited = [each for n, each in enumerate(so_far.ends) if done >> n & 1 and self.behind[n] & ~done]
        state = (*[free[unit] for group in groups for unit in group], *waited, so_far.end, so_far.starts)
        known = self.seen.setdefault(done, [])
        if any(all(map(le, other, state)) for other in known):
            return True
        known[:] = [other for other in known if not all(map(le, state, other))]
        known.append(state)
        return False
