"""Decoder layers that compute part of their forward pass again in the backward pass, instead of keeping it.

Modules get another class, one for all that were of the same, so that torch.compile makes one graph for them. It sees
what is kept, and computes again only what a gradient depends on: not, for instance, the matmul that a layer ends with.

What each way costs for a token in a layer of width d, with attention of width q, keys and values of width k and an MLP
of width m, adapters on attention and frozen weights: bytes that are kept, of numbers of two bytes, and FLOPs of matmuls
that are computed again. At the sizes of Qwen3-VL-8B (d = q = 4096, k = 1024, m = 12288) the forward pass is 386 MFLOP.

    checkpointing   kept for the backward pass                  bytes, at least      KiB   computed again        MFLOP
    none            all that a gradient depends on              4d + 6q + 6k + 4m     94   nothing                   0
    selective       input, attention before and behind o_proj   4d + 2q               24   2d(q + 2k) + 4dm        252
    full            input                                       2d                     8   4d(q + k) + 4dm         285

Attention itself is in none of these FLOPs, and `full` alone computes it again. A matmul of d inputs takes 2d FLOPs for
the 2 bytes of a result, be it of q, k, v, gate or up: nothing is gained by choosing among them. What `selective` keeps
stands for attention too, whose FLOPs grow with the length of a row. down_proj's result is neither kept nor computed
again. Uncompiled, o_proj is computed again, because PEFT computes a layer before its adapter. Where a norm stands
behind the MLP, as in Gemma 3, `selective` keeps what goes into that, 2d bytes more, and `full` computes down_proj
again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sameday.models.families.base import Family

aten = torch.ops.aten
ATTENTION = {
    torch.ops.sameday.shared_prefix_attention.default,
    torch.ops.sameday.fused_prefix_attention.default,
    torch.ops.higher_order.flex_attention,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""Kernels whose output and log-sum-exp are kept. Scores that plain matmuls compute are far larger, and are not."""


def recomputing(layers: Iterable[nn.Module], family: Family) -> None:
    """In place: parameters keep their names. Layers then take `checkpointing`, as a plan has it, and `at`: places in
    the rows, one row after the other, if no others of a layer's results are read. It gives these alone."""
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _recomputing(kind, family)


@cache
def _recomputing(library: Any, family: Family) -> Any:
    def forward(self: Any, x: Tensor, checkpointing: str = "none", at: Tensor | None = None, **named: Any) -> Tensor:
        if at is not None:
            return _read_at(self, family, x, at, checkpointing, named)
        if checkpointing == "selective":
            return _selective(self, family, x, named)
        run = partial(library.forward, self, **named)
        out: Tensor = run(x) if checkpointing == "none" else _again(run, x)
        return out

    return type(f"Recomputing{library.__name__}", (library,), {"forward": forward})


def _selective(layer: Any, family: Family, x: Tensor, named: Any) -> Tensor:
    """A layer in pieces of which each keeps its inputs. A norm behind a matmul is a piece of its own: it alone needs
    what the matmul gives."""
    _, behind, before_mlp, behind_mlp = family.norms(layer)

    def widened(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + (y if behind is None else behind(y))
        return x, layer.mlp(before_mlp(x))

    x, y = _again(widened, x, _attended(layer, family, x, "selective", named))
    return x + (y if behind_mlp is None else _again(behind_mlp, y))


def _read_at(layer: Any, family: Family, x: Tensor, at: Tensor, checkpointing: str, named: Any) -> Tensor:
    """A layer whose result is read at some places alone, (1, places, width): its MLP is computed there, and keeps all
    that it needs, which is little."""
    _, behind, before_mlp, behind_mlp = family.norms(layer)
    y = _attended(layer, family, x, checkpointing, named)
    x, y = (each.flatten(0, 1)[at][None] for each in (x, y))
    x = x + (y if behind is None else behind(y))
    y = layer.mlp(before_mlp(x))
    return x + (y if behind_mlp is None else behind_mlp(y))


def _attended(layer: Any, family: Family, x: Tensor, checkpointing: str, named: Any) -> Tensor:
    """What a layer's attention adds, before a norm that may stand behind it."""

    def attended(x: Tensor) -> Tensor:
        out: Tensor = layer.self_attn(family.norms(layer)[0](x), **named)[0]
        return out

    if checkpointing == "none":
        return attended(x)
    # Uncompiled, flex attention is a compiled function, into which nobody sees.
    seen = torch.compiler.is_compiling() or not isinstance(named["attention_mask"], BlockMask)
    keeps = checkpointing == "selective" and seen
    out: Tensor = _again(attended, x, **({"context_fn": _keeping_attention} if keeps else {}))
    return out


def _again(run: Callable[..., Any], *inputs: Tensor, **how: Any) -> Any:
    # Keyed dropout draws nothing, so there is no generator's state to keep.
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **how)


def _keeping_attention() -> Any:
    return create_selective_checkpoint_contexts(_policy)


# Graphs are kept on disk under this name of what they keep, which is else nowhere in them.
_keeping_attention.cache_hash = ", ".join(sorted(map(str, ATTENTION)))  # type: ignore[attr-defined]
# torch warns of operators in place, of which there are none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda said: "context_fn" not in said.getMessage())


def _policy(_context: Any, operator: Any, *_args: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
