"""Several ranks decide together and leave together, whatever one of them meets: torchrun with gloo, real processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from processes import assert_agrees, finished, training_steps, write_run
from several import AHEAD, DRIVER, SETS, TORCHRUN_FAILED, exit_code, finished_alone
from test_diverged import LINE, poison

from sameday.record import checkpoint
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_FAILED, EXIT_OUT_OF_MEMORY


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    return finished_alone(tmp_path_factory.mktemp("ranks"), tiny_qwen3)


def test_out_of_memory_on_one_rank(home: Path) -> None:
    script = home / "short.py"
    script.write_text(DRIVER.format(rank=1, limit=70))  # one question fits, two do not
    process = finished(home, *AHEAD, "plan.share_images=false", out="short", ranks=2, script=script)
    lowered = re.findall(r"out of memory; token budget (\d+) -> (\d+), the step is done again", process.stdout)
    assert lowered, process.stdout
    assert all(int(lower) < int(before) for before, lower in lowered)
    assert_agrees(process.run, home / "alone")


def test_a_question_that_never_fits_one_rank(home: Path) -> None:
    script = home / "no_room.py"
    script.write_text(DRIVER.format(rank=1, limit=3))
    process = finished(home, *SETS, out="no-room", ranks=2, script=script, code=TORCHRUN_FAILED)
    assert process.stderr.count("out of memory with a single question in a micro-batch") == 1
    assert exit_code(process.stderr) == EXIT_OUT_OF_MEMORY


def test_not_finite_on_one_rank(tmp_path: Path, tiny_qwen3: Path) -> None:
    shutil.copytree(tiny_qwen3, tmp_path / "model")
    folder = write_run(tmp_path, Path("model"), num_epochs=1, order="listed")
    script = poison(folder, float("nan"))
    process = finished(folder, "plan.save_steps=1", ranks=2, code=TORCHRUN_FAILED, script=script)
    assert process.stderr.count("The weights were not touched") == 1
    assert re.findall(r"\S*\.jsonl:\d+", process.stderr) == [f"train.jsonl:{LINE}"]
    assert exit_code(process.stderr) == EXIT_DIVERGED
    assert training_steps(process.run) == [1, 2]
    assert checkpoint.fault(process.run / "checkpoints" / "step-000002") is None


BUG = """\
\"\"\"`sameday train` with a bug that one rank alone meets.\"\"\"
import os

from sameday.cli import main
from sameday.tasks.vqa.task import VqaTask

batches = VqaTask.batches


def failing(self, step, budget, ranks):
    if os.environ["RANK"] == "1" and step == 3:
        raise TypeError("planted")
    return batches(self, step, budget, ranks)


VqaTask.batches = failing
main()
"""


def test_a_bug_that_one_rank_meets_leaves_none_waiting(home: Path) -> None:
    """Its own rank has the traceback, the first one says so and has it in the folder; nothing is saved with it."""
    script = home / "bug.py"
    script.write_text(BUG)
    process = finished(home, *SETS, out="bug", ranks=2, script=script, code=TORCHRUN_FAILED)
    assert process.stderr.count("rank 1 failed: TypeError: planted") == 1, process.stderr
    assert process.stderr.count("Traceback (most") == 2, "torchrun's own, and that of the rank"
    noted = json.loads((process.run / "stopped.json").read_text())
    assert (noted["why"], noted["code"]) == ("rank 1 failed: TypeError: planted", EXIT_FAILED)
    assert [step for step, _ in checkpoint.steps(process.run / "checkpoints")] == [2]


def test_bad_input_is_said_once(home: Path, tmp_path: Path) -> None:
    """Bad questions, and a run folder that only the first rank opens: every rank ends, one of them says why."""
    for name in ("train.jsonl", "val.jsonl", "recipe.yaml"):
        shutil.copy(home / name, tmp_path)
    shutil.copytree(home / "images", tmp_path / "images")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    rows[4]["image"] = "absent.png"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = finished(tmp_path, ranks=2, code=TORCHRUN_FAILED)
    assert process.stderr.count("train.jsonl:5") == process.stderr.count("error: ") == 1
    assert exit_code(process.stderr) == EXIT_BAD_INPUT

    other = finished(home, *SETS, "recipe.seed=9", out="alone", ranks=2, code=TORCHRUN_FAILED)
    assert other.stderr.count("holds a run of another recipe") == 1
    assert exit_code(other.stderr) == EXIT_BAD_INPUT
    for stderr in (process.stderr, other.stderr):
        assert stderr.count("Traceback (most") == 1, "torchrun's own, and no rank's"
