"""Which task a recipe names. Everything else asks the task, and knows none by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sameday.spec.recipe import Recipe
from sameday.tasks.classify_start import ClassifyStart
from sameday.tasks.start import Start
from sameday.tasks.vqa_start import VqaStart

STARTS: dict[str, Callable[[Any, Path], Start]] = {"vqa": VqaStart, "classify": ClassifyStart}


def start_of(recipe: Recipe, home: Path) -> Start:
    """`home` is the folder that the recipe's paths start at."""
    return STARTS[recipe.task](recipe, home)
