"""Entries on disk: one safetensors file per image content, whole or not there, and checked to the last byte when read.
No lock and no manifest: any number of jobs may write at once, and be killed at any moment."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sameday.cache.key import Settings, differences, parse
from sameday.spec.errors import BadInput, DiskTooSmall

SETTINGS = "settings.json"
MAX_HEADER = 1 << 20
"""Bytes. Ours have about a thousand; a damaged length must not make us ask for gigabytes."""
PART_AGE = 3600
"""Seconds after which an unfinished file is taken for the remains of a killed job."""
RESERVE, RESERVED_SHARE = 1 << 30, 0.02
"""Bytes, and a share of the disk."""
TRIES = 5
"""Of what another job can spoil by doing its own work at that moment."""

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}
"""What an entry may hold, under the names of safetensors."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CONTENT = r"[0-9a-f]{16,128}"
_ENTRY = re.compile(rf"({_CONTENT})\.safetensors")
_PART = re.compile(rf"(?:{_CONTENT}\.safetensors|settings\.json)\.[A-Za-z0-9-]+\.part")
_FOLDER = re.compile(r"(pixels|features)-[0-9a-f]{12}")

# The header's checksum stands first, at one place, so that it can be checked before anything is parsed. It covers the
# length before it and the rest of the header, in which the data's checksum stands.
_OPENING = b'{"__metadata__":{"header_sha256":"'
_DIGITS = 64
_REST = 8 + len(_OPENING) + _DIGITS


class BadEntry(ValueError):
    """An entry that must not be used: damaged, cut short, or of something else. It is to be made again."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class CacheFull(DiskTooSmall):
    """No room on the disk, or in the quota. What was written before stays."""

    def __init__(self, folder: Path, needed: int, free: int, more: str = "") -> None:
        super().__init__(folder, needed, free, more)
        self.folder, self.needed, self.free, self.more = folder, needed, free, more

    def __str__(self) -> str:
        return f"{self.folder}: {in_bytes(self.needed)} needed, {in_bytes(self.free)} free{self.more}"


class CacheReadOnly(BadInput):
    """A cache that this job may read and not write."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(folder, reason)
        self.folder, self.reason = folder, reason

    def __str__(self) -> str:
        return f"{self.folder}: cannot be written: {self.reason}"


@dataclass(frozen=True)
class Store:
    """The entries of one kind and settings. It holds no state but paths: threads and forked processes may share it."""

    root: Path
    settings: Settings

    @property
    def folder(self) -> Path:
        return self.root / self.settings.name

    def path(self, content: str) -> Path:
        if not re.fullmatch(_CONTENT, content):
            raise ValueError(f"content {content!r} is not a digest: 16 to 128 digits of 0-9a-f are allowed")
        return self.folder / f"{content}.safetensors"

    def has(self, content: str, size: int | None = None) -> bool:
        """Whether there is such an entry, and of this size where one is given. Its bytes are not looked at."""
        try:
            status = self.path(content).stat()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and size in (None, status.st_size)

    def contents(self) -> set[str]:
        return {match[1] for match, _ in _listed(self.folder, _ENTRY)}

    def size_of(self, content: str, tensors: Mapping[str, Tensor]) -> int:
        """The exact size of this entry's file. Tensors on the meta device will do: no data is looked at."""
        unknown = "0" * _DIGITS
        return len(_header(self.settings, content, tensors, unknown)) + sum(t.nbytes for t in tensors.values())

    def write(self, content: str, tensors: Mapping[str, Tensor]) -> None:
        """Add an entry, or replace it. CacheFull and CacheReadOnly say why it cannot be."""
        path = self.path(content)
        data = [_bytes_of(tensors[name]) for name in _order(tensors)]
        checksum = hashlib.sha256()
        for view in data:
            checksum.update(view)
        header = _header(self.settings, content, tensors, checksum.hexdigest())
        with _in_words(self.folder, len(header) + sum(map(len, data))):
            for tries_left in reversed(range(TRIES)):
                try:
                    # The entry's part comes first: no job prunes a folder that has one, and the settings take a while.
                    with _written_aside(path, [header, *data]):
                        if not (self.folder / SETTINGS).exists():
                            with _written_aside(self.folder / SETTINGS, [(self.settings.text + "\n").encode()]):
                                pass
                    return
                # Another job pruned the empty folder: before the part was in it, or when mkdir had just found it there.
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ESTALE) or not tries_left:
                        raise

    def read(self, content: str) -> dict[str, Tensor] | None:
        """The tensors, in memory of their own; None where there is no such entry. BadEntry where there is one and it is
        not, to the last bit, what was written here for this content with these settings."""
        path = self.path(content)
        for tries_left in reversed(range(TRIES)):
            try:
                with _opened(path) as file:
                    return self._checked(file, content)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except ValueError as error:
                raise BadEntry(path, str(error)) from None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise  # the fault of this process, not of the entry
                # NFS says so where another job has replaced the file since it was opened.
                if error.errno != errno.ESTALE or not tries_left:
                    raise BadEntry(path, f"cannot be read: {error.strerror}") from None
        raise AssertionError("the last try returns or raises")

    def _checked(self, file: int, content: str) -> dict[str, Tensor]:
        header = _read_header(file)
        try:
            table = json.loads(header[8:])
            metadata = table.pop("__metadata__")
            their_content, theirs, checksum = metadata["content"], parse(metadata["settings"]), metadata["data_sha256"]
            empty = {
                name: torch.empty(row["shape"], dtype=DTYPES[row["dtype"]], device="meta")
                for name, row in table.items()
            }
            # The one header that describes these tensors: every offset and name is compared at once.
            ours = _header(theirs, their_content, empty, checksum)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError("its header is not one that sameday writes") from error
        if ours != header:
            raise ValueError("its header is not one that sameday writes")
        if their_content != content:
            raise ValueError(f"content: {content} here, {their_content} in the entry")
        if theirs != self.settings:
            raise ValueError("is of other settings: " + "; ".join(differences(self.settings, theirs)))
        # Before memory is asked for: the header is intact, so that its sizes are real ones.
        size = len(header) + sum(tensor.nbytes for tensor in empty.values())
        if os.fstat(file).st_size != size:
            raise ValueError(f"has {os.fstat(file).st_size} bytes and not {size}")
        return _read_data(file, len(header), empty, checksum)


