"""What a person sees while answers are generated: a live line on a terminal, a plain one now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from sameday.spec.words import clock

EVERY = 30.0
"""Seconds between two plain lines."""


class Progress:
    def __init__(
        self, total: int, done: int, say: Callable[[str], None], shown: bool = True, every: float = EVERY
    ) -> None:
        """`done` of the `total` were there before. Of several ranks, one is `shown`."""
        self.total, self.before, self.done, self.say, self.every = total, done, done, say, every
        self.began = self.told = time.monotonic()
        self.live: Any = None
        if shown and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(transient=True, refresh_per_second=4)
            self.live.start()

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        rate = (self.done - self.before) / max(now - self.began, 1e-9)
        left = clock((self.total - self.done) / rate) if rate else "unknown"
        line = f"answers {self.done}/{self.total}  {rate:.1f} questions/s  left {left}"
        if self.live is not None:
            self.live.update(line)
        elif now - self.told >= self.every:
            self.told = now
            self.say(line)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self.live is not None:
            self.live.stop()
