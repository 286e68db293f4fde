"""Weights told apart: for each tensor some of its numbers and the sum of all of its bits, which is exact in any order
and quick where the weights are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def line_of(name: str, tensor: Tensor) -> str:
    """What a digest knows of one tensor."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    some = bits[:: max(1, bits.numel() // 64)].tolist()
    return f"{name} {tuple(tensor.shape)} {bits.sum(dtype=torch.int64).item()} {some}"


def digest_of_lines(lines: Mapping[str, str]) -> str:
    """By the tensors' names."""
    digest = hashlib.sha256()
    for _, line in sorted(lines.items()):
        digest.update(line.encode())
    return digest.hexdigest()


def digest_of(parameters: Mapping[str, Tensor]) -> str:
    return digest_of_lines({name: line_of(name, parameter) for name, parameter in parameters.items()})
