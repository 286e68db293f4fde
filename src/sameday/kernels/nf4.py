"""Matmuls with weights that are stored in four bits (NF4, as bitsandbytes packs them): the weights are dequantised for
the matmul and let go, and in the backward pass dequantised again, so that never more than one layer's are there.

Operators of their own, because torch.compile would see that both passes dequantise the same weights, and would keep
those of the forward pass: a whole model in sixteen bits."""

# No `from __future__ import annotations`: torch reads the operators' schemas from real annotations.
from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK, SCALES_BLOCK = 64, 256
"""Weights that share a scale; and scales that share one, where they are quantized themselves."""


def quantize(weight: Tensor, double_quant: bool) -> tuple[Tensor, list[Tensor]]:
    """Two codes to a byte, and their scales: one float32 each, or with `double_quant` eight bits each, and then the
    scales of those, the table of their values and their mean."""
    import bitsandbytes

    made: tuple[Tensor, object] = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=double_quant, quant_type="nf4"
    )
    codes, state = made[0], made[1]
    if not double_quant:
        return codes, [state.absmax]  # type: ignore[attr-defined]
    inner = state.state2  # type: ignore[attr-defined]
    return codes, [state.absmax, inner.absmax, inner.code, state.offset]  # type: ignore[attr-defined]


def dequantize(codes: Tensor, scales: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weights as bitsandbytes gives them in this format, float32 or a half precision."""
    absmax, *inner = (scale if scale.dtype == torch.uint8 else scale.float() for scale in scales)
    ops = torch.ops.bitsandbytes
    if inner:
        absmax = ops.dequantize_blockwise(absmax, inner[0], inner[1], SCALES_BLOCK, torch.float32) + inner[2]
    weights: Tensor = ops.dequantize_4bit(codes, absmax, BLOCK, "nf4", shape, dtype)
    return weights


def nf4_linear(
    x: Tensor, codes: Tensor, scales: Sequence[Tensor], bias: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """x times the transposed weights, of which there are `rows`, dequantised to `dtype`; computed in x's format, or in
    autocast's. No gradient flows to weights and bias."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _forward(x, codes, list(scales), None if bias is None else bias.to(x.dtype), rows, dtype)


@torch.library.custom_op("sameday::nf4_linear", mutates_args=())
def _forward(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    bias: Optional[Tensor],  # noqa: UP045 (torch reads it)
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    weights = dequantize(codes, scales, (rows, x.shape[-1]), dtype).to(x.dtype)
    return F.linear(x, weights, bias)


@torch.library.custom_op("sameday::nf4_linear_backward", mutates_args=())
def _backward(gradient: Tensor, codes: Tensor, scales: Sequence[Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    weights = dequantize(codes, scales, (gradient.shape[-1], columns), dtype).to(gradient.dtype)
    return gradient @ weights


@_forward.register_fake
def _(x, codes, scales, bias, rows, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], rows)


@_backward.register_fake
def _(gradient, codes, scales, columns, dtype):  # type: ignore[no-untyped-def]
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, codes, scales, _bias, _rows, ctx.dtype = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(codes, *scales)


def _derive(ctx, gradient):  # type: ignore[no-untyped-def]
    codes, *scales = ctx.saved_tensors
    return _backward(gradient, codes, scales, ctx.columns, ctx.dtype), None, [None] * len(scales), None, None, None


_forward.register_autograd(_derive, setup_context=_keep)
