"""`sameday verify` as a user types it: real processes, a real kill, the verdict on standard output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import sets
import torch
import worlds
from arms import Stage, run

from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_DISK_FULL, DiskTooSmall
from sameday.spec.load import load_recipe
from sameday.spec.plan import Plan
from sameday.train import commit
from sameday.verify.arm import _check_disk
from sameday.verify.compare import compare
from sameday.verify.limits import LIMITS
from sameday.verify.processes import Arms, _failed
from sameday.verify.trace import Trace

CPU: dict[str, Any] = {"device": "cpu"}
"""Recipes here are in float32, which the GPU's split attention has not."""
SHARED = Plan(share_images=True, packing=True, max_questions=None, attention="split", label_only_logits=True, **CPU)
PADDED = Plan(max_questions=3, pad_to_multiple=8, checkpointing="full", optimizer_impl="foreach", **CPU)
PIECES = Plan(micro_batch=3, images_on="device", optimizer_impl="foreach", **CPU)
BUG = """
import sys
if "sameday.verify.arm" in sys.orig_argv:
    from sameday.models.families import qwen_images
    whole = qwen_images.mrope_positions
    def faulty(encoded, merge):
        positions = whole(encoded, merge)
        positions[:, encoded.prefix:] += WHEN
        return positions
    qwen_images.mrope_positions = faulty
"""
"""Loaded by Python itself at its start: the installed package has a bug, and nobody told the verifier."""


OTHER_MASKS = """
import sys
if "sameday.verify.arm" in sys.orig_argv and "/plan/" in sys.orig_argv[-2]:
    from sameday.kernels.dropout import DropoutKeys
    draw = DropoutKeys.set
    DropoutKeys.set = lambda self, keys, seed, step: draw(self, keys, seed + 1, step)
"""


