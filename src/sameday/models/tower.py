"""A frozen vision tower's attention as one operator: a few calls for all images, where the library has one for each,
and one graph of a block for torch.compile, whatever images come by; and its patch embedding as a matmul."""

# No `from __future__ import annotations`: torch reads the operator's schema from real annotations.
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.hardware.kernels import FLASH_CAPABILITY
from sameday.hardware.machine import capability_of
from sameday.kernels.split import variable_length

NUMBERS = 2
"""Raised where a joined tower is computed in another order: features that were cached before are not found then."""


@torch.library.custom_op("sameday::image_attention", mutates_args=())
def image_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    """(tokens, heads, width); tokens see those of their own image or window. `cu`, on the CPU, bounds them. Images or
    windows of one length that lie side by side are one call; of any lengths, where there is flash attention."""
    bounds = tuple(cu.tolist())
    lengths = [end - start for start, end in pairwise(bounds)]
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    if len(runs) > 1 and _flash(q):
        there = _sent(bounds, q.device)
        return variable_length(q, k, v, there, there, max(lengths), max(lengths), False, scale)[0]
    seen, first = torch.empty_like(q), 0
    for length, times in runs:
        here = slice(first, first := first + length * times)
        a, b, c = (x[here].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        seen[here] = F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2).flatten(0, 1)
    return seen


@image_attention.register_fake
def _(q, k, v, cu, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


def _flash(q: Tensor) -> bool:
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    return half and capability_of(q.device) >= FLASH_CAPABILITY


@lru_cache(maxsize=256)
def _sent(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """All blocks of a tower ask for the same ones."""
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def join_images(tower: Any) -> None:
    """For a frozen tower: the operator has no backward pass. All blocks get one class, so that what is compiled for one
    serves all."""
    opaque = _with_forward(type(tower.blocks[0].attn), _attend)
    for block in tower.blocks:
        block.attn.__class__ = opaque
    if tower.patch_embed.proj.weight.is_cuda:
        embed_by_matmul(tower)


def embed_by_matmul(tower: Any) -> None:
    """On a GPU, where the library's convolution runs without tensor cores."""
    tower.patch_embed.__class__ = _with_forward(type(tower.patch_embed), _embed)


def _with_forward(library: type[nn.Module], forward: Any) -> type[nn.Module]:
    return type(f"Joined{library.__name__}", (library,), {"forward": forward})


def _embed(self: Any, hidden_states: Tensor) -> Tensor:
    """What a convolution is that has a single place to go to."""
    weight = self.proj.weight
    return F.linear(hidden_states.to(weight.dtype).flatten(1), weight.flatten(1), self.proj.bias)


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
