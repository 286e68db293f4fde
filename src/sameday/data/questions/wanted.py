"""The questions of a file as a recipe asks for them: which lines, their stages and types, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sameday.data.problems import Problem
from sameday.data.questions.categories import Categorizer
from sameday.data.questions.lines import Line, read_lines
from sameday.data.questions.read import Raw, parse_line
from sameday.data.questions.where import Tally, holds
from sameday.spec.questions import Prompt


@dataclass(frozen=True)
class Wanted:
    """What a recipe says about questions; nothing: all lines as they are."""

    where: dict[str, tuple[str, ...]] = field(default_factory=dict)
    categorizer: Categorizer | None = None
    prompt: Prompt | None = None


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
    tally: Tally = field(init=False)
    unsure: list[Problem] = field(default_factory=list)

    def __iter__(self) -> Iterator[Question]:
        where = self.wanted.where
        self.tally, self.unsure = Tally(where), []
        # The limit counts what is asked for; which values occur only the whole file tells.
        for line in read_lines(self.path, None if where else self.limit):
            question = self._read(line)
            if self._is_wanted(question) and (self.limit is None or self.tally.taken <= self.limit):
                yield question

    def _read(self, line: Line) -> Question:
        value: Any = None
        try:
            value = line.parse()
            raw = parse_line(value)
        except ValueError as error:
            return Question(line, value, None, str(error))
        if self.wanted.categorizer is not None:
            raw, unsure = self.wanted.categorizer.sort(raw)
            self.unsure += [Problem(f"{self.label}:{line.place}", each) for each in unsure]
        return Question(line, value, raw)

    def _is_wanted(self, question: Question) -> bool:
        facts = question.value if isinstance(question.value, dict) else {}
        if question.raw is not None:
            read = {"stage": question.raw.stage, "type": question.raw.type}
            facts = {**facts, **{name: value for name, value in read.items() if value is not None}}
        # What is wrong is said, unless the line is surely none that is asked for.
        return self.tally.add(facts, holds(self.wanted.where, facts, unknown=question.raw is None))
