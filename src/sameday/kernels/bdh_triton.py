"""Vision-BDH's level as Triton kernels. Rows are tokens of all images, (images * tokens). The latents of a head lie as
even units, then odd ones, so that a rotation is between two halves and needs no shuffle.

Triton's tiles are powers of two. A width is taken as two of them (192 = 128 + 64); a token too many for a power of two,
as the class token is, is computed as a vector beside the tile (65 = 64 + 1)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(rows, columns):
    """`kernels.dropout.mix` of row ^ column for all of them, as unsigned integers. Its first step may as well be taken
    before them: there are fewer rows and columns than pairs."""
    x = (rows ^ (rows >> 16))[:, None] ^ (columns ^ (columns >> 16))[None, :]
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _keep(row_keys, column_keys, threshold):
    """Which units of a pair are kept: the low half of a hash decides for the even one, the high half for the odd."""
    hashed = _mix(row_keys, column_keys)
    return (hashed & 0xFFFF) >= threshold, (hashed >> 16) >= threshold


@triton.jit
def _load(base, rows, columns, stride, row_ok, column_ok):
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(at, mask=row_ok[:, None] & column_ok[None, :], other=0.0)


@triton.jit
def _store(base, rows, columns, stride, row_ok, column_ok, value):
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def _dot(a, b, sum_type: tl.constexpr):
    # The precision is that of float32 alone: three TF32 products that together have its accuracy.
    return tl.dot(a, b, input_precision="tf32x3", out_dtype=sum_type)


@triton.jit
def _dot_onto(a, b, onto, sum_type: tl.constexpr):
    return tl.dot(a, b, onto, input_precision="tf32x3", out_dtype=sum_type)


@triton.jit
def _statistics(a, b, width: tl.constexpr, eps):
    """Mean and inverse deviation of rows that lie in two parts."""
    mean = (tl.sum(a, 1) + tl.sum(b, 1)) / width
    a, b = a - mean[:, None], b - mean[:, None]
    variance = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / width
    return mean, 1 / tl.sqrt(variance + eps)


@triton.jit
def _normed(a, b, width: tl.constexpr, eps):
    mean, inverse = _statistics(a, b, width, eps)
    return (a - mean[:, None]) * inverse[:, None], (b - mean[:, None]) * inverse[:, None], inverse


@triton.jit
def _norm_backward(da, db, a, b, inverse, width: tl.constexpr):
    """Gradient of a row before its normalisation; `a` and `b` are the normalised row."""
    mean = ((tl.sum(da, 1) + tl.sum(db, 1)) / width)[:, None]
    along = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / width)[:, None]
    return (da - mean - a * along) * inverse[:, None], (db - mean - b * along) * inverse[:, None]


@triton.jit
def encode(
    x, weight, s, M, columns, D1: tl.constexpr, D2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUM: tl.constexpr
):
    """s = relu(x @ weight)."""
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    d1, d2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    in1, in2 = d1 < D1, d2 < D1 + D2
    row_ok, column_ok = rows < M, at < columns
    total = _dot(_load(x, rows, d1, D1 + D2, row_ok, in1), _load(weight, d1, at, columns, in1, column_ok), SUM)
    total = _dot_onto(
        _load(x, rows, d2, D1 + D2, row_ok, in2), _load(weight, d2, at, columns, in2, column_ok), total, SUM
    )
    _store(s, rows, at, columns, row_ok, column_ok, tl.maximum(total, 0.0))


@triton.jit
def _rotated(s, cos, sin, rows, tokens, ok, units, unit_ok, first, columns, HALF: tl.constexpr, SUM: tl.constexpr):
    """Some units of a head, both halves, rotated by their token's angle; the angle; and where relu was open."""
    even = _load(s, rows, first + units, columns, ok, unit_ok)
    odd = _load(s, rows, first + HALF + units, columns, ok, unit_ok)
    c = _load(cos, tokens, units, HALF, ok, unit_ok).to(SUM)
    d = _load(sin, tokens, units, HALF, ok, unit_ok).to(SUM)
    return even * c - odd * d, odd * c + even * d, c, d, even > 0, odd > 0


