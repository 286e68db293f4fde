"""How answers are generated for an evaluation. It decides nothing about the weights, and is in no fingerprint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from sameday.spec.limits import NEW_TOKENS, at_most
from sameday.spec.recipe import Strict

FINDINGS, QUESTION = "{findings}", "{question}"


class Evaluation(Strict):
    """Greedy answers to the questions of a split."""

    split: Literal["train", "val", "test"] = Field("test", description="Which part of the data.")
    cascade: bool = Field(
        False,
        description="Stage by stage: what was predicted for an image at earlier stages goes into the prompts of later "
        "ones.",
    )
    max_new_tokens: int = Field(
        64,
        ge=1,
        **at_most(*NEW_TOKENS),
        description="An answer that has not ended by then is cut.",
    )
    context: str = Field(
        f"Earlier findings:\n{FINDINGS}\n\n{QUESTION}",
        description="With cascade: the text of a question that has earlier findings. {findings} becomes a line "
        "'- question answer' for each, {question} the question's own text.",
    )

    @field_validator("context")
    @classmethod
    def _has_places(cls, value: str) -> str:
        lacking = [name for name in (FINDINGS, QUESTION) if name not in value]
        if lacking:
            raise ValueError(f"must hold {FINDINGS} and {QUESTION}; it lacks {' and '.join(lacking)}")
        return value
