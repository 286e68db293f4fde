"""Attention within runs of tokens of any lengths, forward alone, by the Triton kernel of `image_attention_triton`: what
a frozen vision tower needs of its images."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sameday.kernels.fused_attention import with_columns_together


class Tile(NamedTuple):
    """Queries and keys of a tile, warps, stages of the pipeline."""

    queries: int = 128
    keys: int = 64
    warps: int = 4
    stages: int = 3


TILE = Tile()
"""The fastest of those that were timed on an H200, in bf16 and with heads of 72. The same tile with eight warps ends
there with an illegal memory access."""


def attend_in_runs(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], scale: float, tile: Tile = TILE) -> Tensor:
    """(tokens, heads, width); a token sees all of its run, and `bounds` are where runs begin and end. On a GPU that
    copies tiles by tensor maps, or in Triton's interpreter."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sameday.kernels import image_attention_triton as kernels

    q, k, v = with_columns_together(q, k, v)
    _, heads, width = q.shape
    power, more = columns(width)
    out, tiles = q.new_empty(q.shape), _tiles(bounds, tile.queries, q.device)
    parts = [
        TensorDescriptor.from_tensor(x.transpose(0, 1), [1, rows, wide])
        for x, rows in ((q, tile.queries), (k, tile.keys), (v, tile.keys))
        for wide in (power, more or power)
    ]
    with torch.cuda.device_of(q):
        kernels.image_attention[(tiles.shape[1], heads)](
            *parts, out, tiles, tiles.shape[1], scale * math.log2(math.e),
            WIDTH=width, STRIDE=heads * width, POWER=power, MORE=more, BM=tile.queries, BN=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def columns(width: int) -> tuple[int, int]:
    """Of the two parts in which a head is taken: powers of two, which a tile must have. The second may be none."""
    power = 1 << (width.bit_length() - 1)
    return power, max(16, 1 << (width - power - 1).bit_length()) if width > power else 0


@lru_cache(maxsize=256)
def _tiles(bounds: tuple[int, ...], queries: int, device: torch.device) -> Tensor:
    """All blocks of a tower ask for the same ones. Those of the longest runs first, so that none is left alone at the
    end."""
    runs = sorted(pairwise(bounds), key=lambda run: run[0] - run[1])
    each = [(first, start, end) for start, end in runs for first in range(start, end, queries)]
    tiles = torch.tensor(each, dtype=torch.int32).reshape(-1, 3).T.contiguous()
    # From pinned memory the host need not wait for what the GPU is doing.
    return tiles.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tiles
