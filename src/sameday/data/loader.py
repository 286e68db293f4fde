"""Jobs in, batches out, in order, prepared ahead by worker processes where the plan asks for them. Workers change
when a batch is made, never what is in it."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from sameday.data.feed import Feed
from sameday.hardware.signals import ASKING, in_main_thread
from sameday.spec.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, SAID, BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.spec.words import tell

Job = TypeVar("Job")

SENDER_GONE = (ConnectionError, EOFError, FileNotFoundError)
"""What it raises to receive a batch whose worker has died since it was sent: tensors are fetched from the worker."""

NOTICED = 2.0
"""Seconds in which the death of such a worker is known."""

TRIES = 3
"""Times in a row that workers may be killed without a batch in between."""


class Supply(TypedDict):
    workers: int
    prefetch: int
    pin_memory: bool


def supply(plan: Plan, device: torch.device) -> Supply:
    """How the plan has batches made for a device. Only a GPU copies from pinned memory."""
    return {
        "workers": plan.workers,
        "prefetch": plan.prefetch,
        "pin_memory": plan.pin_memory and device.type == "cuda",
    }


def feed(plan: Plan, device: torch.device, jobs: Sequence[Job], build: Callable[[Job], Iterable[Any]]) -> Feed:
    """The batches that `build` makes of each job, on the device."""
    how = supply(plan, device)
    return Feed(stream(jobs, build, **how), device, how["pin_memory"])


class _Jobs(Dataset, Generic[Job]):
    def __init__(self, jobs: Sequence[Job], build: Callable[[Job], Iterable[Any]]) -> None:
        self.jobs, self.build = jobs, build

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, i: int) -> list[Any] | BadInput | RunStopped:
        try:
            return list(self.build(self.jobs[i]))
        except SAID as error:
            return error  # raised in a worker, torch would put its traceback before the sentence


def stream(
    jobs: Sequence[Job],
    build: Callable[[Job], Iterable[Any]],
    *,
    workers: int,
    prefetch: int,
    pin_memory: bool,
) -> Generator[Iterable[Any], None, None]:
    """For each job the batches that `build` makes of it. Without workers each batch is made when it is asked for,
    so that only one is held at a time. Whoever stops before the end closes the generator, which ends its workers.

    Where a worker is killed, all of them are started again from the first job that is missing: a job's batches are the
    same whoever makes them, and whenever. From then on each prepares one job ahead, because memory is the usual reason,
    and because a job that was sent can then not be lost with the next one."""
    if workers == 0:
        for job in jobs:
            made = build(job)
            yield (batch.pin_memory() for batch in made) if pin_memory else made
        return
    done = times = 0
    while done < len(jobs):
        ahead = _started(_loader(jobs[done:], build, workers, prefetch, pin_memory))
        try:
            while (batches := _next(ahead)) is not None:
                if isinstance(batches, SAID):
                    raise batches
                done, times = done + 1, 0
                yield batches
        except _WorkerKilled as killed:
            times += 1
            if times == TRIES:
                raise RunStopped(
                    f"data workers were killed {TRIES} times in a row ({killed}). What is left to try: fewer "
                    "plan.workers, a smaller plan.prefetch, plan.workers 0.",
                    EXIT_OUT_OF_MEMORY if killed.by_system else EXIT_FAILED,
                    alone=True,
                ) from None
            prefetch = 1
            tell(f"{killed}: all workers are started again with prefetch 1, and no data is lost", sys.stderr)
        finally:
            # Workers ignore the signal that Python's own exit would send them, and it would wait for them for ever.
            ahead._shutdown_workers()


class _WorkerKilled(Exception):
    """`by_system`: with the signal that a system sends where memory runs out."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.by_system = -signal.SIGKILL in codes
        how = {f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}" for code in codes}
        why = ", as a system does where memory runs out" if self.by_system else ""
        super().__init__(f"a data worker was ended {' and '.join(sorted(how))}{why}")


def _started(loader: DataLoader[Any]) -> Any:
    """The loader's iterator. torch would raise an error wherever this process is when a worker dies, in the middle of
    an update of the weights too: here that is for `_next` to do."""
    before = signal.getsignal(signal.SIGCHLD)
    ahead = iter(loader)
    if in_main_thread():
        signal.signal(signal.SIGCHLD, before)
    return ahead


def _next(ahead: Any) -> list[Any] | BadInput | RunStopped | None:
    """The next job's batches, or why there are none, or None after the last. A worker that dies while it sends them
    would be waited for without an end: its death is heard of at once. That of another round's worker is for that round
    to hear of."""
    listens, before = in_main_thread(), signal.getsignal(signal.SIGCHLD)
    try:
        try:
            if listens:
                signal.signal(signal.SIGCHLD, lambda *_: _raise_if_died(ahead))
            _check_workers(ahead)  # what died before
            batches: list[Any] | BadInput | RunStopped | None = next(ahead, None)
            return batches
        finally:
            if listens:
                signal.signal(signal.SIGCHLD, before)
    except (RuntimeError, *SENDER_GONE) as error:
        if listens:
            signal.signal(signal.SIGCHLD, before)  # what is heard of may have broken off the line above
        until = time.monotonic() + (NOTICED if isinstance(error, SENDER_GONE) else 0.0)
        _check_workers(ahead)
        while time.monotonic() < until:
            time.sleep(0.05)
            _check_workers(ahead)
        raise


def _raise_if_died(ahead: Any) -> None:
    if any(worker.exitcode for worker in ahead._workers):
        raise RuntimeError("a data worker died")


def _check_workers(ahead: Any) -> None:
    codes = [worker.exitcode for worker in ahead._workers if worker.exitcode]
    if not codes:
        return
    listens, before = in_main_thread(), signal.getsignal(signal.SIGCHLD)
    if listens:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in ahead._workers:
        worker.kill()  # they may wait for a lock that the dead one held
        worker.join()
    if listens:
        signal.signal(signal.SIGCHLD, before)
    ahead._workers_done_event = threading.Event()  # so may this one
    raise _WorkerKilled(codes)


def _loader(
    jobs: Sequence[Job],
    build: Callable[[Job], Iterable[Any]],
    workers: int,
    prefetch: int,
    pin_memory: bool,
) -> DataLoader[Any]:
    return DataLoader(
        _Jobs(jobs, build),
        batch_size=None,
        shuffle=False,
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin_memory,
        multiprocessing_context="fork",
        worker_init_fn=_begin,
    )


def _begin(_worker: int) -> None:
    """A batch system signals every process of a job. What that means is for the training process to decide. Nor does a
    worker collect what it was forked with: a CUDA graph among it would abort a process that has no GPU."""
    gc.freeze()
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
