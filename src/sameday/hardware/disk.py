"""What a disk delivers, measured where the files will lie."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SAMPLE = 64 * 2**20
PIECE = 4 * 2**20


def read_rate(folder: Path, checked: bool = True) -> float | None:
    """Bytes per second of reading a file that is not in memory, and of its checksum where it is `checked`, as entries
    of a cache are; or None where nothing can be written. Memory that the system will not let go of makes it an upper
    bound."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = os.statvfs(folder)
        size = min(SAMPLE, free.f_bavail * free.f_frsize // 4) // PIECE * PIECE
        if not size:
            return None
        with tempfile.TemporaryFile(dir=folder) as file:
            data = os.urandom(PIECE)  # what repeats, some file systems compress
            for _ in range(size // PIECE):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return size / _seconds(file.fileno(), size, checked)
    except OSError:
        return None


def rate_of(paths: Sequence[Path]) -> float | None:
    """The same of these files, checked; None where none of them can be read."""
    size, seconds = 0, 0.0
    for path in paths:
        try:
            with path.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                size, seconds = size + length, seconds + _seconds(file.fileno(), length, True)
        except OSError:
            continue
    return size / seconds if size else None


def _seconds(file: int, size: int, checked: bool) -> float:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    began, checksum = time.perf_counter(), hashlib.sha256()
    for at in range(0, size, PIECE):
        piece = os.pread(file, PIECE, at)
        if checked:
            checksum.update(piece)
    return time.perf_counter() - began
