"""Attention over shared prefixes in one pass, by the Triton kernels of `fused_attention_triton`: where `split` takes
several calls of flash attention and merges them, nothing is merged here, no call has a start of its own, and gradients
of keys are summed over the query heads that share them without being written.

Float64, and everything where nothing runs Triton's kernels, is computed as `split` does."""

# No `from __future__ import annotations`: torch reads the operators' schemas from real annotations.
import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameday.kernels import split
from sameday.kernels.bdh import interpreted
from sameday.kernels.grid import on_grid
from sameday.kernels.split import Segments

WIDTHS = (16, 32, 64, 128, 256)
"""Of heads, that have tiles."""
LINE = 4
"""Numbers of 16 bytes in float32: tensor maps need lines that begin there."""
LEAST = 99 * 1024
"""Bytes of it that all GPUs have which the kernels run on."""


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


BEST = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2, turned=True))
"""As timed on an H200, in bf16 and with heads of 128."""
FLOAT32 = Tiles(Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1))
"""It is multiplied without tensor cores, from registers: larger tiles would take minutes to compile, and ptxas gives up
on registers for them and leaves sums in memory."""
SIDES = ((64, 64), (64, 32), (32, 32), (16, 16))
"""Queries and keys of tiles instead of the best one, the largest first."""


def shared_prefix_attention(query: Tensor, key: Tensor, value: Tensor, pieces: Segments, scale: float) -> Tensor:
    """(tokens, heads, width) of a whole row; fewer key heads than query heads are shared among them."""
    return _forward(query, key, value, *pieces, scale)[0]


# The operators. torch.compile sees each as one, not the kernels that it launches.


