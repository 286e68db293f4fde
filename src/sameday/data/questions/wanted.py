"""The questions of a file as a recipe asks for them: which lines, their stages and types, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sameday.data.problems import Problem
from sameday.data.questions.categories import Categorizer
from sameday.data.questions.lines import Line, read_lines
from sameday.data.questions.read import Raw, fields_of, parse_line
from sameday.data.questions.tables import Say
from sameday.data.questions.where import Tally, holds
from sameday.spec.dataset import QuestionSet
from sameday.spec.questions import Prompt
from sameday.spec.vlm import VlmRecipe


@dataclass(frozen=True)
class Wanted:
    """What a recipe says about questions; nothing: all lines as they are."""

    where: dict[str, tuple[str, ...]] = field(default_factory=dict)
    categorizer: Categorizer | None = None
    prompt: Prompt | None = None
    skip: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Lines that are passed over for one of these values."""
    fields: dict[str, str] = field(default_factory=dict)
    """What the file calls our keys."""
    place: str = "recipe.data"
    """Where in the recipe the set stands."""
    own: frozenset[str] = frozenset()
    """Conditions that are this set's alone, by their fields."""

    @classmethod
    def by(cls, recipe: VlmRecipe, home: Path, part: QuestionSet | None = None) -> Wanted:
        """Of one of the sets of a recipe, by itself its first; paths start at `home`."""
        categorizer = None if recipe.categories is None else Categorizer.load(recipe.categories, home)
        part = part or recipe.data
        number = next((number for number, each in enumerate(recipe.data.mix) if each is part), None)
        place = "recipe.data" if number is None else f"recipe.data.mix[{number}]"
        own = frozenset(part.where.keys() - recipe.data.where.keys())
        return cls(recipe.data.where_of(part), categorizer, recipe.prompt, part.skip, part.fields, place, own)


@dataclass(frozen=True)
class Question:
    """A line that is asked for: its JSON, and the question, or what is wrong with it."""

    line: Line
    value: Any
    raw: Raw | None
    wrong: str = ""


@dataclass
class Reader:
    """Goes through a file once, and then knows what it passed over."""

    path: Path
    label: str
    wanted: Wanted
    limit: int | None = None
    images: Path | None = None
    """Folder for images that the file itself holds."""
    say: Say = lambda _: None
    tally: Tally = field(init=False)
    unsure: list[Problem] = field(default_factory=list)

    def __iter__(self) -> Iterator[Question]:
        where, skip = self.wanted.where, self.wanted.skip
        self.tally, self.unsure = Tally(where, skip, self.limit, self.wanted.place, self.wanted.own), []
        # The limit counts what is asked for; which values occur only the whole file tells.
        for line in read_lines(self.path, None if where or skip else self.limit, self.images, self.say):
            question = self._read(line)
            if self._is_wanted(question) and (self.limit is None or self.tally.taken <= self.limit):
                yield question

    def _read(self, line: Line) -> Question:
        value: Any = None
        try:
            value = self._in_our_words(line.parse())
            raw = parse_line(value)
        except ValueError as error:
            return Question(line, value, None, str(error))
        if self.wanted.categorizer is not None:
            raw, unsure = self.wanted.categorizer.sort(raw)
            self.unsure += [Problem(f"{self.label}:{line.place}", each) for each in unsure]
        return Question(line, value, raw)

    def _in_our_words(self, value: Any) -> Any:
        if not self.wanted.fields or not isinstance(value, dict):
            return value
        self.tally.columns |= dict.fromkeys(value)
        ours = {name: value[theirs] for name, theirs in self.wanted.fields.items() if theirs in value}
        # A column that stands for one of our keys is not read under its own name too.
        moved = {theirs for name, theirs in self.wanted.fields.items() if theirs != name}
        return {name: each for name, each in value.items() if name not in moved} | ours

    def lacking(self) -> list[str]:
        """A sentence for each column that the recipe names and no line has; known once all lines were read."""
        there = ", ".join(map(str, self.tally.columns)) or "none"
        return [
            f"{self.wanted.place}.fields.{name} is {theirs!r}, which no line of {self.label} has; there are {there}"
            for name, theirs in self.wanted.fields.items()
            if theirs not in self.tally.columns
        ]

    def _is_wanted(self, question: Question) -> bool:
        facts = fields_of(question.value, question.raw)
        if any(holds({name: values}, facts) for name, values in self.wanted.skip.items()):
            self.tally.skipped += 1
            return self.tally.add(facts, False)
        # What is wrong is said, unless the line is surely none that is asked for.
        return self.tally.add(facts, holds(self.wanted.where, facts, unknown=question.raw is None))
