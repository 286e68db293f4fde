"""Splitting attention over what is shared in a few calls and merging them is exact: float64, against the dense rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import ALONE, GROUPS, row
from torch import Tensor

from sameday.kernels.attention import visible
from sameday.kernels.split import shared_prefix_attention


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, alone=ALONE, share=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_split_is_the_dense_rule(groups: list[Any], alone: list[int], share: int, seed: int) -> None:
    if not groups and not alone:
        return
    segments, levels = row(groups, alone)
    generator = torch.Generator().manual_seed(seed)
    tokens, key_heads, width = levels[0].shape[1], 2, 4

    def draw(heads: int) -> Tensor:
        return torch.randn(tokens, heads, width, generator=generator, dtype=torch.float64).mul_(2).requires_grad_()

    q, k, v = draw(key_heads * share), draw(key_heads), draw(key_heads)
    grad = torch.randn(tokens, key_heads * share, width, generator=generator, dtype=torch.float64)
    found = shared_prefix_attention(q, k, v, segments, 0.5)
    found_gradients = torch.autograd.grad(found, (q, k, v), grad)
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)[None] for x in (q, k, v)]
    dense = F.scaled_dot_product_attention(*heads, attn_mask=visible(*levels), scale=0.5)[0].transpose(0, 1)
    for a, b in zip((found, *found_gradients), (dense, *torch.autograd.grad(dense, (q, k, v), grad)), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


def test_autocast_does_not_reach_inside() -> None:
    """Scores are float32 in half precision too; taken back to bf16 they would not fit what the backward computes."""
    segments, _ = row([(5, [3, 4]), (2, [(1, [1]), (1, [2])])], [2])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(21, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        inside = shared_prefix_attention(q, k, v, segments, 0.5)
    assert torch.equal(inside, shared_prefix_attention(q, k, v, segments, 0.5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_calls_are_as_near_as_half_precision_is() -> None:
    """On a GPU: forks of many tokens and of one, groups without forks, questions alone."""
    segments, levels = row([(70, [9, 30]), (300, [(120, [20, 33, 8]), (1, [40]), (64, [17, 5])])], [50, 3])
    tokens, generator = levels[0].shape[1], torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, 64) for heads in (8, 2, 2, 8))
    *inputs, grad = (torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes)
    q, k, v = (x.requires_grad_() for x in inputs)
    found = shared_prefix_attention(q, k, v, segments.to(torch.device("cuda")), 0.125)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    heads = [x.repeat_interleave(8 // x.shape[1], 1).transpose(0, 1)[None] for x in exact]
    mask = visible(*(level.cuda() for level in levels))
    dense = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.125)[0].transpose(0, 1)
    gradients = torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(dense, exact, grad.double())
    for a, b in zip((found, *gradients[0]), (dense, *gradients[1]), strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()