@triton.jit
def _rotated_row(s, cos, sin, row, token, units, unit_ok, first, columns, HALF: tl.constexpr, SUM: tl.constexpr):
    """The same of a single token, as vectors."""
    at = s + row.to(tl.int64) * columns + first + units
    even, odd = tl.load(at, mask=unit_ok, other=0.0), tl.load(at + HALF, mask=unit_ok, other=0.0)
    c = tl.load(cos + token * HALF + units, mask=unit_ok, other=0.0).to(SUM)
    d = tl.load(sin + token * HALF + units, mask=unit_ok, other=0.0).to(SUM)
    return even * c - odd * d, odd * c + even * d, c, d, even > 0, odd > 0


@triton.jit
def attend(
    s,
    x,
    cos,
    sin,
    y,
    inverse,
    scores,
    own_scores,
    M,
    T,
    H: tl.constexpr,
    HALF: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    BN: tl.constexpr,
    EPS: tl.constexpr,
    SUM: tl.constexpr,
):
    """y = LN((r @ r^T) @ x) of one image and head, r = rotated s. Keeps the scores and what LN multiplied by."""
    image, head = tl.program_id(0) // H, tl.program_id(0) % H
    kind = s.dtype.element_ty
    W: tl.constexpr = D1 + D2
    columns = H * 2 * HALF
    first = head * 2 * HALF
    t, d1, d2 = tl.arange(0, TILE), tl.arange(0, D1), D1 + tl.arange(0, D2)
    ok, in1, in2 = t < T, d1 < D1, d2 < W
    rows, extra = image * T + t, image * T + TILE
    total = tl.zeros((TILE, TILE), SUM)
    if EXTRA:
        beside, itself = tl.zeros((TILE, BN), SUM), tl.zeros((BN,), SUM)
    for start in range(0, HALF, BN):
        units = start + tl.arange(0, BN)
        unit_ok = units < HALF
        a, b, _c, _d, _e, _f = _rotated(s, cos, sin, rows, t, ok, units, unit_ok, first, columns, HALF, SUM)
        low_a, low_b = a.to(kind), b.to(kind)
        total = _dot_onto(low_a, tl.trans(low_a), total, SUM)
        total = _dot_onto(low_b, tl.trans(low_b), total, SUM)
        if EXTRA:
            p, q, _c, _d, _e, _f = _rotated_row(s, cos, sin, extra, TILE, units, unit_ok, first, columns, HALF, SUM)
            beside += a * p[None, :] + b * q[None, :]
            itself += p * p + q * q
    kept = scores + tl.program_id(0).to(tl.int64) * (TILE + EXTRA) * TILE
    low = total.to(kind)
    tl.store(kept + t[:, None] * TILE + t[None, :], low)
    xa, xb = _load(x, rows, d1, W, ok, in1), _load(x, rows, d2, W, ok, in2)
    ya, yb = _dot(low, xa, SUM), _dot(low, xb, SUM)
    at = head * M + rows
    if EXTRA:
        side, own = tl.sum(beside, 1), tl.sum(itself, 0)
        tl.store(kept + TILE * TILE + t, side.to(kind))
        pa, pb = tl.load(x + extra.to(tl.int64) * W + d1).to(SUM), tl.load(x + extra.to(tl.int64) * W + d2).to(SUM)
        ya += side[:, None] * pa[None, :]
        yb += side[:, None] * pb[None, :]
        za = tl.sum(side[:, None] * xa, 0) + own * pa
        zb = tl.sum(side[:, None] * xb, 0) + own * pb
        mean = (tl.sum(za, 0) + tl.sum(zb, 0)) / W
        za, zb = za - mean, zb - mean
        by = 1 / tl.sqrt((tl.sum(za * za, 0) + tl.sum(zb * zb, 0)) / W + EPS)
        line = y + (head * M + extra).to(tl.int64) * W
        tl.store(line + d1, (za * by).to(kind))
        tl.store(line + d2, (zb * by).to(kind))
        tl.store(inverse + head * M + extra, by)
        tl.store(own_scores + tl.program_id(0), own)
    ya, yb, by_row = _normed(ya, yb, W, EPS)
    _store(y, at, d1, W, ok, in1, ya)
    _store(y, at, d2, W, ok, in2, yb)
    tl.store(inverse + at, by_row, mask=ok)


