"""Benches that load a model once time what a freshly loaded one would do, and a chart of growing costs is whole."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import growth
import mixture
import pytest
import torch
from loaded import Loaded, floors, start, warmed
from mixture import USUAL, write_split
from rows import Row, data_of, model_of, recipe_of

from sameday.commands.session import Session
from sameday.profile.floor import floor_of
from sameday.tasks.vqa.task import VqaTask

FIRST = Row("by_image", ((USUAL[0], 4),) * 4)
SECOND = Row("shuffle", ((USUAL[1], 2),) * 5, template=10)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded")
    model_of(folder, tiny=True)
    return folder


def started(out: Path, row: Row, **other: Any) -> Session:
    return start(out, recipe_of(out, data_of(out, row.order, row, True), row, True) | other, (), True)


@pytest.fixture(scope="module")
def sessions(out: Path) -> Iterator[tuple[Session, Session]]:
    with closing(started(out, FIRST)) as first, closing(started(out, SECOND, effective_batch=5)) as second:
        yield first, second


def test_fields_of_a_plan_are_asked_for_as_at_the_command_line(out: Path) -> None:
    fields = recipe_of(out, data_of(out, FIRST.order, FIRST, True), FIRST, True)
    with closing(start(out, fields, ["attention=split", "checkpointing=full", "share_images=true"], True)) as session:
        plan = session.resolved.plan
    assert (plan.attention, plan.checkpointing, plan.share_images, plan.device) == ("split", "full", True, "cpu")


def losses(session: Session, task: VqaTask) -> list[float]:
    with closing(session.steps(task)) as steps:
        warmed(session, task, steps)
        return [good.loss for good in steps.run(range(3))]


def test_a_task_over_a_model_that_served_another_is_as_one_loaded_anew(sessions: tuple[Session, Session]) -> None:
    loaded, (first, second) = Loaded(), sessions
    before = loaded.task(first)
    losses(first, before)
    for parameter in before.trained().values():
        parameter.data += 1
    plan = second.setup.low_memory(second.resolved.plan)
    task, anew = loaded.task(second, plan), second.load(plan)
    assert task.module() is before.module(), "nothing was loaded"
    assert isinstance(anew, VqaTask) and task.model.plan == anew.model.plan and task.notes == anew.notes
    assert before.model.plan != task.model.plan
    weights = anew.trained()
    assert all(torch.equal(parameter, weights[name]) for name, parameter in task.trained().items())
    assert all(parameter.grad is None for parameter in task.trained().values())
    assert losses(second, task) == losses(second, anew)
    peaks = loaded.peaks(second)
    assert floors(second, task, range(1, 2), peaks) == [floor_of(second.setup, anew, 1, peaks).plan.seconds]


def test_a_task_of_cached_features_is_as_one_loaded_anew(sessions: tuple[Session, Session], tmp_path: Path) -> None:
    loaded, (first, second) = Loaded(), sessions
    module = loaded.task(first).module()
    plans = [
        second.resolved.plan.model_copy(update={"cache": "features", "cache_dir": str(tmp_path / each)})
        for each in "ab"
    ]
    task, anew = loaded.task(second, plans[0]), second.load(plans[1])
    assert task.module() is module and task.model.keep is not None
    found = losses(second, task)
    assert found == losses(second, anew)
    assert losses(second, loaded.task(second, plans[0])) == found, "what the first one left is read"
    kept = [len(list((tmp_path / each).rglob("*.safetensors"))) for each in "ab"]
    assert kept[0] == kept[1] > 0
    in_memory = loaded.task(second, second.resolved.plan.model_copy(update={"keep_features": True}))
    assert in_memory.model.keep is None and in_memory.model.memory is not None
    last = loaded.task(first).model
    assert last.keep is None and last.memory is None, "the next one keeps nothing"


def test_what_a_first_task_keeps_goes_with_it(sessions: tuple[Session, Session]) -> None:
    """It would count in the memory of all rows that come after."""
    loaded, (first, second) = Loaded(), sessions
    task = loaded.task(first, first.resolved.plan.model_copy(update={"keep_features": True}))
    losses(first, task)
    kept = weakref.ref(task.model.memory)
    del task
    loaded.task(second)
    assert kept() is None


def test_floors_have_no_tower_for_images_of_earlier_steps(sessions: tuple[Session, Session]) -> None:
    """As far as they are there after the run; those of a plan that keeps none have it always."""
    loaded, (_, session) = Loaded(), sessions
    plan, peaks = session.resolved.plan, loaded.peaks(session)
    usual = floors(session, loaded.task(session, plan), range(4), peaks)
    task = loaded.task(session, plan.model_copy(update={"keep_features": True}))
    assert task.model.memory is not None and floors(session, task, range(4), peaks) == usual, "nothing is there yet"
    losses(session, task)
    there = set(task.model.memory._kept)
    come = [
        {image.digest for i in task.step_ids(step) for image in task.splits["train"][i].images} for step in range(4)
    ]
    assert there == come[0] | come[1] | come[2] and come[1] & come[0], "five images"
    found = floors(session, task, range(4), peaks)
    assert found[0] == usual[0] and found[1] < usual[1]
    assert floors(session, task, range(1, 4), peaks) == found[1:]


def test_another_model_is_loaded_again(out: Path, sessions: tuple[Session, Session]) -> None:
    loaded, (first, _) = Loaded(), sessions
    module, plan = loaded.task(first).module(), first.resolved.plan
    assert loaded.task(first).module() is module
    other = loaded.task(first, plan.model_copy(update={"label_only_logits": False})).module()
    assert other is not module
    with closing(replace(first, recipe=first.recipe.model_copy(update={"seed": 5}))) as seeded:
        assert loaded.task(seeded).module() is not other


def test_the_steps_of_every_point_are_alike() -> None:
    for _, points in growth.PANELS.values():
        for point in points.values():
            assert point.batch % point.questions == 0, "whole images"
            assert point.pictures * point.questions % point.batch == 0, "no step of an epoch is shorter"
            assert point.size[0] * point.size[1] <= growth.MOST_PIXELS
    for megapixels, (wide, high) in growth.MEGAPIXELS.items():
        assert wide % 32 == high % 32 == 0 and abs(wide * high / 1e6 / megapixels - 1) < 0.05


def test_an_image_can_have_more_questions_than_there_are(tmp_path: Path) -> None:
    more = len(mixture.QUESTIONS) + 14
    write_split(tmp_path, "train", [(USUAL[0], more)], random.Random(0), shrink=8)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert len({line.partition('"question": ')[2].partition('", "')[0] for line in lines}) == more


def test_the_largest_ratio_is_told_and_every_point_drawn() -> None:
    results = [
        {"panel": panel, "at": at, "median": 0.02 + at / 1e4, "floor": 0.01, "ratio": 2.0 + at / 100}
        for panel, (_, points) in growth.PANELS.items()
        for at in points
    ]
    largest = "largest: 3.28 times the floor, at 128 questions of a step: NOT within the limit of 2.2"
    assert growth.largest(results) == largest
    within = [{"panel": "pixels", "at": 0.25, "ratio": ratio} for ratio in (2.2, 1.5)]
    assert (
        growth.largest(within)
        == "largest: 2.20 times the floor, at 0.25 megapixels of an image: within the limit of 2.2"
    )
    drawn = ElementTree.fromstring(growth.chart(results))
    dots = [each for each in drawn.iter() if each.tag.endswith("circle")]
    assert len(dots) == 2 * len(results)
    words = {each.text for each in drawn.iter() if each.tag.endswith("text")}
    assert {what for what, _ in growth.PANELS.values()} | set(growth.CURVES.values()) <= words
