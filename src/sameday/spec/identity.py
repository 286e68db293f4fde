"""What a spec asks for, as plain data in which two ways to write one thing are one: the ground of fingerprints and of
lists of differences, so that the two always agree."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

Spec = TypeVar("Spec", bound=BaseModel)

IS_PATH: Any = {"path": True}
"""`json_schema_extra` of a field that names a file or a folder."""


def was(value: Any) -> Any:
    """`json_schema_extra` of a field with what was meant before there was the field, where its default is another: a
    fingerprint leaves the field out where it has that value, so that runs of before keep theirs."""
    return {"was": value}


ALWAYS = ("task", "kind")
"""Fields that say what the others belong to: in an identity even at their defaults."""


def identity_of(model: BaseModel, ignored: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields that are required or not at their defaults (or at what they were before), of nested models too."""
    deciding = {}
    for name, field in type(model).model_fields.items():
        if name in ignored:
            continue
        value = _plain(getattr(model, name), field)
        usual = None if field.is_required() else _plain(_before(field), field)
        if name in ALWAYS or field.is_required() or as_text(value) != as_text(usual):
            deciding[name] = value
    return deciding


def as_before(model: Spec) -> Spec:
    """A spec as it was meant when it was written, by a release that did not have all of the fields of today: those
    that nobody set are what they were."""
    changes: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            changes |= {name: inner} if (inner := as_before(value)) is not value else {}
        elif name not in model.model_fields_set and "was" in _extra(field):
            changes[name] = _before(field)
    return model.model_copy(update=changes) if changes else model


def differences_of(
    there: BaseModel, here: BaseModel, not_there: frozenset[str], not_here: frozenset[str], path: str = ""
) -> Iterator[str]:
    """A sentence for each field in which the two differ, with both values. What one side ignores, or does not have,
    it does not use."""
    sides = [
        {name: field for name, field in type(model).model_fields.items() if name not in ignored}
        for model, ignored in ((there, not_there), (here, not_here))
    ]
    for name in sides[0].keys() | sides[1].keys():
        if name not in sides[0]:
            yield f"{path}{name}: not used there, {_shown(getattr(here, name))} here"
        elif name not in sides[1]:
            yield f"{path}{name}: {_shown(getattr(there, name))} there, not used here"
        else:
            old, new = getattr(there, name), getattr(here, name)
            if isinstance(old, BaseModel) and isinstance(new, BaseModel):
                yield from differences_of(old, new, frozenset(), frozenset(), f"{path}{name}.")
            elif (named := by_name(old)) and (others := by_name(new)) and [*named] == [*others]:
                for each, one in named.items():
                    yield from differences_of(one, others[each], frozenset(), frozenset(), f"{path}{name}.{each}.")
            elif as_text(_plain(old, sides[0][name])) != as_text(_plain(new, sides[1][name])):
                yield f"{path}{name}: {_shown(old)} there, {_shown(new)} here"


def by_name(value: Any) -> dict[str, BaseModel] | None:
    """The members of a list by their names, where each is a spec with a name of its own."""
    if not isinstance(value, tuple) or not all(isinstance(each, BaseModel) and hasattr(each, "name") for each in value):
        return None
    named = {each.name: each for each in value}
    return named if len(named) == len(value) else None


def paths_of(model: BaseModel) -> Iterator[str]:
    """The files and folders that a spec names, as written."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel | tuple):
            for inner in value if isinstance(value, tuple) else (value,):
                yield from paths_of(inner) if isinstance(inner, BaseModel) else ()
        elif isinstance(value, str) and _is_path(field):
            yield value


def _plain(value: Any, field: FieldInfo | None = None) -> Any:
    """A value as JSON has it, in one form where several mean the same: 8 and 8.0, ./a and a."""
    if isinstance(value, BaseModel):
        return identity_of(value)
    if isinstance(value, str):
        return os.path.normpath(value) if field is not None and _is_path(field) else value
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return to_jsonable_python(value)


def as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _shown(value: Any) -> str:
    """A value in a sentence; of a list of specs with names, these names."""
    named = by_name(value)
    return ", ".join(named) if named else repr(to_jsonable_python(value))


def _is_path(field: FieldInfo) -> bool:
    return bool(_extra(field).get("path"))


def _before(field: FieldInfo) -> Any:
    """What it was before there was the field, or its default, which is the same as a rule."""
    return _extra(field).get("was", field.get_default(call_default_factory=True))


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
