"""One report over all experiments of a suite: runs by their jobs' names, what evaluations found, what each job took."""

from __future__ import annotations

import json
import os
import re
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from answered import drawn, write_answers
from sets import TINY, write_set
from typed import FIELDS, refused, sameday

from sameday.spec.suite import load_suite
from sameday.suite.jobs import asked, command, open_suite
from sameday.suite.page.report import report_at_the_end, suite_runs
from sameday.suite.state import SuiteFolder

SUITE = """
name: two & zero
deadline: 1h
set: [plan.device=cpu]
jobs:
  zero: {do: eval, recipe: asked.yaml, base: true, split: val}
  one: {do: train, recipe: seen.yaml}
  two: {do: train, recipe: seen.yaml, set: [recipe.seed=7], gpus: 0}
  one-test: {do: eval, of: one}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite that was run: two real trainings, a real evaluation, and answers as a real one leaves them."""
    home = write_set(tmp_path_factory.mktemp("suite"))
    fields: dict[str, Any] = {"task": "classify", "name": "seen", "model": TINY, "precision": "float32"}
    fields |= {"effective_batch": 8, "num_epochs": 2, "data": {"path": "set", "val": 10}}
    (home / "seen.yaml").write_text(json.dumps(fields))
    (home / "asked.yaml").write_text(yaml.safe_dump(FIELDS | {"model": "some/model"}))
    (home / "s.yaml").write_text(SUITE)
    suite, folder = load_suite(home / "s.yaml"), SuiteFolder(home / "out")
    for name in ("one", "two", "one-test"):
        assert sameday(home, *command(suite, home, folder, name)).code == 0
    folder.job("zero").mkdir()
    write_answers(home, "zero", drawn(images=5, each=4, right=0.5), 20).rename(folder.run("zero"))
    (folder.run("zero") / "scores.json").write_text('{"loss": 1.25, "samples": 20}')
    begin = 1_000_000.0
    (folder.path / "begun.json").write_text(json.dumps({"time": begin}))
    for i, name in enumerate(suite.jobs):
        folder.change(
            name,
            state="done",
            asked=asked(suite, home, name),
            attempt=1 + (name == "two"),
            started=begin + 600 * i,
            ended=begin + 600 * (i + 1),
            spent=600.0,
            host="node-7",
            gpus=[i] if suite.jobs[name].gpus else [],
        )
    return home


def page_text(path: Path) -> str:
    page = re.sub(r"<style>.*?</style>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", page)))


def test_runs_have_their_jobs_names_and_what_evaluations_found(home: Path) -> None:
    suite, folder = load_suite(home / "s.yaml"), SuiteFolder(home / "out")
    zero, one, two = suite_runs(suite, home, folder)
    assert [run.label for run in (zero, one, two)] == ["zero", "one", "two"]
    assert (zero.state, zero.scores) == ("evaluated, not trained", {"val": {"loss": 1.25, "samples": 20}})
    assert [(each.name, each.split) for each in zero.answers] == [("zero-val", "val")]
    assert zero.answers[0].metrics is not None and zero.answers[0].metrics.questions == 20
    assert set(one.scores) == {"val", "test"} and set(two.scores) == {"val"}
    assert one.scores["test"]["loss"] == json.loads((folder.run("one-test") / "scores.json").read_text())["loss"]


def test_one_page_over_all_experiments(home: Path) -> None:
    said = sameday(home, "suite", "report", "s.yaml", "--out", "out", "-o", "night.html")
    assert (said.code, said.out) == (0, "written: night.html\n"), said.err
    text = page_text(home / "night.html")
    assert "two & zero · sameday report" in text
    assert "4 of 4 jobs are done. From the first start to the last end it took 40 min 00 s." in text
    assert "The deadline was kept, with 20 min 00 s to spare." in text
    jobs = text[text.index("Jobs and their cost", text.index("At a glance", 400)) :]
    assert "one train done 1 10 min 00 s 0.167 1 GPU node-7 GPU 1" in jobs
    assert "two train done 2 10 min 00 s 0 a CPU is enough node-7" in jobs
    assert "all 40 min 00 s 0.5" in jobs
    assert "test loss" in text and "95% interval" in text and " evaluated, not trained " in text
    # Both curves are on one chart, each in its colour.
    loss = (home / "night.html").read_text().split("Training loss, step by step")[1].split("</svg></svg>")[0]
    assert set(re.findall(r'class="line (c\d)"', loss)) == {"c1", "c2"}
    # Of each its environment: machine, versions, and the recipe to repeat it.
    environment = text[text.rindex(" Environment ") :]
    assert re.search(r"Machine node-7 \S+ \S+ ", environment) and re.search(r" torch – 2\.\S+ 2\.", environment)
    assert "one Save recipe and plan" in environment and "zero Save recipe and plan" not in environment


