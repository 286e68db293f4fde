"""A recipe in the terms of a plain loop around transformers and PEFT: what such a loop cannot do, and the settings and
conversations that it is given for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sameday.data.questions.sample import Sample
from sameday.spec.load import resolve_model
from sameday.spec.staged import staged
from sameday.spec.vlm import VlmRecipe

DONE_ALIKE = """
task model revision start_adapter stage_before train train_vision lora base_format double_quant stages data categories
prompt system_prompt min_pixels max_pixels image_backend max_length order loss_weight answer_end precision
effective_batch optimizer learning_rate learning_rates weight_decay betas eps max_grad_norm schedule warmup_ratio
warmup_steps
num_epochs max_steps seed best evaluate
"""
"""Fields of a recipe that a plain loop follows, or that `lost` speaks of. One that is added later is refused until
somebody says here that it makes no difference, or tells the loop about it."""
LORA_ALIKE = frozenset({"r", "alpha", "dropout", "target_modules", "rslora", "dora"})
CHOSEN = ("min_pixels", "max_pixels", "image_backend", "max_length", "loss_weight", "answer_end", "system_prompt")


def lost(recipe: VlmRecipe) -> Iterator[str]:
    """What a plain loop of transformers and PEFT does not do, each in a few words."""
    if recipe.train != "lora":
        yield f"train {recipe.train} (what is compared are adapters)"
    if recipe.base_format != "precision":
        yield f"base_format {recipe.base_format}"
    if recipe.stages:
        yield "stages (--set recipe.stages=[] is one training)"
    asked = recipe.identity()
    for name in sorted(asked.keys() - set(DONE_ALIKE.split())):
        yield name
    for name in sorted((asked.get("lora") or {}).keys() - LORA_ALIKE):
        yield f"lora.{name}"


def settings(recipe: VlmRecipe, home: Path) -> dict[str, Any]:
    """By the names of a recipe."""
    lora = recipe.lora
    return {
        "model": staged(resolve_model(home, recipe.model)),
        "revision": recipe.revision,
        "r": lora.r,
        "alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "rslora": lora.rslora,
        "dora": lora.dora,
        **{name: getattr(recipe, name) for name in CHOSEN},
    }


def conversation(sample: Sample) -> dict[str, Any]:
    """A question as any trainer takes it: turns with places for its images, and their files."""
    return {
        "id": sample.id,
        "name": sample.where,
        "messages": [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                    for part in message.parts
                ],
            }
            for message in sample.messages
        ],
        "images": [
            staged(sample.images[part].path)
            for message in sample.messages
            for part in message.parts
            if not isinstance(part, str)
        ],
    }
