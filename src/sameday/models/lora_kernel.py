"""Adapters computed by fused kernels: where layers share their input, as an attention's q, k and v do, together.

Modules get another class, one for all that were of the same, so that torch.compile makes one graph for them. What the
kernels do not know (DoRA, ranks beyond their tiles) stays as PEFT computes it; so does everything where there is no
gradient to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sameday.kernels.ahead import OPERATORS, AdapterLaunch
from sameday.kernels.dropout import KeyedDropout
from sameday.kernels.lora import Adapter, Dropped, add_lora
from sameday.kernels.lora_launch import MOST

SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that all families call with the same tensor."""


def use_kernels(model: nn.Module) -> None:
    """In place: parameters keep their names."""
    modules: list[Any] = list(model.modules())
    for module in filter(_fits, modules):
        kind: Any = type(module)
        module.__class__ = _alone(kind)
    for module in modules:
        for names in SHARING:
            here = tuple(name for name in names if hasattr(type(getattr(module, name, None)), "alone"))
            if len(here) > 1:
                kind = type(module)
                module.__class__ = _together(kind, here)


def launches(model: nn.Module, kind: torch.dtype, alike: bool) -> list[AdapterLaunch]:
    """Of its layers that the kernels compute, for inputs of this format: one for all that compile the same. Unless
    layers are `alike`, the input of the first needs no gradient."""
    modules: list[Any] = list(model.modules())
    groups = [[getattr(module, name) for name in getattr(type(module), "together", ())] for module in modules]
    taken = {id(layer) for group in groups for layer in group}
    groups += [[module] for module in modules if hasattr(type(module), "alone") and id(module) not in taken]
    made = dict.fromkeys(launch for group in groups if group for launch in _launches(group, kind))
    first = [replace(launch, needed=False) for launch in made if launch.operator == "down_backward" and not alike]
    return [*made, *first]


def _launches(layers: Sequence[Any], kind: torch.dtype) -> Iterator[AdapterLaunch]:
    down = [layer.lora_A[name].weight for layer in layers for name in layer.lora_A]
    up = [layer.lora_B[name].weight for layer in layers for name in layer.lora_B]
    drops = [drop for layer in layers for drop in layer.lora_dropout.values() if isinstance(drop, KeyedDropout)]
    threshold = drops[0].threshold if drops else None
    for operator in OPERATORS:
        yield AdapterLaunch(
            operator,
            kind,
            down[0].dtype,
            down[0].shape[1],
            tuple(len(each) for each in up),
            tuple(len(each) for each in down),
            threshold,
        )


def _fits(module: Any) -> bool:
    from peft.tuners.lora import Linear

    if type(module) is not Linear or module.lora_variant:
        return False
    ranks = [down.weight.shape[0] for down in module.lora_A.values()]
    biased = any(layer.bias is not None for part in (module.lora_A, module.lora_B) for layer in part.values())
    return len(ranks) == 1 and ranks[0] <= MOST and not biased


@cache
def _alone(library: Any) -> Any:
    def forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
        if args or named or not _wanted([self]):
            plain: Tensor = library.forward(self, x, *args, **named)
            return plain
        return _computed([self], x)[0]

    return type(f"Fused{library.__name__}", (library,), {"forward": forward, "alone": True})


@cache
def _together(library: Any, names: tuple[str, ...]) -> Any:
    """A module some of whose layers are computed together."""
    calls = type(f"Call{library.__name__}", (_Call,), {name: _layer(name, names) for name in names})

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        together = _wanted([getattr(self, name) for name in names])
        return library.forward(calls(self) if together else self, *args, **named)

    return type(f"Together{library.__name__}", (library,), {"forward": forward, "together": names})


class _Call:
    """Stands for a module while its forward runs, once. What its layers give is kept nowhere else, so that nothing of
    another call is ever used."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: Tensor | None = None
        self.made: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _layer(name: str, names: tuple[str, ...]) -> Callable[[_Call, Tensor], Tensor]:
    """All layers for an input that is new, and what one of them gives."""

    def layer(self: _Call, x: Tensor) -> Tensor:
        if self.seen is not x:
            made = _computed([getattr(self.module, each) for each in names], x)
            self.seen, self.made = x, dict(zip(names, made, strict=True))
        return self.made[name]

    return layer


def _wanted(layers: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and not any(layer.disable_adapters or layer.merged for layer in layers)


def _computed(layers: Sequence[Any], x: Tensor) -> list[Tensor]:
    """What layers give for x, whatever format their own weights have, with their adapters' part."""
    outputs = [layer.base_layer(x) for layer in layers]
    adapters, drop = [], None
    for layer in layers:
        for name, down in layer.lora_A.items():
            dropout = layer.lora_dropout[name]
            columns = dropout.columns if isinstance(dropout, KeyedDropout) and dropout.training else None
            adapters.append(Adapter(down.weight, layer.lora_B[name].weight, layer.scaling[name], columns))
            if columns is not None:
                drop = Dropped(dropout.p, dropout.threshold, dropout.keys.of(x.shape[:-1]))
    return add_lora(x, outputs, adapters, drop)
