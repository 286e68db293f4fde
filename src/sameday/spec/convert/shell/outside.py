"""Variables that a script may be given from outside, of which the default in the script is taken: which settings depend
on them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sameday.spec.convert.conversion import Note
from sameday.spec.convert.settings import Settings
from sameday.spec.convert.shell.command_line import CommandLine
from sameday.spec.convert.shell.execution import Start
from sameday.spec.convert.shell.expansion import Expansion
from sameday.spec.convert.shell.variables import OF_THE_RUN, shown
from sameday.spec.errors import BadInput

Training = tuple[Start, CommandLine]
_MOST = 32
"""Defaults that are followed: each takes another reading of the script."""


@dataclass(frozen=True)
class Default:
    """`settings` are the keys that depend on it; None where the command itself does, or where that is not known."""

    note: Note
    settings: frozenset[str] | None


def defaults(expansion: Expansion, training: Training, without: Callable[[str], Training]) -> list[Default]:
    """`without` reads the script once more, as if a variable's value were not known."""
    here = _settings(training)
    made = []
    for number, (name, (line, default)) in enumerate(expansion.defaults.items()):
        why = f"line {line} takes {name} from outside of the script; here its default {default} is used"
        changed = None
        if number < _MOST:
            try:
                there = _settings(without(name))
                changed = frozenset(key for key in {*here, *there} if here.get(key) != there.get(key))
            except BadInput:  # no command is left that trains
                pass
        made.append(Default(Note(f"(${name})", None, None, why), changed))
    return made


def reached(made: Collection[Default], work: Settings) -> list[Note]:
    """Notes about those that a setting depends on."""
    return [
        each.note
        for each in made
        if each.settings is None or any(work.is_setting(key) and key not in OF_THE_RUN for key in each.settings)
    ]


def _settings(training: Training) -> dict[str, tuple[str, ...]]:
    start, line = training
    flags = {".".join(flag.key): tuple(map(shown, flag.values)) for flag in line.flags}
    return {**{name: (shown(value),) for name, (value, _) in start.environment.items()}, **flags}