@triton.jit
def gate(
    y,
    s,
    weight,
    decoder,
    out,
    z,
    row_keys,
    column_keys,
    threshold,
    scale,
    M,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
    SUM: tl.constexpr,
):
    """z @ decoder with z = dropout(s * relu(y @ weight)), over some of the heads. z is kept for the backward pass, and
    the gate is not: where s is not zero, it is their quotient."""
    part = tl.program_id(1)
    kind = s.dtype.element_ty
    W: tl.constexpr = D1 + D2
    columns = H * 2 * HALF
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows < M
    d1, d2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    in1, in2 = d1 < D1, d2 < W
    if DROP:
        rk = tl.load(row_keys + rows, mask=row_ok, other=0).to(tl.uint32, bitcast=True)
    out1, out2 = tl.zeros((BM, D1), SUM), tl.zeros((BM, D2), SUM)
    for number in range(HEADS):
        head = part * HEADS + number
        y1, y2 = _load(y, head * M + rows, d1, W, row_ok, in1), _load(y, head * M + rows, d2, W, row_ok, in2)
        for start in range(0, HALF, BN):
            units = start + tl.arange(0, BN)
            unit_ok = units < HALF
            even = head * 2 * HALF + units
            odd = even + HALF
            ga = _dot(y1, _load(weight, d1, even, columns, in1, unit_ok), SUM)
            ga = _dot_onto(y2, _load(weight, d2, even, columns, in2, unit_ok), ga, SUM)
            gb = _dot(y1, _load(weight, d1, odd, columns, in1, unit_ok), SUM)
            gb = _dot_onto(y2, _load(weight, d2, odd, columns, in2, unit_ok), gb, SUM)
            ga, gb = tl.maximum(ga, 0.0), tl.maximum(gb, 0.0)
            if DROP:
                ck = tl.load(column_keys + head * HALF + units, mask=unit_ok, other=0).to(tl.uint32, bitcast=True)
                keep_a, keep_b = _keep(rk, ck, threshold)
                ga, gb = tl.where(keep_a, ga * scale, 0.0), tl.where(keep_b, gb * scale, 0.0)
            za = (_load(s, rows, even, columns, row_ok, unit_ok) * ga).to(kind)
            zb = (_load(s, rows, odd, columns, row_ok, unit_ok) * gb).to(kind)
            if KEEP:
                _store(z, rows, even, columns, row_ok, unit_ok, za)
                _store(z, rows, odd, columns, row_ok, unit_ok, zb)
            out1 = _dot_onto(za, _load(decoder, even, d1, W, unit_ok, in1), out1, SUM)
            out2 = _dot_onto(za, _load(decoder, even, d2, W, unit_ok, in2), out2, SUM)
            out1 = _dot_onto(zb, _load(decoder, odd, d1, W, unit_ok, in1), out1, SUM)
            out2 = _dot_onto(zb, _load(decoder, odd, d2, W, unit_ok, in2), out2, SUM)
    _store(out, part * M + rows, d1, W, row_ok, in1, out1)
    _store(out, part * M + rows, d2, W, row_ok, in2, out2)


