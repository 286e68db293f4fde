"""Several ranks train what one trains: torchrun with gloo, real processes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from processes import assert_agrees, finished, last_step, started, write_run
from several import AHEAD, DRIVER, SETS, TORCHRUN_FAILED, documented_code, finished_alone

from sameday.hardware.ranks import Ranks
from sameday.record import checkpoint
from sameday.spec.errors import EXIT_STOPPED, BadInput


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    return finished_alone(tmp_path_factory.mktemp("ranks"), tiny_qwen3)


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
