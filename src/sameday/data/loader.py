"""Jobs in, batches out, in order, prepared ahead by worker processes where the plan asks for them. Workers change
when a batch is made, never what is in it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from sameday.data.feed import Feed
from sameday.spec.plan import Plan

Job = TypeVar("Job")


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

    def __getitem__(self, i: int) -> list[Any]:
        return list(self.build(self.jobs[i]))


def stream(
    jobs: Sequence[Job],
    build: Callable[[Job], Iterable[Any]],
    *,
    workers: int,
    prefetch: int,
    pin_memory: bool,
) -> Generator[Iterable[Any], None, None]:
    """For each job the batches that `build` makes of it. Without workers each batch is made when it is asked for,
    so that only one is held at a time. Whoever stops before the end closes the generator, which ends its workers."""
    if workers == 0:
        for job in jobs:
            made = build(job)
            yield (batch.pin_memory() for batch in made) if pin_memory else made
        return
    ahead = iter(_loader(jobs, build, workers, prefetch, pin_memory))
    try:
        yield from ahead
    finally:
        # Workers ignore the signal that Python's own exit would send them, and it would wait for them for ever.
        ahead._shutdown_workers()  # type: ignore[attr-defined]


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
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
