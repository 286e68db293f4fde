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
_ANYWHERE = (
    *("eval_st", "eval_delay", "save_st", "logging_steps", "early_stopping", "load_best", "metric_for_best"),
    "greater_is",
)
# Settings of validation and of a cache have the names of the training's and mean something else.
_APART = (*keys.HELD_OUT, "test", "generation", "inference", *keys.CACHES)
# What stands in all other sections is the training's where it has such a name, but for what has a meaning of its own
# there, and for what is compared with the training's instead (deepspeed.py).
_TRAINING = {*keys.DIRECT, *keys.COMPUTED, *keys.NEUTRAL} - {
    *("model_name_or_path", "revision", "run_name", "output_dir", "system_prompt", "template", "instruction_template"),
    *("stage", "stages", "chat_template", "image_size", "image_resolution", "resize", *keys.SETS),
}
_OWN_MEANING = ("scheduler", "r")
_COMPARED = ("launch.gradient_accumulation_steps", "launch.gradient_clipping")

_DISTILLED = ("teacher", "student", "distill", "distillation", "kd")
_DISTILLATION = "a model would learn from another one (distillation), and no recipe says that; --drop {} leaves it out"
_VISION = ("vision", "visual", "vit", "vision_tower", "vision_encoder", "vision_model", "image_encoder")
_PROJECTOR = ("projector", "merger", "aligner", "connector", "multi_modal_projector")
_PARTS = {**dict.fromkeys(_VISION, "tower"), **dict.fromkeys(_PROJECTOR, "projector")}
# What a section about images says of the whole training.
_OF_IMAGES = (
    *("min_pixels", "max_pixels", "use_fast", "use_vision_cache", "vision_cache_dir", "freeze_vision_tower"),
    *("freeze_multi_modal_projector", "image_size", "image_resolution", "resize", "resized_height", "resized_width"),
    *("max_image_size", "augmentation", "image_root", "image_key"),
)


@dataclass(frozen=True)
class Part:
    """A section about another model or a part of this one: why its keys are refused, and whether it is turned off."""

    why: str
    off: bool


def elsewhere(
    key: str, name: str | None, leaves: Mapping[str, Any], dropped: Mapping[str, str], starts: Mapping[str, str]
) -> str | None:
    """Why a key that stands in a section about something else is dropped. `name` is Hugging Face's, if it is known."""
    *sections, last = key.split(".")
    named = ".".join(key.split(".")[-2:]) in keys.ALIASES
    of_deepspeed = any(each.startswith("deepspeed") for each in sections)
    if (named or keys.ALIASES.get(last, last).startswith(_ANYWHERE)) and not of_deepspeed:
        return None
    whys = {each: _ELSEWHERE.get(each.lower()) or dropped.get(each) or keys.begins(each, starts) for each in sections}
    why = next(filter(None, whys.values()), None)
    if why is None or name not in _TRAINING or last in _OWN_MEANING:
        return why
    if of_deepspeed or key in _COMPARED or any(_apart(each, why) for each, why in whys.items()):
        return why
    off = any(whys[each] and is_off(".".join(sections[: place + 1]), leaves) for place, each in enumerate(sections))
    return "its section is turned off" if off else None


def _apart(section: str, why: str | None) -> bool:
    return section.lower() in _APART or why == keys.EVALUATION


def is_off(section: str, leaves: Mapping[str, Any]) -> bool:
    """Whether a section has a switch that turns it off."""
    return any(keys.cast(leaves.get(f"{section}.{switch}"), bool) is False for switch in ("enabled", "enable", "use"))


def rate_of_part(key: str, name: str | None) -> str | None:
    """What a learning rate in a section about a part of the model is called elsewhere; None for all other keys."""
    part = next(filter(None, (_PARTS.get(each.lower()) for each in key.split(".")[:-1])), None)
    return next(rate for rate, its in keys.RATES.items() if its == part) if part and name == "learning_rate" else None


def of_another(key: str, name: str | None, leaves: Mapping[str, Any]) -> Part | None:
    """None for the training's own keys. `name` is Hugging Face's, if it is known."""
    steps = key.split(".")
    for place, section in enumerate(each.lower() for each in steps[:-1]):
        root = ".".join(steps[: place + 1])
        off = is_off(root, leaves)
        if section in _DISTILLED:
            return Part(_DISTILLATION.format(root), off)
        part = _PARTS.get(section)
        if part is None or name in _OF_IMAGES or name is None or name in keys.RATES:
            continue
        return Part(f"it is about the {part} alone, and no recipe says that; --drop {root} leaves it out", off)
    return None
