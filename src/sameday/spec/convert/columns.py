"""What lines of questions call our keys, where a config says it: recipe.data.fields."""

from __future__ import annotations

from collections.abc import Mapping

from sameday.spec.convert import keys
from sameday.spec.convert.settings import Settings

FIELDS = "recipe.data.fields"
_READ_ANYWAY = {"image": ("image_filename",)}


def columns(work: Settings) -> None:
    """Settings that name one key each."""
    for ours in keys.COLUMNS:
        name = f"{ours}_key"
        if name not in work.old:
            continue
        theirs = work.old[name][1]
        if theirs is None:
            work.drop(name, "null: the default")
        elif not isinstance(theirs, str) or not theirs.strip():
            work.refuse(name, f"must be the name of a key of the data's lines, such as {ours}")
        elif theirs in (ours, *_READ_ANYWAY.get(ours, ())):
            work.drop(name, "does nothing: the key is read by this name anyway")
        else:
            work.put(f"{FIELDS}.{ours}", theirs, [name], "what the data calls it")


def renamed(fields: Mapping[str, str]) -> dict[str, str]:
    """Without keys that have our names."""
    return {ours: theirs for ours, theirs in fields.items() if theirs != ours}


def as_written(fields: Mapping[str, str]) -> str:
    """As people write them in a recipe."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in fields.items())}}}"
