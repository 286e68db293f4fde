"""The vision tower made ready for torch.compile: its attention becomes one opaque operator, so that a block is one
graph whatever images come by."""

# No `from __future__ import annotations`: torch reads the operator's schema from real annotations.
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("sameday::image_attention", mutates_args=())
def image_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    """(tokens, heads, width); tokens see those of their own image or window. `cu`, on the CPU, bounds them. Images or
    windows of one length that lie side by side are one call."""
    seen, first = torch.empty_like(q), 0
    for length, run in groupby((cu[1:] - cu[:-1]).tolist()):
        here = slice(first, first := first + length * len(list(run)))
        a, b, c = (x[here].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        seen[here] = F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2).flatten(0, 1)
    return seen


@image_attention.register_fake
def _(q, k, v, cu, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


def make_compilable(tower: nn.Module) -> None:
    """For a frozen tower: the operator has no backward pass. All blocks get one class, so that what is compiled for one
    serves all."""
    blocks = list(tower.blocks)  # type: ignore[arg-type]
    library = type(blocks[0].attn)
    opaque = type(f"Opaque{library.__name__}", (library,), {"forward": _attend})
    for block in blocks:
        block.attn.__class__ = opaque


def _attend(
    self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> Tensor:
    """What the library's module computes, rotation in float32 included."""
    tokens = hidden_states.shape[0]
    q, k, v = self.qkv(hidden_states).view(tokens, 3, self.num_heads, -1).unbind(1)
    cos, sin = (x.float()[:, None] for x in position_embeddings)
    q, k = (_rotate(x.float(), cos, sin).to(v.dtype) for x in (q, k))
    seen = image_attention(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens, self.scaling)
    return self.proj(seen.reshape(tokens, -1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
