"""LoRA by PEFT: which layers get an adapter, how new adapters start, and dropout that is keyed instead of streamed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sameday.kernels.dropout import DropoutKeys, KeyedDropout, name_key
from sameday.models.families.base import Family
from sameday.spec.errors import BadInput
from sameday.spec.lora import Lora


def resolve_targets(model: nn.Module, family: Family, lora: Lora, allow_tower: bool) -> list[str] | str:
    """What PEFT is told: the names themselves where they are unambiguous, else a pattern. Where a target begins with
    the decoder's name, layers of its name in the vision tower are left out."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    known = sorted({name.rsplit(".", 1)[-1] for name in linear if family.language_name in name})
    decoder_only = family.language_name + "."
    patterns, qualified = [], False
    for target in lora.target_modules:
        short = target.removeprefix(decoder_only)
        layers = [name for name in linear if name == short or name.endswith("." + short)]
        if not layers:
            raise BadInput(
                f"lora.target_modules: no linear layer is called {target!r}; the language model has {', '.join(known)}"
            )
        if short != target:
            qualified = True
            patterns.append(rf".*\.{re.escape(family.language_name)}\..*\.{re.escape(short)}")
            continue
        tower = [name for name in layers if family.in_tower(name)]
        if tower and not allow_tower:
            raise BadInput(
                f"lora.target_modules: {target!r} is also a layer of the frozen vision tower ({tower[0]}, and "
                f"{len(tower) - 1} more); write {decoder_only + target!r} for the language model alone, or set "
                "train_vision: true"
            )
        patterns.append(rf"(.*\.)?{re.escape(short)}")
    targets = "|".join(patterns) if qualified else list(lora.target_modules)
    if allow_tower and not any(family.in_tower(name) for name in adapted_layers(model, targets)):
        raise BadInput(
            "train_vision is true, and none of lora.target_modules "
            f"({', '.join(lora.target_modules)}) is a layer of the vision tower"
        )
    return targets


def add_adapters(model: nn.Module, family: Family, lora: Lora, seed: int, allow_tower: bool) -> Any:
    """New adapters. A starts uniform, keyed by (seed, parameter name); B starts at zero, so that training starts
    from the base model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=resolve_targets(model, family, lora, allow_tower),
        bias="none",
    )
    wrapped = get_peft_model(model, config)
    for name, parameter in adapter_parameters(wrapped):
        if ".lora_A." in name:
            parameter.data.copy_(uniform(parameter, 1 / math.sqrt(parameter.shape[1]), seed, name))
        else:
            parameter.data.zero_()
    return wrapped


def adapted_layers(model: nn.Module, targets: Iterable[str] | str) -> set[str]:
    """The layers that PEFT gives an adapter for these targets."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name for name in linear if check_target_module_exists(config, name)}


def adapter_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if ".lora_A." in name or ".lora_B." in name)


def prepare_adapters(model: nn.Module, dropout: float, keys: DropoutKeys) -> None:
    """Float32 masters, inputs in the base model's format (autocast turns the matmuls into bf16), keyed dropout."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
            for adapter, down in module.lora_A.items():
                layer = KeyedDropout(dropout, name, down.in_features, keys) if dropout else nn.Identity()
                module.lora_dropout[adapter] = layer.to(down.weight.device)
    for _, parameter in adapter_parameters(model):
        parameter.data = parameter.data.float()


def scales(model: nn.Module) -> dict[str, float]:
    """By what the output of each adapter is multiplied, as PEFT computes it."""
    from peft.tuners.lora import LoraLayer

    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {f"{name}.{adapter}": float(scale) for name, layer in layers for adapter, scale in layer.scaling.items()}


def uniform(parameter: Tensor, bound: float, seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(name_key("adapter", seed, name) & 0xFFFFFFFF)
    return torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
