"""Attention within runs of tokens, forward alone, as one Triton kernel: every token sees its whole run.

A program has a tile of a run's queries in one head; tiles are copied by the tensor memory accelerator. Widths that are
no power of two, as 72 of a vision tower, are taken in two parts, 64 and 16, where one of 128 would nearly double the
work; columns behind the last one are copied as zeros."""

from __future__ import annotations

import triton
import triton.language as tl

from sameday.kernels.fused_attention_triton import _dot, steps


@triton.jit
def _look(
    queries, others, k, k_more, v, v_more, head, start, end, most, total, out, out_more, scale,
    MASKED: tl.constexpr, POWER: tl.constexpr, MORE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds, of which those from `end` on are another run's where it is MASKED."""
    keys = k.load([head, start, 0]).reshape(BN, POWER)
    scores = _dot(queries, tl.trans(keys), tl.zeros((BM, BN), tl.float32))
    if MORE:
        scores = _dot(others, tl.trans(k_more.load([head, start, POWER]).reshape(BN, MORE)), scores)
    if MASKED:
        scores = tl.where((start + tl.arange(0, BN) < end)[None, :], scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1) * scale)
    before = tl.exp2(most - highest)
    weights = tl.exp2(scores * scale - highest[:, None])
    total = total * before + tl.sum(weights, 1)
    values = v.load([head, start, 0]).reshape(BN, POWER)
    if MASKED:  # zero times what another run has may be no number
        values = tl.where((start + tl.arange(0, BN) < end)[:, None], values, 0.0)
    weights = weights.to(values.dtype)
    out = _dot(weights, values, out * before[:, None])
    if MORE:
        values = v_more.load([head, start, POWER]).reshape(BN, MORE)
        if MASKED:
            values = tl.where((start + tl.arange(0, BN) < end)[:, None], values, 0.0)
        out_more = _dot(weights, values, out_more * before[:, None])
    return highest, total, out, out_more


@triton.jit(do_not_specialize=["count"])
def image_attention(
    q, q_more, k, k_more, v, v_more, out, tiles, count, scale,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, POWER: tl.constexpr, MORE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """`tiles`, (3, count): of each tile its first query, and where its run begins and ends. `scale` is for powers of
    two. POWER columns are one part, up to MORE others the second."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first, begin, end = tl.load(tiles + tile), tl.load(tiles + count + tile), tl.load(tiles + 2 * count + tile)
    queries = q.load([head, first, 0]).reshape(BM, POWER)
    others = queries
    out0 = tl.zeros((BM, POWER), tl.float32)
    out1 = out0
    if MORE:
        others = q_more.load([head, first, POWER]).reshape(BM, MORE)
        out1 = tl.zeros((BM, MORE), tl.float32)
    most, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    whole = begin + (end - begin) // BN * BN
    for start in steps(begin, whole, BN):
        most, total, out0, out1 = _look(
            queries, others, k, k_more, v, v_more, head, start, end, most, total, out0, out1, scale,
            False, POWER, MORE, BM, BN,
        )  # fmt: skip
    if whole < end:
        most, total, out0, out1 = _look(
            queries, others, k, k_more, v, v_more, head, whole, end, most, total, out0, out1, scale,
            True, POWER, MORE, BM, BN,
        )  # fmt: skip
    rows, columns = first + tl.arange(0, BM), head * WIDTH + tl.arange(0, POWER)
    ok, at = (rows < end)[:, None], rows.to(tl.int64)[:, None] * STRIDE
    tl.store(out + at + columns[None, :], (out0 / total[:, None]).to(queries.dtype), mask=ok)
    if MORE:
        more = POWER + tl.arange(0, MORE)
        mask = ok & (more < WIDTH)[None, :]
        tl.store(out + at + head * WIDTH + more[None, :], (out1 / total[:, None]).to(queries.dtype), mask=mask)
