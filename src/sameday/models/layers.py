"""Layers under torch.compile: one graph serves all of them and whatever comes by.

Left to itself torch.compile makes a graph for the first length that it meets and another for any length, one for inputs
that are views of other tensors and one for those that are not, in the middle of a run and for a quarter of a minute
each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn


def compile_layers(layers: Iterable[nn.Module], backend: str, activation_budget: float) -> None:
    """In place, so that parameters keep their names. There are still a few graphs: of training, of the last layer in
    training, whose MLP is computed at targets alone, of evaluation, and of layers whose input has no gradient. Past
    torch's limit of eight the rest would silently run uncompiled. Graphs keep a share of their activations, the
    budget.

    No matmul is padded: for each that is not aligned, as an adapter's of rank 4, torch 2.11 compares the number of
    tokens with the layer's widths, to see whether it is compute-bound, and makes a graph for more, one for fewer and
    one for as many. These are not compute-bound, and all other widths are aligned."""
    torch._dynamo.config.recompile_limit = 32
    options: dict[str, Any] = {"shape_padding": False} if backend == "inductor" else {}
    if functorch.activation_memory_budget != activation_budget:
        torch._dynamo.reset()  # graphs that were made for another model of this process keep another share
        functorch.activation_memory_budget = activation_budget
    for layer in layers:
        layer.compile(backend=backend, options=options or None)
        assert layer._compiled_call_impl is not None
        layer._compiled_call_impl = _steady(layer._compiled_call_impl)


def any_size(value: Any) -> None:
    """Let the sizes of a tensor, or of all tensors in a tuple, be any from the first graph on, except the width of
    features."""
    if isinstance(value, Tensor):
        torch._dynamo.maybe_mark_dynamic(value, tuple(range(value.ndim - value.is_floating_point())))
    elif isinstance(value, tuple):
        for each in value:
            any_size(each)


def _steady(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, *more: Any, **named: Any) -> Any:
        if x._is_view():
            x = torch.ops.aten._unsafe_view(x, x.shape)  # the same numbers, no longer a view
        any_size((x, *more, *named.values()))
        return run(x, *more, **named)

    return call
