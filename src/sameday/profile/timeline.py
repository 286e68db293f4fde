"""Where the time of a plan's steps goes: some steps as the training loop does them, in a folder that is thrown away."""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sameday.commands.session import Session
from sameday.data.times import Times
from sameday.hardware.nvml import Watched
from sameday.hardware.phases import PHASES, Clock, during
from sameday.hardware.signals import StopRequest
from sameday.profile import quiet
from sameday.profile.kinds import by_kind, by_name
from sameday.record.folder import RunFolder
from sameday.spec.errors import EXIT_STOPPED, RunStopped
from sameday.tasks.base import Task, gone_through_before, lower_budget
from sameday.train.steps import Good, Steps
from sameday.train.watch import Watch

FAR = 3.0
"""A step of so many times the median is not like the others: something was compiled, or the machine was elsewhere."""

FEWER = 3
"""Steps that are timed with fewer threads."""
FEWER_FOR, PATIENT = FEWER + 3, 30.0
"""Steps that this takes in all, and the seconds that may be spent on them."""

NEVER = 10**9
PROFILED = 4
"""Steps, the second of the timed ones and those after it."""
WATCHED = 2.0
"""Seconds in which a GPU is asked for its use and clock."""


@dataclass(frozen=True)
class Timeline:
    """Seconds of the phases of each step, and beside them what worker processes took for a step on the average."""

    steps: tuple[dict[str, float], ...]
    workers: dict[str, float]
    samples: float
    """Of a step, on the average."""
    left_out: tuple[float, ...] = ()
    """Seconds of steps that were far from the others."""
    busy: float | None = None
    """The share of the time that a GPU had something to do."""
    launches: float | None = None
    """Kernels of a step."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by what they are for; some may run at once."""
    longest: dict[str, float] = field(default_factory=dict)
    """Those that take most of it, by their names."""
    memory: int | None = None
    """The most bytes that a GPU's allocator held."""
    waits: tuple[tuple[str, int], ...] = ()
    """Where the host waited for a GPU in a step, and how often, besides the loop's own place."""
    gpu: dict[str, float] = field(default_factory=dict)
    """What it told of itself meanwhile."""
    budget: int | None = None
    """What a micro-batch had to be lowered to; None where the plan's own was good."""

    @property
    def seconds(self) -> list[float]:
        return [sum(step.values()) for step in self.steps]

    @property
    def phases(self) -> dict[str, float]:
        """Of a step, on the average; they add up to it."""
        return {
            name: statistics.mean(step.get(name, 0.0) for step in self.steps)
            for name in PHASES
            if any(name in step for step in self.steps)
        }


def record(
    session: Session,
    task: Task,
    steps: int,
    warmup: int,
    progress: Callable[[int], None] = lambda _: None,
    watched: bool = True,
    by: Steps | None = None,
) -> Timeline:
    """`warmup` steps, then `steps` that count, computed and logged as the training loop does it, at a learning rate of
    zero. Nothing of the user's is written. `progress` is told how many are done; `watched` asks a GPU too. They are
    computed `by` what has gone through a run's warm-up, where there is one."""
    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    plan, numbers = session.resolved.plan, range(warmup + steps + 2)  # the last are followed by others, as usual
    budget: int | None = None
    first = gone_through_before(task, numbers, session.say)
    while True:
        goods: list[Good] = []
        order = [*first, *_order(task, numbers, budget, by)]
        before = len(order) - len(numbers)
        try:
            laps = _timed(session, task, order, budget, goods, partial(_told, progress, before), by)
            break
        except torch.OutOfMemoryError:
            step = order[len(goods)]  # they end in order
            budget = lower_budget(
                session.recipe.sample, task, step, budget, session.ranks, session.say, "all steps are"
            )
    counted = slice(before + warmup, before + warmup + steps)
    laps, goods = laps[counted], goods[counted]
    memory = torch.cuda.max_memory_reserved() if task.device.type == "cuda" else None
    usual = _most(laps)
    kept = tuple(lap for lap in laps if sum(lap.values()) <= usual)
    workers = {name: statistics.mean(good.input.get(name, 0.0) for good in goods) for name in Times._fields}
    return Timeline(
        kept,
        {name: seconds for name, seconds in workers.items() if plan.workers and seconds},
        statistics.mean(good.samples for good in goods),
        tuple(sum(lap.values()) for lap in laps if sum(lap.values()) > usual),
        memory=memory,
        budget=budget,
        **(_watched(session, task, warmup, budget, laps, by) if watched and task.device.type == "cuda" else {}),
    )


