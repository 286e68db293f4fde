"""Memory that runs out where no micro-batch can be cut: while a model is loaded, for the optimizer's state, in its
update. The run ends with a sentence, a code and what was saved before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sets
import torch
import worlds
from processes import finished

from sameday.commands.launch import train_from_files
from sameday.hardware.memory import free_memory
from sameday.hardware.ranks import Ranks
from sameday.record import checkpoint
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped
from sameday.tasks.base import NO_MEMORY
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.classify.task import ClassifyTask
from sameday.tasks.vqa.setup import VqaSetup
from sameday.train import steps

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    sets.write_set(tmp_path, train=20)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(data={"path": "set", "val": 4})))
    return tmp_path / "recipe.yaml"


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("planted")


def stopped(recipe: Path) -> str:
    """How the run ended, said to the user and written down."""
    with pytest.raises(RunStopped) as stop:
        train_from_files(recipe, None, recipe.parent / "run", ["plan.device=cpu", "plan.save_steps=1"])
    assert stop.value.code == EXIT_OUT_OF_MEMORY
    noted = json.loads((recipe.parent / "run" / "stopped.json").read_text())
    assert (noted["why"], noted["code"]) == (str(stop.value), EXIT_OUT_OF_MEMORY)
    return str(stop.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("planted"),
        RuntimeError("unable to mmap 4255144928 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
    ids=["device", "file", "allocator", "Python"],
)
def test_while_the_model_is_loaded(recipe: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(ClassifySetup, "load", Mock(side_effect=error))
    said = stopped(recipe)
    has = free_memory(torch.device("cpu"))[1] / 2**30
    assert said.startswith(f"out of memory while the model was loaded: CPU has {has:.3g} GiB, and other programs ")
    assert said.endswith("plan.images_on host, fewer images, a smaller recipe.data.image_size or recipe.model.width.")


def test_other_errors_of_loading_are_not_called_so(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassifySetup, "load", Mock(side_effect=RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        train_from_files(recipe, None, recipe.parent / "run", ["plan.device=cpu"])


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({}, "a smaller recipe.model, recipe.precision bf16, recipe.base_format nf4, a GPU with more memory"),
        ({"train": "all"}, "a smaller recipe.model, recipe.precision bf16, recipe.train lora, a GPU with more memory"),
        ({"precision": "bf16"}, "a smaller recipe.model, recipe.base_format nf4, a GPU with more memory"),
        ({"precision": "bf16", "base_format": "nf4"}, "a smaller recipe.model, a GPU with more memory"),
    ],
)
def test_advice_is_what_the_recipe_does_not_have_yet(fields: dict[str, str], advice: str) -> None:
    recipe = worlds.tiny_recipe(Path("model"), **fields)
    assert VqaSetup(recipe, Path()).loading_advice == advice


def test_for_the_optimizers_state(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "allocate_state", out_of_memory)
    assert stopped(recipe) == (
        "out of memory: gradients and optimizer state do not fit beside the model. What is left to try: "
        "plan.level_kernel fused, plan.images_on host, a smaller recipe.model or data.image_size."
    )


@pytest.mark.parametrize("good", [0, 2])
def test_in_the_update(recipe: Path, monkeypatch: pytest.MonkeyPatch, good: int) -> None:
    """In the first one there is nothing to go back to; later ones leave the checkpoints that were there."""
    plain, done = torch.optim.AdamW.step, []

    def step(self: Any, *arguments: Any) -> Any:
        if len(done) == good:
            out_of_memory()
        done.append(1)
        return plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert stopped(recipe).startswith("out of memory in the optimizer's update; run again to go on from the newest")
    kept = checkpoint.steps(recipe.parent / "run" / "checkpoints")
    assert [step for step, _ in kept] == list(range(1, good + 1))
    assert not [checkpoint.fault(path) for _, path in kept if checkpoint.fault(path)]


def test_state_is_what_the_first_step_would_make() -> None:
    """Allocated ahead, so that what is missing shows before any data is read; the bits are the optimizer's own."""
    trained = {"a": torch.nn.Parameter(torch.randn(3, 4)), "b": torch.nn.Parameter(torch.randn(4))}
    for kind in ("loop", "foreach", "fused"):
        updated = []
        for ahead in (False, True):
            torch.manual_seed(0)
            copies = {name: torch.nn.Parameter(value.detach().clone()) for name, value in trained.items()}
            optimizer = torch.optim.AdamW(copies.values(), foreach=kind == "foreach", fused=kind == "fused")
            if ahead:
                steps.allocate_state(optimizer)
            for _ in range(3):
                for parameter in copies.values():
                    parameter.grad = torch.randn(parameter.shape)
                optimizer.step()
            updated.append([parameter.detach() for parameter in copies.values()])
        assert all(torch.equal(*pair) for pair in zip(*updated, strict=True)), kind


