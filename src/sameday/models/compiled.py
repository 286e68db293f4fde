"""torch.compile, trusted only after it gave what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan

BACKEND: str | None = None
"""Taken instead of the plan's, where it is set: tests try the graphs without what turns them into kernels."""

FARTHEST = {"bf16": 0.1, "tf32": 1e-2, "float32": 1e-3}
"""How far, relatively, a compiled first step may be from eager's: what a wrong graph exceeds, and another order of
summation does not. `sameday verify` looks more closely."""


def compiled(
    model: nn.Module, plan: Plan, precision: str, losses: Callable[[Any], Tensor]
) -> tuple[Callable[..., Any] | None, str | None]:
    """The compiled model and None; or, where the plan leaves it open, None and why there is none. An explicit wish that
    fails stops the run. `losses` computes the first step's losses by the model that it is given."""
    mode: Any = None if plan.compile_mode == "default" else plan.compile_mode
    if plan.cuda_graphs and plan.compile_mode == "max-autotune":
        mode = "max-autotune-no-cudagraphs"  # the run records its own
    where = f"torch.compile with backend {plan.compile_backend}, mode {plan.compile_mode},"
    try:
        made = torch.compile(model, backend=BACKEND or plan.compile_backend, mode=mode)
        problem = _disagreement(model, made, losses, FARTHEST[precision])
        why = f"{where} disagrees with eager: {problem}" if problem else None
    except Exception as error:  # whatever a backend raises, the model is as good as before
        why = f"{where} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if why is None:
        return made, None
    torch.compiler.reset()
    if plan.compile == "auto":
        return None, why
    raise BadInput(f"plan.compile {plan.compile}: {why}; allowed: none, or auto, which falls back")


def _disagreement(model: nn.Module, made: Any, losses: Callable[[Any], Tensor], farthest: float) -> str | None:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: list[tuple[Tensor, ...]] = []
    for run in (model, made):
        torch.compiler.cudagraph_mark_step_begin()
        each = losses(run)
        gradients = torch.autograd.grad(each.sum(), list(parameters.values()))
        found.append(tuple(tensor.detach().clone() for tensor in (each, *gradients)))
    for name, eager, other in zip(("losses", *parameters), *found, strict=True):
        distance = float((other - eager).norm() / eager.norm().clamp(min=1e-30))
        if not distance <= farthest:
            return f"{name} are {distance:.2g} away relatively, at most {farthest:g} is allowed"
    return None
