"""What a model's weights take in memory, counted before any of them is read."""

from __future__ import annotations

from typing import Any

from sameday.models.families.base import Family
from sameday.spec.vlm import VlmRecipe

TRAINED = 16
"""Bytes of a trained number: itself, its gradient and AdamW's two moments, float32 each."""
SMALL = 5e8
"""Numbers up to which nobody's memory is too little, and counting is not worth its second."""


def least_bytes(recipe: VlmRecipe, family: Family, base: Any, trains: bool) -> tuple[int, str]:
    """At least, on a CPU, and of what; without activations, adapters and heads. `base` has shapes and no weights. Codes
    are made of bf16, which is read whole."""
    frozen, trained = _numbers(recipe, family, base)
    half = recipe.precision == "bf16" or recipe.base_format != "precision"
    each = 2 if half else 4
    if not trains:
        # Weights that were trained are float32.
        frozen, trained, each = frozen + trained, 0, 4 if trained else each
    needed = frozen * each + trained * TRAINED
    what = []
    if frozen:
        what.append(f"{frozen * each / 2**30:.3g} GiB for {frozen:,} weights in {'bf16' if each == 2 else 'float32'}")
    if trained:
        what.append(f"{trained * TRAINED / 2**30:.3g} GiB for {trained:,} trained ones, gradients and AdamW's moments")
    less = "" if half or trained else ", recipe.precision bf16, which is another recipe"
    return needed, f"{' and '.join(what)}; what is left to try: a smaller recipe.model{less}"


def _numbers(recipe: VlmRecipe, family: Family, base: Any) -> tuple[int, int]:
    """How many stay as they are, and how many are trained, of the base model's."""
    every = sum(parameter.numel() for parameter in base.parameters())
    if recipe.train == "lora":
        return every, 0
    parts = family.parts(base)
    modules = [parts.text, parts.head, *([parts.tower] if recipe.train_vision else [])]
    own = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
    return every - sum(own.values()), sum(own.values())
