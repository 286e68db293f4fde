"""Attention in which questions share a prefix and never see each other: the rule, and the kernels that apply it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from sameday.kernels import fused_attention, split
from sameday.kernels.decode import LayerKeys
from sameday.kernels.split import Segments
from sameday.spec.plan import OF_PIECES

NAME = "sameday_shared_prefix"
"""Under this name the kernels are registered with transformers."""


class Fused(NamedTuple):
    """Pieces of a packed row that are attended to in one pass."""

    pieces: Segments


Mask = Tensor | BlockMask | Segments | Fused | None
"""None: each row is one question, plain causal. Tensor: bool, (rows, 1, length, length), for sdpa. BlockMask: for flex.
Segments: for split. Fused: for fused."""


class Recorded(NamedTuple):
    """Stands in a mask's place: a layer's keys and values are also written to `key` and `value`, for the tokens that
    will be generated. Tensors that are there before, because a compiled layer hands out nothing but its output."""

    mask: Mask
    key: Tensor
    value: Tensor


class Sight(NamedTuple):
    """In what some layers differ from the rule. With a `window` a token sees only so many places back, itself included,
    as `position` (rows, length) counts them in its own question, wherever it stands in a row. Tokens of one `image`
    (rows, length), numbered in each row and -1 where there is none, see each other in both directions."""

    position: Tensor
    window: int | None = None
    image: Tensor | None = None

    def applied(self, seen: Tensor, row: Any, i: Any, j: Any) -> Tensor:
        """What the rule lets token i see of token j, with these differences."""
        if self.image is not None:
            seen = seen | ((self.image[row, i] == self.image[row, j]) & (self.image[row, i] >= 0))
        if self.window is not None:
            seen = seen & (self.position[row, i] - self.position[row, j] < self.window)
        return seen


def visible(group: Tensor, branch: Tensor, fork: Tensor) -> Tensor:
    """The rule as a dense mask, (rows, 1, length, length): query i sees key j when j is not after i, both are in one
    group, and j is in the prefix, in i's own fork or in i's own branch: of each level in none (0) or in i's own."""
    seen = group[:, :, None] == group[:, None, :]
    for level in (branch, fork):
        seen = seen & ((level[:, None, :] == 0) | (level[:, :, None] == level[:, None, :]))
    return seen.tril()[:, None]


def make_mask(
    group: Tensor,
    branch: Tensor,
    fork: Tensor,
    one_per_row: bool,
    segments: Segments | None,
    kernel: str,
    sight: Sight | None = None,
) -> Mask:
    """The mask in the form `kernel` (sdpa, flex, split or fused) takes. Padding comes last in a row, so that where a
    row is one question plain causal attention is already exact, unless layers have a `sight` of their own; split and
    fused take such a row like any other."""
    rows, length = group.shape
    if kernel in OF_PIECES and segments is not None:
        assert sight is None, f"{kernel} attention knows neither windows nor images"
        return Fused(segments) if kernel == "fused" else segments
    if one_per_row and sight is None:
        return None
    assert kernel not in OF_PIECES, f"{kernel} attention is for packed rows"
    if kernel == "sdpa":
        seen = visible(group, branch, fork)
        if sight is None:
            return seen
        row, at = torch.arange(rows, device=group.device), torch.arange(length, device=group.device)
        return sight.applied(seen[:, 0], row[:, None, None], at[:, None], at)[:, None]
    assert kernel == "flex", kernel

    def rule(row: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own_branch = (branch[row, j] == 0) | (branch[row, i] == branch[row, j])
        own_fork = (fork[row, j] == 0) | (fork[row, i] == fork[row, j])
        seen = (i >= j) & (group[row, i] == group[row, j]) & own_branch & own_fork
        return seen if sight is None else sight.applied(seen, row, i, j)

    return create_block_mask(rule, rows, None, length, length, device=str(group.device))


@cache
def _compiled_flex() -> Any:
    # Uncompiled flex attention builds all scores in memory.
    return torch.compile(flex_attention)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Recorded | LayerKeys,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (rows, heads, length, width) in, (rows, length, heads, width) out. Keys of a
    layer in the mask's place: each row is one question's next token."""
    assert dropout == 0.0, "dropout inside attention is not supported"
    query, key = (
        query.to(value.dtype),
        key.to(value.dtype),
    )  # float32 master weights leave the norms in float32
    if isinstance(attention_mask, LayerKeys):
        assert scaling is not None
        return attention_mask.attend(query, key, value, scaling), None
    if isinstance(attention_mask, Recorded):
        attention_mask.key.copy_(key)
        attention_mask.value.copy_(value)
        attention_mask = attention_mask.mask
    if isinstance(attention_mask, BlockMask):
        flex = _compiled_flex() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
        # Rows below 128 tokens would get torch's decoding kernel, which has no configuration for them.
        asked: Any = {"FORCE_USE_FLEX_ATTENTION": True} if query.is_cuda else None
        out = flex(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True, kernel_options=asked)
    elif isinstance(attention_mask, Fused):
        assert query.shape[0] == 1 and scaling is not None
        q, k, v = (x.transpose(1, 2).squeeze(0) for x in (query, key, value))
        return fused_attention.shared_prefix_attention(q, k, v, attention_mask.pieces, scaling)[None], None
    elif isinstance(attention_mask, Segments):
        assert query.shape[0] == 1 and scaling is not None
        q, k, v = (x.transpose(1, 2).squeeze(0).contiguous() for x in (query, key, value))
        return split.shared_prefix_attention(q, k, v, attention_mask, scaling)[None], None
    elif attention_mask is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        assert attention_mask.dtype == torch.bool and attention_mask.ndim == 4, attention_mask.dtype
        # With a dense mask the fused kernels want as many key heads as query heads.
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2), None


def register() -> None:
    """Make `attend` known to transformers; a model uses it once its text config names it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
