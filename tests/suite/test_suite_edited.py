"""What suites leave behind that are refused, edited between two runs, or kept where nobody may write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sets
import yaml
from processes import largest_file
from scenarios import Home, kinds, stub, until
from test_local import Local
from typed import refused, sameday

from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_DISK_FULL, EXIT_STOPPED, BadInput, in_short
from sameday.spec.writing import write_text
from sameday.suite.jobs import asked, check_writable, open_suite
from sameday.suite.running.cancel import cancel
from sameday.suite.running.execute import _run, _Signals
from sameday.suite.running.local import check
from sameday.suite.running.script import job_name
from sameday.suite.running.slurm import Entry, living, script_path
from sameday.suite.state import QUIET, SCRIPT, SuiteFolder
from sameday.suite.times import work
from sameday.suite.times.predict import Predictor

WRONG = {"do": "train", "recipe": "recipe.yaml", "set": ["recipe.sead=1"]}


def test_what_is_refused_leaves_no_folder_behind(home: Home) -> None:
    home.suite({"a": WRONG})
    for words in (["run"], ["plan"], ["run", "--gpus", "2"], ["run", "--dry-run"]):
        said = refused(home.path, "suite", words[0], "night.yaml", *words[1:])
        assert said == "a: --set recipe.sead=1: sead is not a key here; nearest: seed"
        assert not (home.path / "runs").exists(), words
    check_writable(SuiteFolder(home.path / "runs/deep"))
    assert not (home.path / "runs").exists()


def test_a_training_that_began_with_another_recipe_is_told_before_anything_starts(home: Home) -> None:
    """It was told when the job's turn came, with the advice to choose another --out alone."""
    home.suite({"a": {"do": "train", "recipe": "recipe.yaml", "set": ["recipe.seed=7"]}})
    folder = SuiteFolder(home.path / "out")
    (folder.run("a") / "checkpoints").mkdir(parents=True)
    recipe = folder.run("a") / "recipe.yaml"
    recipe.write_text(dump_yaml(sets.tiny_recipe(num_epochs=9, seed=7)))
    folder.change("a", state="stopped")
    told = (
        "a has begun with another recipe: num_epochs: 9 there, 12 here. Put it back, choose another --out, or do it "
        "anew with `sameday suite run --again a`"
    )
    assert refused(home.path, "suite", "run", "night.yaml", "--out", "out") == told
    planned = sameday(home.path, "suite", "plan", "night.yaml", "--out", "out")
    assert planned.out.endswith(f"`suite run` refuses: {told}\n"), planned
    assert not home.records()
    opened = open_suite(home.path / "night.yaml", home.path / "out")
    check(opened, 4, again=["a"])
    recipe.write_text(dump_yaml(sets.tiny_recipe(num_epochs=12, seed=7)))
    check(opened, 4, again=[])


def test_a_search_that_was_stopped_is_not_said_to_go_on(home: Home) -> None:
    jobs = {"found": {"do": "tune", "recipe": "recipe.yaml", "minutes": 1}, "images": {**WRONG, "set": []}}
    opened = open_suite(home.suite(jobs), home.path / "out")
    for name in jobs:
        with _Signals() as signals:
            signals.asked = True
            assert _run(opened, name, None, [], signals) == EXIT_STOPPED
    assert {name: opened.folder.read(name).why for name in jobs} == {
        "found": "asked to stop; the search begins again",
        "images": "asked to stop; it goes on from there",
    }


def test_a_plan_made_elsewhere_does_not_hide_where_the_suite_was_run(home: Home) -> None:
    suite, other = home.suite({"a": stub("a", expected="1h")}), home.path / "elsewhere"
    other.mkdir()
    assert sameday(other, "suite", "plan", str(suite)).code == 0
    (other / "runs/night").mkdir(parents=True, exist_ok=True)  # what it keeps about data would be here
    SuiteFolder(home.path / "runs/night").begin()
    with contextlib.chdir(other):
        assert open_suite(suite).folder.path == home.path / "runs/night"
        SuiteFolder(Path("runs/night")).begin()
        assert open_suite(suite).folder.path == other / "runs/night", "here comes first"


def test_a_model_folder_that_is_not_there_is_told_before_anything_starts(home: Home) -> None:
    recipe = {"task": "vqa", "data": {"train": "set", "val": "set"}}
    models = {"far": "../models/gone", "hub": "org/model", "made": "out/jobs/hub/run/model", "home": "/no/where"}
    for name, model in models.items():
        (home.path / f"{name}.yaml").write_text(json.dumps(recipe | {"model": model}))
    home.suite({name: {"do": "train", "recipe": f"{name}.yaml", "after": []} for name in models})
    assert refused(home.path, "suite", "run", "night.yaml", "--out", "out").splitlines() == [
        f"far: {home.path.parent}/models/gone of its recipe's model is not there",
        "home: /no/where of its recipe's model is not there",
    ], "one may be on the Hub, one is made by the suite itself"


