"""The settings of a Trainer-style config by their Hugging Face names, and what has been made of them so far."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sameday.spec.convert import keys, sections
from sameday.spec.convert.conversion import Note, show
from sameday.spec.convert.families import FAMILIES, FamilyFacts, kind_by_name
from sameday.spec.convert.trainers.trainer import PLAIN, Trainer
from sameday.spec.document import COLON, Document
from sameday.spec.load import resolve_path

ABSENT = "(not set) "
SECRET = re.compile(r"(?i)(?:api_?key|secret|password|(?:hub|hf|ms|om|wandb|swanlab|access|auth)_?token|^token)$")

_SOME_ROWS = re.compile(r"#\d+(?![\w.])|\[\d*%?:\d*%?\]")
"""Rows that a set of questions is cut to: data.jsonl#500 of ms-swift, train[:1%] of datasets."""


class Settings:
    """The old settings by their Hugging Face names, and what has been made of them so far."""

    def __init__(
        self,
        document: Document,
        folder: Path,
        drop: Sequence[str],
        trainer: Trainer = PLAIN,
        command: str = "",
        data: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is the command line's words, where it is a script's. `data` are files that stand instead of those
        that the config names, by the option that gives them."""
        self.document, self.folder, self.trainer, self.command = document, folder, trainer, command
        self.neutral = {**keys.NEUTRAL, **trainer.neutral}
        self.dropped = {**keys.DROPPED, **trainer.dropped}
        self.starts = {**keys.DROPPED_STARTS, **trainer.starts}
        self.handled = {*keys.DIRECT, *keys.COMPUTED, *trainer.handled}
        self.old: dict[str, tuple[str, Any]] = {}
        self.replaced: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.refused: list[str] = []
        self.refused_keys: list[str] = []
        self.let_go: set[str] = set()
        self.several = "on several devices"
        self.why = dict(keys.WHY)
        self.new = {kind: Document(document.source) for kind in ("recipe", "plan")}
        self.leaves = {
            key: "***" if isinstance(value, str) and SECRET.search(key) else value
            for key, value in keys.leaves(document.values, "", trainer.whole)
        }
        for each in drop:
            if not any(_within(key, each) for key in self.leaves):
                self.refused.append(f"--drop {each}: {document.source} has no such key")
        for key, value in self.leaves.items():
            value, name = keys.plain(value), self._canonical(key)
            name = sections.rate_of_part(key, name) or name
            if name is None and command and value is True and (negated := self._negated(key)) is not None:
                value, name = False, negated
            beside = sections.elsewhere(key, name, self.leaves, self.dropped, self.starts)
            if any(_within(key, each) for each in drop):
                self.let_go.add(key)
                self._drop_key(key, "left out, as --drop asks; if it changed the model, this recipe asks for another")
            elif beside is not None:
                self._drop_key(key, beside)
            elif (of_part := sections.of_another(key, name, self.leaves)) is not None:
                self._apart(key, value, of_part)
            elif name is None:
                self._unknown(key, value)
            elif name in self.old and self.old[name][1] != value:
                other, there = self.old[name]
                self.refuse_key(key, f"but {other}, which means the same, is {show(there)}")
            elif name in self.old:
                self._drop_key(key, f"says the same as {self.old[name][0]}")
            else:
                self.old[name] = (key, value)
        for option, value in (data or {}).items():
            self._replace(option, value)
        if {"--train", "--val"} <= {*(data or {})}:
            self.drop("val_size", "--train and --val replace it: the two files must hold the two parts")
            self.done("val_size")

    @property
    def kind(self) -> str | None:
        """The model's type, of its folder or of its name; None where neither tells it."""
        name = self.text("model_name_or_path")
        told = keys.model_type(resolve_path(self.folder, name) / "config.json") if name else None
        return told or kind_by_name(name)

    @property
    def family(self) -> FamilyFacts | None:
        return FAMILIES.get(self.kind or "")

    def if_of(self, kinds: Sequence[str]) -> str:
        """The doubt about what holds for these families alone, where the model's is not known."""
        of = " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
        return (
            "" if self.family is not None else f", if the model is of {of}, which neither its folder nor its name tells"
        )

    def one_size(self) -> str:
        """Why numbers of pixels say nothing, where every image of the model becomes one size."""
        if self.family is None or self.family.token_side is not None:
            return ""
        why = "this model takes every image at one size, which its own image settings say"
        if self.trainer.shrinks_first:
            why += f"; near, not the same: {self.trainer.name} shrinks larger images to so many pixels before that"
        return why

    def world(self) -> int:
        """Processes that train together, as far as a launcher's flags say it."""
        return math.prod(self.get(name, int) for name in keys.WORLD if self.counts(name))

    def counts(self, name: str) -> bool:
        """Whether it is a number of processes, and no word such as `gpu`."""
        count = self.get(name, int)
        return isinstance(count, int) and not isinstance(count, bool) and count > 0

    def near(self, path: Path) -> str:
        """A path as the config's folder sees it."""
        return Path(os.path.relpath(path, self.folder.resolve())).as_posix()

    def _canonical(self, key: str) -> str | None:
        known = {*self.handled, *self.neutral, *self.dropped}
        return keys.canonical(key, {**keys.ALIASES, **self.trainer.aliases}, known, self.starts)

    def _negated(self, key: str) -> str | None:
        """What transformers' flag --no_NAME sets to false."""
        *around, last = key.split(".")
        return self._canonical(".".join([*around, last[3:]])) if last.startswith("no_") else None

    def is_setting(self, key: str) -> bool:
        """Whether it is one that recipe or plan may depend on, and none that an option stands instead of."""
        name = self._canonical(key)
        return key in self.leaves and name in {*self.handled, *self.neutral} - {*self.replaced}

    def _replace(self, option: str, value: str) -> None:
        """A file of the command line, instead of all that the config says about where to find it."""
        name, *_ = gone = keys.replaced_by(option, self.trainer.data)
        for each in gone:
            if each in self.old:
                rows = ", ".join(_SOME_ROWS.findall(str(self.old[each][1])))
                some = f"; of its rows only some were taken ({rows}): FILE must hold these" if rows else ""
                self.drop(each, f"{option} replaces it{some}")
                self.replaced[each] = self.old.pop(each)[1]
        self.leaves[option] = value
        self.old[name] = (option, value)

    def one_file(self, name: str) -> None:
        """Of a list of files with questions, the only one; several are refused."""
        key, value = self.old.get(name, ("", None))
        option = {"train_file": "--train", "validation_file": "--val", "test_file": ""}.get(name)
        if option is None or not isinstance(value, list) or not value:
            return
        if len(value) > 1:
            instead = f"join them in one file, and give {option} FILE" if option else "join them in one file"
            also = ", or the first of them, and then the others in data.mix of recipe.yaml"
            self.refuse(name, f"several files of questions: {instead}{also if name == 'train_file' else ''}")
        self.old[name] = (key, value[0])

    def take_defaults(self) -> None:
        """What the trainer takes where a key is absent becomes a setting like any other. A null is what the trainer
        makes of it: absent, a value of its own, or nothing that a run was ever made with."""
        for name, value in self.trainer.defaults(self).items():
            if name in self.old and (self.old[name][1] is not None or name in self.trainer.own_nulls):
                continue
            if name in self.old and name in self.trainer.no_nulls:
                why = f"in {self.trainer.name} null is not its default: leave it out for that ({show(value)})"
                self.refuse(name, f"{why}, or give the value that the old run had")
            self.drop(name, "null: the default")
            key = f"{ABSENT}{name}"
            self.leaves[key] = value
            self.old[name] = (key, value)

    def is_set(self, field: str) -> bool:
        kind, *path = field.split(".")
        here: Any = self.new[kind].values
        for step in path:
            if not isinstance(here, dict) or step not in here:
                return False
            here = here[step]
        return True

    def done(self, name: str) -> None:
        """Nothing is left to be made of it."""
        self.old.pop(name, None)

    def given(self, name: str) -> bool:
        """Whether the config itself has a value for it."""
        return name in self.old and self.old[name][1] is not None and not self.old[name][0].startswith(ABSENT)

    def _apart(self, key: str, value: Any, of_part: sections.Part) -> None:
        """What stands in a section about another model, or about a part of this one."""
        if of_part.off or value in (None, "", [], {}):
            return self._drop_key(key, "empty" if not of_part.off else "its section is turned off")
        self.refuse_key(key, of_part.why)

    def _unknown(self, key: str, value: Any) -> None:
        """It may change the prompt, the data or the loss: only who knows the old program can let it go."""
        if value is None and ":" in key:
            comment = "JSON has no comments, and " if "//" in key else ""
            return self.refuse_key(key, f"it is one text and no key with a value: {comment}{COLON}")
        if value in (None, "", [], {}):
            return self._drop_key(key, "not known, and empty")
        if key == "defaults" and isinstance(value, list):
            return self.refuse_key(
                key, "files that Hydra reads too: convert the run's .hydra/config.yaml, which has all"
            )
        if (inside := self._inside_of_neutral(key)) is not None:
            parent, effect = inside
            if sections.is_off(parent, self.leaves):
                return self._drop_key(key, "its section is turned off")
            said = effect.format(key=parent) if ": " in effect else f"{effect}, and no recipe says that"
            return self.refuse_key(key, f"{said}; --drop {parent} leaves it out")
        near = difflib.get_close_matches(key.split(".")[-1], keys.KNOWN, n=1, cutoff=0.75)
        nearest = f" (nearest: {near[0]})" if near else ""
        self.refuse_key(key, f"not known{nearest}, and it may change the model; --drop {key} leaves it out")

    def _inside_of_neutral(self, key: str) -> tuple[str, str] | None:
        """The section that a key stands in, where it is one that only passes when it is empty, and what it does."""
        steps = key.split(".")
        for parent in (".".join(steps[:end]) for end in range(len(steps) - 1, 0, -1)):
            name = self._canonical(parent)
            if name in self.neutral:
                return parent, self.neutral[name][1]
        return None

    def is_null(self, name: str) -> bool:
        """Whether the config has it, and has nothing there."""
        return name in self.old and self.old[name][1] is None

    def get(self, name: str, kind: type) -> Any:
        """The old value as this type where it can be read so; None where it is absent or null. A boolean is one: any
        text would pass for true, and is refused."""
        value = keys.cast(self.old[name][1], kind) if name in self.old else None
        if kind is not bool or value is None or isinstance(value, bool):
            return value
        if value in keys.AS_TRUE.get(name, ()):
            return True
        if self.old[name][0] not in self.refused_keys:
            self.refuse(name, "must be true or false")
        return None

    def text(self, name: str) -> str:
        return "" if self.get(name, str) is None else str(self.get(name, str))

    def put(self, field: str, value: Any, names: Sequence[str], why: str = "") -> None:
        """Set a new field from the old settings of these names."""
        given = [self.old[name][0] for name in names if name in self.old]
        path = self._set(field, value)
        named = "" if given[0] == ".".join(path) else f": {given[0]}"  # what is wrong with it names the new field
        self.new[field.split(".")[0]].places[path] = self._place(given[0]) + named
        for key in (key for key in given if key not in self.refused_keys):
            said = f"{self.trainer.name}'s default" if key.startswith(ABSENT) else ""
            self.notes.append(Note(key, field, self.leaves[key], "; ".join(filter(None, (said, why))), value))

    def also(self, field: str, value: Any) -> None:
        """Set a further new field, of which the note about another one tells."""
        self._set(field, value)

    def default(self, field: str, value: Any, name: str, why: str = "the Trainer's default") -> None:
        """Set a new field that the old config left to its program's default."""
        self.drop(name, "null: the default")
        self._set(field, value)
        self.notes.append(Note(f"{ABSENT}{name}", field, None, why, value))

    def drop(self, name: str, why: str) -> None:
        """Let an old setting go, if it was given."""
        if name in self.old:
            self._drop_key(self.old[name][0], why)

    def refuse(self, name: str, why: str) -> None:
        self.refuse_key(self.old[name][0], why)

    def was_refused(self, name: str) -> bool:
        """Whether it was given, and refused already."""
        return any(self._canonical(key) == name for key in self.refused_keys)

    def explain(self, key: str, why: str) -> None:
        """Say more of a key that was dropped."""
        dropped = [each for each in self.notes if each.key == key and each.went_to is None and key not in self.let_go]
        for note in dropped:
            self.notes[self.notes.index(note)] = Note(key, None, note.value, why)

    def _drop_key(self, key: str, why: str) -> None:
        if key.startswith(ABSENT) or key in self.refused_keys:
            return
        self.notes.append(Note(key, None, self.leaves[key], why))

    def refuse_key(self, key: str, why: str) -> None:
        self.notes = [note for note in self.notes if note.key != key]
        if key not in self.refused_keys and not key.startswith(ABSENT):
            self.refused_keys.append(key)
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


def not_found(path: Path) -> str:
    """Said of a file that is not there; empty where it is."""
    try:
        there = path.exists()
    except OSError:  # a name that no file can have
        there = False
    return "" if there else f"not found at {path}"


def _within(key: str, asked: str) -> bool:
    return key == asked or key.startswith(f"{asked}.")
