"""A delay planted anywhere in a step shows up in that part of it and in no other, by a clock that only moves for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import sets
import torch
import torch.nn.functional as F
import worlds

from sameday.commands.session import Session, Specs
from sameday.data.labelled import augment
from sameday.data.labelled.batch import ImageBatch
from sameday.data.questions import source
from sameday.data.questions.batch import Batch
from sameday.data.questions.processor import ImageProcessor
from sameday.hardware.phases import PHASES, Clock
from sameday.hardware.ranks import Ranks
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vlm import VisionLanguageModel
from sameday.profile import timeline
from sameday.record.folder import RunFolder, read_metrics
from sameday.spec.errors import RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.vqa import task as vqa
from sameday.train import loop
from sameday.train.commit import PendingScalars
from sameday.train.loop import train
from sameday.train.watch import Watch

pytestmark = pytest.mark.usefixtures("own_signals")

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
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = worlds.write_world(tmp_path_factory.mktemp("world"), seed=5, counts=(3, 2, 2), hard=False)
    worlds.write_tiny(folder / "model", text={"num_hidden_layers": 2})
    with patch.object(vqa, "load_base", worlds.once(vqa.load_base)):
        yield {"vqa": folder, "classify": sets.write_set(tmp_path_factory.mktemp("set"))}


def ready(homes: dict[str, Path], name: str, plan: Plan) -> tuple[Any, Any]:
    if name == "vqa":
        recipe: Any = worlds.tiny_recipe(homes[name] / "model", effective_batch=4, max_steps=STEPS + 1)
        return recipe, worlds.make_task(homes[name], recipe, plan)
    recipe = sets.tiny_recipe(max_steps=STEPS + 1)
    return recipe, sets.make_task(homes[name], recipe, plan)


PLACES = [(name, part) for name, phases in WHERE.items() for part in phases]


def delayed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, part: str) -> Time:
    """Clocks that this module makes go by a time that passes in this part alone."""
    time = Time()
    monkeypatch.setattr(module, "Clock", lambda device: Clock(device, time))
    owner, attribute = WHERE[name][part]
    monkeypatch.setattr(owner, attribute, time.slowed(getattr(owner, attribute)))
    return time


def check(step: dict[str, float], part: str) -> None:
    assert step[part] >= DELAY - 1e-9, f"the delay is not in {part}"
    assert all(seconds == 0 for other, seconds in step.items() if other != part), step


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), PLACES)
def test_a_delay_shows_where_it_is(
    homes: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    """By the profiler's clock, which goes on from one step to the next."""
    plan = Plan(device="cpu")
    recipe, task = ready(homes, name, plan)
    with closing(Session.start(Specs(recipe, homes[name], plan))) as session:
        time = delayed(monkeypatch, timeline, name, part)
        found = timeline.record(session, task, STEPS, 1)
    assert len(found.steps) == STEPS and not found.left_out
    for step in found.steps:
        check(step, part)
    assert time.calls >= STEPS + 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), PLACES)
def test_a_delay_in_training_shows_where_it_is(
    homes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    """By the clock that the loop gives to a step. What is logged is a step that has ended: that is no part of it."""
    plan = Plan(log_steps=1, eval_steps=None, save_steps=100)
    recipe, task = ready(homes, name, plan)
    time = delayed(monkeypatch, loop, name, part)
    with closing(RunFolder.open(tmp_path / "run", recipe, plan, homes[name])) as run, pytest.raises(RunStopped):
        train(recipe, plan, task, run, Ranks(), stop_after=STEPS)
    steps = [record["phases"] for record in read_metrics(run.metrics_path) if "split" not in record]
    assert len(steps) == STEPS
    for step in steps:
        if part == "log":
            assert not any(step.values())
        else:
            check(step, part)
    assert time.calls >= STEPS


def test_all_parts_are_tried() -> None:
    assert {part for phases in WHERE.values() for part in phases} == set(PHASES)


@pytest.mark.parametrize("name", WHERE)
def test_a_run_times_one_step_of_each_log_interval(homes: dict[str, Path], tmp_path: Path, name: str) -> None:
    plan = Plan(log_steps=2, eval_steps=None, workers=1 if name == "vqa" else 0)
    recipe, task = ready(homes, name, plan)
    with closing(RunFolder.open(tmp_path / "run", recipe, plan, homes[name])) as run:
        train(recipe, plan, task, run, Ranks())
    steps = [record for record in read_metrics(run.metrics_path) if "split" not in record]
    assert [record["step"] for record in steps if "phases" in record] == [2, 4]
    for record in steps[1::2]:
        assert 0 < sum(record["phases"].values()) <= record["seconds"]
        assert record["phases"]["forward"] > 0 and record["phases"]["backward"] > 0
        # What workers read and decode is not this process's time.
        assert not {"read", "decode", "resize"} & set(record["phases"])
