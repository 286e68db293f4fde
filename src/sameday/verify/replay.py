"""AdamW in float64 from its definition, on the gradients that an arm recorded: what the arm's weights have to be. It
shares no code with the optimizer, and no resume can lose its state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ROUNDED = 2.0**-24
"""The most by which a number changes when it is stored in float32, relatively."""


def replay(start: Any, records: Sequence[Any]) -> Iterator[tuple[int, str, float]]:
    """For each step the tensor whose update is furthest from the replayed one, and how far beyond what storing weights
    in float32 takes of it, relative to the update of its whole parameter group. At a rate of 1e-6 a weight of about 1
    moves by some ten of the smallest steps that float32 has there: rounding alone is percents of such an update."""
    weights = {name: tensor.double() for name, tensor in start.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    stored: dict[str, int] = {}  # how often a weight was changed, and rounded
    for number, record in enumerate(records, start=1):
        gradients, recorded = load_file(record.gradient), load_file(record.weights)
        worst, whose = 0.0, ""
        for group in record.facts["groups"]:
            moved, off = 0.0, {}
            for name in group["names"]:
                if name not in gradients:
                    continue
                weights[name] = _adamw(weights[name], gradients[name], first[name], second[name], number, group)
                moved += float((weights[name] - start[name].double()).square().sum())
                stored[name] = stored.get(name, 0) + (group["lr"] > 0)
                rounding = stored[name] * ROUNDED * float(recorded[name].double().norm())
                off[name] = max(0.0, float((weights[name] - recorded[name].double()).norm()) - rounding)
            name = max(off, key=off.__getitem__, default="")
            if name and off[name] > 0:
                apart = off[name] / math.sqrt(moved) if moved else math.inf
                worst, whose = max((worst, whose), (apart, name))
        yield record.step, whose, worst


def clipping(records: Sequence[Any]) -> Iterator[tuple[int, float]]:
    """For each step how far the norm of the gradient that reached the optimizer is from the norm that the loop told,
    cut to the recipe's largest; relative."""
    for record in records:
        largest = record.facts["largest norm"]
        told = record.norm if largest is None else min(record.norm, largest)
        if math.isfinite(told) and told > 0:  # not known of a step in which the process was killed
            squares = (float(tensor.double().square().sum()) for tensor in load_file(record.gradient).values())
            yield record.step, abs(math.sqrt(sum(squares)) - told) / told


def _adamw(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> Tensor:
    g, (b1, b2), rate = gradient.double(), group["betas"], group["lr"]
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    weight = weight * (1 - rate * group["weight_decay"])
    return weight - rate * (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + group["eps"])
