"""What the vision tower derives from the sizes of images is kept for those that came last; its patch embedding, and its
attention within images, are what plain PyTorch computes."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import worlds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForImageTextToText, vision_utils
from worlds import FAMILIES

from sameday.hardware.kernels import without_flash
from sameday.hardware.machine import detect_machine
from sameday.hardware.ranks import Ranks
from sameday.kernels.split import variable_length
from sameday.models.families import family_of
from sameday.models.tower import embed_by_matmul, image_attention
from sameday.models.vlm import KEPT
from sameday.spec.plan import Plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_indices_are_made_once_for_a_size(tmp_path: Path, tiny_models: dict[str, Path], family: str) -> None:
    folder = worlds.write_world(tmp_path, 5, (3, 2, 4, 2), hard=False)
    plan = Plan(share_images=True, packing=True, max_questions=None)
    recipe = worlds.tiny_recipe(tiny_models[family], effective_batch=4, order="by_image")
    task, other = (worlds.make_task(folder, recipe, plan) for _ in range(2))
    for step in range(task.steps_per_epoch()):
        for batch in task.batches(step, None, Ranks()):
            patches = task.model.patches(batch.pixels, batch.grids)
            first, again = (task.model.image_features(patches, batch.grids) for _ in range(2))
            other.model._indices.clear()
            for one, two, fresh in zip(first, again, other.model.image_features(patches, batch.grids), strict=True):
                assert torch.equal(one, two) and torch.equal(one, fresh)
    made = len(task.model._indices)
    assert 0 < made <= KEPT
    kept = {grid for grid in task.model._indices if grid[0] > 2}
    for wide in range(2, 2 * KEPT + 4, 2):
        task.model._tower_indices([(2, wide)])
        newest = list(task.model._indices)[-1]
        assert newest == (2, wide)
    assert len(task.model._indices) == KEPT and kept and not kept & task.model._indices.keys()


grids = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_indices_of_a_set_are_those_of_each_joined(tmp_path: Path, tiny_models: dict[str, Path], family: str) -> None:
    """What the library derives from the whole set."""
    folder = worlds.write_world(tmp_path, 2, (2, 2), hard=False)
    model = worlds.make_task(folder, worlds.tiny_recipe(tiny_models[family]), Plan()).model
    merge = model.patching.merge

    @given(grids)
    def joined(sizes: list[tuple[int, int]]) -> None:
        found = model._tower_indices(each := [(merge * high, merge * wide) for high, wide in sizes])
        grid, tower = torch.tensor([(1, *one) for one in each]), model.tower
        expected = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid),
        }
        if "window_index" in found:
            sized = {"window_size": tower.window_size, "patch_size": tower.patch_size}
            windows = vision_utils.get_vision_window_index(grid, spatial_merge_size=merge, **sized)
            expected |= zip(("window_index", "cu_window_seqlens"), windows, strict=True)
        if "interp_indices" in found:
            how = {"mode": tower.interpolation_mode, "align_corners": tower.interpolation_align_corners}
            taps = vision_utils.get_vision_interpolation_indices_and_weights(
                grid, tower.num_grid_per_side, spatial_merge_size=merge, **how
            )
            expected |= zip(("interp_indices", "interp_weights"), taps, strict=True)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name].cpu(), tensor), name

    joined()


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_embedded_as_the_convolution_does_it(tiny_models: dict[str, Path], family: str) -> None:
    base = AutoModelForImageTextToText.from_pretrained(tiny_models[family], dtype=torch.float64)
    tower = family_of(family).parts(base).tower
    weight = tower.patch_embed.proj.weight
    patches = torch.randn(7, weight[0].numel(), dtype=torch.float64)
    plain = tower.patch_embed(patches)
    embed_by_matmul(tower)
    with patch.object(torch.nn.Conv3d, "forward", side_effect=AssertionError("convolved")):
        torch.testing.assert_close(tower.patch_embed(patches), plain, rtol=1e-10, atol=1e-12)


# Attention within images

WAYS = {"flash attention": True, "run by run": False}
LENGTHS = {"alone between others": [9, 9, 21, 9], "all different": [1, 33, 7], "of one length": [12, 12]}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in float32, where plain PyTorch stands for flash attention."""
    monkeypatch.setattr("sameday.models.tower._flash", lambda _: request.param)


