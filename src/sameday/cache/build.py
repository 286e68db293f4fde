"""A cache is filled ahead of time: images are prepared by threads, finished by the caller's thread (which has the GPU)
and written by threads again. Several builders share the work, and one that ends early has lost nothing."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from sameday.cache.store import CacheFull, CacheReadOnly, Store, free_bytes, in_bytes
from sameday.spec.errors import BadInput, DiskTooSmall

MARGIN = 0.02
"""Of what is to be written: file systems keep some of their own for each file."""
BLOCK = 4096
"""A file takes whole blocks of a disk."""
SPARE = 2
"""Entries on the way beyond one per thread, so that no thread waits for the caller's."""
LOOK = 0.5
"""Seconds after which the caller's thread looks up from waiting, to see whether it is to stop."""
SAMPLE_SECONDS = 10.0
LEAST_SECONDS, MOST_SECONDS = 10.0, 60.0
"""Between two lines: with a tenth of the work done, and without."""
SHOWN = 20

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Job(Generic[Item]):
    """An entry to make: its content, the exact size of its file (`Store.size_of`), and what it is made from."""

    content: str
    size: int
    item: Item


@dataclass(frozen=True)
class Estimate(Generic[Item]):
    """What a build has to do, exactly, before anything is read or computed."""

    entries: int
    size: int
    """Bytes of all entries, those that are there and those to write."""
    missing: list[Job[Item]]
    free: int

    @property
    def to_write(self) -> int:
        return sum(job.size for job in self.missing)

    @property
    def needed(self) -> int:
        """Bytes of disk that it takes to write them."""
        return int((1 + MARGIN) * sum(-job.size // BLOCK * -BLOCK for job in self.missing))


@dataclass(frozen=True)
class Built:
    """`made` by this build; the `found` ones were there before, or another builder was faster. Errors are none, unless
    it was `stopped`: then the next build meets them."""

    made: int
    found: int
    size: int
    """Bytes written."""
    seconds: float
    stopped: bool


def estimate(store: Store, jobs: Sequence[Job[Item]]) -> Estimate[Item]:
    """Each content counts once. An entry whose size is wrong is missing: it is made again."""
    unique = {job.content: job for job in jobs}.values()
    there = store.contents()
    missing = [job for job in unique if job.content not in there or not store.has(job.content, job.size)]
    return Estimate(len(unique), sum(job.size for job in unique), missing, free_bytes(store.folder))


def check_room(store: Store, plan: Estimate[Item]) -> None:
    if plan.free < plan.needed:
        raise DiskTooSmall(
            f"{store.folder}: {store.settings.kind} of {len(plan.missing)} images need {in_bytes(plan.needed)} of "
            f"disk, and {in_bytes(plan.free)} are free; make room, or choose another folder"
        )


def build(
    store: Store,
    jobs: Sequence[Job[Item]],
    prepare: Callable[[Job[Item]], Prepared],
    finish: Callable[[Prepared], Mapping[str, Tensor]],
    *,
    workers: int,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> Built:
    """Make what is missing. `prepare` runs in threads, `finish` in this one.

    - A ValueError or OSError belongs to its entry: the others are made, then all errors are raised as one BadInput.
      Anything else is a fault of the program, and ends the build at once.
    - CacheFull and CacheReadOnly end it; so does an interrupt, and `stop`, which is asked before each entry. What is
      being written then arrives; the rest is dropped.
    """
    if workers < 1:
        raise ValueError(f"workers {workers} of a build: at least 1 is needed")
    plan = estimate(store, jobs)
    kind = store.settings.kind
    if not plan.missing:
        say(f"{kind}: {plan.entries} images, {in_bytes(plan.size)}, all of them there")
        return Built(0, plan.entries, 0, 0.0, False)
    check_room(store, plan)
    work = _Work(store, plan, prepare, finish, workers, say, stop)
    try:
        stopped = work.run()
    except CacheFull as full:
        left = estimate(store, jobs)
        more = (
            f"{full.more}; {left.entries - len(left.missing)} of {left.entries} entries are done and stay: "
            "make room, and the same command makes the rest"
        )
        raise CacheFull(store.folder, left.needed, left.free, more) from None
    seconds = time.monotonic() - work.began
    if work.errors and not stopped:
        raise _in_one(work.errors, plan.entries, kind)
    ended = ", stopped before the end" if stopped else ""
    say(f"{kind}: {work.made} images made, {in_bytes(work.size)} in {in_time(seconds)}{ended}")
    return Built(work.made, plan.entries - len(plan.missing) + work.made_elsewhere, work.size, seconds, stopped)


def in_time(seconds: float) -> str:
    """A duration as people say it, in its two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s" if m else f"{s} s"


class _Work(Generic[Item, Prepared]):
    """The entries on their way. Only the caller's thread touches this; a thread of the pool is given one entry."""

    def __init__(
        self,
        store: Store,
        plan: Estimate[Item],
        prepare: Callable[[Job[Item]], Prepared],
        finish: Callable[[Prepared], Mapping[str, Tensor]],
        workers: int,
        say: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:
        self.store, self.plan, self.prepare, self.finish = store, plan, prepare, finish
        self.workers, self.say, self.stop = workers, say, stop
        # Each builder in an order of its own, so that two share the work. In one order from different places, the one
        # that catches up would from there on make each entry at the same moment as the other.
        self.waiting = random.SystemRandom().sample(plan.missing, len(plan.missing))
        self.preparing: dict[Future[tuple[Prepared] | None], Job[Item]] = {}
        self.writing: dict[Future[None], Job[Item]] = {}
        self.errors: list[str] = []
        self.made = self.made_elsewhere = self.size = 0
        self.left = plan.to_write
        self.began = self.said = time.monotonic()
        self.tenth = 0
        self.sampling = True

    def run(self) -> bool:
        """Whether it was stopped before its end."""
        if len(self.plan.missing) <= 2 * self.workers:  # too few to learn from
            self._announce("")
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="cache")
        try:
            while self.waiting or self.preparing or self.writing:
                if self.stop():
                    return True
                self._hand_out(pool)
                self._collect(pool)
                self._tell()
            return False
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for future, job in self.writing.items():
                if not future.cancelled() and future.exception() is None:
                    self._written(job)

    def _hand_out(self, pool: ThreadPoolExecutor) -> None:
        """Never more on the way than a few: each holds an image in memory."""
        while self.waiting and len(self.preparing) + len(self.writing) < self.workers + SPARE:
            job = self.waiting.pop()
            self.preparing[pool.submit(self._prepare, job)] = job

    def _prepare(self, job: Job[Item]) -> tuple[Prepared] | None:
        """Nothing where another builder has made the entry since this one looked."""
        return None if self.store.has(job.content, job.size) else (self.prepare(job),)

    def _collect(self, pool: ThreadPoolExecutor) -> None:
        """All that was written, and one prepared entry only: threads get new work before the next is finished here."""
        under_way: list[Future[Any]] = [*self.preparing, *self.writing]
        done, _ = wait(under_way, timeout=LOOK, return_when=FIRST_COMPLETED)
        for written in [future for future in self.writing if future in done]:
            job = self.writing.pop(written)
            with self._charged_to(job):
                written.result()
                self._written(job)
        for prepared in [future for future in self.preparing if future in done][:1]:
            job = self.preparing.pop(prepared)
            with self._charged_to(job):
                ready = prepared.result()
                if ready is None:
                    self.made_elsewhere += 1
                    self.left -= job.size
                    return
                tensors = self.finish(*ready)
                size = self.store.size_of(job.content, tensors)
                assert size == job.size, f"the entry of {job.content} has {size} bytes, and its job says {job.size}"
                self.writing[pool.submit(self.store.write, job.content, tensors)] = job

    @contextlib.contextmanager
    def _charged_to(self, job: Job[Item]) -> Iterator[None]:
        try:
            yield
        except (CacheFull, CacheReadOnly):
            raise
        except (ValueError, OSError) as error:
            self.errors.append(f"{job.content}: {error}")
            self.left -= job.size

    def _written(self, job: Job[Item]) -> None:
        self.made += 1
        self.size += job.size
        self.left -= job.size

    def _tell(self) -> None:
        """The estimate once a few entries are made; then a line now and then."""
        now, total = time.monotonic(), len(self.plan.missing)
        done = self.made + self.made_elsewhere + len(self.errors)
        if not self.made or done == total:
            return
        rate = self.size / max(now - self.began, 1e-9)
        if self.sampling:
            if done >= 2 * self.workers or now - self.began > SAMPLE_SECONDS:
                self._announce(f", about {in_time(self.left / rate)}")
            return
        since, tenth = now - self.said, 10 * done // total
        if since >= MOST_SECONDS or (since >= LEAST_SECONDS and tenth > self.tenth):
            there = self.plan.entries - total + done
            left = in_time(self.left / rate)
            kind = self.store.settings.kind
            self.say(f"{kind}: {there} of {self.plan.entries} images, {in_bytes(int(rate))}/s, about {left} left")
            self.said, self.tenth = now, tenth

    def _announce(self, duration: str) -> None:
        plan, threads = self.plan, f"{self.workers} thread{'s' if self.workers > 1 else ''}"
        self.say(
            f"{self.store.settings.kind}: {plan.entries} images, {in_bytes(plan.size)} ({in_bytes(plan.to_write)} to "
            f"write, {in_bytes(plan.free)} free){duration} with {threads}"
        )
        self.sampling, self.said = False, time.monotonic()


def _in_one(errors: list[str], entries: int, kind: str) -> BadInput:
    more = [f"and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
    first = f"{kind} of {len(errors)} of {entries} images could not be made; all others are there:"
    return BadInput("\n  ".join([first, *errors[:SHOWN], *more]))
