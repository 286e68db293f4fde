"""The heads of the stages of a chain of thought."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from sameday.spec.recipe import Strict

STAGES = (1, 2, 3)
"""Stage 1 finds, stage 2 describes, stage 3 treats."""
MOST_RANK = 8192
"""A higher rank than a model is wide adds nothing."""


class Heads(Strict):
    """What each stage adds to the model's own logits."""

    rank: int | Literal["full"] = Field(
        16, description="Rank of what each stage adds to the lm_head; full: a whole matrix, as large as the lm_head."
    )
    weights: dict[int, float] = Field(
        dict.fromkeys(STAGES, 1.0),
        description="What the loss of each stage's questions is multiplied by. The step still divides by all of its "
        "answer tokens (or questions), so that a stage's weight scales its gradient and changes no other stage's.",
    )

    @field_validator("rank")
    @classmethod
    def _no_wider_than_a_model(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= MOST_RANK:
            raise ValueError(f"must be 1 to {MOST_RANK}, or 'full'")
        return value

    @field_validator("weights", mode="before")
    @classmethod
    def _by_number(cls, value: Any) -> Any:
        """JSON has no numbers for keys. A stage that is not named weighs 1."""
        if not isinstance(value, dict):
            return value
        named = {int(key) if isinstance(key, str) and key.isdecimal() else key: weight for key, weight in value.items()}
        return dict.fromkeys(STAGES, 1.0) | named

    @field_validator("weights")
    @classmethod
    def _of_stages(cls, value: dict[int, float]) -> dict[int, float]:
        unknown = [stage for stage in value if stage not in STAGES]
        if unknown:
            raise ValueError(f"there is no stage {unknown[0]}; allowed: 1, 2, 3")
        if min(value.values()) < 0 or not any(value.values()):
            raise ValueError(f"weights {value}: each must be at least 0, and one of them more")
        return value
