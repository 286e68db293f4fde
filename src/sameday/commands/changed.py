"""Data that changed since a run began with it: found before anything is written, with the files that may be meant."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

from sameday.record.images import noted_images
from sameday.spec.errors import BadInput
from sameday.spec.words import first_names

Files = Mapping[str, Mapping[Path, str]]
"""Of each part of the data, by its name: the file that lists it first, then all others. Of an image its content, as
runs note it; of any other file an empty text."""
NAMED = 3
"""Files that are named; the others are counted."""


def refuse_changed(
    run: Path, then: Mapping[str, str], now: Mapping[str, str], files: Files, since: Path, began: str
) -> None:
    """BadInput where digests of data are not what they were `then`. Files newer than `since` are named, and images that
    the run has not noted; where a copy lost the times of files, the one that lists the others."""
    # An older release may have recorded fewer of them.
    changed = [name for name, digest in now.items() if then.get(name, digest) != digest]
    if changed:
        noted = noted_images(run)
        told = " and ".join(f"the {name} ({_named(files.get(name, {}), since, noted)})" for name in changed)
        raise BadInput(f"{run}: {told} changed since {began}; put it back as it was, or choose another --out")


def _named(files: Mapping[Path, str], since: Path, noted: Set[str]) -> str:
    newer = [str(file) for file in files if _time(file) > _time(since)]
    unknown = [str(file) for file, content in files.items() if noted and content and content not in noted]
    others = [file for file in unknown if file not in newer]
    told = [f"newer: {first_names(newer, NAMED)}"] if newer else []
    told += [f"not the images of then: {first_names(others, NAMED)}"] if others else []
    return "; ".join(told) or "".join(str(file) for file in list(files)[:1])


def _time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
