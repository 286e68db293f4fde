"""Checkpoints that are whole or not there: written aside, flushed to disk, the manifest with every file's hash last,
then renamed. A resume takes the newest one whose hashes hold."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameday.spec.errors import BadInput
from sameday.spec.identity import as_before
from sameday.spec.load import recipe_from
from sameday.spec.recipe import Recipe, differences
from sameday.spec.record import sync

MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    state: dict[str, Any]


def write(parent: Path, name: str, fill: Callable[[Path], None], state: dict[str, Any] | None) -> Path:
    """`fill` writes the files; what it leaves behind becomes `parent/name` in one rename."""
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / name
    aside = parent / f".writing-{name}"
    shutil.rmtree(aside, ignore_errors=True)  # a killed run's remains
    aside.mkdir()
    fill(aside)
    if state is not None:
        (aside / STATE).write_text(json.dumps(state, indent=1))
    files = sorted(p for p in aside.rglob("*") if p.is_file())
    for path in files:
        sync(path)
    manifest = {str(p.relative_to(aside)): {"bytes": p.stat().st_size, "sha256": _hash(p)} for p in files}
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync(aside / MANIFEST)
    for folder in {p.parent for p in files} | {aside}:
        sync(folder)
    if final.exists():  # a broken one that was left aside, or the end of a run that is repeated
        shutil.rmtree(final)
    os.rename(aside, final)
    sync(parent)
    return final


def fault(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None where it can."""
    try:
        listed = json.loads((path / MANIFEST).read_text())
        manifest = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        manifest = {}
    if not manifest:
        return "its manifest is missing or unreadable"
    for name, (length, sha256) in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != length or _hash(file) != sha256:
            return f"{name} is not what was written"
    return None


def steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints by name, oldest first, valid or not."""
    found = [(int(m[1]), p) for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name))]
    return sorted(found)


def newest(folder: Path, recipe: Recipe, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint; each broken one before it is named."""
    for step, path in reversed(steps(folder)):
        why = fault(path)
        if why is not None:
            say(f"checkpoint {path.name} is left aside: {why}")
            continue
        state = json.loads((path / STATE).read_text())
        there = as_before(recipe_from(state["recipe"]))
        if there.fingerprint != recipe.fingerprint:
            raise BadInput(f"{path} is a checkpoint of another recipe:\n  " + "\n  ".join(differences(there, recipe)))
        return Checkpoint(path, step, state)
    return None


def prune(folder: Path, keep: int | None, done: int, best: int | None) -> None:
    """Of the steps done, keep the newest `keep` and the best one. A later one was left aside when the run was
    resumed, and must not push out one that can be used."""
    for remains in folder.glob(".writing-*"):
        shutil.rmtree(remains)
    known = [(step, path) for step, path in steps(folder) if step <= done]
    for step, path in known[:-keep] if keep is not None else []:
        if step != best:
            shutil.rmtree(path)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
