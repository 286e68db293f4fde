"""Which layers get adapters, where a config says it by a word or by a pattern instead of by names."""

from __future__ import annotations

import re

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# Layers of the vision tower and of the merger, of all families: a pattern that takes one of them takes more than the
# language model.
_TOWER = (
    *(f"visual.blocks.{{}}.attn.{name}" for name in ("qkv", "proj")),
    *(f"visual.blocks.{{}}.mlp.{name}" for name in (*MLP, "fc1", "fc2", "linear_fc1", "linear_fc2")),
    *("visual.merger.mlp.0", "visual.merger.linear_fc1", "visual.deepstack_merger_list.{}.linear_fc1"),
)
_LAYERS = (0, 1, 7, 27)


def language_layers(kind: str | None) -> list[str]:
    """All linear layers of the language model. Where the tower may have layers of the same names (`kind` is the model
    type, None where it is not known), they are told apart by the decoder's name."""
    names = (*ATTENTION, *MLP)
    alike = kind not in ("qwen2_vl", "qwen3_vl")
    return [f"language_model.{name}" if alike and name in MLP else name for name in names]


def matched(pattern: str, kind: str | None) -> list[str] | None:
    """The layers that a pattern takes, by their names; None where no list of names says the same: some layers alone,
    or the vision tower's too. PEFT wants the whole name to match."""
    try:
        asked = re.compile(pattern)
    except re.error:
        return None

    def takes(name: str) -> bool:
        return asked.fullmatch(f"model.{name}") is not None

    if any(takes(name.format(layer)) for name in _TOWER for layer in _LAYERS):
        return None
    names = []
    for short, name in zip((*ATTENTION, *MLP), language_layers(kind), strict=True):
        part = "self_attn" if short in ATTENTION else "mlp"
        found = {takes(f"language_model.layers.{layer}.{part}.{short}") for layer in _LAYERS}
        if len(found) > 1:
            return None
        names += [name] if True in found else []
    return names or None
