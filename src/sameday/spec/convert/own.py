"""Whether a file that is to be converted is a recipe or a plan of this package already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sameday.spec.convert import keys
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.registry import RECIPES

_ANYBODYS = {*("data", "name", "train", "evaluate", "environment", "cache", "workers", "prefetch"), *keys.KNOWN}
"""Fields that configs of other trainers have too."""


def refuse_own(path: Path, values: Mapping[Any, Any]) -> None:
    """BadInput for a file all of whose keys are fields of a recipe or of a plan, some of them in no other trainer's."""
    recipes = (set(recipe.model_fields) for recipe in RECIPES.values())
    if any(_all_of(values, fields) for fields in recipes):
        raise BadInput(f"{path}: is a recipe already: sameday train {path}")
    if _all_of(values, set(Plan.model_fields)):
        raise BadInput(f"{path}: is a plan already: sameday train recipe.yaml --plan {path}")


def _all_of(values: Mapping[Any, Any], fields: set[str]) -> bool:
    return values.keys() <= fields and bool(values.keys() - _ANYBODYS)
