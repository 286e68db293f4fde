"""`sameday suite plan`: what it prints, and what it says would make a deadline hold."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sets
import worlds
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sameday.cli import app
from sameday.hardware.known import KnownGpu
from sameday.record.times import read_times
from sameday.spec.document import dump_yaml
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.spec.suite import Suite
from sameday.suite.state import SuiteFolder
from sameday.suite.times import forecast
from sameday.suite.times.measure import Ask, Event
from sameday.suite.times.measured import Measured, read_measured
from sameday.suite.times.measured import planned as planned_as
from sameday.suite.times.remedies import Changeable, remedies


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a suite's GPUs are pretended where there are none
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(num_epochs=5)))
    return tmp_path


def suite(home: Path, jobs: dict[str, Any], **more: Any) -> None:
    text = {"gpus": 2, **more, "jobs": jobs}
    (home / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))


def planned(*words: str) -> str:
    result = CliRunner().invoke(app, ["suite", "plan", "night.yaml", *words])
    assert result.exit_code == 0, (result.output, result.exception)
    assert max(map(len, result.output.splitlines())) <= 100
    return result.output


def train(expected: str | None = None, *after: str, **more: Any) -> dict[str, Any]:
    timed = {} if expected is None else {"expected": expected}
    return {"do": "train", "recipe": "recipe.yaml", "after": list(after), **timed, **more}


def test_a_plan_has_order_times_gpus_end_and_deadline(home: Path) -> None:
    jobs = {"data": train("10m", gpus=0), "one": train("2h", "data"), "two": train("1h", gpu=1), "three": train("90m")}
    jobs |= {"test": {"do": "eval", "of": "one", "expected": "30m"}}
    suite(home, jobs, deadline="3h")
    said = planned().splitlines()
    assert said[:7] == [
        "night: 5 jobs on 2 GPUs",
        "job    do     waits for  GPU    start    takes  low to high      end",
        "data   train             -       0:00    10:00                 10:00",
        "two    train             1       0:00  1:00:00               1:00:00",
        "one    train  data       0      10:00  2:00:00               2:10:00",
        "three  train             1    1:00:00  1:30:00               2:30:00",
        "test   eval   one        0    2:10:00    30:00               2:40:00",
    ]
    assert "  - data, one, two, three, test: expected, as the suite says" in said
    assert "schedule      no other is shorter; no schedule here can end before 2:40:00" in said
    assert "critical path data -> one -> test" in said
    assert "deadline      in 3:00:00: holds, with 20:00 to spare" in said
    assert "two asks for GPU 1, and there are 1; --gpus plans for another number" in _refused("--gpus", "1")


def test_a_plan_refuses_what_training_would(home: Path) -> None:
    """Once the data is counted, and before any step is timed."""
    sets.write_set(home)
    suite(home, {"good": train("1h"), "one": train(set=["recipe.effective_batch=500"])})
    words = "recipe.effective_batch is 500, and there are 30 images to train on, so that no step could have as many"
    assert _refused("--measure") == f"one: {words}; allowed: 1 to 30"
    trained = CliRunner().invoke(app, ["train", "recipe.yaml", "--set", "recipe.effective_batch=500"])
    assert str(trained.exception) == f"{words}; allowed: 1 to 30"


def _refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["suite", "plan", "night.yaml", *words])
    assert result.exit_code == 1
    return str(result.exception)


def test_where_the_deadline_does_not_hold_it_says_what_would(home: Path) -> None:
    suite(home, {"one": train("2h"), "two": train("2h"), "three": train("2h")}, deadline="3h")
    said = planned()
    assert "finish        4:00:00 from now, at " in said
    assert "critical path one -> (GPU 0 is free) three" in said
    assert "deadline      in 3:00:00: does not hold, 1:00:00 too late" in said
    assert "  - 1 more GPU: ends in 2:00:00. Price: 1 GPU for 2:00:00" in said
    suite(home, {"one": train("2h"), "two": train("2h", "one")}, deadline="3h")
    said = " ".join(planned().split())
    assert "nothing that is known here makes it hold: - more GPUs: 8 more are not enough" in said
    assert "since none makes a job or a chain of jobs shorter: ends in 4:00:00, which is too late" in said
    suite(home, {"one": train("2h", gpus=0), "two": train("2h", gpus=0)}, deadline="3h")
    assert planned().endswith("1:00:00 too late\nnothing that is known here makes it hold\n")
    suite(home, {"one": train(), "two": train()}, deadline="3h")
    assert planned().endswith("deadline      in 3:00:00: not known, since it is not known how long one, two take\n")
    suite(home, {"one": train("2h"), "two": train()}, deadline="3h")
    assert "deadline      in 3:00:00: not known, since it is not known how long two takes" in planned()


def test_steps_are_measured_in_a_process_of_their_own(home: Path) -> None:
    """Then trained for real, so that the records of this very job are what the next plan is made of."""
    sets.write_set(home)
    # Two jobs of one cost: one measurement.
    few = {"set": ["plan.device=cpu", "recipe.max_steps=4"]}
    suite(home, {"one": train(**few), "two": train(**few, gpus=0)}, deadline="1d")
    said = planned("--measure")
    assert said.count("measuring some steps of one, ") == 1 and "measuring some steps of two" not in said
    assert "  - one, two: measured on " in said and "not known" not in said
    (found,) = read_measured(SuiteFolder(home / "runs/night"))
    assert len(found.steps) == 4 and found.start > 0 and found.save and found.score_each and found.answer_each is None
    assert "measuring" not in planned("--measure"), "known already"
    result = CliRunner().invoke(
        app, ["train", "recipe.yaml", "--out", "runs/before", *(f"--set={each}" for each in few["set"])]
    )
    assert result.exit_code == 0, result.output
    noted = [record["what"] for record in read_times(home / "runs/before")]
    assert (noted[0], noted[-1]) == ("start", "finish") and {"validate", "save"} <= {*noted}
    (start,) = (each for each in read_times(home / "runs/before") if each["what"] == "start")
    assert (start["total"], start["device"]) == (4, "CPU") and set(start["parts"]) == {"libraries", "audit", "load"}
    assert 0 < sum(start["parts"].values()) <= start["seconds"]


STOPPED = """
import os, signal, tempfile, types
from sameday.suite.times import forecast

