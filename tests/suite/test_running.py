"""What users see of suites that run here: where jobs go, what is refused, status, logs, cancelling."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenarios import Home, kinds, states, stub, training, until
from test_local import Local, kill
from typer.testing import CliRunner

from sameday.cli import app
from sameday.record.folder import RunFolder
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_STOPPED, BadInput
from sameday.spec.suite import Suite
from sameday.spec.words import when
from sameday.suite.jobs import asked, changes, open_suite
from sameday.suite.running import local
from sameday.suite.running.execute import _ended_alone, execute, last_lines, main
from sameday.suite.running.local import gpus_here, place, run, starting_order
from sameday.suite.running.status import progress, table
from sameday.suite.state import SuiteFolder, ask_to_stop, held, holders, take

LONG = training() | {"set": [*training()["set"], "recipe.num_epochs=400"]}
"""1600 steps, which no test waits for."""


def typed(*words: str) -> tuple[int, str]:
    """What a command leaves with and says, bad input included."""
    result = CliRunner().invoke(app, ["suite", *words])
    error = "" if result.exception is None or isinstance(result.exception, SystemExit) else str(result.exception)
    return result.exit_code, result.output + error


# Where jobs go


@st.composite
def machines(draw: st.DrawFn) -> tuple[Suite, list[str], int, set[int], int]:
    gpus = draw(st.integers(0, 4))
    jobs: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)):
        jobs[name] = {"do": "train", "recipe": "x", "gpus": draw(st.integers(0, max(1, gpus)))}
        if gpus and jobs[name]["gpus"] == 1 and draw(st.booleans()):
            jobs[name]["gpu"] = draw(st.integers(0, gpus - 1))
    suite = Suite.model_validate({"jobs": jobs})
    return suite, list(jobs), gpus, draw(st.sets(st.integers(0, 3))), draw(st.integers(0, 3))


@given(machines())
def test_no_gpu_is_given_twice(machine: tuple[Suite, list[str], int, set[int], int]) -> None:
    suite, ready, gpus, busy, slots = machine
    placed = place(ready, suite, gpus, busy, slots)
    given = [gpu for each in placed.values() for gpu in each]
    assert len(given) == len(set(given)) and not set(given) & busy and set(given) <= set(range(gpus))
    for name, own in placed.items():
        assert len(own) == (suite.jobs[name].gpus if gpus else 0)
        assert not gpus or suite.jobs[name].gpu in (None, *own)
    assert sum(not own for own in placed.values()) <= slots
    if not busy & set(range(gpus)) and slots:
        assert ready[0] in placed, "the first one starts on a free machine"


def test_a_job_of_several_gpus_keeps_those_that_are_free_and_pinned_ones_are_spared() -> None:
    jobs = {"two": {"gpus": 2}, "one": {}, "pinned": {"gpu": 0}, "cpu": {"gpus": 0}}
    suite = Suite.model_validate({"jobs": {n: {"do": "train", "recipe": "x"} | job for n, job in jobs.items()}})
    assert place(["two", "one"], suite, 2, {1}, 1) == {}
    assert place(["one", "two"], suite, 2, {1}, 1) == {"one": [0]}
    assert place(["one"], suite, 2, (), 1, {0}) == {"one": [1]}
    assert place(["two", "pinned", "cpu"], suite, 3, (), 1, {0}) == {"two": [1, 2], "pinned": [0], "cpu": []}
    assert place(["one", "two", "cpu"], suite, 0, (), 2) == {"one": [], "two": []}


def test_how_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite.model_validate({"gpus": 4, "jobs": {"a": {"do": "train", "recipe": "x"}}})
    free = suite.model_copy(update={"gpus": None})
    monkeypatch.setattr(local, "count_gpus", lambda: 0)
    assert (gpus_here(suite), gpus_here(free), gpus_here(suite, 2)) == (4, 0, 2)
    monkeypatch.setattr(local, "count_gpus", lambda: 2)
    assert (gpus_here(free), gpus_here(suite, 1), gpus_here(suite, 0)) == (2, 1, 0)
    with pytest.raises(BadInput, match="gpus is 4, and this machine has 2; allowed: 0 to 2"):
        gpus_here(suite)


def test_the_longest_path_starts_first() -> None:
    job = {"do": "train", "recipe": "x"}
    jobs = {"a": job, "b": job, "c": job, "d": job | {"after": ["b"]}}
    suite = Suite.model_validate({"jobs": jobs})
    assert starting_order(suite, 2, {"a": 60.0, "b": 60.0, "c": 10800.0, "d": 14400.0}) == ["b", "c", "d", "a"]
    assert sorted(starting_order(suite, 0)) == ["a", "b", "c", "d"]
    pinned = Suite.model_validate({"jobs": {"a": job | {"gpu": 1}, "b": job | {"gpus": 2}, "c": job | {"gpus": 0}}})
    assert sorted(starting_order(pinned, 2)) == ["a", "b", "c"]


# What is refused


def test_what_cannot_run_is_told_at_once(home: Home) -> None:
    suite = home.suite({"wide": stub("wide", gpus=8), "pinned": stub("pinned", gpu=6), "good": stub("good")})
    with pytest.raises(BadInput) as error:
        run(open_suite(suite, home.path / "out"), again=["nobody"])
    assert str(error.value).splitlines() == [
        "--again nobody: is no job of this suite; there are wide, pinned, good",
        "wide needs 8 GPUs, and there are 4",
        "pinned wants GPU 6, and there are 4: 0 to 3",
    ]
    assert not (home.path / "out" / "jobs").exists()


def test_evaluations_that_cannot_be_are_told_before_anything_starts(home: Home) -> None:
    """Each was told when the model was trained."""
    stages = [{"name": "one"}, {"name": "two", "start": "base"}]
    own = {"task": "vqa", "model": "org/model", "data": {"train": "train.jsonl"}, "stages": stages}
    recipes = {
        "own": own,
        "ends": own | {"evaluate": {"split": "test", "cascade": True}},
        "heads": {"task": "cot", "model": "org/model", "data": {"train": "train.jsonl"}, "effective_batch": 2},
    }
    (home.path / "train.jsonl").write_text("{}")
    for name, recipe in recipes.items():
        (home.path / f"{name}.yaml").write_text(json.dumps({"effective_batch": 2, "learning_rate": 1e-4} | recipe))
    jobs = {name: {"do": "train", "recipe": f"{name}.yaml"} for name in recipes}
    later = {f"{name}-test": {"do": "eval", "of": name, "split": "train", "cascade": True} for name in ("own", "heads")}
    base = {"base": {"do": "eval", "recipe": "own.yaml", "base": True, "split": "train", "cascade": True}}
    code, said = typed("run", str(home.suite(jobs | later | base)), "--out", str(home.path / "out"))
    alone = "stage two starts from the base model, so that each stage has a model of its own: "
    assert code and [line.split("; ")[0] for line in said.splitlines()] == [
        "ends: recipe.evaluate.split is test, and the recipe has no data.test",
        f"ends: recipe.evaluate.cascade is true, and {alone}a cascade is of one model's answers",
        f"own-test: cascade is true, and {alone}a cascade is of one model's answers",
        "heads-test: cascade is true, and cascade asks stage by stage, and here all questions of an image are asked "
        "together: later stages have the earlier ones' states as context, not their answers",
    ]


def test_what_jobs_would_find_hours_later_is_told_at_once(home: Home) -> None:
    """By run and by plan; nothing is begun."""
    (home.path / "bad.yaml").write_text("task: classify\nnum_epoch: 3\n")
    (home.path / "far.yaml").write_text((home.path / "recipe.yaml").read_text().replace("path: set", "path: nowhere"))
    (home.path / "raw-0.parquet").touch()
    files = {"train": "raw-*.parquet", "val": "none-*.parquet", "test": "hf:org/set"}
    (home.path / "questions.yaml").write_text(json.dumps({"task": "vqa", "model": "org/model", "data": files}))
    blank = {"task": "vqa", "model": "org/model", "data": {"train": "blank.jsonl"}}
    (home.path / "blank.yaml").write_text(json.dumps(blank))
    (home.path / "blank.jsonl").touch()
    job = {"do": "train", "recipe": "recipe.yaml", "after": ["good"]}
    jobs = {
        "good": training(),
        "blank": job | {"recipe": "blank.yaml"},
        "questions": job | {"recipe": "questions.yaml"},
        "typo": job | {"recipe": "bad.yaml"},
        "set": job | {"set": ["recipe.sead=1", "plan.foo=2"]},
        "data": job | {"recipe": "far.yaml"},
        "plan": job | {"plan": "recipe.yaml"},
        "base": {"do": "eval", "recipe": "recipe.yaml", "base": True},
        "adapter": {"do": "eval", "recipe": "recipe.yaml", "adapter": "set"},
        "cache": {"do": "cache", "recipe": "recipe.yaml", "kind": "pixels"},
        "cascade": {"do": "eval", "of": "good", "cascade": True, "set": ["plan.bar=1"]},
    }
    suite, out = home.suite(jobs), home.path / "out"
    code, said = typed("run", str(suite), "--out", str(out))
    told = dict(line.split(": ", 1) for line in said.splitlines())
    assert code and not (out / "jobs").exists() and told.keys() == jobs.keys() - {"good"}
    assert f"typo: {home.path}/bad.yaml:2: num_epoch is not a key here; nearest: num_epochs\n" in said
    assert "set: --set recipe.sead=1: sead is not a key here; nearest: seed\n" in said
    assert "set: --set plan.foo=2: foo is not a key here; allowed: share_images" in said
    assert told["data"] == f"{home.path}/nowhere of its recipe's data is not there"
    assert told["blank"] == f"{home.path}/blank.jsonl of its recipe's data is empty"
    assert told["questions"] == f"{home.path}/none-*.parquet of its recipe's data is not there"
    assert told["base"] == "base: task classify starts from random weights, and has no base model to evaluate"
    assert told["adapter"] == f"--adapter {home.path}/set: task classify has no adapters"
    assert told["cache"] == "task classify has no use for a cache" and "plan: " in said
    assert "cascade: --set plan.bar=1: bar is not a key here" in said
    assert told["cascade"] == "cascade: task classify generates no answers"
    code, planned = typed("plan", str(suite), "--out", str(out))
    elsewhere = ("blank: ", "data: ", "questions: ")
    assert code and planned.splitlines() == [line for line in said.splitlines() if not line.startswith(elsewhere)]


def test_where_out_is(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = home.suite({"a": stub("a")})
    other = home.path / "elsewhere"
    other.mkdir()
    monkeypatch.chdir(other)
    assert open_suite(suite).folder.path == other / "runs/night"
    code, said = typed("status", str(suite))
    assert code == 0 and said.endswith(f"{other}/runs/night: nothing was run here; --out names another folder\n")
    code, said = typed("cancel", str(suite))
    assert code == 1 and f"{other}/runs/night: nothing was run here; --out names another folder" in said
    assert not (other / "runs").exists()
    SuiteFolder(home.path / "runs/night").begin()
    assert open_suite(suite).folder.path == home.path / "runs/night", "it was run beside its file"
    (home.path / "file").touch()
    for word in ("run", "plan"):
        code, said = typed(word, str(suite), "--out", str(home.path / "file"))
        assert code == 1 and "/file: cannot be written: File exists; --out names another folder" in said


def test_one_runner(home: Home) -> None:
    suite = home.suite({"slow": stub("slow", seconds=3)})
    out = home.path / "out"
    runner = Local().begin(suite, out)
    until(lambda: kinds(suite, out)["slow"] == "running")
    with pytest.raises(BadInput, match=f"process {runner.pid} on .* runs this suite already; `sameday suite status`"):
        run(open_suite(suite, out))
    # Nor does anyone run a job that is held.
    assert "running on GPU 0" in table(open_suite(suite, out))
    # A runner that is killed leaves the job to itself, and the next one waits for it.
    runner.kill()
    runner.wait()
    said: list[str] = []
    assert run(open_suite(suite, out), say=said.append) == 0
    assert len(home.records()["slow"]) == 1
    assert said[1].endswith("slow: running on GPU 0, from before") and said[-1] == "1 of 1 done"


def test_a_done_job_is_done_for_what_was_asked(home: Home) -> None:
    jobs = {"a": stub("a"), "b": stub("b", "a"), "c": stub("c")}
    suite, out = home.suite(jobs), home.path / "out"
    assert run(open_suite(suite, out)) == 0
    (home.path / "stub.yaml").write_text("# how it is written does not matter\ntask:  stub\n")
    home.suite(jobs, set=["plan.device=cpu", "plan.workers=0"])
    assert run(open_suite(suite, out)) == 0
    jobs["a"]["set"][1] = "recipe.seconds=0.01"
    home.suite(jobs)
    with pytest.raises(BadInput) as error:
        run(open_suite(suite, out))
    assert str(error.value) == (
        'a is done, and since then set was ["recipe.name=a", "recipe.seconds=0.0"], is ["recipe.name=a", '
        '"recipe.seconds=0.01"]. Put it back, choose another --out, or do it anew with `sameday suite run --again a`'
    )
    assert main([str(suite), str(out), "a"]) == EXIT_BAD_INPUT
    said: list[str] = []
    assert run(open_suite(suite, out), again=["a"], say=said.append) == 0
    assert said[:2] == [f"{name}: begins anew; what it made before is in {out}/earlier/{name}-1" for name in ("a", "b")]
    assert {name: len(each) for name, each in home.records().items()} == {"a": 2, "b": 2, "c": 1}
    assert (out / "earlier" / "a-1" / "log.txt").exists()


def test_a_done_job_whose_result_was_removed_is_done_again(home: Home) -> None:
    suite, out = home.suite({"a": stub("a"), "b": stub("b", "a")}), home.path / "out"
    result = SuiteFolder(out).run("a") / "recipe.yaml"
    result.parent.mkdir(parents=True)
    result.touch()
    assert run(open_suite(suite, out)) == run(open_suite(suite, out)) == 0
    result.unlink()
    said: list[str] = []
    assert run(open_suite(suite, out), say=said.append) == 0
    assert said[0] == f"a: done again, since {result} is gone"
    assert {name: len(each) for name, each in home.records().items()} == {"a": 2, "b": 1}


def test_what_ended_well_without_its_executor_is_not_repeated(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever ran it was killed: its state says that it runs, and its last file is there."""
    jobs = {"one": training(), "tune": {"do": "tune", "recipe": "recipe.yaml"}, "test": {"do": "eval", "of": "one"}}
    opened = open_suite(home.suite(jobs), home.path / "out")
    folder, now = opened.folder, time.time()
    folder.change("one", state="done")
    for name, last in (("tune", folder.job("tune") / "plan.yaml"), ("test", folder.run("test") / "scores.json")):
        same = asked(opened.suite, opened.home, name)
        folder.change(name, state="running", asked=same, attempt=1, started=now - 90, spent=10.0)
        assert not _ended_alone(opened, name), "nothing is there"
        last.parent.mkdir(exist_ok=True)
        last.touch()
        os.utime(last, (now - 100, now - 100))
        assert not _ended_alone(opened, name), "it is of an attempt before"
        os.utime(last, (now - 30, now - 30))
        folder.change(name, asked="something else")
        assert not _ended_alone(opened, name)
        folder.change(name, asked=same)
        assert execute(opened, name) == 0 and not folder.log(name).exists()
        state = folder.read(name)
        assert (state.state, state.attempt, state.made) == ("done", 1, True) and state.spent == pytest.approx(70, abs=1)
        assert f"{name}: whoever ran it was killed, and it ended well by itself" in capfd.readouterr().out


