"""Attention within runs of tokens of any lengths, forward alone: what a frozen vision tower needs of its images."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Queries and keys of a tile, warps, stages of the pipeline."""

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3


TILE = Tile()


def attend_in_runs(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], scale: float, tile: Tile = TILE) -> Tensor:
    """(tokens, heads, width), each head's numbers side by side and a multiple of 16 bytes; a token sees all of its run,
    and `bounds` are where runs begin and end. Triton's, on a GPU that copies tiles by tensor maps or in its
    interpreter."""
    import tower_triton as kernels
    from triton.tools.tensor_descriptor import TensorDescriptor

    _, heads, width = q.shape
    power = 1 << (width.bit_length() - 1)
    more = max(16, 1 << (width - power - 1).bit_length()) if width > power else 0
    out, tiles = q.new_empty(q.shape), _tiles(bounds, tile.queries, q.device)
    parts = [
        TensorDescriptor.from_tensor(x.transpose(0, 1), [1, rows, columns])
        for x, rows in ((q, tile.queries), (k, tile.keys), (v, tile.keys))
        for columns in (power, more or power)
    ]
    kernels.attend[(tiles.shape[1], heads)](
        *parts, out, tiles, tiles.shape[1], scale * math.log2(math.e),
        WIDTH=width, STRIDE=heads * width, POWER=power, MORE=more, BM=tile.queries, BN=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@torch.library.custom_op(
    "bench::image_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v, Tensor cu, float scale) -> Tensor"
)
def image_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    """In the place of `sameday.models.tower.image_attention`."""
    return attend_in_runs(q, k, v, tuple(cu.tolist()), scale)


@image_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape)


@lru_cache(maxsize=256)
def _tiles(bounds: tuple[int, ...], queries: int, device: torch.device) -> Tensor:
    """All layers ask for the same ones. Those of the longest runs first, so that none is left alone at the end."""
    runs = sorted(pairwise(bounds), key=lambda run: run[0] - run[1])
    found = [(first, start, end) for start, end in runs for first in range(start, end, queries)]
    return torch.tensor(found, dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)