def before(folder: Path) -> str:
    """Where Python looks, this folder first."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    worlds.write_world(folder, 3, (5, 3, 2), hard=False, sizes=((48, 32), (32, 64)))
    model = worlds.write_tiny(folder / "model", text={"num_hidden_layers": 2})
    lora = {"r": 4, "alpha": 8, "dropout": 0.1}
    for precision in ("float32", "bf16"):
        made = worlds.tiny_recipe(model, order="by_image", effective_batch=4, lora=lora, precision=precision)
        (folder / f"{precision}.yaml").write_text(dump_yaml(made))
    sets.write_set(folder)
    (folder / "images.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    for name, plan in (("shared", SHARED), ("vqa", PADDED), ("classify", PIECES)):
        (folder / f"{name}.yaml").write_text(dump_yaml(plan))
    return folder


def verify(folder: Path, *words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sameday", "verify", *words]
    there = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=there, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and all(len(line) <= 100 for line in lines), done.stdout
    return done


def test_a_plan_that_shares_images(world: Path) -> None:
    done = verify(world, "float32.yaml", "--plan", "shared.yaml", "--steps", "4", "--json", "shared.json")
    for words in (
        "statistical: the same mathematics with dropout off",
        "plan        shared.yaml",
        "against     plain: one question at a time",
        "share_images false -> true (statistical)",
        "precision float32",
        "steps 4 of 4, 2, 4, 2 questions, over an epoch's end and a partial batch",
        "killed in step 4, resumed from step 2",
        "dropout 0.1, off, since its masks are another draw in one of the plans",
        f"limit {LIMITS.gradient:.0e}",
        "structure   equal",
    ):
        assert words in " ".join(done.stdout.split()) or words in done.stdout, (words, done.stdout)
    found = json.loads((world / "shared.json").read_text())
    assert found["verdict"] == "statistical" and not found["differences"]
    assert 0 < found["largest"]["gradient"] < LIMITS.gradient
    assert "against: resumed to the end" in done.stderr


@pytest.mark.soak
def test_bf16_is_judged_against_float32(world: Path) -> None:
    done = verify(world, "bf16.yaml", "--plan", "shared.yaml", "--steps", "4", "--set", "recipe.lora.dropout=0.0")
    assert done.stdout.startswith("rounding: the same mathematics, in another order of rounding")
    for words in ("against a float32 reference", "R ", f"{LIMITS.ratio_all:.2f}", "slope", "v_proj.lora_A", "limits:"):
        assert words in done.stdout, (words, done.stdout)


@pytest.mark.parametrize("task", ["vqa", "classify"])
def test_dropout_stays_on_where_all_plans_draw_the_same_masks(world: Path, task: str) -> None:
    recipe = {"vqa": "float32.yaml", "classify": "images.yaml"}[task]
    done = verify(world, recipe, "--plan", f"{task}.yaml", "--steps", "4", "--json", "on.json")
    assert done.stdout.startswith("rounding: ") and "dropout     0.1, on, with the same masks" in done.stdout
    found = json.loads((world / "on.json").read_text())
    assert found["dropout"] == "on" and not found["differences"]


@pytest.mark.soak
def test_other_masks_are_found_where_dropout_is_on(world: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_MASKS)
    done = verify(world, "float32.yaml", "--plan", "vqa.yaml", "--steps", "4", code=1, PYTHONPATH=before(tmp_path))
    assert done.stdout.startswith("different: NOT the same model")
    assert "first       step 1, gradient:" in done.stdout and "structure   equal" in done.stdout


def test_other_masks_are_not_looked_at_where_a_plan_draws_its_own(tmp_path: Path, world: Path) -> None:
    """One mask serves the prefix of all questions of an image: what is compared is the mathematics without dropout."""
    recipe = load_recipe(world / "float32.yaml")
    stage = Stage(tmp_path, world, recipe, steps=4)

    def other_seed(task: Any, _ranks: Any) -> AbstractContextManager[Any]:
        draw = task.model.keys.set
        return patch.object(task.model.keys, "set", lambda tokens, seed, step: draw(tokens, seed + 1, step))

    assert stage.compare(SHARED, other_seed).same
    assert not stage.job("plan", SHARED).dropout and stage.job("plan", PADDED).dropout
    assert not stage.compare(PADDED, other_seed).same and stage.compare(PADDED).same


def test_a_bug_in_the_installed_package_is_found(world: Path, tmp_path: Path) -> None:
    """Only rows with a shared prefix are affected: what the plain plan lays out stays right."""
    (tmp_path / "sitecustomize.py").write_text(
        BUG.replace("WHEN", "2 * (len(sys.argv) > 1 and '/plan/' in sys.argv[1])")
    )
    done = verify(world, "float32.yaml", "--plan", "shared.yaml", "--steps", "4", code=1, PYTHONPATH=before(tmp_path))
    assert done.stdout.startswith("different: NOT the same model")
    assert "first       step 1, positions: sample" in done.stdout
    assert "NOT equal" in done.stdout


def test_a_step_whose_loss_is_not_known_yet_when_the_arm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step ahead the weights are changed before the loss is read: it is known from when the step was done again,
    and only there may it be missing."""
    stage = Stage(tmp_path, sets.write_set(tmp_path / "set"), sets.tiny_recipe(), steps=4)
    plain = stage.plain(Plan()).arm
    monkeypatch.setattr(commit, "AHEAD", {"cpu": 1})
    arm = run(stage.job("plan", Plan(optimizer_impl="fused", **CPU)))
    assert [(r.part, r.step) for r in arm.records if r.cut] == [(1, 3)]
    found = compare(arm, plain, None)
    assert found.worst["loss"] < 1e-5 and not found.differences
    for part, step in ((1, 2), (2, 4)):
        log = arm.path / f"part-{part}" / "metrics.jsonl"
        whole = log.read_text()
        log.write_text("".join(line for line in whole.splitlines(keepends=True) if json.loads(line)["step"] != step))
        lost = compare(Trace(arm.path), plain, None).differences
        assert (step, "training loss") in [(each.step, each.name) for each in lost]
        log.write_text(whole)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("float32.yaml", "--plan", "none.yaml"), "none.yaml: no such file"),
        (("float32.yaml", "--plan", "shared.yaml", "--steps", "3"), "--steps 3: must be at least 4, for two epochs"),
        (("float32.yaml", "--recipes"), "--recipes compares finished runs"),
        ((".", "images", "model"), "3 folders: give one recipe, two finished runs"),
        ((".",), "1 folder: give one recipe, two finished runs"),
        ((".", "images", "--plan", "shared.yaml"), "--plan: belong to `verify RECIPE`"),
    ],
)
def test_what_cannot_be_compared(world: Path, words: tuple[str, ...], said: str) -> None:
    assert said in verify(world, *words, code=2).stderr


