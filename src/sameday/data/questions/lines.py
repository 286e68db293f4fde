"""The questions of a file one by one, each with its place: JSON lines, one JSON array, CSV or parquet."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from sameday.data.questions.read import meant_keys
from sameday.data.questions.tables import Say, csv_rows, files_of, previewed, unpacked
from sameday.spec.errors import BadInput

BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
UTF_32 = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
LONGEST = 2**26
"""Bytes of one line: a file without line breaks is none of questions."""
NEEDED = "a file with one JSON object per line, or with one JSON array of objects, CSV or parquet, is needed"
# Whole strings, so that no bracket or comma inside one counts. A string holds no line break: where its closing quote is
# missing, only its own item is spoilt. Nothing is tried twice, however long a text without an end is.
_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|[][{},]', re.DOTALL)
_NOT_BLANK = re.compile(rb"\S")


@dataclass(frozen=True)
class Line:
    """A question that was not parsed yet, as bytes, so that bad bytes spoil only their own question. `number` counts
    lines, or the items of an array; `line` is where it begins."""

    number: int
    line: int
    text: bytes
    item: bool = False
    file: str = ""
    """Where several files are one set."""
    row: Any = None
    """A row of a table, which is parsed already."""

    @property
    def place(self) -> str:
        within = f"{self.line} (item {self.number})" if self.item else str(self.line)
        return f"{self.file}:{within}" if self.file else within

    def parse(self) -> Any:
        """ValueError says what is wrong with it, and where."""
        if self.row is not None:
            return self.row.parse()
        try:
            text = self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            at = error.start - (self.text.rfind(b"\n", 0, error.start) + 1)
            where = self._inside(self.text.count(b"\n", 0, error.start), at + 1)
            raise ValueError(f"not UTF-8: byte 0x{self.text[error.start]:02x} at {where}") from error
        try:
            return json.loads(
                text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_float=_finite
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"invalid JSON at {self._inside(error.lineno - 1, error.colno)}: {error.msg}") from error
        except RecursionError as error:
            raise ValueError("invalid JSON: nested too deeply") from error

    def _inside(self, lines: int, column: int) -> str:
        """An item may be one of many on a line: its own columns are counted from where it begins."""
        if not self.item:
            return f"column {column}"
        return f"line {self.line + lines}, column {column}" if lines else f"character {column} of the item"


def read_lines(
    path: Path, limit: int | None = None, images: Path | None = None, say: Say = lambda _: None
) -> Iterator[Line]:
    """Of the whole file, or of all that a pattern means, or the first so many; blank lines are passed. `images` is the
    folder that parquet's images are unpacked into, which `say` hears of."""
    files = files_of(path)
    if len(files) == 1:
        yield from islice(_lines(files[0], images, say), limit)
        return
    every = ((file, line) for file in files for line in _lines(file, images, say))
    for number, (file, line) in enumerate(islice(every, limit), 1):
        yield replace(line, number=number, file=file.name)


def preview(path: Path) -> Iterator[Any]:
    """The rows of a file, or of all that a pattern means, that can be read, without unpacking anything: to guess by."""
    for file in files_of(path):
        if file.suffix.lower() == ".parquet" and file.is_file():
            yield from previewed(file)
            continue
        for line in _lines(file, None, lambda _: None):
            with contextlib.suppress(ValueError):
                yield line.parse()


