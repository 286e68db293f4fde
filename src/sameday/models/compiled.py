"""torch.compile for a vision model's layers, trusted only after it gave what eager gives.

Layer by layer: the whole model as one graph had gradients a hundred times too large on torch 2.11 and an H200, at some
sizes of batch and not at others, with losses that were right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sameday.kernels.dropout import dropouts
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan

BACKEND = "inductor"
"""Tests try the graphs without what turns them into kernels."""

FARTHEST = {"bf16": 0.1, "tf32": 1e-2, "float32": 1e-3}
"""How far, relatively, what is compiled may be from eager: what a wrong graph exceeds, and another order of summation
does not. `sameday verify` looks more closely."""


class Compiled:
    """A model whose `run_layer` is compiled. Each size of batch, with gradients and without, with dropout and without,
    may be a graph of its own: the first batch of each is compared with eager. What fails stops the run where the plan
    asks for it, and is left for eager, with `why`, where the plan leaves it open."""

    def __init__(self, model: Any, plan: Plan, precision: str) -> None:
        self.model, self.plan, self.farthest = model, plan, FARTHEST[precision]
        self.why: str | None = None
        self.eager: Callable[..., Tensor] = model.run_layer
        self.made: Callable[..., Tensor] | None = None
        self._trusted: set[tuple[int, bool, bool]] = set()
        mode: Any = None if plan.compile_mode == "default" else plan.compile_mode
        if plan.cuda_graphs and plan.compile_mode == "max-autotune":
            mode = "max-autotune-no-cudagraphs"  # the run records its own
        torch._dynamo.config.recompile_limit = 32  # past torch's eight, the rest would silently run uncompiled
        try:
            self.made = torch.compile(self.eager, backend=BACKEND, mode=mode)
        except Exception as error:
            self._failed(_words(error))

    def __call__(self, pixels: Tensor, keys: Tensor) -> Tensor:
        kind = (len(pixels), torch.is_grad_enabled(), any(layer.training for layer in dropouts(self.model)))
        if self.made is not None and kind not in self._trusted:
            self._try(pixels, keys)
            self._trusted.add(kind)
        return self._logits(self.made or self.eager, pixels, keys)

    def _logits(self, by: Callable[..., Tensor], pixels: Tensor, keys: Tensor) -> Tensor:
        self.model.run_layer = by
        try:
            logits: Tensor = self.model(pixels, keys)
        finally:
            self.model.run_layer = self.eager
        return logits

    def _try(self, pixels: Tensor, keys: Tensor) -> None:
        assert self.made is not None
        eager = self._outputs(self.eager, pixels, keys)
        try:
            other = self._outputs(self.made, pixels, keys)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a backend raises, the model is as good as before
            self._failed(_words(error))
            return
        for name in eager:
            distance = float((other[name] - eager[name]).norm() / eager[name].norm().clamp(min=1e-30))
            if not distance <= self.farthest:
                how = "" if torch.is_grad_enabled() else ", without gradients"
                self._failed(
                    f"disagrees with eager for {len(pixels)} images{how}: {name} are {distance:.2g} away relatively, "
                    f"at most {self.farthest:g} is allowed"
                )
                return

    def _outputs(self, by: Callable[..., Tensor], pixels: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """Logits, and the gradients that a fixed direction of them gives."""
        torch.compiler.cudagraph_mark_step_begin()
        torch.clear_autocast_cache()
        logits = self._logits(by, pixels, keys)
        outputs = {"logits": logits}
        if torch.is_grad_enabled():
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            direction = torch.arange(logits.numel(), device=logits.device).cos().view_as(logits).to(logits.dtype)
            outputs |= zip(trained, torch.autograd.grad(logits, list(trained.values()), direction), strict=True)
        torch.clear_autocast_cache()
        return {name: tensor.detach().clone() for name, tensor in outputs.items()}

    def _failed(self, how: str) -> None:
        why = f"torch.compile in mode {self.plan.compile_mode}, {how}"
        torch.compiler.reset()
        self.made = None
        if self.plan.compile != "auto":
            raise BadInput(f"plan.compile {self.plan.compile}: {why}; allowed: none, or auto, which falls back")
        if self._trusted:
            warnings.warn(f"compile: none from here on, because {why}", stacklevel=2)
        self.why = why


def _words(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
