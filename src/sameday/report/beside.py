"""The files that other commands leave beside a run: a profile, a tuning, a verdict. What makes a file one of them must
be there; what a report can do without is optional, so that a file of an older or newer version still gives a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sameday.record.judged import judged_plan
from sameday.record.metrics import MOST
from sameday.spec.errors import BadInput
from sameday.spec.reading import JSON, read_file
from sameday.spec.removed import without_removed

Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Amount = Annotated[float, Field(ge=0, le=MOST)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]


OLD_PHASES = "parts"
"""What earlier releases called the phases of a step."""


class Lenient(BaseModel):
    """Unknown keys are left alone. Numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


PlanFields = Annotated[dict[str, Any], AfterValidator(without_removed)]
"""A plan that was recorded, perhaps by an earlier release."""


class Spread(Lenient):
    median: Amount
    mean: Amount | None = None
    least: Amount | None = None
    most: Amount | None = None


class Alone(Lenient):
    """The floor if every sample were computed by itself."""

    seconds: Amount | None = None


class Floor(Lenient):
    """The least time that a step can take on this machine, and what sets it."""

    seconds: Amount
    bound: str = ""
    share: Amount | None = None
    resources: dict[str, Amount | None] = Field(default_factory=dict)
    one_at_a_time: Alone | None = None


class Advice(Lenient):
    remedy: str
    at_most: Amount | None = None
    bound: str = ""
    why: str = ""


class Profile(Lenient):
    phases: dict[str, Number | None] = Field(validation_alias=AliasChoices("phases", OLD_PHASES))
    seconds: Spread
    machine: dict[str, Any] = Field(default_factory=dict)
    fingerprint: str | None = None
    plan: PlanFields = Field(default_factory=dict)
    steps: Whole | None = None
    workers: dict[str, Number | None] = Field(default_factory=dict)
    busy: Amount | None = None
    memory_gib: Amount | None = None
    floor: Floor | None = None
    bound_by: str | None = None
    advice: list[Advice] = Field(default_factory=list)


class Timed(Lenient):
    seconds: Spread | None = None
    memory_gib: Amount | None = None
    finish_hours: tuple[Amount, Amount] | None = None
    failed: str | None = None


class Best(Timed):
    plan: PlanFields = Field(default_factory=dict)
    verdict: str | None = None


class Ablated(Lenient):
    """One choice, of one field or, as a mapping, of several: alone on the plain plan, added to those before it, left
    out of the best plan."""

    field: str
    value: Any = None
    claim: str = ""
    alone: Timed | None = None
    added: Timed | None = None
    left_out: Timed | None = None


class Tune(Lenient):
    plain: Timed
    best: Best
    fingerprint: str | None = None
    machine: dict[str, Any] | str | None = None
    minutes: Amount | None = None
    """Those that it was given, not those that it took."""
    times: Amount | None = None
    ablation: list[Ablated] = Field(default_factory=list)
    not_tried: list[str] = Field(default_factory=list)


class Compared(Lenient):
    """One kind of value, of two finished runs."""

    name: str
    count: Whole = 0
    beyond: Whole = 0
    limit: Number | None = None
    largest: Number | None = None


class Found(Lenient):
    step: Whole | None = None
    what: str = ""
    name: str = ""
    text: str = ""


class FieldPair(Lenient):
    against: Any = None
    plan: Any = None
    claim: str = ""


class Verdict(Lenient):
    """Of a plan under a recipe, of two finished runs, or, without a verdict, of runs of several recipes."""

    verdict: str | None
    recipe: str | None = None
    plan: str | None = None
    against: str | None = None
    fields: dict[str, FieldPair] = Field(default_factory=dict)
    precision: str = ""
    dropout: str | None = None
    steps: Whole | None = None
    ranks: Whole = 1
    differences: list[Found] | dict[str, list[str]] = Field(default_factory=list)
    largest: dict[str, Number | None] = Field(default_factory=dict)
    whose: dict[str, str] = Field(default_factory=dict)
    bounds: dict[str, Number | None] = Field(default_factory=dict)
    """The limits of those in `largest` that have one of their own; the others' are in `limits`."""
    groups: dict[str, dict[str, Number | None]] = Field(default_factory=dict)
    limits: dict[str, Number | None] = Field(default_factory=dict)
    seconds: Amount | None = None
    runs: list[str] = Field(default_factory=list)
    compared: list[Compared] = Field(default_factory=list)
    gaps: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_of_something(self) -> Verdict:
        if self.recipe is None and not self.runs:
            raise ValueError("it has neither recipe nor runs")
        return self

    @property
    def judged(self) -> dict[str, Any]:
        return judged_plan(self.against or "", {name: pair.plan for name, pair in self.fields.items()})


COMMANDS: dict[str, type[Lenient]] = {"profile": Profile, "tune": Tune, "verify": Verdict}
"""Which command writes what."""

Kind = TypeVar("Kind", bound=Lenient)


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_file(path, JSON))
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is not JSON: {error}") from None


def read_beside(path: Path, kind: type[Kind]) -> Kind:
    """One of these files; BadInput with what it is instead, or with the first thing that is wrong with it."""
    data = read_json(path)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        wrong = _written_by(data) or _first_wrong(error)
        raise BadInput(f"{path}: is no {kind.__name__.lower()} of this program: {wrong}") from None


def _written_by(data: Any) -> str:
    for command, kind in COMMANDS.items():
        try:
            kind.model_validate(data)
        except ValidationError:
            continue
        return f"it is what `sameday {command} --json` writes"
    return ""


def _first_wrong(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"it has no {where}"
    said = first["msg"].removeprefix("Value error, ")
    return f"{where or 'the whole'}: {said}"
