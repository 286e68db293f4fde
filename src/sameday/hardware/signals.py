"""The signals that ask a process to stop, as people and batch systems send them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sameday.spec.errors import RunStopped


class StopRequest:
    """SIGTERM, SIGUSR1 or Ctrl-C: what is under way is finished and saved before the process leaves. A second Ctrl-C is
    at once."""

    asked = False

    def __enter__(self) -> StopRequest:
        self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        return self

    def __exit__(self, kind: object, *_more: object) -> None:
        # A run that leaves early stays deaf: a second signal must not change the code it leaves with.
        for number, handler in self._before.items() if kind is not RunStopped else ():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM ends this as Ctrl-C does: processes are killed and folders cleared on the way out."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
