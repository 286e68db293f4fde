"""Kernels compiled before they are needed, several at once. Triton compiles a kernel when it is first launched, for
seconds, while all else waits: a run would compile one after the other in its first forward and backward passes.

Each launch here is of a few tokens: what is compiled for it serves any number of them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from sameday.kernels import fused_attention
from sameday.kernels.bdh import interpreted
from sameday.kernels.grid import compiled_alone
from sameday.kernels.split import Dense, Segments

TOKENS = 32
"""Of a launch: a multiple of 16, as rows of training are padded to."""


class Launch(Protocol):
    """Equal ones compile the same."""

    def __call__(self, device: torch.device) -> None: ...


@dataclass(frozen=True)
class AttentionLaunch:
    """Of fused attention, one pass: heads of queries and of keys, their width, and how many dense calls it follows."""

    heads: int
    key_heads: int
    width: int
    kind: torch.dtype
    calls: int
    backward: bool

    def __call__(self, device: torch.device) -> None:
        q, k, v = (
            torch.zeros(TOKENS, heads, self.width, dtype=self.kind, device=device)
            for heads in (self.heads, self.key_heads, self.key_heads)
        )
        pieces = two_pieces(self.calls).to(device)
        if self.backward:
            fused_attention.backward(q, q, k, v, q, q.new_zeros(self.heads, TOKENS, dtype=torch.float32), pieces, 1.0)
        else:
            fused_attention.forward(q, k, v, pieces, 1.0)


def two_pieces(calls: int) -> Segments:
    """The second of them sees the first in the last of so many dense calls, and in those before it."""
    half = TOKENS // 2
    nobody = torch.tensor([0], dtype=torch.int32)
    everybody = torch.tensor([0, half], dtype=torch.int32)
    dense = [Dense(half, 0, everybody, everybody)] * calls or [Dense(0, 0, nobody, nobody)]
    return Segments.of(torch.tensor([0, half, TOKENS], dtype=torch.int32), dense)


Operator = Literal["down", "up", "up_backward", "down_backward"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
"""That compute adapters, forward and backward."""


@dataclass(frozen=True)
class AdapterLaunch:
    """Of adapters that are computed together, one operator: the format of what they are given and their own, sizes of
    inputs and outputs, ranks, below which draw an element is dropped, where there is dropout, and whether what they are
    given needs a gradient."""

    operator: Operator
    kind: torch.dtype
    own: torch.dtype
    inputs: int
    outputs: tuple[int, ...]
    ranks: tuple[int, ...]
    threshold: int | None
    needed: bool = True

    def __call__(self, device: torch.device) -> None:
        from sameday.kernels import lora  # which loads Triton

        def zeros(*size: int, kind: torch.dtype = self.own) -> Tensor:
            return torch.zeros(size, dtype=kind, device=device)

        x, u = (
            zeros(TOKENS, self.inputs, kind=self.kind),
            zeros(len(self.ranks), TOKENS, max(self.ranks), kind=self.kind),
        )
        y = [zeros(TOKENS, n, kind=self.kind) for n in self.outputs]
        a = [zeros(rank, self.inputs) for rank in self.ranks]
        b = [zeros(n, rank) for n, rank in zip(self.outputs, self.ranks, strict=True)]
        rows, columns = None, list[Tensor]()
        if self.threshold is not None:
            rows = zeros(TOKENS, kind=torch.int32)
            columns = [zeros(self.inputs, kind=torch.int32) for _ in self.ranks]
        of_down = rows, columns, a, [1.0] * len(a), self.threshold or 0
        match self.operator:
            case "down":
                lora.down(x, *of_down)
            case "up":
                lora.up(y, u, b)
            case "up_backward":
                lora.up_backward(y, u, b)
            case "down_backward":
                lora.down_backward(u, x, *of_down, self.needed)


def compile_together(launches: Iterable[Launch], device: torch.device, threads: int) -> None:
    """Nothing is launched, since Triton loads what launches its kernels under one name, and threads would take each
    other's. What fails here fails again where it is needed, and there somebody knows what to do."""
    there = list(dict.fromkeys(launches))
    if not there or interpreted():
        return
    try:
        from triton import AsyncCompileMode
    except ImportError:  # an older Triton, which compiles when it launches
        return
    with (
        torch.no_grad(),
        ThreadPoolExecutor(threads) as pool,
        compiled_alone(),
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for launch in there:
            with suppress(Exception):
                launch(device)
