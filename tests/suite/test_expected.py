"""When jobs of a suite under way will begin and end, as those who watch it see it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from watched import data as shown_by
from watched import running, served, write_suite

from sameday.spec.suite import load_suite
from sameday.spec.words import when
from sameday.suite.jobs import open_suite
from sameday.suite.page.snapshot import Snapshot
from sameday.suite.running.status import table
from sameday.suite.state import SuiteFolder
from sameday.suite.times.expected import expected

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
    suite, now = snapshot.suite, 100_000.0
    seen = expected(snapshot.opened, folder.states(suite), now)
    assert (seen.finish, seen.why) == (now + 50 * 60, "")
    assert seen.spans["b"] == (now, now + 1200) and seen.spans["c"] == (
        now + 2400,
        now + 3000,
    )  # the longest path first
    folder.change("a", state="done", attempt=1, started=now, ended=now + 900, spent=900.0)
    with running(folder, "b", [0]):
        folder.change("b", started=now + 900)
        seen = expected(snapshot.opened, folder.states(suite), now + 1000)
        assert seen.finish == now + 900 + 1200 + 600
    folder.change("b", state="failed", why="x")
    seen = expected(snapshot.opened, folder.states(suite), now + 1000)
    assert (seen.finish, seen.why, seen.rest, seen.spans) == (None, "b is failed", None, {})


def test_jobs_beside_a_failed_one_keep_their_ends(opened: tuple[Path, SuiteFolder]) -> None:
    path, folder = opened
    now = time.time()
    folder.change("b", state="failed", why="x")
    seen = expected(Snapshot(path, folder.path).opened, folder.states(load_suite(path)), now)
    assert (seen.spans, seen.rest) == ({"a": (now, now + 1200)}, now + 1200)
    assert (seen.finish, seen.why) == (None, "b is failed"), "the end of all is another question"
    lines = table(open_suite(path, folder.path), now).splitlines()
    ends = when(now + 1200, now)
    assert f"finish: not known, because b is failed; all that can still run ends at {ends}" in lines
    assert lines[1].split() == ["a", "waiting", *ends.split()]
    with served(path, folder) as server:
        tiles = {tile["name"]: tile for tile in shown_by(server)["tiles"]}
    assert tiles["Finish, as predicted"]["note"].startswith("b is failed; the others end in 2"), "20 minutes"


def test_watching_never_searches_for_a_schedule(
    opened: tuple[Path, SuiteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best one of ten jobs may take seconds to find."""
    path, folder = opened
    times = (71, 67, 61, 59, 53, 47, 43, 41, 37, 31)
    jobs = "".join(f"  j{n}: {{do: train, recipe: exp.yaml, expected: {n}m}}\n" for n in times)
    path.write_text(f"gpus: 3\njobs:\n{jobs}")
    monkeypatch.setattr("sameday.suite.times.schedule.Search", lambda *_: pytest.fail("searched"))
    view = Snapshot(path, folder.path).look()
    assert view.finish is not None and 60 * sum(times) / 3 <= view.finish - view.now <= 60 * (sum(times) / 3 + 71)


def test_what_nobody_knows_is_said(opened: tuple[Path, SuiteFolder]) -> None:
    path, folder = opened
    path.write_text(
        EXPECTED.replace("a: {do: train, recipe: exp.yaml, expected: 20m}", "a: {do: train, recipe: exp.yaml}")
    )
    snapshot = Snapshot(path, folder.path)
    seen = expected(snapshot.opened, folder.states(snapshot.suite), 0.0)
    assert seen.finish is None and seen.why.startswith("a: not known: ") and not seen.spans


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
    from sameday.suite.page import snapshot as module

    path, folder = opened
    made: list[float] = []
    real = module.expected
    monkeypatch.setattr(module, "expected", lambda *given: made.append(time.monotonic()) or real(*given))
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

    monkeypatch.setattr(module, "expected", broken)
    assert snapshot.look().unknown == "no prediction: a stranger's file"
