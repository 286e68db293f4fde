"""Splitting attention over shared prefixes in two calls and merging them is exact: float64, against the dense rule."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sameday.kernels.attention import visible
from sameday.kernels.split import Segments, shared_prefix_attention

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=2, max_size=5)), max_size=3)
ALONE = st.lists(st.integers(1, 8), max_size=3)


def cumulative(counts: list[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def row(groups: list[tuple[int, list[int]]], alone: list[int]) -> tuple[Segments, Tensor, Tensor]:
    """A packed row: prefixes, questions alone, branches; its bounds, and each token's group and branch."""
    pieces = [(g, 0, prefix) for g, (prefix, _) in enumerate(groups)]
    pieces += [(len(groups) + i, 1, count) for i, count in enumerate(alone)]
    pieces += [(g, b + 1, n) for g, (_, branches) in enumerate(groups) for b, n in enumerate(branches)]
    counts = [n for _, _, n in pieces]
    prefixes, branches = [prefix for prefix, _ in groups], [sum(b) for _, b in groups]
    total = sum(counts)
    longest = [max(c, default=1) for c in (counts, branches, prefixes)]
    at = torch.tensor([sum(prefixes), total - sum(branches), total, *longest])
    segments = Segments(cumulative(counts), cumulative(branches), cumulative(prefixes), at)
    group = torch.tensor([g for g, _, n in pieces for _ in range(n)])
    branch = torch.tensor([b for _, b, n in pieces for _ in range(n)])
    return segments, group[None], branch[None]


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, alone=ALONE, share=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_split_is_the_dense_rule(groups: list[tuple[int, list[int]]], alone: list[int], share: int, seed: int) -> None:
    if not groups and not alone:
        return
    segments, group, branch = row(groups, alone)
    generator = torch.Generator().manual_seed(seed)
    tokens, key_heads, width = group.shape[1], 2, 4

    def draw(heads: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()

    q, k, v = draw(key_heads * share), draw(key_heads), draw(key_heads)
    grad = torch.randn(tokens, key_heads * share, width, generator=generator, dtype=torch.float64)
    found = shared_prefix_attention(q, k, v, segments, 0.5)
    found_gradients = torch.autograd.grad(found, (q, k, v), grad)
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)[None] for x in (q, k, v)]
    dense = F.scaled_dot_product_attention(*heads, attn_mask=visible(group, branch), scale=0.5)[0].transpose(0, 1)
    for a, b in zip((found, *found_gradients), (dense, *torch.autograd.grad(dense, (q, k, v), grad)), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


def test_autocast_does_not_reach_inside() -> None:
    """Scores are float32 in half precision too; taken back to bf16 they would not fit what the backward computes."""
    segments, *_ = row([(5, [3, 4]), (2, [1, 2])], [4])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(21, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        inside = shared_prefix_attention(q, k, v, segments, 0.5)
    assert torch.equal(inside, shared_prefix_attention(q, k, v, segments, 0.5))
