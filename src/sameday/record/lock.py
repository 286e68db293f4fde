"""One process at a time in a folder. The lock goes with the process that has it, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import warnings
import weakref
from pathlib import Path

from sameday.record.room import no_room
from sameday.spec.errors import BadInput

LOCK = ".lock"


class Lock:
    """Held from here on until it is released. The folder is made where it is missing, and what was made for the lock
    alone goes with it."""

    def __init__(self, folder: Path) -> None:
        """BadInput where another process has the folder, with its number."""
        self.folder, self._made = folder, [each for each in (folder, *folder.parents) if not each.exists()]
        self._descriptor: int | None = None
        while self._descriptor is None:
            self._descriptor = _taken(folder)
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            (self.folder / LOCK).unlink()  # while it is held: who waited for it sees that it is gone
        self.forget()
        with contextlib.suppress(OSError):  # there is something in it
            for each in self._made:
                each.rmdir()

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


def _taken(folder: Path) -> int | None:
    """The lock's descriptor; None where whoever had the lock removed its file meanwhile, so that it guards nothing."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if no_room(error):
            raise
        raise BadInput(f"{folder}: cannot be written: {error.strerror}; choose another --out") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, host = os.pread(lock, 200, 0).decode(errors="replace").strip().partition(" ")
        os.close(lock)
        raise BadInput(
            f"{folder}: in use by process {pid or 'unknown'} on {host or 'this machine'}; "
            "wait for it, stop it, or choose another --out"
        ) from None
    except OSError as error:
        # Some network file systems have no locks. That is no reason not to work.
        warnings.warn(f"{folder}: cannot be locked ({error.strerror}): start no second process here", stacklevel=4)
    if not _is_there(path, lock):
        os.close(lock)
        return None
    with contextlib.suppress(OSError):  # on a full disk nobody is told who has it
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return lock


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


# A forked loader worker shares the lock. One that outlives a killed run must not keep the folder locked.
os.register_at_fork(after_in_child=_forget_all)
