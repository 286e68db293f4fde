"""Tables of questions as people have them: CSV, and parquet as the hub stores it, with the bytes of an image in every
row about it. Parquet is unpacked once: each image into a file named by its content, the rows into JSON lines beside."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from sameday.record.room import room_for
from sameday.spec.errors import BadInput

UNPACKED = ".unpacked"
"""Folder of unpacked tables, below `image_root`."""
AT_ONCE = 16
"""Rows that are held: of large images about a hundred megabytes."""
PREVIEWED = 80
"""Rows that a preview reads with their images: those by which images are looked for."""
SAID = 2000
"""Rows between two words of progress."""
SEPARATORS = (",", ";", "\t")
INSTALL = "pip install 'sameday[parquet]'"
KINDS = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
PART = ".part"
_IMAGE = re.compile(rf'"{re.escape(UNPACKED)}/([0-9a-f]{{32}}\.(?:{"|".join([*KINDS.values(), "bin"])}))"'.encode())
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A row of a table by its columns, or what is wrong with it. `line` is where it begins in the file."""

    number: int
    line: int
    value: dict[str, Any]
    wrong: str = ""

    def parse(self) -> dict[str, Any]:
        if self.wrong:
            raise ValueError(self.wrong)
        return self.value


def csv_rows(path: Path) -> Iterator[Row]:
    """Values are texts; an empty one is none. Rows are numbered without the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        begins = 1
        try:
            rows = csv.reader(file, delimiter=separator(path, file), strict=True)
            header = next(rows, [])
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                raise BadInput(f"{path}: its header names {', '.join(twice)} twice")
            number, begins = 0, rows.line_num + 1
            for row in rows:
                line, begins = begins, rows.line_num + 1  # a value may hold line breaks
                if not row:
                    continue
                number += 1
                wrong = ""
                if len(row) != len(header):
                    wrong = f"has {len(row)} values, and the header {len(header)}: {', '.join(header)}"
                yield Row(number, line, {name: text for name, text in zip(header, row, strict=False) if text}, wrong)
        except csv.Error as error:
            why = "a value begins with a quotation mark that is not closed" if "end of data" in str(error) else error
            raise BadInput(f"{path}:{begins}: is no row of CSV: {why}") from None
        except UnicodeDecodeError as error:
            byte = f"byte 0x{error.object[error.start]:02x}"
            remedy = f"if it is in Windows' encoding, `iconv -f CP1252 -t UTF-8 {path.name}` prints it in UTF-8"
            raise BadInput(f"{path}:{_not_utf_8(path)}: is not UTF-8: {byte}; {remedy}") from None


def _not_utf_8(path: Path) -> int:
    """The first line that is not; errors of decoding know their place in a block of the file alone."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def separator(path: Path, file: Any) -> str:
    """What divides the header into most columns; what the file's ending says where several do alike."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    columns: dict[str, int] = {}
    for each in (usual, *SEPARATORS):
        with contextlib.suppress(csv.Error):
            columns.setdefault(each, len(next(csv.reader(file, delimiter=each, strict=True), [])))
        file.seek(0)
    return max(columns, key=lambda each: columns[each], default=usual)


def unpacked(path: Path, root: Path, say: Say) -> Path:
    """The rows of a parquet file as JSON lines whose images are files below `root`. Made again where the file changed,
    or where images are gone; whole or not there."""
    folder, made = root / UNPACKED, _lines_of(path, root)
    if _are_of(made, path):
        if not (gone := _gone(made)):
            return made
        say(f"{path.name}: {gone:,} of its images {'is' if gone == 1 else 'are'} gone from {folder}")
    _opened(path)
    check_unpacking(path, root)
    # Noted before the rows are opened: of a table that is replaced meanwhile the note is not trusted.
    note = json.dumps({"ctime_ns": path.stat().st_ctime_ns, "content": _content(path)})
    file = _opened(path)
    folder.mkdir(exist_ok=True)
    say(f"{path.name}: its images are unpacked into {folder}")
    _remove_remains(folder)
    total, images, size = file.metadata.num_rows, set[str](), path.stat().st_size
    with room_for(f"the images of {path.name}", folder, size), _written_aside(made) as out:
        for number, row in enumerate(_parquet_rows(path, file), 1):
            written = _written(row, lambda content: _image(content, folder, images))
            out.write(json.dumps(written, ensure_ascii=False).encode() + b"\n")
            if number % SAID == 0 or number == total:
                say(f"unpacking {path.name}: {number:,} of {total:,} rows, {len(images):,} images")
        _note(made).unlink(missing_ok=True)  # never the note of other lines
    _note(made).write_text(note)
    return made


@contextlib.contextmanager
def _written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name at the end of the block, whole. Locked until then, which tells it from what a killed
    process left."""
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    with _locked(part) as file:
        try:
            yield file
            file.flush()
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


def _locked(part: Path) -> BinaryIO:
    """Anew where somebody took it for remains before it was locked."""
    while True:
        file = part.open("wb")
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.exists():
            return file
        file.close()


