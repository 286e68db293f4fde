"""A base model whose linear layers are stored in four bits: which of them, made how, and what is needed for it."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor, nn

from sameday.kernels import nf4

SOURCE = torch.bfloat16
"""What codes and scales are made of, and what all other weights of the base model are rounded to, whatever format the
recipe computes in: a float32 recipe then has the same codes."""
INSTALL = "pip install 'bitsandbytes>=0.50,<0.51'"


def lacking(device: str) -> str | None:
    """Why weights in four bits cannot be had on this kind of device; None where they can."""
    asked = "recipe.base_format nf4 needs the package bitsandbytes"
    try:
        import_module("bitsandbytes")
    except ImportError:
        return f"{asked}, which is not installed: {INSTALL}; allowed without it: precision"
    try:
        codes, scales = nf4.quantize(torch.ones(1, nf4.BLOCK, dtype=SOURCE, device=device), False)
        nf4.dequantize(codes, scales, (1, nf4.BLOCK), SOURCE)
    except Exception as error:  # whatever a library without a build for this device raises
        why = str(error).strip().splitlines()
        version = metadata.version("bitsandbytes")
        said = why[0] if why else type(error).__name__
        return f"{asked}, and version {version}, which is installed, does not work on this machine's {device}: {said}"
    return None


class Nf4Linear(nn.Linear):
    """A frozen linear layer. `weight` holds the codes, two to a byte; its bias is as it was."""

    def __init__(self, linear: nn.Linear, double_quant: bool, weight_dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)  # there is no weight of its shape
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_dtype = weight_dtype
        """What the weights are dequantised to."""
        source = linear.weight.detach().to(device=device, dtype=SOURCE)
        codes, scales = nf4.quantize(source.contiguous(), double_quant)
        self.weight = _frozen(codes)
        # One by one: torch 2.11 cannot compile what goes through a ParameterList.
        self.scale_names = [f"scales_{n}" for n in range(len(scales))]
        for name, scale in zip(self.scale_names, scales, strict=True):
            self.register_parameter(name, _frozen(scale))
        self.bias = None if linear.bias is None else _frozen(linear.bias.detach().to(device))

    @property
    def scales(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.scale_names]

    def forward(self, x: Tensor) -> Tensor:
        return nf4.nf4_linear(x, self.weight, self.scales, self.bias, self.out_features, self.weight_dtype)

    def dequantized(self) -> Tensor:
        return nf4.dequantize(self.weight, self.scales, (self.out_features, self.in_features), self.weight_dtype)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def four_bit_layers(base: Any) -> list[str]:
    """Those that transformers' BitsAndBytesConfig takes, tower included, and `lm_head` not."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = HfQuantizer.get_modules_to_not_convert(base, None, base._keep_in_fp32_modules)
    linear = [name for name, module in base.named_modules() if type(module) is nn.Linear]
    return [name for name in linear if should_convert_module(name, kept)]