def drawn(tokens: int, width: int, kind: torch.dtype = torch.float32, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(width)
    q, k, v = torch.randn(3, tokens, heads, width).to(DEVICE, kind).unbind()
    return q, k, v


def image_by_image(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    each = []
    for start, end in pairwise(bounds):
        a, b, c = (x[None, start:end].transpose(1, 2) for x in (q, k, v))
        each.append(F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2)[0])
    return torch.cat(each)


def plain(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], scale: float) -> Tensor:
    return image_by_image(q.double(), k.double(), v.double(), bounds, scale)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("width", [64, 72, 80, 128])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_way_gives_the_same(lengths: list[int], width: int) -> None:
    bounds = [0, *accumulate(lengths)]
    q, k, v = drawn(bounds[-1], width)
    found = image_attention(q, k, v, torch.tensor(bounds), width**-0.5)
    assert float((found - plain(q, k, v, bounds, width**-0.5)).abs().max()) < NEAR


@pytest.mark.usefixtures("way")
def test_an_image_is_not_changed_by_those_beside_it() -> None:
    q, k, v = drawn(40, 72)
    wanted = plain(q, k, v, [9, 30], 0.3)
    for tensor in (q, k, v):
        tensor[:9] = tensor[30:] = float("nan")
    found = image_attention(q, k, v, torch.tensor([0, 9, 30, 40]), 0.3)
    assert float((found[9:30] - wanted).abs().max()) < NEAR


@pytest.mark.usefixtures("way")
def test_a_compiled_block_is_told_what_it_gives() -> None:
    q, k, v = drawn(14, 24)
    torch.library.opcheck(
        image_attention, (q, k, v, torch.tensor([0, 9, 14]), 0.3), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("lengths", "mixed"),
    [([150, 150], False), ([300], False), ([200, 100], True), ([64, 64, 32, 16], True), ([9, 4, 9], True)],
    ids=str,
)
def test_images_of_several_sizes_are_given_to_flash_attention(
    lengths: list[int], mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one length: SDPA has a faster one."""
    monkeypatch.setattr("sameday.models.tower._flash", lambda _: True)
    bounds = [0, *accumulate(lengths)]
    with patch("sameday.models.tower.variable_length", wraps=variable_length) as flash:
        image_attention(*drawn(bounds[-1], 16), torch.tensor(bounds), 0.3)
    assert flash.call_count == mixed
    if mixed:
        *_, queries, keys, most_queries, most_keys, causal, scale = flash.call_args.args
        assert queries.tolist() == keys.tolist() == bounds
        assert (most_queries, most_keys, causal, scale) == (max(lengths), max(lengths), False, 0.3)


@pytest.mark.skipif(
    not torch.cuda.is_available() or without_flash(detect_machine("cuda"), "bf16") is not None,
    reason="needs a GPU with flash attention",
)
@pytest.mark.parametrize("width", [64, 72, 80, 128])
@pytest.mark.parametrize("lengths", [[300, 300, 7, 129, 300], [1728, 5120]], ids=str)
def test_images_of_any_lengths_are_one_call_on_a_gpu(lengths: list[int], width: int) -> None:
    """In bf16, and what SDPA gives for each image."""
    bounds = [0, *accumulate(lengths)]
    q, k, v = drawn(bounds[-1], width, torch.bfloat16, heads=16)
    with patch("sameday.models.tower.variable_length", wraps=variable_length) as flash:
        seen = image_attention(q, k, v, torch.tensor(bounds), width**-0.5)
    wanted = image_by_image(q, k, v, bounds, width**-0.5)
    assert flash.call_count == 1
    assert float((seen - wanted).norm() / wanted.norm()) < 5e-3
    torch.testing.assert_close(seen, wanted, rtol=0.02, atol=0.02)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 2**31))
def test_images_of_one_length_together_see_what_each_sees_alone(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, sum(lengths), 2, 8, dtype=torch.float64)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    seen, first = image_attention(q, k, v, bounds, 0.3), 0
    for length in lengths:
        here = slice(first, first := first + length)
        scores = torch.einsum("qhw,khw->hqk", q[here], k[here]) * 0.3
        expected = torch.einsum("hqk,khw->qhw", scores.softmax(-1), v[here])
        torch.testing.assert_close(seen[here], expected, rtol=1e-10, atol=1e-12)
