"""Families of vision-language models: every file here but HELPERS is one, and is called as transformers calls its
`model_type`. The file's FAMILY is all that the rest of the package knows of it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from sameday.spec.errors import BadInput

if TYPE_CHECKING:
    from sameday.models.families.base import Family

DEFAULT = "qwen3_vl"
"""What the demo makes a small one of."""

HELPERS = ("base", "qwen", "qwen_images", "qwen_tiny", "square", "square_images")
"""What families share."""


def known_families() -> list[str]:
    """By name, without loading any."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in HELPERS)


def family_of(model_type: str, where: str = "recipe.model") -> Family:
    """`where` is the place that an error names."""
    if model_type not in known_families():
        raise BadInput(f"{where}: model type {model_type!r} is not supported; allowed: {', '.join(known_families())}")
    family: Family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    assert family.model_type == model_type, f"{model_type}.py holds {family.model_type}"
    return family
