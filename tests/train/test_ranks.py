"""Several ranks train what one trains, decide together, and leave together: torchrun with gloo, real processes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import assert_agrees, finished, last_step, records, started, training_steps, weights, write_run
from test_diverged import LINE, poison

from sameday.hardware.ranks import Ranks
from sameday.record import checkpoint
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_FAILED, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, BadInput

TORCHRUN_FAILED = 1
"""What torchrun itself leaves with, whatever code its processes left with."""

DOCS = Path(__file__).parents[2] / "docs"
SETS = ("plan.save_steps=2", "plan.log_steps=1", "plan.device=cpu")
AHEAD = ("plan.save_steps=4", "plan.log_steps=1", "plan.optimizer_impl=fused")
"""What one rank meets is known to all a step later: none may be alone in a sum."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A world with a finished run of one rank: `alone`. Epsilon is above rounding, which AdamW would otherwise
    blow up where a gradient is nearly zero."""
    lora = {"r": 4, "alpha": 8}
    folder = write_run(tmp_path_factory.mktemp("ranks"), tiny_qwen3, num_epochs=2, lora=lora, eps=1e-4)
    finished(folder, *SETS, out="alone")
    return folder


def exit_code(stderr: str) -> int:
    """Of the rank that was gone first, as torchrun reports it. The others leave with the same code, unless torchrun's
    signal meets them on their way out."""
    codes = [int(code) for code in re.findall(r"exitcode\s*:\s*(-?\d+) \(pid", stderr)]
    assert len(codes) == 2 and -signal.SIGKILL not in codes, stderr
    return codes[-1]


def documented_code(home: Path, run: str) -> int:
    """What the documented line of a batch script leaves with, where torchrun has failed."""
    (line,) = re.findall(r"^rm .* (\|\| exit .*)$", (DOCS / "runs.md").read_text(), re.MULTILINE)
    line = f"false {line.replace('run/stopped.json', f'{run}/stopped.json')}".replace("python", sys.executable)
    return subprocess.run(["bash", "-c", line], cwd=home).returncode


def test_the_documented_line_without_a_run_is_a_failure(tmp_path: Path) -> None:
    assert documented_code(tmp_path, "absent") == TORCHRUN_FAILED


def test_two_ranks(home: Path) -> None:
    process = finished(home, *SETS, out="two", ranks=2)
    assert process.stdout.count("step 8/8  loss") == 1, "only the first rank speaks"
    assert_agrees(process.run, home / "alone")


@pytest.mark.soak
def test_ranks_without_work(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Three ranks and two questions a step, with a worker each: one rank has nothing to do but agree."""
    lora = {"r": 4, "alpha": 8}
    changes = {"effective_batch": 2, "eps": 1e-2, "lora": lora, "num_epochs": 1, "order": "shuffle"}
    folder = write_run(tmp_path, tiny_qwen3, (3, 2, 2), **changes)
    finished(folder, *SETS, out="alone")
    finished(folder, *SETS, "plan.workers=1", out="three", ranks=3)
    assert_agrees(folder / "three", folder / "alone")


DRIVER = """\
\"\"\"`sameday train` on a machine where rank {rank} has no room for micro-batches above {limit} tokens, and where a
step is launched before the end of the last is known.\"\"\"
import os

import torch

from sameday.cli import main
from sameday.tasks.vqa.task import VqaTask
from sameday.train import commit

commit.AHEAD["cpu"] = 1
plain = VqaTask.loss_sum


def loss_sum(self, batch, step):
    if os.environ["RANK"] == "{rank}" and batch.tokens.numel() > {limit}:
        raise torch.OutOfMemoryError("planted")
    return plain(self, batch, step)


VqaTask.loss_sum = loss_sum
main()
"""


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


def test_asked_to_stop_and_resumed_by_another_number_of_ranks(home: Path) -> None:
    script = home / "ahead.py"
    script.write_text(DRIVER.format(rank=1, limit=10**9))
    with started(home, *AHEAD, out="asked", ranks=2, script=script) as process:
        assert process.until_step(2)
        process.send(signal.SIGTERM)
        assert process.wait() != 0
    said = re.search(r"asked to stop: step (\d+) of 8 is saved; run again to go on", process.stderr)
    assert said, process.stderr
    saved = process.run / "checkpoints" / f"step-{int(said[1]):06d}"
    assert checkpoint.fault(saved) is None
    assert last_step(process.run) == int(said[1])
    assert json.loads((process.run / "stopped.json").read_text())["code"] == EXIT_STOPPED
    assert documented_code(home, process.run.name) == EXIT_STOPPED
    assert f"resumed from {saved.name}" in finished(home, *AHEAD, out="asked").stdout
    assert_agrees(process.run, home / "alone")


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


def test_a_process_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(BadInput) as refused:
        Ranks.join("cuda")
    assert str(refused.value) == (
        "process 2 of this machine has no GPU: 1 here; start one process for each (torchrun --nproc-per-node 1), "
        "or ask for plan.device cpu"
    )


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


COUNTED = """\
\"\"\"`sameday train`, and each rank notes the step and tokens of each of its micro-batches.\"\"\"
import os

from sameday.cli import main
from sameday.tasks.vqa.task import VqaTask

plain = VqaTask.loss_sum


def loss_sum(self, batch, step):
    with open("tokens-" + os.environ.get("WORLD_SIZE", "1"), "a") as file:
        print(os.environ.get("RANK", "0"), step, batch.tokens.numel(), file=file)
    return plain(self, batch, step)


VqaTask.loss_sum = loss_sum
main()
"""


def test_no_rank_is_idle_where_few_images_are_shared(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Sixteen questions about two images in each step: more ranks than images, and the weights of one rank. Epsilon
    is above the smaller gradients of so large a step, for the reason that `home` gives."""
    changes = {"effective_batch": 16, "eps": 1e-2, "lora": {"r": 4, "alpha": 8}, "num_epochs": 3}
    folder = write_run(tmp_path, tiny_qwen3, (8, 8), **changes)
    script = folder / "counted.py"
    script.write_text(COUNTED)
    shared = ("plan.share_images=true", "plan.packing=true", "plan.max_questions=null")
    sets = (*shared, "plan.log_steps=1", "plan.device=cpu")
    for ranks in (1, 2, 4):
        finished(folder, *sets, out=f"ranks-{ranks}", ranks=ranks, script=script)
        noted = [tuple(map(int, line.split())) for line in (folder / f"tokens-{ranks}").read_text().splitlines()]
        assert {(rank, step) for rank, step, _ in noted} == {(rank, step) for rank in range(ranks) for step in range(3)}
        if ranks > 1:
            assert_agrees(folder / f"ranks-{ranks}", folder / "ranks-1")
