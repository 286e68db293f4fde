"""Files that commands write: whole or as they were, and known to be writable before hours are spent."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from sameday.spec.errors import BadInput

OUR_JSON = b"{\n"
"""How what commands write as JSON begins; a line of questions does not."""


class NotWritten(OSError):
    """Of a file that was to have `size` bytes."""

    size = 0


def same_file(one: Path, other: Path) -> bool:
    """Whether what is written to one is written over the other. Pipes and devices may serve twice."""
    if os.path.exists(one) and os.path.exists(other):
        return os.path.isfile(one) and os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def check_output(option: str, path: Path | None, inputs: Iterable[Path | None] = (), begins: bytes = OUR_JSON) -> None:
    """Before hours are spent on what could not be written then, or would be written over what was read or what begins
    otherwise than what is written."""
    if path is None:
        return
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise BadInput(f"{option} {path}: must be a file in a folder that is there")
        if _takes_bytes(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(path)  # which a name that is too long fails
            with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
                pass
    except OSError as error:
        raise BadInput(f"{option} {path}: cannot be written: {error.strerror}") from None
    if any(same_file(path, each) for each in inputs if each is not None):
        raise BadInput(f"{option} {path}: is one of the files that are read; choose another one")
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(begins)) != begins:
                raise BadInput(
                    f"{option} {path}: is there already, and this command did not write it; choose another one"
                )


def check_folder(path: Path, option: str) -> None:
    """BadInput where this cannot be a folder."""
    try:
        with folder_on_trial(path):
            pass
    except OSError as error:
        raise BadInput(f"{option} {path}: cannot be a folder: {error.strerror}; choose another one") from None


@contextlib.contextmanager
def folder_on_trial(path: Path) -> Iterator[None]:
    """The folder is there inside; what had to be made for it is gone again afterwards, unless something is in it."""
    lacking = [each for each in (path.absolute(), *path.absolute().parents) if not os.path.lexists(each)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in lacking:
            with contextlib.suppress(OSError):
                each.rmdir()


def _takes_bytes(path: Path) -> bool:
    """A device or a pipe, which must not become a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_text(path: Path, text: str) -> None:
    """Write a whole file or nothing: a reader sees the old one or the new one. A link keeps pointing where it does.
    Where a disk is full, NotWritten."""
    if _takes_bytes(path):
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}.tmp")  # no longer than names may be
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if type(error) is OSError:  # of none of its kinds, as that of a full disk, which does not say whose
            lost = NotWritten(error.errno, error.strerror, str(path))
            lost.size = len(text.encode())
            raise lost from None
        raise
    sync(path.parent)  # the rename itself lives in the folder


def remove_remains(folder: Path) -> None:
    """Halves of files that a killed `write_text` left in a folder that no other process writes in."""
    for remains in folder.glob(".*.tmp"):
        remains.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """A file or folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
