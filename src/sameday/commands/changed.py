"""Data that changed since a run began with it: found before anything is written, with the files that may be meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sameday.spec.errors import BadInput
from sameday.spec.words import first_names

Files = Mapping[str, Sequence[Path]]
"""Of each part of the data, by its name: the file that lists it first, then all others."""


def refuse_changed(
    place: Path, then: Mapping[str, str], now: Mapping[str, str], files: Files, since: Path, began: str
) -> None:
    """BadInput where digests of data are not what they were `then`. Files newer than `since` are named; where a copy
    lost the times of files, the one that lists the others."""
    # An older release may have recorded fewer of them.
    changed = [name for name, digest in now.items() if then.get(name, digest) != digest]
    if changed:
        told = " and ".join(f"the {name} ({_named(files.get(name, ()), since)})" for name in changed)
        raise BadInput(f"{place}: {told} changed since {began}; put it back as it was, or choose another --out")


def _named(files: Sequence[Path], since: Path) -> str:
    newer = [str(file) for file in dict.fromkeys(files) if _time(file) > _time(since)]
    return f"newer: {first_names(newer, 3)}" if newer else "".join(str(file) for file in files[:1])


def _time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
