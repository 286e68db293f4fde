"""What families have in common whose images are squares of one size: a tower of plain encoder blocks in which patches
see their own image, a projector behind it, and positions along one axis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sameday.data.questions.encode import Encoded
from sameday.data.questions.images import MAX_ASPECT_RATIO
from sameday.kernels.patches import Patching
from sameday.models.families import square_images
from sameday.models.families.base import Family, Grids, Parts
from sameday.models.flops import Flops, Pairs, Work, attention_flops, linear_flops, mlp_flops
from sameday.spec.vlm import VlmRecipe


class Tower(nn.Module):
    """The vision tower and its projector, which the library's model has side by side: the same modules, with a
    configuration that says all on which their output depends besides weights."""

    def __init__(self, model: Any, patching: Patching, **more: Any) -> None:
        super().__init__()
        self.vision, self.projector, self.patching = model.vision_tower, model.multi_modal_projector, patching
        self.config = deepcopy(self.vision.config)
        self.config.update(more)


class Square(Family):
    max_aspect_ratio = MAX_ASPECT_RATIO
    tower_names = ("vision_tower", "multi_modal_projector")
    projector_names = ("multi_modal_projector",)
    class_tokens = 0
    """Tokens that the tower has besides the patches of an image."""

    # Images and positions

    def load_image_processor(
        self, model: str, revision: str | None, backend: str, min_pixels: int | None, max_pixels: int | None
    ) -> Any:
        assert min_pixels is max_pixels is None, "the recipe is refused before"
        return square_images.load_image_processor(model, revision, backend)

    def pixel_limits(self, processor: Any) -> tuple[int, int]:
        return processor.image_size**2, processor.image_size**2

    def patching(self, processor: Any) -> Patching:
        return square_images.patching(processor)

    def grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        return square_images.grid(processor)

    def resize(self, processor: Any, image: Image.Image) -> np.ndarray:
        return square_images.resize(processor, image)

    def pixel_values(self, processor: Any, image: Image.Image, resize: bool = True) -> Tensor:
        return square_images.pixel_values(processor, image, resize)

    def image_settings(self, processor: Any) -> dict[str, Any]:
        return square_images.settings(processor)

    def positions(self, encoded: Encoded, merge: int) -> np.ndarray:
        return square_images.one_axis(encoded.length)

    def problems(self, config: Any, recipe: VlmRecipe) -> Iterator[str]:
        yield from square_images.other_sizes(config, recipe)

    # Decoder

    def parts(self, model: Any) -> Parts:
        return Parts(model.model.language_model, self.tower(model), model.lm_head)

    @abstractmethod
    def tower(self, model: Any) -> Tower: ...

    def rotary(self, text: Any, positions: Tensor, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
        rope = text.rotary_emb
        return square_images.rotary(rope.inv_freq, rope.attention_scaling, positions, dtype)

    # Vision tower

    def tower_patching(self, tower: Any) -> Patching:
        return Patching(*tower.patching)

    def tower_indices(self, tower: Any, grid: tuple[int, int], send: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {}

    def join_indices(self, each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {}

    def run_tower(self, tower: Any, patches: Tensor, grids: Grids, indices: Mapping[str, Tensor]) -> list[Tensor]:
        return [self.features(tower, square_images.whole_images(patches, grids[0], tower.patching)).flatten(0, 1)]

    @abstractmethod
    def features(self, tower: Any, images: Tensor) -> Tensor:
        """(images, tokens, width) of (images, 3, height, width)."""

    def used_blocks(self, tower: Any) -> Sequence[nn.Module]:
        """Those on which the output depends."""
        return list(tower.vision.encoder.layers)

    def idle(self, model: Any) -> Sequence[nn.Module]:
        tower = self.tower(model)
        used = {id(block) for block in self.used_blocks(tower)}
        behind = [block for block in tower.vision.encoder.layers if id(block) not in used]
        return [*behind, *(module for name, module in tower.vision.named_children() if name == "head")]

    def compilable_blocks(self, tower: Any) -> Sequence[nn.Module]:
        return self.used_blocks(tower)

    # FLOPs

    def tower_flops(
        self, tower: Any, grids: Grids, merge: int, backward_matmuls: Callable[[int, int], int | None]
    ) -> tuple[Work, list[bool]]:
        patches = sum(high * wide for high, wide in grids)
        embedding = tower.vision.embeddings.patch_embedding.weight
        flops = 2 * patches * embedding.numel()
        wanted = embedding.requires_grad
        work = Work(layers=Flops(flops, flops * wanted))
        tokens = patches + self.class_tokens * len(grids)
        pairs = sum((high * wide + self.class_tokens) ** 2 for high, wide in grids)
        blocks: Sequence[Any] = self.used_blocks(tower)
        for block in blocks:
            attn = block.self_attn
            seen = [linear_flops(linear, tokens, wanted) for linear in (attn.q_proj, attn.k_proj, attn.v_proj)]
            asks = [grows for _, grows in seen]
            scores = Pairs(pairs, backward_matmuls(attn.num_heads, attn.head_dim))
            attended = Work(attention=attention_flops(scores, attn.num_heads, attn.head_dim, asks))
            out, through = linear_flops(attn.out_proj, tokens, any(asks))
            mlp, wanted = mlp_flops(block.mlp, tokens, wanted or through)
            work = sum((each for each, _ in seen), work) + attended + out + mlp
        projected, wanted = self.projector_flops(tower, patches // merge**2, wanted)
        return work + projected, [wanted]

    def projector_flops(self, tower: Any, tokens: int, wanted: bool) -> tuple[Work, bool]:
        return mlp_flops(tower.projector, tokens, wanted)

    # A small one of random weights

    @torch.no_grad()
    def sharpen(self, model: nn.Module, factor: float) -> None:
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(factor)
