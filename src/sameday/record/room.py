"""A disk that is full: what was to be written, how many bytes are missing, and the code that says so."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from sameday.spec.errors import EXIT_DISK_FULL, RunStopped

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk, a quota or the limit on a file's size is full."""

BLOCK = 2**16
"""Bytes of the largest block that is reckoned with: a network's file system gives the size of its transfers as its
block's, which may be a megabyte, and takes less for a small file."""

AGAIN = "Make room and run again."


def no_room(error: BaseException) -> str | None:
    """The system's words where an error says that a disk is full; None for any other error. A library in another
    language has only the system's number in its text."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    return os.strerror(number) if number in NO_ROOM else None


def on_disk(there: Path, files: Iterable[int], folders: int = 1) -> int:
    """Bytes that files of these sizes take on the disk of a folder, with the folders that hold them: whole blocks."""
    block = min(os.statvfs(there).f_frsize or 1, BLOCK)
    return block * (sum(-(-size // block) for size in files) + folders)


def sentence(what: str, folder: Path, size: int, why: str, then: str = "") -> str:
    """How many bytes are missing in a folder, or where it would be made; `why` in the system's words."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if size > free:
        missing = f"{size - free:,} bytes are missing"
    elif why == os.strerror(errno.ENOSPC):
        missing = "the disk gave no more, although so many count as free; a quota or its number of files may be used up"
    else:
        missing = "a quota or a limit on files is in the way"
    about = f"It takes about {size:,} bytes and {free:,} are free: {missing}."
    return f"no room for {what} in {folder}: {why}. {about}{then and ' '}{then}"


@contextlib.contextmanager
def room_for(what: str, folder: Path, size: int, then: str = "") -> Iterator[None]:
    """RunStopped where the disk of `folder` has no room for `what`, of about `size` bytes; `then` is what to do. By
    then whoever writes has removed the half of it that was written, and its bytes are free again."""
    try:
        yield
    except Exception as error:
        why = no_room(error)
        if why is None:
            raise
        raise RunStopped(sentence(what, folder, size, why, then), EXIT_DISK_FULL) from None
