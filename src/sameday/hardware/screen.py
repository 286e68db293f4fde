"""Standard output and standard error that can be lost: a closed pipe, a terminal that is gone, a log on a full disk.
What a command computes is worth more than what it prints."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from sameday.record.room import NO_ROOM
from sameday.spec.errors import EXIT_DISK_FULL, RunStopped

NAMES = {1: "standard output", 2: "standard error"}
"""By their descriptors."""


class _Stream(io.FileIO):
    """What cannot be written is dropped. The first time that this happens the other stream says so."""

    needed = False
    """Whether the command is for nothing but what it prints here: losing it ends the command."""
    lost = False

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._owner = os.getpid()

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            first, self.lost = not self.lost, True
            if self.needed or error.errno not in NO_ROOM:  # a disk may have room again
                self._to_nowhere()
            if first and os.getpid() == self._owner:  # a data worker leaves it to the process that forked it
                self._say(error)
            return len(data)

    def _to_nowhere(self) -> None:
        """For processes that are started from now on too: a compiler would be killed for writing to a closed pipe."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)

    def _say(self, error: OSError) -> None:
        name = NAMES[self.fileno()]
        if self.needed:
            if error.errno not in NO_ROOM:
                raise error
            raise RunStopped(f"no room for {name}: {error.strerror}. Make room and run again.", EXIT_DISK_FULL)
        with contextlib.suppress(OSError):  # to the descriptor: another thread may be writing to the other stream
            said = f"{name} can no longer be written: {error.strerror}; the command goes on without it\n"
            os.write(3 - self.fileno(), said.encode())


def guard_streams() -> None:
    """In a process that is a command, before anything is printed. Until `go_on_without_output` a command is for what it
    prints on standard output: with that it ends."""
    sys.stdout, sys.stderr = _guarded(sys.stdout, 1), _guarded(sys.stderr, 2)
    if isinstance(raw := _raw(sys.stdout), _Stream):
        raw.needed = True


def go_on_without_output() -> None:
    """The command leaves more than what it prints: files, weights, an exit code that says what was found."""
    if isinstance(raw := _raw(sys.stdout), _Stream):
        raw.needed = False


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    """The same stream over a `_Stream`. One that was closed before the start leads nowhere; what somebody put in its
    place is left as it is."""
    if stream is None:
        return open(os.devnull, "w")
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
        return stream
    stream.flush()
    raw = _Stream(descriptor)
    # Under `python -u` there is no buffer.
    buffer: Any = raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw)
    kept = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
    # A screen may not know every letter; that is no reason to end.
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", newline="\n", **kept)


def _raw(stream: TextIO) -> object:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
