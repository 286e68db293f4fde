"""Which task a recipe names. Everything else asks the task, and knows none by name."""

from __future__ import annotations

from pathlib import Path

from sameday.spec.recipe import Recipe
from sameday.spec.registry import plugin
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.setup import TaskSetup
from sameday.tasks.vqa.setup import VqaSetup

SETUPS: dict[str, type[TaskSetup]] = {"vqa": VqaSetup, "cot": CotSetup, "classify": ClassifySetup}


def setup_of(recipe: Recipe, home: Path) -> TaskSetup:
    """`home` is the folder that the recipe's paths start at."""
    kind = SETUPS.get(recipe.task) or plugin(recipe.task)
    setup: TaskSetup = kind(recipe, home)
    return setup
