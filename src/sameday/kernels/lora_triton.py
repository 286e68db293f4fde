"""LoRA's small matmuls as Triton kernels. A group is one to three adapters whose layers share their input x (M, K),
which is read once for all of them, as is everything in the backward pass.

Ranks are padded to P, a power of two of at least 16, in registers alone; in memory rows have R numbers, the largest
rank of the group. Sums over many programs are written as parts, and `total` adds them in a fixed order: the same bits
each time, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from sameday.kernels.bdh import interpreted
from sameday.kernels.bdh_triton import _load, _store

ANY_SIZE = ["M", "steps", "each"]
"""What changes with the number of tokens: kernels are compiled once for all of them."""


@triton.jit
def _dot(a, b, onto):
    # The precision is that of float32 alone: no TF32.
    return tl.dot(a, b, onto, input_precision="ieee", out_dtype=onto.dtype)


@triton.jit
def _row_keys(keys, rows, ok):
    return tl.load(keys + rows, mask=ok, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _kept(row_keys, column_keys, at, ok, THRESHOLD: tl.constexpr):
    """`kernels.dropout.keeps` of all pairs."""
    columns = tl.load(column_keys + at, mask=ok, other=0).to(tl.uint32, bitcast=True)
    drawn = columns[None, :] * (row_keys | 1)[:, None] + row_keys[:, None]
    return drawn.to(tl.int32, bitcast=True) >= THRESHOLD


@triton.jit
def _onto(
    onto, tile, row_keys, column_keys, a, at, ok, K,
    RANK: tl.constexpr, P: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """onto + dropout(tile) @ a^T over some of the columns."""
    if DROP:
        tile = tl.where(_kept(row_keys, column_keys, at, ok, THRESHOLD), tile, tl.zeros_like(tile))
    p = tl.arange(0, P)
    weight = tl.load(a + p[None, :] * K + at[:, None], mask=(p < RANK)[None, :] & ok[:, None], other=0.0)
    return _dot(tile, weight.to(tile.dtype), onto)


@triton.jit
def _store_part(part, number, rows, row_ok, M, value, R: tl.constexpr, P: tl.constexpr):
    p = tl.arange(0, P)
    at = part + (number.to(tl.int64) * M + rows[:, None]) * R + p[None, :]
    tl.store(at, value, mask=row_ok[:, None] & (p < R)[None, :])


@triton.jit(do_not_specialize=ANY_SIZE)
def down(
    x, part, keys, c0, c1, c2, a0, a1, a2, M, K,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    THRESHOLD: tl.constexpr, DROP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Parts of dropout(x) @ a^T over a share of the columns, for each adapter: (adapters * SPLITS, M, R)."""
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    share = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows < M
    row_keys = rows
    if DROP:
        row_keys = _row_keys(keys, rows, row_ok)
    s0 = tl.zeros((BM, P), SUM)
    if COUNT > 1:
        s1 = tl.zeros((BM, P), SUM)
    if COUNT > 2:
        s2 = tl.zeros((BM, P), SUM)
    for step in range(0, STEPS):
        at = (share * STEPS + step) * BK + tl.arange(0, BK)
        ok = at < K
        tile = _load(x, rows, at, K, row_ok, ok)
        s0 = _onto(s0, tile, row_keys, c0, a0, at, ok, K, R0, P, THRESHOLD, DROP)
        if COUNT > 1:
            s1 = _onto(s1, tile, row_keys, c1, a1, at, ok, K, R1, P, THRESHOLD, DROP)
        if COUNT > 2:
            s2 = _onto(s2, tile, row_keys, c2, a2, at, ok, K, R2, P, THRESHOLD, DROP)
    _store_part(part, share, rows, row_ok, M, s0, R, P)
    if COUNT > 1:
        _store_part(part, SPLITS + share, rows, row_ok, M, s1, R, P)
    if COUNT > 2:
        _store_part(part, 2 * SPLITS + share, rows, row_ok, M, s2, R, P)


