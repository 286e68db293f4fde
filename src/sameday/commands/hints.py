"""What is almost surely a slip in a recipe that can be trained all the same: told before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sameday.commands.session import Session
from sameday.spec.recipe import Recipe
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import count

ADAPTER_RATE = 1e-2
"""The learning rate of adapters from which on one is told of it."""
WHOLE_RATE = 1e-3
"""The same where all weights are trained."""
SMALL = 1e8
"""Numbers of a model below which such a rate of all weights is usual: those that are trained from random ones."""
USUAL_RATIO = 0.5
"""A share of the steps below which only rounding makes all of them warm-up."""
SCALE = 64.0
"""So many times, or so small a part, of what an adapter makes: from there on one is told of it."""


def say_hints(session: Session, splits: Any) -> None:
    """Each in a line. The run goes on."""
    recipe: Recipe = session.recipe
    steps = recipe.max_steps or sum(session.setup.epoch_steps(session.audited))
    for hint in (*slips(recipe, steps, session.setup.parameters()), *session.setup.hints(splits)):
        session.say(hint)


def slips(recipe: Recipe, steps: int, parameters: int) -> Iterator[str]:
    """Of a run of so many steps, of a model of so many parameters."""
    yield from _warm_up(recipe, steps)
    if isinstance(recipe, VlmRecipe):
        yield from _rates(recipe, parameters)
        if recipe.train == "lora":
            yield from _scale(recipe)


def _warm_up(recipe: Recipe, steps: int) -> Iterator[str]:
    field = "warmup_ratio" if recipe.warmup_steps is None else "warmup_steps"
    given = getattr(recipe, field)
    warm_up = math.ceil(given * steps) if field == "warmup_ratio" else given
    rounded_up = field == "warmup_ratio" and given < USUAL_RATIO  # of a trial of a few steps
    if warm_up and warm_up >= steps and not rounded_up:
        yield (
            f"recipe.{field} {given:g}: the run has {count(steps, 'step')}, all of them warm-up, so that the learning "
            f"rate never reaches {recipe.learning_rate:g}; usual is a warm-up of 3 to 10% of the steps"
        )


def _rates(recipe: VlmRecipe, parameters: int) -> Iterator[str]:
    adapters = recipe.train == "lora"
    if not adapters and parameters < SMALL:
        return
    most, usual = (ADAPTER_RATE, "1e-5 to 5e-4") if adapters else (WHOLE_RATE, "1e-6 to 1e-4")
    own = {f"learning_rates.{part}": rate for part, rate in recipe.learning_rates.items()}
    for field, rate in {"learning_rate": recipe.learning_rate, **own}.items():
        if rate > most:
            yield (
                f"recipe.{field} {rate:g} is far above what is usual with recipe.train {recipe.train}: {usual}; the "
                "loss may grow instead of falling"
            )


def _scale(recipe: VlmRecipe) -> Iterator[str]:
    lora, scale = recipe.lora, recipe.lora.scale
    if not 1 / SCALE <= scale <= SCALE:
        by = "sqrt(r)" if lora.rslora else "r"
        yield (
            f"recipe.lora.alpha {lora.alpha:g} and recipe.lora.r {lora.r} multiply what adapters make by alpha / {by} "
            f"= {scale:.3g}; usual is 1 to 4"
        )
