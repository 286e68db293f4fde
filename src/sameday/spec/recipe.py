"""Recipe: what model comes out. Two runs of one recipe train the same model, whatever plan runs them. Here is what all
tasks share; each task's own recipe stands in a file of its name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from sameday.spec import identity
from sameday.spec.limits import LEARNING_RATE, SEEDS, STEPS, at_most, steps_or_epoch

ASKED = "asked"
"""In the context of a validation: these fields are what a user wrote, not what a run recorded."""


class Strict(BaseModel):
    """Frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


class Best(Strict):
    """Which weights on the way are compared, and by what. Here and not in the plan, because it decides the result."""

    metric: str = Field("loss", description="A validation score: the lowest loss, or the highest of any other.")
    every: int | Literal["epoch"] = Field(
        "epoch", description="Compare after every so many steps, or at each epoch's end; and the last weights."
    )

    _every = field_validator("every")(steps_or_epoch)

    def beats(self, scores: dict[str, float], other: dict[str, float] | None) -> bool:
        """Of two validations, or where there is no other one: by the metric, and where that is the same by the loss.
        What is not finite is never the best."""

        def rank(each: dict[str, float]) -> tuple[float, float]:
            return (0.0 if self.metric == "loss" else -each[self.metric], each["loss"])

        return math.isfinite(scores[self.metric]) and (other is None or rank(scores) < rank(other))


class Recipe(Strict):
    """Everything that decides which model comes out, and nothing else."""

    has: ClassVar[frozenset[str]] = frozenset()
    """What the task has that plan fields may need, of `plan.NEEDS`."""
    sample: ClassVar[str] = "sample"
    """What a step is made of, as people call one of it."""
    plain: ClassVar[str] = "nothing fused, nothing shared"
    """How the plain plan goes through a step."""
    scored_by: ClassVar[tuple[str, ...]] = ()
    """Fields that decide what a validation score means: where they differ, scores are not of one kind."""
    scored_on: ClassVar[tuple[str, ...]] = ()
    """Fields that name what is validated on, which may be the same under two names."""
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Of the inputs whose contents a run records, by their names there: the fields that say which they are."""

    scores: ClassVar[tuple[str, ...]] = ("loss",)
    """What validation gives: scores that the best weights may be chosen by."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="A name for people; not in the fingerprint.")
    task: str = Field(description="What is learned.")

    precision: Literal["bf16", "float32", "tf32"] = Field(
        "bf16",
        description="Numeric format. bf16: float32 master copies of what is trained, matmuls in bf16 with "
        "float32 accumulation. tf32: float32 with TF32 matmuls.",
    )
    effective_batch: int = Field(
        16,
        ge=1,
        **at_most(2**20, "one update for a million samples learns nothing"),
        description="Samples per optimizer step: questions, or images.",
    )

    optimizer: Literal["adamw"] = Field("adamw", description="The optimizer's mathematics.")
    learning_rate: float = Field(
        5e-5,
        gt=0,
        **at_most(LEARNING_RATE, "AdamW moves a weight by about so much in a step"),
        description="Peak learning rate.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        **at_most(1000, "a step takes away that share of a weight, times the rate"),
        description="Decoupled weight decay on matrices; vectors have none.",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates.")
    eps: float = Field(1e-8, ge=1e-30, le=1, description="AdamW's epsilon; a smaller one is none in float32.")
    max_grad_norm: float | None = Field(
        1.0,
        ge=1e-6,
        description="Clip the whole step's gradient to this norm; of a smaller one nothing is left beside eps.",
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear",
        description="Learning rate after warm-up: to zero linearly, to zero as a cosine, or unchanged.",
    )
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="Warm-up, as a share of all steps.")
    warmup_steps: int | None = Field(None, ge=0, **STEPS, description="Warm-up in steps; replaces warmup_ratio.")
    num_epochs: int = Field(
        3, ge=1, **at_most(10**6, "such a run would not end"), description="Passes over the training data."
    )
    max_steps: int | None = Field(None, ge=1, **STEPS, description="Train so many steps, whatever num_epochs says.")
    seed: int = Field(0, ge=0, **SEEDS, description="Seed of order, dropout, augmentation and new weights.")
    best: Best | None = Field(
        None, description="The result is the weights of the best validation score; null: the last weights."
    )

    @model_validator(mode="before")
    @classmethod
    def _best_by_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("best"), str):
            return {**values, "best": {"metric": values["best"]}}
        return values

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        asked = bool(info.context and info.context.get(ASKED))
        if problems := [*self.contradictions(), *(self.unheeded() if asked else ())]:
            raise ValueError("\n".join(problems))
        return self

    def contradictions(self) -> Iterator[str]:
        """What is wrong with fields that are good one by one: a line each, all of them told together."""
        if self.best is not None and self.best.metric not in self.scores:
            yield f"best.metric {self.best.metric!r}: must be one of {', '.join(self.scores)}"
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas {list(self.betas)}: each must be at least 0 and less than 1"

    def unheeded(self) -> Iterator[str]:
        """A line about each field that is not at its default and that another one puts out of use. Asked only of what a
        user writes: runs record every field, also where a stage's replaces the recipe's."""
        if self.warmup_ratio and self.warmup_steps is not None:
            yield one_warmup("warmup_ratio", self.warmup_ratio, "warmup_steps", self.warmup_steps)

    @classmethod
    def task_words(cls) -> str:
        return f"task {cls.model_fields['task'].default}"

    def ignored(self) -> frozenset[str]:
        """Fields of the top level that decide nothing here."""
        return frozenset({"name"})

    def identity(self) -> dict[str, Any]:
        """What the fingerprint is taken of, as plain data: deciding fields that are not at their defaults. A release
        may add a field whose default is the behaviour before it, and every recipe keeps its fingerprint."""
        return identity.identity_of(self, self.ignored())

    def paths(self) -> Iterator[str]:
        """The files and folders that it names, as written."""
        yield from identity.paths_of(self)

    def stage_recipes(self) -> list[StageRecipe]:
        """The trainings that this recipe is made of, one after another; empty where it is a single one."""
        return []

    def started_from(self, folder: str, fingerprint: str) -> Recipe:
        """The same training from the finished weights in a folder, of the recipe with this fingerprint."""
        raise TypeError(f"task {self.task} has no stages")

    @property
    def dropout(self) -> float:
        """The dropout that training really has."""
        return 0.0

    @property
    def coarse_matmuls(self) -> bool:
        """Whether activations, too, are rounded to fewer bits than `precision` has."""
        return False

    @property
    def result(self) -> str:
        """Folder of the run in which the finished weights lie."""
        return "model"

    @property
    def earlier_result(self) -> str | None:
        """The folder that an earlier release had for them, where it was another."""
        return None

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two recipes ask for the same model."""
        return hashlib.sha256(identity.as_text(self.identity()).encode()).hexdigest()[:12]


def one_warmup(ratio: str, share: float, steps: str, count: int) -> str:
    """A sentence about two fields, by their names, of which the second puts the first out of use."""
    return f"{ratio} is {share:g} and {steps} is {count}; one of them is allowed: {steps} would replace {ratio}"


@dataclass(frozen=True)
class StageRecipe:
    """One of several trainings of a recipe. Where it `follows`, it starts from the result of the one before."""

    name: str
    recipe: Recipe
    follows: bool


def differences(there: Recipe, here: Recipe) -> list[str]:
    """Which deciding fields differ, one sentence each, nested fields by their full name. Empty exactly when the
    fingerprints are equal."""
    return sorted(identity.differences_of(there, here, there.ignored(), here.ignored()))
