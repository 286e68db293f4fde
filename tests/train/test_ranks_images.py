"""Some of several ranks lose the disk with the images: all leave together, saved. torchrun with gloo and processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import finished, last_step, records, weights
from several import SETS, TORCHRUN_FAILED, documented_code, exit_code, write_home

from sameday.record import checkpoint
from sameday.spec.errors import EXIT_BAD_INPUT


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    return write_home(tmp_path_factory.mktemp("ranks"), tiny_qwen3)


GONE = """\
\"\"\"`sameday train` on machines of which those of some ranks lose the disk with the images, each in the step or with
the validation that it names.\"\"\"
import errno
import os
from pathlib import Path

from sameday.cli import main
from sameday.tasks.vqa.task import VqaTask
from sameday.train import commit

commit.AHEAD["cpu"] = {ahead}
plain, batches, evaluate = Path.read_bytes, VqaTask.batches, VqaTask.evaluate
at = {at}.get(int(os.environ["RANK"]))


def lose_disk():
    def read_bytes(path):
        if path.suffix != ".png":
            return plain(path)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    Path.read_bytes = read_bytes


def losing_in_step(self, step, budget, ranks):
    if step == at:
        lose_disk()
    return batches(self, step, budget, ranks)


def losing_in_validation(self, split, ranks, budget=None):
    if at == "validation":
        lose_disk()
    return evaluate(self, split, ranks, budget)


VqaTask.batches, VqaTask.evaluate = losing_in_step, losing_in_validation
main()
"""


STALE = "was there when the data was checked, and now Stale file handle"
THEN = "and the same command goes on from there"


IN_A_STEP, IN_A_WORKER, IN_A_VALIDATION = (0, 0, {1: 1}, 1), (1, 0, {1: 3}, 3), (0, 0, {1: "validation"}, 4)
BEHIND_OTHERS, EVERYWHERE = (0, 1, {0: 5}, 5), (0, 1, {0: 6, 1: 6}, 6)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param((IN_A_WORKER, IN_A_VALIDATION, BEHIND_OTHERS), id="three"),
        pytest.param(
            (IN_A_STEP, IN_A_WORKER, IN_A_VALIDATION, BEHIND_OTHERS, EVERYWHERE), id="five", marks=pytest.mark.soak
        ),
    ],
)
def test_images_that_go_away_from_some_ranks_cost_no_steps(home: Path, times: tuple[Any, ...]) -> None:
    """All ranks leave the step together, saved, and the same command goes on, bit for bit: in a step, in one that a
    data worker prepares, in a validation, in a step that the other ranks have gone beyond, and on all ranks at once."""
    sets = ("plan.save_steps=100", "plan.eval_steps=4", "plan.log_steps=1", "plan.optimizer_impl=fused")
    script, resumed = home / "gone.py", None
    out = f"gone-{len(times)}"
    script.write_text(GONE.format(ahead=0, at={}))
    finished(home, *sets, out="whole", ranks=2, script=script)
    for workers, ahead, at, step in times:
        script.write_text(GONE.format(ahead=ahead, at=at))
        more = (*sets, f"plan.workers={workers}")
        process = finished(home, *more, out=out, ranks=2, script=script, code=TORCHRUN_FAILED)
        assert process.stderr.count(": was there when") == 1, process.stderr
        said = re.search(rf"^{home}/images/\d\.png: {STALE}; step (\d) is saved, {THEN}$", process.stderr, re.MULTILINE)
        assert said and int(said[1]) == step, process.stderr
        assert process.stderr.count("Traceback (most") == 1, "torchrun's own, and no rank's"
        assert exit_code(process.stderr) == documented_code(home, out) == EXIT_BAD_INPUT
        assert resumed is None or f"resumed from {resumed}" in process.stdout
        resumed = f"step-{step:06d}"
        assert checkpoint.fault(process.run / "checkpoints" / resumed) is None
        assert last_step(process.run) == step and not (process.run / "adapter").exists()
    process = finished(home, *sets, out=out, ranks=2)
    assert f"resumed from {resumed}" in process.stdout and not (process.run / "stopped.json").exists()
    assert weights(process.run) == weights(home / "whole")
    assert records(process.run) == records(home / "whole")


def test_images_that_go_away_from_one_rank_before_its_first_step(home: Path) -> None:
    """Nothing is there to be saved, and the folder says why the run ended."""
    script = home / "gone_at_once.py"
    script.write_text(GONE.format(ahead=0, at={1: 0}))
    process = finished(home, *SETS, out="gone-at-once", ranks=2, script=script, code=TORCHRUN_FAILED)
    assert process.stderr.count(f".png: {STALE}; no step was done yet, and the same command begins again\n") == 1
    assert process.stderr.count("Traceback (most") == 1, "torchrun's own, and no rank's"
    assert exit_code(process.stderr) == documented_code(home, process.run.name) == EXIT_BAD_INPUT
    assert not checkpoint.steps(process.run / "checkpoints")
