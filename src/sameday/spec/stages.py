"""Training in stages: what each stage changes of the recipe that all of them share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from sameday.spec.limits import STEPS, at_most
from sameday.spec.order import Order
from sameday.spec.questions import Where
from sameday.spec.recipe import Strict

KEPT = ("name", "where", "start")
"""Fields of a stage that are no fields of the recipe."""


class Stage(Strict):
    """A training of its own, with its own schedule. What is null here is as in the recipe."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="Names its folder: stages/1-NAME.")
    where: Where = Field(default_factory=dict, description="Which questions, of those that data.where leaves.")
    start: Literal["previous", "base"] = Field(
        "previous", description="The adapter of the stage before, or what the first stage starts from."
    )
    order: Order | None = Field(None, description="In which order its questions are seen.")
    effective_batch: int | None = Field(
        None, ge=1, **at_most(2**20, "one update for a million samples learns nothing"), description="Its batch."
    )
    learning_rate: float | None = Field(None, gt=0, description="Its peak learning rate.")
    schedule: Literal["linear", "cosine", "constant"] | None = Field(None, description="Its learning rate's course.")
    warmup_ratio: float | None = Field(None, ge=0, lt=1, description="Its warm-up, as a share of its steps.")
    warmup_steps: int | None = Field(None, ge=0, **STEPS, description="Its warm-up in steps.")
    num_epochs: int | None = Field(None, ge=1, **at_most(10**6, "such a run would not end"), description="Its epochs.")
    max_steps: int | None = Field(None, ge=1, **STEPS, description="Its steps, whatever num_epochs says.")

    @model_validator(mode="before")
    @classmethod
    def _order_by_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("order"), str):
            return {**values, "order": {"kind": values["order"]}}
        return values

    def changes(self) -> dict[str, Any]:
        """Of the recipe's fields."""
        return {name: value for name, value in self if name not in KEPT and value is not None}
