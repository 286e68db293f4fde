"""Qwen3-VL: learned positions in the tower, interpolated to the image's grid, and DeepStack: features of some of the
tower's blocks are added after the first decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from sameday.models.families import qwen_tiny
from sameday.models.families.base import Grids
from sameday.models.families.qwen import QwenVL, grid_thw


class Qwen3VL(QwenVL):
    model_type = "qwen3_vl"
    video_processor = "Qwen3VLVideoProcessor"

    def deepstack_mergers(self, tower: Any) -> dict[int, nn.Module]:
        return dict(zip(tower.deepstack_visual_indexes, tower.deepstack_merger_list, strict=True))

    def tower_indices(self, tower: Any, grid: tuple[int, int], send: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        from transformers import vision_utils

        neighbours, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw([grid]),
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.config.spatial_merge_size,
        )
        interpolation = {"interp_indices": send(neighbours), "interp_weights": send(weights)}
        return super().tower_indices(tower, grid, send) | interpolation

    def run_tower(self, tower: Any, patches: Tensor, grids: Grids, indices: Mapping[str, Tensor]) -> list[Tensor]:
        out = tower(patches, grid_thw=grid_thw(grids), **indices)
        return [out.pooler_output, *(out.deepstack_features or [])]

    def complete_tiny(self, text: dict[str, Any], vision: dict[str, Any]) -> None:
        text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
        text.setdefault("rope_parameters", {**qwen_tiny.rope(text), "mrope_interleaved": True})
        vision.setdefault("num_position_embeddings", 256)
        vision.setdefault("deepstack_visual_indexes", list(range(min(2, vision["depth"]))))
        super().complete_tiny(text, vision)


FAMILY = Qwen3VL()
