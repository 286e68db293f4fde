"""`sameday tune` around its trials: what it refuses, what it writes where, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sets

from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan
from sameday.spec.plan import Plan
from sameday.tune import command
from sameday.tune.command import Trials, tune
from sameday.tune.trial import Result


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = sets.write_set(tmp_path_factory.mktemp("set"), train=80)
    (home / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    return home


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Trials are not run: a plan costs what its fields say that are other than the plain plan's."""
    known: dict[str, float] = {}

    def run(self: Trials, place: Path, plan: Plan) -> Result:
        seconds = 0.1
        for name, factor in known.items():
            seconds *= factor if getattr(plan, name) != getattr(Plan(), name) else 1.0
        return Result({step: seconds * (1 + step % 3) for step in range(4, 12)})

    monkeypatch.setattr(command.Trials, "_run", run)
    return known


@pytest.mark.parametrize(
    ("words", "why"),
    [
        *(({"minutes": n}, rf"--minutes {n:g}: must be more than 0 and at most 10080") for n in (0, -1.0, 1e5)),
        ({"minutes": float("nan")}, "--minutes nan: must be more than 0"),
        ({"minutes": float("inf")}, "--minutes inf: must be more than 0"),
        ({"out": Path("/nowhere/plan.yaml")}, "--out /nowhere"),
        ({"out": Path("/proc/plan.yaml")}, "--out /proc/plan.yaml: cannot be written: "),
        ({"json_path": Path("n" * 256)}, "--json n*: cannot be written: File name too long"),
    ],
)
def test_bad_wishes_are_refused_at_once(home: Path, tmp_path: Path, words: dict[str, object], why: str) -> None:
    asked = {"minutes": 1.0, "out": tmp_path / "plan.yaml", "json_path": None} | words
    with pytest.raises(BadInput, match=why):
        tune(home / "recipe.yaml", sets=[], say=print, **asked)  # type: ignore[arg-type]


def test_the_recipe_is_not_written_over(home: Path, tmp_path: Path) -> None:
    recipe = home / "recipe.yaml"
    (tmp_path / "link.yaml").symlink_to(recipe)
    for out, table, why in (
        (recipe, None, r"--out .*recipe.yaml: is one of the files that are read"),
        (tmp_path / "link.yaml", None, r"--out .*link.yaml: is one of the files that are read"),
        (
            tmp_path / "plan.yaml",
            home / ".." / home.name / "recipe.yaml",
            r"--json .*: is one of the files that are read",
        ),
        (tmp_path / "x", tmp_path / "." / "x", r"--json .*x: is the file of --out too"),
    ):
        with pytest.raises(BadInput, match=why):
            tune(recipe, out, [], 1.0, table, print)


@pytest.mark.usefixtures("costs")
def test_where_nothing_is_faster_the_plain_plan_is_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unverified: it would be compared with itself. What is there is replaced, and that is said first."""
    monkeypatch.setattr(command, "_passed_on", lambda *_: pytest.fail("verified"))
    (tmp_path / "plan.yaml").write_text("old")
    said: list[str] = []
    assert tune(home / "recipe.yaml", tmp_path / "plan.yaml", [], 1.0, tmp_path / "tune.json", said.append) == 0
    assert said[0] == f"{tmp_path / 'plan.yaml'} is there already and will be replaced"
    assert said[-2:] == [
        "verify is not needed: it is the plain plan itself",
        f"{tmp_path / 'plan.yaml'} is written; verdict: bitwise",
    ]
    assert load_plan(tmp_path / "plan.yaml") == Plan()
    assert json.loads((tmp_path / "tune.json").read_text())["best"]["verdict"] == "bitwise"
    printed = capsys.readouterr().out
    assert printed.startswith("nothing that was tried is faster than the plain plan for sure\n")
    assert "left out" not in printed


def test_a_device_that_is_named_stays(home: Path, tmp_path: Path, costs: dict[str, float]) -> None:
    costs["optimizer_impl"] = 0.5
    said: list[str] = []
    words = ["plan.device=cpu", "plan.workers=0"]
    assert tune(home / "recipe.yaml", tmp_path / "plan.yaml", words, 1.0, None, said.append, check=False) == 0
    plan = load_plan(tmp_path / "plan.yaml")
    assert (plan.device, plan.workers, plan.optimizer_impl) == ("cpu", 0, "foreach")
    trials = [line for line in said if " min " in line]
    assert trials[0].endswith("  plain") and max(len(line) for text in trials for line in text.splitlines()) <= 100


def test_verify_is_heard_while_it_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]
) -> None:
    costs["optimizer_impl"] = 0.5
    heard, verify, python = tmp_path / "heard", tmp_path / "verify", sys.executable
    verify.write_text(
        f"#!{python}\n"
        "import json, pathlib, sys, time\n"
        "print('plan: gradients', file=sys.stderr, flush=True)\n"
        "ends = time.monotonic() + 30\n"
        f"while not pathlib.Path({str(heard)!r}).exists() and time.monotonic() < ends:\n"
        "    time.sleep(0.01)\n"
        f"verdict = 'rounding' if pathlib.Path({str(heard)!r}).exists() else 'different'\n"
        "pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text(json.dumps({'verdict': verdict}))\n"
    )
    verify.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(verify))

    def say(text: str) -> None:
        if text == "  plan: gradients":
            heard.touch()

    assert tune(home / "recipe.yaml", tmp_path / "plan.yaml", [], 1.0, None, say) == 0
    verify.write_text(f"#!{python}\nraise SystemExit(2)\n")
    said: list[str] = []
    assert tune(home / "recipe.yaml", tmp_path / "other.yaml", [], 1.0, None, said.append) == 1
    assert said[-1] == "the plan is not written: verify says nothing: it ended with exit code 2"
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.usefixtures("costs")
def test_a_disk_that_is_full_in_the_end(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_text", full)
    with pytest.raises(BadInput, match=r"--out .*plan.yaml: cannot be written: No space left"):
        tune(home / "recipe.yaml", tmp_path / "plan.yaml", [], 1.0, None, print)


@pytest.mark.usefixtures("costs")
def test_a_pipe_stays_one(home: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", str(tmp_path / "pipe")], stdout=subprocess.PIPE, text=True)
    try:
        assert tune(home / "recipe.yaml", tmp_path / "pipe", [], 1.0, None, print, check=False) == 0
        assert "share_images" in reader.communicate(timeout=30)[0]
    finally:
        reader.kill()
    assert (tmp_path / "pipe").is_fifo()


def test_a_stop_leaves_nothing_behind(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    words = ["tune", str(home / "recipe.yaml"), "--minutes", "5", "-o", str(tmp_path / "plan.yaml")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sameday", *words],
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,
        )
    try:
        ends = time.monotonic() + 120
        while not list(folder.glob("sameday-tune-*/001/log")) and time.monotonic() < ends:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        assert not list(folder.glob("sameday-tune-*")) and not (tmp_path / "plan.yaml").exists()
        while _alive(process.pid) and time.monotonic() < ends:
            time.sleep(0.02)
        assert not _alive(process.pid)
    finally:
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
