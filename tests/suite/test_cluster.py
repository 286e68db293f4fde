"""Suites on a real SLURM: two nodes on this machine. Where a test is about scheduling, jobs are lines of shell in place
of trainings; all else is as users have it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
import yaml
from cluster import Cluster, started, until, why_not
from processes import assert_agrees, assert_same_run, finished, last_step, write_run
from scenarios import LIMIT, BackEnd
from typer.testing import CliRunner

from sameday.cli import app
from sameday.demo.patterns import write_patterns
from sameday.suite.jobs import OpenSuite, open_suite
from sameday.suite.running import slurm
from sameday.suite.running.cancel import cancel
from sameday.suite.running.local import exit_code
from sameday.suite.running.script import WHOLE, job_name
from sameday.suite.state import JobState, holders

if (reason := why_not()) is not None and os.environ.get("SAMEDAY_TEST_SLURM") != "must":
    pytest.skip(reason, allow_module_level=True)
pytestmark = pytest.mark.slow

HOSTILE = "o'u\"t $(touch pwned) ;& #é %j"
DRIVER = """\
\"\"\"`python -m`, and so is what this starts.\"\"\"
import os, sys, time

sys.executable = os.environ["DRIVEN"]
_, _, module, *words = sys.argv
if module == "sameday.suite.running.execute":
    from sameday.suite.running import execute

{execute}
    sys.exit(execute.main(words))
from sameday.cli import main

{command}
sys.argv = ["sameday", *words]
main()
"""
SHELL = """\
    execute.process = lambda suite, home, folder, name: ["bash", f"{home}/{name}.sh"]
"""
SLOW = """\
if words[0] == "train" and "SLURM_RESTART_COUNT" not in os.environ:
    # At its fourth step it waits to be asked to stop.
    from sameday.hardware.signals import StopRequest
    from sameday.tasks.classify.task import ClassifyTask

    plain, ask, asked = ClassifyTask.loss_sum, StopRequest._ask, []

    def loss_sum(self, batch, step):
        while step == 3 and not asked:
            time.sleep(0.02)
        return plain(self, batch, step)

    ClassifyTask.loss_sum = loss_sum
    StopRequest._ask = lambda self, *more: (asked.append(1), ask(self, *more))
"""
ALONE = ["plan.device=cpu", "plan.save_steps=1000", "plan.save_total_limit=1", "plan.log_steps=1"]
"""The step that a run was stopped at is not kept besides its last and best ones, wherever that was."""
LIGHT = """\
    plain = execute.process

    def process(suite, home, folder, name):
        words = plain(suite, home, folder, name)
        if suite.jobs[name].recipe != "stub.yaml":
            return words
        return [os.environ["REAL"], f"{home}/note.py", *words]

    execute.process = process
"""
NOTE = """\
\"\"\"What stub.py does, without the seconds in which it loads torch.\"\"\"
import json, os, sys, time

began, home = time.time(), os.path.dirname(__file__)
given = dict(each[7:].split("=", 1) for each in sys.argv if each.startswith("recipe."))
time.sleep(float(given["seconds"]))
lacks = "file" in given and not os.path.exists(os.path.join(home, given["file"]))
if lacks:
    print("the file", given["file"], "is not there", file=sys.stderr)
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
record = {"name": given["name"], "began": began, "ended": time.time(), "gpus": gpus, "failed": lacks}
with open(os.path.join(home, "records.jsonl"), "a") as file:
    file.write(json.dumps(record) + "\\n")
sys.exit(7 if lacks else 0)
"""
WAITS = "trap 'touch {marker}; exit 75' TERM; [ -e {marker} ] || while :; do sleep 0.1; done"
"""Saves itself when it is asked to stop, and is done at once when it goes on."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert reason is None, f"SAMEDAY_TEST_SLURM=must, and {reason}"
    with pytest.MonkeyPatch.context() as patch, started() as found:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found


