"""Upper bounds of numbers in recipes, plans and suites and on the command line, each with its reason, which is part of
the refusal: a value beyond it is a slip, and would take all memory or all time before anyone notices."""

from __future__ import annotations

from typing import Any, NamedTuple

from sameday.spec.errors import BadInput

COUNT = 2**31 - 1
"""Of steps, samples and tokens: more are in no data."""

LEARNING_RATE = 1000
"""AdamW moves a weight by about so much in a step."""


class Bound(NamedTuple):
    """The largest number that an option takes, and why."""

    most: int
    why: str

    def check(self, option: str, value: int | None) -> None:
        if value is not None and value > self.most:
            raise BadInput(f"{option} {value}: {self.why}; at most {self.most}")


RUN_STEPS = Bound(COUNT, "no run has more steps")
SAMPLES = Bound(COUNT, "there are no more in any data")
TIMED_STEPS = Bound(10_000, "the times of every step are held in memory")
WARM_UP_STEPS = Bound(10_000, "none of them is timed, and a run's own warm-up is of a few")
VERIFIED_STEPS = Bound(1000, "the weights of every step are recorded")
RANKS = Bound(64, "each is a process with the whole model in memory")
NEW_TOKENS = Bound(32768, "room for so many is kept for each question that is answered at once")
GPUS = Bound(1024, "no suite has more")
GPU_NUMBERS = Bound(GPUS.most - 1, "they are counted from 0, and no suite has more")
PORTS = Bound(2**16 - 1, "ports have 16 bits")


def at_most(most: int, why: str) -> dict[str, Any]:
    """Arguments of a field that is bounded above."""
    return {"le": most, "json_schema_extra": {"why_at_most": why}}


COUNTED = at_most(*SAMPLES)
STEPS = at_most(*RUN_STEPS)
SEEDS = at_most(2**63 - 1, "seeds have 63 bits")


def steps_or_epoch(value: Any) -> Any:
    """Every so many steps, or a word."""
    if isinstance(value, int) and value < 1:
        raise ValueError(f"must be at least 1 or 'epoch', not {value}")
    if isinstance(value, int) and value > COUNT:
        raise ValueError(f"must be less than or equal to {COUNT} or 'epoch': no run has more steps")
    return value
