"""Classification through the whole loop: killed and resumed, short of memory, and by the command as a user types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
from processes import assert_same_run, finished, started
from torch import Tensor

from sameday.hardware.ranks import Ranks
from sameday.record.folder import RunFolder
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped
from sameday.spec.plan import Plan
from sameday.train.loop import train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sets.write_set(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(num_epochs=4)))
    return tmp_path


@pytest.mark.parametrize(
    "sets_",
    [("plan.images_on=device", "plan.micro_batch=3"), pytest.param(("plan.workers=1",), marks=pytest.mark.soak)],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(folder: Path, sets_: tuple[str, ...]) -> None:
    options = (*sets_, "plan.save_steps=3", "plan.log_steps=1")
    whole = finished(folder, *options, out="whole")
    with started(folder, *options, out="killed") as process:
        assert process.until_step(5)
        process.kill()
    assert_same_run(finished(folder, *options, out="killed").run, whole.run)


@pytest.mark.soak
def test_ranks_train_the_same_model(folder: Path) -> None:
    one = finished(folder, out="one")
    two = finished(folder, "plan.micro_batch=2", out="two", ranks=2)
    assert _loss(two.run) == pytest.approx(_loss(one.run), rel=1e-4)


def _loss(run: Path) -> float:
    return float(json.loads((run / "eval.json").read_text())["val"]["loss"])


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A run that leaves early keeps its signal handlers."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def trained(folder: Path, out: str, limit: int) -> tuple[dict[str, Tensor], list[int]]:
    """Weights after training with room for so many images, and the sizes of the micro-batches that had it."""
    recipe, plan = sets.tiny_recipe(), Plan()
    task = sets.make_task(folder, recipe, plan)
    plain, sizes = task.loss_sum, list[int]()

    def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
        if len(batch) > limit:
            raise torch.OutOfMemoryError("planted")
        sizes.append(len(batch))
        return plain(batch, step)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    run = RunFolder.open(folder / out, recipe, plan, folder)
    try:
        train(recipe, plan, task, run, Ranks())
    finally:
        run.close()
    return {name: p.detach().clone() for name, p in task.trained().items()}, sizes


def test_a_step_without_room_is_done_again_in_halves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roomy, _ = trained(folder, "roomy", 8)
    narrow, sizes = trained(folder, "narrow", 3)
    assert max(sizes) == 2 and sum(sizes) == 2 * 30, "each image once an epoch"
    said = capsys.readouterr().out
    assert "step 1: out of memory; micro batch 8 -> 4, the step is done again" in said
    assert "step 1: out of memory; micro batch 4 -> 2, the step is done again" in said
    for name, weight in roomy.items():
        assert torch.allclose(narrow[name], weight, rtol=1e-4, atol=1e-6), name


def test_an_image_that_never_fits(folder: Path) -> None:
    with pytest.raises(RunStopped, match="out of memory with a single image in a micro-batch") as stop:
        trained(folder, "none", 0)
    assert stop.value.code == EXIT_OUT_OF_MEMORY and "plan.level_kernel fused" in str(stop.value)


def test_the_example_on_drawn_patterns(tmp_path: Path) -> None:
    """As its first line says, with fewer epochs."""
    (tmp_path / "patterns_bdh.yaml").write_text((EXAMPLES / "patterns_bdh.yaml").read_text())
    subprocess.run([sys.executable, "-m", "sameday.demo.patterns", "data/patterns"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "sameday", "train", "patterns_bdh.yaml", "--out", "run"]
    done = subprocess.run(
        [*command, "--set", "recipe.num_epochs=3"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    kernel = "auto" if torch.cuda.is_available() else "plain"
    assert f"level_kernel: {kernel}, because" in done.stdout and "448 images" in done.stdout
    scores = json.loads((tmp_path / "run" / "eval.json").read_text())["val"]
    assert scores["samples"] == 64 and scores["accuracy"] > 0.5, "four classes"
    tested = subprocess.run(
        [sys.executable, "-m", "sameday", "eval", "run", "--split", "test"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "accuracy" in tested.stdout and "samples 128" in tested.stdout
