"""A pretrained model read from its files, whole and finite, in the format that a recipe asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from sameday.models.families import family_of
from sameday.spec.errors import BadInput
from sameday.spec.staged import staged
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import count, first_names

_NUMBER = re.compile(r"\.\d+\.")


def load_base(model: str, recipe: VlmRecipe, device: torch.device) -> Any:
    """The pretrained model, frozen parts in the recipe's format, or in what their codes are made of."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model, revision=recipe.revision)
    family_of(config.model_type).check_supported(config)
    # Codes are made of bf16 in every precision, layer by layer on the device: the whole need not fit there.
    coded = recipe.base_format != "precision"
    half = coded or recipe.precision == "bf16"
    # What is missing would be drawn at random, without a seed.
    base, loaded = read_weights(
        lambda: AutoModelForImageTextToText.from_pretrained(
            staged(model),
            revision=recipe.revision,
            dtype=torch.bfloat16 if half else torch.float32,
            attn_implementation="sdpa",
            device_map={"": device} if device.type == "cuda" and not coded else None,
            output_loading_info=True,
        ),
        model,
    )
    lacking = sorted(loaded["missing_keys"])
    if lacking:
        raise BadInput(f"{model}: its weights lack {len(lacking)} of the model's tensors: {first_names(lacking)}")
    if extra := _of_more_layers(loaded["unexpected_keys"], base):
        raise BadInput(
            f"{model}: its weights have {count(len(extra), 'tensor')} for which its config.json has no layer: "
            f"{first_names(extra)}"
        )
    bad = [name for name, parameter in base.named_parameters() if not parameter.isfinite().all()]
    if bad:
        raise BadInput(f"{model}: holds weights that are not finite: {first_names(bad)}")
    base.name_or_path = base.config._name_or_path = model  # adapters name their base, and a copy is soon gone
    return base.eval()


def _of_more_layers(names: Iterable[str], model: nn.Module) -> list[str]:
    """Of tensors that a model has no place for, those that it has in other layers. What else a file holds besides,
    such as buffers of an older release, belongs to no layer that was left out."""
    known = {_NUMBER.sub(".N.", name) for name in model.state_dict()}
    return sorted(name for name in names if _NUMBER.sub(".N.", name) in known)


def read_weights(read: Callable[[], Any], folder: Path | str) -> Any:
    """What `read` gives; BadInput where files cannot be read or do not fit."""
    try:
        return read()
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "mismatch" not in str(error):  # memory, among others
            raise
        why = str(error).strip().splitlines()
        raise BadInput(f"{folder}: its weights cannot be read: {why[0] if why else type(error).__name__}") from None
