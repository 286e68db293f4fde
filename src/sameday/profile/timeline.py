"""Where the time of a plan's steps goes, by the training loop itself: some steps in a folder that is thrown away."""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sameday.data.times import Times
from sameday.hardware.nvml import Watched
from sameday.hardware.parts import PARTS, Clock, during
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import EXIT_STOPPED, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.record import RunFolder, read_metrics
from sameday.tasks.base import Task
from sameday.train.ending import Answer, Ending
from sameday.train.loop import accumulate, batches_of_steps, train
from sameday.train.optim import Gradients, make_optimizer

FAR = 3.0
"""A step of so many times the median is not like the others: something was compiled, or the machine was elsewhere."""

NEVER = 10**9
WATCHED = 2.0
"""Seconds in which a GPU is asked for its use and clock."""


@dataclass(frozen=True)
class Timeline:
    """Seconds of the parts of each step, and beside them what worker processes took for a step on the average."""

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
    memory: int | None = None
    """The most bytes that a GPU's allocator held."""
    waits: tuple[tuple[str, int], ...] = ()
    """Where the host waited for a GPU in a step, and how often, besides the loop's own place."""
    gpu: dict[str, float] = field(default_factory=dict)
    """What it told of itself meanwhile."""

    @property
    def seconds(self) -> list[float]:
        return [sum(step.values()) for step in self.steps]

    @property
    def parts(self) -> dict[str, float]:
        """Of a step, on the average; they add up to it."""
        return {
            name: statistics.mean(step.get(name, 0.0) for step in self.steps)
            for name in PARTS
            if any(name in step for step in self.steps)
        }


class _Enough(Exception):
    """All steps are timed."""


class _Laps(Clock):
    """A clock that ends what it times after `most` steps, and tells of each."""

    def __init__(self, device: torch.device, most: int, progress: Callable[[int], None]) -> None:
        super().__init__(device)
        self._most, self._progress, self._count = most, progress, -1

    def again(self) -> None:
        super().again()
        self._count -= 1

    def lap(self) -> None:
        super().lap()
        self._count += 1
        self._progress(self._count)
        if self._count == self._most:
            self.stop()
            raise _Enough


def record(
    recipe: Recipe,
    plan: Plan,
    task: Task,
    home: Path,
    steps: int,
    warmup: int,
    progress: Callable[[int], None] = lambda _: None,
    watched: bool = True,
) -> Timeline:
    """`warmup` steps, then `steps` that count. Nothing of the user's is written, and no checkpoint. `progress` is told
    how many are done; `watched` asks a GPU's profiler too."""
    asked = {"log_steps": NEVER, "eval_steps": None, "save_steps": NEVER}
    plan, recipe = plan.model_copy(update=asked), recipe.model_copy(update={"max_steps": warmup + steps + 2})
    clock = _Laps(task.device, warmup + steps + 1, progress)  # one more: the end of the last is known then
    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, closing(RunFolder.open(Path(folder), recipe, plan, home)) as run:
        try:
            train(recipe, plan, task, run, Ranks(), clock=clock)
        except _Enough:
            pass
        except RunStopped as stopped:
            if stopped.code != EXIT_STOPPED:
                raise
            raise RunStopped("asked to stop before all steps were timed", EXIT_STOPPED) from None
        found = clock.steps()[warmup : warmup + steps]
        records = [each for each in read_metrics(run.metrics_path) if "split" not in each][warmup : warmup + steps]
    memory = torch.cuda.max_memory_reserved() if task.device.type == "cuda" else None
    usual = FAR * statistics.median(sum(step.values()) for step in found)
    kept = tuple(step for step in found if sum(step.values()) <= usual)
    workers = {name: statistics.mean(each.get(name, 0.0) for each in records) for name in Times._fields}
    return Timeline(
        kept,
        {name: seconds for name, seconds in workers.items() if plan.workers and seconds},
        statistics.mean(each["samples"] for each in records),
        tuple(sum(step.values()) for step in found if sum(step.values()) > usual),
        memory=memory,
        **(_watched(recipe, plan, task, warmup, kept) if watched and task.device.type == "cuda" else {}),
    )


class _Counting:
    """An iterable that counts what it gives."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source, self.count = source, 0

    def __iter__(self) -> Iterator[Any]:
        for each in self.source:
            self.count += 1
            yield each


def practice(recipe: Recipe, plan: Plan, task: Task, steps: Sequence[int]) -> Generator[int, None, None]:
    """The loop's own work for these steps without its records, at a rate of zero: when the end of each is known, which
    is as late as in the loop, how many micro-batches it had. Raises where memory runs out."""
    gradients = Gradients(task.trained())
    ending = Ending(make_optimizer(task.trained(), recipe, plan), gradients, recipe.max_grad_norm)
    begun: deque[tuple[int, int, Answer]] = deque()
    task.training(True)
    with closing(batches_of_steps(task, plan, steps, None, Ranks())) as feed:
        for number, step in enumerate(steps, 1):
            with during("optimizer"):
                gradients.zero()
            pieces = _Counting(next(feed))
            accumulate(task, pieces, gradients, step, 1 / task.count(task.step_ids(step)))
            answer = ending.begin(0.0)
            feed.look_ahead()
            begun.append((step, pieces.count, answer))
            while len(begun) > (ending.ahead if number < len(steps) else 0):
                done, count, answer = begun.popleft()
                _, out_of_memory, _, _ = ending.finish(answer)
                if out_of_memory:
                    raise torch.OutOfMemoryError(f"in step {done + 1}")
                yield count


def _watched(
    recipe: Recipe, plan: Plan, task: Task, first: int, timed: Sequence[dict[str, float]], steps: int = 4
) -> dict[str, Any]:
    """What only a profiler knows. It makes the host slower and the gaps between kernels longer, but not the kernels:
    their time is held against that of the steps that were timed without it."""
    from torch.profiler import ProfilerActivity, profile

    seconds = statistics.mean(sum(step.values()) for step in timed)
    more = 2 + int(WATCHED / seconds)
    with closing(practice(recipe, plan, task, range(first, first + 2 * steps + 2 + more))) as done:
        next(done)
        torch.cuda.synchronize()  # what was begun ahead is not of these steps
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(steps):
                next(done)
            torch.cuda.synchronize()
        waits = _waits(lambda: [next(done) for _ in range(steps)])
        with Watched(task.device) as nvml:
            for _ in range(more):
                next(done)
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() or [] if e.device_type.name == "CUDA"]
    work = covered(spans) / 1e6 / steps
    return {
        "busy": min(1.0, work / seconds) if spans else None,
        "launches": len(spans) / steps,
        "waits": tuple((where, round(count / steps)) for where, count in waits if round(count / steps)),
        "gpu": nvml.found(),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """How much time at least one of them covers."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def _waits(work: Any) -> list[tuple[str, int]]:
    """Places at which `work` makes the host wait for the GPU, the most frequent first, without this file's own."""
    found: Counter[str] = Counter()
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
            found[f"{each.filename}:{each.lineno}"] += 1
    return found.most_common()
