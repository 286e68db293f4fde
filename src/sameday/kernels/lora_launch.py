"""How LoRA's kernels are launched: tiles, in how many parts sums are made, grids.

None of it depends on the number of tokens, but for the grids: torch.compile makes one graph for any number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameday.kernels.grid import on_grid

MOST = 64
"""The largest rank that has tiles."""
TOGETHER = 3
"""Adapters of a group at most."""


class Launch(NamedTuple):
    """Rows and columns of a tile, warps, stages of the pipeline, and how many programs share what is summed: columns in
    `down`, rows in the backward pass."""

    rows: int
    columns: int
    warps: int
    stages: int
    shares: int = 1

    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    down: Launch
    up: Launch
    up_back: Launch
    down_back: Launch
    total: int = 512
    """Numbers of which a program adds the parts."""


NARROW = Tiles(
    down=Launch(32, 64, 2, 2, 8),
    up=Launch(64, 128, 4, 1),
    up_back=Launch(64, 128, 4, 3, 8),
    down_back=Launch(64, 32, 4, 3, 4),
)
"""Ranks up to 16. Steps of 1,400 tokens are 44 tiles of rows: it is the shares that keep 132 multiprocessors busy. With
four warps `down` would draw each mask twice: so few ranks leave two of them the same rows."""
MIDDLE = Tiles(
    down=Launch(32, 64, 4, 3, 4),
    up=Launch(64, 128, 4, 1),
    up_back=Launch(64, 128, 4, 2, 8),
    down_back=Launch(16, 64, 4, 2, 8),
)
BROAD = Tiles(
    down=Launch(64, 64, 8, 3, 4),
    up=Launch(64, 128, 4, 1),
    up_back=Launch(64, 256, 8, 2, 8),
    down_back=Launch(64, 64, 8, 2, 8),
)
"""Ranks above 32: parts are as large as what they are parts of, so there are fewer."""
WIDE = Tiles(
    down=Launch(32, 64, 4, 1, 4),
    up=Launch(32, 64, 4, 1),
    up_back=Launch(32, 64, 4, 1, 8),
    down_back=Launch(32, 64, 4, 1, 8),
)
"""Float32 and float64, whose tiles take two and four times the room."""
WIDEST = Tiles(
    down=Launch(16, 32, 8, 1, 4),
    up=Launch(16, 32, 8, 1),
    up_back=Launch(16, 32, 8, 1, 4),
    down_back=Launch(16, 32, 8, 1, 4),
)


def tiles(kind: torch.dtype, padded: int) -> Tiles:
    if kind.itemsize > 2:
        return WIDE if padded == 16 else WIDEST
    return NARROW if padded == 16 else MIDDLE if padded == 32 else BROAD


class Group:
    """The adapters of a group: ranks, the room they take, and what every kernel is told."""

    def __init__(self, kind: torch.dtype, ranks: Sequence[int]) -> None:
        assert len(ranks) <= TOGETHER and max(ranks) <= MOST, ranks
        self.ranks, self.most, self.wide = list(ranks), max(ranks), kind == torch.float64
        self.sums = torch.float64 if self.wide else torch.float32
        padded = max(16, 1 << (self.most - 1).bit_length())
        self.tiles = tiles(kind, padded)
        r0, r1, r2 = three(ranks)
        self.rank: dict[str, int] = {"R": self.most, "P": padded, "WIDE": self.wide}
        self.shape = {"R0": r0, "R1": r1, "R2": r2, "COUNT": len(ranks), **self.rank}

    def total(self, part: Tensor, out: Tensor, each: Any, counts: Sequence[int], factors: Sequence[float]) -> None:
        """Sum the parts, `counts` of them for each adapter, into `each` numbers."""
        from sameday.kernels import lora_triton as kernels

        n0, n1, n2 = three(counts)
        block = self.tiles.total
        on_grid(kernels.total, _tiles(each, block), len(counts))(
            part, out, each, *three(factors),
            N0=n0, N1=n1, N2=n2, MOST=max(counts), BLOCK=block, WIDE=self.wide, num_warps=4,
        )  # fmt: skip


class Mask(NamedTuple):
    """Keys of dropout: of the rows, and of the columns of each adapter; none, where nothing is dropped."""

    rows: Tensor | None
    columns: Sequence[Tensor]
    threshold: int

    def arguments(self, instead: Tensor) -> tuple[Tensor, ...]:
        if self.rows is None:
            return (instead,) * 4
        return self.rows, *three(self.columns)

    def constants(self) -> dict[str, int]:
        return {"THRESHOLD": self.threshold, "DROP": self.rows is not None}


def down(group: Group, x: Tensor, mask: Mask, a: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    from sameday.kernels import lora_triton as kernels

    (M, K), how = x.shape, group.tiles.down
    steps = _tiles(_tiles(K, how.columns), how.shares)
    part = x.new_empty((len(a) * how.shares, M, group.most), dtype=group.sums)
    on_grid(kernels.down, _tiles(M, how.rows), how.shares)(
        x, part, *mask.arguments(x), *three(a), M, K,
        **group.shape, **mask.constants(), BM=how.rows, BK=how.columns, STEPS=steps, SPLITS=how.shares, **how.options(),
    )  # fmt: skip
    u = x.new_empty((len(a), M, group.most))
    group.total(part, u, M * group.most, [how.shares] * len(a), factors)
    return u


def up(group: Group, outputs: Sequence[Tensor], u: Tensor, b: Sequence[Tensor]) -> list[Tensor]:
    from sameday.kernels import lora_triton as kernels

    M, how, results = u.shape[1], group.tiles.up, []
    for number, (y, weight) in enumerate(zip(outputs, b, strict=True)):
        N = y.shape[1]
        results.append(torch.empty_like(y))
        on_grid(kernels.up, _tiles(N, how.columns), _tiles(M, how.rows))(
            u, y, results[-1], weight, M, N,
            WHICH=number, RANK=group.ranks[number], **group.rank, BM=how.rows, BN=how.columns, **how.options(),
        )  # fmt: skip
    return results


def up_backward(group: Group, gradients: Sequence[Tensor], u: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    from sameday.kernels import lora_triton as kernels

    M, how, columns = u.shape[1], group.tiles.up_back, [y.shape[1] for y in gradients]
    counts = [_tiles(n, how.columns) for n in columns]
    parts = u.new_empty((sum(counts), M, group.most), dtype=group.sums)
    weights = u.new_empty((how.shares, sum(columns), group.most), dtype=group.sums)
    t0, t1, _ = three(counts)
    on_grid(kernels.up_back, sum(counts), how.shares)(
        u, *three(gradients), *three(b), parts, weights, M, *three(columns), _tiles(M, how.rows * how.shares),
        **group.shape, T0=t0, T1=t1, BM=how.rows, BN=how.columns, **how.options(),
    )  # fmt: skip
    du, db = torch.empty_like(u), u.new_empty((sum(columns), group.most), dtype=group.sums)
    group.total(parts, du, M * group.most, counts, [1.0] * len(b))
    group.total(weights, db, sum(columns) * group.most, [how.shares], [1.0])
    return du, db


def down_backward(
    group: Group, du: Tensor, x: Tensor, mask: Mask, a: Sequence[Tensor], factors: Sequence[float], needed: bool
) -> tuple[Tensor, Tensor]:
    from sameday.kernels import lora_triton as kernels

    (M, K), how = x.shape, group.tiles.down_back
    dx = torch.empty_like(x) if needed else x.new_empty(0)
    parts = x.new_empty((how.shares, len(a), group.most, K), dtype=group.sums)
    on_grid(kernels.down_back, _tiles(K, how.columns), how.shares)(
        du, x, dx, parts, *mask.arguments(x), *three(a), *three(factors), M, K, _tiles(M, how.rows * how.shares),
        **group.shape, **mask.constants(), BM=how.rows, BK=how.columns, NEED=needed, **how.options(),
    )  # fmt: skip
    da = x.new_empty((len(a), group.most, K), dtype=group.sums)
    group.total(parts, da, len(a) * group.most * K, [how.shares], [1.0])
    return dx, da


def three(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Kernels take three; what stands behind those that there are is read by none."""
    first, second, third = (*values, *[values[0]] * (TOGETHER - len(values)))
    return first, second, third


def _tiles(size: Any, tile: int) -> Any:
    return (size + tile - 1) // tile
