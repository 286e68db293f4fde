"""Attention over shared prefixes as a few Triton kernels, where `sameday.kernels.split` takes several calls of flash
attention and merges them: no call has a start of its own, nothing is merged, and gradients of keys are summed over the
query heads that share them without being written."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameday.kernels.split import Segments, _Call


class Tile(NamedTuple):
    """Queries and keys of a tile, warps, stages of the pipeline, and for the gradients of keys whether scores have a
    row for each query."""

    queries: int
    keys: int
    warps: int
    stages: int
    turned: bool = False

    def options(self) -> dict[str, int]:
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    forward: Tile
    of_queries: Tile
    of_keys: Tile


TILES = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, turned=True))


def forward(
    q: Tensor, k: Tensor, v: Tensor, pieces: Segments, scale: float, tiles: Tiles = TILES
) -> tuple[Tensor, Tensor]:
    """(tokens, heads, width) and the log-sum-exp, (heads, tokens)."""
    import tree_triton as kernels

    tokens, heads, _ = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(heads, tokens, dtype=torch.float32)
    starts = [number for start, end, first, _last, bounds in _dense(pieces) for number in (start, end, first, bounds)]
    kernels.forward[(-(-tokens // tiles.forward.queries), heads)](
        q, k, v, out, lse, *pieces[:3], tokens, len(pieces.cu), scale * math.log2(math.e), *_steps(q, k, v), *starts,
        **_sizes(q, k, pieces), **tiles.forward.options(),
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: Segments,
    scale: float,
    tiles: Tiles = TILES,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values; `grad`, `out` and `lse` are contiguous."""
    import tree_triton as kernels

    tokens, heads, width = q.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    kernels.products[(-(-tokens // 64), heads)](grad, out, delta, tokens, HEADS=heads, WIDTH=width, BM=64)
    calls, sizes = _dense(pieces), _sizes(q, k, pieces)
    scales = scale * math.log2(math.e), scale
    common = (*pieces[:3], tokens, len(pieces.cu), *scales, *_steps(q, k, v))
    of_queries = [number for start, end, first, _last, bounds in calls for number in (start, end, first, bounds)]
    kernels.of_queries[(-(-tokens // tiles.of_queries.queries), heads)](
        grad, q, k, v, lse, delta, dq, *common, *of_queries, **sizes, **tiles.of_queries.options()
    )
    of_keys = [number for call in calls for number in call]
    kernels.of_keys[(-(-tokens // tiles.of_keys.keys), k.shape[1])](
        grad,
        q,
        k,
        v,
        lse,
        delta,
        dk,
        dv,
        *common,
        *of_keys,
        **sizes,
        **tiles.of_keys.options(),
        TURNED=tiles.of_keys.turned,
    )
    return dq, dk, dv


def _dense(pieces: Segments) -> list[tuple[int, int, int, int, int]]:
    """Of three dense calls, some of which may have no queries: queries from, to; keys from, to; bounds."""
    width, numbers = len(_Call._fields), pieces.at.tolist()[1:]
    calls = [_Call(*numbers[n : n + width]) for n in range(0, len(numbers), width)]
    assert len(calls) <= 3, calls
    places = [(each.start, each.end, each.first_key, each.last_key, each.bounds) for each in calls]
    return [*places, *[(0, 0, 0, 0, 0)] * (3 - len(calls))]


def _steps(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    return [step for x in (q, k, v) for step in x.stride()[:2]]


def _sizes(q: Tensor, k: Tensor, pieces: Segments) -> dict[str, Any]:
    used = [i + 1 for i, (start, end, *_) in enumerate(_dense(pieces)) if end > start]
    return {
        "SHARE": q.shape[1] // k.shape[1],
        "HEADS": q.shape[1],
        "WIDTH": q.shape[2],
        "PIECES": _power(len(pieces.cu)),
        "BOUNDS": _power(len(pieces.cu_keys)),
        "CALLS": max(used, default=0),
    }


def _power(count: int) -> int:
    return max(64, 1 << (count - 1).bit_length())  # few kernels for many rows
