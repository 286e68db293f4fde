"""What an audit learned about image files, kept between runs: a file of the same path, size and time stamps is
not decoded again. One file of JSON lines per image root, in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import PIL
from PIL import features

from sameday.data.questions.images import MAX_SOURCE_PIXELS, Stamp, stamp
from sameday.data.questions.sample import ImageRef

FORMAT = 2
"""Raised with every change of the lines, of what `open_rgb` makes of a file, or of `digest`."""
CLOCK_NS = 2_000_000_000
"""The coarsest time stamps of a file system (FAT). A file that is younger than this when it is read could be written
again, to the same size, without another time stamp."""
_CODECS = ("jpg", "jpg_2000", "webp", "avif", "libtiff", "zlib")


def cache_home() -> Path | None:
    """$SAMEDAY_CACHE_HOME, $XDG_CACHE_HOME/sameday or ~/.cache/sameday; None for a user without a home."""
    own, shared = os.environ.get("SAMEDAY_CACHE_HOME"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    if shared and Path(shared).is_absolute():  # others are to be ignored, by the XDG specification
        return Path(shared) / "sameday"
    try:
        return Path.home() / ".cache" / "sameday"
    except RuntimeError:
        return None


def _file(root: Path) -> Path | None:
    """Where entries of an image root are. Another Pillow may decode other pixels, so its entries lie elsewhere."""
    home = cache_home()
    codecs = [(name, features.version(name)) for name in _CODECS]
    meaning = repr((FORMAT, PIL.__version__, codecs, MAX_SOURCE_PIXELS, os.fspath(root)))
    name = hashlib.blake2b(meaning.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    return None if home is None else home / "audit" / f"{name}.jsonl"


class AuditCache:
    """Entries of one image root: read at once, then appended one by one, so that a kill loses nothing that was added.
    Without a readable or writable folder an audit is as good, and slower."""

    def __init__(self, root: Path) -> None:
        self._path = _file(root)
        self._file: int | None = None
        self._began = time.time_ns()
        self._known = dict(_read(self._path)) if self._path is not None else {}

    def get(self, path: Path) -> ImageRef | None:
        """What is known of a file as it is now."""
        known = self._known.get(str(path))
        if known is None:
            return None
        try:
            now = stamp(path)
        except OSError:
            return None
        return ImageRef(path, *known[1:], now) if now == known[0] else None

    def add(self, image: ImageRef) -> None:
        """An image that was read since this was opened."""
        assert image.stamp is not None
        size, mtime_ns, ctime_ns = image.stamp
        if self._path is None or mtime_ns > self._began - CLOCK_NS:
            return
        entry = {"path": str(image.path), "size": size, "mtime_ns": mtime_ns, "ctime_ns": ctime_ns}
        entry |= {"digest": image.digest, "width": image.width, "height": image.height}
        # On a full or read-only disk the audit goes on without keeping more.
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                os.write(self._file, b"\n")  # ends a line that was torn by a kill
            # One write per line: lines of several processes do not mix.
            os.write(self._file, json.dumps(entry).encode() + b"\n")
        except OSError:
            self.close()
            self._path = None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def __enter__(self) -> AuditCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_Entry = tuple[Stamp, str, int, int]


def _read(path: Path) -> list[tuple[str, _Entry]]:
    """Whole lines of the right form; the last one about a path is the newest."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> tuple[str, _Entry] | None:
    try:
        value: Any = json.loads(line)
        path, digest = value["path"], value["digest"]
        numbers = [value[name] for name in ("size", "mtime_ns", "ctime_ns", "width", "height")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(path, str) and isinstance(digest, str) and all(type(number) is int for number in numbers)):
        return None
    size, mtime_ns, ctime_ns, width, height = numbers
    if not (len(digest) == 32 and set(digest) <= set("0123456789abcdef") and width > 0 and height > 0):
        return None
    return path, ((size, mtime_ns, ctime_ns), digest, width, height)
