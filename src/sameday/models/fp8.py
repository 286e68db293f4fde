"""A base model whose linear layers are stored in fp8: which of them, and which machines compute with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sameday.hardware.machine import Machine
from sameday.hardware.peaks import FP8_CAPABILITY
from sameday.kernels import fp8
from sameday.models.nf4 import SOURCE, four_bit_layers


def lacking(machine: Machine) -> str | None:
    """Why this machine cannot compute with weights in fp8; None where it can. A CPU emulates it."""
    if machine.device != "cuda":
        return None
    allowed = "allowed there: precision, nf4; plan.device cpu emulates fp8, slowly"
    if machine.capability < FP8_CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (FP8_CAPABILITY, machine.capability))
        return (
            f"recipe.base_format fp8 needs a GPU of compute capability {least} or more, and {machine.shown_name} has "
            f"{has}; {allowed}"
        )
    try:
        _try()
    except Exception as error:  # whatever a torch without such a matmul for this GPU raises
        said = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"recipe.base_format fp8: torch {torch.__version__} does not multiply in fp8, with a scale for each row, "
            f"on {machine.name}: {said[0]}; {allowed}"
        )
    return None


def _try() -> None:
    if torch.cuda.is_available():  # else the machine is another one
        rows = torch.ones(1, fp8.MULTIPLE, device="cuda", dtype=torch.bfloat16)
        codes, scale = fp8.quantize(rows.expand(fp8.MULTIPLE, -1))
        fp8.fp8_linear(rows, codes, scale[:, 0], None)


class Fp8Linear(nn.Linear):
    """A frozen linear layer. `weight` holds the codes, `scale` one number for each output; its bias is as it was."""

    compute_dtype = torch.float32
    """By which PEFT makes adapters, which would be in fp8 otherwise."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)  # there is no weight of its own to draw
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scale = fp8.quantize(linear.weight.detach().to(device=device, dtype=SOURCE))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale[:, 0], requires_grad=False)
        bias = None if linear.bias is None else linear.bias.detach().to(device)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        # A reference in float64 takes all parameters to that format; the codes come back exactly.
        return fp8.fp8_linear(x, self.weight.to(fp8.FORMAT), self.scale.float(), self.bias)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return fp8.dequantize(self.weight, self.scale, dtype)


def fp8_layers(base: Any) -> list[str]:
    """Those that nf4 takes, tower included and `lm_head` not, where both sizes fit the GPU's fp8 matmul."""
    names = four_bit_layers(base)
    sizes = {name: base.get_submodule(name).weight.shape for name in names}
    return [name for name in names if not any(size % fp8.MULTIPLE for size in sizes[name])]
