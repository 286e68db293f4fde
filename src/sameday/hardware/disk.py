"""What a disk delivers, measured where the files will lie."""

from __future__ import annotations

import errno
import os
import tempfile
import time
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
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            for at in range(0, size, PIECE):
                os.pread(file.fileno(), PIECE, at)
            return size / (time.perf_counter() - began)
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT):
            return None
        raise
