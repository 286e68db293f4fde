"""The manifest beside saved weights: every file's length and hash, so that whoever reads them knows that they are what
was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
READ = frozenset({".safetensors", ".bin", ".json", ".jinja", ".txt", ".model"})
"""Files that a loader may read: one of these that a manifest does not list was put there later."""


def write_manifest(folder: Path, files: Iterable[Path]) -> Path:
    listed = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _hash(p)} for p in files}
    (folder / MANIFEST).write_text(json.dumps(listed, indent=1))
    return folder / MANIFEST


def weights_digest(folder: Path) -> str | None:
    """Of the weights' bytes, as their manifest has them; None where there is none."""
    try:
        listed = json.loads((folder / MANIFEST).read_text())
        weights = sorted((name, entry["sha256"]) for name, entry in listed.items() if name.endswith(".safetensors"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest() if weights else None


def fault(folder: Path, needed: Iterable[str] = ()) -> str | None:
    """Why what lies in a folder cannot be used, or None where it can. `needed` are files that it must have."""
    try:
        listed = json.loads((folder / MANIFEST).read_text())
        manifest = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        manifest = {}
    if not manifest:
        return "its manifest is missing or unreadable"
    for name in needed:
        if name not in manifest:
            return f"{name} is needed, and its manifest does not list it"
    for name, (length, sha256) in manifest.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != length or _hash(file) != sha256:
            return f"{name} is not what was written"
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in READ and name not in manifest and name != MANIFEST and path.is_file():
            return f"{name} is there, and its manifest does not list it"
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