@triton.jit
def join(
    x,
    parts,
    out,
    next_x,
    next_low,
    M,
    PARTS: tl.constexpr,
    LAST: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BM: tl.constexpr,
    EPS: tl.constexpr,
):
    """out = the sum of parts; next_x = LN(LN(x + LN(out))), of which the last level leaves out the outer one."""
    W: tl.constexpr = D1 + D2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows < M
    d1, d2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    in1, in2 = d1 < D1, d2 < W
    a, b = _load(parts, rows, d1, W, row_ok, in1), _load(parts, rows, d2, W, row_ok, in2)
    for part in tl.static_range(1, PARTS):
        a += _load(parts, part * M + rows, d1, W, row_ok, in1)
        b += _load(parts, part * M + rows, d2, W, row_ok, in2)
    _store(out, rows, d1, W, row_ok, in1, a)
    _store(out, rows, d2, W, row_ok, in2, b)
    a, b, _i = _normed(a, b, W, EPS)
    a, b = a + _load(x, rows, d1, W, row_ok, in1), b + _load(x, rows, d2, W, row_ok, in2)
    a, b, _i = _normed(a, b, W, EPS)
    if not LAST:
        a, b, _i = _normed(a, b, W, EPS)
    _store(next_x, rows, d1, W, row_ok, in1, a)
    _store(next_x, rows, d2, W, row_ok, in2, b)
    _store(next_low, rows, d1, W, row_ok, in1, a)
    _store(next_low, rows, d2, W, row_ok, in2, b)


@triton.jit
def unjoin(
    x,
    out,
    grad,
    by_head,
    by_encoder,
    d_x,
    d_out,
    M,
    HEADS: tl.constexpr,
    LAST: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BM: tl.constexpr,
    EPS: tl.constexpr,
):
    """Backward of `join`. The gradient that comes in is a sum: what the next level's residual gave, what each of its
    heads gave, and what its encoder gave; the last level has the first alone."""
    W: tl.constexpr = D1 + D2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows < M
    d1, d2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    in1, in2 = d1 < D1, d2 < W
    ga, gb = _load(grad, rows, d1, W, row_ok, in1), _load(grad, rows, d2, W, row_ok, in2)
    if not LAST:
        for head in tl.static_range(0, HEADS):
            ga += _load(by_head, head * M + rows, d1, W, row_ok, in1)
            gb += _load(by_head, head * M + rows, d2, W, row_ok, in2)
        ga += _load(by_encoder, rows, d1, W, row_ok, in1)
        gb += _load(by_encoder, rows, d2, W, row_ok, in2)
    oa, ob, inverse_out = _normed(_load(out, rows, d1, W, row_ok, in1), _load(out, rows, d2, W, row_ok, in2), W, EPS)
    a, b = oa + _load(x, rows, d1, W, row_ok, in1), ob + _load(x, rows, d2, W, row_ok, in2)
    a, b, inverse_sum = _normed(a, b, W, EPS)
    if not LAST:
        na, nb, inverse_next = _normed(a, b, W, EPS)
        ga, gb = _norm_backward(ga, gb, na, nb, inverse_next, W)
    ga, gb = _norm_backward(ga, gb, a, b, inverse_sum, W)
    _store(d_x, rows, d1, W, row_ok, in1, ga)
    _store(d_x, rows, d2, W, row_ok, in2, gb)
    ga, gb = _norm_backward(ga, gb, oa, ob, inverse_out, W)
    _store(d_out, rows, d1, W, row_ok, in1, ga)
    _store(d_out, rows, d2, W, row_ok, in2, gb)


