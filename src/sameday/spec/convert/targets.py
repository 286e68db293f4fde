"""Which layers get adapters, where a config says it by a word or by a pattern instead of by names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sameday.spec.convert.families import ATTENTION, FAMILIES, MLP, NOT_LINEAR, PROJECTORS, FamilyFacts
from sameday.spec.lora import OF_IMAGES
from sameday.spec.time_limit import TookTooLong, time_limit

LANGUAGE = (*ATTENTION, *MLP)
"""All linear layers of the language model."""
PATIENCE = 2.0
"""Seconds of computing for a pattern of layers, which takes milliseconds."""
_LAYERS = (0, 1, 7, 27)
_BLOCKS = range(48)
"""The same of a tower, of which no layer may be taken."""
_TODAY = "model.language_model.layers."
_DECODER = (*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP))
_ENDS = {"lm_head": "lm_head", "embed_tokens": "the table of embeddings"}
"""Layers before and behind those of the language model."""


def image_parts(kind: str | None) -> tuple[str, ...]:
    """Parts in front of the language model that have linear layers."""
    return FAMILIES[kind].image_parts if kind in FAMILIES else OF_IMAGES


def names_of_layers(targets: Any) -> Any:
    """As a list, where they stand in one text; anything else as it is. A text of letters and dots is a pattern too, of
    one layer with this whole name."""
    if isinstance(targets, str) and targets != "all" and re.fullmatch(r"[\w.]+(?:[,\s]+[\w.]+)*", targets):
        return re.split(r"[,\s]+", targets)
    return targets


def alike(targets: Any, kind: str | None) -> list[str] | None:
    """Which of these names are those of layers of the tower, alone or besides the language model's; None where that is
    not known, or where the projector has some of them."""
    names = names_of_layers(targets)
    if kind not in FAMILIES or not isinstance(names, list):
        return None
    parts = [_parts_with(str(name), FAMILIES[kind]) for name in names]
    if not all(parts) or any("projector" in each for each in parts):
        return None
    return [name for name, each in zip(names, parts, strict=True) if "tower" in each]


def of_all_parts(names: Sequence[str], kind: str | None) -> tuple[list[str], str]:
    """Names that PEFT looks for in the whole model, as a recipe says it, and in what it differs: a recipe has the part
    before all names but the language model's. What is found nowhere is left for the run to refuse."""
    made: list[str] = []
    besides: list[str] = []
    whys: dict[str, None] = {}
    for name in map(str, names):
        parts = _parts_with(name, FAMILIES[kind]) if kind in FAMILIES else []
        of_images = [f"{part}.{name}" for part in parts if part in OF_IMAGES]
        if of_images and "decoder" in parts:
            whys["PEFT took the tower's of these names too"] = None
            besides += of_images
        elif of_images:
            whys["the language model has no layers of some of these names"] = None
        made += of_images if of_images and "decoder" not in parts else [name]
    return list(dict.fromkeys([*made, *besides])), "; ".join(whys)


def _parts_with(asked: str, facts: FamilyFacts) -> list[str]:
    """The parts of the model in which PEFT finds layers for a name: those that have it, or end with it. None where it
    takes a layer that is not linear, which no recipe adapts."""
    numbers = [int(each) for each in re.findall(r"\b\d{1,4}\b", asked)] or [0]
    parts: dict[str, None] = {}
    for layer in (*(f"language_model.layers.{{}}.{each}" for each in _DECODER), *facts.tower_layers):
        if not any(f".model.{layer.format(number)}".endswith(f".{asked}") for number in numbers):
            continue
        if NOT_LINEAR.search(layer):
            return []
        of_tower = "projector" if PROJECTORS.match(layer) else "tower"
        parts["decoder" if layer.startswith("language_model.") else of_tower] = None
    return [part for part in ("decoder", *OF_IMAGES) if part in parts]


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
    if any(asked.fullmatch(name.format(layer)) for name in tower for layer in _BLOCKS):
        return Taken((), "it takes layers of the vision tower or of the projector too")
    for end, what in _ENDS.items():
        root = layers.removesuffix("layers.")
        if any(asked.fullmatch(f"{before}{end}") for before in ("", root, root.removesuffix("model."))):
            return Taken((), f"it takes {what} too")
    names = []
    for layer_name in _DECODER:
        name = layer_name.rpartition(".")[2]
        found = {asked.fullmatch(f"{layers}{layer}.{layer_name}") is not None for layer in _LAYERS}
        if len(found) > 1:
            return Taken((), f"it takes {name} in some layers of the language model and not in others")
        names += [name] if True in found else []
    return Taken(tuple(names), "the layers that it takes") if names else None
