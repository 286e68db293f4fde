"""Stage and type of a question by a table or by rules, where its line does not have them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sameday.data.problems import Problem, in_lines, report
from sameday.data.questions.lines import read_lines
from sameday.data.questions.read import Raw, kind
from sameday.data.questions.tables import separator
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_path
from sameday.spec.questions import Categories, Rule, stage_number
from sameday.spec.time_limit import TookTooLong, time_limit
from sameday.spec.words import in_one_line

COLUMNS = ("question", "stage", "type")
PATIENCE = 5.0
"""Seconds of computing for the rules in one question, which take microseconds."""


class Category(NamedTuple):
    stage: int | None
    type: str | None


@dataclass(frozen=True)
class Categorizer:
    """`table` has questions as `known_as` writes them."""

    categories: Categories
    table: Mapping[str, Category] = field(default_factory=dict)

    @classmethod
    def load(cls, categories: Categories, home: Path) -> Categorizer:
        table = {} if categories.table is None else read_table(resolve_path(home, categories.table))
        return cls(categories, table)

    def sort(self, raw: Raw) -> tuple[Raw, list[str]]:
        """The question with its stage and type, the line's own first; and a sentence for each that is unsure."""
        given = self._given(raw.question)
        unsure = []
        for name in self._gives:
            said = list(dict.fromkeys(value for each in given if (value := getattr(each, name)) is not None))
            if getattr(raw, name) is not None:
                continue
            if not said:
                unsure.append(f"nothing says the {name} of {raw.question!r}")
            elif len(said) > 1 and self.categories.strict:
                unsure.append(f"rules disagree on the {name} of {raw.question!r}: {' or '.join(map(str, said))}")
            else:
                raw = replace(raw, **{name: said[0]})
        return raw, unsure

    def _given(self, question: str) -> list[Category]:
        known = self.table.get(known_as(question))
        if known is not None:
            return [known]
        return [Category(rule.stage, rule.type) for rule in _found(self.categories.rules, question)]

    @property
    def _gives(self) -> list[str]:
        """What somebody says something about: a table without types leaves types as they are."""
        everything = [*self.table.values(), *self.categories.rules]
        return [name for name in ("stage", "type") if any(getattr(each, name) is not None for each in everything)]


def _found(rules: Sequence[Rule], question: str) -> list[Rule]:
    found, done = list[Rule](), 0
    try:
        with time_limit(PATIENCE):  # around all rules: a timer for each would cost more than its search
            for rule in rules:
                if re.search(rule.match, question):
                    found.append(rule)
                done += 1
    except TookTooLong:
        raise BadInput(
            f"recipe.categories.rules.{done}.match: {rules[done].match!r} was not done with the question "
            f"{in_one_line(question)!r} after {PATIENCE:g} seconds: a repeat inside a repeat, such as (a+)+, tries "
            "every way to cut a text into pieces; write it with one repeat, such as a+"
        ) from None
    return found


def known_as(question: str) -> str:
    return " ".join(question.split()).casefold()


def read_table(path: Path) -> dict[str, Category]:
    """BadInput with all that is wrong in it."""
    table: dict[str, Category] = {}
    problems: list[Problem] = []
    for place, row in _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path):
        where = f"{path.name}:{place}"
        if isinstance(row, str):
            problems.append(Problem(where, row))
            continue
        try:
            question, category = _category(row)
        except ValueError as error:
            problems.append(Problem(where, str(error)))
            continue
        if table.setdefault(question, category) != category:
            problems.append(Problem(where, f"the question {row['question']!r} stands in the table twice, otherwise"))
    if problems:
        raise BadInput(f"recipe.categories.table: {report(problems, in_lines(problems), path)}")
    if not table:
        raise BadInput(f"recipe.categories.table: {path} is empty: it holds no question")
    return table


def _category(row: Mapping[str, Any]) -> tuple[str, Category]:
    question, stage, kind_of = row.get("question"), stage_number(row.get("stage")), row.get("type")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("has no question")
    stage = None if stage == "" else stage
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int)):
        raise ValueError(f'stage is {stage!r}, must be a whole number (2, "2" or "stage 2")')
    if kind_of is not None and not isinstance(kind_of, str):
        raise ValueError(f"type is {kind(kind_of)}, must be a text")
    if stage is None and not kind_of:
        raise ValueError("has neither a stage nor a type")
    return known_as(question), Category(stage, kind_of.strip() if kind_of else None)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    for line in read_lines(path):
        try:
            value = line.parse()
        except ValueError as error:
            yield line.place, str(error)
            continue
        yield line.place, value if isinstance(value, dict) else f"not an object but {kind(value)}"


def _csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=separator(path, file))
            names = [name.strip().lower() for name in rows.fieldnames or []]
            if "question" not in names or not {"stage", "type"} & set(names):
                raise BadInput(
                    f"recipe.categories.table: {path}:1: the columns are {', '.join(names) or 'none'}; must be "
                    f"{', '.join(COLUMNS)}"
                )
            rows.fieldnames = names
            for row in rows:
                yield str(rows.line_num), {name: row.get(name) for name in COLUMNS}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInput(f"recipe.categories.table: {path} cannot be read: {reason}") from None