@triton.jit
def ungate(
    s,
    z,
    decoder,
    d_out,
    d_v,
    d_s,
    scale,
    M,
    columns,
    SHARE: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SUM: tl.constexpr,
):
    """Backward of `gate`, over a share of the columns: the gradients of y @ weight and, by the gate, of s. Where z is
    zero, s was, or the gate was closed or dropped: nothing comes back through y, and through s nothing that counts."""
    W: tl.constexpr = D1 + D2
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows < M
    d1, d2 = tl.arange(0, D1), D1 + tl.arange(0, D2)
    in1, in2 = d1 < D1, d2 < W
    o1, o2 = _load(d_out, rows, d1, W, row_ok, in1), _load(d_out, rows, d2, W, row_ok, in2)
    for start in range(0, SHARE, BN):
        at = tl.program_id(1) * SHARE + start + tl.arange(0, BN)
        column_ok = (at < columns) & (start + tl.arange(0, BN) < SHARE)
        d_z = _dot(o1, tl.trans(_load(decoder, at, d1, W, column_ok, in1)), SUM)
        d_z = _dot_onto(o2, tl.trans(_load(decoder, at, d2, W, column_ok, in2)), d_z, SUM)
        latent = _load(s, rows, at, columns, row_ok, column_ok).to(SUM)
        product = _load(z, rows, at, columns, row_ok, column_ok).to(SUM)
        opened = product > 0
        _store(
            d_s,
            rows,
            at,
            columns,
            row_ok,
            column_ok,
            tl.where(opened, d_z * product / tl.where(opened, latent, 1.0), 0.0),
        )
        _store(d_v, rows, at, columns, row_ok, column_ok, tl.where(opened, d_z * latent * scale, 0.0))


@triton.jit
def pull(
    x,
    y,
    inverse,
    scores,
    own_scores,
    d_y,
    d_x,
    d_scores,
    d_own,
    M,
    T,
    H: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    SUM: tl.constexpr,
):
    """Backward of `attend` down to the scores, of one image and head. Scores are symmetric in the tokens, so the
    gradients of both of their factors are one product: `d_scores` is the gradient plus its transpose. `d_x` gets this
    head's part of the gradient of x as what is attended to."""
    image, head = tl.program_id(0) // H, tl.program_id(0) % H
    kind = x.dtype.element_ty
    W: tl.constexpr = D1 + D2
    t, d1, d2 = tl.arange(0, TILE), tl.arange(0, D1), D1 + tl.arange(0, D2)
    ok, in1, in2 = t < T, d1 < D1, d2 < W
    rows, extra = image * T + t, image * T + TILE
    at = head * M + rows
    place = tl.program_id(0).to(tl.int64) * (TILE + EXTRA) * TILE
    ga, gb = _norm_backward(
        _load(d_y, at, d1, W, ok, in1).to(SUM),
        _load(d_y, at, d2, W, ok, in2).to(SUM),
        _load(y, at, d1, W, ok, in1).to(SUM),
        _load(y, at, d2, W, ok, in2).to(SUM),
        tl.load(inverse + at, mask=ok, other=0.0),
        W,
    )
    low_a, low_b = ga.to(kind), gb.to(kind)
    xa, xb = _load(x, rows, d1, W, ok, in1), _load(x, rows, d2, W, ok, in2)
    total = _dot_onto(low_b, tl.trans(xb), _dot(low_a, tl.trans(xa), SUM), SUM)
    tl.store(d_scores + place + t[:, None] * TILE + t[None, :], (total + tl.trans(total)).to(kind))
    weights = tl.load(scores + place + t[:, None] * TILE + t[None, :])
    va, vb = _dot(weights, low_a, SUM), _dot(weights, low_b, SUM)
    if EXTRA:
        here = (head * M + extra).to(tl.int64) * W
        ha, hb = tl.load(d_y + here + d1).to(SUM), tl.load(d_y + here + d2).to(SUM)
        na, nb = tl.load(y + here + d1).to(SUM), tl.load(y + here + d2).to(SUM)
        mean = (tl.sum(ha, 0) + tl.sum(hb, 0)) / W
        along = (tl.sum(ha * na, 0) + tl.sum(hb * nb, 0)) / W
        by = tl.load(inverse + head * M + extra)
        ha, hb = (ha - mean - na * along) * by, (hb - mean - nb * along) * by
        pa, pb = tl.load(x + extra.to(tl.int64) * W + d1).to(SUM), tl.load(x + extra.to(tl.int64) * W + d2).to(SUM)
        beside = tl.sum(ga * pa[None, :] + xa * ha[None, :], 1) + tl.sum(gb * pb[None, :] + xb * hb[None, :], 1)
        tl.store(d_scores + place + TILE * TILE + t, beside.to(kind))
        side = tl.load(scores + place + TILE * TILE + t).to(SUM)
        own = tl.load(own_scores + tl.program_id(0))
        va += side[:, None] * ha[None, :]
        vb += side[:, None] * hb[None, :]
        tl.store(d_x + here + d1, (tl.sum(side[:, None] * ga, 0) + own * ha).to(kind))
        tl.store(d_x + here + d2, (tl.sum(side[:, None] * gb, 0) + own * hb).to(kind))
        tl.store(d_own + tl.program_id(0), 2 * (tl.sum(ha * pa, 0) + tl.sum(hb * pb, 0)))
    _store(d_x, at, d1, W, ok, in1, va)
    _store(d_x, at, d2, W, ok, in2, vb)