def drive(home: Path, execute: str = "", command: str = "") -> list[str]:
    """What a job script sets up, so that its Python does this besides."""
    (home / "driver.py").write_text(DRIVER.format(execute=execute, command=command))
    (home / "bin").mkdir()
    (home / "bin/python").write_text(f'#!/bin/bash\nexec {sys.executable} {home}/driver.py "$@"\n')
    (home / "bin/python").chmod(0o755)
    return [f"export PATH={home}/bin:$PATH DRIVEN={home}/bin/python REAL={sys.executable}"]


class Stubs:
    """A suite whose jobs are lines of shell."""

    def __init__(self, home: Path, jobs: dict[str, dict[str, Any]], out: str = HOSTILE, **fields: Any) -> None:
        home.mkdir(parents=True)
        (home / "exp.yaml").write_text("{task: classify, model: {kind: vision_bdh}, data: {path: .}}\n")
        listed = {}
        for name, job in jobs.items():
            self.line(home, name, job.pop("line", "true"))
            listed[name] = {"do": "train", "recipe": "exp.yaml", "gpus": 0, **job}
        own = {"setup": drive(home, execute=SHELL), "cpus": 1}
        fields["slurm"] = {**own, **fields.get("slurm", {})}
        self.number = ""
        self.home, self.path, self.out = home, home / "suite.yaml", home / out
        self.path.write_text(json.dumps({**fields, "jobs": listed}))

    @staticmethod
    def line(home: Path, name: str, line: str) -> None:
        (home / f"{name}.sh").write_text(line + "\n")

    @property
    def opened(self) -> OpenSuite:
        return open_suite(self.path, self.out)

    def command(self, verb: str, *words: str) -> list[str]:
        return ["suite", verb, str(self.path), *words, "--out", str(self.out)]

    def sameday(self, verb: str, *words: str, code: int = 0) -> str:
        slurm._last.clear()
        said = CliRunner().invoke(app, self.command(verb, *words), catch_exceptions=False)
        assert said.exit_code == code, said.output
        return said.output

    def state(self, name: str) -> JobState:
        return slurm.states(self.opened, slurm.queue())[name]

    def until(self, condition: Callable[[], bool], seconds: float = LIMIT) -> None:
        until(condition, seconds, lambda: self.told())

    def log(self, name: str) -> str:
        path = self.opened.folder.log(name)
        return path.read_text() if path.exists() else ""

    def told(self) -> str:
        logs = [f"{path}:\n{path.read_text()}" for path in self.out.glob("jobs/*/log.txt")]
        return "\n".join([str(slurm.queue()), self.sameday("status"), *logs])


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Stubs:
    """Under way from the start of all tests: SLURM looks at time limits twice a minute."""
    home = tmp_path_factory.mktemp("limited") / "home"
    line = WAITS.format(marker=home / "saved")
    stubs = Stubs(home, {"long": {"line": line}, "then": {"after": ["long"]}}, slurm={"time": "1m", "warning": "50s"})
    stubs.sameday("run", "--slurm")
    stubs.number = slurm.living(stubs.opened, slurm.queue())["long"].number
    return stubs


def recipe_of_patterns(home: Path) -> None:
    write_patterns(home / "data", train=160, test=32)
    model = {"kind": "vision_bdh", "levels": 2, "heads": 2, "width": 32, "latents": 4, "patch": 8, "dropout": 0.1}
    fields = {"task": "classify", "name": "patterns", "model": model, "precision": "float32", "seed": 0}
    steps = {"effective_batch": 32, "learning_rate": 2e-3, "num_epochs": 2, "data": {"path": "data", "val": 32}}
    (home / "recipe.yaml").write_text(json.dumps({**fields, **steps}))


