"""What a run will meet is compiled before its first step: nothing is compiled afterwards, and nothing else changes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sets
import torch
import torch._dynamo
import worlds
from processes import assert_same_run, finished, write_run
from typed import sameday

from sameday.hardware.compiling import graphs
from sameday.hardware.ranks import Ranks
from sameday.models import compiled, vlm
from sameday.record import checkpoint
from sameday.record.times import read_times
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_STOPPED
from sameday.spec.plan import Plan
from sameday.tasks.vqa import warm
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.warm_up import warm_up
from sameday.train.steps import Steps
from sameday.verify.trace import Witness

pytestmark = pytest.mark.usefixtures("own_signals")

PLAN = {"share_images": True, "packing": True, "max_questions": None, "attention": "split", "token_budget": 300}
SETS = tuple(
    f"--set=plan.{name}"
    for name in ("device=cpu", "share_images=true", "packing=true", "token_budget=200", "save_steps=2")
)
ALL = ("plan.share_images=true", "plan.packing=true", "plan.token_budget=200")


class Screen:
    """No terminal; what is said is kept."""

    live = None

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def mixed(folder: Path, family: str = "qwen3_vl", **changes: Any) -> VqaTask:
    """1 to 17 questions an image, several sizes, several images in a question, none in another."""
    worlds.write_world(folder, 3, (17, 1, 5, 3, 2), chats=True)
    square = family in worlds.SQUARE
    model = worlds.write_tiny(
        folder / family, family, text={"num_hidden_layers": 2}, vision={} if square else {"depth": 1}
    )
    lora = {"r": 4, "alpha": 8, "dropout": 0.1} | ({"target_modules": worlds.OF_THE_DECODER} if square else {})
    recipe = worlds.tiny_recipe(model, order="by_image", effective_batch=8, lora=lora, num_epochs=2)
    return worlds.make_task(folder, recipe, Plan(**(PLAN | changes)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        pytest.param("qwen3_vl", {"pad_to_multiple": 32, "share_text": True}, id="packed"),
        pytest.param("qwen3_vl", {"attention": "sdpa", "packing": False}, id="rows", marks=pytest.mark.soak),
        pytest.param("qwen3_vl", {"attention": "sdpa"}, id="masks", marks=pytest.mark.soak),
        pytest.param("qwen3_vl", {"checkpointing": "full"}, id="checkpointed", marks=pytest.mark.soak),
        pytest.param("qwen3_vl", {"checkpointing": "selective"}, id="checkpointed in part", marks=pytest.mark.soak),
        pytest.param("llava", {}, id="squares", marks=pytest.mark.soak),
    ],
)
def test_nothing_is_compiled_after_the_warm_up(
    tmp_path: Path, family: str, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole epochs, their last steps and a validation."""
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "eager")  # graphs are the same whatever makes kernels of them
    torch._dynamo.reset()
    task, screen, before = mixed(tmp_path, family, compile="layers", **plan), Screen(), graphs().made
    steps, total = Steps(task.recipe, task.plan, task, Ranks()), 2 * task.steps_per_epoch()
    spent = warm_up(task, range(total), None, Ranks(), steps.warm_up, screen)
    made = graphs().made
    assert made - before >= 3, "layers, the tower, validation"
    for step in range(total):
        steps.accumulate(task.batches(step, None, Ranks()), step)
    task.evaluate("val", Ranks())
    assert graphs().made == made
    assert screen.said[1:] == [f"compiled what this run will meet in {spent['compile']:.1f} s: {made - before} graphs"]


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up_of_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 8, 8 and 5 images in micro-batches of 3, and a validation of 4: four sizes."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4}, effective_batch=8)
    task = sets.make_task(sets.write_set(tmp_path, train=25), recipe, Plan(compile="layers", micro_batch=3))
    steps, before = Steps(recipe, task.plan, task, Ranks()), graphs().made
    assert warm_up(task, range(2 * task.steps_per_epoch()), None, Ranks(), steps.warm_up, Screen())
    made = graphs().made
    assert made > before and not steps.gradients.buffer.any()
    for step in range(2 * task.steps_per_epoch()):
        steps.accumulate(task.batches(step, None, Ranks()), step)
    task.evaluate("val", Ranks())
    assert graphs().made == made


def test_without_compiling_there_is_none(tmp_path: Path) -> None:
    task, screen = mixed(tmp_path), Screen()
    assert warm_up(task, range(9), None, Ranks(), lambda *_: True, screen) == {} and not screen.said


