"""Which recipe a task has. Tasks of other packages are found by their entry points, in the group `sameday.tasks`: the
name is the task's, the object its `TaskSetup`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from sameday.spec.classify import ClassifyRecipe
from sameday.spec.cot import CotRecipe
from sameday.spec.recipe import Recipe
from sameday.spec.vqa import VqaRecipe

GROUP = "sameday.tasks"
RECIPES: dict[str, type[Recipe]] = {"vqa": VqaRecipe, "cot": CotRecipe, "classify": ClassifyRecipe}
"""The recipes that come with this package. The first is meant where a file names no task."""


def recipe_type(task: str) -> type[Recipe] | None:
    """None where no task has this name."""
    if task in RECIPES:
        return RECIPES[task]
    setup = plugin(task)
    return None if setup is None else setup.recipe_type


def known_tasks() -> list[str]:
    return [*RECIPES, *sorted({each.name for each in entry_points(group=GROUP)} - RECIPES.keys())]


@cache
def plugin(task: str) -> Any:
    """Another package's `TaskSetup` class, or None."""
    for each in entry_points(group=GROUP, name=task):
        return each.load()
    return None
