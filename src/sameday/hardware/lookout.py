"""Where a thread is that takes longer than it should: a second one looks at it now and then."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Final

EVERY = 0.5
"""Seconds between two looks."""
OWN: Final = __name__.partition(".")[0]
BACKWARD, OF_FUNCTION = ("torch.autograd.graph", "_engine_run_backward"), ("torch.autograd.function", "apply")
"""Where a thread waits for the backward pass, which on a GPU has a thread of its own, and what calls Python there."""


class Lookout:
    """Looks at the thread that made it, from `EVERY` seconds after `late` on, and until nothing refers to it."""

    def __init__(self) -> None:
        self.late = float("inf")
        self._seen: deque[tuple[float, str]] = deque(maxlen=1000)
        self._of = threading.get_ident()
        self._thread: threading.Thread | None = None

    def expect(self, seconds: float) -> None:
        """Within so many from now something is done; else it is late."""
        self.late = time.perf_counter() + seconds
        if self._thread is None:
            self._thread = threading.Thread(target=_look, args=(weakref.ref(self),), daemon=True)
            self._thread.start()

    def seen(self, since: float) -> str | None:
        """Where the thread was most of the time from then on, of what was looked at."""
        places = Counter(place for at, place in self._seen.copy() if at >= since)  # the other thread goes on
        return places.most_common(1)[0][0] if places else None

    def look(self) -> None:
        if (now := time.perf_counter()) > self.late:
            self._seen.append((now, place_of(sys._current_frames(), self._of)))


def _look(at: weakref.ref[Lookout]) -> None:
    while True:
        time.sleep(EVERY)
        lookout = at()
        if lookout is None:
            return
        lookout.look()
        del lookout


def place_of(frames: Mapping[int, FrameType], thread: int) -> str:
    """In words: the function that it is in, and of this package's own the one that called it."""
    stack = list(_functions(frames.get(thread)))
    if BACKWARD in stack[:1]:
        others = (list(_functions(frame)) for number, frame in frames.items() if number != thread)
        stack = next((other for other in others if OF_FUNCTION in other), stack)
    if not stack:
        return "nowhere"
    own = next((each for each in stack if each[0].partition(".")[0] == OWN), None)
    caller = "" if own is None or own == stack[0] else f", called by {'.'.join(own)}"
    return ".".join(stack[0]) + caller


def _functions(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """The innermost first, by module and name."""
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        frame = frame.f_back
