"""Upper bounds of numbers in recipes and plans, each with its reason, which is part of the refusal: a value beyond it
is a slip, and would take all memory or all time before anyone notices."""

from __future__ import annotations

from typing import Any

COUNT = 2**31 - 1
"""Of steps, samples and tokens: more are in no data."""

LEARNING_RATE = 1000
"""AdamW moves a weight by about so much in a step."""


def at_most(most: int, why: str) -> dict[str, Any]:
    """Arguments of a field that is bounded above."""
    return {"le": most, "json_schema_extra": {"why_at_most": why}}


COUNTED = at_most(COUNT, "there are no more in any data")
STEPS = at_most(COUNT, "no run has more steps")
SEEDS = at_most(2**63 - 1, "seeds have 63 bits")


def steps_or_epoch(value: Any) -> Any:
    """Every so many steps, or a word."""
    if isinstance(value, int) and value < 1:
        raise ValueError(f"must be at least 1 or 'epoch', not {value}")
    if isinstance(value, int) and value > COUNT:
        raise ValueError(f"must be less than or equal to {COUNT} or 'epoch': no run has more steps")
    return value
