"""Attention within runs of tokens, forward alone, as one Triton kernel: every token sees its whole run.

A program has a tile of a run's queries in one head. Widths that are no power of two, as 72 of a vision tower, are taken
in two parts, 64 and 16, where one of 128 would nearly double the work."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, onto):
    # The precision is that of float32 alone: no TF32.
    return tl.dot(a, b, onto, input_precision="ieee")


@triton.jit
def _onto(
    q0, q1, k, v, columns, more, more_ok, start, end, most, total, out0, out1, scale,
    STRIDE: tl.constexpr, MORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds, of which the last of a run may be empty in part."""
    at = start + tl.arange(0, BN)
    there = at < end
    rows = at.to(tl.int64) * STRIDE
    k0 = tl.load(k + rows[None, :] + columns[:, None], mask=there[None, :], other=0.0)
    scores = _dot(q0, k0, tl.zeros((BM, BN), tl.float32))
    if MORE:
        k1 = tl.load(k + rows[None, :] + more[:, None], mask=there[None, :] & more_ok[:, None], other=0.0)
        scores = _dot(q1, k1, scores)
    scores = tl.where(there[None, :], scores * scale, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1))
    before = tl.exp2(most - highest)
    weights = tl.exp2(scores - highest[:, None])
    total = total * before + tl.sum(weights, 1)
    v0 = tl.load(v + rows[:, None] + columns[None, :], mask=there[:, None], other=0.0)
    weights = weights.to(v0.dtype)
    out0 = _dot(weights, v0, out0 * before[:, None])
    if MORE:
        v1 = tl.load(v + rows[:, None] + more[None, :], mask=there[:, None] & more_ok[None, :], other=0.0)
        out1 = _dot(weights, v1, out1 * before[:, None])
    return highest, total, out0, out1


@triton.jit
def attend(
    q, k, v, out, tiles, count, scale,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, POWER: tl.constexpr, MORE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`tiles`, (3, count): of each tile its first query, and where its run begins and ends. `scale` is for powers of
    two. POWER columns are one part, up to MORE others the second."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first, begin, end = tl.load(tiles + tile), tl.load(tiles + count + tile), tl.load(tiles + 2 * count + tile)
    queries = first + tl.arange(0, BM)
    ok, rows = queries < end, queries.to(tl.int64) * STRIDE
    columns = head * WIDTH + tl.arange(0, POWER)
    more = columns
    more_ok = columns < 0
    q0 = tl.load(q + rows[:, None] + columns[None, :], mask=ok[:, None], other=0.0)
    q1 = q0
    out0 = tl.zeros((BM, POWER), tl.float32)
    out1 = out0
    if MORE:
        more = head * WIDTH + POWER + tl.arange(0, MORE)
        more_ok = more < (head + 1) * WIDTH
        q1 = tl.load(q + rows[:, None] + more[None, :], mask=ok[:, None] & more_ok[None, :], other=0.0)
        out1 = tl.zeros((BM, MORE), tl.float32)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    # A loop that is pipelined; the interpreter takes its bounds from Python's own numbers alone.
    if INTERPRETED:
        start = begin
        while start < end:
            most, total, out0, out1 = _onto(
                q0, q1, k, v, columns, more, more_ok, start, end, most, total, out0, out1, scale, STRIDE, MORE, BM, BN
            )
            start += BN
    else:
        for start in range(begin, end, BN):
            most, total, out0, out1 = _onto(
                q0, q1, k, v, columns, more, more_ok, start, end, most, total, out0, out1, scale, STRIDE, MORE, BM, BN
            )
    tl.store(out + rows[:, None] + columns[None, :], (out0 / total[:, None]).to(q0.dtype), mask=ok[:, None])
    if MORE:
        mask = ok[:, None] & more_ok[None, :]
        tl.store(out + rows[:, None] + more[None, :], (out1 / total[:, None]).to(q0.dtype), mask=mask)
