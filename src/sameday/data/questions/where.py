"""Which lines of a file a recipe asks for, by the values of their fields; and which values there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from sameday.spec.questions import compared, where_words
from sameday.spec.words import in_one_line

LISTED = 12
"""Values of a field that are listed."""


def texts_of(name: str, value: Any) -> set[str]:
    """The value of a field as conditions compare it; of a list each item. Empty where there is none."""
    values = value if isinstance(value, list) else [value]
    return {text for each in values if (text := compared(name, each)) is not None}


def holds(where: Mapping[str, tuple[str, ...]], facts: Mapping[str, Any], unknown: bool = False) -> bool:
    """Whether all conditions hold. `unknown` is what is taken of a field that the line does not have."""
    for name, wanted in where.items():
        texts = texts_of(name, facts.get(name))
        if not (texts & set(wanted) if texts else unknown):
            return False
    return True


@dataclass
class Tally:
    """Counts the lines of a file, those that are asked for, and what else there is."""

    where: Mapping[str, tuple[str, ...]]
    skip: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limit: int | None = None
    """How many of those that are asked for are taken, the first of them."""
    place: str = "recipe.data"
    """Where in the recipe the set stands."""
    own: Set[str] = frozenset()
    """Conditions that are this set's alone, by their fields."""
    lines: int = 0
    taken: int = 0
    skipped: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    """As the file calls them."""
    fields: dict[str, None] = field(default_factory=dict)
    values: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, facts: Mapping[str, Any], taken: bool) -> bool:
        self.lines, self.taken = self.lines + 1, self.taken + taken
        self.fields |= dict.fromkeys(facts)
        for name in self.where:
            self.values.setdefault(name, Counter()).update(texts_of(name, facts.get(name)))
        return taken

    def told(self) -> str:
        first = f"; the first {self.limit:,} are taken" if self.limit is not None and self.taken > self.limit else ""
        return f"{self.taken:,} of {self.lines - self.skipped:,} questions: {where_words(dict(self.where))}{first}"

    def passed_over(self) -> str:
        which = " or ".join(f"{name} is {' or '.join(values)}" for name, values in self.skip.items())
        return f"{self.skipped:,} of {self.lines:,} lines are skipped: {which}"

    def missing(self, label: str) -> list[str]:
        """A sentence for each field that no line has, and for each value that occurs in none."""
        sentences = []
        for name, wanted in self.where.items():
            there = self.values.get(name, Counter())
            place = f"{self.place if name in self.own else 'recipe.data'}.where.{name}"
            absent = [value for value in wanted if value not in there]
            if not there:
                sentences.append(self._no_such_field(place, name, label))
            elif absent:
                sentences.append(
                    f"{place} is {' or '.join(absent)}, which no line of {label} has; {name} is {_listed(there)} there"
                )
        return sentences

    def unknown_skips(self, label: str) -> list[str]:
        """A sentence for each field to skip by that no line has."""
        unknown = [name for name in self.skip if self.fields and name not in self.fields]
        return [self._no_such_field(f"{self.place}.skip.{name}", name, label) for name in unknown]

    def _no_such_field(self, place: str, name: str, label: str) -> str:
        known = ", ".join(sorted(each for each in self.fields if each != name)) or "none"
        return f"{place}: no line of {label} has this field; there are {known}"

    @property
    def knows_fields(self) -> bool:
        """Whether each field that is asked for stands in some line."""
        return all(self.values.get(name) for name in self.where)


def _listed(there: Counter[str]) -> str:
    shown = [f"{in_one_line(value)} ({count:,})" for value, count in there.most_common(LISTED)]
    more = f" and {len(there) - LISTED:,} other values" if len(there) > LISTED else ""
    return ", ".join(sorted(shown) if not more else shown) + more
