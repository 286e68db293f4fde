"""Variables of a shell script: what is known of their values, and what the branches of a condition leave of that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

from sameday.spec.errors import BadInput

LONGEST = 2**20
"""Characters of one value."""
WORDS = 2**16
"""Of one array."""
MOST = 2**22
"""Characters of all values that are made while a script is read."""
_CHOICES, _LONG = 6, 4
OF_THE_RUN = (
    *("resume_from_checkpoint", "overwrite_output_dir", "output_dir", "logging_dir", "run_name", "report_to"),
    *("logging_steps", "save_steps", "save_total_limit", "disable_tqdm"),
)
"""Flags that the model does not depend on."""


@dataclass(frozen=True)
class Unknown:
    """A part of a text that is known only when the script runs. `shown` is how the script writes it."""

    shown: str
    why: str
    optional: bool = False
    """Nothing, unless somebody gives it from outside: `"$@"`, or a variable whose default is empty."""
    choices: tuple[tuple[str, int], ...] = ()
    """The values, and their lines, of which a condition takes one."""


Text = tuple[str | Unknown, ...]


@dataclass(frozen=True)
class Value:
    """The texts of an array, or the one of a plain variable."""

    texts: tuple[Text, ...]
    array: bool = False
    line: int = field(default=0, compare=False)
    optional: tuple[Unknown, ...] = ()
    """What may be given from outside, and is nothing else; of an array."""


def shown(text: Text) -> str:
    return "".join(each if isinstance(each, str) else each.shown for each in text)


def known(text: Text) -> str:
    """Its characters, without what is not known."""
    return "".join(each for each in text if isinstance(each, str))


def length(text: Text) -> int:
    return 1 + sum(len(each) if isinstance(each, str) else len(each.shown) for each in text)


class Variables:
    """Layers: each branch of a condition writes into one of its own."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.layers: list[dict[str, Value | None]] = [{}]
        self.made = 0
        self.left_out: dict[tuple[str, str], int] = {}
        """Flags that a condition adds to a variable, and the model does not depend on: with their lines."""

    def get(self, name: str) -> Value | None:
        return next((layer[name] for layer in reversed(self.layers) if name in layer), None)

    def is_set_here(self, name: str) -> bool:
        """Whether this script says anything about it, such as `unset`."""
        return any(name in layer for layer in self.layers)

    def names(self) -> set[str]:
        """Of all that the script has set so far."""
        return {name for layer in self.layers for name in layer}

    def set(self, name: str, value: Value | None) -> None:
        self.layers[-1][name] = value

    def unknown(self, name: str, why: str, line: int) -> None:
        self.set(name, Value(((Unknown(f"${name}", why),),), line=line))

    def count(self, texts: Sequence[Text], line: int) -> None:
        """A few lines such as A=$A$A could make more than memory holds."""
        if len(texts) > WORDS:
            raise BadInput(f"{self.source}:{line}: makes more than {WORDS:,} words of one")
        size = sum(map(length, texts))
        self.made += size
        if size > LONGEST + 2:
            raise BadInput(f"{self.source}:{line}: makes a value of more than {LONGEST:,} characters")
        if self.made > MOST:
            raise BadInput(f"{self.source}:{line}: the values made up to here have more than {MOST:,} characters")

    @contextmanager
    def layer(self) -> Iterator[dict[str, Value | None]]:
        """What is set inside is set there alone, until it is joined."""
        self.layers.append({})
        try:
            yield self.layers[-1]
        finally:
            self.layers.pop()

    def join(self, branches: Sequence[dict[str, Value | None]]) -> None:
        """One of the branches is what runs."""
        for name in {name: None for branch in branches for name in branch}:
            values = [branch[name] if name in branch else self.get(name) for branch in branches]
            first = values[0]
            if all(each == first for each in values):
                self.set(name, first)
            elif (without := self.without_additions(name, values)) is not None:
                self.set(name, without)
            else:
                self.set(name, _one_of(name, values))

    def without_additions(self, name: str, values: Sequence[Value | None]) -> Value | None:
        """The value with the fewest flags of the run itself, where the values differ in nothing else."""
        there = [value for value in values if value is not None]
        apart = [_of_the_run(value) for value in there]
        if len(there) < len(values) or any(rest != apart[0][0] for rest, _ in apart):
            return None
        fewest = min(range(len(there)), key=lambda each: len(apart[each][1]))
        kept = apart[fewest][1]
        for value, (_, additions) in zip(there, apart, strict=True):
            more = additions[len(kept) :] if additions[: len(kept)] == kept else additions
            if more:
                self.left_out[name, " ".join(map(shown, more))] = value.line
        return there[fewest]


def _one_of(name: str, values: Sequence[Value | None]) -> Value:
    """Of long values that begin alike, as arrays of flags do, what differs is said."""
    words = [None if value is None else _words(value) for value in values]
    there = [each for each in words if each is not None]
    alike = sum(1 for _ in takewhile(lambda each: len({*each}) == 1, zip(*there, strict=False)))
    choices: dict[str, int] = {}
    for value, said in zip(values, words, strict=True):
        if value is None or said is None:
            choices.setdefault("not set", 0)
            continue
        only = value.texts[0][0] if len(value.texts) == 1 and len(value.texts[0]) == 1 else None
        if isinstance(only, Unknown) and only.choices:
            choices |= {text: line for text, line in only.choices if text not in choices}
        else:
            cut = alike if alike > _LONG else 0
            text = " ".join(["..."] * bool(cut) + said[cut:])
            choices.setdefault((text if len(text) <= 60 else f"{text[:57]}...") or "empty", value.line)
    kept = tuple(choices.items())[:_CHOICES]
    said_all = " or ".join(text + f" (line {line})" * (line > 0) for text, line in kept)
    why = f"{name} is {said_all}, as a condition of the script decides: leave one"
    return Value(((Unknown(f"${name}", why, choices=kept),),), line=max(line for _, line in kept))


def _of_the_run(value: Value) -> tuple[list[Text], list[Text]]:
    """Its words without the flags of the run itself, and these with their values."""
    rest: list[Text] = []
    additions: list[Text] = []
    flag = False
    for word in value.texts if value.array else [each for text in value.texts for each in divided(text)]:
        name, equals, _ = shown(word).removeprefix("--").partition("=")
        if shown(word).startswith("--"):
            flag = name.replace("-", "_") in OF_THE_RUN
            (additions if flag else rest).append(word)
            flag = flag and not equals
        else:
            (additions if flag else rest).append(word)
            flag = False  # such a flag has one value
    return rest, additions


def divided(text: Text) -> list[Text]:
    """At its blanks."""
    made: list[list[str | Unknown]] = [[]]
    for piece in text:
        if isinstance(piece, Unknown):
            made[-1].append(piece)
            continue
        for number, each in enumerate(re.split(r"\s+", piece)):
            if number:
                made.append([])
            made[-1] += [each] if each else []
    return [tuple(each) for each in made if each]


def _words(value: Value) -> list[str]:
    return " ".join(map(shown, value.texts)).split()
