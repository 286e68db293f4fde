"""Qwen2-VL: in every block of the tower a patch sees all of its image, and what the configuration calls `hidden_size`
is the width of its output."""

from __future__ import annotations

from typing import Any

from sameday.models.families import qwen_tiny
from sameday.models.families.qwen import QwenVL


class Qwen2VL(QwenVL):
    model_type = "qwen2_vl"

    def feature_width(self, config: Any) -> int:
        return int(config.hidden_size)

    def tiny_vision(self, out_width: int) -> dict[str, Any]:
        return {**qwen_tiny.VISION, "embed_dim": 64, "mlp_ratio": 2, "hidden_size": out_width}

    def complete_tiny(self, text: dict[str, Any], vision: dict[str, Any]) -> None:
        text.setdefault("use_sliding_window", False)
        vision.setdefault("initializer_range", vision["embed_dim"] ** -0.5)
        super().complete_tiny(text, vision)


FAMILY = Qwen2VL()
