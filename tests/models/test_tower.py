"""What the vision tower derives from the sizes of images is kept for those that came last."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText, vision_utils
from worlds import FAMILIES

from sameday.hardware.kernels import without_flash
from sameday.hardware.machine import detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models.families import family_of
from sameday.models.tower import embed_by_matmul, image_attention
from sameday.models.vlm import KEPT
from sameday.spec.plan import Plan


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


@pytest.mark.skipif(
    not torch.cuda.is_available() or without_flash(detect_machine("cuda"), "bf16") is not None,
    reason="needs a GPU with flash attention",
)
@pytest.mark.parametrize("width", [64, 72])
def test_images_of_any_lengths_are_one_call_on_a_gpu(width: int) -> None:
    lengths = [300, 300, 7, 129, 300]
    q, k, v = torch.randn(3, sum(lengths), 4, width, device="cuda", dtype=torch.bfloat16).unbind()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    seen, first = image_attention(q, k, v, bounds, width**-0.5), 0
    for length in lengths:
        here = slice(first, first := first + length)
        alone = image_attention(q[here], k[here], v[here], torch.tensor([0, length]), width**-0.5)
        torch.testing.assert_close(seen[here], alone, rtol=0.02, atol=0.02)


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
