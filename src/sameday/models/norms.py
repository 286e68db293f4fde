"""RMS norms in one kernel, where the library has six."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fuse_norms(decoder: nn.Module) -> None:
    """Where there is nothing to differentiate or compile, and weights are in the format of what they scale: rounded
    once, where the library rounds twice."""
    for module in decoder.modules():
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and not hasattr(kind, "library"):
            module.__class__ = _fused(kind)


@cache
def _fused(library: Any) -> Any:
    plain: Callable[[Any, Tensor], Tensor] = library.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dtype != self.weight.dtype:
            return plain(self, x)
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    return type(f"Fused{library.__name__}", (library,), {"forward": forward, "library": library})
