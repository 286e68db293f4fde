"""To how many pixels a model's own image processor enlarges smaller images, whatever a trainer does before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sameday.spec.convert.families import FAMILIES
from sameday.spec.convert.settings import Settings
from sameday.spec.load import resolve_path

_FILES = ("processor_config.json", "preprocessor_config.json")


def least_pixels(work: Settings) -> int | None:
    """As the model's folder has it, else as its family's models do; of a model whose family is not known, what all of
    them enlarge to. None where every image becomes one size."""
    name = work.text("model_name_or_path")
    own = _of_folder(resolve_path(work.folder, name)) if name else None
    if own is not None:
        return own
    facts = [work.family] if work.family is not None else FAMILIES.values()
    return min((each.least_pixels for each in facts if each.least_pixels is not None), default=None)


def _of_folder(folder: Path) -> int | None:
    """None where there is no such folder, or its settings say nothing of it."""
    for file in _FILES:
        settings = _read(folder / file)
        settings = settings.get("image_processor", settings)
        size = settings.get("size") or {}
        for value in (settings.get("min_pixels"), size.get("min_pixels"), size.get("shortest_edge")):
            if isinstance(value, int):
                return value
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open(encoding="utf-8") as opened:
            values = json.loads(opened.read(1_000_000))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