@triton.jit
def unattend(
    s,
    cos,
    sin,
    d_scores,
    d_own,
    d_s,
    T,
    H: tl.constexpr,
    HALF: tl.constexpr,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
    EXTRA: tl.constexpr,
    BN: tl.constexpr,
    SUM: tl.constexpr,
):
    """Backward of the scores, the rotation and the encoder's relu, over a share of a head's units: `d_s` holds what the
    gate gave and receives the whole."""
    image, head = tl.program_id(0) // H, tl.program_id(0) % H
    kind = s.dtype.element_ty
    columns = H * 2 * HALF
    first = head * 2 * HALF
    t = tl.arange(0, TILE)
    ok = t < T
    rows, extra = image * T + t, image * T + TILE
    place = d_scores + tl.program_id(0).to(tl.int64) * (TILE + EXTRA) * TILE
    among = tl.load(place + t[:, None] * TILE + t[None, :])
    if EXTRA:
        side = tl.load(place + TILE * TILE + t)
        # As the first row of a small tile: a product sums over the tokens faster than a reduction across warps does.
        row = tl.where(tl.arange(0, 16)[:, None] == 0, side[None, :], 0.0).to(kind)
        side = side.to(SUM)
        own = tl.load(d_own + tl.program_id(0))
    for start in range(0, SHARE, BN):
        units = tl.program_id(1) * SHARE + start + tl.arange(0, BN)
        unit_ok = (units < HALF) & (start + tl.arange(0, BN) < SHARE)
        a, b, c, d, open_a, open_b = _rotated(s, cos, sin, rows, t, ok, units, unit_ok, first, columns, HALF, SUM)
        low_a, low_b = a.to(kind), b.to(kind)
        da, db = _dot(among, low_a, SUM), _dot(among, low_b, SUM)
        if EXTRA:
            p, q, e, f, open_p, open_q = _rotated_row(
                s, cos, sin, extra, TILE, units, unit_ok, first, columns, HALF, SUM
            )
            dp = tl.sum(_dot(row, low_a, SUM), 0) + own * p
            dq = tl.sum(_dot(row, low_b, SUM), 0) + own * q
            da += side[:, None] * p[None, :]
            db += side[:, None] * q[None, :]
            edge = d_s + extra.to(tl.int64) * columns + first + units
            dp, dq = (
                dp * e + dq * f + tl.load(edge, mask=unit_ok, other=0.0),
                dq * e - dp * f + tl.load(edge + HALF, mask=unit_ok, other=0.0),
            )
            tl.store(edge, tl.where(open_p, dp, 0.0).to(kind), mask=unit_ok)
            tl.store(edge + HALF, tl.where(open_q, dq, 0.0).to(kind), mask=unit_ok)
        da, db = (
            da * c + db * d + _load(d_s, rows, first + units, columns, ok, unit_ok),
            db * c - da * d + _load(d_s, rows, first + HALF + units, columns, ok, unit_ok),
        )
        _store(d_s, rows, first + units, columns, ok, unit_ok, tl.where(open_a, da, 0.0))
        _store(d_s, rows, first + HALF + units, columns, ok, unit_ok, tl.where(open_b, db, 0.0))
