"""LoRA added to the outputs of layers that share their input, with few trips through memory: y + s·dropout(x)·Aᵀ·Bᵀ for
up to three layers, of which each has its own mask. Beside the plain computation stand the kernels of `lora_triton`.

Two operators, each with its gradient. `down`: from x (tokens, width) to u (adapters, tokens, rank), times s/(1 - p).
`up`: from u and the layers' outputs to their sums. Adapters are float32 and rounded to the format of x, sums are
float32, and the mask is drawn again in the backward pass."""

# No `from __future__ import annotations`: torch reads the operators' schemas from real annotations.
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from sameday.kernels import lora_launch as launch
from sameday.kernels.bdh import interpreted
from sameday.kernels.dropout import keeps


class Adapter(NamedTuple):
    """Of one layer: `a` (rank, inputs), `b` (outputs, rank), what its output is multiplied by, and where there is
    dropout the keys of its columns."""

    a: Tensor
    b: Tensor
    scale: float
    columns: Tensor | None = None


class Dropped(NamedTuple):
    """Dropout of a group: the rate, below which draw an element is dropped, and the keys of the rows."""

    p: float
    threshold: int
    rows: Tensor


def add_lora(x: Tensor, outputs: Sequence[Tensor], adapters: Sequence[Adapter], drop: Dropped | None) -> list[Tensor]:
    """What layers gave for x, each with its adapter's part added."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    a, b, by = [each.a for each in adapters], [each.b for each in adapters], 1.0
    rows: Tensor | None = None
    columns: list[Tensor] = []
    if drop is not None:
        columns = [each.columns for each in adapters if each.columns is not None]
        assert len(columns) == len(adapters), "dropout needs the keys of every layer's columns"
        rows, by = drop.rows.reshape(-1), 1 / (1 - drop.p)
    factors, threshold = [each.scale * by for each in adapters], 0 if drop is None else drop.threshold
    u = down(x.flatten(0, -2), rows, columns, a, factors, threshold)
    results = up([y.flatten(0, -2) for y in outputs], u, b)
    return [result.view(y.shape) for result, y in zip(results, outputs, strict=True)]


# The plain computation


def plain_down(
    x: Tensor,
    rows: Tensor | None,
    columns: Sequence[Tensor],
    a: Sequence[Tensor],
    factors: Sequence[float],
    threshold: int,
) -> Tensor:
    u = x.new_zeros(len(a), len(x), max(map(len, a)))
    for number, (weight, factor) in enumerate(zip(a, factors, strict=True)):
        seen = x if rows is None else x * keeps(rows[:, None], columns[number], threshold)
        u[number, :, : len(weight)] = (_wide(seen) @ _wide(weight.to(x.dtype)).T * factor).to(x.dtype)
    return u


def plain_down_backward(
    du: Tensor,
    x: Tensor,
    rows: Tensor | None,
    columns: Sequence[Tensor],
    a: Sequence[Tensor],
    factors: Sequence[float],
    threshold: int,
    needed: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.zeros_like(_wide(x))
    da = dx.new_zeros(len(a), du.shape[2], x.shape[1])
    for number, (weight, factor) in enumerate(zip(a, factors, strict=True)):
        mask = torch.ones_like(x) if rows is None else keeps(rows[:, None], columns[number], threshold)
        gradient = _wide(du[number, :, : len(weight)])
        dx += gradient @ _wide(weight.to(x.dtype)) * factor * mask
        da[number, : len(weight)] = gradient.T @ _wide(x * mask) * factor
    return dx.to(x.dtype) if needed else x.new_empty(0), da


def plain_up(outputs: Sequence[Tensor], u: Tensor, b: Sequence[Tensor]) -> list[Tensor]:
    each = zip(outputs, u.unbind(), b, strict=True)
    return [(_wide(y) + _wide(low[:, : w.shape[1]]) @ _wide(w.to(low.dtype)).T).to(y.dtype) for y, low, w in each]


def plain_up_backward(gradients: Sequence[Tensor], u: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    du = torch.zeros_like(u)
    weights: list[Tensor] = []
    for number, (gradient, weight) in enumerate(zip(gradients, b, strict=True)):
        dy = _wide(gradient.to(u.dtype))
        du[number, :, : weight.shape[1]] = (dy @ _wide(weight.to(u.dtype))).to(u.dtype)
        weights.append(dy.T @ _wide(u[number]))
    return du, torch.cat(weights)


def _wide(tensor: Tensor) -> Tensor:
    """In which sums are made."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# The operators. torch.compile sees each as one, not the kernels that it launches.


