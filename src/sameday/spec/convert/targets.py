"""Which layers get adapters, where a config says it by a word or by a pattern instead of by names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sameday.spec.convert.families import ATTENTION, FAMILIES, MLP
from sameday.spec.lora import OF_IMAGES
from sameday.spec.time_limit import TookTooLong, time_limit

LANGUAGE = (*ATTENTION, *MLP)
"""All linear layers of the language model."""
PATIENCE = 2.0
"""Seconds of computing for a pattern of layers, which takes milliseconds."""
_LAYERS = (0, 1, 7, 27)
_TODAY = "model.language_model.layers."


def image_parts(kind: str | None) -> tuple[str, ...]:
    """Parts in front of the language model that have linear layers."""
    return FAMILIES[kind].image_parts if kind in FAMILIES else OF_IMAGES


def names_of_layers(targets: Any) -> Any:
    """As a list, where they stand in one text; anything else as it is."""
    if isinstance(targets, str) and targets != "all" and re.fullmatch(r"\w+(?:[,\s]+\w+)*", targets):
        return re.split(r"[,\s]+", targets)
    return targets


def alike(targets: Any, kind: str | None) -> list[str] | None:
    """Which of these layers of the language model have namesakes in the tower; None where that is not known, or where
    others are named."""
    names = names_of_layers(targets)
    if kind not in FAMILIES or not isinstance(names, list) or not {*map(str, names)} <= {*LANGUAGE}:
        return None
    return [name for name in names if name in FAMILIES[kind].alike]


def of_all_parts(names: Sequence[str], kind: str | None) -> list[str]:
    """Names that PEFT looks for in the whole model, as a recipe says it: bare ones are the language model's alone."""
    of_tower = FAMILIES[kind].alike if kind in FAMILIES else ()
    return [*names, *(f"tower.{name}" for name in names if name in of_tower)]


@dataclass(frozen=True)
class Taken:
    """The layers that a pattern takes, by their names; none where no list of names says the same, and why not."""

    names: tuple[str, ...]
    why: str


def matched(pattern: str, kind: str | None) -> Taken:
    """What a pattern takes, within the time that people wait for it."""
    try:
        with time_limit(PATIENCE):
            return _matched(re.compile(pattern), kind)
    except (re.error, OverflowError, RecursionError) as error:
        return Taken((), f"it is no regular expression ({error})")
    except TookTooLong:
        return Taken(
            (),
            f"it was not done with the names of the model's layers after {PATIENCE:g} seconds: a repeat inside a "
            "repeat, such as (a+)+, tries every way to cut a name into pieces",
        )


def _matched(asked: re.Pattern[str], kind: str | None) -> Taken:
    """PEFT wants the whole name to match: the name of today, or else the one that earlier versions of transformers had
    for the same layer."""
    facts = [FAMILIES[kind]] if kind in FAMILIES else list(FAMILIES.values())
    tower = [name for each in facts for name in each.tower_layers]
    today = _taken(asked, _TODAY, [f"model.{name}" for name in tower])
    if today is not None:
        return today
    for earlier in dict.fromkeys(each.earlier for each in facts if each.earlier):
        taken = _taken(asked, earlier, tower)
        if taken is not None:
            return Taken(taken.names, f"{taken.why}, by the names that transformers had for them before 4.52")
    return Taken((), f"it takes no layer of the model, whose names are such as {_TODAY}0.self_attn.q_proj")


def _taken(asked: re.Pattern[str], layers: str, tower: Sequence[str]) -> Taken | None:
    """None where it takes no layer of these names."""
    if any(asked.fullmatch(name.format(layer)) for name in tower for layer in _LAYERS):
        return Taken((), "it takes layers of the vision tower or of the projector too")
    names = []
    for name in LANGUAGE:
        part = "self_attn" if name in ATTENTION else "mlp"
        found = {asked.fullmatch(f"{layers}{layer}.{part}.{name}") is not None for layer in _LAYERS}
        if len(found) > 1:
            return Taken((), f"it takes {name} in some layers of the language model and not in others")
        names += [name] if True in found else []
    return Taken(tuple(names), "the layers that it takes") if names else None
