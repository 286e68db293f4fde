"""Whether the data has as many samples as a step of the recipe."""

from __future__ import annotations

from sameday.commands.session import Session
from sameday.spec.errors import BadInput
from sameday.spec.recipe import Recipe
from sameday.spec.words import count
from sameday.tasks.base import Say


def check_batch(session: Session, whole: bool = True) -> None:
    """Steps of fewer samples than the recipe says would be another recipe's. A stage, which is not the `whole` run, may
    have few samples, and is told of."""
    refuse_few(session.recipe, session.audited.sizes["train"], whole, session.say)


def refuse_few(recipe: Recipe, there: int, whole: bool, say: Say) -> None:
    """The same of so many samples."""
    if recipe.effective_batch > there and not whole:
        say(f"few {recipe.sample}s: each step has {there}, fewer than recipe.effective_batch {recipe.effective_batch}")
    elif (problem := too_few(recipe, there)) is not None:
        raise BadInput(problem)


def too_few(recipe: Recipe, there: int) -> str | None:
    """What is wrong with a run of a recipe on so many samples; None where each step can have as many as it says."""
    if recipe.effective_batch <= there:
        return None
    limit = getattr(getattr(recipe, "data", None), "limit", None)
    more = "" if limit is None else f"; recipe.data.limit (--limit) {limit} leaves no more"
    are, allowed = ("is", "1") if there == 1 else ("are", f"1 to {there}")
    return (
        f"recipe.effective_batch is {recipe.effective_batch}, and there {are} {count(there, recipe.sample)} to "
        f"train on, so that no step could have as many; allowed: {allowed}{more}"
    )