def measure(asked, instead_of):
    with tempfile.TemporaryDirectory(dir=os.getcwd()):
        os.kill(os.getpid(), signal.SIGTERM)
        yield

forecast.measure, forecast.unknown = measure, lambda predictor: []
forecast._measure(None, [types.SimpleNamespace(elsewhere=None)], print)
"""


def test_a_measurement_that_is_stopped_leaves_nothing_behind(home: Path) -> None:
    """By SIGTERM, where its folder is there; with a pretended process, since a real one takes long to load."""
    before = {*home.iterdir()}
    assert subprocess.run([sys.executable, "-c", STOPPED]).returncode == 128 + signal.SIGTERM
    assert {*home.iterdir()} == before


@pytest.fixture
def questions(home: Path, two_layers: Path) -> Path:
    """A suite whose deadline holds neither as it is nor with a cache, and does with each image computed once."""
    worlds.write_world(home, seed=5, counts=(4, 4, 4), hard=False)
    (home / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(two_layers, effective_batch=4, num_epochs=2)))
    suite(home, {"one": train(), "two": train(None, "one")}, gpus=1, deadline="1m", set=["plan.device=cpu"])
    return home


def timed(every: Sequence[Ask], instead_of: KnownGpu | None) -> Generator[Event, None, None]:
    """As if steps took ten seconds, eight with a cache, and two in the order by_image."""
    for number, (training, _) in enumerate(every):
        yield Event(number)
        shared, cached = training.recipe.order.kind == "by_image", training.plan.cache == "features"
        assert training.filled is cached, "nobody has chosen it yet, and its images are nowhere"
        steps = [2.0 if shared else 8.0 if cached else 10.0] * 20
        about = Measured(training.cost, planned_as(training), "CPU", steps, 1.0, 0.001, None, 0.1)
        gpu = {} if instead_of is None else {"memory": instead_of.memory, "stands_for": instead_of.name}
        about = replace(about, files=training.files, **gpu)
        rates = {"flop": 5e12, "flop_per_second": 1e12}
        yield Event(number, replace(about, **rates), 61.0)
        yield Event(number, replace(about, **rates, end=1.0))


def test_the_plan_is_said_before_remedies_are_measured(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pretended clock: to time these steps in processes of their own takes half a minute."""
    monkeypatch.setattr(forecast, "measure", timed)
    said = planned("--measure").splitlines()
    measuring = [number for number, line in enumerate(said) if line.startswith("measuring some steps of ")]
    (table,) = (number for number, line in enumerate(said) if line.startswith("job "))
    (deadline,) = (number for number, line in enumerate(said) if line.startswith("deadline "))
    first, *remedies = measuring
    assert first < table < deadline < remedies[0] and said[deadline + 1] == said[remedies[0]]
    assert said[first : first + 2] == [
        "measuring some steps of one, run (1 of 1)",
        "one: median step 10 s, of which its floor is 50%; measured in 1:01",
    ]
    assert [said[number].rpartition(" (")[2] for number in remedies] == ["1 of 2)", "2 of 2)"]
    assert said[remedies[1] + 2] == "what would make it hold:"
    told = " ".join(" ".join(said[remedies[1] + 2 :]).split())
    assert re.search(r"- order by_image in one, two: each image .*?: ends in 0:2\d\. Price: another recipe", told)
    assert re.search(r"- a cache of features for one, two .*?: ends in 1:\d\d, which is too late\. Price: disk", told)
    assert {each.end for each in read_measured(SuiteFolder(questions / "runs/night"))} == {1.0}
    assert not any(line.startswith("measuring") for line in planned("--measure").splitlines()), "all is known"