def test_changes_are_named_by_field() -> None:
    before = {"do": "train", "recipe": {"seed": 0, "data": {"path": "x", "val": 3}}}
    now = {"do": "train", "recipe": {"seed": 1, "data": {"path": "x"}, "name": "n"}}
    assert changes(before, now) == [
        "recipe.seed was 0, is 1",
        "recipe.data.val was 3, is not there",
        "recipe.name was not there, is n",
    ]


# One job by itself


def test_a_job_by_itself(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    suite = home.suite({"a": stub("a"), "b": stub("b", "a"), "bad": stub("bad", file="lacking")})
    out = home.path / "out"
    words = [str(suite), str(out)]
    assert main([*words, "b"]) == EXIT_BAD_INPUT
    assert "b waits: a is waiting" in capfd.readouterr().err
    assert SuiteFolder(out).read("b").state == "blocked"
    assert main([*words, "nobody"]) == EXIT_BAD_INPUT
    assert "'nobody' is no job of" in capfd.readouterr().err
    assert main([*words, "a", "--gpus", "2,3"]) == 0
    assert home.records()["a"][0]["gpus"] == "2,3"
    assert main([*words, "a"]) == 0 and "a is done already" in capfd.readouterr().out
    assert main([*words, "bad"]) == 7
    state = SuiteFolder(out).read("bad")
    assert state.why.splitlines()[0] == "exit code 7" and state.why.endswith("the file lacking is not there")
    first, *_, last = SuiteFolder(out).log("bad").read_text().splitlines()
    assert first.startswith("--- 20") and ", attempt 1: " in first and "train" in first
    assert last == "the file lacking is not there"


def test_gpus_count_among_those_that_are_seen(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = home.suite({"a": stub("a"), "b": stub("b", gpus=0)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7,6")
    opened = open_suite(suite, home.path / "out")
    assert execute(opened, "a", [1]) == execute(opened, "b") == 0
    assert [home.records()[name][0]["gpus"] for name in "ab"] == ["GPU-7", ""]


def test_a_job_whose_executor_was_killed_is_held_and_can_be_stopped(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    suite = home.suite({"one": LONG})
    out = home.path / "out"
    folder = SuiteFolder(out)
    runner = Local().begin(suite, out)
    until(lambda: len(holders(folder.lock("one"))) == 2 and (folder.run("one") / "metrics.jsonl").exists())
    executor = folder.read("one").pid
    assert executor is not None
    kill([runner.pid, executor])
    runner.wait()
    until(lambda: executor not in holders(folder.lock("one")))
    assert kinds(suite, out)["one"] == "running" and folder.busy_gpus() == {0}
    monkeypatch.setattr("sameday.suite.running.execute.PATIENCE", 0.2)
    assert main([str(suite), str(out), "one"]) == EXIT_BAD_INPUT
    assert f"one is run already, by process {executor} on " in capfd.readouterr().err
    # The next runner waits for it; what is stopped while it waits is not begun again.
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.endswith("one: running on GPU 0, from before"):
            assert ask_to_stop(folder, "one")

    assert run(open_suite(suite, out), say=say) == EXIT_STOPPED
    assert folder.read("one").attempt == 1 and "one: stopped: asked to stop; it goes on from there" in said[-2]
    assert kinds(suite, out)["one"] == "stopped" and folder.busy_gpus() == set()
    assert json.loads((folder.run("one") / "stopped.json").read_text())["code"] == EXIT_STOPPED


def test_two_processes_of_a_job_stop_together(home: Home) -> None:
    """torchrun leaves with 1 whatever happened: the run's own word counts."""
    suite = home.suite({"two": LONG | {"gpus": 2}})
    out = home.path / "out"
    runner = Local().begin(suite, out)
    until(lambda: (SuiteFolder(out).run("two") / "metrics.jsonl").exists())
    assert Local().stop(runner, suite, out) == EXIT_STOPPED
    state = states(suite, out)["two"]
    assert (state.state, state.code, state.gpus) == ("stopped", EXIT_STOPPED, [0, 1])
    assert RunFolder.read(SuiteFolder(out).run("two")).metrics


# Status, logs, cancelling


def test_status_logs_and_cancel(home: Home) -> None:
    jobs = {
        "one": LONG,
        "bad": stub("bad", file="lacking"),
        "next": stub("next", "bad"),
        "last": stub("last", "one"),
    }
    suite = home.suite(jobs)
    out, words = home.path / "out", (str(suite), "--out", str(home.path / "out"))
    assert typed("logs", str(suite), "one", *words[1:]) == (0, "one is waiting, and wrote nothing yet\n")
    runner = Local().begin(suite, out)
    until(lambda: kinds(suite, out)["bad"] == "failed" and (progress(SuiteFolder(out), "one").total or 0) > 0)
    code, said = typed("status", *words)
    lines = said.splitlines()
    assert code == 0 and lines[0].split() == ["job", "state", "time", "step", "loss", "samples/s", "left", "finish"]
    assert lines[1].startswith("one   running on GPU 0  0:") and "/1600 " in lines[1] and len(lines[1].split()) == 11
    assert [line.split()[:2] for line in lines[2:5]] == [["bad", "failed"], ["next", "blocked"], ["last", "waiting"]]
    assert "bad: failed, exit code 7" in lines and "    the file lacking is not there" in lines
    assert "next: blocked, because bad is failed" in lines
    assert "finish: not known, because bad is failed" in lines
    # In another terminal.
    code, said = typed("cancel", *words)
    assert code == 0 and "last: cancelled\n" in said and "one: asked to stop\n" in said
    code, said = typed("logs", str(suite), "one", "-f", *words[1:])
    assert code == 0 and said.startswith("--- ") and "asked to stop: step " in said
    assert runner.wait() == 1, "one failed"
    assert kinds(suite, out) == {"one": "stopped", "bad": "failed", "next": "cancelled", "last": "cancelled"}
    code, said = typed("cancel", str(suite), "bad", *words[1:])
    assert said == "bad: is failed already\n"
    code, said = typed("cancel", str(suite), "nobody", *words[1:])
    assert code == 1 and "nobody: no job of this suite; there are one, bad, next, last" in said
    assert main([str(suite), str(out), "last"]) == EXIT_STOPPED, "cancelled, until someone runs the suite again"
    assert local.take_up(open_suite(suite, out)) == {
        "bad": "failed, and tried again",
        "next": "cancelled, and tried again",
        "last": "cancelled, and tried again",
    }
    assert kinds(suite, out) == {"one": "stopped", "bad": "waiting", "next": "waiting", "last": "waiting"}


def test_finish_and_deadline(home: Home) -> None:
    jobs = {"a": stub("a", expected="1h"), "b": stub("b", "a", expected="30m"), "c": stub("c", expected="10m")}
    suite, out = home.suite(jobs, deadline="80m", gpus=1), home.path / "out"
    folder = SuiteFolder(out)
    folder.begin()
    now = folder.began()
    assert now is not None
    lines = table(open_suite(suite, out), now).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["a", "waiting"], ["b", "waiting"], ["c", "waiting"]]
    finish, deadline = when(now + 6000, now), when(now + 4800, now)
    assert lines[4] == f"finish: {finish}; deadline {deadline}, which does not hold"
    home.suite(jobs, deadline="2h", gpus=1)
    assert "which does not hold" not in table(open_suite(suite, out), now)


def test_a_live_table_ends_with_the_jobs_and_shows_text_as_text(home: Home) -> None:
    suite, out = home.suite({"a": stub("a"), "b": stub("b", "a")}), home.path / "out"
    SuiteFolder(out).change("a", state="failed", attempt=1, spent=61.0, why="exit code 3\n\x1b[2J[red]not a colour")
    code, said = typed("status", str(suite), "--out", str(out), "--live")
    assert code == 0 and "a    failed   1:01" in said and "b    blocked" in said
    assert "\\x1b[2J[red]not a colour" in said and "\x1b[2J" not in said


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the file open on this machine counts."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    path = tmp_path / "lock"
    mine = take(path)
    assert mine is not None and not held(path)
    with subprocess.Popen(["sleep", "60"], pass_fds=[mine]) as other:
        os.close(mine)
        assert held(path) and take(path) is None
        other.kill()
    assert not held(path)


def test_progress_out_of_damaged_files(tmp_path: Path) -> None:
    folder = SuiteFolder(tmp_path)
    assert progress(folder, "a").step is None
    folder.run("a").mkdir(parents=True)
    records = [{"step": n, "loss": 1.0 / n, "seconds": 0.5, "samples": 8} for n in range(1, 11)]
    lines = [
        *map(json.dumps, records),
        '{"step": 10, "split": "val", "loss": 9}',
        "[1]",
        '{"step": "x"}',
        '{"step": 11',
    ]
    (folder.run("a") / "metrics.jsonl").write_text("\n".join(lines))
    assert progress(folder, "a").total is None
    folder.log("a").write_bytes(b"\xff\nstep 1/90  loss 1\nstep 10/40  loss 0.1\nat step 3/7  x\n")
    seen = progress(folder, "a")
    assert (seen.step, seen.total, seen.loss, seen.samples_per_second, seen.left) == (10, 40, 0.1, 16.0, 15.0)


def test_last_lines_are_the_jobs_own(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    own = [f"line {n}" for n in range(40)]
    more = ["E1116 x torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 2)", "=====", "more"]
    log.write_text("\n".join([*own, *more]))
    assert last_lines(log) == own[-20:]
    assert last_lines(log, log.read_text().index("line 39")) == ["line 39"]
    assert last_lines(tmp_path / "absent") == []


def test_times_of_other_days_have_a_date() -> None:
    now = time.mktime((2026, 11, 16, 13, 5, 0, 0, 0, -1))
    assert (when(now + 60, now), when(now + 86400, now)) == ("13:06", "2026-11-17 13:05")
