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

from sameday.spec.words import count

EVERY = 0.5
"""Seconds between two looks."""
OWN: Final = __name__.partition(".")[0]
BACKWARD = ("torch.autograd.graph", "_engine_run_backward")
"""Where a thread waits for the backward pass, which on a GPU has a thread of its own."""
CALLED_BACK = {("torch.autograd.function", "apply"), ("torch.utils.checkpoint", "unpack_hook")}
"""What calls Python there."""


class Lookout:
    """Looks at the thread that made it once it is late, and until nothing refers to this."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        self._seen: deque[tuple[float, str]] = deque(maxlen=1000)
        self._of = threading.get_ident()
        self._thread: threading.Thread | None = None

    def expect(self, seconds: float) -> None:
        """Within so many from now something is done; else it is late."""
        self.deadline = time.perf_counter() + seconds
        if self._thread is None:
            self._thread = threading.Thread(target=_look, args=(weakref.ref(self),), daemon=True)
            self._thread.start()

    def forget(self) -> None:
        """Until something is expected again nothing is late."""
        self.deadline = float("inf")
        self._seen.clear()

    def seen(self, since: float) -> str | None:
        """Where the thread was most often from then on, of the times that it was looked at."""
        places = Counter(place for at, place in self._seen.copy() if at >= since)  # the other thread goes on
        if not places:
            return None
        place, times = places.most_common(1)[0]
        return f"{place} ({times} of {count(places.total(), 'look')})"

    def look(self) -> None:
        if (now := time.perf_counter()) > self.deadline:
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
        stack = next((other for other in others if CALLED_BACK & {*other}), stack)
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
