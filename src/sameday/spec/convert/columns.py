"""What lines of questions call our keys, where a config says it: recipe.data.fields."""

from __future__ import annotations

from collections.abc import Mapping

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import show
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
    _of_validation(work)


def _of_validation(work: Settings) -> None:
    """A recipe's fields are those of its training questions and of its validation questions."""
    for key, value in work.leaves.items():
        *sections, last = key.split(".")
        ours, _, end = keys.ALIASES.get(last, last).rpartition("_")
        held_out = any(each.lower() in keys.HELD_OUT for each in sections)
        if value is None or end != "key" or ours not in keys.COLUMNS or not held_out:
            continue
        _, trained = work.old.get(f"{ours}_key", ("", None))
        if value != (trained or ours):
            work.refuse_key(
                key,
                f"but training questions have it as {show(trained or ours)}, and a recipe has one name for both "
                f"({FIELDS}.{ours}): give the keys the same names in the data",
            )


def renamed(fields: Mapping[str, str]) -> dict[str, str]:
    """Without keys that have our names."""
    return {ours: theirs for ours, theirs in fields.items() if theirs != ours}


def as_written(fields: Mapping[str, str]) -> str:
    """As people write them in a recipe."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in fields.items())}}}"
