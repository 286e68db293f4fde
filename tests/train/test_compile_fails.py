"""torch.compile that fails: what was asked for ends the run with a sentence and what is saved, what was chosen for the
machine gives way, and the run goes on without it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typed import sameday, write_recipe
from worlds import write_world

from sameday.kernels import lora
from sameday.models import vlm
from sameday.record import checkpoint
from sameday.spec.errors import EXIT_FAILED
from sameday.spec.plan import Plan
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask

pytestmark = [pytest.mark.usefixtures("own_signals"), pytest.mark.slow]
TRAIN = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--out", "run")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAILED = "torch.compile failed: BackendCompilerFailed: backend='compiler' raised: ValueError: no such instruction"


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Iterator[Path]:
    torch._dynamo.reset()
    yield write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)
    torch._dynamo.reset()


def compiler_that_fails(when: Callable[[], bool]) -> Any:
    def compiler(graph: Any, _inputs: Any) -> Any:
        if when():
            raise ValueError("no such instruction")
        return graph.forward

    return compiler


def in_evaluation(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """From the first evaluation on, which has other graphs than training, and which no warm-up foresaw."""
    plain, begun = VqaTask.evaluate, list[str]()
    monkeypatch.setattr(VqaTask, "warm_up_batches", lambda *_: [])

    def evaluate(self: VqaTask, split: str, *more: Any) -> dict[str, float]:
        begun.append(split)
        return plain(self, split, *more)

    monkeypatch.setattr(VqaTask, "evaluate", evaluate)
    return lambda: bool(begun)


def test_asked_for(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", compiler_that_fails(lambda: True))
    said = sameday(world, *TRAIN, "--set", "plan.compile=layers")
    assert said.code == EXIT_FAILED and "Traceback" not in said.err
    assert said.err.startswith(FAILED), said.err
    assert (
        said.err.endswith("; with plan.compile none the run goes on from what is saved\n") and said.err.count("\n") == 1
    )
    assert json.loads((world / "run" / "stopped.json").read_text())["code"] == EXIT_FAILED
    assert sameday(world, *TRAIN).code == 0


def test_asked_for_and_failing_later(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first validation: the steps before it are saved."""
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", compiler_that_fails(in_evaluation(monkeypatch)))
    said = sameday(world, *TRAIN, "--set", "plan.compile=layers", "--set", "plan.eval_steps=1")
    assert said.code == EXIT_FAILED and said.err.startswith(FAILED), said.err
    assert [step for step, _ in checkpoint.steps(world / "run" / "checkpoints")] == [1]
    again = sameday(world, *TRAIN)
    assert again.code == 0 and "resumed from step-000001" in again.out


def test_chosen_for_the_machine(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Plan(compile="layers"), {"compile": "Triton is there"}
    monkeypatch.setattr(VqaSetup, "choose_plan", lambda *_: chosen)
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", compiler_that_fails(in_evaluation(monkeypatch)))
    said = sameday(world, *TRAIN, "--set", "plan.eval_steps=1")
    assert said.code == 0, said.err
    assert f"compile: none from here on, because {FAILED}" in said.out and "resumed from step-000001" in said.out
    metrics = [json.loads(line) for line in (world / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics if "split" not in record] == [1, 2]
    assert not (world / "run" / "stopped.json").exists()


@pytest.mark.parametrize("asked", [(), ("--set", "plan.lora_kernel=triton")], ids=["chosen", "asked for"])
def test_kernels_that_were_chosen_beside_it_give_way_too(
    world: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    """It may be Triton that fails."""
    fields = {"compile": "layers", "lora_kernel": "triton", "attention": "fused"}
    chosen = Plan(**fields, packing=True), dict.fromkeys(fields, "faster")
    computed, load = list[Plan](), VqaTask.load
    monkeypatch.setattr(lora, "interpreted", lambda: False)  # computes the same, and is slow
    monkeypatch.setattr(VqaSetup, "choose_plan", lambda *_: chosen)
    monkeypatch.setattr(VqaTask, "load", lambda recipe, plan, *more: computed.append(plan) or load(recipe, plan, *more))
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", compiler_that_fails(lambda: True))
    # Where there is a GPU, Triton has no other device.
    said = sameday(world, *(word.replace("cpu", DEVICE) for word in TRAIN), *asked)
    assert said.code == 0 and f"compile: none from here on, because {FAILED}" in said.out, said.err
    assert [(plan.compile, plan.lora_kernel, plan.attention) for plan in computed] == [
        ("layers", "triton", "fused"),
        ("none", "triton" if asked else "plain", "split"),
    ]
    assert "attention: split from here on, because it may be Triton that failed" in said.out
    given_up = "lora_kernel: plain from here on, because it may be Triton that failed" in said.out
    assert given_up is not bool(asked)


def test_chosen_for_the_machine_and_failing_before_the_first_step(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where validation cannot be compiled, the warm-up finds out, and no step is done twice."""
    chosen = Plan(compile="layers"), {"compile": "Triton is there"}
    monkeypatch.setattr(VqaSetup, "choose_plan", lambda *_: chosen)
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", compiler_that_fails(lambda: not torch.is_grad_enabled()))
    said = sameday(world, *TRAIN)
    assert said.code == 0, said.err
    assert f"compile: none from here on, because {FAILED}" in said.out and "resumed" not in said.out
    metrics = [json.loads(line) for line in (world / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics if "split" not in record] == [1, 2]
