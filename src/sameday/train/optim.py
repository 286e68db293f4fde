"""AdamW as the recipe says, in the implementation the plan names; the learning rate as a function of the step; and
gradients in one flat buffer, so that ranks add them with one call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe


def learning_rate(recipe: Recipe, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`: the same curve that transformers' schedulers give, so that a
    converted recipe trains what it trained before."""
    warmup = recipe.warmup_steps if recipe.warmup_steps is not None else math.ceil(recipe.warmup_ratio * total)
    if step < warmup:
        return recipe.learning_rate * step / warmup
    if recipe.schedule == "constant":
        return recipe.learning_rate
    done = (step - warmup) / max(1, total - warmup)
    if recipe.schedule == "linear":
        return recipe.learning_rate * max(0.0, 1 - done)
    return recipe.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(
    trained: dict[str, nn.Parameter],
    recipe: Recipe,
    plan: Plan,
    own_rates: Mapping[str, tuple[float, Collection[str]]] | None = None,
) -> torch.optim.AdamW:
    """Weight decay on matrices; vectors (norms, biases) have none. `own_rates` are those of parts, as a task has them:
    a group's `scale` is what it multiplies the recipe's rate by."""
    scales = {name: rate / recipe.learning_rate for rate, names in (own_rates or {}).values() for name in names}
    groups: list[dict[str, Any]] = []
    for scale in dict.fromkeys((1.0, *scales.values())):
        mine = [p for name, p in trained.items() if scales.get(name, 1.0) == scale]
        matrices, vectors = [p for p in mine if p.ndim >= 2], [p for p in mine if p.ndim < 2]
        groups.append({"params": matrices, "weight_decay": recipe.weight_decay, "scale": scale})
        groups.append({"params": vectors, "weight_decay": 0.0, "scale": scale})
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.eps,
        foreach=plan.optimizer_impl == "foreach",
        fused=plan.optimizer_impl == "fused",
    )


def allocate_state(optimizer: torch.optim.AdamW) -> None:
    """AdamW's moments, as its first step would make them: memory that is too little for them shows before any data is
    read, and not in the middle of an update."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        step = torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
        optimizer.state[parameter] = {"step": step, **moments}


def optimizer_tensors(optimizer: torch.optim.AdamW, trained: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's state by parameter name."""
    return {
        f"{name}/{key}": value
        for name, parameter in trained.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore_optimizer(
    optimizer: torch.optim.AdamW, trained: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """BadInput where they are of other weights."""
    keys = ("step", "exp_avg", "exp_avg_sq")
    forms = {f"{name}/{k}": () if k == "step" else tuple(p.shape) for name, p in trained.items() for k in keys}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != forms:
        raise BadInput("the optimizer's state does not have the tensors of what is trained")
    for name, parameter in trained.items():
        state = {k: tensors[f"{name}/{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
        on_device = {k: state[k].to(parameter.device) for k in ("exp_avg", "exp_avg_sq")}
        # Only the fused implementation keeps its step count on the device.
        step = state["step"].to(parameter.device if optimizer.defaults["fused"] else "cpu")
        optimizer.state[parameter] = {"step": step, **on_device}


class Gradients:
    """All gradients as views of one buffer, with a few numbers at its end that ranks must agree on: the step's loss,
    whether any rank ran out of memory, was asked to stop, gave the step up, or failed in it, and the sums of `parts` of
    the loss. Its format is that of what is trained."""

    TAIL = ("loss", "out_of_memory", "stop", "given_up", "failed")

    def __init__(self, trained: dict[str, nn.Parameter], parts: int = 0) -> None:
        if not trained:
            raise BadInput("nothing is trained: no parameter requires a gradient")
        parameters = list(trained.values())
        self.count = sum(p.numel() for p in parameters)
        first = parameters[0]
        self.buffer = torch.zeros(self.count + len(self.TAIL) + parts, device=first.device, dtype=first.dtype)
        at = 0
        for parameter in parameters:
            parameter.grad = self.buffer[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        self.all = self.buffer[: self.count]
        self.tail = self.buffer[self.count :]
        self.parts = self.tail[len(self.TAIL) :]

    def zero(self) -> None:
        self.buffer.zero_()

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.all)

    def clip(self, norm: float | Tensor, limit: float | None) -> None:
        """Scale the whole step's gradient down to the limit. A norm that is still on the device is not waited for; the
        result has the same bits."""
        if limit is None:
            return
        if isinstance(norm, Tensor):
            exact = norm.double()
            # A number over a tensor would be that number times one over the tensor, with other last bits.
            shrunk = torch.full_like(exact, limit) / (exact + 1e-6)
            self.all.mul_(torch.where(exact > limit, shrunk, 1.0))
        elif norm > limit:
            self.all.mul_(limit / (norm + 1e-6))