@triton.jit(do_not_specialize=ANY_SIZE)
def total(
    part, out, each, f0, f1, f2, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """For up to three adapters, one after the other: the sum of their N0, N1 and N2 parts, of `each` numbers, times a
    factor."""
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    which = tl.program_id(1)
    first = tl.where(which == 0, 0, tl.where(which == 1, N0, N0 + N1))
    count = tl.where(which == 0, N0, tl.where(which == 1, N1, N2))
    factor = tl.where(which == 0, f0, tl.where(which == 1, f1, f2))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < each
    added = tl.zeros((BLOCK,), SUM)
    for number in tl.static_range(0, MOST):
        here = part + (first + number).to(tl.int64) * each + at
        added += tl.load(here, mask=ok & (number < count), other=0.0)
    tl.store(out + which.to(tl.int64) * each + at, (added * factor).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _rank_rows(u, which, rows, row_ok, M, R: tl.constexpr, P: tl.constexpr):
    """Rows of one adapter of (adapters, M, R)."""
    p = tl.arange(0, P)
    at = u + (which.to(tl.int64) * M + rows[:, None]) * R + p[None, :]
    return tl.load(at, mask=row_ok[:, None] & (p < R)[None, :], other=0.0)


@triton.jit(do_not_specialize=ANY_SIZE)
def up(
    u, y, out, b, M, N, WHICH: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = y + u @ b^T of one adapter, rounded once."""
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    row_ok, ok, p = rows < M, at < N, tl.arange(0, P)
    low = _rank_rows(u, tl.full((), WHICH, tl.int64), rows, row_ok, M, R, P)
    weight = tl.load(b + at[None, :] * RANK + p[:, None], mask=(p < RANK)[:, None] & ok[None, :], other=0.0)
    base = _load(y, rows, at, N, row_ok, ok)
    _store(out, rows, at, N, row_ok, ok, _dot(low, weight.to(low.dtype), base.to(SUM)))


@triton.jit
def _up_back(
    dy, b, u, du, db, tile, which, offset, M, N, columns, steps,
    RANK: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One adapter, some of its columns, a share of the rows. `offset`: its columns among those of all."""
    kind = u.dtype.element_ty
    chunk, p = tl.program_id(1), tl.arange(0, P)
    at = tile * BN + tl.arange(0, BN)
    ok = at < N
    weight = tl.load(b + at[:, None] * RANK + p[None, :], mask=ok[:, None] & (p < RANK)[None, :], other=0.0).to(kind)
    added = tl.zeros((P, BN), SUM)
    for step in range(0, steps):
        rows = (chunk * steps + step) * BM + tl.arange(0, BM)
        row_ok = rows < M
        gradient = _load(dy, rows, at, N, row_ok, ok).to(kind)
        part = _dot(gradient, weight, tl.zeros((BM, P), SUM))
        _store_part(du, tl.program_id(0), rows, row_ok, M, part, R, P)
        added = _dot(tl.trans(_rank_rows(u, which, rows, row_ok, M, R, P)), gradient, added)
    here = db + (chunk.to(tl.int64) * columns + offset + at[None, :]) * R + p[:, None]
    tl.store(here, added, mask=(p < R)[:, None] & ok[None, :])


@triton.jit(do_not_specialize=ANY_SIZE)
def up_back(
    u, y0, y1, y2, b0, b1, b2, du, db, M, N0, N1, N2, steps,
    T0: tl.constexpr, T1: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, COUNT: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of what `up` computes: parts of u's gradient (tiles, M, R), one for each tile of columns, T0 of them the first
    adapter's; and of b's (shares of the rows, all columns, R). The outputs' gradients y0 to y2 are read once."""
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    tile, columns = tl.program_id(0), N0
    first = tl.full((), 0, tl.int64)
    if COUNT > 1:
        columns += N1
    if COUNT > 2:
        columns += N2
    if tile < T0:
        _up_back(y0, b0, u, du, db, tile, first, 0, M, N0, columns, steps, R0, R, P, BM, BN, SUM)
    if COUNT > 1:  # noqa: SIM102 (known when it is compiled, what follows when it runs)
        if (tile >= T0) & (tile < T0 + T1):
            _up_back(y1, b1, u, du, db, tile - T0, first + 1, N0, M, N1, columns, steps, R1, R, P, BM, BN, SUM)
    if COUNT > 2:  # noqa: SIM102
        if tile >= T0 + T1:
            left = tile - T0 - T1
            _up_back(y2, b2, u, du, db, left, first + 2, N0 + N1, M, N2, columns, steps, R2, R, P, BM, BN, SUM)


@triton.jit
def _down_back(
    dx, added, x, du, which, row_keys, column_keys, weight, factor, rows, row_ok, at, ok, M,
    R: tl.constexpr, P: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr, NEED: tl.constexpr,
):  # fmt: skip
    """What one adapter adds to the gradients of a tile of x and of its own a."""
    gradient = _rank_rows(du, tl.full((), which, tl.int64), rows, row_ok, M, R, P)
    if NEED:
        back = _dot(gradient, weight, tl.zeros_like(dx)) * factor
    if DROP:
        kept = _kept(row_keys, column_keys, at, ok, THRESHOLD)
        x = tl.where(kept, x, tl.zeros_like(x))
        if NEED:
            back = tl.where(kept, back, tl.zeros_like(back))
    if NEED:
        dx += back
    return dx, _dot(tl.trans(gradient), x, added)


@triton.jit
def _rank_columns(a, at, ok, K, RANK: tl.constexpr, P: tl.constexpr):
    p = tl.arange(0, P)
    return tl.load(a + p[:, None] * K + at[None, :], mask=(p < RANK)[:, None] & ok[None, :], other=0.0)


@triton.jit
def _store_weights(da, number, at, ok, K, value, R: tl.constexpr, P: tl.constexpr):
    p = tl.arange(0, P)
    here = da + (number.to(tl.int64) * R + p[:, None]) * K + at[None, :]
    tl.store(here, value, mask=(p < R)[:, None] & ok[None, :])


@triton.jit(do_not_specialize=ANY_SIZE)
def down_back(
    du, x, dx, da, keys, c0, c1, c2, a0, a1, a2, f0, f1, f2, M, K, steps,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, THRESHOLD: tl.constexpr, DROP: tl.constexpr, NEED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Of what `down` computes: x's gradient, of all adapters in one go, where it is needed; and parts of a's, (shares
    of the rows, adapters, R, K). The mask is drawn again."""
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    kind = x.dtype.element_ty
    chunk = tl.program_id(1)
    at = tl.program_id(0) * BK + tl.arange(0, BK)
    ok = at < K
    w0, s0 = _rank_columns(a0, at, ok, K, R0, P).to(kind), tl.zeros((P, BK), SUM)
    if COUNT > 1:
        w1, s1 = _rank_columns(a1, at, ok, K, R1, P).to(kind), tl.zeros((P, BK), SUM)
    if COUNT > 2:
        w2, s2 = _rank_columns(a2, at, ok, K, R2, P).to(kind), tl.zeros((P, BK), SUM)
    for step in range(0, steps):
        rows = (chunk * steps + step) * BM + tl.arange(0, BM)
        row_ok = rows < M
        row_keys = rows
        if DROP:
            row_keys = _row_keys(keys, rows, row_ok)
        tile, back = _load(x, rows, at, K, row_ok, ok), tl.zeros((BM, BK), SUM)
        back, s0 = _down_back(
            back, s0, tile, du, 0, row_keys, c0, w0, f0, rows, row_ok, at, ok, M, R, P, THRESHOLD, DROP, NEED
        )
        if COUNT > 1:
            back, s1 = _down_back(
                back, s1, tile, du, 1, row_keys, c1, w1, f1, rows, row_ok, at, ok, M, R, P, THRESHOLD, DROP, NEED
            )
        if COUNT > 2:
            back, s2 = _down_back(
                back, s2, tile, du, 2, row_keys, c2, w2, f2, rows, row_ok, at, ok, M, R, P, THRESHOLD, DROP, NEED
            )
        if NEED:
            _store(dx, rows, at, K, row_ok, ok, back)
    _store_weights(da, chunk * COUNT, at, ok, K, s0 * f0, R, P)
    if COUNT > 1:
        _store_weights(da, chunk * COUNT + 1, at, ok, K, s1 * f1, R, P)
    if COUNT > 2:
        _store_weights(da, chunk * COUNT + 2, at, ok, K, s2 * f2, R, P)


if interpreted():
    # The interpreter takes the end of a loop from Python's own numbers alone.
    for kernel in (up_back, down_back):
        kernel.rewrite().__annotations__["steps"] = "tl.constexpr"
