"""The shortest schedule of a few jobs on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from operator import le
from typing import Any, NamedTuple

from sameday.suite.times.machine import SAME, Machine, Placed, crowded, topological


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


class Search:
    """Branch and bound over jobs in the order in which they start. Of the shortest schedules one is looked for whose
    starts add up to the least: in it no job could start earlier while all others stay, and on one unit the shorter of
    two jobs goes before the longer where they could change places. What cannot become that one is left out. Once no
    order matters any more, the jobs that are left are shared out. Jobs are numbers here, and sets of jobs the bits of a
    number."""

    def __init__(self, machine: Machine, first: dict[str, Placed]) -> None:
        self.machine, self.least = machine, max((each.end for each in first.values()), default=0.0)
        self.best = first
        names = topological(machine.jobs)
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
        crowd = [
            at + crowded([(self.seconds[n], self.count[n]) for n in each if not done >> n & 1], units)
            for each, units, at in lists
            if each
        ]
        # Free times are part of both sums: where nothing is left to be done they say nothing.
        left = self.all & ~done
        on_gpus = any(left >> n & 1 and each for n, each in enumerate(self.gpu_work))
        on_slots = any(left >> n & 1 and each for n, each in enumerate(self.waits))
        return max(least, on_gpus and shares[0], on_slots and shares[1], *pinned.values(), *crowd)

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
