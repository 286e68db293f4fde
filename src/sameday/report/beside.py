"""The files that other commands leave beside a run: a profile, a tuning, a verdict. What a report can do without is
optional, so that a file of an older or newer version still gives a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sameday.spec.errors import BadInput


class Lenient(BaseModel):
    """Unknown keys are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Spread(Lenient):
    median: float
    least: float | None = None
    most: float | None = None


class Alone(Lenient):
    """The floor if every sample were computed by itself."""

    seconds: float | None = None


class Floor(Lenient):
    """The least time that a step can take on this machine, and what sets it."""

    seconds: float
    bound: str = ""
    share: float | None = None
    resources: dict[str, float | None] = Field(default_factory=dict)
    one_at_a_time: Alone | None = None


class Advice(Lenient):
    remedy: str
    at_most: float | None = None
    why: str = ""


class Profile(Lenient):
    machine: dict[str, Any] = Field(default_factory=dict)
    fingerprint: str | None = None
    plan: dict[str, Any] = Field(default_factory=dict)
    steps: int | None = None
    seconds: Spread | None = None
    parts: dict[str, float | None] = Field(default_factory=dict)
    workers: dict[str, float | None] = Field(default_factory=dict)
    busy: float | None = None
    memory_gib: float | None = None
    floor: Floor | None = None
    bound_by: str | None = None
    advice: list[Advice] = Field(default_factory=list)


class Timed(Lenient):
    seconds: Spread | None = None
    memory_gib: float | None = None
    finish_hours: tuple[float, float] | None = None
    failed: str | None = None


class Best(Timed):
    plan: dict[str, Any] = Field(default_factory=dict)
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
    machine: dict[str, Any] | str | None = None
    minutes: float | None = None
    times: float | None = None
    plain: Timed | None = None
    best: Best | None = None
    ablation: list[Ablated] = Field(default_factory=list)
    not_tried: list[str] = Field(default_factory=list)


class Compared(Lenient):
    """One kind of value, of two finished runs."""

    name: str
    count: int = 0
    beyond: int = 0
    limit: float | None = None
    largest: float | None = None


class Found(Lenient):
    step: int | None = None
    what: str = ""
    name: str = ""
    text: str = ""


class FieldPair(Lenient):
    against: Any = None
    plan: Any = None
    claim: str = ""


class Verdict(Lenient):
    """Of a plan under a recipe, of two finished runs, or, without a verdict, of runs of several recipes."""

    verdict: str | None = None
    recipe: str | None = None
    plan: str | None = None
    against: str | None = None
    fields: dict[str, FieldPair] = Field(default_factory=dict)
    precision: str = ""
    dropout: str | None = None
    steps: int | None = None
    ranks: int = 1
    differences: list[Found] | dict[str, list[str]] = Field(default_factory=list)
    largest: dict[str, float | None] = Field(default_factory=dict)
    whose: dict[str, str] = Field(default_factory=dict)
    groups: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    limits: dict[str, float | None] = Field(default_factory=dict)
    seconds: float | None = None
    runs: list[str] = Field(default_factory=list)
    compared: list[Compared] = Field(default_factory=list)
    gaps: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


Kind = TypeVar("Kind", bound=Lenient)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path}: is not JSON: {error}") from None


def read_beside(path: Path, kind: type[Kind]) -> Kind:
    """One of these files; BadInput with the first thing that is wrong with it."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise BadInput(f"{path}: is no {kind.__name__.lower()} of this program: {where}: {first['msg']}") from None
