"""How the frozen linear layers of a base model are stored, where that is not the recipe's precision: which layers, what
becomes of them, and the weights that training then sees."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sameday.kernels import fp8, nf4
from sameday.models.fp8 import Fp8Linear, fp8_layers
from sameday.models.nf4 import SOURCE, Nf4Linear, four_bit_layers
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import first_names


def stored_layers(base: Any, recipe: VlmRecipe) -> list[str]:
    """Names of the linear layers that the recipe stores in its base format; none where that is `precision`."""
    return {"precision": lambda _: [], "nf4": four_bit_layers, "fp8": fp8_layers}[recipe.base_format](base)


def quantize(base: Any, recipe: VlmRecipe, device: torch.device) -> None:
    """In place, layer by layer. Layers that are stored so already stay as they are."""
    if recipe.base_format == "precision":
        return
    for name in stored_layers(base, recipe):
        base.set_submodule(name, _layer(base.get_submodule(name), recipe, device))
    for parameter in base.parameters():
        if parameter.dtype == SOURCE:
            parameter.data = parameter.data.to(computed_in(recipe))


def by_kind(base: nn.Module) -> dict[str, int]:
    """How many layers are stored in codes, by their names without numbers."""
    names = [name for name, module in base.named_modules() if isinstance(module, Nf4Linear | Fp8Linear)]
    return dict(Counter(re.sub(r"\.\d+", ".*", name) for name in names))


def notes(base: nn.Module, recipe: VlmRecipe, device: torch.device) -> Iterator[str]:
    """What a run says of layers in fp8."""
    if recipe.base_format != "fp8":
        return
    left = [name for name, module in base.named_modules() if type(module) is nn.Linear]
    how = "" if device.type == "cuda" else "; on a CPU fp8 matmuls are emulated in float32"
    how = how if recipe.precision == "bf16" else f"; with precision {recipe.precision} their matmuls are not in fp8"
    yield f"base_format fp8: {sum(by_kind(base).values())} linear layers; not {first_names(left)}{how}"


def as_trained(weight: Tensor, recipe: VlmRecipe, dtype: torch.dtype) -> Tensor:
    """What training saw of the weight of such a layer."""
    if recipe.base_format == "nf4":
        codes, scales = nf4.quantize(weight.contiguous(), recipe.double_quant)
        return nf4.dequantize(codes, scales, tuple(weight.shape), dtype)
    codes, scale = fp8.quantize(weight)
    return fp8.dequantize(codes, scale[:, 0], dtype)


def computed_in(recipe: VlmRecipe) -> torch.dtype:
    return torch.bfloat16 if recipe.precision == "bf16" else torch.float32


def _layer(linear: nn.Linear, recipe: VlmRecipe, device: torch.device) -> nn.Linear:
    if recipe.base_format == "nf4":
        return Nf4Linear(linear, recipe.double_quant, computed_in(recipe), device)
    return Fp8Linear(linear, device)