def _remove_remains(folder: Path) -> None:
    """Halves of files whose process is gone."""
    for part in folder.glob(f"*{PART}"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _gone(lines: Path) -> int:
    """How many of the images that these lines name are not in the folder any more."""
    with lines.open("rb") as file:
        named = {name for line in file for name in _IMAGE.findall(line)}
    return len(named.difference(map(os.fsencode, os.listdir(lines.parent))))


def check_unpacking(path: Path, root: Path) -> None:
    """BadInput where a parquet file cannot be unpacked below `root`. What was made to find out is gone again."""
    folder = root / UNPACKED
    made = _lines_of(path, root)
    if not path.is_file() or (_are_of(made, path) and not _gone(made)):
        return
    there = folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"{path}: its images are unpacked into {folder}, which cannot be written: {error.strerror}; allowed: "
            "another folder in recipe.data.image_root, or in --image-root of `sameday data`"
        ) from None
    finally:
        if not there:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _lines_of(path: Path, root: Path) -> Path:
    """The file of its rows, named by size and time of the table, which `_are_of` does not take for proof."""
    about = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:12]
    return root / UNPACKED / f"{path.stem}-{key}.jsonl"


def _are_of(lines: Path, path: Path) -> bool:
    """Whether lines that were unpacked are those of the table as it is now. Another one of the same size may have been
    put there with the old time, as `cp -p` and `rsync -t` do; then the time of its last change of any kind is another,
    and its bytes decide: it is also another after `chmod`."""
    if not lines.exists():
        return False
    changed, note = path.stat().st_ctime_ns, _note(lines)
    try:
        known = json.loads(note.read_text())
        if known["ctime_ns"] == changed:
            return True
        content = _content(path)
        if known["content"] != content:
            return False
    except (OSError, ValueError, TypeError, KeyError):
        # Earlier releases wrote none. Where nothing can be written, their lines are all there is.
        return not os.access(lines.parent, os.W_OK)
    with contextlib.suppress(OSError):  # where nothing can be written, the bytes are compared every time
        note.write_text(json.dumps({"ctime_ns": changed, "content": content}))
    return True


def _note(lines: Path) -> Path:
    """What their table was: the time of its last change, and a digest of its bytes."""
    return lines.with_suffix(".table")


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def previewed(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file as they would be unpacked, and nothing is written: an image has a name that begins
    with UNPACKED, and of all but the first rows its bytes are not even read."""
    file = _opened(path)
    for row in islice(_parquet_rows(path, file), PREVIEWED):
        yield _written(row, lambda _: f"{UNPACKED}/")
    leaves = [file.schema.column(number) for number in range(len(file.schema))]
    # Texts have a kind of their own among bytes.
    light = [each.path for each in leaves if each.physical_type != "BYTE_ARRAY" or each.logical_type.type != "NONE"]
    images = {name: f"{UNPACKED}/" for name in file.schema_arrow.names}
    for row in islice(_parquet_rows(path, file, light), PREVIEWED, None):
        yield images | _written(row, lambda _: f"{UNPACKED}/")


def _opened(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise BadInput(f"{path}: reading parquet needs the package pyarrow: {INSTALL}") from None
    try:
        return ParquetFile(path, memory_map=True, pre_buffer=False)  # never a whole group of rows in memory
    except (ArrowException, OSError) as error:
        raise BadInput(f"{path}: is no parquet file, or only a part of one: {_first(error)}") from None


def _parquet_rows(path: Path, file: Any, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException

    try:
        for batch in file.iter_batches(AT_ONCE, columns=columns):
            yield from _in_microseconds(batch).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read to its end: {_first(error)}") from None


def _in_microseconds(batch: Any) -> Any:
    """Python has no times in nanoseconds, as pandas writes them; what is below a microsecond is cut off."""
    from pyarrow import RecordBatch, duration, time64, timestamp, types

    columns = list(batch.columns)
    for place, column in enumerate(columns):
        kind = column.type
        if types.is_timestamp(kind) and kind.unit == "ns":
            columns[place] = column.cast(timestamp("us", kind.tz), safe=False)
        elif types.is_duration(kind) and kind.unit == "ns":
            columns[place] = column.cast(duration("us"), safe=False)
        elif types.is_time(kind) and kind.unit == "ns":
            columns[place] = column.cast(time64("us"), safe=False)
    return RecordBatch.from_arrays(columns, names=batch.schema.names)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _written(value: Any, image: Callable[[bytes], str]) -> Any:
    """As JSON: an image's bytes become the name that `image` gives them, what JSON has no word for its text."""
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), bytes) and value.keys() <= {"bytes", "path"}:
            return image(value["bytes"])
        if "bytes" in value and value.keys() <= {"bytes", "path"}:
            return value.get("path")
        return {name: _written(each, image) for name, each in value.items()}
    if isinstance(value, list):
        return [_written(each, image) for each in value]
    if isinstance(value, bytes):
        return image(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _image(content: bytes, folder: Path, images: set[str]) -> str:
    """Bytes that are no image get a file too: the audit says so, with the row."""
    kind = next((kind for begin, kind in KINDS.items() if content.startswith(begin)), "bin")
    name = f"{hashlib.sha256(content).hexdigest()[:32]}.{kind}"
    file = folder / name
    if name not in images and not (file.exists() and file.stat().st_size == len(content)):
        with _written_aside(file) as out:
            out.write(content)
    images.add(name)
    return f"{UNPACKED}/{name}"


def files_of(path: Path) -> list[Path]:
    """One file, or all that a pattern such as `raw-*.parquet` means, in order."""
    if path.exists() or not re.search(r"[*?\[]", path.name):
        return [path]
    found = sorted(path.parent.glob(path.name)) if path.parent.is_dir() else []
    if not found:
        raise BadInput(f"{path}: no file is called so")
    return found