def _told(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(max(0, done - before))


def with_fewer_threads(session: Session, task: Task, line: Timeline) -> tuple[tuple[int, float], ...]:
    """Seconds of a step with one thread and with half of the CPU's, where that takes little time. A machine that others
    use, or a step of small operations, can be many times as fast so."""
    before, usual = torch.get_num_threads(), statistics.median(line.seconds)
    counts = sorted({1, before // 2} - {0, before}) if FEWER_FOR * usual <= PATIENT else []
    timed = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            seconds = statistics.median(record(session, task, FEWER, 1, watched=False).seconds)
            timed.append((count, seconds))
    finally:
        torch.set_num_threads(before)
    return tuple(timed)


def _timed(
    session: Session,
    task: Task,
    numbers: Sequence[int],
    budget: int | None,
    goods: list[Good],
    progress: Callable[[int], None],
    by: Steps | None,
) -> list[dict[str, float]]:
    """The phases of each step, by a clock that goes on from one to the next. How each ended is added to `goods`."""
    clock = Clock(task.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(RunFolder.open(Path(folder), session.recipe, session.plan, session.home)) as run,
        Watch(run, len(numbers) + 1, NEVER, task.device) as watch,
        StopRequest() as stop,
        _opened(session, task, by) as steps,
    ):
        for good in steps.run(numbers, clock, budget):
            with during("log"):
                watch.step(good)
            goods.append(good)
            progress(len(goods))
            if stop.asked:
                raise RunStopped("asked to stop before all steps were timed", EXIT_STOPPED)
        clock.stop()
    return clock.steps()


def _watched(
    session: Session,
    task: Task,
    first: int,
    budget: int | None,
    laps: Sequence[dict[str, float]],
    by: Steps | None,
    steps: int = PROFILED,
) -> dict[str, Any]:
    """What only a profiler knows. It makes the host slower and the gaps between kernels longer, but not the kernels:
    their time is held against that of the same steps when they were timed without it."""
    from torch.profiler import ProfilerActivity, profile

    quiet()
    seconds, same = beside(laps, steps)
    more = 2 + int(WATCHED / seconds)
    numbers = range(first, first + 2 * steps + 2 + more)
    with under_way(session, task, numbers, budget, by) as done:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(steps):
                next(done)
            torch.cuda.synchronize()
        waits = _waits(lambda: [next(done) for _ in range(steps)])
        with Watched(task.device) as nvml:
            for _ in range(more):
                next(done)
    events = [event for event in seen.events() or [] if event.device_type.name == "CUDA"]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    work = covered(spans) / 1e6 / steps
    kernels = [(event.name, event.time_range.elapsed_us() / 1e6 / steps * seconds / same) for event in events]
    return {
        "busy": min(1.0, work / same) if spans else None,
        "launches": len(spans) / steps,
        "kernels": by_kind(kernels),
        "longest": by_name(kernels),
        "waits": tuple((where, round(count / steps)) for where, count in waits if round(count / steps)),
        "gpu": nvml.medians(),
    }


def _most(laps: Sequence[dict[str, float]]) -> float:
    """Seconds of a step that is still like the others."""
    return FAR * statistics.median(sum(lap.values()) for lap in laps)


def beside(laps: Sequence[dict[str, float]], profiled: int) -> tuple[float, float]:
    """Seconds of a step on the average: of all that were timed, and of those of them that are profiled too, whose
    images may be larger or smaller; of all of them again where fewer were timed, or one of them was not like the
    others."""
    seconds, most = [sum(lap.values()) for lap in laps], _most(laps)
    usual, same = [each for each in seconds if each <= most], seconds[1 : 1 + profiled]
    alike = len(same) == profiled and max(same) <= most
    return statistics.mean(usual), statistics.mean(same if alike else usual)


@contextmanager
def under_way(
    session: Session, task: Task, numbers: Sequence[int], budget: int | None, by: Steps | None = None
) -> Iterator[Iterator[Good]]:
    """These steps after the first of them."""
    order = _order(task, numbers, budget, by)
    with _opened(session, task, by) as steps, closing(steps.run(order, budget=budget)) as done:
        for _ in range(len(order) - len(numbers) + 1):
            next(done)
        if task.device.type == "cuda":
            torch.cuda.synchronize()  # what was begun ahead is not of these steps
        yield done


def _opened(session: Session, task: Task, by: Steps | None) -> AbstractContextManager[Steps]:
    return closing(session.steps(task)) if by is None else nullcontext(by)


def _order(task: Task, numbers: Sequence[int], budget: int | None, by: Steps | None) -> list[int]:
    """These steps; where a plan records, all of them come once before, unless what they are computed `by` was warmed up
    for them. What adds to gradients is recorded anew for others than those of earlier steps, and a lower `budget` has
    other shapes."""
    recorded = by is not None and budget is None
    return [*(numbers if task.plan.cuda_graphs and not recorded else ()), *numbers]


def covered(spans: list[tuple[float, float]]) -> float:
    """How much time at least one of them covers."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _waits(work: Any) -> list[tuple[str, int]]:
    """Places at which `work` makes the host wait for the GPU, the most frequent first, without this file's own."""
    places: Counter[str] = Counter()
    synchronize = torch.cuda.synchronize

    def asked(device: torch.device | str | int | None = None) -> None:
        warnings.warn("synchronizing, since it was asked for", stacklevel=2)
        synchronize(device)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.synchronize = asked
        try:
            work()
        finally:
            torch.cuda.synchronize = synchronize
            torch.cuda.set_sync_debug_mode("default")
    for each in heard:
        if "synchronizing" in str(each.message) and Path(each.filename) != Path(__file__):
            places[f"{each.filename}:{each.lineno}"] += 1
    return places.most_common()
