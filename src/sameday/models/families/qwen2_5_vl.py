"""Qwen2.5-VL: most of the tower's blocks see windows of an image, some all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sameday.models.families.base import Grids
from sameday.models.families.qwen import QwenVL, grid_thw


class Qwen25VL(QwenVL):
    model_type = "qwen2_5_vl"

    def tower_indices(self, tower: Any, grids: Grids, send: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        order, bounds = _windows(tower, grids)
        windows = {"window_index": send(order), "cu_window_seqlens": bounds}
        return super().tower_indices(tower, grids, send) | windows

    def patch_pairs(self, tower: Any, grids: Grids, block: int) -> int:
        if block in tower.fullatt_block_indexes:
            return super().patch_pairs(tower, grids, block)
        _, bounds = _windows(tower, grids)
        return int((bounds.diff() ** 2).sum())

    def complete_tiny(self, text: dict[str, Any], vision: dict[str, Any]) -> None:
        text.setdefault("use_sliding_window", False)
        vision.setdefault("window_size", 4 * vision["patch_size"])
        vision.setdefault("fullatt_block_indexes", [vision["depth"] - 1])
        super().complete_tiny(text, vision)


def _windows(tower: Any, grids: Grids) -> tuple[Tensor, Tensor]:
    """The order of merged patches window by window, and where windows begin and end."""
    from transformers.vision_utils import get_vision_window_index

    order, bounds = get_vision_window_index(
        grid_thw(grids),
        spatial_merge_size=tower.spatial_merge_size,
        window_size=tower.window_size,
        patch_size=tower.patch_size,
    )
    return order, bounds


FAMILY = Qwen25VL()