def test_nobody_need_ask_for_remedies(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "measure", timed)
    said = planned("--measure", "--no-remedies").splitlines()
    assert sum(line.startswith("measuring") for line in said) == 1
    assert said[-1].startswith("deadline      in 1:00: does not hold")


def _vqa(**more: Any) -> Changeable:
    recipe = recipe_from({"task": "vqa", "model": "m", "data": {"train": "t"}, "num_epochs": 5, **more})
    return Changeable(recipe, Plan(), False)


def test_remedies_are_suites_that_a_user_could_write() -> None:
    jobs = {"one": {"do": "train", "recipe": "r"}, "two": {"do": "train", "recipe": "r", "after": ["one"]}}
    given_suite = Suite.model_validate({"jobs": jobs})
    sets_of: list[tuple[int, tuple[str, ...]]] = []

    def end(other: Suite, gpus: int) -> float | None:
        sets_of.append((gpus, other.jobs["one"].set))
        epochs = [each for each in other.jobs["one"].set if "num_epochs" in each]
        if "recipe.order=by_image" in other.jobs["one"].set:
            return None
        if {"plan.cache=features", "plan.keep_features=false"} <= set(other.jobs["one"].set):
            return 70.0
        return 100.0 * (int(epochs[0][-1]) / 5 if epochs else 1.0)

    found = list(remedies(given_suite, 1, 65.0, {"one": _vqa(), "two": _vqa(order="by_image")}, end))
    assert [(each.holds, each.seconds) for each in found] == [(False, 100), (True, 60), (None, None), (False, 70)]
    more, epochs, order, cache = (each.what for each in found)
    assert more == "more GPUs: 8 more are not enough, since none makes a job or a chain of jobs shorter"
    assert epochs == "3 epochs instead of 5 in one, two"
    assert order.startswith("order by_image in one: each image is computed once") and "two" not in order
    assert cache.startswith("a cache of features for one, two")
    assert [each.price.split(":")[0].split(",")[0] for each in found[1:]] == ["another model", "another recipe", "disk"]
    sharing = ("plan.share_images=true", "plan.packing=true", "plan.max_questions=null")
    assert (1, ("recipe.order=by_image", *sharing)) in sets_of


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.floats(1, 500), st.one_of(st.integers(1, 6), st.integers(1000, 100_000)))
def test_a_remedy_that_holds_ends_in_time(gpus: int, left: float, epochs: int) -> None:
    """As many epochs as hold, found in few schedules, however many there are."""
    given_suite = Suite.model_validate({"jobs": {"one": {"do": "train", "recipe": "r"}}})
    tried = 0

    def end(other: Suite, number: int) -> float:
        nonlocal tried
        tried += 1
        told = [int(each.rpartition("=")[2]) for each in other.jobs["one"].set if "num_epochs" in each]
        return 600.0 * (told[0] if told else epochs) / epochs / number

    for each in remedies(given_suite, gpus, left, {"one": _vqa(num_epochs=epochs)}, end):
        assert each.seconds is not None and each.holds is (each.seconds <= left)
        if " instead of " in each.what:
            chosen = int(each.what.split()[0].replace(",", ""))
            assert 1 <= chosen < epochs
            assert chosen == epochs - 1 or 600.0 * (chosen + 1) / epochs / gpus > left, "one more would hold too"
    assert tried < 40
