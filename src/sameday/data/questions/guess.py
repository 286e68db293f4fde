"""What the files of a stranger's set mean, guessed from their names, their columns and where images lie: a start for a
recipe, which says what was guessed."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sameday.data.questions.lines import read_lines
from sameday.data.questions.read import fields_of, meant_keys, parse_line
from sameday.data.questions.tables import UNPACKED
from sameday.spec.dataset import KEYS
from sameday.spec.errors import BadInput
from sameday.spec.questions import compared

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validate", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
_SHARD = re.compile(r"-\d{2,}(-of-\d+)?$")
LANGUAGES = ("q_lang", "lang", "language")
STAGES = ("complexity", "difficulty", "level")
"""Columns that order questions as stages do, if they hold whole numbers."""
NO_ANSWER = ("nan", "n/a", "null", "<na>")
"""Answers, whatever their case, that say that there is none."""
CONVERSATIONS = {"messages", "conversations"}
"""Keys of lines that are one."""
DISTINCT = 50
"""Values of a column that are counted; one with more is no category."""
TRIED = 8
"""Images that are looked for in a folder."""
PICTURES = re.compile(r"(?:images?|imgs?|pics?|pictures?|photos?|jpe?gs?|pngs?)(?![a-z])", re.IGNORECASE)
"""How the name of a folder beside that of the questions begins, if it may hold their images."""
FOLDERS = 2000
"""Folders in which they are looked for."""


def split_named(path: Path) -> str | None:
    """Which split a file is, by the last word of its name that says so, or the whole name of its folder."""
    words = [path.parent.name.lower(), *re.split(r"[^a-z]+", path.name.split(".")[0].lower())]
    return next((split for word in reversed(words) for split, names in _SPLITS.items() if word in names), None)


def grouped_shards(files: Iterable[Path]) -> list[Path]:
    """Each file, and of files that are one in numbered parts their pattern."""
    groups: dict[tuple[Path, str, str], list[Path]] = {}
    for file in sorted(files):
        groups.setdefault((file.parent, _SHARD.sub("", file.stem), file.suffix), []).append(file)
    found = []
    for (folder, stem, suffix), parts in groups.items():
        pattern = folder / f"{stem}-*{suffix}"
        found += [pattern] if len(parts) > 1 and sorted(folder.glob(pattern.name)) == parts else parts
    return found


def question_files(folder: Path) -> list[Path]:
    """Files in a folder that may hold questions: of the first level that has any."""
    level = [folder]
    for _ in range(4):
        files = [each for place in level for each in sorted(place.iterdir()) if each.is_file()]
        likely = [each for each in files if each.suffix.lower() in SUFFIXES and not each.name.startswith(".")]
        if asked := [each for each in grouped_shards(likely) if each.suffix == ".parquet" or _asks(each)]:
            return asked
        level = [
            each
            for place in level
            for each in sorted(place.iterdir())
            if each.is_dir() and not each.name.startswith((".", UNPACKED))
        ][:FOLDERS]
    raise BadInput(f"{folder}: has no file of questions; known are {', '.join(SUFFIXES)}")


def _asks(path: Path) -> bool:
    """Whether its first row looks like a question: a folder has other files in JSON too."""
    try:
        first = next(iter(read_lines(path, 1))).parse()
    except (BadInput, ValueError, StopIteration):
        return False
    if not isinstance(first, dict):
        return False
    there = set(first) | set(meant_keys(set(first)).values())
    return bool(there & CONVERSATIONS or {"question", "answer"} <= there)


def by_split(files: Sequence[Path]) -> dict[str, Path]:
    """The file of each split, and none whose name says no split, unless it is the only one to train on. BadInput where
    that is not known."""
    named = [(split_named(each), each) for each in files]
    splits: dict[str, Path] = {}
    unnamed = [each for split, each in named if split is None]
    for split, each in named:
        if split is not None and split in splits:
            raise BadInput(f"{splits[split]} and {each}: both are {split} by their names; give one of them")
        if split is not None:
            splits[split] = each
    if "train" not in splits and len(unnamed) == 1:
        splits["train"] = unnamed[0]
    if "train" not in splits and len(files) == 1:
        splits = {"train": files[0]}
    if "train" not in splits:
        listed = ", ".join(each.name for each in files)
        raise BadInput(
            f"which file is trained on is not known of {listed}; give one file, or name them train, val, test"
        )
    return {split: splits[split] for split in _SPLITS if split in splits}


@dataclass
class Columns:
    """What stands in the columns of a file, as far as guessing needs it."""

    every: set[str] | None = None
    """Those that every row has."""
    values: dict[str, Counter[str]] = field(default_factory=dict)
    """How often each value occurs, until there are too many for a category."""
    texts: set[str] = field(default_factory=set)
    """Those that hold a text, or a list of them, somewhere."""
    nothing: dict[str, set[str]] = field(default_factory=dict)
    """Values that say that there is none."""
    first: list[Mapping[str, Any]] = field(default_factory=list)
    """Some rows."""

    def add(self, row: Mapping[str, Any]) -> None:
        self.every = set(row) if self.every is None else self.every & set(row)
        self.first += [row] if len(self.first) < 10 * TRIED else []
        for name, value in row.items():
            if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
                self.texts.add(name)
            text, seen = compared(name, value), self.values.setdefault(name, Counter())
            if text is not None and text.lower() in NO_ANSWER:
                self.nothing.setdefault(name, set()).add(text)
            if text is not None and len(seen) <= DISTINCT:
                seen[text[:100]] += 1

    def few(self, name: str) -> Counter[str]:
        """The values of a column, where they are few."""
        seen = self.values.get(name, Counter())
        return seen if len(seen) <= DISTINCT else Counter()


@dataclass(frozen=True)
class Meaning:
    """Fields of `recipe.data` that columns suggest, and the names of some images."""

    fields: dict[str, str]
    where: dict[str, list[str]]
    skip: dict[str, list[str]]
    images: list[str]


def meaning_of(rows: Iterable[Any]) -> Meaning:
    """By the rows of a file, of which few are kept."""
    columns = Columns()
    for row in rows:
        if isinstance(row, dict):
            columns.add(_with_answer(row))
    fields = _fields(columns)
    where = {
        name: ["en"] if "en" in there else [there.most_common(1)[0][0]]
        for name in LANGUAGES
        if len(there := columns.few(name)) > 1
    }
    nothing = sorted(columns.nothing.get(fields.get("answer", "answer"), ()))
    return Meaning(fields, where, {"answer": nothing} if nothing else {}, _names(columns.first, fields))


def _with_answer(row: dict[str, Any]) -> dict[str, Any]:
    """A conversation has its last answer as a column too, and the images that its turns name."""
    if row.keys() & CONVERSATIONS:
        with contextlib.suppress(ValueError):
            raw = parse_line(row)
            return {"images": raw.images, **fields_of(row, raw)}
    return row


def _fields(columns: Columns) -> dict[str, str]:
    every = columns.every or set()
    fields = {ours: theirs for theirs, ours in meant_keys(every & columns.texts).items() if ours in KEYS}
    if every & CONVERSATIONS and fields.get("image") == "images":
        del fields["image"]  # read there by either name
    if "stage" not in every:
        for name in STAGES:
            if name in every and columns.few(name) and all(value.isdigit() for value in columns.few(name)):
                fields.setdefault("stage", name)
    return {ours: fields[ours] for ours in KEYS if ours in fields and fields[ours] != ours}


def _names(rows: Iterable[Mapping[str, Any]], fields: Mapping[str, str]) -> list[str]:
    """Of images, without those that a table held itself."""
    names: dict[str, None] = {}
    keys = (fields.get("image", "image"), "image_filename", "images")
    for row in rows:
        value: Any = next((row[key] for key in keys if row.get(key)), [])
        several = value if isinstance(value, list) else [value]
        names |= dict.fromkeys(each for each in several if isinstance(each, str) and not each.startswith(UNPACKED))
    return list(names)


def image_root(names: Sequence[str], home: Path) -> Path | None:
    """The folder that images are named from: beside the questions or below, or one above and called after images: what
    else is there may be another set. None where most are in none."""
    tried = names[:TRIED]
    beside = [each for each in _folders(home.parent, 2) if PICTURES.match(each.name)]
    for folder in chain(
        islice(_folders(home), FOLDERS), [home.parent], *(islice(_folders(each), FOLDERS) for each in beside)
    ):
        if sum(_there(folder, name) for name in tried) * 2 > len(tried):
            return folder
    return None


def _there(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file() and (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):
        return False


def _folders(start: Path, depth: int = 3) -> Iterable[Path]:
    """This one, then those below, level by level."""
    level = [start]
    for _ in range(depth):
        yield from level
        below = []
        for folder in level:
            try:
                below += [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.name.startswith(".")]
            except OSError:
                continue
        level = below