def _group(like: Tensor, ranks: Sequence[int]) -> launch.Group | None:
    """None where there is nothing that runs Triton's kernels."""
    if not like.is_cuda and not interpreted():
        return None
    if like.dtype == torch.bfloat16 and not like.is_cuda:
        raise ValueError("Triton's interpreter has no bf16: it would multiply the bits as whole numbers")
    return launch.Group(like.dtype, ranks)


@torch.library.custom_op("sameday::lora_down", mutates_args=())
def down(
    x: Tensor,
    rows: Optional[Tensor],  # noqa: UP045 (torch reads it)
    columns: Sequence[Tensor],
    a: Sequence[Tensor],
    factors: Sequence[float],
    threshold: int,
) -> Tensor:
    run = _group(x, [len(weight) for weight in a])
    if run is None:
        return plain_down(x, rows, columns, a, factors, threshold)
    return launch.down(run, x.contiguous(), launch.Mask(rows, columns, threshold), a, factors)


@torch.library.custom_op("sameday::lora_down_backward", mutates_args=())
def down_backward(
    du: Tensor,
    x: Tensor,
    rows: Optional[Tensor],  # noqa: UP045
    columns: Sequence[Tensor],
    a: Sequence[Tensor],
    factors: Sequence[float],
    threshold: int,
    needed: bool,
) -> tuple[Tensor, Tensor]:
    run = _group(x, [len(weight) for weight in a])
    if run is None:
        return plain_down_backward(du, x, rows, columns, a, factors, threshold, needed)
    mask = launch.Mask(rows, columns, threshold)
    return launch.down_backward(run, du.contiguous(), x.contiguous(), mask, a, factors, needed)


@torch.library.custom_op("sameday::lora_up", mutates_args=())
def up(outputs: Sequence[Tensor], u: Tensor, b: Sequence[Tensor]) -> list[Tensor]:
    run = _group(u, [weight.shape[1] for weight in b])
    if run is None:
        return plain_up(outputs, u, b)
    return launch.up(run, [y.contiguous() for y in outputs], u, b)


@torch.library.custom_op("sameday::lora_up_backward", mutates_args=())
def up_backward(gradients: Sequence[Tensor], u: Tensor, b: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    run = _group(u, [weight.shape[1] for weight in b])
    if run is None:
        return plain_up_backward(gradients, u, b)
    return launch.up_backward(run, [y.contiguous() for y in gradients], u, b)


def _sums(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _most(weights: Sequence[Tensor], axis: int) -> int:
    return max(weight.shape[axis] for weight in weights)


@down.register_fake
def _(x, rows, columns, a, factors, threshold):  # type: ignore[no-untyped-def]
    return x.new_empty(len(a), x.shape[0], _most(a, 0))


@down_backward.register_fake
def _(du, x, rows, columns, a, factors, threshold, needed):  # type: ignore[no-untyped-def]
    dx = x.new_empty(x.shape) if needed else x.new_empty(0)
    return dx, x.new_empty(len(a), _most(a, 0), x.shape[1], dtype=_sums(x))


@up.register_fake
def _(outputs, u, b):  # type: ignore[no-untyped-def]
    return [y.new_empty(y.shape) for y in outputs]


@up_backward.register_fake
def _(gradients, u, b):  # type: ignore[no-untyped-def]
    return u.new_empty(u.shape), u.new_empty(sum(len(w) for w in b), u.shape[2], dtype=_sums(u))


def _keep_down(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, rows, columns, a, ctx.factors, ctx.threshold = inputs
    ctx.columns = len(columns)
    ctx.save_for_backward(x, rows, *columns, *a)


def _derive_down(ctx, du):  # type: ignore[no-untyped-def]
    x, rows, *more = ctx.saved_tensors
    columns, a = more[: ctx.columns], more[ctx.columns :]
    needed = ctx.needs_input_grad[0]
    dx, da = down_backward(du, x, rows, columns, a, ctx.factors, ctx.threshold, needed)
    weights = [da[number, : len(weight)].to(weight.dtype) for number, weight in enumerate(a)]
    return dx if needed else None, None, [None] * len(columns), weights, None, None


def _keep_up(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _outputs, u, b = inputs
    ctx.save_for_backward(u, *b)


def _derive_up(ctx, gradients):  # type: ignore[no-untyped-def]
    u, *b = ctx.saved_tensors
    du, db = up_backward(gradients, u, b)
    weights = [part[:, : w.shape[1]].to(w.dtype) for part, w in zip(db.split([len(w) for w in b]), b, strict=True)]
    return gradients, du, weights


down.register_autograd(_derive_down, setup_context=_keep_down)
up.register_autograd(_derive_up, setup_context=_keep_up)