def _lines(path: Path, images: Path | None, say: Say) -> Iterator[Line]:
    """A file whose first character is `[` is an array, and is never held whole; nor is one in the only object of a
    file."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadInput(f"{path} cannot be read: it is a pipe or a device, not a file; {NEEDED}")
        _refuse_utf_16(path)
        if path.suffix.lower() in (".csv", ".tsv"):
            yield from (Line(row.number, row.line, b"", row=row) for row in csv_rows(path))
            return
        if path.suffix.lower() == ".parquet" and path.is_file():
            if images is None:
                raise BadInput(f"{path}: its images are unpacked into recipe.data.image_root, which is no folder")
            path = unpacked(path, images, say)
        with path.open("rb") as file:
            begins = file.peek(64).removeprefix(BOM).lstrip()[:1]
            start = 0 if begins == b"[" else _inner_array(path, file) if begins == b"{" else None
            yield from _rows(file) if start is None else _items(path, file, start)
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist; {NEEDED}") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; {NEEDED}") from error


def _refuse_utf_16(path: Path) -> None:
    """By its first characters, which are ASCII in every form that is read: a zero byte is one half of such a one."""
    with path.open("rb") as file:
        begins = file.read(4)
    known, shown = ("UTF-32", begins) if begins in UTF_32 else ("UTF-16", begins[:2])
    if begins in UTF_32 or shown in UTF_16 or (b"\0" in shown and shown.strip(b"\0")):
        raise BadInput(
            f"{path}: is in {known} (its first bytes are {shown.hex(' ').upper()}); UTF-8 is needed: "
            f"`iconv -f {known} -t UTF-8 {path.name}` prints it so"
        )


def _rows(file: Any) -> Iterator[Line]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), start=1):
        if len(line) == LONGEST:
            raise OSError(f"line {number} is longer than {LONGEST:,} bytes, which no question is")
        text = line.removeprefix(BOM) if number == 1 else line
        if text.strip():
            yield Line(number, number, text.rstrip(b"\r\n"))


def _inner_array(path: Path, file: Any) -> int | None:
    """Where the array of questions begins in a file that is one object, such as {"info": ..., "annotations": [...]}:
    its only array of objects. None where the object is a question itself, or one of many."""
    arrays: dict[str, int] = {}
    keys: set[str] = set()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        depth, end, name, key = 0, 0, b"", True
        for token in _TOKEN.finditer(data):
            mark = data[token.start()]
            if mark == ord('"'):
                name = token.group() if depth == 1 and key else name
                keys |= {_text(name)} if depth == 1 and key else set()
                key = False
            elif mark == ord("[") and depth == 1 and (first := _NOT_BLANK.search(data, token.end())):
                arrays |= {_text(name): token.start()} if first.group() == b"{" else {}
            depth += (mark in b"[{") - (mark in b"]}")
            key = mark in b"{," if mark != ord('"') else key
            end = token.end()
            if depth == 0:
                break
        others = keys - arrays.keys()
        asks = {"question", "answer"} <= others | set(meant_keys(others).values())
        if asks or not arrays or keys & {"messages", "conversations"} or (not depth and _NOT_BLANK.search(data, end)):
            return None
        if depth and _is_object(data[:LONGEST].lstrip().split(b"\n", 2)[1:2]):
            return None  # the first of several lines is cut off
    named = " and ".join(map(repr, arrays))
    if depth:
        raise BadInput(f"{path}: the JSON object that holds {named} has no end: the file is cut off")
    if len(arrays) > 1:
        raise BadInput(
            f"{path}: is one JSON object, and {named} hold arrays of objects: which of them are questions is not "
            f"known; {NEEDED}, or one object with one such array"
        )
    return next(iter(arrays.values()))


def _is_object(line: list[bytes]) -> bool:
    try:
        return isinstance(json.loads(line[0]), dict)
    except (IndexError, ValueError, RecursionError):
        return False


def _text(quoted: bytes) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return quoted.decode("utf-8", "replace")


def _items(path: Path, file: Any, begin: int) -> Iterator[Line]:
    """The items of an array as they stand between its commas; what is inside of one is not looked at."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        depth, start, number, line, counted = 0, 0, 0, 1, 0
        for token in _TOKEN.finditer(data, begin):
            mark = data[token.start()]
            if mark in b"[{":
                depth += 1
                if depth == 1:
                    start = token.end()
            elif mark in b"]}":
                depth -= 1
            # An item ends at a comma of the array itself, or at its closing bracket.
            if (mark == ord(",") and depth == 1) or depth == 0:
                between = data[start : token.start()]
                text = between.strip()
                if text or number or depth:
                    number += 1
                    begins = start + len(between) - len(between.lstrip())
                    line, counted = line + data[counted:begins].count(b"\n"), begins
                    yield Line(number, line, text, item=True)
                start = token.end()
            if depth == 0:
                break
        if depth:
            first = _NOT_BLANK.search(data, start)
            begun = line + data[counted : first.start() if first else start].count(b"\n")
            raise BadInput(
                f"{path}: the JSON array has no end: the file is cut off, or a bracket of item {number + 1}, which "
                f"begins at line {begun}, is not closed"
            )
        how = "by '}' instead of ']'" if data[start - 1] != ord("]") else "and more follows"
        if data[start - 1] != ord("]") or (not begin and _NOT_BLANK.search(data, start)):
            end = line + data[counted:start].count(b"\n")
            raise BadInput(f"{path}:{end}: the JSON array ends here, after item {number}, {how}; {NEEDED}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return values


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"invalid JSON: {digits} is too large for a number; allowed are up to 1.7e308")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"invalid JSON: {name} is no JSON value")
