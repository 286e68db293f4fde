"""Attention within images as one kernel, against plain PyTorch image by image; and which way a tower takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import worlds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sameday.kernels.image_attention import TILE, Tile, _tiles, attend_in_runs, columns
from sameday.models import tower
from sameday.models.tower import image_attention, own_kernel
from sameday.spec.plan import Plan

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = range(16, 128 + 1, 8)
"""Of heads that a kernel takes: from the least of a matmul on, in steps of 16 bytes in half precision."""
SMALL = Tile(16, 16, 4, 1)
"""Several tiles even of few tokens."""
NEAR = 1e-5
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no bf16")
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
with_tensor_maps = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")


def drawn(tokens: int, width: int, kind: torch.dtype = torch.float32, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(width)
    q, k, v = torch.randn(3, tokens, heads, width).to(DEVICE, kind).unbind()
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    parts = []
    for start, end in pairwise(bounds):
        a, b, c = (x[None, start:end].transpose(1, 2) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2)[0])
    return torch.cat(parts)


def plain(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    return sdpa(q.double(), k.double(), v.double(), bounds, scale)


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# The kernel


@pytest.mark.slow
@pytest.mark.parametrize("width", [16, 24, 72, 80])
@pytest.mark.parametrize("lengths", [[40], [16, 33, 1, 48], [5, 5]])
def test_it_is_what_plain_attention_gives(width: int, lengths: list[int]) -> None:
    """Widths of one part and of two; runs of whole tiles, of less than one, and of one token."""
    bounds = [0, *accumulate(lengths)]
    q, k, v = drawn(bounds[-1], width)
    found = attend_in_runs(q, k, v, tuple(bounds), width**-0.5, SMALL)
    assert float((found - plain(q, k, v, bounds, width**-0.5)).abs().max()) < NEAR


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the other runs' own rows
@pytest.mark.parametrize("width", [16, 24])
def test_what_other_runs_have_is_never_read(width: int) -> None:
    """Also where it is no number: a tile that begins in a run may end in the next."""
    q, k, v = drawn(60, width)
    wanted = plain(q, k, v, [19, 40], width**-0.5)
    for tensor in (q, k, v):
        tensor[:19] = tensor[40:] = float("nan")
    found = attend_in_runs(q, k, v, (0, 19, 40, 60), width**-0.5, SMALL)
    assert float((found[19:40] - wanted).abs().max()) < NEAR
    assert found[:19].isnan().all() and found[40:].isnan().all()


@pytest.mark.slow
def test_what_no_tensor_map_is_made_of_is_copied() -> None:
    """Queries that begin anywhere, keys that do not lie side by side, values as a layer's matmul gives them."""
    q, k, v = drawn(21, 24)
    q, k = torch.cat([q.new_zeros(1), q.flatten()])[1:].view_as(q), k.transpose(1, 2).contiguous().transpose(1, 2)
    v = torch.stack([v, v], 1).unbind(1)[1]
    assert q.data_ptr() % 16 and k.stride(2) > 1 and not v.is_contiguous()
    found = attend_in_runs(q, k, v, (0, 16, 21), 0.3, SMALL)
    assert found.is_contiguous() and float((found - plain(q, k, v, [0, 16, 21], 0.3)).abs().max()) < NEAR


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


@pytest.mark.parametrize("width", WIDTHS)
def test_two_parts_hold_all_columns_of_a_head(width: int) -> None:
    power, more = columns(width)
    assert power <= width <= power + more and (more == 0) == (width == power)
    assert all(part in (16, 32, 64, 128) for part in (power, more or power)), "what a matmul takes"


