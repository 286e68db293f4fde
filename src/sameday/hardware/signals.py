"""The signals that ask a process to stop, as people and batch systems send them."""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sameday.spec.errors import EXIT_STOPPED, RunStopped

ALWAYS = ("SIGTERM", "SIGUSR1", "SIGINT")
ASKING = tuple(signal.Signals[name] for name in (*ALWAYS, "SIGHUP", "SIGUSR2", "SIGXCPU") if hasattr(signal, name))
"""What asks a process to stop: people, a terminal that is closed, a batch system before a limit. Not every system has
all of them."""
REPEATED = tuple(number for number in ASKING if number.name in ("SIGHUP", "SIGXCPU"))
"""What a system sends more than once by itself: a closed terminal through its shell too, a used-up CPU time each
second."""

AGAIN = 0.01
"""Seconds after which a signal is raised again that Python dropped."""


class AskedToStop(BaseException):
    """A signal, raised where it came. Like KeyboardInterrupt it is no Exception: no library takes it for an error of
    what it does."""


def taken() -> list[signal.Signals]:
    """Those signals that mean something else from now on. SIGTERM, SIGUSR1 and Ctrl-C always do: shells start jobs in
    the background without Ctrl-C. The others do only if they would end the process: under `nohup` a closed terminal
    must change nothing, and a program that calls this package may have handlers of its own."""
    return [number for number in ASKING if number.name in ALWAYS or _would_end(number)]


def _would_end(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN:
        # torchrun hears SIGHUP under `nohup` too. It passes it on, and kills ranks that do not leave.
        return number.name == "SIGHUP" and "TORCHELASTIC_RUN_ID" in os.environ
    return handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), StopRequest)


class StopRequest:
    """A signal that asks to stop: what is under way is finished and saved before the process leaves. A second Ctrl-C is
    at once. Signals reach the main thread alone: in another one nothing listens, and they are left to the program that
    started it."""

    asked = False
    raises = False
    """Whether the next signal is raised."""
    _owed = False
    """Whether one was raised, and nobody has acted on it yet as far as is known."""

    def __init__(self, last: bool = False) -> None:
        """`last`: after this the process leaves."""
        self.last = last

    def __enter__(self) -> StopRequest:
        self._before: dict[signal.Signals, Any] = {}
        if not in_main_thread():
            return self
        # Whoever listened before may have heard one, and raised it where it was caught: this one acts on it.
        self.asked = any(each.asked for each in _listening)
        for each in _listening:
            each._owed = False
        _listening.append(self)
        self._before |= {n: signal.signal(n, self._ask) for n in taken()}
        return self

    def __exit__(self, kind: object, *_more: object) -> None:
        if self not in _listening:
            return
        _listening.remove(self)
        for outer in _listening[-1:]:
            outer.asked |= self.asked  # which came too late for this: what follows does not begin
        # A process that leaves stays deaf: a second signal must not change the code it leaves with.
        if not self.last and kind is not RunStopped:
            self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In here a signal ends what is under way, by AskedToStop: for work of which nothing is kept. Where something
        catches it and goes on, it is raised again at the end."""
        if self not in _listening:
            yield
            return
        self.raises, self._owed = True, False
        hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        self._hook = hook
        try:
            if self.asked:
                raise AskedToStop
            yield
            if self._owed:
                raise AskedToStop
        finally:
            self.raises = False
            if sys.unraisablehook == self._dropped:  # nobody has put another in its place
                sys.unraisablehook = hook

    def _dropped(self, about: Any) -> None:
        """Python calls this for what is raised where it cannot go on from, as in `__del__` or in what a weak reference
        calls. A signal is raised again a moment later, by another thread: in here it would be dropped again."""
        if not isinstance(about.exc_value, AskedToStop):
            self._hook(about)
        elif self._owed:
            self.raises = True
            _thread.start_new_thread(self._again, ())

    def _again(self) -> None:
        time.sleep(AGAIN)
        if self.raises:
            # As if the signal came. Unlike a real one it does nothing to a process that does not listen any more.
            _thread.interrupt_main(signal.SIGTERM)

    def _ask(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.raises:
            self.raises, self._owed = False, True  # once: what comes now cleans up
            raise AskedToStop


@contextmanager
def finishes() -> Iterator[None]:
    """Around all that a process does. After it, while the interpreter takes apart what is loaded, the first of each
    signal changes nothing: what was asked for is done, or was refused, and the exit code says so. A second one ends a
    process that hangs there, unless it is one that a system repeats by itself."""
    try:
        yield
    finally:
        if sys.platform == "linux":
            heard = [number for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN]
            for number in REPEATED:
                signal.signal(number, signal.SIG_IGN)
            _pass_over_once([number for number in heard if number not in REPEATED])


def _pass_over_once(numbers: Sequence[int]) -> None:
    """By the system's own means: Python gives up its handlers long before it has left. A handler set by `sysv_signal`
    is gone after its first call, and `abs` does nothing with the number that it gets."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "sysv_signal"):  # not every C library has it
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # those that come in between wait
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
        library.sysv_signal(number, ctypes.cast(library.abs, ctypes.c_void_p))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


_listening: list[StopRequest] = []
"""Those that are entered in the main thread, the innermost last."""


def in_main_thread() -> bool:
    """Where Python calls handlers of signals, and where alone they can be set."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def unbroken() -> Iterator[None]:
    """What is in here is finished before a signal is raised."""
    held = [each for each in _listening[-1:] if each.raises and in_main_thread()]
    for each in held:
        each.raises = False
    try:
        yield
    finally:
        for each in held:
            each.raises = not each.asked
    if any(each.asked for each in held):
        raise AskedToStop


def nothing_left_to_stop() -> None:
    """What was asked for is done: a signal from here on is not raised, and changes nothing."""
    for each in _listening if in_main_thread() else ():
        each.raises = each._owed = False


def stopped_early() -> RunStopped:
    return RunStopped("asked to stop: nothing is lost, and the same command goes on", EXIT_STOPPED)


@contextmanager
def stops_at_once() -> Iterator[None]:
    """Around a command that can be run again, with which its process ends: while nothing in it listens, as when a model
    is loaded, a signal ends it where it is, as a run that was asked to stop."""
    with StopRequest(last=True) as stop:
        try:
            with stop.at_once():
                yield
        except AskedToStop:
            raise _said_once() from None
        except RunStopped:
            raise
        except Exception:
            if not stop.asked:
                raise
            # On the way out: ranks that left first closed their connections, for one.
            raise _said_once() from None


def _said_once() -> BaseException:
    """Of torchrun's processes the first one has the sentence; before they have joined, only their environment says
    which it is."""
    return stopped_early() if os.environ.get("RANK", "0") == "0" else SystemExit(EXIT_STOPPED)


def _as_before_in_child() -> None:
    """A forked process does not clean up for its parent: a signal means to it what it meant before."""
    for each in reversed(_listening):
        if not each.raises:
            break
        each.restore()


os.register_at_fork(after_in_child=_as_before_in_child)


@contextmanager
def orderly_end() -> Iterator[None]:
    """The other signals end this as Ctrl-C does: processes are killed and folders cleared on the way out."""

    def end(number: int, _frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    others = [number for number in taken() if number != signal.SIGINT]
    before = {number: signal.signal(number, end) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