def test_what_is_read_is_not_written_over(world: Path) -> None:
    (world / "run").mkdir(exist_ok=True)
    words = ("float32.yaml", "--plan", "shared.yaml", "--against", "plain.yaml")
    (world / "plain.yaml").write_text(dump_yaml(Plan()))
    before = [(world / name).read_text() for name in (words[0], words[2], words[4])]
    for asked, out in (
        *((words, name) for name in (words[0], words[2], words[4])),
        (("run", "other"), "run/metrics.jsonl"),
        (("run", "other", "--recipes"), "run/eval.json"),
    ):
        said = f"--json {out}: is one of the files that are read; choose another one"
        assert said in verify(world, *asked, "--json", out, code=2).stderr
    assert before == [(world / name).read_text() for name in (words[0], words[2], words[4])]


def test_an_arm_that_fails(world: Path) -> None:
    """The reason comes with the exit code, not a traceback of the parent alone."""
    done = verify(world, "float32.yaml", "--plan", "shared.yaml", "--set", "plan.packing=false", code=2)
    assert "attention split is for packed rows" in done.stderr


def test_what_an_arm_refuses_is_said_in_its_own_words(tmp_path: Path) -> None:
    log, said = tmp_path / "log", "image_backend torchvision needs torchvision, which is not installed; pil is allowed"
    log.write_text(f"a library: a warning\nerror: {said}\nand what follows\n")
    own = f"verify: the arm 'plan' cannot run: {said}\nand what follows"
    for code in (EXIT_BAD_INPUT, EXIT_DISK_FULL):
        error = _failed("plan", code, " in part 1", log)
        assert (str(error), error.code) == (own, code)
    other = _failed("plan", 1, " in part 1", log)
    assert str(other).startswith("verify: the arm 'plan' failed with exit code 1 in part 1:\n")
    log.write_text("usage: python\n")
    assert str(_failed("peer", 2, "", log)) == "verify: the arm 'peer' failed with exit code 2:\nusage: python"


def test_a_disk_without_room_for_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed, with the bytes that are missing."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    job = SimpleNamespace(out=tmp_path, steps=4)
    task = SimpleNamespace(trained=lambda: {"a": torch.zeros(100)})
    with pytest.raises(DiskTooSmall) as error:
        _check_disk(cast(Any, job), task)
    assert error.value.code == EXIT_DISK_FULL and str(error.value).startswith(
        f"{tmp_path}: an arm of 4 steps keeps about 6,400 bytes here, and 1,000 are free: 5,400 are missing; set TMPDIR"
    )


@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.soak), signal.SIGINT])
def test_whatever_ends_it_ends_its_arms(world: Path, tmp_path: Path, number: int) -> None:
    """No process goes on in the background, and no folder stays. SIGTERM has the handler of SIGHUP."""
    command = [sys.executable, "-m", "sameday", "verify", "float32.yaml", "--plan", "shared.yaml"]
    # A variable that is not known: a process started from nothing, whose arms are its children.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "STARTED_FROM": "nothing"}
    with subprocess.Popen(
        command,
        cwd=world,
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests may run under nohup, or in the background
    ) as process:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("sameday-verify-*/plan/part-1.log")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        (arm,) = children(process.pid)
        process.send_signal(number)
        assert process.wait(60) in (128 + number, 130)
    while Path(f"/proc/{arm}").exists():
        assert time.monotonic() < end, "the arm goes on"
        time.sleep(0.05)
    assert not list(tmp_path.glob("sameday-verify-*"))


@pytest.mark.slow
def test_a_signal_that_comes_while_lanes_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arm of the first is under way then, and is not waited for."""
    arms, submit, began = Arms(print, 1), ThreadPoolExecutor.submit, time.monotonic()

    def lane(_jobs: object) -> None:
        arms._wait(["-c", "import time; time.sleep(300)"], tmp_path / "log")

    def broken_off(pool: ThreadPoolExecutor, *what: Any) -> None:
        submit(pool, *what)
        while not arms._running:
            assert time.monotonic() - began < 100, "no arm was started"
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(arms, "_lane", lane)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", broken_off)
    with pytest.raises(KeyboardInterrupt):
        arms.run([{}, {}])
    (process,) = arms._running
    assert process.poll() == -signal.SIGKILL and time.monotonic() - began < 200


def children(parent: int) -> list[str]:
    """Of all of its threads: it is a thread that starts an arm."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    return [child for one in lists for child in one.read_text().split()]
