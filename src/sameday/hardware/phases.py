"""Where a step's time goes: who does a phase of it says so with `during`, and a clock that runs listens."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

PHASES = {
    "wait": "waiting for data",
    "read": "read",
    "decode": "decode",
    "resize": "resize",
    "copy": "copy to the device",
    "prepare": "prepared on device",
    "tower": "vision tower",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "exchange": "sum over ranks",
    "optimizer": "optimizer",
    "check": "loss and norm read",
    "log": "log",
    "other": "everything else",
}
"""In the order of a step, with the words for them."""

OTHER = "other"

_clock: Clock | None = None
_ranges = False


class Clock:
    """Time belongs to the phase that was named last, until another is named: phases never overlap and leave no gap. On
    a GPU by events in its stream, so that a phase has the time of its kernels and of the GPU's waiting for them;
    elsewhere by `now`. One clock runs at a time, for the thread that started it."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._cuda = device.type == "cuda"
        self._device, self._now = device, now
        self._name = OTHER
        self._laps: list[list[tuple[str, Any]]] = []
        self._owner = (0, 0)
        self._stream: Any = None

    def lap(self) -> None:
        """A step ends here, where one was begun, and another begins."""
        global _clock
        if _clock is not self:
            _clock, self._owner = self, (os.getpid(), threading.get_ident())
            self._stream = torch.cuda.current_stream(self._device) if self._cuda else None
        mark = self._mark()
        if self._laps:
            self._laps[-1].append((self._name, mark))
        self._laps.append([(self._name, mark)])

    def stop(self) -> None:
        """The last step ends here, and the clock with it."""
        global _clock
        if _clock is self:
            _clock = None
            self._laps[-1].append((OTHER, self._mark()))

    def turn(self, name: str) -> str:
        """From here on it is `name`'s time. Returns whose it was."""
        before = self._name
        # Workers are forked with a clock that is not theirs, and marks in a recording would be replayed with it.
        foreign = self._owner != (os.getpid(), threading.get_ident())
        if name == before or foreign or (self._cuda and torch.cuda.is_current_stream_capturing()):
            return before
        self._name = name
        self._laps[-1].append((name, self._mark()))
        return before

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each phase, step by step. Forgets them; a step that has not ended is left for the next call."""
        done = self._laps if _clock is not self else self._laps[:-1]
        self._laps = self._laps[len(done) :]
        if done and self._cuda:
            done[-1][-1][1].synchronize()
        return [self._spent(marks) for marks in done]

    def _spent(self, marks: list[tuple[str, Any]]) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for (name, begin), (_, end) in pairwise(marks):
            seconds[name] += begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return {name: seconds[name] for name in PHASES if name in seconds}

    def _mark(self) -> Any:
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def silence() -> None:
    """Whatever clock runs, it listens no more and forgets the step under way."""
    global _clock
    if _clock is not None:
        _clock._laps.pop()
        _clock = None


@contextmanager
def as_ranges() -> Iterator[None]:
    """While this lasts each phase is a range of torch's profiler too."""
    global _ranges
    _ranges = True
    try:
        yield
    finally:
        _ranges = False


class during:
    """`with during("loss"): ...` gives the time inside to that phase, where a clock runs."""

    __slots__ = ("_before", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name, self._before = name, OTHER
        self._range: Any = None

    def __enter__(self) -> None:
        if _ranges:
            self._range = torch.profiler.record_function(self._name)
            self._range.__enter__()
        if _clock is not None:
            self._before = _clock.turn(self._name)

    def __exit__(self, *exception: Any) -> None:
        if _clock is not None:
            _clock.turn(self._before)
        if self._range is not None:
            self._range.__exit__(*exception)