@torch.library.custom_op("sameday::fused_prefix_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    at: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if not _launches(q):
        # Its results have the strides of what it is given, and these are declared contiguous.
        q, k, v = (x.contiguous() for x in (q, k, v))
        return split._forward(q, k, v, cu, cu_queries, cu_keys, at, scale)
    return forward(q, k, v, Segments(cu, cu_queries, cu_keys, at), scale)


@torch.library.custom_op("sameday::fused_prefix_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    at: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _launches(q):
        q, k, v = (x.contiguous() for x in (q, k, v))
        return split._backward(grad, q, k, v, out, lse, cu, cu_queries, cu_keys, at, scale)
    return backward(grad, q, k, v, out, lse, Segments(cu, cu_queries, cu_keys, at), scale)


split.register(_forward, _backward)


def _launches(q: Tensor) -> bool:
    if q.dtype == torch.float64 or not (q.is_cuda or interpreted()):
        return False
    if q.dtype != torch.float32 and not q.is_cuda:
        raise ValueError(f"Triton's interpreter has no {q.dtype}: it would multiply the bits as whole numbers")
    return True


# Tiles


@cache
def tiles(memory: int, width: int, size: int) -> Tiles:
    """Of each kernel the best tile that fits into so many bytes of shared memory, for heads of this width in numbers of
    this size."""
    tried = FLOAT32 if size > 2 else BEST
    found = {}
    for name, best in tried._asdict().items():
        # Sums are held in registers: with four warps those of 64 rows of 128 numbers, and fewer rows of wider heads.
        most = min(best.queries, best.keys) * 128 // max(width, 128)
        most //= 2 if width > 128 and name == "of_keys" else 1  # whose sums are two
        sized = [best] if width <= 128 else []
        sized += [_of_size(best, *pair, name, size) for pair in SIDES if max(pair) <= max(most, 16)]
        each = (tile._replace(stages=n) for tile in sized for n in range(best.stages, 0, -1))
        found[name] = next(tile for tile in each if needed(name, tile, width, size) <= memory)
    return Tiles(**found)


def _of_size(best: Tile, queries: int, keys: int, kernel: str, size: int) -> Tile:
    """Four warps cover the 64 rows of a tensor core's matmul. Without tensor cores more warps have more registers."""
    if size > 2:
        return best._replace(queries=queries, keys=keys)
    return Tile(queries, keys, 4, best.stages, turned=kernel == "of_keys")


def needed(kernel: str, tile: Tile, width: int, size: int) -> int:
    """Bytes of shared memory that a kernel takes at most: for what it holds, for each stage of what it reads, for the
    scores, and to wait for copies."""
    held, read = (tile.keys, tile.queries) if kernel == "of_keys" else (tile.queries, tile.keys)
    tensors = 1 if kernel == "forward" else 2
    sums = 2 * 4 * read if kernel == "of_keys" else 0
    scores = 0 if kernel == "of_keys" and not tile.turned else tile.queries * tile.keys * size
    return (tensors * held + 2 * tile.stages * read) * width * size + tile.stages * sums + scores + 1024


def tiles_of(q: Tensor) -> Tiles:
    if not q.is_cuda:
        return BEST
    properties = torch.cuda.get_device_properties(q.device)
    memory: int = getattr(properties, "shared_memory_per_block_optin", LEAST)
    return tiles(memory, q.shape[2], q.element_size())


# Launches


def forward(
    q: Tensor, k: Tensor, v: Tensor, pieces: Segments, scale: float, how: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens, heads, width) and the log-sum-exp, (heads, tokens)."""
    from sameday.kernels import fused_attention_triton as kernels

    q, k, v = _with_columns_together(q, k, v)
    tokens, heads, _ = q.shape
    tile = (how or tiles_of(q)).forward
    out, lse = q.new_empty(q.shape), q.new_empty(heads, tokens, dtype=torch.float32)
    on_grid(kernels.forward, heads, -(-tokens // tile.queries))(
        *_loaded(tile.queries, q), *_loaded(tile.keys, k, v), out, lse, *_bounds(pieces, tokens),
        scale * math.log2(math.e), *_numbers(pieces, "start", "end", "first_key", "bounds"),
        **_sizes(q, k, pieces), **tile.options(),
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
    how: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values."""
    from sameday.kernels import fused_attention_triton as kernels

    # A contiguous gradient may still begin anywhere, and one of a single token have any stride.
    q, k, v, grad = _with_columns_together(q, k, v, grad.contiguous())
    out, lse = out.contiguous(), lse.contiguous()
    tokens, heads, width = q.shape
    _, of_queries, of_keys = how or tiles_of(q)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    line = -(-tokens // LINE) * LINE
    powers, delta = torch.empty(2, heads, line, dtype=torch.float32, device=q.device)[..., :tokens].unbind()
    on_grid(kernels.products, -(-tokens // 64), heads)(
        grad, out, lse, powers, delta, tokens, line, HEADS=heads, WIDTH=width, BM=64
    )
    sizes = _sizes(q, k, pieces)
    common = *_bounds(pieces, tokens), scale * math.log2(math.e), scale
    on_grid(kernels.of_queries, heads, -(-tokens // of_queries.queries))(
        *_loaded(of_queries.queries, grad, q), *_loaded(of_queries.keys, k, v), powers, delta, dq, line, *common,
        *_numbers(pieces, "start", "end", "first_key", "bounds"), **sizes, **of_queries.options(),
    )  # fmt: skip
    on_grid(kernels.of_keys, k.shape[1], -(-tokens // of_keys.keys))(
        *_loaded(of_keys.queries, grad, q), *_loaded(of_keys.keys, k, v), *_lines(of_keys.queries, powers, delta),
        dk, dv, *common,
        *_numbers(pieces, "start", "end", "first_key", "last_key", "bounds"),
        **sizes, **of_keys.options(), TURNED=of_keys.turned,
    )  # fmt: skip
    return dq, dk, dv


def _with_columns_together(*tensors: Tensor) -> list[Tensor]:
    """Heads and tokens may lie in any order, the numbers of a head must follow each other, and each head begin at a
    multiple of 16 bytes: no tensor map is made of others."""

    def mapped(x: Tensor) -> bool:
        whole = all(step * x.element_size() % 16 == 0 for step in x.stride()[:2])
        return whole and x.stride(2) == 1 and x.data_ptr() % 16 == 0

    return [x if mapped(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _loaded(rows: int, *tensors: Tensor) -> list[Any]:
    """(tokens, heads, width), as kernels load tiles of so many rows of a head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor.from_tensor(x.transpose(0, 1), [1, rows, x.shape[2]]) for x in tensors]


def _lines(columns: int, *tensors: Tensor) -> list[Any]:
    """(heads, tokens), as kernels load so many tokens of a head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [TensorDescriptor.from_tensor(x, [1, columns]) for x in tensors]


def _bounds(pieces: Segments, tokens: int) -> list[Any]:
    """Of all pieces and of the dense calls; how many tokens and bounds there are, and how often those can be halved."""
    most = max(len(pieces.cu), len(pieces.cu_queries))
    return [*pieces[:3], tokens, len(pieces.cu), most.bit_length()]


def _numbers(pieces: Segments, *names: str) -> list[int]:
    """Of three dense calls, of which some may have no queries."""
    calls = split.all_calls(pieces.at)
    assert len(calls) <= 3, calls
    return [*(getattr(call, name) for call in calls for name in names), *[0] * ((3 - len(calls)) * len(names))]


def _sizes(q: Tensor, k: Tensor, pieces: Segments) -> dict[str, Any]:
    asking = [number for number, call in enumerate(split.all_calls(pieces.at), 1) if call.end > call.start]
    return {
        "SHARE": q.shape[1] // k.shape[1],
        "HEADS": q.shape[1],
        "WIDTH": q.shape[2],
        "CALLS": max(asking, default=0),
    }
