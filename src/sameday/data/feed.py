"""The last leg of the input: micro-batches come to the device while it still computes those before them, and what they
cost is counted."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameday.data.times import Times
from sameday.hardware.phases import during


class _Sent(NamedTuple):
    """A micro-batch with the event that says when its copy is there, or still on the host without one."""

    batch: Any
    times: Times
    arrives: torch.cuda.Event | None


@dataclass
class _Step:
    """A step's micro-batches on the host, and the first of them where it was fetched ahead."""

    rest: Iterator[Any]
    first: _Sent | None = None


class Feed:
    """Steps of micro-batches from the host, given out on the device in the same order.

    A micro-batch is fetched when it is asked for. By then the one before it is launched, and a GPU works on it while
    the next is decoded and, from pinned memory, copied on a stream of its own. Only at a step's end is there a wait for
    the GPU: who knows that one is coming calls `look_ahead` first. Whoever stops before the end closes the feed."""

    def __init__(self, steps: Generator[Iterable[Any], None, None], device: torch.device, pinned: bool) -> None:
        self._steps, self._device, self._pinned = steps, device, pinned
        self._side = _side_stream(device) if pinned and device.type == "cuda" else None
        self._looks_ahead = device.type != "cpu"  # which does its own work meanwhile: there is nothing to win
        self._ahead: _Step | Exception | None = None
        self._at_end = False
        self._wait, self._times = 0.0, Times()

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Iterator[Any]:
        """The next step. What was not taken of the present one is passed over."""
        ahead, self._ahead, self._at_end = self._ahead, None, False
        if isinstance(ahead, Exception):
            raise ahead
        step = ahead or self._opened()
        if step is None:
            raise StopIteration
        return self._given(step)

    def look_ahead(self) -> None:
        """Fetch the next step's first micro-batch, where a GPU has all of the present step's to compute. Not where a
        step was given up on the way: it ran out of memory."""
        if not self._looks_ahead or not self._at_end or self._ahead is not None:
            return
        try:
            self._ahead = self._opened()
            if self._ahead is not None:
                self._ahead.first = self._fetched(self._ahead.rest)
        except Exception as error:
            # The present step is good and may be saved yet: raised where the step that failed is asked for.
            self._ahead = error

    def taken(self) -> dict[str, float]:
        """Since the last call: `wait`, the seconds that this process spent until micro-batches were there (a GPU may
        have had work meanwhile), and the stages of building those that were given out, where they took time."""
        stages = {name: seconds for name, seconds in self._times._asdict().items() if seconds}
        wait, self._wait, self._times = self._wait, 0.0, Times()
        return {"wait": wait, **stages}

    def close(self) -> None:
        self._ahead, self._at_end = None, False
        self._steps.close()

    def _opened(self) -> _Step | None:
        batches = self._waited_for(self._steps)
        return None if batches is None else _Step(iter(batches))

    def _given(self, step: _Step) -> Iterator[Any]:
        # The first one is let go of, or its memory would be held to the step's end.
        sent, step.first = step.first or self._fetched(step.rest), None
        while sent is not None:
            self._times = Times(*map(sum, zip(self._times, sent.times, strict=True)))
            yield self._received(sent)
            sent = self._fetched(step.rest)
        self._at_end = True

    def _fetched(self, rest: Iterator[Any]) -> _Sent | None:
        """The next micro-batch, on its way to the device where that needs no waiting."""
        batch = self._waited_for(rest)
        if batch is None:
            return None
        times = getattr(batch, "times", None) or Times()
        if self._side is not None:
            # Without room for the copy yet, it is made when the micro-batch is used: then it counts as that one's.
            with during("copy"), suppress(torch.OutOfMemoryError), torch.cuda.stream(self._side):
                return _Sent(batch.to(self._device, non_blocking=True), times, self._side.record_event())
        return _Sent(batch, times, None)

    def _received(self, sent: _Sent) -> Any:
        with during("copy"):
            if sent.arrives is None:
                return sent.batch.to(self._device, non_blocking=self._pinned)
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(sent.arrives)
        for tensor in tensors_of(sent.batch):
            if tensor.is_cuda:
                # The allocator knows of the side stream only: the memory must not be used again before it was read.
                tensor.record_stream(compute)
        return sent.batch

    def _waited_for(self, source: Iterator[Any]) -> Any:
        """The next one of it, or None at its end."""
        began = perf_counter()
        try:
            with during("wait"):
                return next(source, None)
        finally:
            self._wait += perf_counter() - began


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all feeds of a device: memory that was allocated for a stream is never given to another one."""
    return torch.cuda.Stream(device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in a micro-batch, however it is put together."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