def others(root: Path, settings: Settings) -> list[tuple[Settings, int]]:
    """Other settings of this kind that have entries here, and how many."""
    counts = []
    for folder in _folders(root):
        count = sum(1 for _ in _listed(folder, _ENTRY))
        theirs = _settings_in(folder) if count and folder.name != settings.name else None
        if theirs is not None and theirs.kind == settings.kind:
            counts.append((theirs, count))
    return counts


def prune(root: Path, keep: Mapping[str, Container[str]]) -> tuple[int, int]:
    """In the folders that `keep` names by their settings: delete entries whose content is not kept, and what killed
    jobs left behind. How many files and bytes that were. Files that have no name of ours are never touched."""
    files = size = 0
    for folder in _folders(root):
        if folder.name not in keep:
            continue
        kept = keep[folder.name]
        with _in_words(folder, 0):
            unwanted = [file for match, file in _listed(folder, _ENTRY) if match[1] not in kept]
            # Younger ones may be under the pen of another job.
            unwanted += [file for _, file in _listed(folder, _PART) if _age(file) > PART_AGE]
            for file in unwanted:
                with contextlib.suppress(FileNotFoundError):  # another job prunes too
                    length = file.stat().st_size
                    file.unlink()
                    files, size = files + 1, size + length
        with contextlib.suppress(OSError):  # another job is here: a writer writes the settings again
            if set(os.listdir(folder)) <= {SETTINGS}:
                (folder / SETTINGS).unlink(missing_ok=True)
                folder.rmdir()
    return files, size


def free_bytes(folder: Path) -> int:
    """What a user may still write here, or in the nearest folder above that is there."""
    disk = _disk(folder)
    return disk.f_bavail * disk.f_frsize


def reserved(folder: Path) -> int:
    """What a run that fills a cache on its way leaves free: its checkpoints may need the same disk."""
    disk = _disk(folder)
    return max(RESERVE, int(RESERVED_SHARE * disk.f_blocks * disk.f_frsize))


def _disk(folder: Path) -> os.statvfs_result:
    return os.statvfs(next(path for path in (folder, *folder.absolute().parents) if path.exists()))