def test_jobs_that_left_the_file_are_still_seen_and_can_be_cancelled(home: Home) -> None:
    suite, out = home.suite({"old": stub("old", seconds=60)}), home.path / "out"
    runner = Local().begin(suite, out)
    until(lambda: kinds(suite, out) == {"old": "running"})
    home.suite({"new": stub("old", seconds=60)})
    told = sameday(home.path, "suite", "status", "night.yaml", "--out", "out").out
    gone = "not in the suite's file any more: old (running); what it made stays in"
    assert f"{gone} {out}/jobs" in told.splitlines()
    said = sameday(home.path, "suite", "cancel", "night.yaml", "--out", "out").out
    assert said == "new: cancelled\nold: asked to stop\n"
    runner.wait()
    said = sameday(home.path, "suite", "logs", "night.yaml", "old", "-f", "--out", "out").out
    assert said.startswith("--- ") and "--set recipe.name=old" in said
    said = sameday(home.path, "suite", "logs", "night.yaml", "new", "-f", "--out", "out").out
    assert said == "new is cancelled, and wrote nothing yet\n"
    said = sameday(home.path, "suite", "cancel", "night.yaml", "old", "--out", "out").out
    assert said.startswith("old: is ") or said == "old: cancelled\n"
    assert "nobody: no job of this suite" in refused(
        home.path, "suite", "cancel", "night.yaml", "nobody", "--out", "out"
    )


def test_jobs_that_left_the_file_are_found_in_the_queue(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("name: x\n")
    for name in ("old", "new"):
        (tmp_path / "night.yaml").write_text(f"jobs: {{{name}: {{do: train, recipe: exp.yaml}}}}")
        opened = open_suite(tmp_path / "night.yaml", tmp_path / "out")
        if name == "old":
            opened.folder.change("old", state="queued")
            script_path(opened, "old").touch()
    entry = Entry("7", "PENDING", job_name(opened.folder, "old"), "Priority")
    assert living(opened, [entry]) == {"old": entry}


def test_a_job_of_a_machine_that_is_gone_goes_on(home: Home) -> None:
    """As in a container that is started again, which has another name; no lock of it is left."""
    suite, out = home.suite({"a": stub("a")}), home.path / "out"
    folder = SuiteFolder(out)
    words = (str(suite), "--out", str(out))
    folder.change("a", state="running", attempt=1, started=time.time(), host="a1b2c3", pid=7)
    folder.begin()
    told = sameday(home.path, "suite", "run", *words)
    assert told.code == EXIT_STOPPED and not home.records(), "it may still run there"
    assert "  a: running, from before, on a1b2c3\n" in told.out
    assert told.out.endswith(
        "a began on a1b2c3, and nobody here holds it. If that machine is gone, `sameday suite cancel` with its name "
        "frees it now; by itself it counts as interrupted 10 minutes after its last line\n"
    )
    said = sameday(home.path, "suite", "cancel", *words).out
    assert said == "a: began on a1b2c3; if that machine is gone, `suite cancel` with its name frees it\n"
    state = folder.job("a") / "state.json"
    os.utime(state, (time.time() - QUIET - 5,) * 2)
    assert kinds(suite, out) == {"a": "interrupted"}
    folder.log("a").write_text("a line of it\n")
    assert kinds(suite, out) == {"a": "running"}, "somebody wrote just now"
    said = sameday(home.path, "suite", "cancel", str(suite), "a", *words[1:]).out
    assert said == "a: cancelled; nobody holds it, and it began on a1b2c3\n"
    folder.change("a", state="running", host="a1b2c3")
    for path in (state, folder.log("a")):
        os.utime(path, (time.time() - QUIET - 5,) * 2)
    assert sameday(home.path, "suite", "run", *words).code == 0 and len(home.records()["a"]) == 1
    folder.change("a", state="running", host="a1b2c3", slurm="9")
    for path in (state, folder.log("a")):
        os.utime(path, (time.time() - QUIET - 5,) * 2)
    assert kinds(suite, out) == {"a": "interrupted"}, "in an allocation of the user's own, which is over"
    (folder.job("a") / SCRIPT).touch()
    assert kinds(suite, out) == {"a": "running"}, "the queue is asked about these"


def test_nobody_has_to_listen(home: Home) -> None:
    """As with `sameday suite run night.yaml | head -1`, or in a terminal that is closed: what waits starts anyway."""
    suite, out = home.suite({"a": stub("a", seconds=0.3), "b": stub("b", "a")}), home.path / "out"
    words = [sys.executable, "-m", "sameday", "suite", "run", str(suite), "--out", str(out)]
    runner = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert runner.stdout is not None and runner.stderr is not None
    assert runner.stdout.readline() == f"night in {out}: 2 jobs; no GPU here, 4 jobs at once on the CPU\n"
    runner.stdout.close()
    until(lambda: kinds(suite, out)["a"] in ("running", "done"))
    runner.send_signal(signal.SIGHUP)
    lost = "standard output can no longer be written: Broken pipe; the command goes on without it\n"
    assert (runner.wait(), runner.stderr.read()) == (0, lost)
    runner.stderr.close()
    assert kinds(suite, out) == {"a": "done", "b": "done"}


@contextlib.contextmanager
def not_allowed(folder: Path) -> Iterator[None]:
    """This process may read the folder, and not write in it."""
    folder.chmod(0o555)
    root = os.getuid() == 0
    try:
        if root:
            os.setresuid(65534, 65534, 0)
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o755)