def test_a_suite_that_is_done_writes_its_report_once(home: Path) -> None:
    report = home / "out" / "report.html"
    said = sameday(home, "suite", "run", "s.yaml", "--out", "out")
    assert said.code == 0, said.out + said.err
    assert said.out.splitlines()[-1] == f"report: {report}"
    before = report.stat().st_mtime_ns
    assert "report" not in sameday(home, "suite", "run", "s.yaml", "--out", "out").out
    assert report.stat().st_mtime_ns == before
    os.utime(report, (0, 0))
    report.write_text("mine")
    os.utime(report, (0, 0))
    said = sameday(home, "suite", "run", "s.yaml", "--out", "out")
    assert said.code == 0 and said.out.splitlines()[-1].startswith("no report: -o ")
    assert report.read_text() == "mine"  # nobody's file is written over
    report.unlink()


def test_what_is_there_of_a_suite_that_goes_on(home: Path, tmp_path: Path) -> None:
    """A failed job is told with the first line of why; the deadline of what has not ended is not judged."""
    folder = SuiteFolder(home / "out")
    kept = {name: folder.read(name) for name in ("two", "one-test")}
    try:
        folder.change("two", state="failed", why="exit code 4\nmuch more")
        folder.change("one-test", state="waiting", spent=0.0, attempt=0)
        report_at_the_end(open_suite(home / "s.yaml", home / "out"))
        said = sameday(home, "suite", "report", "s.yaml", "--out", "out", "-o", str(tmp_path / "now.html"))
    finally:
        for name, state in kept.items():
            folder.write(name, state)
    assert said.code == 0, said.err
    assert not (home / "out" / "report.html").exists()
    text = page_text(tmp_path / "now.html")
    assert "2 of 4 jobs are done." in text and "two train failed exit code 4 2 10 min" in text
    assert "deadline" not in text and "much more" not in text


def test_made_when_all_is_done_also_by_a_scheduler_and_again_for_another_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM itself makes none: the next `suite run --slurm` does, where nothing is missing any more."""
    programs, out = home / "programs", home / "out"
    programs.mkdir()
    for name in ("sbatch", "squeue"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    words = ("suite", "run", "s.yaml", "--out", "out", "--slurm")
    try:
        assert sameday(home, *words).out == f"all jobs are done\nreport: {out / 'report.html'}\n"
        assert sameday(home, *words).out == "all jobs are done\n", "made once"
        (home / "s.yaml").write_text(SUITE.replace("  one-test: {do: eval, of: one}\n", ""))
        os.utime(home / "s.yaml", (time.time() + 5,) * 2)
        assert sameday(home, *words).out.endswith(f"report: {out / 'report.html'}\n")
        text = page_text(out / "report.html")
        assert "3 of 3 jobs are done." in text and "one-test" not in text
    finally:
        (home / "s.yaml").write_text(SUITE)
        (out / "report.html").unlink(missing_ok=True)


def test_nothing_to_report_yet(home: Path) -> None:
    said = refused(home, "suite", "report", "s.yaml", "--out", "nothing")
    assert said == f"{home / 'nothing'}: no job of s.yaml has trained or evaluated anything yet"
    assert not (home / "nothing").exists()
    log = home / "out" / "jobs" / "one" / "run" / "metrics.jsonl"
    said = refused(home, "suite", "report", "s.yaml", "--out", "out", "-o", str(log))
    assert said == f"-o {log}: is one of the files that are read; choose another one"
