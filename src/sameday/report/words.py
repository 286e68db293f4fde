"""Recipes, claims and phases of a step in plain words. What is one task's own, the task says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sameday.spec.recipe import Recipe
from sameday.spec.words import count, number
from sameday.tasks.registry import setup_of

CLAIMS = {
    "bitwise": "the same bits",
    "rounding": "the same mathematics, rounded in another order",
    "statistical": "another draw of the randomness",
}
VERDICTS = {
    **CLAIMS,
    "statistical": "the same mathematics with dropout off; with it on, another draw of its masks",
    "undecided": "rounding, or another draw of dropout, can drive runs as far apart: these two cannot tell",
    "different": "not the same model",
}
PHASES = {
    "wait": "waiting for data",
    "read": "reading files",
    "decode": "decoding images",
    "resize": "resizing images",
    "copy": "copying to the device",
    "prepare": "preparing on the device",
    "tower": "vision tower",
    "forward": "forward pass",
    "loss": "loss",
    "backward": "backward pass",
    "exchange": "exchange between ranks",
    "optimizer": "optimizer",
    "check": "reading loss and norm",
    "log": "logging",
    "other": "everything else",
}
"""Of a step, in the order in which they come."""
SCHEDULES = {
    "linear": "falls linearly to zero",
    "cosine": "falls to zero as a cosine",
    "constant": "stays there",
}


def recipe_words(recipe: Recipe) -> list[str]:
    """What is trained, on what, and how: one paragraph each."""
    what, data = setup_of(recipe, Path()).words()
    return [what, data, _optimization(recipe)]


def _optimization(recipe: Recipe) -> str:
    if recipe.warmup_steps is not None:
        warm = f" after {recipe.warmup_steps:,} steps of warm-up" if recipe.warmup_steps else ""
    else:
        warm = f" after a warm-up of {number(100 * recipe.warmup_ratio)}% of all steps" if recipe.warmup_ratio else ""
    clip = f", gradients clipped to norm {number(recipe.max_grad_norm)}" if recipe.max_grad_norm else ""
    decay = f", weight decay {number(recipe.weight_decay)}" if recipe.weight_decay else ""
    each = count(recipe.effective_batch, recipe.sample)
    if recipe.max_steps:
        long = f"{count(recipe.max_steps, 'step')} of {each} each"
    else:
        long = f"{count(recipe.num_epochs, 'epoch')} in steps of {each}"
    rate = f"the learning rate peaks at {number(recipe.learning_rate)} and {SCHEDULES[recipe.schedule]}{warm}"
    best = ""
    if recipe.best is not None:
        often = recipe.best.every
        every = {"epoch": "after each epoch", 1: "after each step"}.get(often) or f"every {often:,} steps"
        best = f" The result is the weights of the best validation {recipe.best.metric}, compared {every}."
    return f"{long}, in {recipe.precision}, seed {recipe.seed}. AdamW{decay}{clip}; {rate}.{best}"


def value(given: Any) -> str:
    """A setting as its YAML file has it."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    if isinstance(given, dict):
        return ", ".join(f"{k}={v}" for k, v in given.items()) or "none"
    if isinstance(given, list | tuple):
        return ", ".join(map(str, given)) or "none"
    return str(given)


def seconds(given: float | None) -> str:
    """A duration with a unit that fits it."""
    if given is None:
        return "–"
    size = abs(given)
    if 0 < size < 1e-3:
        return f"{1e6 * given:.3g} µs"
    if 0 < size < 1:
        return f"{1e3 * given:.3g} ms"
    if size < 120:
        return f"{given:.3g} s"
    minutes, rest = divmod(round(given), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def between(low: float, high: float) -> str:
    """Two durations in the unit that fits the longer, with as many digits as tell them apart, three at least."""
    unit, size = ("s", 1) if high < 120 else ("min", 60) if high < 7200 else ("h", 3600)
    ends = low / size, high / size
    places = max(0, 2 - math.floor(math.log10(ends[1]))) if ends[1] > 0 else 0
    said = [f"{end:,.{places}f}" for end in ends]
    while said[0] == said[1] and ends[0] != ends[1]:
        places += 1
        said = [f"{end:,.{places}f}" for end in ends]
    first, last = (each.rstrip("0").rstrip(".") if places else each for each in said)
    return f"{first} to {last} {unit}" if first != last else f"{last} {unit}"


def in_order(names: Iterable[str]) -> list[str]:
    """Parts in their order; those that are not known, as they came, at the end."""
    given = dict.fromkeys(names)
    return [name for name in PHASES if name in given] + [name for name in given if name not in PHASES]


def percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def score(name: str, given: float | None) -> str:
    """A score: those that are shares of right answers in percent."""
    if given is None:
        return "–"
    if is_share(name):
        return f"{100 * given:.1f}%"
    return f"{given:,}" if isinstance(given, int) else f"{given:.4f}" if 1e-3 <= abs(given) < 1e3 else number(given)


def is_share(name: str) -> bool:
    """All scores are shares of the samples but these: see Task.evaluate."""
    return name not in ("loss", "samples")


def plain_name(name: str) -> str:
    return name.replace("_", " ")