SHORT_RANK = """
import os, sys, torch
from sameday import cli
from sameday.tasks.classify.setup import ClassifySetup
from sameday.train import steps

def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("planted")

if os.environ["RANK"] == "1":
    if "WHERE" == "load":
        ClassifySetup.load = out_of_memory
    elif "WHERE" == "state":
        steps.allocate_state = out_of_memory
    else:
        torch.optim.AdamW.step = out_of_memory
cli.main()
"""


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("load", "out of memory while the model was loaded"),
        ("state", "out of memory: gradients and optimizer state do not fit"),
        ("update", "out of memory in the optimizer's update"),
    ],
)
def test_on_one_rank_of_two(recipe: Path, where: str, sentence: str) -> None:
    """What only one rank meets is said, whichever it is; where all can be asked, all stop with the code."""
    script = recipe.parent / "short.py"
    script.write_text(SHORT_RANK.replace("WHERE", where))
    process = finished(recipe.parent, "plan.device=cpu", ranks=2, script=script, code=1)
    assert sentence in process.stderr
    if where != "update":
        assert json.loads((recipe.parent / "run" / "stopped.json").read_text())["code"] == EXIT_OUT_OF_MEMORY
        assert "Traceback" not in process.stderr.split("torch/distributed")[0]


def trained(recipe: Path, *sets: str, stop_after: int | None = None) -> dict[str, float]:
    return train_from_files(recipe, None, recipe.parent / "run", ["plan.device=cpu", *sets], stop_after)


def test_an_evaluation_without_memory_loses_no_training(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(self: ClassifyTask, *_: Any) -> None:
        raise self.evaluation_stopped("image", ["data_batch_1:3"], Ranks(), NO_MEMORY)

    with monkeypatch.context() as patch:
        patch.setattr(ClassifyTask, "evaluate", evaluate)
        with pytest.raises(RunStopped, match="out of memory in evaluation with a single image, data_batch_1:3") as stop:
            trained(recipe)
    assert "checkpointing" not in str(stop.value) and stop.value.code == EXIT_OUT_OF_MEMORY
    kept = [step for step, _ in checkpoint.steps(recipe.parent / "run" / "checkpoints")]
    assert kept == [2], "the epoch's last step, though it was not validated"
    assert trained(recipe)["samples"] == 4


def test_a_lowered_budget_is_said_and_may_be_raised(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, sizes = ClassifyTask.loss_sum, list[int]()

    def loss_sum(self: ClassifyTask, batch: Any, step: int) -> Any:
        sizes.append(len(batch))
        if len(batch) > 4 and limited:
            out_of_memory()
        return plain(self, batch, step)

    monkeypatch.setattr(ClassifyTask, "loss_sum", loss_sum)
    limited = True
    with pytest.raises(RunStopped, match="asked to stop"):
        trained(recipe, stop_after=1)
    assert sizes == [8, 4, 4]
    limited = False
    sizes.clear()
    with pytest.raises(RunStopped, match="asked to stop"):
        trained(recipe, stop_after=2)
    assert sizes == [4, 4] and "micro batch 4: it was lowered when memory ran out" in capsys.readouterr().out
    sizes.clear()
    with pytest.raises(RunStopped, match="asked to stop"):
        trained(recipe, "plan.micro_batch=6", stop_after=3)
    assert sizes == [6, 2] and "it was lowered" not in capsys.readouterr().out
