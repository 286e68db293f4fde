"""What a command on a CPU has before it, said before a model is loaded: how long it takes at least, and whether its
numeric format is one that this CPU is slow at."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sameday.commands.session import Session
from sameday.hardware.memory import free_memory
from sameday.hardware.peaks import CPU_SHAPES, Precision, best_seconds, number_format
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.words import count
from sameday.tasks.base import Say

WORTH_TIMING = 1e12
"""FLOP from which on a run is worth an estimate: minutes on a few cores."""
REFUSED = 24 * 3600.0
"""Seconds from which on a CPU must be asked for."""
SLOW_FORMAT = 2.5
"""Times slower than float32 from which on a numeric format is worth a word: 4 to 16 where it is emulated, and less than
1 where the CPU has it."""
LARGE = 1e9
"""Numbers of a model from which on a CPU is worth a word, whatever is computed with it."""
NO_GPU = "torch finds no GPU here"
BRIEF = 0.2
"""Seconds that timing a matmul takes: long enough for a moment in which no other program is at work."""
ALONE = 128
"""Rows and columns of a matmul that one thread ends long before another program gets its core, in any format."""


@dataclass(frozen=True)
class Outlook:
    """Matmuls of a run in FLOP, how many a second this CPU does in its format, and how many times slower that is than
    float32."""

    flop: float
    precision: str
    rate: float
    slower: float

    @property
    def seconds(self) -> float:
        return self.flop / self.rate

    def estimate(self) -> str:
        how = f"{self.flop:.2g} FLOP of matmuls at {self.rate / 1e9:.3g} GFLOP/s, as measured in {self.precision}"
        return f"at least about {_duration(self.seconds)} ({how} with {count(torch.get_num_threads(), 'thread')})"

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
    if session.device.type == "cpu":
        _check_memory(session)
        total, step = work_of(session, splits)
        _say_all(session, min(total, steps or total) * step, "the run takes", session.say)


def check_steps(session: Session, splits: Any, steps: int, say: Say | None = None, trains: bool = True) -> None:
    """The same of a few steps that change no weights, or of a model that takes none. Of small models there is nothing
    to say."""
    if session.device.type == "cpu":
        _check_memory(session, trains)
        flop = steps * work_of(session, splits)[1] if steps else 0.0
        _say_large(session, flop, f"{count(steps, 'step')} take", say or session.say)


def check_scores(session: Session, splits: Any, split: str) -> None:
    """The same of the loss of a split, which is the least that an evaluation computes."""
    if session.device.type == "cpu":
        _check_memory(session, trains=False)
        # Training goes at least twice as far again to get back to what is trained.
        flop = session.setup.epoch_flop(session.resolved.plan, {"train": splits[split]}) / 3 if splits.get(split) else 0
        _say_large(session, flop, f"the loss of {split} takes", session.say)


def check_together(plan: Plan, precision: Precision, flop: float, say: Say) -> None:
    """The same of what is left of all stages of a run, each of which says by itself that it is on a CPU."""
    ahead = _outlook(flop, precision) if flop >= WORTH_TIMING else None
    if ahead is not None:
        _refuse_days(plan, ahead)
        say(f"on this CPU all stages together take {ahead.estimate()}")


def _check_memory(session: Session, trains: bool = True) -> None:
    """BadInput where it cannot fit: the system would kill the process, which then says nothing."""
    needed = session.setup.least_memory(session.resolved.plan, session.ranks.size, trains)
    _, there = free_memory(session.device)
    least, has = (f"{size / 2**30:.3g}" for size in (needed.bytes, there))
    if needed.bytes > there:
        who = "training" if trains else "the model"
        raise BadInput(f"{who} takes at least {least} GiB of memory, and this machine has {has}: {needed.what}")
    if needed.bytes + needed.mapped > there:
        session.say(
            f"{needed.mapped / 2**30:.3g} GiB of weights do not fit into this machine's {has} GiB of memory: each pass "
            "reads from the disk what is missing"
        )


def work_of(session: Session, splits: Any) -> tuple[int, float]:
    """How many steps the whole run has, and the FLOP of each."""
    recipe: Recipe = session.recipe
    an_epoch = -(-session.audited.sizes["train"] // recipe.effective_batch)
    total = recipe.max_steps or recipe.num_epochs * an_epoch
    return total, session.setup.epoch_flop(session.resolved.plan, splits) / an_epoch


def _say_large(session: Session, flop: float, what: str, say: Say) -> None:
    if flop >= WORTH_TIMING or session.setup.parameters() >= LARGE:
        _say_all(session, flop, what, say)


def _say_all(session: Session, flop: float, what: str, say: Say) -> None:
    precision = session.recipe.precision
    ahead = _outlook(flop, precision) if flop >= WORTH_TIMING or precision == "bf16" else None
    if ahead is not None:
        _refuse_days(session.plan, ahead)
    if session.plan.device == "auto":
        say(f"device: cpu, because {NO_GPU}")
    if ahead is not None and flop >= WORTH_TIMING:
        say(f"on this CPU {what} {ahead.estimate()}")
    if ahead is not None and (slow := ahead.slow_format()) is not None:
        say(slow)


def _outlook(flop: float, precision: Precision) -> Outlook:
    alone = rates_alone(precision)
    # Where other programs have the cores, threads that wait for each other may be a hundred times too slow.
    rate = max(matmul_rate(precision), alone[precision] * torch.get_num_threads())
    return Outlook(flop, precision, rate, alone["float32"] / alone[precision] if precision == "bf16" else 1.0)


def _refuse_days(plan: Plan, ahead: Outlook) -> None:
    if plan.device == "auto" and ahead.seconds > REFUSED:
        slow = ahead.slow_format()
        raise BadInput(
            f"plan.device auto: {NO_GPU}, and a CPU would take {ahead.estimate()}; --set plan.device=cpu begins it all "
            f"the same{'' if slow is None else f'. {slow}'}"
        )


def rates_alone(precision: Precision) -> dict[Precision, float]:
    """FLOP per second of one thread in this format and in float32, each the best of many calls of a moment. They take
    turns, so that other programs take from both or from none."""
    calls = {each: _matmul(each, ALONE, ALONE, ALONE) for each in dict.fromkeys((precision, "float32"))}
    best = dict.fromkeys(calls, math.inf)
    threads, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)
    try:
        while time.perf_counter() - began < BRIEF:
            for each, call in calls.items():
                best[each] = min(best[each], best_seconds(call, torch.device("cpu"), 0.0))
    finally:
        torch.set_num_threads(threads)
    return {each: 2 * ALONE**3 / seconds for each, seconds in best.items()}


def matmul_rate(precision: Precision) -> float:
    """FLOP per second of all threads together, in the largest matmul that takes a moment."""
    return max(_rates(precision))


def _rates(precision: Precision) -> Iterator[float]:
    for m, k, n in CPU_SHAPES:
        seconds = best_seconds(_matmul(precision, m, k, n), torch.device("cpu"), BRIEF)
        yield 2 * m * k * n / seconds
        if 8 * seconds > BRIEF:  # what the next one takes
            return


def _matmul(precision: Precision, m: int, k: int, n: int) -> Callable[[], Tensor]:
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.ones(m, k, dtype=kind), torch.ones(n, k, dtype=kind)

    def call() -> Tensor:
        with number_format(precision), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a page about what is measured here
            return a @ b.T

    return call


def _duration(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}s"
    return f"{seconds:.0f} seconds"
