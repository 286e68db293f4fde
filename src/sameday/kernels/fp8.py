"""Matmuls of frozen linear layers whose weights are stored in eight bits: float8_e4m3fn with one scale for each output
channel. In bf16 the other operand is rounded to the same format, row by row, and the GPU multiplies in fp8; a CPU
multiplies the same numbers in float32. In float32 nothing but the weights is rounded.

Forward, a token's activations are one row. Backward, a token's gradient is: the weights' scales lie along the dimension
that is summed over, so they are multiplied into the gradient before it is rounded. It is rounded to e4m3 too: a scale
for each row covers its range, and e5m2 would have half of the precision.

The GPU takes the second operand by columns only, as the weights lie for the forward pass. For the backward pass they
are transposed each time, which moves two bytes for each weight; a second copy would keep one byte more instead."""

# No `from __future__ import annotations`: torch reads the operator's schema from real annotations.
from typing import Any

import torch
from torch import Tensor

FORMAT = torch.float8_e4m3fn
MULTIPLE = 16
"""Of which both sizes of a weight must be, for the GPU's fp8 matmul."""
ROUNDED: tuple[torch.dtype, ...] = (torch.bfloat16,)
"""Formats of operands that are rounded to fp8."""
FAST_SUMS = False
"""The faster sums of Hopper's fp8 matmuls have about 14 bits; without them partial sums are added up in float32."""

LEAST = 2.0**-100
"""What the largest number of a row is at least taken for, so that a row of zeros has a scale."""
EXPONENT, ONE, EIGHT = 0x7F800000, 0x3F800000, 8 << 23
"""Of float32's bits: those of the exponent, the number 1, and the difference of exponents between 2^8 and 1."""


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of (n, width) in fp8, and its scale (n, 1): the least power of two that brings it to 448 at most, the
    largest number of the format. A power of two only shifts exponents. So each number is rounded once, and alike on
    every device, compiled or not, whatever rows are beside it."""
    most = torch.linalg.vector_norm(rows, torch.inf, -1, True).float().clamp_min(LEAST)
    # 448 is 1.75 · 2^8. With a fraction above 1.75 the exponent must be one more: the sum carries into it.
    bits = ((most.view(torch.int32) + 0x1FFFFF) & EXPONENT) - EIGHT
    inverse = (2 * ONE - bits).view(torch.float32).to(rows.dtype)
    # What is not finite must stay so; some casts would make it 448.
    scale = bits.view(torch.float32) + (most - most)
    return (rows * inverse).to(FORMAT).contiguous(), scale


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights, exactly: bf16 holds every number of fp8 times a power of two."""
    return codes.to(dtype) * scale.to(dtype)[:, None]


def fp8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x times the transposed weights: codes (out, in) with scales (out,). Computed in x's format, or in autocast's. No
    gradient flows to weights and bias."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out = _Linear.apply(x.reshape(-1, x.shape[-1]), codes, scale).view(*x.shape[:-1], len(codes))
    return out if bias is None else out + bias.to(out.dtype)


class _Linear(torch.autograd.Function):
    """In plain torch, so that torch.compile joins the rounding with what comes before it, and rounds the input of
    several layers once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return _times(x, codes.t(), scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        return _times(gradient * scale.to(gradient.dtype), codes, None), None, None


def _times(rows: Tensor, codes: Tensor, scale: Tensor | None) -> Tensor:
    """(n, k) times (k, m), of whose columns each may have a scale."""
    if rows.dtype not in ROUNDED:
        out = _product(rows, codes)
        return out if scale is None else out * scale.to(out.dtype)
    rounded, each = quantize(rows)
    columns = each.new_ones(codes.shape[1]) if scale is None else scale
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        by_columns = codes if codes.stride(0) == 1 else codes.t().contiguous().t()
        return torch._scaled_mm(
            rounded, by_columns, each, columns[None], out_dtype=rows.dtype, use_fast_accum=FAST_SUMS
        )
    return (_product(rounded.float(), codes) * each * columns).to(rows.dtype)


@torch.library.custom_op("sameday::fp8_product", mutates_args=())
def _product(rows: Tensor, codes: Tensor) -> Tensor:
    """In the rows' format. An operator of its own, because torch.compile would see that both passes take the codes to
    this format, and keep those of the forward pass: a whole model."""
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ codes.to(rows.dtype)


@_product.register_fake
def _(rows, codes):  # type: ignore[no-untyped-def]
    return rows.new_empty(rows.shape[0], codes.shape[1])
