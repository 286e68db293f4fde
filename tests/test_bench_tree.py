"""Attention over shared prefixes as Triton kernels, against the calls that are split and merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from packed_rows import ALONE, GROUPS, row
from torch import Tensor

pytest.importorskip("triton")
import tree
from tree import Tile, Tiles

from sameday.kernels import split
from sameday.kernels.split import Segments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))
"""Several tiles even of few tokens, and not all of them square."""


def distances(
    pieces: Segments, all_heads: tuple[int, int], tiles: Tiles, kind: torch.dtype = torch.float32, width: int = 16
) -> tuple[float, float]:
    """Ours and the split calls', from split calls in float64: the largest relative distance of output, log-sum-exp and
    gradients. One token alone has gradients of zero."""
    torch.manual_seed(len(pieces.cu))
    tokens, (heads, shared) = int(pieces.cu[-1]), all_heads

    def draw(count: int) -> Tensor:
        # Queries and keys as the layers give them: heads before tokens.
        return torch.randn(count, tokens, width, device=DEVICE).to(kind).transpose(0, 1)

    q, k, v = draw(heads), draw(shared), draw(shared).contiguous()
    grad, there = torch.randn(tokens, heads, width, device=DEVICE).to(kind), pieces.to(torch.device(DEVICE))
    out, lse = tree.forward(q, k, v, there, 0.3, tiles)
    found = [out, lse, *tree.backward(grad, q, k, v, out, lse, there, 0.3, tiles)]
    both = split._forward(q, k, v, *there, 0.3)
    theirs = [*both, *split._backward(grad, q, k, v, *both, *there, 0.3)]
    wide = [x.double().cpu() for x in (grad, q, k, v)]
    both = split._forward(*wide[1:], *pieces, 0.3)
    wanted = [*both, *split._backward(*wide, *both, *pieces, 0.3)]
    ours, plain = (
        max(float((a.double().cpu() - b).norm() / b.norm().clamp_min(1.0)) for a, b in zip(some, wanted, strict=True))
        for some in (found, theirs)
    )
    return ours, plain


@pytest.mark.slow
@settings(max_examples=4)
@given(groups=GROUPS, alone=ALONE)
def test_any_row_is_what_split_calls_give(groups: list[Any], alone: list[int]) -> None:
    """Prefixes, forks, branches and questions alone; tiles that hold several of them."""
    if groups or alone:
        assert distances(row(groups, alone)[0], (2, 1), SMALL)[0] < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "turned"),
    [([(50, [5, 20]), (34, [1])], True), ([(40, [(20, [9, 3]), (17, [4])])], False)],
    ids=["two images", "forks"],
)
def test_tiles_without_a_mask_and_with_one(groups: list[Any], turned: bool) -> None:
    """Prefixes of several tiles, so that some are seen by all rows of another."""
    tiles = SMALL._replace(of_keys=SMALL.of_keys._replace(turned=turned))
    assert distances(row(groups, [17, 2])[0], (4, 2), tiles)[0] < 2e-6


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no bf16")
@pytest.mark.parametrize("groups", [[(1300, [64] * 8)] * 2, [(450, [32, 20, 44])] * 3, [(700, [(90, [20, 9])] * 2)]])
def test_it_rounds_as_flash_attention_does(groups: list[Any]) -> None:
    ours, flash = distances(row(groups, [300])[0], (8, 2), tree.TILES, torch.bfloat16, width=128)
    assert 0 < ours < 1.2 * flash < 2e-2
