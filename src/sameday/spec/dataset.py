"""Files of questions: which are trained on and which judge, where their images lie, what they call our keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from sameday.spec.identity import IS_PATH
from sameday.spec.limits import COUNTED, SEEDS, at_most
from sameday.spec.questions import Where
from sameday.spec.recipe import Strict

_HUB = re.compile(r"hf:(?://)?(?:datasets/)?(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w.-]*))?(?:/(.+))?")
HUB_FORM = "hf:OWNER/NAME, with @REVISION, /FILE or both behind it"
KEYS = ("image", "question", "answer", "stage", "type", "instruction")


@dataclass(frozen=True)
class HubName:
    """A set on the Hub, or files of it."""

    repo: str
    revision: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        revision, path = f"@{self.revision}" if self.revision else "", f"/{self.path}" if self.path else ""
        return f"hf:{self.repo}{revision}{path}"

    @property
    def patterns(self) -> list[str]:
        return [self.path] if self.path else []


def hub_name(value: str) -> HubName | None:
    """None for a file here."""
    if not value.startswith("hf:"):
        return None
    parts = _HUB.fullmatch(value)
    if parts is None or ".." in (parts[3] or "").split("/"):
        raise ValueError(f"must be a file, or a set on the Hub as {HUB_FORM}")
    return HubName(parts[1], parts[2], parts[3])


class Split(Strict):
    """Shares of the images of `train` that are held out. Its pixels and the seed alone decide about an image."""

    val: float = Field(0.0, ge=0, lt=1, description="Share of the images whose questions are for validation.")
    test: float = Field(0.0, ge=0, lt=1, description="Share of the images whose questions are for the test.")
    seed: int = Field(0, ge=0, **SEEDS, description="Another one holds out other images.")

    @model_validator(mode="after")
    def _leaves_some(self) -> Split:
        both = self.val + self.test
        if not 0 < both < 1:
            raise ValueError(f"val and test are {both:g} together; must be more than 0 and less than 1")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Those that are held out, by the name of their split."""
        return {name: share for name, share in (("val", self.val), ("test", self.test)) if share}


class QuestionSet(Strict):
    """Question files (JSON lines, a JSON array, CSV or parquet) and where their images lie."""

    train: str = Field(
        description="File of training questions, a pattern such as raw-*.parquet, or a set on the Hub: hf:OWNER/NAME. "
        "Paths are relative to the recipe's folder.",
        json_schema_extra=IS_PATH,
    )
    val: str | None = Field(None, description="File of validation questions.", json_schema_extra=IS_PATH)
    test: str | None = Field(None, description="File of test questions.", json_schema_extra=IS_PATH)
    image_root: str = Field(
        ".", description="Folder that image paths are relative to, and may not leave.", json_schema_extra=IS_PATH
    )
    where: Where = Field(
        default_factory=dict,
        description="Only questions whose line has these values: {stage: 1}, {stage: [1, 2], type: yes/no}.",
    )
    skip: Where = Field(
        default_factory=dict,
        description='Lines that are passed over for one of these values: {answer: [nan, "N/A"]}.',
    )
    fields: dict[str, str] = Field(
        default_factory=dict, description="What the files call these keys: {question: query, stage: complexity}."
    )
    split: Split | None = Field(
        None, description="Where train is all there is: shares of its images that are held out, {val: 0.1, test: 0.1}."
    )
    weight: float = Field(
        1.0,
        gt=0,
        **at_most(1000, "an epoch would see each question more than a thousand times"),
        description="How often an epoch sees each question of train: 2 is twice; 0.5 is half of them, and the next "
        "epoch sees the other half.",
    )

    @field_validator("train", "val", "test")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        hub_name(value or "")
        return value

    @field_validator("fields")
    @classmethod
    def _our_keys(cls, fields: dict[str, str]) -> dict[str, str]:
        if unknown := sorted(fields.keys() - set(KEYS)):
            raise ValueError(
                f"must name keys among {', '.join(KEYS)}, each with a column, and has {', '.join(unknown)}"
            )
        return fields

    @model_validator(mode="after")
    def _held_out_once(self) -> Self:
        for name in () if self.split is None else self.split.shares:
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, and split.{name} holds a share of train out: one of them is "
                    "allowed"
                )
        return self


class Data(QuestionSet):
    """A set of questions, others that are mixed with it, and what holds for all of them."""

    limit: int | None = Field(
        None,
        ge=1,
        **COUNTED,
        description="Use only the first so many questions of each file that where leaves.",
    )
    on_bad: Literal["stop", "skip"] = Field(
        "stop", description="Bad lines stop the run, or are left out and recorded in the run folder."
    )
    mix: tuple[QuestionSet, ...] = Field(
        (),
        description="Sets that are trained on too, each with files, image_root and weight of its own; where holds too.",
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        for number, other in enumerate(self.mix):
            for name, values in self.where_of(other).items():
                if not values:
                    raise ValueError(
                        f"mix[{number}].where.{name} is {' or '.join(other.where[name])}, and where.{name} is "
                        f"{' or '.join(self.where[name])}: no question is both"
                    )
        return self

    @property
    def sets(self) -> tuple[QuestionSet, ...]:
        return (self, *self.mix)

    def where_of(self, part: QuestionSet) -> dict[str, tuple[str, ...]]:
        """The conditions on the questions of one of the sets: its own, and those of all."""
        both = {**part.where, **self.where}
        return {
            name: tuple(value for value in values if value in part.where.get(name, values))
            for name, values in both.items()
        }
