"""What the scheduler is given, as text, and what its answers mean. tests/suite/test_cluster.py has a real one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from sameday.cli import app
from sameday.models.load import load_base
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.staged import staged
from sameday.spec.suite import Slurm, Suite
from sameday.suite.jobs import OpenSuite, open_suite, process
from sameday.suite.running import slurm
from sameday.suite.running.cancel import cancel
from sameday.suite.running.script import WHOLE, job_name, options, script
from sameday.suite.running.slurm import Entry, parse, states
from sameday.suite.state import SuiteFolder

HOSTILE = "o'u\"t $(touch pwned) `touch pwned` ;&|<>*\\ #é %j"


def open_with(home: Path, slurm: dict[str, Any] | None = None, out: str = "out", **fields: Any) -> OpenSuite:
    jobs = {
        "fit": {"do": "train", "recipe": "exp.yaml"},
        "two": {"do": "train", "recipe": "exp.yaml", "gpus": 2, "nodes": 3},
        "cpu": {"do": "train", "recipe": "exp.yaml", "gpus": 0},
        "test": {"do": "eval", "of": "fit", "slurm": {"time": "30m"}},
    }
    suite = Suite.model_validate({"jobs": jobs, "slurm": slurm or {}, **fields})
    return OpenSuite(suite, home, SuiteFolder(home / out), home / "night.yaml")


ALL = {
    "partition": "gpu",
    "qos": "long",
    "account": "lab",
    "constraint": "a100|h100",
    "time": "1d2h",
    "memory": "60g",
    "cpus": 8,
    "options": ["--nice=10"],
}


def test_every_wish_is_an_option(tmp_path: Path) -> None:
    opened = open_with(tmp_path, ALL)
    log = str(opened.folder.log("two"))
    assert options(opened.suite, opened.folder, "two", ("12", "13")) == [
        "--parsable",
        f"--job-name={job_name(opened.folder, 'two')}",
        f"--output={log}",
        "--open-mode=append",
        "--requeue",
        "--dependency=afterok:12:13",
        "--kill-on-invalid-dep=yes",
        "--signal=TERM@120",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--qos=long",
        "--account=lab",
        "--gres=gpu:2",
        "--constraint=a100|h100",
        "--time=1-02:00:00",
        "--mem=120G",
        "--cpus-per-task=16",
        "--nice=10",
    ]


def test_what_is_not_asked_for_is_left_to_the_cluster(tmp_path: Path) -> None:
    opened = open_with(tmp_path)
    words = options(opened.suite, opened.folder, "cpu")
    assert {word.split("=")[0] for word in words} == {
        *("--parsable", "--job-name", "--output", "--open-mode", "--requeue", "--kill-on-invalid-dep", "--signal"),
        *("--nodes", "--ntasks-per-node"),
    }
    assert not any(word.startswith("--deadline") for word in words), "it cancels on an estimated start"


def test_gres_time_and_warning(tmp_path: Path) -> None:
    opened = open_with(tmp_path, {"gres": "gpu:a100:{gpus}", "warning": "10m", "time": "61s"})
    assert {"--gres=gpu:a100:2", "--time=0-00:02:00", "--signal=TERM@31"} <= {
        *options(opened.suite, opened.folder, "two")
    }
    assert {"--time=0-00:30:00", "--signal=TERM@600"} <= {*options(opened.suite, opened.folder, "test")}


def test_one_allocation_has_the_whole_suite(tmp_path: Path) -> None:
    opened = open_with(tmp_path, {"cpus": 8, "memory": "60G", "time": "6h"}, gpus=4)
    words = options(opened.suite, opened.folder, WHOLE)
    assert {"--gres=gpu:4", "--cpus-per-task=32", "--mem=240G", "--time=0-06:00:00", "--nodes=1"} <= {*words}
    assert f"-m sameday suite run {tmp_path}/night.yaml --out {tmp_path}/out\n" in script(opened, WHOLE)


def test_a_job_has_one_name_and_another_folder_another(tmp_path: Path) -> None:
    one, other = open_with(tmp_path), open_with(tmp_path, out="other")
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    same = open_with(tmp_path, out="link")
    assert job_name(one.folder, "fit") == job_name(same.folder, "fit") != job_name(other.folder, "fit")
    assert job_name(one.folder, "fit") != job_name(one.folder, "test")


def run_script(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With programs of SLURM that only say how they were called."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    said = '#!/bin/bash\nprintf "%s" "${0##*/}" >>"$SAID"; printf " <%s>" "$@" >>"$SAID"; echo >>"$SAID"\n'
    for name, more in {
        "srun": 'env >"$SAID.env"; [[ "$*" != *" -m "* ]] || exit "${CODE:-0}"',
        "scontrol": "",
        "squeue": 'echo "${STATE:-RUNNING}"',
    }.items():
        (programs / name).write_text(said + more + "\n")
        (programs / name).chmod(0o755)
    path = folder / "job.sh"
    path.write_text(text)
    given = {"PATH": f"{programs}:{os.environ['PATH']}", "SAID": str(folder / "said"), "SLURM_JOB_ID": "12"}
    return subprocess.run(
        ["bash", str(path)],
        cwd=folder,
        env={"HOME": str(folder), "TMPDIR": str(folder / "local"), **given, **environment},
        capture_output=True,
        text=True,
    )


def calls(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


def test_the_script_survives_hostile_names(tmp_path: Path) -> None:
    home = tmp_path / HOSTILE
    home.mkdir()
    wishes = {
        "environment": {"WORDS": HOSTILE},
        "stage": [HOSTILE, "absent"],
        "setup": [f"PATH={shlex.quote(str(tmp_path))}:$PATH"],
    }
    opened = open_with(home, wishes, out=HOSTILE)
    (home / HOSTILE).mkdir()
    (home / HOSTILE / "weights").write_text("w" * 10)
    done = run_script(script(opened, "fit"), tmp_path)
    assert done.returncode == 0, done.stderr
    step = "<--nodes=1> <--ntasks=1> <--ntasks-per-node=1> <--wait=60> <python> <-m>"
    assert calls(tmp_path) == [
        f"srun {step} <sameday.suite.running.execute> <{home}/night.yaml> <{home}/{HOSTILE}> <fit>"
    ]
    assert f"{home}/absent is not on the disk of every node, and is read from where it is" in done.stderr
    assert not list(tmp_path.rglob("pwned"))
    environment = (tmp_path / "said.env").read_text().splitlines()
    assert f"WORDS={HOSTILE}" in environment
    assert not list((tmp_path / "local").iterdir()), "what was staged goes with the job"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_every_value_is_one_word(value: str) -> None:
    opened = open_with(Path("/home"), {"environment": {"A": value}, "modules": [value]})
    text = script(opened, "fit")
    words = shlex.split(text, comments=True)
    assert f"A={value}" in words and words[words.index("load") + 1] == value


def test_caches_are_the_jobs_own_and_downloads_stay(tmp_path: Path) -> None:
    opened = open_with(tmp_path, {"environment": {"TRITON_CACHE_DIR": "/mine"}})
    run_script(script(opened, "fit"), tmp_path, XDG_CACHE_HOME="/big/cache", HF_HOME="/hub")
    found = dict(line.split("=", 1) for line in (tmp_path / "said.env").read_text().splitlines() if "=" in line)
    own = f"{tmp_path}/local/sameday-12"
    assert found["TORCHINDUCTOR_CACHE_DIR"] == f"{own}/inductor"
    assert found["XDG_CACHE_HOME"] == f"{own}/cache"
    assert found["TRITON_CACHE_DIR"] == "/mine", "what the suite says goes last"
    assert (found["HF_HOME"], found["SAMEDAY_CACHE_HOME"]) == ("/hub", "/big/cache/sameday")


@pytest.mark.parametrize(
    ("code", "state", "restarts", "told", "again"),
    [
        ("75", "RUNNING", "0", "stopped", True),
        ("75", "RUNNING", "200", "stopped", False),  # it gets nowhere
        ("75", "COMPLETING", "0", "stopped", False),  # by scancel
        ("75", "RUNNING", "0", "cancelled", False),  # by `suite cancel`, where there is no scancel
        ("143", "RUNNING", "0", "queued", True),  # asked to stop before it could listen
        ("0", "RUNNING", "0", "done", False),
        ("3", "RUNNING", "0", "failed", False),
    ],
)
@pytest.mark.parametrize("name", ["fit", WHOLE])
def test_only_what_was_saved_is_requeued(
    tmp_path: Path, name: str, code: str, state: str, restarts: str, told: Any, again: bool
) -> None:
    opened = open_with(tmp_path, out=HOSTILE)
    opened.folder.change("fit", state=told)
    done = run_script(script(opened, name), tmp_path, CODE=code, STATE=state, SLURM_RESTART_COUNT=restarts)
    assert done.returncode == int(code)
    assert ("scontrol <requeue> <12>" in calls(tmp_path)) == again


def test_modules_need_a_login_shell_and_must_load(tmp_path: Path) -> None:
    opened = open_with(tmp_path, {"modules": ["cuda/12.4"], "setup": ["source env/bin/activate"], "cpus": 4})
    text = script(opened, "fit")
    assert text.startswith("#!/bin/bash -l\n")
    assert text.index("module load cuda/12.4 || exit 1") < text.index("\nsource env/bin/activate\n") < text.index("-m")
    assert "--cpus-per-task=4 --wait=60 python -m" in text
    assert f"--wait=60 {sys.executable} -m" in script(open_with(tmp_path), "fit")
    assert run_script(text, tmp_path).returncode == 1, "there is no `module` here"


def test_several_nodes_meet_on_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_with(tmp_path, {"stage": ["/models/m"]})
    text = script(opened, "two")
    run_script(text, tmp_path)
    first, *_, last, cleared = calls(tmp_path)
    assert first.startswith("srun <--ntasks=3> <--ntasks-per-node=1> <mkdir>")
    assert "srun <--nodes=3> <--ntasks=3> <--ntasks-per-node=1>" in last
    assert cleared.startswith("srun <--ntasks=3> <--ntasks-per-node=1> <rm>")
    opened.folder.change("two", state="stopped")
    run_script(text, tmp_path, CODE="75")
    assert [line.split(" <")[0] for line in calls(tmp_path)[-4:]] == ["squeue", "srun", "scontrol", "srun"]
    assert calls(tmp_path)[-3].startswith("srun <--ntasks=3> <--ntasks-per-node=1> <rm>"), "while the nodes are its own"
    place = next(line for line in (tmp_path / "said.env").read_text().splitlines() if "SAMEDAY_RENDEZVOUS=" in line)
    monkeypatch.setenv(*place.split("=", 1))
    monkeypatch.setenv("SLURM_NODEID", "2")
    host, port = place.split("=")[1].split(":")
    words = process(opened.suite, tmp_path, opened.folder, "two")[3:]
    assert words[:10] == [
        *("--nnodes", "3", "--node-rank", "2", "--master-addr", host, "--master-port", port),
        *("--nproc-per-node", "2"),
    ]
    assert "torch.distributed.run" not in process(opened.suite, tmp_path, opened.folder, "fit")


def test_a_copy_is_read_where_there_is_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stage = tmp_path / "models/m", tmp_path / "stage"
    assert staged(model) == str(model)
    monkeypatch.setenv("SAMEDAY_STAGE", str(stage))
    assert staged(model) == str(model), "nothing is there yet"
    stage.mkdir()
    (stage / "list").write_text(f"{model}\n")
    assert staged(model) == f"{stage}{model}"
    assert staged(model / "a/b") == f"{stage}{model}/a/b"
    assert staged(tmp_path / "models") == f"{tmp_path}/models"
    assert staged(f"{model}-2") == f"{model}-2"
    assert staged("Qwen/Qwen3-VL-8B") == "Qwen/Qwen3-VL-8B"


def test_a_staged_model_keeps_its_name(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come from the copy; an adapter would name the original as its base."""
    model, stage = tmp_path / "model", tmp_path / "stage"
    shutil.copytree(tiny_qwen3, model)
    shutil.copytree(model, f"{stage}{model}")
    (model / "model.safetensors").unlink()
    (stage / "list").write_text(f"{model}\n")
    monkeypatch.setenv("SAMEDAY_STAGE", str(stage))
    base = load_base(str(model), worlds.tiny_recipe(model), torch.device("cpu"))
    assert base.name_or_path == base.config._name_or_path == str(model)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"memory": "much"}, "memory is 'much'; must be a number and K, M, G or T, such as 60G"),
        ({"environment": {"A B": "c"}}, "environment has 'A B', which no shell takes for a variable"),
        ({"stage": ["a\nb"]}, "stage has 'a\\nb', which is no path"),
        ({"options": ["--job-name=x"]}, "the suite itself gives --job-name"),
        ({"options": ["-d", "--nice"]}, "options has '-d'"),
        ({"options": ["nice"]}, "options has 'nice'; must be one option of sbatch"),
    ],
)
def test_wishes_that_cannot_be_granted(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        Slurm.model_validate(wishes)
    assert said in str(error.value)


# What squeue's answers mean


def test_the_queue_is_read_whatever_others_are_called() -> None:
    text = "12|PENDING|fit-0a|Dependency\n13_[1-4]|PENDING|array|None\n14|RUNNING|a|b|None\nrubbish\n"
    assert parse(text) == [Entry("12", "PENDING", "fit-0a", "Dependency"), Entry("14", "RUNNING", "a", "b|None")]


def test_states_from_files_and_the_queue(tmp_path: Path) -> None:
    opened = open_with(tmp_path)
    folder = opened.folder

    def entry(name: str, state: str, reason: str = "None", number: str = "7") -> Entry:
        return Entry(number, state, job_name(folder, name), reason)

    def told(*entries: Entry) -> dict[str, tuple[str, str]]:
        return {name: (state.state, state.why) for name, state in states(opened, entries).items()}

    assert {state for state, _ in told().values()} == {"waiting"}
    for name in ("fit", "test"):
        folder.change(name, state="queued")
    waiting = told(entry("fit", "PENDING", "Resources"), entry("test", "PENDING", "Dependency", "8"))
    assert (waiting["fit"], waiting["test"]) == (("queued", "Resources"), ("queued", "Dependency"))
    assert told(entry("fit", "RUNNING"))["fit"] == ("queued", "it starts or is saving")

    folder.log("fit").write_text("no such module\n")
    gone = told()
    assert gone["fit"] == ("failed", "it left SLURM's queue before it began\nno such module")
    assert gone["test"] == ("blocked", "fit is failed")

    folder.change("fit", state="running", slurm="7", host="n1")
    assert told(entry("fit", "RUNNING"))["fit"] == ("running", "")
    assert told(entry("fit", "PENDING", "BeginTime"))["fit"] == ("queued", "BeginTime")  # preempted without a word
    assert told()["fit"] == ("interrupted", "SLURM has no job 7 any more")
    # It saved itself, and whoever ran it was killed before writing that down.
    opened.folder.run("fit").mkdir(parents=True, exist_ok=True)
    (opened.folder.run("fit") / "stopped.json").write_text('{"code": 75}')
    assert told()["fit"] == ("stopped", "asked to stop; it goes on from there")
    (opened.folder.run("fit") / "stopped.json").unlink()
    assert told()["test"][0] == "waiting"

    folder.change("fit", state="stopped", why="asked to stop")
    assert told(entry("fit", "COMPLETING"))["fit"][0] == "queued"
    assert told()["fit"] == ("stopped", "asked to stop")
    folder.change("fit", state="failed", why="no")
    assert told(entry("fit", "COMPLETING"))["fit"] == ("failed", "no")

    # One allocation for all: by its number, and while it waits.
    folder.change("fit", state="running", slurm="9", why="")
    folder.change("test", state="waiting")
    assert told(entry(WHOLE, "RUNNING", number="9"))["fit"] == ("running", "")
    whole = told(entry(WHOLE, "PENDING", "Priority", "9"))
    assert (whole["fit"], whole["cpu"]) == (("queued", "Priority"), ("queued", "the whole suite: Priority"))


def test_without_slurm_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(slurm.NoAnswer, match="sbatch is not here: suites are submitted where SLURM's commands are"):
        slurm.submit(open_with(tmp_path))
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_a_script_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    (tmp_path / "night.yaml").write_text(
        "slurm: {partition: gpu}\njobs:\n  fit: {do: train, recipe: exp.yaml}\n  test: {do: eval, of: fit}\n"
    )
    out = tmp_path / "o u t"
    said = CliRunner().invoke(app, ["suite", "run", str(tmp_path / "night.yaml"), "--out", str(out), "--dry-run"])
    assert said.exit_code == 0, said.output
    assert not out.exists()
    assert '"--dependency=afterok:$job_1"' in said.stdout and said.stdout.count("--partition=gpu") == 2
    assert subprocess.run(["bash", "-n"], input=said.stdout, text=True).returncode == 0

    # Submitted by hand, it asks for the same.
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text('#!/bin/bash\ncat >/dev/null; printf "<%s>" "$@" >&2; echo >&2; echo 41\n')
    (programs / "sbatch").chmod(0o755)
    done = subprocess.run(
        ["bash"],
        input=said.stdout,
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    opened = open_suite(tmp_path / "night.yaml", out)
    expected = [options(opened.suite, opened.folder, "fit"), options(opened.suite, opened.folder, "test", ("41",))]
    assert done.stderr.splitlines() == ["".join(f"<{word}>" for word in words) for words in expected]


def test_without_squeue_nothing_is_done_to_jobs_that_slurm_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_with(tmp_path)
    folder = opened.folder
    monkeypatch.delenv(slurm.OWN, raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    folder.change("fit", state="running", slurm="5")
    folder.change("test", state="queued")
    slurm.refuse_queued(opened)  # nothing was ever submitted from here
    slurm.script_path(opened, "fit").touch()
    said = "fit, test: given to SLURM, and squeue is not here to ask about it; go where it is"
    with pytest.raises(BadInput, match=said):
        slurm.refuse_queued(opened)
    with pytest.raises(BadInput, match=said):
        cancel(opened)
    assert [folder.read(name).state for name in ("fit", "test")] == ["running", "queued"]
    cancel(opened, ["cpu"], say=lambda _: None)
    assert folder.read("cpu").state == "cancelled", "which SLURM never had"
    monkeypatch.setenv(slurm.OWN, "7")
    slurm.refuse_queued(opened)  # one allocation in which all of them run
