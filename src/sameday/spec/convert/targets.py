"""Which layers get adapters, where a config says it by a word or by a pattern instead of by names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sameday.spec.convert.families import ATTENTION, FAMILIES, MLP
from sameday.spec.lora import OF_IMAGES

LANGUAGE = (*ATTENTION, *MLP)
"""All linear layers of the language model."""
_LAYERS = (0, 1, 7, 27)


def image_parts(kind: str | None) -> tuple[str, ...]:
    """Parts in front of the language model that have linear layers."""
    return FAMILIES[kind].image_parts if kind in FAMILIES else OF_IMAGES


def of_all_parts(names: Sequence[str], kind: str | None) -> list[str]:
    """Names that PEFT looks for in the whole model, as a recipe says it: bare ones are the language model's alone."""
    alike = FAMILIES[kind].alike if kind in FAMILIES else ()
    return [*names, *(f"tower.{name}" for name in names if name in alike)]


def matched(pattern: str, kind: str | None) -> list[str] | None:
    """The layers that a pattern takes, by their names; None where no list of names says the same: some layers alone,
    or the vision tower's too. PEFT wants the whole name to match."""
    try:
        asked = re.compile(pattern)
    except re.error:
        return None

    def takes(name: str) -> bool:
        return asked.fullmatch(f"model.{name}") is not None

    asked_of = [FAMILIES[kind]] if kind in FAMILIES else FAMILIES.values()
    tower = [name for facts in asked_of for name in facts.tower_layers]
    if any(takes(name.format(layer)) for name in tower for layer in _LAYERS):
        return None
    names = []
    for name in LANGUAGE:
        part = "self_attn" if name in ATTENTION else "mlp"
        found = {takes(f"language_model.layers.{layer}.{part}.{name}") for layer in _LAYERS}
        if len(found) > 1:
            return None
        names += [name] if True in found else []
    return names or None
