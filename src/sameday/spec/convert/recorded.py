"""Configs as W&B records them: each setting is a section with its value and a description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameday.spec.document import Document

_OWN = ("_wandb", "wandb_version")
"""What W&B writes for itself."""


def take_values(document: Document) -> None:
    """Puts each value where its section was; any other file stays as it is."""
    settings = {key: each for key, each in document.values.items() if key not in _OWN}
    if not settings or not all(map(_is_recorded, settings.values())):
        return
    document.values = {key: each["value"] for key, each in settings.items()}
    places = document.places.items()
    document.places = {(path[0], *path[2:]): at for path, at in places if path[1:2] == ("value",)}


def _is_recorded(section: Any) -> bool:
    return isinstance(section, Mapping) and "value" in section and section.keys() <= {"value", "desc"}
