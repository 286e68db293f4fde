"""The floor is what a step needs at the measured rates: no step is faster, and sharing lowers it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st

from sameday.data.questions.source import Source
from sameday.hardware import peaks as peaks_module
from sameday.hardware.peaks import Peaks, measure
from sameday.hardware.ranks import Ranks
from sameday.models.vision_flops import count_images
from sameday.models.vlm_flops import needed
from sameday.profile.advice import differing
from sameday.profile.floor import Bound, Floor, bound, floor_of
from sameday.spec.plan import Plan
from sameday.tasks.base import StepCost, Task
from sameday.tasks.registry import setup_of
from sameday.tasks.vqa.task import VqaTask

PEAKS = Peaks("a device", "float32", 1e12, 1e11, 1e10, 1e9)
SHARED: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None, "label_only_logits": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floor")
    worlds.write_world(folder, 5, (5, 3, 2), hard=False, sizes=((48, 32), (32, 64)))
    worlds.write_tiny(folder / "model", text={"num_hidden_layers": 2})
    return folder


def make(world: Path, plan: dict[str, Any], **recipe: Any) -> VqaTask:
    asked = worlds.tiny_recipe(world / "model", order="by_image", effective_batch=5, **recipe)
    return worlds.make_task(world, asked, Plan(**plan))


def floor(task: Any, step: int = 0, peaks: Peaks = PEAKS, **more: Any) -> Floor:
    return floor_of(setup_of(task.recipe, Path()), task, step, peaks, **more)


def cut(task: Any, change: dict[str, Any]) -> tuple[int, int]:
    """Micro-batches of the first step, and the FLOPs that are executed, if these fields of the plan were so."""
    cost = task.with_plan(change).cost(0, None, Ranks())
    return cost.micro_batches, cost.executed_flop


def needs(found: Bound) -> Bound:
    """Without what a plan executes beside it."""
    return replace(found, least=replace(found.least, executed_flop=0))


# Arithmetic

amounts = st.integers(0, 10**18)
rates = st.floats(1e6, 1e16)


@given(amounts, amounts, amounts, amounts, rates, rates, rates, st.none() | rates)
def test_the_slowest_resource_is_the_bound(
    flop: int, memory: int, copied: int, read: int, a: float, b: float, c: float, d: float | None
) -> None:
    found = bound(StepCost(1, 1, flop, 3, memory, copied, read), Peaks("", "bf16", a, b, c, d))
    seconds = {"arithmetic": flop / a, "memory": memory / b, "copy": copied / c}
    seconds |= {} if d is None else {"disk": read / d}
    assert found.seconds_of == seconds
    assert found.seconds == max(seconds.values()) == seconds[found.by]
    assert found.without_disk == max(each for name, each in seconds.items() if name != "disk") <= found.seconds


@given(amounts.filter(bool), rates, st.floats(1e-6, 1e6))
def test_the_share_is_one_at_the_floor_and_falls_with_time(flop: int, rate: float, slower: float) -> None:
    found = bound(StepCost(1, 1, flop, 3, 0, 0, 0), Peaks("", "bf16", rate, 1.0, 1.0, None))
    assert found.share(found.seconds) == 1
    assert found.share(found.seconds * slower) == pytest.approx(1 / slower)


def test_no_step_takes_no_time() -> None:
    for measured in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="a step cannot have taken"):
            bound(StepCost(1, 1, 1, 1, 0, 0, 0), PEAKS).share(measured)


# Questions


def test_a_shared_step_needs_less(world: Path) -> None:
    task = make(world, SHARED)
    found = floor(task)
    batches = list(task.batches(0, None, Ranks()))
    assert found.plan.least.flop == sum(needed(task.model, batch).total for batch in batches)
    assert found.plan.least.samples == found.alone.least.samples == 5
    assert found.plan.least.micro_batches == len(batches) == 1 and found.alone.least.micro_batches == 5
    for what in ("flop", "memory_bytes", "copy_bytes"):
        assert getattr(found.plan.least, what) < 0.8 * getattr(found.alone.least, what), what
    assert found.plan.least.flop < found.executed_flop
    # One at a time is the same for every plan.
    plain = floor(make(world, {}))
    assert needs(found.alone) == needs(plain.plan) == needs(plain.alone) and plain.plan == plain.alone
    assert found.executed_flop == found.plan.least.executed_flop


def test_bytes_are_those_of_the_files_and_tensors(world: Path) -> None:
    task = make(world, SHARED)
    (batch,) = task.batches(0, None, Ranks())
    least = floor(task).plan.least
    assert least.copy_bytes == batch.pixels.nbytes
    images = {image.digest: image.path for i in task.step_ids(0) for image in task.splits["train"][i].images}
    assert least.disk_bytes == sum(path.stat().st_size for path in images.values())
    model = task.model
    twice = [*model.text.layers.parameters(), *model.text.norm.parameters(), *model.head.parameters()]
    trained = sum(p.nbytes for p in task.trained().values())
    moved = 2 * sum(p.nbytes for p in twice) + sum(p.nbytes for p in model.tower.parameters()) + 8 * trained
    assert least.memory_bytes == moved


def test_no_image_is_read(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(world, SHARED)
    before = task.plan

    def read_image(self: Source, image: Any) -> None:
        raise AssertionError("an image was read")

    monkeypatch.setattr(Source, "read_image", read_image)
    assert floor(task, 1).plan.seconds > 0
    assert task.plan is before and type(task.source) is Source


def test_cached_features_are_read_and_copied_instead(world: Path, tmp_path: Path) -> None:
    for part in world.iterdir():
        (tmp_path / part.name).symlink_to(part)
    task = make(tmp_path, {**SHARED, "cache": "features"})
    before = floor(task).plan.least
    (batch,) = task.batches(0, None, Ranks())
    store = task.source.features
    assert store is not None
    made = dict(zip(batch.contents, task.model.features_per_image(batch.pixels, batch.grids), strict=True))
    for content, features in made.items():
        store.write(content, {"features": features})
    after = floor(task).plan.least
    assert after.flop < before.flop and after.memory_bytes < before.memory_bytes
    assert after.copy_bytes == sum(features.nbytes for features in made.values())
    assert after.disk_bytes == sum(store.path(content).stat().st_size for content in made)
    (batch,) = task.batches(0, None, Ranks())
    assert all(batch.ready) and after.flop == needed(task.model, batch).total


def test_ranks_share_a_step(world: Path) -> None:
    task = make(world, {})
    whole = floor(task).plan.least
    phases = [floor(task, ranks=Ranks(rank, 2)).plan.least for rank in range(2)]
    assert sum(part.flop for part in phases) == whole.flop
    assert sum(part.samples for part in phases) == whole.samples


def test_a_lower_budget_reads_weights_more_often(world: Path) -> None:
    task = make(world, {**SHARED, "packing": False, "share_images": False})
    all_at_once, each = floor(task), floor(task, budget=1)
    assert each.plan.least.micro_batches == 5 > all_at_once.plan.least.micro_batches
    assert each.plan.least.memory_bytes > all_at_once.plan.least.memory_bytes
    assert each.plan.least.flop == all_at_once.plan.least.flop


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"max_questions": None, "token_budget": 40}, SHARED])
def test_another_cut_is_that_of_its_plan(world: Path, fields: dict[str, Any]) -> None:
    task = make(world, fields)
    before = task.plan
    changes = [differing(task.plan, each) for each in setup_of(task.recipe, world).cuts("cpu", task.plan)]
    assert any(changes)
    for change in filter(None, changes):
        other = floor(make(world, {**fields, **change}))
        assert cut(task, change) == (other.plan.least.micro_batches, other.executed_flop), change
    assert task.plan is before


def test_peaks_of_another_format_are_refused(world: Path) -> None:
    with pytest.raises(ValueError, match="the peaks are of bf16 matmuls, and the recipe's are float32"):
        floor(make(world, {}), peaks=replace(PEAKS, precision="bf16"))


def test_no_step_is_faster(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks_module, "SECONDS", 0.05)
    peaks = measure(torch.device("cpu"), "float32", world)
    task = make(world, SHARED)
    found, seconds = floor(task, peaks=peaks), []
    for _ in range(3):
        began = time.perf_counter()
        for batch in task.batches(0, None, Ranks()):
            task.loss_sum(batch, 0)[0].backward()
        seconds.append(time.perf_counter() - began)
    assert 0 < found.plan.share(min(seconds)) < 1


# Labelled images


def test_labelled_images(tmp_path: Path) -> None:
    home = sets.write_set(tmp_path)
    task = sets.make_task(home, sets.tiny_recipe(), Plan(micro_batch=3))
    found = floor(task)
    batches = list(task.batches(0, None, Ranks()))
    least = found.plan.least
    counted = sum(count_images(task.model, len(batch)).needed.total for batch in batches)
    assert least.flop == counted == found.alone.least.flop
    assert least.copy_bytes == sum(batch.pixels.nbytes for batch in batches if batch.pixels is not None)
    weights = sum(p.nbytes for p in task.model.parameters())
    assert (least.samples, least.micro_batches, least.memory_bytes) == (8, 3, (2 * 3 + 8) * weights)
    assert found.alone.least.micro_batches == 8
    assert cut(task, {"micro_batch": None}) == (1, found.executed_flop)
    held = floor(sets.make_task(home, sets.tiny_recipe(), Plan(images_on="device"))).plan.least
    assert (held.micro_batches, held.copy_bytes, held.disk_bytes) == (1, 0, 0)


def test_it_is_written_as_json(tmp_path: Path) -> None:
    task = sets.make_task(sets.write_set(tmp_path), sets.tiny_recipe())
    found: Floor = floor(task, peaks=replace(PEAKS, disk_bytes_per_second=None))
    said = json.loads(json.dumps(found.as_dict(2.0)))
    assert said["plan"]["share"] == found.plan.seconds / 2 and said["measured_seconds"] == 2
    assert said["plan"]["bound_by"] in said["plan"]["seconds_of"] and "disk" not in said["plan"]["seconds_of"]
    assert said["alone"]["least"]["micro_batches"] == 8 and said["peaks"]["flop_per_second"] == 1e12
    assert "share" not in found.as_dict()["plan"]


def test_a_task_that_does_not_count_is_counted_while_it_runs(tmp_path: Path) -> None:
    """Samples, micro-batches and bytes are the same; what is executed is taken for what is needed. No gradient is left
    behind."""
    task = sets.make_task(sets.write_set(tmp_path), sets.tiny_recipe(), Plan(micro_batch=3))
    counted, own = Task.cost(task, 0, None, Ranks()), task.cost(0, None, Ranks())
    assert counted.flop == counted.executed_flop
    assert own.flop <= counted.flop <= 1.1 * own.executed_flop
    for what in ("samples", "micro_batches", "memory_bytes", "disk_bytes"):
        assert getattr(counted, what) == getattr(own, what), what
    # Labels and numbers go to the device with the pixels.
    assert own.copy_bytes < counted.copy_bytes < 1.05 * own.copy_bytes
    assert not any(p.grad.any() for p in task.trained().values() if p.grad is not None)
    assert floor(task).plan.seconds > 0
