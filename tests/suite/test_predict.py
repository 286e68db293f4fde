"""Predicted times, on a clock that the test turns: jobs go as their recorded steps say, and the end is known."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import sets
import yaml
from hypothesis import given
from hypothesis import strategies as st
from watched import running

from sameday.record.folder import RunFolder
from sameday.spec.document import dump_yaml
from sameday.spec.plan import Plan
from sameday.suite.jobs import OpenSuite, open_suite, request
from sameday.suite.state import SuiteFolder
from sameday.suite.times.forecast import make_forecast
from sameday.suite.times.measure import matters
from sameday.suite.times.measured import Measured, keep_measured, planned
from sameday.suite.times.pace import pace_of, recorded
from sameday.suite.times.predict import Estimate, Predictor, predict, remaining
from sameday.suite.times.trial import LEAST, LONG, SHORT, STEPS, _each, enough, timed_steps
from sameday.suite.times.work import Counts, Training, Work, step_cost, work_of

EPOCH = 4
"""Steps, of 30 images in batches of 8."""


@dataclass
class Job:
    """What happens in a training: (kind, seconds, step) one after another."""

    events: list[tuple[str, float, int]]
    started: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds, _ in self.events)


def training(epochs: int, step: float, seed: int, start: float = 30.0, drift: float = 1.0) -> Job:
    """Steps that vary as they do, slow first ones, and from the middle on `drift` times as long."""
    chance = random.Random(seed)
    events: list[tuple[str, float, int]] = [("start", start, 0)]
    total = epochs * EPOCH
    for number in range(1, total + 1):
        later = drift if number > total // 2 else 1.0
        slow = 4.0 if number <= 2 else 1.0
        events.append(("step", later * slow * step * chance.uniform(0.8, 1.25), number))
        if number % EPOCH == 0:
            events += [("validate", 3.0 * step, number), ("save", 1.5, number)]
    return Job([*events, ("finish", 2.0, total)])


@dataclass
class World:
    """A suite whose jobs were simulated: files as they would be at a moment."""

    path: Path
    opened: OpenSuite
    jobs: dict[str, Job] = field(default_factory=dict)
    moment: float = 1_000_000.0

    def write(self, name: str, now: float) -> None:
        """Records and state of one job."""
        job, folder = self.jobs[name], self.opened.folder
        run, clock, ended = folder.run(name), job.started, now >= job.started + job.seconds
        if now < job.started:
            return
        run.mkdir(parents=True, exist_ok=True)
        lines: dict[str, list[dict[str, Any]]] = {"metrics.jsonl": [], "times.jsonl": []}
        total = max(step for _, _, step in job.events)
        for kind, seconds, step in job.events:
            clock += seconds
            if clock > now:
                break
            record: dict[str, Any] = {"step": step, "seconds": seconds}
            if kind == "step":
                lines["metrics.jsonl"].append(record | {"loss": 1.0, "samples": 8})
            else:
                lines["times.jsonl"].append(record | {"what": kind, "time": clock, "total": total, "ranks": 1})
        for file, records in lines.items():
            (run / file).write_text("".join(json.dumps(record) + "\n" for record in records))
        state: dict[str, Any] = {"state": "done" if ended else "running", "attempt": 1, "started": job.started}
        folder.change(name, **state, host="elsewhere", spent=job.seconds if ended else 0.0)

    def predictor(self, now: float) -> Predictor:
        for name in self.jobs:
            self.write(name, now)
        return Predictor(self.opened.suite, self.opened.home, self.opened.folder, audit=True, now=now)


def earlier(world: World, name: str, job: Job, **recipe: Any) -> None:
    """A finished run of another command, in runs/."""
    folder = world.path / "runs" / name
    run = RunFolder.open(folder, sets.tiny_recipe(**recipe), Plan(device="cpu"), world.path)
    for kind, seconds, step in job.events:
        more = {} if kind == "step" else {"what": kind, "time": 1.0}
        with (folder / ("times.jsonl" if more else "metrics.jsonl")).open("a") as file:
            file.write(json.dumps({"step": step, "seconds": seconds, **more}) + "\n")
    run.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    sets.write_set(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(num_epochs=20)))
    jobs = {
        "one": {"do": "train", "recipe": "recipe.yaml"},
        "two": {"do": "train", "recipe": "recipe.yaml", "set": ["recipe.seed=1", "recipe.num_epochs=30"]},
        "three": {"do": "train", "recipe": "recipe.yaml", "set": ["recipe.learning_rate=1e-4"], "after": ["one"]},
    }
    text = {"gpus": 2, "deadline": "1h", "set": ["plan.device=cpu"], "jobs": jobs}
    (tmp_path / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    yield World(tmp_path, open_suite(tmp_path / "night.yaml"))


def note_start(folder: Path, **about: Any) -> None:
    with (folder / "times.jsonl").open("a") as file:
        file.write(json.dumps({"what": "start", "seconds": 1.0, "time": 2.0, **about}) + "\n")


def test_a_record_of_another_gpu_tells_nothing_here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier(world, "before", training(5, 2.0, seed=9), num_epochs=5)
    note_start(world.path / "runs/before", step=0, device="NVIDIA A100")
    assert world.predictor(world.moment).left()["one"].seconds is None, "these jobs run on the CPU"
    suite = world.opened.suite.model_copy(update={"set": ()})
    monkeypatch.setattr("sameday.suite.times.predict.gpu_names", lambda: {"NVIDIA H200"})
    there = Predictor(suite, world.opened.home, world.opened.folder, audit=True, now=world.moment)
    assert there.left()["one"].seconds is None
    # Nobody knows which GPU it will be, as on a login node: the plan says which one the record is of.
    monkeypatch.setattr("sameday.suite.times.predict.gpu_names", set)
    there = Predictor(suite, world.opened.home, world.opened.folder, audit=True, now=world.moment)
    assert ", NVIDIA A100" in there.left()["one"].source
    note_start(world.path / "runs/before", step=0, device="CPU")
    found = world.predictor(world.moment).left()["one"]
    assert found.seconds is not None and "NVIDIA" not in found.source


def test_steps_on_an_earlier_gpu_do_not_count(tmp_path: Path) -> None:
    steps = [{"step": n, "seconds": 4.0 if n <= 50 else 1.0} for n in range(1, 81)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    for step, device in ((0, "NVIDIA A100"), (20, "NVIDIA A100"), (50, "NVIDIA H200"), (60, "NVIDIA H200")):
        note_start(tmp_path, step=step, device=device)
    read = recorded(tmp_path)
    assert read.seconds == [1.0] * 30 and (read.done, read.device) == (80, "NVIDIA H200")


def test_steps_of_an_epoch_are_those_of_a_run_like_it(world: World) -> None:
    """Where nobody has counted the data, as when a suite is run without having been planned."""
    earlier(world, "before", training(5, 2.0, seed=9), num_epochs=5)
    opened = world.opened

    def left() -> dict[str, Estimate]:
        return Predictor(opened.suite, opened.home, opened.folder, now=world.moment).left()

    assert "its data was not counted yet" in left()["one"].source
    note_start(world.path / "runs/before", step=0, total=5 * EPOCH)
    found = left()
    counted = world.predictor(world.moment).left()  # which reads the data
    assert None not in [each.seconds for each in found.values()]
    assert {name: each.seconds for name, each in found.items()} == {
        name: each.seconds for name, each in counted.items()
    }


def test_a_cache_takes_what_it_took_before(world: World) -> None:
    job = {"do": "cache", "recipe": "recipe.yaml", "kind": "pixels"}
    path = world.path / "cached.yaml"
    jobs = {"fill": job | {"set": ["recipe.seed=3"]}, "features": job | {"kind": "features"}}
    path.write_text(yaml.safe_dump({"jobs": jobs}))
    opened, other = open_suite(path), SuiteFolder(world.path / "runs/other")
    assert remaining(opened.suite, opened.home, opened.folder)["fill"].source == (
        "not known: no such cache was filled before; `expected` in the suite can say what it takes"
    )
    other.change("images", state="done", spent=120.0, host="vm")
    asked = request(opened.suite, opened.home, "fill") | {"set": ["recipe.seed=9"]}
    (other.job("images") / "request.json").write_text(json.dumps(asked))
    found = remaining(opened.suite, opened.home, opened.folder)
    assert (found["fill"].seconds, found["fill"].low, found["features"].seconds) == (120.0, 0.0, None)
    assert found["fill"].source == "what runs/other/jobs/images took on vm"


def test_a_search_takes_its_minutes_and_what_one_took_besides(world: World) -> None:
    """Loading a model and the proof at the end may take longer than the search."""
    job = {"do": "tune", "recipe": "recipe.yaml", "minutes": 2}
    path = world.path / "tuned.yaml"
    path.write_text(yaml.safe_dump({"jobs": {"fast": job, "other": job | {"set": ["recipe.effective_batch=2"]}}}))
    opened, before = open_suite(path), SuiteFolder(world.path / "runs/before")
    found = remaining(opened.suite, opened.home, opened.folder)
    assert (found["fast"].seconds, found["fast"].source) == (120 + 9, "its minutes, and verify")
    for name, asked in {"odd": {"do": "tune", "recipe": [1], "set": 3, "minutes": "x"}, "search": None}.items():
        before.change(name, state="done", started=1000.0, ended=1100.0, spent=700.0, host="vm")
        asked = asked or request(opened.suite, opened.home, "fast") | {"minutes": 0.5, "set": ["recipe.seed=9"]}
        (before.job(name) / "request.json").write_text(json.dumps(asked))
    found = remaining(opened.suite, opened.home, opened.folder)
    assert (found["fast"].seconds, found["fast"].low, found["fast"].high) == (120 + 70, 190 - 17.5, 190 + 17.5)
    assert found["fast"].source == "its minutes, and what runs/before/jobs/search took besides them on vm"
    assert found["other"].source == "its minutes, and verify"
    with running(opened.folder, "fast", [0]):
        opened.folder.change("fast", started=world.moment - 150)
        left = remaining(opened.suite, opened.home, opened.folder, now=world.moment)["fast"]
        assert left.seconds == pytest.approx(40, abs=1), "beyond its minutes it is still under way"


@pytest.mark.parametrize("step", [0.5, 6.0])
def test_the_end_is_predicted_within_15_percent_from_an_earlier_run(world: World, step: float) -> None:
    earlier(world, "before", training(5, step, seed=9, start=25.0), num_epochs=5)
    begin = world.moment
    one, two = training(20, step, 1), training(30, step, 2)
    one.started = two.started = begin
    three = training(20, step, 3)
    three.started = begin + one.seconds
    end = max(two.seconds, one.seconds + three.seconds)
    found = make_forecast(world.opened, 2, world.predictor(begin))
    assert found.seconds == pytest.approx(end, rel=0.15) and found.low < end < found.high
    assert "runs/before on " in found.estimates["one"].source
    assert [name for name, _ in found.schedule.critical()] == ["one", "three"]
    world.jobs = {"one": one, "two": two, "three": three}
    for share in (0.1, 0.4, 0.7, 0.95):
        now = begin + share * end
        found = make_forecast(world.opened, 2, world.predictor(now))
        assert now - begin + found.seconds == pytest.approx(end, rel=0.15), share
    whole = predict(world.opened.suite, world.opened.home, world.opened.folder, audit=True, now=now)
    assert whole["one"].seconds == pytest.approx(one.seconds), "what is done took what it took"


def test_the_prediction_is_corrected_while_it_runs(world: World) -> None:
    """The machine is 1.8 times as slow as the one on which the earlier run was, and a job slows down on its way."""
    earlier(world, "before", training(5, 1.0, seed=9), num_epochs=5)
    begin = world.moment
    one, two = training(20, 1.8, 1), training(30, 1.8, 2, drift=1.3)
    three = training(20, 1.8, 3)
    one.started = two.started = begin
    three.started = begin + one.seconds
    world.jobs = {"one": one, "two": two, "three": three}
    end = max(two.seconds, one.seconds + three.seconds)
    first = make_forecast(world.opened, 2, world.predictor(begin - 1)).seconds
    assert first < 0.7 * end, "nobody could know"
    errors = []
    for share in (0.25, 0.5, 0.6, 0.75, 0.9):
        now = begin + share * end
        left = remaining(world.opened.suite, world.opened.home, world.opened.folder, audit=True, now=now)
        assert left.keys() == world.jobs.keys()
        errors.append(abs(now - begin + make_forecast(world.opened, 2, world.predictor(now)).seconds - end) / end)
    assert errors[0] < first / end and max(errors[2:]) < 0.15 and errors[-1] < 0.05
    now = begin + 0.8 * two.seconds
    left = world.predictor(now).left()["two"]
    assert left.source.startswith("its own records, ")
    assert now - begin + (left.seconds or 0) == pytest.approx(two.seconds, rel=0.05)


def test_what_nobody_knows_is_not_made_up(world: World) -> None:
    left = remaining(world.opened.suite, world.opened.home, world.opened.folder, audit=True)
    assert {each.seconds for each in left.values()} == {None}
    assert left["one"].source == (
        "not known: no run with such steps is recorded; `sameday suite plan --measure` times some"
    )
    uncounted = remaining(world.opened.suite, world.opened.home, type(world.opened.folder)(world.path / "other"))
    assert uncounted["one"].source == "not known: its data was not counted yet: `sameday suite plan` does"


def test_steps_are_counted_without_a_model(world: World) -> None:
    work = work_of(world.opened.suite, world.opened.home, world.opened.folder, "two")
    counted = Counts(world.opened.folder, audit=True).of(work.trainings[0].recipe, world.path)
    assert (counted.per_epoch, counted.sizes) == (4, {"train": 30, "val": 10, "test": 16})
    assert counted.total(work.trainings[0].recipe) == 120
    kept = Counts(world.opened.folder).of(work.trainings[0].recipe, world.path)
    assert kept == counted, "known without reading the data again"


def test_steps_are_counted_again_where_only_the_time_of_the_last_change_is_another(world: World) -> None:
    """`cp -p`, `rsync -t` and `tar` put a file there with an old time of its contents."""
    recipe = work_of(world.opened.suite, world.opened.home, world.opened.folder, "two").trainings[0].recipe
    data = world.path / sorted(recipe.paths())[0]
    Counts(world.opened.folder, audit=True).of(recipe, world.path)
    before = data.stat()
    data.chmod(before.st_mode)
    os.utime(data, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert Counts(world.opened.folder).of(recipe, world.path).why, "not known before it is read again"


def test_what_changes_no_step_is_the_same_work() -> None:
    base = sets.tiny_recipe()
    same = sets.tiny_recipe(seed=8, num_epochs=9, learning_rate=1.0, schedule="constant", best="loss", name="other")
    assert step_cost(base) == step_cost(same) and base.fingerprint != same.fingerprint
    assert step_cost(base) != step_cost(sets.tiny_recipe(effective_batch=16))
    assert step_cost(base) != step_cost(sets.tiny_recipe(precision="tf32"))


def test_records_under_another_plan_count_for_less(world: World) -> None:
    earlier(world, "before", training(5, 1.0, seed=9), num_epochs=5)
    (world.path / "plan.yaml").write_text("device: cpu\nmicro_batch: 2\n")
    text = yaml.safe_load((world.path / "night.yaml").read_text())
    text["plan"] = "plan.yaml"
    (world.path / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    opened = open_suite(world.path / "night.yaml")
    found = remaining(opened.suite, opened.home, opened.folder, audit=True)["one"]
    assert found.source.endswith(", under another plan")
    assert found.high is not None and found.seconds is not None and found.high > 1.3 * found.seconds
    work = work_of(opened.suite, opened.home, opened.folder, "one")
    own = Measured(step_cost(sets.tiny_recipe()), planned(work.trainings[0]), "CPU", [9.0, *[2.0] * 20], 12.0, 0.1)
    keep_measured(opened.folder, replace(own, files=work.trainings[0].files))
    measured = remaining(opened.suite, opened.home, opened.folder, audit=True)["one"]
    assert measured.source == "measured on CPU" and measured.lacks == ("saving", "its end")
    assert measured.seconds == pytest.approx(12 + 7 + 80 * 2 + 20 * 10 * 0.1)


def test_a_first_validation_that_compiles_is_no_usual_one() -> None:
    times = [{"what": "validate", "seconds": seconds} for seconds in (2.0, 0.1, 0.3)] + [{"what": "save", "seconds": 5}]
    pace = pace_of([1.0] * 20, times)
    assert pace is not None and (pace.validate, pace.save, pace.warm) == pytest.approx((0.2, 5, 1.8))
    one = pace_of([1.0] * 20, times[:1])
    assert one is not None and (one.validate, one.warm) == (2.0, 0), "nobody knows better"


def test_one_stall_is_not_expected_of_every_step() -> None:
    """Of two dozen steps one took fifteen times as long: thousands of them would not."""
    steps = [5.0, *[0.8, 1.0] * 12]
    usual, stalled = pace_of(steps), pace_of([*steps[:9], 15.2, *steps[9:]])
    assert usual is not None and stalled is not None
    assert (stalled.step, stalled.error) == pytest.approx((usual.step, usual.error), rel=0.02)
    often = pace_of([*steps[:9], 15.2, *steps[9:], 15.2])
    assert often is not None and often.step == pytest.approx(0.9 + 2 * 14.3 / 22, rel=0.02), (
        "it is how this machine goes"
    )
    few = pace_of([1.0, 1.0, 1.0, 15.0])
    assert few is not None and few.step > 5, "nobody knows what is usual"


def test_what_a_process_takes_once_is_counted_once() -> None:
    """Not with every sample, and what it compiled not again for jobs that find it on disk."""
    cold = Measured("c", "p", "GPU", [14.0, *[0.5] * 20], 10.0, 0.01, 0.1, 1.0, 8.0, 26.0, 3.0)
    warm = replace(cold, steps=[1.5, *[0.5] * 20], last_step=0.5, first_scores=1.0, first_answers=0.5, end=2.0)
    warm = warm.after(cold)
    assert warm.compiling == pytest.approx(12.5 + 7.5 + 25 + 2.5)
    assert cold.after(warm).compiling == 0, "noise is not less than nothing"
    pace = warm.pace({"val": 1000}, "on")
    assert pace is not None and (pace.warm, pace.validate, pace.finish) == pytest.approx((1 + 0.5 + 1, 10, 1 + 2))
    assert warm.evaluation(1000) == pytest.approx(1 + 0.5 + 110)
    # 13.5 + 8 + 26 + 3 s once, and steps of half a second: compiled again only where the training is short.
    assert matters(cold, 10_000) and not matters(cold, 10_200)
    passes = iter([0.3, 0.0])
    found = _each(lambda: time.sleep(next(passes)) or 10)
    assert found.each is not None and 0.2 < found.first < 1 and found.each < 0.02
    assert _each(lambda: 0) == (None, 0.0)


@given(st.integers(1, 200))
def test_a_training_of_few_steps_has_a_pace(total: int) -> None:
    """It would be measured again and again otherwise, and never be known."""
    steps = timed_steps(total)
    assert pace_of([1.0] * len(steps)) is not None and {*steps} == {*range(total)}
    assert steps[:total] == [*range(total)] and (total < 3 or len(steps) == total)


@given(each=st.floats(0.001, 100), first=st.floats(0, 1000))
def test_enough_steps_are_measured(each: float, first: float) -> None:
    """Of short ones many, of long ones few, however long the first one compiled."""
    steps = [first]
    while not enough(steps):
        steps.append(each)
        assert len(steps) <= max(STEPS + 1, SHORT / each + 2)
    spent = sum(steps[1:])
    assert len(steps) >= LEAST and (spent > SHORT or len(steps) > STEPS)
    assert spent <= max(LONG, (LEAST - 1) * each) + each


def test_other_samples_are_a_guess(world: World) -> None:
    earlier(world, "before", training(5, 1.0, seed=9), num_epochs=5, data={"path": "set", "val": 12})
    found = world.predictor(world.moment).left()["one"]
    assert found.source.endswith(", on other images") and found.seconds is not None and found.high is not None
    assert 1.2 * found.seconds < found.high < 1.3 * found.seconds
    assert not world.predictor(world.moment).knows(_training(world, "one")), "--measure would"


def _training(world: World, name: str) -> Training:
    return work_of(world.opened.suite, world.opened.home, world.opened.folder, name).trainings[0]


def test_evaluations_are_like_those_before_them(world: World) -> None:
    text = yaml.safe_load((world.path / "night.yaml").read_text())
    text["jobs"] |= {f"{name}-test": {"do": "eval", "of": name, "split": "test"} for name in ("one", "two")}
    (world.path / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    earlier(world, "before", training(5, 1.0, seed=9), num_epochs=5)
    opened = open_suite(world.path / "night.yaml")
    left = remaining(opened.suite, opened.home, opened.folder, audit=True)["one-test"]
    assert left.seconds == pytest.approx(30 + 3.0 * 16 / 10) and left.source.startswith("a validation of runs/before")
    opened.folder.change("one-test", state="done", attempt=1, spent=50.0)
    found = remaining(opened.suite, opened.home, opened.folder, audit=True)["two-test"]
    assert (found.seconds, found.source) == (50.0, "the whole of one-test")
    text["jobs"]["two-val"] = {"do": "eval", "of": "two", "split": "val"}
    (world.path / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    other = remaining(open_suite(world.path / "night.yaml").suite, opened.home, opened.folder, audit=True)["two-val"]
    assert other.seconds == pytest.approx(50.0 * 10 / 16), "by the number of images"


def test_the_user_may_know_better_until_a_job_knows_itself(world: World) -> None:
    text = yaml.safe_load((world.path / "night.yaml").read_text())
    text["jobs"]["one"]["expected"] = "5m"
    text["jobs"] |= {"search": {"do": "tune", "recipe": "recipe.yaml", "minutes": 2}}
    (world.path / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    world.opened = open_suite(world.path / "night.yaml")
    first = world.predictor(world.moment).left()
    assert (first["one"].seconds, first["one"].source) == (300.0, "expected, as the suite says")
    assert first["search"].low == 120 and first["search"].source == "its minutes, and verify"
    world.jobs = {"one": training(20, 2.0, 1)}
    world.jobs["one"].started = world.moment
    later = world.predictor(world.moment + 100).left()["one"]
    assert later.source.startswith("its own records") and 100 + (later.seconds or 0) == pytest.approx(
        world.jobs["one"].seconds, rel=0.15
    )


def test_a_recipe_that_is_wrong_is_told(world: World) -> None:
    (world.path / "recipe.yaml").write_text("task: classify\n")
    left = remaining(world.opened.suite, world.opened.home, world.opened.folder)
    assert (left["one"].seconds, isinstance(world.predictor(0.0).work("one"), Work)) == (None, False)
    assert left["one"].source.startswith("not known: ") and "recipe.yaml" in left["one"].source
