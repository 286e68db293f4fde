"""Memory that runs out where no micro-batch can be cut: while a model is loaded, for the optimizer's state, in its
update. The run ends with a sentence, a code and what was saved before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sets
import torch

from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped
from sameday.spec.load import dump_yaml
from sameday.tasks.classify.setup import ClassifySetup
from sameday.train import checkpoint, steps
from sameday.train.launch import train_from_files

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


def test_while_the_model_is_loaded(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassifySetup, "load", out_of_memory)
    said = stopped(recipe)
    assert said.startswith("out of memory while the model was loaded: CPU has ")
    assert said.endswith("a smaller recipe.model, recipe.precision bf16, a GPU with more memory.")


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
