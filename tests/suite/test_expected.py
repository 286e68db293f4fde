"""When jobs will begin and end, as it stands: the runner's own way of giving GPUs, gone through ahead of time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched import data as shown_by
from watched import running, served, write_suite

from sameday.spec.suite import Suite
from sameday.suite.forecast import forecast, simulate
from sameday.suite.schedule import Task, schedule
from sameday.suite.snapshot import Snapshot
from sameday.suite.state import SuiteFolder


def suite_of(jobs: dict[str, dict[str, Any]], **fields: Any) -> Suite:
    return Suite.model_validate(
        {"jobs": {n: {"do": "train", "recipe": "x", **job} for n, job in jobs.items()}, **fields}
    )


@st.composite
def suites(draw: st.DrawFn) -> tuple[Suite, dict[str, float], int]:
    gpus = draw(st.integers(0, 3))
    names = [f"j{n}" for n in range(draw(st.integers(1, 7)))]
    jobs: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        after = draw(st.lists(st.sampled_from(names[:i]), unique=True, max_size=2)) if i else []
        wants = draw(st.integers(0, gpus))
        pin = {"gpu": draw(st.integers(0, gpus - 1))} if wants == 1 and draw(st.booleans()) else {}
        jobs[name] = {"after": after, "gpus": wants, **pin}
    left = {name: float(draw(st.integers(0, 20))) for name in names}
    return suite_of(jobs, gpus=gpus, at_once=draw(st.integers(1, 2))), left, gpus


@given(suites())
def test_no_gpu_has_two_jobs_and_needs_come_first(drawn: tuple[Suite, dict[str, float], int]) -> None:
    suite, left, gpus = drawn
    spans = simulate(suite, left, {}, (), gpus, suite.at_once)
    assert set(spans) == set(suite.jobs)
    for name, (begin, end) in spans.items():
        assert end - begin == left[name]
        assert all(spans[need][1] <= begin for need in suite.needs(name))
    for moment in {begin for begin, _ in spans.values()}:
        now = [suite.jobs[name] for name, (begin, end) in spans.items() if begin <= moment < end]
        assert sum(job.gpus for job in now) <= gpus
        assert sum(job.gpus == 0 for job in now) <= suite.at_once
        pins = [job.gpu for job in now if job.gpu is not None]
        assert len(pins) == len(set(pins))
    tasks = {
        name: Task(left[name], tuple(suite.needs(name)), job.gpus, None if job.gpu is None else (job.gpu,))
        for name, job in suite.jobs.items()
    }
    assert max(end for _, end in spans.values()) >= schedule(tasks, gpus, suite.at_once).bound - 1e-6


def test_what_runs_keeps_its_gpu_until_it_ends() -> None:
    suite = suite_of({"a": {}, "b": {}, "c": {"after": ["a"]}, "d": {"gpus": 2}}, gpus=2)
    left = {"a": 10.0, "b": 30.0, "c": 5.0, "d": 1.0}
    spans = simulate(suite, left, {"a": [1], "b": [0]}, (), 2, 1)
    assert spans == {"a": (0, 10), "b": (0, 30), "c": (10, 15), "d": (30, 31)}


EXPECTED = """
gpus: 1
deadline: 1h
jobs:
  a: {do: train, recipe: exp.yaml, expected: 20m}
  b: {do: train, recipe: exp.yaml, expected: 20m}
  c: {do: eval, of: b, expected: 10m}
"""


@pytest.fixture
def opened(tmp_path: Path) -> tuple[Path, SuiteFolder]:
    path, folder = write_suite(tmp_path)
    path.write_text(EXPECTED)
    return path, folder


def test_the_finish_of_a_suite(opened: tuple[Path, SuiteFolder]) -> None:
    path, folder = opened
    snapshot = Snapshot(path, folder.path)
    suite, home, now = snapshot.suite, path.parent, 100_000.0
    seen = forecast(suite, home, folder, folder.states(suite), now)
    assert (seen.finish, seen.why) == (now + 50 * 60, "")
    assert seen.spans["b"] == (now, now + 1200) and seen.spans["c"] == (
        now + 2400,
        now + 3000,
    )  # the longest path first
    folder.change("a", state="done", attempt=1, started=now, ended=now + 900, spent=900.0)
    with running(folder, "b", [0]):
        folder.change("b", started=now + 900)
        seen = forecast(suite, home, folder, folder.states(suite), now + 1000)
        assert seen.finish == now + 900 + 1200 + 600
    folder.change("b", state="failed", why="x")
    seen = forecast(suite, home, folder, folder.states(suite), now + 1000)
    assert (seen.finish, seen.why) == (None, "b is failed")


def test_what_nobody_knows_is_said(opened: tuple[Path, SuiteFolder]) -> None:
    path, folder = opened
    path.write_text(
        EXPECTED.replace("a: {do: train, recipe: exp.yaml, expected: 20m}", "a: {do: train, recipe: exp.yaml}")
    )
    suite = Snapshot(path, folder.path).suite
    seen = forecast(suite, path.parent, folder, folder.states(suite), 0.0)
    assert seen.finish is None and seen.why.startswith("a: not known: ") and set(seen.spans) == {"b", "c"}


def test_the_page_tells_the_finish_against_the_deadline(opened: tuple[Path, SuiteFolder]) -> None:
    path, folder = opened
    folder.begin()
    began = folder.began() or 0.0
    with served(path, folder) as server:
        shown = shown_by(server)
    tiles = {tile["name"]: tile for tile in shown["tiles"]}
    assert tiles["Finish, as predicted"]["time"] == pytest.approx(time.time() + 3000, abs=20)
    assert tiles["Finish, as predicted"]["note"] == "in 50 min 00 s"
    assert tiles["Deadline"]["time"] == pytest.approx(began + 3600) and tiles["Deadline"]["mood"] == "good"
    assert tiles["Deadline"]["note"].startswith("holds, ")
    assert [row["cells"][6]["note"] for row in shown["rows"]] == ["as predicted"] * 3
    assert len([each for each in shown["time"][2] if each[0] == "g"]) == 3  # what is to come is drawn too
    path.write_text(path.read_text().replace("deadline: 1h", "deadline: 30m"))
    with served(path, folder) as server:
        late = {tile["name"]: tile for tile in shown_by(server)["tiles"]}["Deadline"]
    assert late["mood"] == "bad" and late["note"].startswith("missed by 20 min ")


def test_predictions_are_made_now_and_then(opened: tuple[Path, SuiteFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    from sameday.suite import snapshot as module

    path, folder = opened
    made: list[float] = []
    real = module.forecast
    monkeypatch.setattr(module, "forecast", lambda *given: made.append(time.monotonic()) or real(*given))
    snapshot = Snapshot(path, folder.path)
    for _ in range(5):
        snapshot.look()
    assert len(made) == 1
    monkeypatch.setattr(module, "ANEW", 0.0)
    monkeypatch.setattr(module, "SELDOM", 0.0)
    snapshot.look()
    assert len(made) == 2

    def broken(*_: Any) -> None:
        raise RuntimeError("a stranger's file")

    monkeypatch.setattr(module, "forecast", broken)
    assert snapshot.look().unknown == "no prediction: a stranger's file"
