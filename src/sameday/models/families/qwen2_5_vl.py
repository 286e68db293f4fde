"""Qwen2.5-VL: most of the tower's blocks see windows of an image, some all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sameday.models.families.base import Grids
from sameday.models.families.qwen import QwenVL, grid_thw


class Qwen25VL(QwenVL):
    model_type = "qwen2_5_vl"

    def tower_indices(self, tower: Any, grid: tuple[int, int], send: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        order, bounds = _windows(tower, [grid])
        windows = {"window_index": send(order), "cu_window_seqlens": bounds}
        return super().tower_indices(tower, grid, send) | windows

    def join_indices(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        before = accumulate((len(one["window_index"]) for one in each), initial=0)
        windows = [one["window_index"] + first for one, first in zip(each, before, strict=False)]
        return super().join_indices(each) | {"window_index": torch.cat(windows)}

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
