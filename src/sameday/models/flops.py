"""FLOPs of matmuls, forward and backward, counted from modules and shapes: what a plan's kernels execute, and what the
mathematics needs at least. A multiply-add is two; elementwise work is not counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from sameday.kernels.split import Segments
from sameday.models.fp8 import Fp8Linear

TILE = 128
"""Tokens in a tile of the fused attention kernels, flex's exactly and the others' about: what is masked is left out by
whole tiles."""
PIECES_TILE = 64
"""The same of our own kernels for the pieces of packed rows; gradients of keys take tiles of 128 queries, and leave out
less by a little."""
FUSED_BACKWARD, TWO_PASS_BACKWARD = 5, 7
"""Matmuls in the backward pass of kernels that keep no scores. Flex and our own have a pass for queries and one for
keys, each of which computes scores and their gradients."""


@dataclass(frozen=True)
class Flops:
    """`backward` is for gradients alone; `recomputed` is what the backward pass does of the forward pass again. `fp8`
    are those of all of them that belong to layers stored in fp8."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    fp8: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Work:
    """By part. `tower` has its own attention and adapters in it, `layers` are the linear layers, or all of a vision
    model but its attention."""

    tower: Flops = Flops()
    layers: Flops = Flops()
    adapters: Flops = Flops()
    attention: Flops = Flops()
    head: Flops = Flops()

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts().values())

    @property
    def fp8(self) -> int:
        return sum(part.fp8 for part in self.parts().values())

    def parts(self) -> dict[str, Flops]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: Work) -> Work:
        return Work(**{name: part + getattr(other, name) for name, part in self.parts().items()})


@dataclass(frozen=True)
class Counted:
    """`executed`: recomputation, padding, masked pairs, unused logits and all. `needed`: each token that the loss
    depends on, once; pairs that see each other; the last layer only at places whose logits are read."""

    executed: Work
    needed: Work

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.executed + other.executed, self.needed + other.needed)


# Attention


@dataclass(frozen=True)
class Pairs:
    """How many query-key pairs a kernel computes for one head, and its matmuls in the backward pass; None where plain
    matmuls compute only the gradients that are asked for."""

    count: int
    backward: int | None = None


def causal_pairs(length: int, tile: int = TILE) -> int:
    """Of a row in which each token sees those before it, computed in tiles."""
    ends = range(tile, length + tile, tile)
    return sum((min(end, length) - (end - tile)) * min(end, length) for end in ends)


def block_pairs(group: Tensor, branch: Tensor, fork: Tensor, tile: int = TILE) -> int:
    """Of flex attention: whole tiles in which some token sees some other."""
    rows, length = group.shape
    tiles = 0
    for first in range(0, length, tile):
        asking, keys = slice(first, first + tile), slice(0, first + tile)
        pairs = group[:, asking, None] == group[:, None, keys]
        for level in (branch, fork):
            pairs &= (level[:, None, keys] == 0) | (level[:, asking, None] == level[:, None, keys])
        seen = pairs.tril(first).any(1)
        tiles += int(nn.functional.pad(seen, (0, -seen.shape[1] % tile)).view(rows, -1, tile).any(2).sum())
    return tiles * tile**2


def tile_pairs(seen: Tensor, tile: int = TILE) -> int:
    """The same of any dense mask, (rows, length, length)."""
    room = -seen.shape[1] % tile
    tiles = nn.functional.pad(seen, (0, room, 0, room)).unflatten(2, (-1, tile)).unflatten(1, (-1, tile))
    return int(tiles.any(4).any(2).sum()) * tile**2


def split_pairs(pieces: Segments, tile: int | None) -> int:
    """Of all calls. Without a tile, as in plain PyTorch, a piece is a whole square."""
    near = sum(n**2 if tile is None else causal_pairs(n, tile) for n in pieces.cu.diff().tolist())
    return near + sum(int((queries.long() * keys).sum()) for queries, keys in pieces.runs())


def is_fused(device: torch.device, kind: torch.dtype, heads: int, key_heads: int, width: int, masked: bool) -> bool:
    """Whether torch's scaled_dot_product_attention takes a fused kernel here, or plain matmuls."""
    q, k = (torch.empty(1, n, 64, width, device=device, dtype=kind, requires_grad=True) for n in (heads, key_heads))
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device) if masked else None
    chosen = torch._fused_sdp_choice(q, k, k, mask, 0.0, not masked, enable_gqa=heads != key_heads)
    return bool(chosen != torch.nn.attention.SDPBackend.MATH.value)


def attention_flops(pairs: Pairs, heads: int, width: int, wanted: Sequence[bool]) -> Flops:
    """`wanted` says of queries, keys and values whether they need a gradient."""
    one = 2 * pairs.count * heads * width
    q, k, v = wanted
    plain = q + k + v + (q or k)
    return Flops(2 * one, one * (plain if pairs.backward is None or not plain else pairs.backward))


@dataclass(frozen=True)
class Places:
    """Of one decoder layer: tokens that ask, through everything but keys and values; tokens that are seen; pairs."""

    asking: int
    seen: int
    pairs: Pairs


def triangle(n: int) -> int:
    return n * (n + 1) // 2


# Linear layers


def mlp_flops(module: nn.Module, rows: int, wanted: bool) -> tuple[Work, bool]:
    """Linear layers of which all but the last take the input."""
    *first, last = _linears(module)
    work, grows = Work(), False
    for each in first:
        flops, through = linear_flops(each, rows, wanted)
        work, grows = work + flops, grows or through
    flops, through = linear_flops(last, rows, grows)
    return work + flops, wanted or through


def _linears(module: nn.Module) -> Iterator[Any]:
    for child in module.children():
        if isinstance(child, nn.Linear) or hasattr(child, "base_layer"):
            yield child
        else:
            yield from _linears(child)


def linear_flops(module: Any, rows: int, wanted: bool) -> tuple[Work, bool]:
    """A layer and its adapters, for an input that needs a gradient or not; and whether its output does."""
    base, grows = matmul_flops(getattr(module, "base_layer", module), rows, wanted)
    adapters = Flops()
    for name in module.lora_A if hasattr(module, "base_layer") else ():
        down, narrow = matmul_flops(module.lora_A[name], rows, wanted)
        up, wide = matmul_flops(module.lora_B[name], rows, narrow)
        adapters, grows = adapters + down + up + _dora_flops(module, name, rows, wanted), grows or wide
    return Work(layers=base, adapters=adapters), grows


def _dora_flops(module: Any, name: str, rows: int, wanted: bool) -> Flops:
    """The lengths of rows are those of B times A added to the weight. Where the adapter's input has dropout, the weight
    is multiplied by that input too."""
    if name not in module.lora_magnitude_vector:
        return Flops()
    down, up = module.lora_A[name], module.lora_B[name]
    lengths = Flops(2 * down.in_features * up.out_features * down.out_features)
    if isinstance(module.lora_dropout[name], nn.Identity):
        return lengths
    return lengths + matmul_flops(module.base_layer, rows, wanted)[0]


def matmul_flops(linear: Any, rows: int, wanted: bool) -> tuple[Flops, bool]:
    """One matmul forward, one for the input's gradient and one for the weight's, where they are needed."""
    trained = linear.weight.requires_grad
    one = 2 * rows * linear.in_features * linear.out_features
    times = wanted + trained
    in_fp8 = one * (1 + times) if isinstance(linear, Fp8Linear) else 0
    return Flops(one, one * times, fp8=in_fp8), wanted or trained