def test_batches_stand_for_all_that_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind the largest and the smallest; the same on every rank; and none of what the run is through with."""
    monkeypatch.setattr(warm, "compiles", lambda _: True)
    task = mixed(tmp_path, attention="sdpa")
    total = 2 * task.steps_per_epoch()
    for ranks in (1, 2):
        listed = [task.warm_up_batches(range(total), None, Ranks(rank, ranks)) for rank in range(ranks)]
        names = [[each.name for each in batches] for batches in listed]
        assert all(each == names[0] for each in names), "each rank is prepared for what any of them meets"
        sizes = {(each.score is None, each.make().tokens.numel()) for each in listed[0]}
        met = [
            batch
            for rank in range(ranks)
            for step in range(total)
            for batch in task.batches(step, None, Ranks(rank, ranks))
        ]
        every = [batch.tokens.numel() for batch in met]
        assert {(True, min(every)), (True, max(every))} <= sizes
        assert any(each.score is not None for each in listed[0])
    (last,) = {each.step for each in task.warm_up_batches(range(total - 1, total), None, Ranks()) if each.score is None}
    assert last == total - 1
    assert task.warm_up_batches(range(total, total), None, Ranks()) == []
    watched: Any = Witness(task, tmp_path, Ranks())
    assert watched.warm_up_batches(range(total), None, Ranks()) == (), "verify writes down what passes, step by step"


def test_a_terminal_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Live(list[str]):
        update = list.append

    monkeypatch.setattr(warm, "compiles", lambda _: True)
    task, screen, live = mixed(tmp_path), Screen(), Live()
    monkeypatch.setattr(screen, "live", live)
    last = task.steps_per_epoch()
    named = [each.name for each in task.warm_up_batches(range(last), None, Ranks())]
    assert warm_up(task, range(last), None, Ranks(), lambda *_: True, screen).keys() == {"compile"}
    words = "compiling what this run will meet: "
    assert [line.rpartition(", ")[0] for line in live] == [
        f"{words}{number} of {len(named)}, {name}" for number, name in enumerate(named, 1)
    ]
    assert any("training with" in line for line in live) and any("validation with" in line for line in live)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A world with a finished run without a warm-up: `plain`."""
    folder = write_run(tmp_path_factory.mktemp("warm"), tiny_qwen3, max_steps=3)
    assert sameday(folder, "train", "recipe.yaml", "--out", "plain", *SETS).code == 0
    return folder


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], list[int]]:
    """Runs have a warm-up though nothing is compiled. What is given is called in every forward pass of training, with
    its number; the step of each is kept."""
    monkeypatch.setattr(warm, "compiles", lambda _: True)

    def forward(call: Callable[[int], None]) -> list[int]:
        plain, computed = VqaTask.loss_sum, list[int]()

        def loss_sum(self: VqaTask, batch: Any, step: int) -> Any:
            computed.append(step)
            call(len(computed))
            return plain(self, batch, step)

        monkeypatch.setattr(VqaTask, "loss_sum", loss_sum)
        return computed

    return forward


def starts(run: Path) -> list[dict[str, Any]]:
    return [each["parts"] for each in read_times(run) if each["what"] == "start"]


def test_the_model_is_the_same_to_the_bit(home: Path, warmed: Callable[..., list[int]]) -> None:
    """Also where the run is stopped on the way, and warms up again when it goes on."""
    computed = warmed(lambda _: None)
    assert sameday(home, "train", "recipe.yaml", "--out", "warm", *SETS).code == 0
    assert_same_run(home / "warm", home / "plain")
    (parts,) = starts(home / "warm")
    assert parts["compile"] > 0 and "compile" not in starts(home / "plain")[0]
    whole = len(computed)
    stopped = sameday(home, "train", "recipe.yaml", "--out", "resumed", "--stop-after", "2", *SETS)
    assert stopped.code == EXIT_STOPPED
    assert sameday(home, "train", "recipe.yaml", "--out", "resumed", *SETS).code == 0
    assert_same_run(home / "resumed", home / "plain")
    assert len(starts(home / "resumed")) == 2 and len(computed) > 2 * whole


def test_asked_to_stop_in_the_warm_up(home: Path, warmed: Callable[..., list[int]]) -> None:
    """In its second micro-batch: that is broken off where it is, and what was not gone through is not said to be, nor
    is it the time that a start takes."""
    after = list[int]()

    def asked(number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            after.append(number)

    computed = warmed(asked)
    said = sameday(home, "train", "recipe.yaml", "--out", "stopped", *SETS)
    assert said.code == EXIT_STOPPED and "no step was done yet" in said.err and len(computed) == 2 and not after
    whole, broken = said.out.splitlines()[-2:]
    assert re.fullmatch(r"the warm-up was broken off after \S+ s: 1 of \d+ micro-batches were done", broken)
    assert whole.startswith("compiling what this run will meet") and not starts(home / "stopped")
    assert not list(checkpoint.steps(home / "stopped" / "checkpoints"))
    assert sameday(home, "train", "recipe.yaml", "--out", "stopped", *SETS).code == 0
    assert_same_run(home / "stopped", home / "plain")


def test_out_of_memory_in_the_warm_up_is_no_end(home: Path, warmed: Callable[..., list[int]]) -> None:
    def short(number: int) -> None:
        if number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    warmed(short)
    said = sameday(home, "train", "recipe.yaml", "--out", "short", *SETS)
    assert said.code == 0 and "out of memory in the warm-up (training with" in said.out
    assert "step 1: out of memory" not in said.out, "no step was too large"
    assert_same_run(home / "short", home / "plain")


FAILS = """
import os

from sameday.cli import main
from sameday.spec.errors import BadInput, RunStopped
from sameday.tasks.vqa import warm
from sameday.tasks.vqa.task import VqaTask


def loss_sum(self, batch, step):
    raise {error}


warm.compiles = lambda _: True
if os.environ["RANK"] == "1":
    VqaTask.loss_sum = loss_sum
main()
"""


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        ('RunStopped("no such instruction", 1, alone=True)', "no such instruction\n", EXIT_FAILED),
        (
            'BadInput("no such image")',
            "no such image; no step was done yet, and the same command begins again\n",
            EXIT_BAD_INPUT,
        ),
    ],
)
def test_a_rank_that_fails_leaves_none_waiting(home: Path, error: str, said: str, code: int) -> None:
    """Both leave with its words and its code, and the first one says why."""
    (home / "fails.py").write_text(FAILS.format(error=error))
    process = finished(home, *ALL, out=f"failed-{code}", ranks=2, script=home / "fails.py", code=1)
    assert process.stderr.startswith(said) and process.stderr.count(said) == 1, process.stderr
    assert re.findall(r"exitcode\s*: (\d+) \(pid", process.stderr) == [str(code)] * 2
    assert json.loads((process.run / "stopped.json").read_text())["code"] == code
    assert not list(checkpoint.steps(process.run / "checkpoints"))
