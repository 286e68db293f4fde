"""Attention within runs as one kernel, against plain PyTorch run by run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from itertools import accumulate, pairwise

from tower import Tile, _tiles, attend_in_runs, image_attention

from sameday.models import tower as in_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tile(16, 16, 4, 1)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], scale: float) -> torch.Tensor:
    parts = []
    for start, end in pairwise(bounds):
        a, b, c = (x[start:end].double().transpose(0, 1) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 72, 80, 24])
@pytest.mark.parametrize("lengths", [[40], [16, 33, 1, 48], [5, 5]])
def test_it_is_what_plain_attention_gives(width: int, lengths: list[int]) -> None:
    """Widths of one part and of two; runs of whole tiles, of less than one, and of one token."""
    torch.manual_seed(width)
    bounds = [0, *accumulate(lengths)]
    q, k, v = (torch.randn(bounds[-1], 2, width, device=DEVICE) for _ in range(3))
    found = attend_in_runs(q, k, v, tuple(bounds), width**-0.5, SMALL)
    wanted = plain(q, k, v, bounds, width**-0.5)
    assert float((found - wanted).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the other run's own rows
@pytest.mark.parametrize("width", [16, 24])
def test_what_the_next_run_has_is_never_read(width: int) -> None:
    """Also where it is no number: a tile that begins in a run may end in the next."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 2, width, device=DEVICE) for _ in range(3))
    wanted = plain(q, k, v, [0, 21], width**-0.5)
    for tensor in (k, v):
        tensor[21:] = float("nan")
    found = attend_in_runs(q, k, v, (0, 21, 40), width**-0.5, SMALL)[:21]
    assert float((found - wanted[:21]).abs().max()) < 1e-5


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([16, 64, 128]))
def test_tiles_hold_every_token_of_every_run_once(lengths: list[int], queries: int) -> None:
    bounds = (0, *accumulate(lengths))
    firsts, begins, ends = _tiles(bounds, queries, torch.device("cpu")).tolist()
    held = sorted(t for first, end in zip(firsts, ends, strict=True) for t in range(first, min(first + queries, end)))
    assert held == list(range(bounds[-1]))
    assert set(zip(begins, ends, strict=True)) == set(pairwise(bounds))
    assert all(begin <= first < end for first, begin, end in zip(firsts, begins, ends, strict=True))
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no bf16")
def test_it_rounds_as_flash_attention_does() -> None:
    torch.manual_seed(0)
    bounds = (0, 1728, 6848, 7000, 15040)
    q, k, v = (torch.randn(bounds[-1], 16, 72, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    wanted = plain(q, k, v, list(bounds), 72**-0.5)
    found = attend_in_runs(q, k, v, bounds, 72**-0.5)
    assert float((found - wanted).norm() / wanted.norm()) < 4e-3


@pytest.mark.slow
def test_it_stands_in_for_the_attention_of_a_tower() -> None:
    """As an operator that is compiled around."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 40, 57])
    q, k, v = (torch.randn(57, 2, 24, device=DEVICE) for _ in range(3))
    found, wanted = (each(q, k, v, bounds, 24**-0.5) for each in (image_attention, in_training.image_attention))
    assert float((found - wanted).abs().max()) < 1e-5
    torch.library.opcheck(image_attention, (q, k, v, bounds, 24**-0.5), test_utils=("test_schema", "test_faketensor"))
