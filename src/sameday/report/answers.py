"""Answers that were generated with a run's weights: the folders `answers/WEIGHTS-SPLIT`, their metrics and, where two
are compared, their predictions. What a stranger's file may hold instead is told with its place."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from sameday.evaluate.prediction import Prediction
from sameday.report.beside import Lenient, Number, Whole, read_beside
from sameday.spec.errors import BadInput
from sameday.spec.reading import ANSWERS, read_file

FOLDER, PREDICTIONS, METRICS = "answers", "predictions.jsonl", "metrics.json"
MOST_WORK = 2 * 10**9
"""Characters of answers times characters of predictions, summed: comparing texts takes about as long as this says."""
SPLIT = re.compile(r"(?:^|-)(train|val|test)(?:-cascade)?$")


class Measured(Lenient):
    value: Number
    low: Number | None = None
    high: Number | None = None
    questions: Whole


class Group(Lenient):
    questions: Whole
    images: Whole
    metrics: dict[str, Measured]


class Confusion(Lenient):
    answers: list[str] = Field(default_factory=list)
    counts: list[list[Whole]] = Field(default_factory=list)
    other: list[Whole] = Field(default_factory=list)
    rest: Whole = 0

    @model_validator(mode="after")
    def _is_square(self) -> Confusion:
        sizes = {len(self.counts), len(self.other), *map(len, self.counts)}
        if sizes != {len(self.answers)}:
            raise ValueError("must have a row, a column and an `other` for each answer")
        return self


class Metrics(Group):
    """What `sameday eval` wrote about a set of answers."""

    groups: dict[str, dict[str, Group]] = Field(default_factory=dict)
    confusion: Confusion | None = None
    notes: list[str] = Field(default_factory=list)
    without_earlier_answers: Whole = 0
    """Questions of a later stage that had no predictions of an earlier one to go on, where these belong to prompts."""


@dataclass(frozen=True)
class Answers:
    name: str
    path: Path
    metrics: Metrics | None
    """None until all questions are answered."""

    @property
    def split(self) -> str:
        """The same whether earlier answers stood in the prompts or not: it has the same questions."""
        found = SPLIT.search(self.name)
        return found[1] if found else self.name


def answer_files(run: Path) -> Iterator[Path]:
    """There or not."""
    for folder in sorted((run / FOLDER).glob("*/")):
        yield folder / PREDICTIONS
        yield folder / METRICS


def read_answers(run: Path) -> list[Answers]:
    """Those of the base model first: others are compared with it."""
    folders = {file.parent for file in answer_files(run) if file.is_file()}
    named = sorted(folders, key=lambda folder: (not folder.name.startswith("base-"), folder.name))
    return [Answers(folder.name, folder, _metrics(folder / METRICS)) for folder in named]


def _metrics(path: Path) -> Metrics | None:
    return read_beside(path, Metrics) if path.is_file() else None


def read_predictions(path: Path) -> list[Prediction]:
    """A last line that a kill cut off is passed over. BadInput with the place of any other that is no prediction."""
    try:
        *lines, torn = read_file(path, ANSWERS).split(b"\n")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    predictions = [_prediction(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if torn.strip():
        with contextlib.suppress(BadInput):
            predictions.append(_prediction(torn, ""))  # whole, and only its line break is missing
    work = sum(len(each.answer) * len(each.prediction) for each in predictions)
    if work > MOST_WORK:
        raise BadInput(f"{path}: its answers are too long to be compared in a report")
    return predictions


KINDS = {"int": (int, "a whole number"), "str": (str, "text")}


def _prediction(line: bytes, where: str) -> Prediction:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise BadInput(f"{where}: is not a JSON object: {line[:60].decode(errors='replace')}")
    values = {field.name: _checked(record, field.name, str(field.type), where) for field in fields(Prediction)}
    return Prediction(**values)


def _checked(record: dict[str, Any], name: str, kind: str, where: str) -> Any:
    value = record.get(name)
    if value is None and kind.endswith("| None"):
        return None
    wanted, said = KINDS[kind.partition(" ")[0]]
    good = isinstance(value, wanted) and not isinstance(value, bool)
    if not good or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        shown = repr(value)
        raise BadInput(f"{where}: {name} is {shown[:60]}; must be {said}")
    return value
