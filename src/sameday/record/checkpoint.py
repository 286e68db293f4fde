"""Checkpoints that are whole or not there: written aside, flushed to disk, the manifest with every file's hash last,
then renamed. A resume takes the newest one whose hashes hold."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sameday.record.manifest import fault, write_manifest
from sameday.record.room import on_disk
from sameday.spec.errors import BadInput
from sameday.spec.identity import as_before
from sameday.spec.load import recipe_from
from sameday.spec.recipe import Recipe, differences
from sameday.spec.words import first_names
from sameday.spec.writing import sync

STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
BEST = "best.json"
SMALL_FILES = 10
"""About how many lie beside the weights, most of less than a block: settings, what the run remembers, the manifest."""
EXTRA = "extra_forbidden"
"""pydantic's name for a field that a model does not have."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    state: dict[str, Any]


def write(parent: Path, name: str, fill: Callable[[Path], None], state: dict[str, Any] | None) -> Path:
    """`fill` writes the files; what it leaves behind becomes `parent/name` in one rename, or is removed where that
    fails."""
    parent.mkdir(parents=True, exist_ok=True)
    aside = parent / f".writing-{name}"
    shutil.rmtree(aside, ignore_errors=True)  # a killed run's remains
    try:
        return _written(parent, name, aside, fill, state)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _written(parent: Path, name: str, aside: Path, fill: Callable[[Path], None], state: dict[str, Any] | None) -> Path:
    final = parent / name
    aside.mkdir()
    fill(aside)
    if state is not None:
        (aside / STATE).write_text(json.dumps(state, indent=1))
    files = sorted(p for p in aside.rglob("*") if p.is_file())
    for path in files:
        sync(path)
    sync(write_manifest(aside, files))
    for folder in {p.parent for p in files} | {aside}:
        sync(folder)
    if final.exists():  # a broken one that was left aside, or the end of a run that is repeated
        shutil.rmtree(final)
    os.rename(aside, final)
    sync(parent)
    return final


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints by name, oldest first, valid or not."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
    return sorted(found)


def size(path: Path) -> int:
    """Bytes of all of its files."""
    return sum(_sizes(path))


def size_on_disk(path: Path) -> int:
    """Bytes that such a checkpoint takes beside it."""
    return on_disk(path, _sizes(path), 1 + sum(each.is_dir() for each in path.rglob("*")))


def _sizes(path: Path) -> list[int]:
    return [file.stat().st_size for file in path.rglob("*") if file.is_file()]


def candidates(folder: Path, recipe: Recipe, say: Callable[[str], None]) -> Iterator[Checkpoint]:
    """Those that a run can go on from, the newest first; each broken one before it is named."""
    for step, path in reversed(steps(folder)):
        why = fault(path, (STATE, OPTIMIZER))
        state = {} if why is not None else _state(path)
        if state is None:
            why = f"{STATE} is not what a run wrote"
        if why is not None or state is None:
            say(f"checkpoint {path.name} is left aside: {why}")
            continue
        there = as_before(_recipe_of(path, state))
        if there.fingerprint != recipe.fingerprint:
            raise BadInput(f"{path} is a checkpoint of another recipe:\n  " + "\n  ".join(differences(there, recipe)))
        yield Checkpoint(path, step, state)


def newest_digests(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """What the newest checkpoint whose record can be read was trained on, and the file that says so. Its weights are
    not looked at."""
    for _, path in reversed(steps(folder)):
        if (state := _state(path)) is not None:
            return path / STATE, state["digests"]
    return None


def _state(path: Path) -> dict[str, Any] | None:
    try:
        state = dict(json.loads((path / STATE).read_text()))
        return state if isinstance(state["recipe"], dict) and isinstance(state["digests"], dict) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _recipe_of(path: Path, state: dict[str, Any]) -> Recipe:
    try:
        return recipe_from(state["recipe"])
    except ValidationError as error:
        unknown = sorted({".".join(map(str, each["loc"])) for each in error.errors() if each["type"] == EXTRA})
        if unknown:
            raise newer(path, [f"recipe.{name}" for name in unknown]) from None
        raise BadInput(f"{path}: its recipe is not what a run wrote: {error.errors()[0]['msg']}") from None


def newer(path: Path, unknown: Sequence[str]) -> BadInput:
    return BadInput(
        f"{path}: was written by a newer release, which has fields that this one does not know: {', '.join(unknown)}; "
        "go on with that release, or choose another --out"
    )


def not_finite(folder: Path) -> list[str]:
    """Names of the tensors, of weights and optimizer, that hold something which is not finite."""
    from safetensors import safe_open

    names = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names += [name for name in file.keys() if not file.get_tensor(name).isfinite().all()]  # noqa: SIM118
    return names


def usable(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole and finite, and a sentence for each newer one that is not."""
    broken: list[str] = []
    for _, path in reversed(steps(folder)):
        why = fault(path, (STATE, OPTIMIZER))
        if why is None and (bad := not_finite(path)):
            why = f"{first_names(bad, 3)} is not finite"
        if why is None:
            return path, broken
        broken.append(f"{path.name} cannot be used: {why}")
    return None, broken


def best_step(folder: Path) -> int | None:
    """The step of the best validation score so far; None where none is known."""
    try:
        step = json.loads((folder / BEST).read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def prune(folder: Path, keep: int | None, done: int, best: int | None) -> None:
    """Of the steps done, keep the newest `keep` and the best one. A later one was left aside when the run was
    resumed, and must not push out one that can be used."""
    for remains in folder.glob(".writing-*"):
        shutil.rmtree(remains)
    known = [(step, path) for step, path in steps(folder) if step <= done]
    for step, path in known[:-keep] if keep is not None else []:
        if step != best:
            shutil.rmtree(path)
