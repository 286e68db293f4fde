"""Which layers get adapters, where a config says it by a word or by a pattern instead of by names."""

from __future__ import annotations

import re
from collections.abc import Sequence

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LANGUAGE = (*ATTENTION, *MLP)
"""All linear layers of the language model."""
ALIKE = {"qwen2_vl": (), "qwen3_vl": (), "qwen2_5_vl": MLP, **dict.fromkeys(("llava", "gemma3"), ATTENTION[:3])}
"""By model type, names of them that layers of the tower have too."""
_BLOCK = "visual.blocks.{}."
# Layers of the vision tower and of the merger: a pattern that takes one of them takes more than the language model.
_TOWERS = {
    "qwen2_vl": (*(_BLOCK + name for name in ("attn.qkv", "attn.proj", "mlp.fc1")), "visual.merger.mlp.0"),
    "qwen2_5_vl": (*(_BLOCK + name for name in ("attn.qkv", "attn.proj", "mlp.gate_proj")), "visual.merger.mlp.0"),
    "qwen3_vl": (
        *(_BLOCK + name for name in ("attn.qkv", "attn.proj", "mlp.linear_fc1")),
        *("visual.merger.linear_fc1", "visual.deepstack_merger_list.{}.linear_fc1"),
    ),
}
_OTHERS = (
    *(f"vision_tower.vision_model.encoder.layers.{{}}.{name}" for name in ("self_attn.q_proj", "mlp.fc1")),
    *("multi_modal_projector.linear_1", "multi_modal_projector.mm_input_projection"),
)
_LAYERS = (0, 1, 7, 27)


def image_parts(kind: str | None) -> tuple[str, ...]:
    """Parts in front of the language model that have linear layers."""
    return ("tower",) if kind == "gemma3" else ("tower", "projector")


def of_all_parts(names: Sequence[str], kind: str | None) -> list[str]:
    """Names that PEFT looks for in the whole model, as a recipe says it: bare ones are the language model's alone."""
    return [*names, *(f"tower.{name}" for name in names if name in ALIKE.get(kind or "", ()))]


def matched(pattern: str, kind: str | None) -> list[str] | None:
    """The layers that a pattern takes, by their names; None where no list of names says the same: some layers alone,
    or the vision tower's too. PEFT wants the whole name to match."""
    try:
        asked = re.compile(pattern)
    except re.error:
        return None

    def takes(name: str) -> bool:
        return asked.fullmatch(f"model.{name}") is not None

    tower = _TOWERS.get(kind or "", (*_OTHERS, *(name for each in _TOWERS.values() for name in each)))
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
