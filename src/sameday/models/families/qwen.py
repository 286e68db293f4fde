"""What all Qwen-VL families have in common: ChatML, one image processor, M-RoPE, a tower of blocks whose patches see
their own image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sameday.data.questions.encode import Encoded
from sameday.data.questions.family import Markers
from sameday.kernels.patches import Patching
from sameday.models.families import qwen_images, qwen_tiny
from sameday.models.families.base import Family, Grids, Parts, TinyTokenizer
from sameday.models.flops import Flops, Pairs, Work, attention_flops, linear_flops, mlp_flops
from sameday.models.tower import join_images


class QwenVL(Family):
    markers = Markers(
        image="<|image_pad|>",
        end_of_turn="<|im_end|>",
        user_header="<|im_start|>user",
        special=(
            "<|image_pad|>",
            "<|video_pad|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|endoftext|>",
        ),
    )
    max_aspect_ratio = qwen_images.MAX_ASPECT_RATIO
    position_axes = 3
    tower_names = ("visual",)
    projector_names = ("visual.merger", "visual.deepstack_merger_list")
    video_processor: str | None = "Qwen2VLVideoProcessor"

    # Images and positions

    def load_image_processor(
        self, model: str, revision: str | None, backend: str, min_pixels: int | None, max_pixels: int | None
    ) -> Any:
        return qwen_images.load_image_processor(model, revision, backend, min_pixels, max_pixels)

    def pixel_limits(self, processor: Any) -> tuple[int, int]:
        return qwen_images.pixel_limits(processor)

    def patching(self, processor: Any) -> Patching:
        return qwen_images.patching(processor)

    def grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        return qwen_images.grid(processor, width, height)

    def resize(self, processor: Any, image: Image.Image) -> np.ndarray:
        return qwen_images.resize(processor, image)

    def positions(self, encoded: Encoded, merge: int) -> np.ndarray:
        return qwen_images.mrope_positions(encoded, merge)

    def inputs_in_python(self) -> str:
        return qwen_images.INPUTS_IN_PYTHON.format(slot=self.markers.image)

    # Decoder

    def parts(self, model: Any) -> Parts:
        return Parts(model.model.language_model, model.model.visual, model.lm_head)

    def rotary(self, text: Any, positions: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
        """Elementwise, where the library multiplies matrices: TF32 would corrupt the angles."""
        rope = text.rotary_emb
        angles = positions[..., None].float() * rope.inv_freq.float()
        cos, sin = (rope.recomposition_frequencies(f(angles) * rope.attention_scaling) for f in (torch.cos, torch.sin))
        return cos.to(dtype), sin.to(dtype)

    # Vision tower

    def tower_patching(self, tower: Any) -> Patching:
        config = tower.config
        return Patching(config.patch_size, config.spatial_merge_size, config.temporal_patch_size)

    def feature_shape(self, tower: Any) -> tuple[int, int]:
        return 1 + len(self.deepstack_mergers(tower)), self.feature_width(tower.config)

    def feature_width(self, config: Any) -> int:
        return int(config.out_hidden_size)

    def deepstack_mergers(self, tower: Any) -> dict[int, nn.Module]:
        """By the block whose output they merge; most families have none."""
        return {}

    def tower_indices(self, tower: Any, grid: tuple[int, int], send: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        from transformers import vision_utils

        one = grid_thw([grid])
        return {
            "position_ids": send(vision_utils.get_vision_position_ids(one, tower.spatial_merge_size)),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(one),
        }

    def join_indices(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: (joined_bounds if name.startswith("cu_") else torch.cat)([one[name] for one in each])
            for name in each[0]
        }

    def run_tower(self, tower: Any, patches: Tensor, grids: Grids, indices: Mapping[str, Tensor]) -> list[Tensor]:
        return [tower(patches, grid_thw=grid_thw(grids), **indices).pooler_output]

    def join_images(self, tower: Any) -> None:
        join_images(tower)

    def compilable_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return list(tower.blocks)

    # FLOPs

    def tower_flops(
        self, tower: Any, grids: Grids, merge: int, backward_matmuls: Callable[[int, int], int | None]
    ) -> tuple[Work, list[bool]]:
        patches = sum(high * wide for high, wide in grids)
        merged = patches // merge**2
        embedding = tower.patch_embed.proj.weight
        flops = 2 * patches * embedding.numel()
        work = Work(layers=Flops(flops, flops * embedding.requires_grad))
        wanted = embedding.requires_grad
        attn = tower.blocks[0].attn
        backward = backward_matmuls(attn.num_heads, attn.head_dim)
        mergers = self.deepstack_mergers(tower)
        deepstack: list[bool] = []
        for number, block in enumerate(tower.blocks):
            qkv, ask = linear_flops(block.attn.qkv, patches, wanted)
            pairs = Pairs(self.patch_pairs(tower, grids, number), backward)
            attended = Work(attention=attention_flops(pairs, attn.num_heads, attn.head_dim, (ask, ask, ask)))
            out, through = linear_flops(block.attn.proj, patches, ask)
            mlp, wanted = mlp_flops(block.mlp, patches, wanted or through)
            work += qkv + attended + out + mlp
            if number in mergers:
                merger, through = mlp_flops(mergers[number], merged, wanted)
                work += merger
                deepstack.append(through)
        merger, through = mlp_flops(tower.merger, merged, wanted)
        return work + merger, [through, *deepstack]

    def patch_pairs(self, tower: Any, grids: Grids, block: int) -> int:
        """Pairs of patches that see each other in a block: all of an image."""
        return sum((high * wide) ** 2 for high, wide in grids)

    # A small one of random weights

    def tiny_tokenizer(self) -> TinyTokenizer:
        return TinyTokenizer(qwen_tiny.SPECIAL, "<|im_end|>", "<|endoftext|>", qwen_tiny.CHAT_TEMPLATE)

    def tiny_config(self, tokenizer: Any, text: Mapping[str, Any], vision: Mapping[str, Any]) -> Any:
        sizes = qwen_tiny.text_sizes(tokenizer) | dict(text)
        vision_sizes = self.tiny_vision(sizes["hidden_size"]) | dict(vision)
        self.complete_tiny(sizes, vision_sizes)
        return qwen_tiny.config(self.model_type, tokenizer, sizes, vision_sizes)

    def tiny_vision(self, out_width: int) -> dict[str, Any]:
        return {**qwen_tiny.VISION, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": out_width}

    def complete_tiny(self, text: dict[str, Any], vision: dict[str, Any]) -> None:
        """Set what the family has besides, where it is not given."""
        # The usual 0.02 is for widths in the thousands; at this one it would leave the signal near zero.
        vision.setdefault("initializer_range", vision["hidden_size"] ** -0.5)
        text.setdefault("rope_parameters", qwen_tiny.rope(text))

    def tiny_image_processor(self, config: Any) -> Any:
        return qwen_tiny.image_processor(config.vision_config)

    @torch.no_grad()
    def sharpen(self, model: nn.Module, factor: float) -> None:
        names = dict(model.named_parameters())
        # Where queries and keys are normalised, only the norms' own weights can make them larger.
        normed = any(name.endswith("q_norm.weight") for name in names)
        ends = ("q_norm.weight", "k_norm.weight") if normed else ("q_proj.weight", "k_proj.weight")
        for name, weight in names.items():
            if name.endswith(ends):
                weight.mul_(factor)
            elif name.endswith("attn.qkv.weight"):
                weight[: 2 * weight.shape[0] // 3].mul_(factor)


def joined_bounds(each: Sequence[Tensor]) -> Tensor:
    """Where segments begin and end, from those of parts that lie one after the other; on the CPU."""
    ends, last = [each[0][:1]], 0
    for one in each:
        ends.append(one[1:] + last)
        last += int(one[-1])
    return torch.cat(ends)


def grid_thw(grids: Grids) -> Tensor:
    """As the library wants grids: one frame each."""
    return torch.tensor([(1, high, wide) for high, wide in grids])