@with_tensor_maps
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 24, 64, 72, 80, 96, 128])
def test_it_rounds_as_sdpa_does(width: int, kind: torch.dtype) -> None:
    """With the tile that training has. The same bits each time, whatever the runs beside a run have."""
    bounds = [0, 1728, 6848, 6849, 7000, 9100]
    q, k, v = drawn(bounds[-1], width, kind, heads=4)
    found, again = (attend_in_runs(q, k, v, tuple(bounds), width**-0.5) for _ in range(2))
    wanted, usual = (each(q, k, v, bounds, width**-0.5) for each in (plain, sdpa))
    assert torch.equal(found, again)
    assert 0 < far(found, wanted) < 1.5 * far(usual, wanted) < 6e-3
    for tensor in (q, k, v):
        tensor[:1728] = tensor[6848:] = float("nan")
    beside = attend_in_runs(q, k, v, tuple(bounds), width**-0.5)
    assert torch.equal(beside[1728:6848], found[1728:6848])


@pytest.mark.soak
@pytest.mark.parametrize(("capability", "most"), [(90, 227), (100, 227), (120, 99)])
def test_the_widest_heads_fit_into_the_shared_memory_of_each_gpu(capability: int, most: int) -> None:
    """By Triton's own compiler, which needs no GPU. In a process that has no interpreter."""
    said = subprocess.run(
        [
            *(sys.executable, Path(__file__).parent / "compiled_attention.py"),
            *(str(capability), json.dumps({"image_attention": TILE})),
        ],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert WIDTHS[-1] == 128 and 0 < json.loads(said.stdout)["image_attention"] <= most * 1024


# The operator

WAYS = {"our kernel": (True, False), "flash attention": (False, True), "run by run": (False, False)}
LENGTHS = {"alone between others": [9, 9, 21, 9], "all different": [1, 33, 7], "of one length": [12, 12]}
"""Long ones, for a tile of one query."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each in float32, where plain PyTorch stands for flash attention."""
    ours, flash = WAYS[request.param]
    monkeypatch.setattr(tower, "own_kernel", lambda *_: ours)
    monkeypatch.setattr(tower, "TILE", Tile(queries=1))
    monkeypatch.setattr(tower, "_flash", lambda _: flash)
    if DEVICE == "cuda":  # which has no room for tiles of training in float32
        monkeypatch.setattr(tower, "attend_in_runs", lambda *args: attend_in_runs(*args, SMALL))
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 72, 80, 128])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_way_gives_the_same(way: str, lengths: list[int], width: int) -> None:
    bounds = [0, *accumulate(lengths)]
    q, k, v = drawn(bounds[-1], width)
    found = image_attention(q, k, v, torch.tensor(bounds), width**-0.5)
    assert float((found - plain(q, k, v, bounds, width**-0.5)).abs().max()) < NEAR


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_an_image_is_not_changed_by_those_beside_it(way: str) -> None:
    q, k, v = drawn(40, 72)
    wanted = plain(q, k, v, [9, 30], 0.3)
    for tensor in (q, k, v):
        tensor[:9] = tensor[30:] = float("nan")
    found = image_attention(q, k, v, torch.tensor([0, 9, 30, 40]), 0.3)
    assert float((found[9:30] - wanted).abs().max()) < NEAR


def test_a_compiled_block_is_told_what_it_gives(way: str) -> None:
    q, k, v = drawn(14, 24)
    torch.library.opcheck(
        image_attention, (q, k, v, torch.tensor([0, 9, 14]), 0.3), test_utils=("test_schema", "test_faketensor")
    )


@on_a_gpu
@pytest.mark.parametrize("width", [64, 72, 80, 128])
@pytest.mark.parametrize("lengths", [[300, 300, 7, 129, 300], [1728, 5120]])
def test_a_gpu_gives_what_sdpa_gives(lengths: list[int], width: int) -> None:
    """In bf16, by our kernel where the GPU may have it, and without it."""
    bounds = [0, *accumulate(lengths)]
    q, k, v = drawn(bounds[-1], width, torch.bfloat16, heads=16)
    wanted = sdpa(q, k, v, bounds, width**-0.5)
    for ours in {HOPPER, False}:
        with patch.object(tower, "own_kernel", lambda *_, ours=ours: ours):
            assert far(image_attention(q, k, v, torch.tensor(bounds), width**-0.5), wanted) < 5e-3


@with_tensor_maps
@pytest.mark.parametrize("width", tower.WIDTHS)
def test_it_is_trusted_on_a_gpu(width: int) -> None:
    assert tower._distrusted(torch.device("cuda"), torch.bfloat16, 16, width) is None


