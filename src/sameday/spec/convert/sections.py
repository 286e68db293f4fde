"""Sections of a nested config about something else: their keys are not taken for those of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sameday.spec.convert import keys

_ELSEWHERE = {
    **dict.fromkeys((*keys.HELD_OUT, "test", "generation", "inference"), keys.EVALUATION),
    **dict.fromkeys(("logging", "tracking", "monitoring"), keys.LOGGING),
    **dict.fromkeys(("slurm", "cluster", "distributed", "hydra"), keys.FILES),
    "launch": "how it was started changes nothing",
    **dict.fromkeys(
        keys.CACHES, "plan.cache and plan.cache_dir say it; entries of another trainer cannot be read here"
    ),
}
# Wherever these stand, they are the training's: how often to evaluate and save, when to stop, which weights to keep.
_ANYWHERE = ("eval_st", "save_st", "logging_steps", "early_stopping", "load_best", "metric_for_best", "greater_is")

_DISTILLED = ("teacher", "student", "distill", "distillation", "kd")
_DISTILLATION = "a model would learn from another one (distillation), and no recipe says that; --drop {} leaves it out"
_VISION = ("vision", "visual", "vit", "vision_tower", "vision_encoder", "vision_model", "image_encoder")
_PROJECTOR = ("projector", "merger", "aligner", "connector", "multi_modal_projector")
# What a section about images says of the whole training.
_OF_IMAGES = (
    *("min_pixels", "max_pixels", "use_fast", "use_vision_cache", "vision_cache_dir", "freeze_vision_tower"),
    *("freeze_multi_modal_projector", "image_size", "image_resolution", "resize", "resized_height", "resized_width"),
    *("max_image_size", "augmentation", "image_root", "image_key", "image_column", "image_field"),
)


@dataclass(frozen=True)
class Part:
    """A section about another model or a part of this one: why its keys are refused, and whether it is turned off."""

    why: str
    off: bool


def elsewhere(key: str, dropped: Mapping[str, str], starts: Mapping[str, str]) -> str | None:
    """Why a key that stands in a section about something else is dropped."""
    *sections, last = key.split(".")
    named = ".".join(key.split(".")[-2:]) in keys.ALIASES
    if named or keys.ALIASES.get(last, last).startswith(_ANYWHERE):
        return None
    whys = (_ELSEWHERE.get(each.lower()) or dropped.get(each) or keys.begins(each, starts) for each in sections)
    return next((why for why in whys if why), None)


def of_another(key: str, name: str | None, leaves: Mapping[str, Any]) -> Part | None:
    """None for the training's own keys. `name` is Hugging Face's, if it is known."""
    steps = key.split(".")
    for place, section in enumerate(each.lower() for each in steps[:-1]):
        root = ".".join(steps[: place + 1])
        off = any(keys.cast(leaves.get(f"{root}.{switch}"), bool) is False for switch in ("enabled", "enable", "use"))
        if section in _DISTILLED:
            return Part(_DISTILLATION.format(root), off)
        part = {**dict.fromkeys(_VISION, "tower"), **dict.fromkeys(_PROJECTOR, "projector")}.get(section)
        if part is None or name in _OF_IMAGES or name is None:
            continue
        if name == "learning_rate":
            return Part(
                f"the {part} would have a learning rate of its own: by hand set recipe.learning_rates.{part}", off
            )
        return Part(f"it is about the {part} alone, and no recipe says that; --drop {root} leaves it out", off)
    return None
