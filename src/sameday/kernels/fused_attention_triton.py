"""Attention over pieces that share others, forward and backward, as Triton kernels.

A token sees its own piece up to itself, and whole runs of other pieces: a branch its prefix and, where there is one,
its fork. So the keys of a query are a few intervals, and so are the queries of a key. A program takes a tile of queries
in one head, or a tile of keys in one head of keys with all query heads that share it, whatever pieces they belong to.
It finds the intervals of each row from the bounds of the pieces, takes tiles that all rows see without a mask, and then
the others with one: in two loops for all intervals, since each loop begins with waiting for its first tiles. Tiles are
copied by the tensor memory accelerator: addresses in registers would leave none for sums. No program writes what
another one writes: equal inputs give equal bits."""

from __future__ import annotations

import triton
import triton.language as tl

from sameday.kernels.bdh import interpreted
from sameday.kernels.fused_attention import LINE

COUNTS = ["tokens", "line", "pieces", "halves", *(f"{of}{call}" for of in "seklb" for call in range(3))]
"""One kernel serves whatever they are."""
FAR = tl.constexpr(1 << 30)
"""Beyond all tokens."""
EVEN = tl.constexpr(LINE)
"""Of which queries are loaded from a multiple on, where sums are loaded with them."""


def _counted(first, last, step, num_stages=None):
    """The interpreter's numbers are arrays of one, which `range` does not take."""
    plain = [int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x) for x in (first, last, step)]
    return range(*plain)


steps = _counted if interpreted() else tl.range
"""A loop that is pipelined."""


@triton.jit
def _dot(a, b, onto):
    # The precision is that of float32 alone: no TF32.
    return tl.dot(a, b, onto, input_precision="ieee")


@triton.jit
def _place(rows, bounds, count, halves):
    """Among `count` bounds the last one that is not behind each row, by number; empty pieces have none of them."""
    low, high = rows * 0, rows * 0 + (count - 1)
    # By halves: all of them at once would take registers that no sum has then.
    for _ in steps(0, halves, 1):
        middle = (low + high) // 2
        behind = tl.load(bounds + 1 + middle, mask=low < high, other=FAR) <= rows
        high = tl.where(behind, high, middle)
        low = tl.where(behind, middle + 1, low)
    return low


@triton.jit
def _seen(rows, first, last, other, of_rows, of_others, count, halves):
    """Where the run begins and ends that each row sees in a dense call, or that sees it. Rows of the call are those
    from `first` to `last`; the others get an empty run."""
    there = (rows >= first) & (rows < last)
    at = _place(rows - first, of_rows, count, halves)
    low = tl.load(of_others + at, mask=there, other=0) + other
    high = tl.load(of_others + at + 1, mask=there, other=0) + other
    return tl.where(there, low, 0), tl.where(there, high, 0)


