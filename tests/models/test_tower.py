"""What the vision tower derives from the sizes of images is kept for those that came last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import worlds
from worlds import FAMILIES

from sameday.hardware.ranks import Ranks
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
    kept = dict(task.model._indices)
    for wide in range(2, 2 * KEPT + 4, 2):
        task.model._tower_indices(((2, wide),))
        newest = list(task.model._indices)[-1]
        assert newest == ((2, wide),)
    assert len(task.model._indices) == KEPT and not kept.keys() & task.model._indices.keys()
