"""Whether a step's loss is a spike: far above what the steps before it had, as a pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

WINDOW = 50
"""Steps before it that a loss is compared with."""
FEWEST = 20
"""Steps without which nothing is called a spike: at the start of training nobody knows what is usual."""
DEVIATIONS = 6.0
"""How far out a spike is, in standard deviations as the median absolute deviation gives them. Losses are compared by
their logarithms: they are never negative, and large ones spread more."""
RISE = 1.5
"""And at least so many times the usual loss: where losses hardly differ, a small change is no spike."""


def usual_before_spike(recent: Sequence[float], loss: float) -> float | None:
    """The usual loss of `recent` steps (at most the last WINDOW count) where `loss` is a spike above it; else None."""
    logs = [math.log(each) for each in recent[-WINDOW:] if each > 0]
    if len(logs) < FEWEST or loss <= 0:
        return None
    middle = median(logs)
    deviation = 1.4826 * median(abs(each - middle) for each in logs)
    if math.log(loss) <= middle + max(DEVIATIONS * deviation, math.log(RISE)):
        return None
    return math.exp(middle)