@triton.jit
def _run(low, high, ok, whole, masked, STEP: tl.constexpr, OF: tl.constexpr = 1):
    """The tiles of STEP that hold one interval of each row, the first at a multiple of OF. Tiles of all intervals are
    numbered through, those that lie within every row's, which need no mask, and the others: earlier intervals have
    numbers up to `whole` and `masked`. Given: the intervals; where tile number 0 without a mask would begin, number 0
    before those with one, and number 0 behind them; from which number on they lie behind; and both last numbers."""
    some = ok & (high > low)
    first = tl.min(tl.where(some, low, FAR)) // OF * OF
    last = tl.max(tl.where(some, high, 0))
    highest_low = tl.max(tl.where(ok, low, 0))
    lowest_high = tl.min(tl.where(ok, high, FAR))
    before = tl.maximum(highest_low - first + STEP - 1, 0) // STEP
    begin = first + before * STEP
    count = tl.where(lowest_high > highest_low, tl.maximum(lowest_high - begin, 0) // STEP, 0)
    end = begin + count * STEP
    after = tl.maximum(last - end + STEP - 1, 0) // STEP
    some_tiles = last > first
    turn = masked + before
    more = tl.where(some_tiles, before + after, 0)
    count = tl.where(some_tiles, count, 0)
    return low, high, begin - whole * STEP, first - masked * STEP, end - turn * STEP, turn, whole + count, masked + more


@triton.jit
def _whole_tile(i, runs, STEP: tl.constexpr, CALLS: tl.constexpr):
    """Where tile number i without a mask begins."""
    at = runs[0][2]
    for call in tl.static_range(CALLS):
        at = tl.where(i >= runs[call][6], runs[call + 1][2], at)
    return at + i * STEP


@triton.jit
def _masked_tile(i, runs, STEP: tl.constexpr, CALLS: tl.constexpr):
    """Where tile number i with a mask begins, and each row's interval."""
    low, high, at = runs[0][0], runs[0][1], tl.where(i < runs[0][5], runs[0][3], runs[0][4])
    for call in tl.static_range(CALLS):
        there, run = i >= runs[call][7], runs[call + 1]
        at = tl.where(there, tl.where(i < run[5], run[3], run[4]), at)
        low, high = tl.where(there, run[0], low), tl.where(there, run[1], high)
    return at + i * STEP, low, high


@triton.jit
def _keys_of(
    rows, valid, cu, cu_queries, cu_keys, pieces, halves, s0, e0, k0, b0, s1, e1, k1, b1, s2, e2, k2, b2,
    CALLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """What each query sees: its own piece up to itself, and in each dense call a run of keys."""
    begins = tl.load(cu + _place(rows, cu, pieces, halves), mask=valid, other=0)
    own = _run(begins, rows + 1, valid, 0, 0, STEP)
    call0, call1, call2 = own, own, own
    if CALLS > 0:
        low, high = _seen(rows, s0, e0, k0, cu_queries, cu_keys, b0, halves)
        call0 = _run(low, high, valid, own[6], own[7], STEP)
    if CALLS > 1:
        low, high = _seen(rows, s1, e1, k1, cu_queries + b0, cu_keys + b0, b1, halves)
        call1 = _run(low, high, valid, call0[6], call0[7], STEP)
    if CALLS > 2:
        low, high = _seen(rows, s2, e2, k2, cu_queries + b0 + b1, cu_keys + b0 + b1, b2, halves)
        call2 = _run(low, high, valid, call1[6], call1[7], STEP)
    return own, call0, call1, call2


@triton.jit
def _queries_of(
    rows, valid, cu, cu_queries, cu_keys, pieces, halves, s0, k0, l0, b0, s1, k1, l1, b1, s2, k2, l2, b2,
    CALLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Which queries see each key: those of its own piece from itself on, and in each dense call a run of queries. They
    are loaded in lines of float32 too, by sixteen bytes."""
    ends = tl.load(cu + _place(rows, cu, pieces, halves) + 1, mask=valid, other=0)
    own = _run(rows, ends, valid, 0, 0, STEP, EVEN)
    call0, call1, call2 = own, own, own
    if CALLS > 0:
        low, high = _seen(rows, k0, l0, s0, cu_keys, cu_queries, b0, halves)
        call0 = _run(low, high, valid, own[6], own[7], STEP, EVEN)
    if CALLS > 1:
        low, high = _seen(rows, k1, l1, s1, cu_keys + b0, cu_queries + b0, b1, halves)
        call1 = _run(low, high, valid, call0[6], call0[7], STEP, EVEN)
    if CALLS > 2:
        low, high = _seen(rows, k2, l2, s2, cu_keys + b0 + b1, cu_queries + b0 + b1, b2, halves)
        call2 = _run(low, high, valid, call1[6], call1[7], STEP, EVEN)
    return own, call0, call1, call2


@triton.jit
def _tile(all, head, start, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of one head, from `start` on; those behind the last one are zeros."""
    return all.load([head, start, 0]).reshape(ROWS, WIDTH)


@triton.jit
def _look(
    q0, k, v, start, low, high, most, total, out, scale, shared,
    MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds to a tile of queries."""
    at = start + tl.arange(0, BN)
    k0 = _tile(k, shared, start, BN, WIDTH)
    scores = _dot(q0, tl.trans(k0), tl.zeros((BM, BN), tl.float32))
    if MASKED:
        scores = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    before = tl.exp2(most - base)
    weights = tl.exp2(scores * scale - base[:, None])
    v0 = _tile(v, shared, start, BN, WIDTH)
    out = _dot(weights.to(v0.dtype), v0, out * before[:, None])
    return highest, total * before + tl.sum(weights, 1), out


@triton.jit(do_not_specialize=COUNTS)
def forward(
    q, k, v, out, lse, cu, cu_queries, cu_keys, tokens, pieces, halves, scale,
    s0, e0, k0, b0, s1, e1, k1, b1, s2, e2, k2, b2,
    SHARE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CALLS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`scale` is for powers of two; the log-sum-exp is natural, (heads, tokens). Of each dense call: its queries from s
    to e, its first key, and how many bounds it has; those of all calls follow each other. `halves`: how often the most
    bounds of anything can be halved."""
    # The last tiles, which see most, begin first, of all heads.
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    shared = head // SHARE
    rows = tile * BM + tl.arange(0, BM)
    valid, columns, places = rows < tokens, tl.arange(0, WIDTH), rows.to(tl.int64)
    q0 = _tile(q, head, tile * BM, BM, WIDTH)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total, seen = tl.zeros((BM,), tl.float32), tl.zeros((BM, WIDTH), tl.float32)
    runs = _keys_of(
        rows, valid, cu, cu_queries, cu_keys, pieces, halves, s0, e0, k0, b0, s1, e1, k1, b1, s2, e2, k2, b2,
        CALLS, BN,
    )  # fmt: skip
    for i in steps(0, runs[CALLS][6], 1):
        most, total, seen = _look(
            q0, k, v, _whole_tile(i, runs, BN, CALLS), rows, rows, most, total, seen, scale, shared,
            False, BM, BN, WIDTH,
        )  # fmt: skip
    # With fewer stages, so that the masks leave two programs their room in a multiprocessor's shared memory.
    for i in steps(0, runs[CALLS][7], 1, num_stages=2):
        start, low, high = _masked_tile(i, runs, BN, CALLS)
        most, total, seen = _look(
            q0, k, v, start, low, high, most, total, seen, scale, shared,
            True, BM, BN, WIDTH,
        )  # fmt: skip
    at = (places[:, None] * HEADS + head) * WIDTH + columns[None, :]
    tl.store(out + at, (seen / total[:, None]).to(q0.dtype), mask=valid[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + rows, (most + tl.log2(total)) * 0.6931471805599453, mask=valid)


@triton.jit(do_not_specialize=["tokens", "line"])
def products(grad, out, lse, powers, delta, tokens, line, HEADS: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Of each token's output with its gradient, and the log-sum-exp for powers of two: (heads, tokens), in lines of
    `line` numbers."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    at = (rows.to(tl.int64)[:, None] * HEADS + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    ok = (rows < tokens)[:, None]
    a = tl.load(grad + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(out + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(delta + head * line + rows, tl.sum(a * b, 1), mask=rows < tokens)
    of_row = tl.load(lse + head * tokens + rows, mask=rows < tokens, other=0.0)
    tl.store(powers + head * line + rows, of_row * 1.4426950408889634, mask=rows < tokens)


@triton.jit
def _ask(
    q0, g0, k, v, start, low, high, lse0, delta0, dq, scale, shared,
    MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a tile of keys adds to the gradient of a tile of queries."""
    at = start + tl.arange(0, BN)
    k0 = _tile(k, shared, start, BN, WIDTH)
    v0 = _tile(v, shared, start, BN, WIDTH)
    scores = _dot(q0, tl.trans(k0), tl.zeros((BM, BN), tl.float32))
    weights = tl.exp2(scores * scale - lse0[:, None])
    if MASKED:
        weights = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), weights, 0.0)
    of_weights = _dot(g0, tl.trans(v0), tl.zeros((BM, BN), tl.float32))
    of_scores = weights * (of_weights - delta0[:, None])
    return _dot(of_scores.to(k0.dtype), k0, dq)


@triton.jit(do_not_specialize=COUNTS)
def of_queries(
    grad, q, k, v, powers, delta, dq, line, cu, cu_queries, cu_keys, tokens, pieces, halves, scale, plain_scale,
    s0, e0, k0, b0, s1, e1, k1, b1, s2, e2, k2, b2,
    SHARE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CALLS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, given the log-sum-exp over all that they see."""
    # The last tiles, which see most, begin first, of all heads.
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    shared = head // SHARE
    rows = tile * BM + tl.arange(0, BM)
    valid, columns, places = rows < tokens, tl.arange(0, WIDTH), rows.to(tl.int64)
    at = (places[:, None] * HEADS + head) * WIDTH + columns[None, :]
    q0 = _tile(q, head, tile * BM, BM, WIDTH)
    g0 = _tile(grad, head, tile * BM, BM, WIDTH)
    of_row = head.to(tl.int64) * line + rows
    lse0 = tl.load(powers + of_row, mask=valid, other=float("inf"))
    delta0 = tl.load(delta + of_row, mask=valid, other=0.0)
    onto = tl.zeros((BM, WIDTH), tl.float32)
    runs = _keys_of(
        rows, valid, cu, cu_queries, cu_keys, pieces, halves, s0, e0, k0, b0, s1, e1, k1, b1, s2, e2, k2, b2,
        CALLS, BN,
    )  # fmt: skip
    for i in steps(0, runs[CALLS][6], 1):
        onto = _ask(
            q0, g0, k, v, _whole_tile(i, runs, BN, CALLS), rows, rows, lse0, delta0, onto, scale, shared,
            False, BM, BN, WIDTH,
        )  # fmt: skip
    for i in steps(0, runs[CALLS][7], 1):
        start, low, high = _masked_tile(i, runs, BN, CALLS)
        onto = _ask(
            q0, g0, k, v, start, low, high, lse0, delta0, onto, scale, shared,
            True, BM, BN, WIDTH,
        )  # fmt: skip
    tl.store(dq + at, (onto * plain_scale).to(q0.dtype), mask=valid[:, None])


@triton.jit
def _answer(
    k0, v0, q, grad, powers, delta, start, low, high, dk, dv, scale, head,
    MASKED: tl.constexpr, TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a tile of queries adds to the gradients of a tile of keys and of their values. Scores have a row for each
    key, or for each query where they are TURNED: which takes fewer registers depends on the tile."""
    at = start + tl.arange(0, BM)
    q0 = _tile(q, head, start, BM, WIDTH)
    g0 = _tile(grad, head, start, BM, WIDTH)
    # By tensor maps too: as scores have a row for each key, every thread would load a quarter of them, one by one.
    lse0, delta0 = powers.load([head, start]).reshape(BM), delta.load([head, start]).reshape(BM)
    if TURNED:
        scores = _dot(q0, tl.trans(k0), tl.zeros((BM, BN), tl.float32))
        weights = tl.exp2(scores * scale - lse0[:, None])
        if MASKED:
            weights = tl.where((at[:, None] >= low[None, :]) & (at[:, None] < high[None, :]), weights, 0.0)
        dv = _dot(tl.trans(weights.to(g0.dtype)), g0, dv)
        of_weights = _dot(g0, tl.trans(v0), tl.zeros((BM, BN), tl.float32))
        of_scores = tl.trans((weights * (of_weights - delta0[:, None])).to(q0.dtype))
    else:
        scores = _dot(k0, tl.trans(q0), tl.zeros((BN, BM), tl.float32))
        weights = tl.exp2(scores * scale - lse0[None, :])
        if MASKED:
            weights = tl.where((at[None, :] >= low[:, None]) & (at[None, :] < high[:, None]), weights, 0.0)
        dv = _dot(weights.to(g0.dtype), g0, dv)
        of_weights = _dot(v0, tl.trans(g0), tl.zeros((BN, BM), tl.float32))
        of_scores = (weights * (of_weights - delta0[None, :])).to(q0.dtype)
    return _dot(of_scores, q0, dk), dv


@triton.jit(do_not_specialize=COUNTS)
def of_keys(
    grad, q, k, v, powers, delta, dk, dv, cu, cu_queries, cu_keys, tokens, pieces, halves, scale, plain_scale,
    s0, e0, k0, l0, b0, s1, e1, k1, l1, b1, s2, e2, k2, l2, b2,
    SHARE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CALLS: tl.constexpr,
    TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values. Of each dense call: its first query, its keys from k to l, its bounds."""
    # The first tiles of a prefix, which most queries see, begin first, of all heads.
    shared, tile = tl.program_id(0), tl.program_id(1)
    rows = tile * BN + tl.arange(0, BN)
    valid, columns, at = rows < tokens, tl.arange(0, WIDTH), rows.to(tl.int64)[:, None]
    key0 = _tile(k, shared, tile * BN, BN, WIDTH)
    value0 = _tile(v, shared, tile * BN, BN, WIDTH)
    of_key, of_value = tl.zeros((BN, WIDTH), tl.float32), tl.zeros((BN, WIDTH), tl.float32)
    runs = _queries_of(
        rows, valid, cu, cu_queries, cu_keys, pieces, halves, s0, k0, l0, b0, s1, k1, l1, b1, s2, k2, l2, b2,
        CALLS, BM,
    )  # fmt: skip
    whole, masked = runs[CALLS][6], runs[CALLS][7]
    each, each_masked = tl.maximum(whole, 1), tl.maximum(masked, 1)  # a loop of none is prepared too
    # All heads in one loop: the next one's first tiles come while the last ones of this are computed.
    for i in steps(0, SHARE * whole, 1):
        of_key, of_value = _answer(
            key0, value0, q, grad, powers, delta, _whole_tile(i % each, runs, BM, CALLS), rows, rows,
            of_key, of_value, scale, shared * SHARE + i // each,
            False, TURNED, BM, BN, WIDTH,
        )  # fmt: skip
    for i in steps(0, SHARE * masked, 1):
        start, low, high = _masked_tile(i % each_masked, runs, BM, CALLS)
        of_key, of_value = _answer(
            key0, value0, q, grad, powers, delta, start, low, high,
            of_key, of_value, scale, shared * SHARE + i // each_masked,
            True, TURNED, BM, BN, WIDTH,
        )  # fmt: skip
    out = (at * (HEADS // SHARE) + shared) * WIDTH + columns[None, :]
    tl.store(dk + out, (of_key * plain_scale).to(key0.dtype), mask=valid[:, None])
    tl.store(dv + out, of_value.to(key0.dtype), mask=valid[:, None])
