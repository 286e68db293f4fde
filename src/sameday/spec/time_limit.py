"""A limit on the time that a regular expression of a user's may take: some try every way to cut a text into pieces."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLong(Exception):
    pass


def _stop(*_: object) -> None:
    raise TookTooLong


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Searching looks for signals on its way, so that a timer can end it. Signals reach the main thread alone: there is
    no limit elsewhere. The process's own time counts, so that a busy machine is no reason to stop."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    if signal.getsignal(signal.SIGVTALRM) is not _stop:  # left there: setting it anew costs more than a search
        signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
