"""What was measured for a plan of a suite: a few steps, and a little of all that is besides steps. Kept in OUT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sameday.spec.writing import write_text
from sameday.suite.state import SuiteFolder
from sameday.suite.times.pace import Pace, pace_of
from sameday.suite.times.work import Training, plan_cost

MEASURED = "measured.json"


@dataclass(frozen=True)
class Measured:
    """Seconds of steps in order, the first ones included, none where an evaluation alone was timed; until a model was
    there; for a sample's scores, for its answer, and to save once; what a process took besides for the first last step
    of an epoch, the first scores and answers; from its last word until it was gone. All of them where compiled graphs
    were on disk already; `compiling` is what it took more the first time. `flop` is what a step needs at least, the
    rates are the fastest of the device, of which there was so much `memory` where it `stands_for` another GPU.
    `answered` is what evaluation its scores and answers are of, as `Work.answered` has it. None: not measured."""

    cost: str
    plan: str
    machine: str
    steps: list[float]
    start: float
    score_each: float | None = None
    answer_each: float | None = None
    save: float | None = None
    last_step: float = 0.0
    first_scores: float = 0.0
    first_answers: float = 0.0
    end: float = 0.0
    compiling: float = 0.0
    flop: float | None = None
    flop_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    memory: int | None = None
    stands_for: str | None = None
    answered: str | None = None
    files: str = ""
    """Data and model as they were, by `files_of`."""
    stalls: list[str] = field(default_factory=list)
    """Of the steps those that took far longer than others, in words."""

    @property
    def stood_for(self) -> tuple[Any, ...] | None:
        """Memory and name of the GPU that was meant, if another."""
        return None if self.memory is None else (self.memory, self.stands_for)

    def fits(self, training: Training) -> bool:
        same = self.cost == training.cost and training.ranks == 1 and self.plan == planned(training)
        return same and self.files == training.files

    def evaluation(self, samples: int) -> float:
        each = (self.score_each or 0.0) + (self.answer_each or 0.0)
        return self.first_scores + self.first_answers + samples * each

    def pace(self, sizes: Mapping[str, int], word: str) -> Pace | None:
        pace = pace_of(self.steps)
        if pace is None:
            return None
        validate = None if self.score_each is None else self.score_each * sizes.get("val", 0)
        return replace(
            pace,
            warm=pace.warm + self.last_step + (self.first_scores if validate else 0.0),
            start=self.start,
            validate=validate,
            save=self.save,
            finish=None if self.save is None else self.save + self.end,
            where=f"{word} {self.machine}",
        )

    def after(self, cold: Measured) -> Measured:
        """This one was measured when the graphs were there that `cold` had to compile."""
        more = cold.at_first - self.at_first
        return replace(self, compiling=max(0.0, more))

    @property
    def floor(self) -> float | None:
        """Seconds that a step needs at least on this device; None where that was not measured."""
        return None if self.flop is None or not self.flop_per_second else self.flop / self.flop_per_second

    @property
    def at_first(self) -> float:
        """What a process takes once, for its first steps, scores and answers."""
        pace = pace_of(self.steps)
        return (0.0 if pace is None else pace.warm) + self.last_step + self.first_scores + self.first_answers


def planned(training: Training) -> str:
    """Of an automatic plan what was fixed of it: the rest is chosen alike by whoever runs it here."""
    if training.evaluated:
        return f"evaluation {training.evaluated}"
    return ("automatic " if training.automatic else "") + plan_cost(training.plan)


def read_measured(folder: SuiteFolder) -> list[Measured]:
    """In the order in which they were made; what cannot be read is not there."""
    try:
        kept = list(json.loads((folder.path / MEASURED).read_text(encoding="utf-8"))["measured"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [one for one in map(_read, kept) if one is not None]


def _read(kept: Any) -> Measured | None:
    """Of a file that anyone may have written. Earlier versions did not say which GPU it was that one stood for."""
    try:
        one = TypeAdapter(Measured).validate_json(json.dumps(kept), strict=True)
    except ValidationError:
        return None
    return one if (one.memory is None) == (one.stands_for is None) else None


def keep_measured(folder: SuiteFolder, one: Measured) -> None:
    """One of the same steps is replaced."""
    key = attrgetter("cost", "plan", "stood_for")
    others = [each for each in read_measured(folder) if key(each) != key(one)]
    values = {"measured": [asdict(each) for each in (*others, one)]}
    write_text(folder.path / MEASURED, json.dumps(values, indent=1) + "\n")
