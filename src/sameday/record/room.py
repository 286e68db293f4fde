"""A disk that is full: what was to be written, how many bytes are missing, and the code that says so."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sameday.spec.errors import EXIT_DISK_FULL, RunStopped

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A disk, a quota or the limit on a file's size is full."""

SLACK = 2**20
"""Bytes by which some files may be larger on a disk than what is in them."""

AGAIN = "Make room and run again."


def no_room(error: BaseException) -> str | None:
    """The system's words where an error says that a disk is full; None for any other error. A library in another
    language has only the system's number in its text."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    return os.strerror(number) if number in NO_ROOM else None


def sentence(what: str, folder: Path, size: int, why: str, then: str = "") -> str:
    """How many bytes are missing in a folder, or where it would be made; `why` in the system's words."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if size > free:
        missing = f"{size - free:,} bytes are missing"
    elif size + SLACK > free:
        missing = "nearly as much, and files take whole blocks"
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
