"""The settings of a Trainer-style config by their Hugging Face names, and what has been made of them so far."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import Note, show
from sameday.spec.document import Document


class Settings:
    """The old settings by their Hugging Face names, and what has been made of them so far."""

    def __init__(self, document: Document, folder: Path, drop: Sequence[str]) -> None:
        self.document, self.folder = document, folder
        self.old: dict[str, tuple[str, Any]] = {}
        self.notes: list[Note] = []
        self.refused: list[str] = []
        self.why = dict(keys.WHY)
        self.new = {kind: Document(document.source) for kind in ("recipe", "plan")}
        self.leaves = dict(keys.leaves(document.values, ""))
        for each in drop:
            if not any(_within(key, each) for key in self.leaves):
                self.refused.append(f"--drop {each}: {document.source} has no such key")
        for key, value in self.leaves.items():
            name, beside = keys.canonical(key), keys.elsewhere(key)
            if any(_within(key, each) for each in drop):
                self._drop_key(key, "left out, as --drop asks; if it changed the model, this recipe asks for another")
            elif beside is not None:
                self._drop_key(key, beside)
            elif name is None:
                self._unknown(key, value)
            elif name in self.old and self.old[name][1] != value:
                other, there = self.old[name]
                self._refuse_key(key, f"but {other}, which means the same, is {show(there)}")
            elif name in self.old:
                self._drop_key(key, f"says the same as {self.old[name][0]}")
            else:
                self.old[name] = (key, value)

    def _unknown(self, key: str, value: Any) -> None:
        """It may change the prompt, the data or the loss: only who knows the old program can let it go."""
        if value in (None, "", [], {}):
            return self._drop_key(key, "not known, and empty")
        near = difflib.get_close_matches(key.split(".")[-1], keys.KNOWN, n=1, cutoff=0.75)
        nearest = f" (nearest: {near[0]})" if near else ""
        self._refuse_key(key, f"not known{nearest}, and it may change the model; --drop {key} leaves it out")

    def get(self, name: str, kind: type) -> Any:
        """The old value as this type where it can be read so; None where it is absent or null."""
        return keys.cast(self.old[name][1], kind) if name in self.old else None

    def text(self, name: str) -> str:
        return "" if self.get(name, str) is None else str(self.get(name, str))

    def put(self, field: str, value: Any, names: Sequence[str], why: str = "") -> None:
        """Set a new field from the old settings of these names."""
        given = [self.old[name][0] for name in names if name in self.old]
        path = self._set(field, value)
        self.new[field.split(".")[0]].places[path] = f"{self._place(given[0])}: {given[0]}"
        self.notes += [Note(key, field, self.leaves[key], why, value) for key in given]

    def default(self, field: str, value: Any, name: str, why: str = "the Trainer's default") -> None:
        """Set a new field that the old config left to its program's default."""
        self.drop(name, "null: the default")
        self._set(field, value)
        self.notes.append(Note(f"(not set) {name}", field, None, why, value))

    def drop(self, name: str, why: str) -> None:
        """Let an old setting go, if it was given."""
        if name in self.old:
            self._drop_key(self.old[name][0], why)

    def refuse(self, name: str, why: str) -> None:
        self._refuse_key(self.old[name][0], why)

    def _drop_key(self, key: str, why: str) -> None:
        self.notes.append(Note(key, None, self.leaves[key], why))

    def _refuse_key(self, key: str, why: str) -> None:
        self.refused.append(f"{self._place(key)}: {key} is {show(self.leaves[key])}; {why}")

    def _place(self, key: str) -> str:
        return self.document.place(tuple(key.split(".")))

    def _set(self, field: str, value: Any) -> tuple[str, ...]:
        kind, *path = field.split(".")
        here = self.new[kind].values
        for step in path[:-1]:
            here = here.setdefault(step, {})
        here[path[-1]] = value
        return tuple(path)


def _within(key: str, asked: str) -> bool:
    return key == asked or key.startswith(f"{asked}.")
