"""What a run on a CPU has before it, said before it begins: how long it takes at least, and whether its numeric format
is one that this CPU is slow at."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sameday.commands.session import Session
from sameday.hardware.peaks import CPU_SHAPES, Precision, best_seconds, number_format
from sameday.spec.errors import BadInput
from sameday.spec.recipe import Recipe

WORTH_TIMING = 1e12
"""FLOP from which on a run is worth an estimate: minutes on a few cores."""
REFUSED = 24 * 3600.0
"""Seconds from which on a CPU must be asked for."""
SLOW_FORMAT = 4.0
"""Times slower than float32 from which on a numeric format is worth a word."""
BRIEF = 0.2
"""Seconds that timing a matmul takes: long enough for a moment in which no other program is at work."""


@dataclass(frozen=True)
class Outlook:
    """Matmuls of a run in FLOP, and how many a second this CPU does in its format and in float32."""

    flop: float
    precision: str
    rate: float
    float32_rate: float

    @property
    def seconds(self) -> float:
        return self.flop / self.rate

    @property
    def slower(self) -> float:
        return self.float32_rate / self.rate

    def estimate(self) -> str:
        how = f"{self.flop:.2g} FLOP of matmuls at {self.rate / 1e9:.3g} GFLOP/s, as measured in {self.precision}"
        return f"at least about {_duration(self.seconds)} ({how} on {len(os.sched_getaffinity(0))} cores)"

    def slow_format(self) -> str | None:
        if self.slower < SLOW_FORMAT:
            return None
        return (
            f"{self.precision} matmuls are about {self.slower:.0f} times slower than float32 ones on this CPU: "
            "recipe.precision float32 is another recipe, and the faster one here"
        )


def check_cpu(session: Session, splits: Any, steps: int | None) -> None:
    """Says what a run of at most so many steps on a CPU has before it; BadInput where nobody asked for a CPU, and it
    would take days."""
    if session.device.type != "cpu":
        return
    flop = _run_flop(session, splits, steps)
    ahead, why = None, "torch finds no GPU here"
    precision = session.recipe.precision
    if flop >= WORTH_TIMING or precision == "bf16":
        rate = matmul_rate(precision)
        ahead = Outlook(flop, precision, rate, matmul_rate("float32") if precision == "bf16" else rate)
    slow = None if ahead is None else ahead.slow_format()
    if session.plan.device == "auto" and ahead is not None and ahead.seconds > REFUSED:
        raise BadInput(
            f"plan.device auto: {why}, and a CPU would take {ahead.estimate()}; --set plan.device=cpu begins it all "
            f"the same{'' if slow is None else f'. {slow}'}"
        )
    if session.plan.device == "auto":
        session.say(f"device: cpu, because {why}")
    if ahead is not None and flop >= WORTH_TIMING:
        session.say(f"on this CPU the run takes {ahead.estimate()}")
    if slow is not None:
        session.say(slow)


def _run_flop(session: Session, splits: Any, steps: int | None) -> float:
    recipe: Recipe = session.recipe
    an_epoch = -(-session.audited.sizes["train"] // recipe.effective_batch)
    total = recipe.max_steps or recipe.num_epochs * an_epoch
    return session.setup.epoch_flop(session.resolved.plan, splits) * min(total, steps or total) / an_epoch


def matmul_rate(precision: Precision) -> float:
    """FLOP per second of the largest matmul that takes a moment."""
    return max(_rates(precision))


def _rates(precision: Precision) -> Iterator[float]:
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    for m, k, n in CPU_SHAPES:
        a, b = torch.ones(m, k, dtype=kind), torch.ones(n, k, dtype=kind)
        with number_format(precision), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a page about what is measured here
            seconds = best_seconds(lambda: a @ b.T, torch.device("cpu"), BRIEF)  # noqa: B023 (called at once)
        yield 2 * m * k * n / seconds
        if 8 * seconds > BRIEF:  # what the next one takes
            return


def _duration(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:.0f} seconds"
