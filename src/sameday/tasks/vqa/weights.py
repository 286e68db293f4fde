"""What a model's weights take in memory, counted before any of them is read."""

from __future__ import annotations

from typing import Any

from sameday.models.families.base import Family
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.setup import Needed

TRAINED, SAVED = 16, 4
"""Bytes of a trained number: itself, its gradient and AdamW's two moments, float32 each; and when it was trained."""
SMALL = 5e8
"""Numbers up to which nobody's memory is too little, and counting is not worth its second."""


def least_bytes(recipe: VlmRecipe, family: Family, base: Any, stored: str, trains: bool) -> Needed:
    """At least, on a CPU, and of what; without activations, adapters and heads. `base` has shapes and no weights; those
    that are `stored` in the format in which they are used stay in their files. Codes are made of bf16, once."""
    frozen, trained = _numbers(recipe, family, base)
    half = recipe.precision == "bf16" or recipe.base_format != "precision"
    of_frozen, of_trained = (2 if half else 4) * frozen, (TRAINED if trains else SAVED) * trained
    in_place = stored == ("bfloat16" if half else "float32")
    what = []
    if frozen and not in_place:
        what.append(f"{of_frozen / 2**30:.3g} GiB for {frozen:,} weights in {'bf16' if half else 'float32'}")
    if trained:
        more = ", gradients and AdamW's moments" if trains else ""
        what.append(f"{of_trained / 2**30:.3g} GiB for {trained:,} trained ones{more}")
    less = "" if half or trained else ", recipe.precision bf16, which is another recipe"
    words = f"{' and '.join(what)}; what is left to try: a smaller recipe.model{less}"
    if in_place:
        return Needed(of_trained, words, of_frozen if recipe.base_format == "precision" else 0)
    return Needed(of_frozen + of_trained, words)


def _numbers(recipe: VlmRecipe, family: Family, base: Any) -> tuple[int, int]:
    """How many stay as they are, and how many are trained, of the base model's."""
    every = sum(parameter.numel() for parameter in base.parameters())
    if recipe.train == "lora":
        return every, 0
    parts = family.parts(base)
    modules = [parts.text, parts.head, *([parts.tower] if recipe.train_vision else [])]
    own = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
    return every - sum(own.values()), sum(own.values())