def test_cancelling_where_one_may_not_write() -> None:
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are nobody else's to read
        home = Path(made)
        home.chmod(0o755)
        (home / "exp.yaml").write_text("name: x\n")
        (home / "night.yaml").write_text("jobs: {a: {do: train, recipe: exp.yaml}}")
        opened = open_suite(home / "night.yaml", home / "out")
        opened.folder.change("a", state="stopped")
        with (
            not_allowed(home / "out/jobs"),
            pytest.raises(BadInput, match=f"{made}/out: cannot be written by you; whoever runs the suite can cancel"),
        ):
            cancel(opened)
        assert opened.folder.read("a").state == "stopped"


def test_a_full_disk_is_told_with_the_file(home: Home, tmp_path: Path) -> None:
    with largest_file(2), pytest.raises(OSError) as error:
        write_text(tmp_path / "state.json", "x" * 100)
    assert error.value.filename == str(tmp_path / "state.json")
    home.suite({"a": stub("a")})
    with largest_file(4):
        said = sameday(home.path, "suite", "run", "night.yaml", "--out", "out")
    assert said.code == EXIT_DISK_FULL and str(home.path / "out") in said.err, said.err


def test_a_dry_run_takes_jobs_that_are_done_anew(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    jobs = {"fit": {"do": "train", "recipe": "exp.yaml"}, "test": {"do": "eval", "of": "fit"}}
    (tmp_path / "night.yaml").write_text(yaml.safe_dump({"jobs": jobs}))
    opened = open_suite(tmp_path / "night.yaml", tmp_path / "out")
    words = ("suite", "run", "night.yaml", "--out", "out", "--dry-run")
    for name in jobs:
        opened.folder.change(name, state="done", asked=asked(opened.suite, opened.home, name))
    for more in ((), ("--one-job",)):
        said = sameday(tmp_path, *words, *more)
        assert "sbatch --" not in said.out and "# all jobs are done" in said.out
    said = sameday(tmp_path, *words, "--again", "test")
    assert said.out.count("$(sbatch ") == 1 and "dependency" not in said.out
    said = sameday(tmp_path, *words, "--again", "fit")
    assert said.out.count("$(sbatch ") == 2 and '"--dependency=afterok:$job_1"' in said.out
    assert subprocess.run(["bash", "-n"], input=said.out, text=True).returncode == 0


def test_a_problem_with_data_is_told_where_the_time_would_be(home: Home) -> None:
    batch = home.path / "set/data_batch_3"
    batch.write_bytes(batch.read_bytes()[:2000])
    home.suite({"a": {"do": "train", "recipe": "recipe.yaml"}})
    said = " ".join(sameday(home.path, "suite", "plan", "night.yaml").out.split())
    assert f"a: not known: 1 problem in {home.path}/set: data_batch_3: is cut short" in said


def test_recipes_of_hundreds_of_jobs_are_read_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = home.suite({f"j{n}": stub(f"j{n}") for n in range(300)})
    opened, read = open_suite(suite, home.path / "out"), []
    real = work.Specs.from_files
    monkeypatch.setattr(work.Specs, "from_files", lambda *given: read.append(given) or real(*given))
    for _ in range(2):
        Predictor(opened.suite, opened.home, opened.folder).left()
    assert len(read) == 300


def test_errors_in_short() -> None:
    assert in_short(BadInput("one\ntwo")) == "one"
    assert in_short(BadInput("2 problems:\n  first\n  second")) == "2 problems: first"
    assert in_short(BadInput("")) == ""