@pytest.mark.parametrize(
    ("lengths", "ours"),
    [([150, 150], False), ([300], False), ([200, 100], True), ([64, 64, 32, 16], False), ([400, 10, 1], True)],
    ids=str,
)
def test_which_images_are_given_to_our_kernel(lengths: list[int], ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one length: SDPA has a faster one. Windows are shorter than its tiles."""
    asked: list[tuple[int, ...]] = []

    def kernel(q: Tensor, _k: Tensor, _v: Tensor, bounds: tuple[int, ...], _scale: float) -> Tensor:
        asked.append(bounds)
        return q.clone()

    monkeypatch.setattr(tower, "own_kernel", lambda *_: True)
    monkeypatch.setattr(tower, "attend_in_runs", kernel)
    bounds = [0, *accumulate(lengths)]
    image_attention(*drawn(bounds[-1], 16), torch.tensor(bounds), 0.3)
    assert asked == ([tuple(bounds)] if ours else [])


@with_tensor_maps
def test_it_is_compiled_before_the_first_images(
    tmp_path: Path, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tower, "own_kernel", lambda *how: asked.append(how))
    worlds.write_world(tmp_path, 2, (3,))
    task = worlds.make_task(tmp_path, worlds.tiny_recipe(tiny_models["qwen3_vl"], precision="bf16"), Plan(), "cuda")
    heads = task.model.tower.config.num_heads
    assert asked == [(torch.device("cuda:0"), torch.bfloat16, heads, task.model.tower.config.hidden_size // heads)]


THERE = {"device": "cuda", "kind": torch.bfloat16, "width": 72, "capability": (9, 0), "triton": True}
NOT_THERE = (
    *({"device": "cpu"}, {"kind": torch.float32}, {"capability": (8, 9)}, {"capability": (12, 0)}, {"triton": False}),
    *({"width": 8}, {"width": 76}, {"width": 128}),
)


@pytest.mark.parametrize(
    ("other", "there"),
    [({}, True), ({"kind": torch.float16}, True), *((each, False) for each in NOT_THERE)],
    ids=str,
)
def test_where_our_kernel_can_run(other: dict[str, Any], there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = THERE | other
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: case["capability"])
    monkeypatch.setattr(tower, "find_spec", lambda _: object() if case["triton"] else None)
    monkeypatch.setattr(tower, "USED_ON", frozenset({(9, 0)}))
    monkeypatch.setattr(tower, "_distrusted", lambda *_: None)
    assert own_kernel.__wrapped__(torch.device(case["device"]), case["kind"], 4, case["width"]) is there


FAULTS = {
    "a row of a head": lambda seen: seen.index_put((torch.tensor(700), torch.tensor(1)), seen.new_zeros(())),
    "a tenth too large": lambda seen: seen * 1.1,
    "no number": lambda seen: seen * float("nan"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS, "not compiled"])
def test_it_is_used_after_it_gave_what_sdpa_gives(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], scale: float) -> Tensor:
        if fault == "not compiled":
            raise RuntimeError("no C compiler\nfound")
        seen = plain(q, k, v, [*bounds], scale)
        return seen if fault is None else FAULTS[fault](seen.cpu()).to(DEVICE)

    monkeypatch.setattr(tower, "attend_in_runs", kernel)
    monkeypatch.setattr(tower, "USED_ON", frozenset({(9, 0)}))
    monkeypatch.setattr(tower, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(tower, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    distrusted = tower._distrusted
    monkeypatch.setattr(tower, "_distrusted", lambda _, *how: distrusted(torch.device(DEVICE), *how))
    how = torch.device("cuda"), torch.bfloat16, 2, 72
    if fault is None:
        assert own_kernel.__wrapped__(*how)
        return
    why = "RuntimeError: no C compiler found" if fault == "not compiled" else "a row is .* away from PyTorch's, "
    with pytest.warns(UserWarning, match=rf"is not used on a GPU \(2 heads of 72\): {why}"):
        assert not own_kernel.__wrapped__(*how)