@pytest.fixture(scope="module")
def preempted(limited: Stubs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OpenSuite]:
    """A training that holds all GPUs of a node, with its data staged; an undisturbed run lies beside."""
    home = tmp_path_factory.mktemp("preempted")
    recipe_of_patterns(home)
    jobs = {
        "fit": {"do": "train", "recipe": "recipe.yaml", "slurm": {"stage": ["data"]}},
        "test": {"do": "eval", "of": "fit", "split": "test", "gpus": 0},
    }
    # One process, and a whole node's GPUs.
    asked = {"partition": "low", "cpus": 1, "gres": "gpu:4", "options": ["--nodelist=n2"]}
    asked["setup"] = drive(home, command=SLOW)
    (home / "suite.yaml").write_text(json.dumps({"set": ALONE, "slurm": asked, "jobs": jobs}))
    opened = open_suite(home / "suite.yaml", home / "out")
    slurm.submit(opened, say=lambda _: None)
    return home, opened


@pytest.fixture(scope="module")
def across(limited: Stubs, tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> tuple[Path, OpenSuite]:
    """A training on both nodes, with one process on each."""
    lora = {"r": 4, "alpha": 8}
    home = write_run(tmp_path_factory.mktemp("across"), tiny_qwen3, num_epochs=1, lora=lora, eps=1e-4)
    sets = ["plan.device=cpu", "plan.save_steps=2", "plan.log_steps=1"]
    jobs = {"two": {"do": "train", "recipe": "recipe.yaml", "gpus": 0, "nodes": 2}}
    (home / "suite.yaml").write_text(json.dumps({"set": sets, "slurm": {"cpus": 1}, "jobs": jobs}))
    opened = open_suite(home / "suite.yaml", home / "out")
    slurm.submit(opened, say=lambda _: None)
    return home, opened


def names_in_queue(stubs: Stubs) -> list[str]:
    return in_queue(stubs.opened)


def in_queue(opened: OpenSuite) -> list[str]:
    own = {job_name(opened.folder, name): name for name in opened.suite.jobs}
    return sorted(own[entry.name] for entry in slurm.queue() if entry.name in own)


class Queue:
    """SLURM as the back end of scenarios, on one node: GPUs of two have the same numbers."""

    def begin(self, suite: Path, out: Path) -> OpenSuite:
        asked = yaml.safe_load(suite.read_text())
        if "slurm" not in asked:
            setup = drive(suite.parent, execute=LIGHT)
            (suite.parent / "note.py").write_text(NOTE)
            asked["slurm"] = {"cpus": 1, "setup": setup, "options": ["--nodelist=n1"]}
            suite.write_text(yaml.safe_dump(asked, sort_keys=False))
        opened = open_suite(suite, out)
        slurm.submit(opened, say=lambda _: None)
        return opened

    def run(self, suite: Path, out: Path) -> int:
        return self.ended(self.begin(suite, out))

    def stop(self, begun: OpenSuite, suite: Path, out: Path) -> int:
        cancel(begun, say=lambda _: None)
        return self.ended(begun)

    @staticmethod
    def ended(opened: OpenSuite) -> int:
        until(lambda: not in_queue(opened), LIMIT, lambda: str(slurm.queue()))
        return exit_code(slurm.states(opened, slurm.queue()))


def test_a_night(cluster: Cluster, preempted: object, across: object, tmp_path: Path) -> None:
    """The login process is killed while jobs wait, and after it has submitted some of them; another submits the rest;
    jobs run in order; one fails, and blocks what needs it and nothing else; mended, it is all that is run again."""
    order = tmp_path / "order"
    jobs: dict[str, dict[str, Any]] = {
        "first": {"line": f"sleep 0.5; echo first >>{order}"},
        "bad": {"line": "echo nothing to say; echo 'boom $(x)' >&2; exit 3"},
        "second": {"line": f"echo second >>{order}", "after": ["first"]},
        "third": {"line": f"echo third >>{order}", "after": ["second", "first"]},
        "bad-test": {"line": f"echo bad-test >>{order}", "after": ["bad"]},
        "much-later": {"after": ["bad-test", "third"]},
    }
    stubs = Stubs(tmp_path / "home", jobs, slurm={"options": ["--begin=now+1hour"]})
    login = subprocess.Popen(
        [sys.executable, "-m", "sameday", *stubs.command("run", "--slurm")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert login.stdout is not None
    assert re.fullmatch(r"first: submitted as job \d+\n", login.stdout.readline())
    os.killpg(login.pid, signal.SIGKILL)
    login.wait()
    login.stdout.close()
    submitted = names_in_queue(stubs)
    assert "first" in submitted and len(submitted) < len(jobs)

    said = stubs.sameday("run", "--slurm")
    assert said.count("in the queue already") == len(submitted)
    assert said.count("submitted as job") == len(jobs) - len(submitted)
    assert re.search(r"third: submitted as job \d+, after second, first\n", said)
    assert names_in_queue(stubs) == sorted(jobs)
    said = stubs.sameday("run", "--slurm")
    assert "submitted" not in said and said.count("in the queue already") == len(jobs)
    assert names_in_queue(stubs) == sorted(jobs)
    told = stubs.sameday("status")
    assert re.search(r"^first +queued", told, re.MULTILINE)
    assert re.search(r"first: in SLURM's queue, job \d+: BeginTime", told)
    assert re.search(r"third: in SLURM's queue, job \d+: Dependency", told)

    for entry in slurm.queue():
        if entry.name in {job_name(stubs.opened.folder, name) for name in jobs}:
            cluster.ask("scontrol", "update", f"JobId={entry.number}", "StartTime=now")
    stubs.until(lambda: not names_in_queue(stubs))
    states = slurm.states(stubs.opened, slurm.queue())
    assert {name: state.state for name, state in states.items()} == {
        **dict.fromkeys(("first", "second", "third"), "done"),
        "bad": "failed",
        **dict.fromkeys(("bad-test", "much-later"), "blocked"),
    }
    assert states["bad"].why == "exit code 3\nnothing to say\nboom $(x)"
    assert order.read_text().split() == ["first", "second", "third"]
    told = stubs.sameday("status")
    assert "bad: failed, exit code 3\n    nothing to say\n    boom $(x)\n" in told
    assert "bad-test: blocked, because bad is failed" in told

    stubs.line(stubs.home, "bad", f"echo bad >>{order}")
    stubs.path.write_text(stubs.path.read_text().replace("--begin=now+1hour", "--nice=1"))
    said = stubs.sameday("run", "--slurm")
    assert said.count("submitted as job") == 3 and "bad: failed, and tried again" in said
    stubs.until(lambda: not names_in_queue(stubs))
    assert {state.state for state in stubs.opened.folder.states(stubs.opened.suite).values()} == {"done"}
    assert order.read_text().split()[3:] == ["bad", "bad-test"]
    assert "submitted" not in stubs.sameday("run", "--slurm")
    assert not list(tmp_path.rglob("pwned")) and not names_in_queue(stubs)


def test_preemption(cluster: Cluster, preempted: tuple[Path, OpenSuite]) -> None:
    """A job of a higher partition takes the node; the training saves itself, goes on when the node is free again, and
    gives the same bytes. What depends on it kept waiting, and staged data left nothing behind."""
    home, opened = preempted
    run = opened.folder.run("fit")

    def told() -> str:
        return f"{slurm.queue()}\n{opened.folder.log('fit').read_text()}"

    until(lambda: last_step(run) >= 2, LIMIT, told)
    number = opened.folder.read("fit").slurm
    asked = ("--partition=high", "--nodelist=n2", "--gres=gpu:4", "--output=/dev/null", "--wrap=sleep 1")
    cluster.ask("sbatch", *asked)
    until(lambda: (run / "stopped.json").exists(), LIMIT, told)
    stopped_at = last_step(run)
    finished(home, *ALONE, out="undisturbed")
    until(lambda: opened.folder.read("test").state == "done", LIMIT, told)
    state = opened.folder.read("fit")
    assert (state.state, state.attempt, state.slurm) == ("done", 2, number), "in place, under its own number"
    log = opened.folder.log("fit").read_text()
    assert f"asked to stop: step {stopped_at} of" in log and f"resumed from step-{stopped_at:06d}" in log
    assert_same_run(run, home / "undisturbed")
    assert not (cluster.folder / "tmp" / f"sameday-{number}").exists()


def test_two_nodes_train_what_one_trains(across: tuple[Path, OpenSuite]) -> None:
    home, opened = across
    finished(home, "plan.save_steps=2", "plan.log_steps=1", "plan.device=cpu", out="alone")
    log = opened.folder.log("two")
    until(lambda: opened.folder.read("two").state in ("done", "failed"), LIMIT, lambda: log.read_text())
    assert opened.folder.read("two").state == "done", log.read_text()
    assert "--nnodes 2 --node-rank 0" in log.read_text()
    assert_agrees(opened.folder.run("two"), home / "alone")


def test_one_allocation(cluster: Cluster, tmp_path: Path) -> None:
    """The local back end within it: two GPUs of the node, one for each job."""
    line = 'echo "$CUDA_VISIBLE_DEVICES" >"${0%.sh}.gpus"; cat "$SAMEDAY_STAGE/list" >"${0%.sh}.staged"; sleep 0.5'
    jobs = {name: {"gpus": 1, "line": line} for name in ("a", "b", "c")} | {"d": {"after": ["a", "b", "c"]}}
    stubs = Stubs(tmp_path / "home", jobs, gpus=2, slurm={"stage": ["exp.yaml", "absent"]})
    assert re.match(r"submitted as job \d+, which runs 4 of 4 jobs\n", stubs.sameday("run", "--one-job"))
    entry = slurm.living(stubs.opened, slurm.queue())[WHOLE]
    assert f"job {entry.number} of SLURM runs the whole suite; nothing is submitted" in stubs.sameday("run", "--slurm")
    folder = stubs.opened.folder
    stubs.until(lambda: {state.state for state in folder.states(stubs.opened.suite).values()} == {"done"})
    seen = {name: (stubs.home / f"{name}.gpus").read_text().strip() for name in "abc"}
    assert {seen["a"], seen["b"]} == {"0", "1"} and seen["c"] in ("0", "1")
    assert (stubs.home / "a.staged").read_text().splitlines() == [str(stubs.home / "exp.yaml")]
    assert folder.read("a").slurm == entry.number
    stubs.until(lambda: entry.number not in cluster.jobs())
    assert "all jobs are done" in stubs.sameday("run", "--one-job")


def test_traps_of_dependencies(cluster: Cluster, tmp_path: Path) -> None:
    jobs = {"good": {}, "bad": {"line": "exit 4"}, "after-bad": {"after": ["bad"]}, "after-good": {"after": ["good"]}}
    stubs = Stubs(tmp_path / "home", jobs)
    opened = stubs.opened
    stubs.sameday("run", "--slurm")
    stubs.until(lambda: not names_in_queue(stubs))
    assert stubs.state("after-bad").state == "blocked"

    # A job that waits for what can never be, which --kill-on-invalid-dep may leave in the queue.
    failed = opened.folder.read("bad").slurm
    name = job_name(opened.folder, "after-bad")
    words = ("--job-name=" + name, f"--dependency=afterok:{failed}", "--output=/dev/null", "--wrap=true")
    number = cluster.ask("sbatch", "--parsable", *words, "--kill-on-invalid-dep=no").strip()
    stubs.until(lambda: any(entry.reason == slurm.NEVER for entry in slurm.queue()))
    assert "after-bad: blocked, because bad is failed" in stubs.sameday("status")
    assert number not in cluster.jobs()

    # A job whose need failed before it was submitted, and which SLURM starts all the same, looks by itself.
    slurm._sbatch(opened, "after-bad", ())
    stubs.until(lambda: "after-bad waits: bad is failed" in stubs.log("after-bad"))

    # A number that SLURM does not know any more is not waited for.
    opened.folder.change("after-good", state="queued")
    number = slurm._sbatch_after(opened, "after-good", {"good": "4000000"})
    stubs.until(lambda: number not in cluster.jobs())
    assert stubs.state("after-good").state == "done"


def test_cancel_and_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """A job that runs saves itself and is not requeued; what waits leaves the queue; `suite run` takes both up."""
    home = tmp_path / "home"
    jobs = {"long": {"line": WAITS.format(marker=home / "saved")}, "then": {"after": ["long"]}}
    stubs = Stubs(home, jobs)
    stubs.sameday("run", "--slurm")
    stubs.until(lambda: stubs.state("long").state == "running")
    said = stubs.sameday("cancel")
    assert re.search(r"long: asked to stop, job \d+ of SLURM\n", said)
    assert re.search(r"then: cancelled, job \d+ of SLURM\n", said)
    stubs.until(lambda: not names_in_queue(stubs))
    assert (stubs.state("long").state, stubs.state("then").state) == ("stopped", "cancelled")
    assert "asked to stop; it goes on from there" in stubs.state("long").why

    # Killed without a word, as by the out-of-memory killer: not in the queue any more, so interrupted.
    (home / "saved").unlink()
    assert stubs.sameday("run", "--slurm").count("submitted as job") == 2
    stubs.until(lambda: stubs.state("long").state == "running")
    number = stubs.opened.folder.read("long").slurm
    for pid in holders(stubs.opened.folder.lock("long")):
        with contextlib.suppress(ProcessLookupError):  # it may end with the one that was killed before it
            os.kill(pid, signal.SIGKILL)
    stubs.until(lambda: not names_in_queue(stubs))
    state = stubs.state("long")
    assert (state.state, state.why) == ("interrupted", f"SLURM has no job {number} any more")
    assert stubs.sameday("run", "--slurm").count("submitted as job") == 2
    stubs.until(lambda: stubs.state("long").state == "running")
    refused = CliRunner().invoke(app, stubs.command("run"))
    assert re.match(r"in SLURM's queue: long \(\d+\), then \(\d+\); ", str(refused.exception))

    # At once after it: what is on its way out of the queue is not taken for what is in it.
    stubs.sameday("cancel")
    assert stubs.sameday("run", "--slurm").count("submitted as job") == 2
    stubs.until(lambda: not names_in_queue(stubs))
    assert {stubs.state(name).state for name in jobs} == {"done"}
    assert stubs.sameday("run", "--slurm").startswith("all jobs are done\n")


def test_what_fails_before_it_begins(cluster: Cluster, tmp_path: Path) -> None:
    jobs: dict[str, dict[str, Any]] = {"a": {}, "b": {"after": ["a"]}}
    stubs = Stubs(tmp_path / "home", jobs, out="back\\slash %j", slurm={"modules": ["no-such-module"]})
    stubs.sameday("run", "--slurm")
    stubs.until(lambda: not names_in_queue(stubs))
    told = stubs.sameday("status")
    assert "a: failed, it left SLURM's queue before it began\n" in told and "command not found" in told
    assert "b: blocked, because a is failed" in told
    refused = Stubs(tmp_path / "other", {"a": {}}, slurm={"partition": "nowhere"})
    with pytest.raises(slurm.NoAnswer, match=r"sbatch: .*[Ii]nvalid partition"):
        slurm.submit(refused.opened, say=lambda _: None)
    assert refused.state("a").state == "waiting"


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.dependencies,
        scenarios.failure_and_mending,
        scenarios.one_gpu_one_job,
        # test_preemption shows the same with one training less.
        pytest.param(scenarios.stopped_and_continued, marks=pytest.mark.soak),
    ],
    ids=lambda each: each.__name__,
)
def test_scenarios(cluster: Cluster, scenario: Callable[[scenarios.Home, BackEnd], None], home: scenarios.Home) -> None:
    scenario(home, Queue())


def test_a_time_limit(limited: Stubs) -> None:
    """Asked to save itself before the limit, requeued under its number; what depends on it waited all the while."""
    limited.until(lambda: not names_in_queue(limited))
    state = limited.state("long")
    assert (state.state, state.attempt, state.slurm) == ("done", 2, limited.number)
    then = limited.state("then")
    assert then.state == "done" and then.started is not None and then.started >= (state.ended or 0)
