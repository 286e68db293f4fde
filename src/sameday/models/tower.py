"""A frozen vision tower's attention as one operator: a few calls for all images, where the library has one for each,
and one graph of a block for torch.compile, whatever images come by; and its patch embedding as a matmul."""

# No `from __future__ import annotations`: torch reads the operator's schema from real annotations.
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.hardware.kernels import FLASH_CAPABILITY
from sameday.hardware.machine import capability_of
from sameday.kernels.image_attention import TILE, attend_in_runs
from sameday.kernels.split import variable_length

HALF = (torch.bfloat16, torch.float16)
USED_ON: frozenset[tuple[int, int]] = frozenset()
"""Compute capabilities of the GPUs that get our kernel: none yet. With capability 9.0 it is faster than flash attention
(`bench/attention.py`), but one of its tiles ended with an illegal memory access there, and why is not known."""
WIDTHS = (64, 72, 80)
"""Of the heads that towers have."""
TRIED = (0, 384, 387, 487, 647, 3000)
"""Bounds of the runs that our kernel is tried on: of no, one, two and many whole tiles of keys, and of some more."""
FARTHEST = 0.05
"""From SDPA, relatively, for any row of any head to be trusted: in bf16 both are some thousandths from the exact
result."""
NUMBERS = 2
"""Raised where a joined tower is computed in another order: features that were cached before are not found then."""


@torch.library.custom_op("sameday::image_attention", mutates_args=())
def image_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    """(tokens, heads, width); tokens see those of their own image or window. `cu`, on the CPU, bounds them. Images or
    windows of one length that lie side by side are one call; of any lengths, where a GPU has our kernel for it or flash
    attention. Windows are shorter than the kernel's tiles."""
    bounds = tuple(cu.tolist())
    lengths = [end - start for start, end in pairwise(bounds)]
    mixed, long = len(set(lengths)) > 1, len(q) >= TILE.queries * len(lengths)
    if mixed and long and own_kernel(q.device, q.dtype, *q.shape[1:]):
        return attend_in_runs(q, k, v, bounds, scale)
    if mixed and _flash(q):
        there = _sent(bounds, q.device)
        return variable_length(q, k, v, there, there, max(lengths), max(lengths), False, scale)[0]
    return _run_by_run(q, k, v, bounds, scale)


@image_attention.register_fake
def _(q, k, v, cu, scale):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape)


def _run_by_run(q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], scale: float) -> Tensor:
    """By SDPA, those of one length that lie side by side in one call."""
    seen, first = torch.empty_like(q), 0
    for length, run in groupby(end - start for start, end in pairwise(bounds)):
        here = slice(first, first := first + length * len(list(run)))
        a, b, c = (x[here].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        seen[here] = F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2).flatten(0, 1)
    return seen


@cache
def own_kernel(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> bool:
    """Whether `attend_in_runs` is used there: where it may be, and gave what SDPA gives. Asked before the first images,
    since it is compiled for that: a run would stall in its middle."""
    if device.type != "cuda" or dtype not in HALF or width not in WIDTHS or find_spec("triton") is None:
        return False
    if capability_of(device) not in USED_ON:
        return False
    why = _distrusted(device, dtype, heads, width)
    if why is not None:
        warnings.warn(
            f"our attention kernel for images of several sizes is not used on {torch.cuda.get_device_name(device)} "
            f"({heads} heads of {width}): {why}. Flash attention computes the same, and takes longer",
            stacklevel=2,
        )
    return why is None


def _distrusted(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> str | None:
    """What is wrong with it, by numbers or because it is not compiled. A crash of the GPU is not caught."""
    made = torch.randn(3, TRIED[-1], heads, width, device=device, generator=torch.Generator(device).manual_seed(0))
    q, k, v = made.to(dtype).unbind()
    wanted = _run_by_run(q, k, v, TRIED, width**-0.5).float()
    try:
        found = attend_in_runs(q, k, v, TRIED, width**-0.5)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    off = float(((found - wanted).norm(dim=2) / wanted.norm(dim=2)).max())
    return None if off <= FARTHEST else f"a row is {off:.2g} away from PyTorch's, relatively; allowed: {FARTHEST:g}"


def _flash(q: Tensor) -> bool:
    half = q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0
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
    weight = tower.patch_embed.proj.weight
    if weight.is_cuda:
        embed_by_matmul(tower)
        attention = tower.blocks[0].attn
        heads = attention.num_heads
        own_kernel(weight.device, weight.dtype, heads, attention.qkv.out_features // (3 * heads))


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