def in_bytes(size: int) -> str:
    """A size as people read it."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide numbers first, as safetensors has it: each tensor is then aligned. ValueError for what has no place here."""
    if not tensors or "__metadata__" in tensors:
        raise ValueError(f"an entry holds one tensor or more, none of them named __metadata__: {sorted(tensors)}")
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout}; dense ones of {', '.join(DTYPES)} are allowed"
            )
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _header(settings: Settings, content: str, tensors: Mapping[str, Tensor], data_sha256: str) -> bytes:
    """Everything before the data. The same for the same arguments, to the last byte."""
    table, at = {}, 0
    for name in _order(tensors):
        dtype, shape, end = tensors[name].dtype, list(tensors[name].shape), at + tensors[name].nbytes
        table[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    metadata = {"content": content, "data_sha256": data_sha256, "settings": settings.text}
    compact = json.JSONEncoder(separators=(",", ":")).encode
    rest = f'",{compact(metadata)[1:]},{compact(table)[1:]}'.encode()
    rest += b" " * (-(_REST + len(rest)) % 8)  # the data starts aligned
    length = _REST - 8 + len(rest)
    if length > MAX_HEADER:
        raise ValueError(f"the header has {length} bytes; at most {MAX_HEADER} are allowed: shorten settings or names")
    first = struct.pack("<Q", length)
    return first + _OPENING + hashlib.sha256(first + rest).hexdigest().encode() + rest


def _read_header(file: int) -> bytes:
    """Whole and intact. ValueError where it is not."""
    length = int.from_bytes(_read(file, 8, 0), "little")
    if not _REST - 8 < length <= MAX_HEADER:
        raise ValueError(f"its header's length is {length}; {_REST - 7} to {MAX_HEADER} is allowed")
    header = _read(file, 8 + length, 0)
    checksum = hashlib.sha256(header[:8] + header[_REST:]).hexdigest().encode()
    if header[8:_REST] != _OPENING + checksum:
        raise ValueError("its header is damaged, or sameday did not write it")
    return header


def _read_data(file: int, at: int, empty: Mapping[str, Tensor], data_sha256: str) -> dict[str, Tensor]:
    tensors, checksum = {}, hashlib.sha256()
    for name in _order(empty):
        tensors[name] = torch.empty_like(empty[name], device="cpu")
        view = _bytes_of(tensors[name])
        _read_into(file, view, at)
        checksum.update(view)
        at += len(view)
    if checksum.hexdigest() != data_sha256:
        raise ValueError("its data is damaged: the checksum is another")
    return tensors


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read(file: int, count: int, at: int) -> bytes:
    buffer = bytearray(count)
    _read_into(file, memoryview(buffer), at)
    return bytes(buffer)


def _read_into(file: int, view: memoryview, at: int) -> None:
    """Never by mapping the file: a page that cannot be read would kill the process, and one may still change."""
    while len(view):
        count = os.preadv(file, [view], at)
        if not count:
            raise ValueError(f"ends at byte {at}, too early")
        view, at = view[count:], at + count


@contextlib.contextmanager
def _written_aside(path: Path, chunks: Sequence[bytes | memoryview]) -> Iterator[None]:
    """Written in a file of another name, which gets its own at the end of the block: a reader finds the old file, the
    new one or none, and never a part of one."""
    host = re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    part = path.with_name(f"{path.name}.{host}-{os.getpid()}-{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # By hand and not with mkstemp, whose files no other user could read.
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                while len(view):
                    view = view[os.write(file, view) :]
            os.fsync(file)
        finally:
            os.close(file)
        yield
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    # The rename itself lives in the folder, which is gone where another job has pruned the file already.
    with contextlib.suppress(FileNotFoundError), _opened(path.parent) as folder:
        os.fsync(folder)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _in_words(folder: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            quota = " on the disk, but the quota is used up" if error.errno == errno.EDQUOT else ""
            raise CacheFull(folder, needed, free_bytes(folder), quota) from None
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise CacheReadOnly(folder, error.strerror or "no permission") from None
        raise


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as listing:
        return sorted(root / f.name for f in listing if _FOLDER.fullmatch(f.name) and f.is_dir(follow_symlinks=False))
    return []


def _listed(folder: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as listing:
        files = [file.name for file in listing if not file.is_dir(follow_symlinks=False)]
        return [(match, folder / name) for name in files if (match := pattern.fullmatch(name))]
    return []


def _age(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _settings_in(folder: Path) -> Settings | None:
    """From the file for people, or where that is lost or damaged from an entry. The name says whether it is right."""
    with contextlib.suppress(OSError, ValueError):
        settings = parse((folder / SETTINGS).read_text())
        if settings.name == folder.name:
            return settings
    for _, path in _listed(folder, _ENTRY):
        with contextlib.suppress(OSError, ValueError, KeyError), _opened(path) as file:
            settings = parse(json.loads(_read_header(file)[8:])["__metadata__"]["settings"])
            if settings.name == folder.name:
                return settings
    return None
