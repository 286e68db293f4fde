"""What a disk delivers, measured where the files will lie."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SAMPLE = 64 * 2**20
PIECE = 4 * 2**20


def read_rate(folder: Path, size: int = SAMPLE) -> float | None:
    """Bytes per second of reading a file that is not in memory, or None where nothing can be written. Memory that the
    system will not let go of makes it an upper bound."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            data = os.urandom(PIECE)  # what repeats, some file systems compress
            for _ in range(size // PIECE):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return size / _seconds(file.fileno(), size)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            return None
        raise


def rate_of(paths: Sequence[Path]) -> float:
    """Bytes per second of reading these files, as far as the system lets go of what it remembers of them."""
    size, seconds = 0, 0.0
    for path in paths:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            size, seconds = size + length, seconds + _seconds(file.fileno(), length)
    return size / max(seconds, 1e-9)


def _seconds(file: int, size: int) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    for at in range(0, size, PIECE):
        os.pread(file, PIECE, at)
    return time.perf_counter() - began
