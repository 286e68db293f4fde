"""A delay planted anywhere in a step shows up in that part of it and in no other, by a clock that only moves for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import torch.nn.functional as F
import worlds

from sameday.data.labelled import augment
from sameday.data.labelled.batch import ImageBatch
from sameday.data.questions import source
from sameday.data.questions.batch import Batch
from sameday.data.questions.processor import ImageProcessor
from sameday.hardware.parts import PARTS, Clock
from sameday.hardware.ranks import Ranks
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.errors import RunStopped
from sameday.spec.plan import Plan
from sameday.spec.record import RunFolder, read_metrics
from sameday.train.commit import PendingScalars
from sameday.train.loop import train
from sameday.train.watch import Watch

DELAY = 0.02
STEPS = 3

WHERE: dict[str, dict[str, tuple[Any, str]]] = {
    "vqa": {
        "wait": (worlds.VqaTask, "_build"),
        "read": (Path, "read_bytes"),
        "decode": (source, "open_rgb"),
        "resize": (ImageProcessor, "resized"),
        "copy": (Batch, "to"),
        "tower": (VisionLanguageModel, "image_features"),
        "forward": (VisionLanguageModel, "_rotary"),
        "loss": (F, "cross_entropy"),
        "backward": (torch.Tensor, "backward"),
        "exchange": (Ranks, "sum_"),
        "optimizer": (torch.optim.AdamW, "step"),
        "check": (PendingScalars, "read"),
        "log": (Watch, "step"),
        "other": (worlds.VqaTask, "count"),
    },
    "classify": {
        "wait": (sets.ClassifyTask, "_build"),
        "copy": (ImageBatch, "to"),
        "prepare": (augment, "normalise"),
        "forward": (VisionBDH, "levels"),
        "loss": (F, "cross_entropy"),
        "backward": (torch.Tensor, "backward"),
        "exchange": (Ranks, "sum_"),
        "optimizer": (torch.optim.AdamW, "step"),
        "check": (PendingScalars, "read"),
        "log": (Watch, "step"),
        "other": (sets.ClassifyTask, "count"),
    },
}
"""By task and part: something that is called once or more in that part of every step."""


class Time:
    """Seconds that pass where a delay is, and nowhere else."""

    def __init__(self) -> None:
        self.at, self.calls = 0.0, 0

    def __call__(self) -> float:
        return self.at

    def slowed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **named: Any) -> Any:
            self.at += DELAY
            self.calls += 1
            return plain(*args, **named)

        return slow


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = worlds.write_world(tmp_path_factory.mktemp("world"), seed=5, counts=(3, 2, 2), hard=False)
    worlds.write_tiny(folder / "model")
    return {"vqa": folder, "classify": sets.write_set(tmp_path_factory.mktemp("set"))}


def ready(homes: dict[str, Path], name: str, plan: Plan) -> tuple[Any, Any]:
    if name == "vqa":
        recipe: Any = worlds.tiny_recipe(homes[name] / "model", effective_batch=4, max_steps=STEPS + 1)
        return recipe, worlds.make_task(homes[name], recipe, plan)
    recipe = sets.tiny_recipe(max_steps=STEPS + 1)
    return recipe, sets.make_task(homes[name], recipe, plan)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in WHERE.items() for part in parts])
def test_a_delay_shows_where_it_is(
    homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    plan = Plan(log_steps=100, eval_steps=None, save_steps=100)
    recipe, task = ready(homes, name, plan)
    time = Time()
    clock = Clock(task.device, time)
    owner, attribute = WHERE[name][part]
    monkeypatch.setattr(owner, attribute, time.slowed(getattr(owner, attribute)))
    with closing(RunFolder.open(tmp_path / "run", recipe, plan, homes[name])) as run, pytest.raises(RunStopped):
        train(recipe, plan, task, run, Ranks(), stop_after=STEPS, clock=clock)
    found = clock.steps()
    assert len(found) == STEPS - 1, "the last step is stopped before its end"
    for step in found:
        assert step[part] >= DELAY - 1e-9, f"the delay is not in {part}"
        assert all(seconds == 0 for other, seconds in step.items() if other != part), step
    assert time.calls >= STEPS


def test_all_parts_are_tried() -> None:
    assert {part for parts in WHERE.values() for part in parts} == set(PARTS)


@pytest.mark.parametrize("name", WHERE)
def test_a_run_times_one_step_of_each_log_interval(homes: dict[str, Path], tmp_path: Path, name: str) -> None:
    plan = Plan(log_steps=2, eval_steps=None, workers=1 if name == "vqa" else 0)
    recipe, task = ready(homes, name, plan)
    with closing(RunFolder.open(tmp_path / "run", recipe, plan, homes[name])) as run:
        train(recipe, plan, task, run, Ranks())
    steps = [record for record in read_metrics(run.metrics_path) if "split" not in record]
    assert [record["step"] for record in steps if "parts" in record] == [2, 4]
    for record in steps[1::2]:
        assert 0 < sum(record["parts"].values()) <= record["seconds"]
        assert record["parts"]["forward"] > 0 and record["parts"]["backward"] > 0
        # What workers read and decode is not this process's time.
        assert not {"read", "decode", "resize"} & set(record["parts"])
