"""FLOPs of a micro-batch of images through a vision model, everything trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sameday.models import vision_bdh, vit
from sameday.models.flops import FUSED_BACKWARD, Counted, Flops, Work, is_fused, triangle
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vit import ViT


def count_images(model: VisionBDH | ViT, images: int) -> Counted:
    """Each matmul has two in the backward pass, but the patches', since pixels need no gradient."""
    shape, tokens = model.shape, model.tokens
    patches = tokens - (shape.pool == "class")
    size, classes = math.isqrt(patches) * shape.patch, model.head.out_features
    embedding = 2 * patches * 3 * shape.patch**2 * shape.width
    head = 2 * shape.width * classes
    kernels = _bdh(model) if isinstance(model, VisionBDH) else _vit(model)
    forward = (vision_bdh if isinstance(model, VisionBDH) else vit).forward_flops(shape, size, classes)
    linear = forward - embedding - head - kernels.attention
    executed = Work(
        layers=Flops(images * (linear + embedding), images * (2 * linear + embedding)),
        attention=Flops(images * kernels.attention, images * kernels.backward),
        head=Flops(images * head, images * 2 * head),
    )
    needed = Work(
        layers=Flops(images * (kernels.linear + embedding), images * (2 * kernels.linear + embedding)),
        attention=Flops(images * kernels.least_attention, images * kernels.least_backward),
        head=executed.head,
    )
    return Counted(executed, needed)


@dataclass(frozen=True)
class _Vision:
    """Of one image: its attention as it is computed, and what is needed at least of its linear layers and attention."""

    attention: int
    backward: int
    linear: int
    least_attention: int
    least_backward: int


def _bdh(model: VisionBDH) -> _Vision:
    shape, T, D = model.shape, model.tokens, model.shape.width
    units, values = shape.latents * D, shape.heads * D
    # Scores are of latents with themselves: half of them are the other half, and one matmul gives their gradient.
    scores, fused = T**2 * units, model.kernel == "fused"
    asking = 1 if shape.pool == "class" else T
    below = shape.levels - 1
    last_scores, last_back = (T * units, 2 * T * units) if asking == 1 else (triangle(T) * units, scores)
    return _Vision(
        attention=2 * shape.levels * (scores + T**2 * values),
        backward=2 * shape.levels * ((1 if fused else 2) * scores + 2 * T**2 * values),
        linear=2 * D * units * (below * 3 * T + T + 2 * asking),
        least_attention=2 * (below * (triangle(T) * units + T**2 * values) + last_scores + asking * T * values),
        least_backward=2 * (below * (scores + 2 * T**2 * values) + last_back + 2 * asking * T * values),
    )


def _vit(model: ViT) -> _Vision:
    shape, T, D = model.shape, model.tokens, model.shape.width
    weight = model.head.weight
    fused = is_fused(weight.device, weight.dtype, shape.heads, shape.heads, D // shape.heads, masked=False)
    asking = 1 if shape.pool == "class" else T
    below = shape.depth - 1
    least = 4 * T * D * (below * T + asking)
    return _Vision(
        attention=4 * shape.depth * T**2 * D,
        backward=2 * (FUSED_BACKWARD if fused else 4) * shape.depth * T**2 * D,
        linear=2 * D**2 * (below * T * (4 + 2 * shape.mlp) + 2 * T + (2 + 2 * shape.mlp) * asking),
        least_attention=least,
        least_backward=2 * least,
    )
