"""On a GPU: micro-batches that are recorded as CUDA graphs compute what the same ones compute when launched, to the bit
where kernels are deterministic."""

from __future__ import annotations

import gc
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import recordings
import torch
import worlds
from arms import Stage
from processes import assert_same_run, finished, last_step, records, training_steps, weights
from recordings import LORA
from safetensors.torch import load
from torch import Tensor

from sameday.hardware import graphs
from sameday.hardware.graphs import GraphMemory, Launched, Recorded
from sameday.hardware.kernels import without_flash
from sameday.hardware.machine import detect_machine, set_deterministic
from sameday.hardware.ranks import Ranks
from sameday.kernels.dropout import dropouts
from sameday.models import features
from sameday.spec.document import dump_yaml
from sameday.spec.plan import Plan
from sameday.tasks.vqa import recorded
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps
from sameday.verify.trace import Trace

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not CUDA or without_flash(detect_machine("cuda"), "bf16") is not None,
    reason="records CUDA graphs, of flash attention among others: needs a GPU that has it",
)
FP8 = CUDA and torch.cuda.get_device_capability() >= (8, 9)
PLAN = recordings.PLAN | {"optimizer_impl": "fused", "cuda_graphs": True}
RECIPE = recordings.LONG | {"precision": "bf16"}
COMPILED = {"compile": "layers", "pad_to_multiple": 32}
KERNELS = {"attention": "fused", "lora_kernel": "triton"}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(True)
    yield
    set_deterministic(False)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With forks, groups without, questions alone, and images of two sizes."""
    folder = tmp_path_factory.mktemp("world")
    return worlds.write_world(folder, 4, (6, 5, 1, 6, 2), sizes=recordings.SIZES)


def make(tiny_qwen3: Path, world: Path, plan: dict[str, Any], recipe: dict[str, Any] | None = None) -> VqaTask:
    task = worlds.make_task(
        world, worlds.tiny_recipe(tiny_qwen3, **RECIPE | (recipe or {})), Plan(**PLAN | plan), "cuda"
    )
    worlds.stir(task)
    task.training(True)
    return task


def learned(task: VqaTask, steps: range, stepped: Steps | None = None) -> list[Tensor]:
    """Of each step all gradients and the loss."""
    return [after.gradients.buffer.clone() for after in recordings.computed(task, steps, stepped)]


def distance(found: list[Tensor], other: list[Tensor]) -> float:
    return float(torch.stack(found).sub(torch.stack(other)).norm() / torch.stack(other).norm())


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        pytest.param({}, {}, id="eager"),
        pytest.param({"checkpointing": "full"}, {}, id="recomputed"),
        pytest.param({"checkpointing": "selective"}, {}, id="recomputed in part"),
        pytest.param(COMPILED | {"checkpointing": "selective"}, {}, id="compiled, recomputed in part"),
        pytest.param({"label_only_logits": False, "token_budget": 150}, {}, id="all logits, several to a step"),
        pytest.param({}, {"lora": LORA | {"dora": True}}, id="dora"),
        pytest.param(COMPILED, {}, id="compiled"),
        pytest.param({"attention": "fused"}, {}, id="fused"),
        pytest.param(COMPILED | {"attention": "fused", "checkpointing": "selective"}, {}, id="fused, compiled"),
        pytest.param(COMPILED | KERNELS, {}, id="fused, LoRA's kernels, compiled"),
        pytest.param({"embeddings_on": "host"}, {}, id="embeddings on the host"),
        pytest.param(
            COMPILED | {"checkpointing": "full"},
            {"base_format": "fp8"},
            id="compiled, fp8",
            marks=pytest.mark.skipif(not FP8, reason="needs a GPU that multiplies in fp8"),
        ),
    ],
)
def test_recorded_is_launched_to_the_bit(
    tiny_qwen3: Path, world: Path, plan: dict[str, Any], recipe: dict[str, Any]
) -> None:
    """Each shape with several micro-batches, masks drawn anew in each; and near what is not padded."""
    task, steps = make(tiny_qwen3, world, plan, recipe), range(9)
    found = learned(task, steps)
    at_targets = task.read_at(next(iter(task.batches(0, None, Ranks())))) is not None
    assert at_targets == task.plan.label_only_logits, "its last layer's MLP, in all but one"
    kinds = {type(program.passes) for program in task.recorder._made.values()}
    assert kinds == {Recorded} and len(task.recorder._made) < len(steps), "each shape is recorded, and some come again"
    task.recorder.records = False
    launched = learned(task, steps)
    assert {type(program.passes) for program in task.recorder._made.values()} == {Launched}
    for number, (one, other) in enumerate(zip(found, launched, strict=True)):
        assert torch.equal(one, other), number
    task.plan = task.plan.model_copy(update={"cuda_graphs": False})
    task.recorder.forget()
    plain = learned(task, steps)
    assert not task.recorder._made and all(batch.shape is None for batch in task.batches(0, None, Ranks()))
    assert len(plain) == len(found) and all(gradients.any() for gradients in plain)
    # It may be none: padding need not change a bit.
    assert distance(found, plain) < (0.2 if recipe.get("base_format") else 0.05)


def test_features_that_stay_in_memory_are_read_by_recordings(
    tiny_qwen3: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "LEFT", 0.0)  # other processes may have most of the memory
    task, steps = make(tiny_qwen3, world, {"keep_features": True, "deterministic": True}), range(9)
    made, memory = learned(task, steps), task.model.memory
    assert memory is not None and not len(memory), "nothing before it is known what steps need"
    assert task.warmed_up() is not None
    filling = learned(task, steps)
    with patch.object(task.model, "image_features", side_effect=AssertionError("the tower computes")):
        kept = learned(task, steps)
    there = len(memory)
    assert there > 1 and task.let_go() == f"features of {there} images (0.0 GiB)" and not len(memory)
    again = learned(task, steps)
    assert {type(program.passes) for program in task.recorder._made.values()} == {Recorded}
    for number, each in enumerate(zip(made, filling, kept, again, strict=True)):
        assert all(torch.equal(each[0], other) for other in each[1:]), number


def test_dropout_that_is_turned_off_drops_in_no_recording(tiny_qwen3: Path, world: Path) -> None:
    """Nor is it missing from one when it is on again, with gradients where they were."""
    task = make(tiny_qwen3, world, {})
    stepped = Steps(task.recipe, task.plan, task, Ranks())

    def each_way() -> list[list[Tensor]]:
        found = []
        for on in (True, False, True):
            for layer in dropouts(task.module()):
                layer.train(on)
            found.append(learned(task, range(3), stepped))
        return found

    found = each_way()
    assert {type(program.passes) for program in task.recorder._made.values()} == {Recorded}
    task.recorder.forget()
    task.recorder.records = False
    for one, other in zip(found, each_way(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert distance(found[1], found[0]) > 0.01 and distance(found[2], found[0]) == 0


def test_shapes_share_memory(tiny_qwen3: Path, world: Path) -> None:
    """From the second pass on nothing more is taken, whatever order the shapes come in."""
    task = make(tiny_qwen3, world, {})
    stepped = Steps(task.recipe, task.plan, task, Ranks())
    first = learned(task, range(8), stepped)
    learned(task, range(8), stepped)
    held = torch.cuda.memory_reserved()
    assert len(task.recorder._made) > 1
    for order in (range(7, -1, -1), range(8)):
        found = learned(task, order, stepped)
    assert torch.cuda.memory_reserved() <= held
    assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True))


def test_a_recording_is_not_held_beside_its_warm_up() -> None:
    """Nor do smaller ones take memory of their own."""
    size = 2**26
    weight = torch.ones((), device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    data = torch.rand(size // 4, device="cuda")

    def run(count: int) -> tuple[Tensor, Tensor]:
        x = data[:count] * weight
        for _ in range(8):  # each keeps its input
            x = x.sin()
        return x.sum(), x.detach()[:1].clone()

    gc.collect()
    torch.cuda.empty_cache()
    before, memory = torch.cuda.memory_reserved(), GraphMemory()
    largest = Recorded(lambda: run(len(data)), [weight], memory)
    held = torch.cuda.memory_reserved()
    assert 8 * size <= held - before <= 15 * size, "once, with what the backward pass takes besides"
    smaller = Recorded(lambda: run(len(data) // 2), [weight], memory)
    assert torch.cuda.memory_reserved() - held <= size // 2
    for each in (largest, smaller, largest):
        weight.grad.zero_()
        loss, *_ = each()
        loss.backward()
        assert loss > 0 and weight.grad != 0


def test_memory_that_runs_out_while_recording(
    tiny_qwen3: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a recording: what is recorded stays, the rest is launched, and nothing is lost."""
    task, run, tries = make(tiny_qwen3, world, {}), recorded._Program.run, []

    def short(program: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and task.recorder._made:
            tries.append(1)
            torch.empty(2**45, device="cuda")
        return run(program)

    with patch.object(recorded._Program, "run", short):
        found = learned(task, range(8))
    kinds = [type(program.passes) for program in task.recorder._made.values()]
    assert kinds[0] is Recorded and set(kinds[1:]) == {Launched} and not len(tries) % 2
    assert 2 <= len(tries) < 2 * len(kinds), "each twice, and what is as large as one that failed never"
    assert capsys.readouterr().err.count("cuda_graphs: out of memory") == 1
    task.recorder.forget()
    for one, other in zip(learned(task, range(8)), found, strict=True):
        assert torch.equal(one, other)
    assert {type(program.passes) for program in task.recorder._made.values()} == {Recorded}


def test_what_cannot_be_recorded_is_launched(tiny_qwen3: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever breaks a recording: here the host wants a number that is not there before the kernels run."""
    task, run = make(tiny_qwen3, world, {}), recorded._Program.run

    def asks(program: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and task.recorder._made:
            torch.rand(1, device="cuda").item()
        return run(program)

    with patch.object(recorded._Program, "run", asks):
        found = learned(task, range(8))
    kinds = [type(program.passes) for program in task.recorder._made.values()]
    assert kinds[0] is Recorded and len(kinds) > 2 and set(kinds[1:]) == {Launched}
    said = capsys.readouterr().err
    assert said.count(" tokens could not be recorded (") == 1 and "): it is launched" in said
    # What a recording holds while it goes on is free again: random numbers, and memory for other recordings.
    assert torch.rand(2, device="cuda").unique().numel() == 2
    task.recorder.forget()
    task.recorder.records = True
    for one, other in zip(learned(task, range(8)), found, strict=True):
        assert torch.equal(one, other)
    assert {type(program.passes) for program in task.recorder._made.values()} == {Recorded}


def test_kernels_that_were_recorded_are_not_launched_for_nothing(tiny_qwen3: Path, world: Path) -> None:
    """What they are recorded for afterwards equals what is launched, as everywhere here."""
    task = make(tiny_qwen3, world, COMPILED | KERNELS)
    with patch.object(graphs, "_warm_up", wraps=graphs._warm_up) as first:
        found = learned(task, range(12))
    shapes = [name[0] for name in task.recorder._made]
    assert len({recorded._there(shape) for shape in shapes}) <= first.call_count < len(shapes)
    task.recorder.forget()
    task.recorder.records = False
    assert all(torch.equal(one, other) for one, other in zip(learned(task, range(12)), found, strict=True))


def test_a_recording_that_misses_its_warm_up_gets_it() -> None:
    """Here a number that the host reads once, when it is first needed, which a recording cannot do. What the recording
    that broke had taken is given back with the rest, and the same memory is recorded to afterwards."""
    size = 2**26
    data = torch.ones(size // 4, device="cuda")
    weight = torch.full((), 3.0, device="cuda", requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    factor: list[float] = []

    def run() -> tuple[Tensor, Tensor]:
        x = data * weight
        if not factor:
            factor.append(torch.full((), 5.0, device="cuda").item())
        x = (x * factor[0]).mean()
        return x, x.detach().clone()

    gc.collect()
    torch.cuda.empty_cache()
    before, memory = torch.cuda.memory_reserved(), GraphMemory()
    whys: list[str] = []
    pools, record = [memory.pool], Recorded._record

    def tried(made: Recorded, run: Any, memory: GraphMemory, warm: bool) -> list[Tensor]:
        try:
            return record(made, run, memory, warm)
        except RuntimeError as error:
            whys.append(str(error).partition("\n")[0])
            raise
        finally:
            pools.append(memory.pool)

    with (
        patch.object(graphs, "_leave", wraps=graphs._leave) as left,
        patch.object(graphs, "_warm_up", wraps=graphs._warm_up) as warmed,
        patch.object(Recorded, "_record", tried),
    ):
        try:
            made = Recorded(run, [weight], memory, known=True)
        except graphs.NotRecorded:
            pytest.fail(f"{whys}, {left.call_count} of them left, in pools {pools}")
    assert (len(whys), left.call_count, warmed.call_count) == (1, 1, 1), whys
    left.reset_mock()  # which holds the memory
    again = Recorded(run, [weight], memory, known=True)
    assert memory.pool == pools[-1] != pools[0], "one that broke is not recorded to again"
    for each in (made, again):
        weight.grad.zero_()
        loss, *_ = each()
        loss.backward()
        assert factor == [5.0] and loss.item() == 15 and weight.grad.item() == 5
    assert torch.cuda.memory_reserved() - before >= size
    del made, again, each, loss, memory, left, _
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < size


def test_a_loss_that_somebody_keeps_does_not_end_a_recording(tiny_qwen3: Path, world: Path) -> None:
    """As the loop keeps the last micro-batch's; one that was launched has nodes of another stream."""
    task = make(tiny_qwen3, world, {})
    stepped = Steps(task.recipe, task.plan, task, Ranks())
    kept, given_back = [], 0
    for step in range(8):
        for batch in task.batches(step, None, Ranks()):
            moved = batch.to(task.device)
            for each in (moved, type(moved)(**vars(moved) | {"shape": None})):
                loss, _ = task.loss_sum(each, step)
                loss.backward()
                kept.append(loss)
                given_back += 1
    assert given_back == len(kept) and stepped.gradients.norm() > 0
    assert {type(program.passes) for program in task.recorder._made.values()} == {Recorded}


def test_a_run_that_is_killed_and_resumed_is_the_plain_plans_up_to_rounding(
    tmp_path: Path, tiny_qwen3: Path, world: Path
) -> None:
    """As `sameday verify` compares it with the plain plan: every step, a kill, a resume."""
    stage = Stage(tmp_path, world, worlds.tiny_recipe(tiny_qwen3, **RECIPE), steps=8, device="cuda")
    plan = Plan(**PLAN, deterministic=True)
    found = stage.compare(plan)
    assert found.same, "\n".join(map(str, found.differences))
    ran, every = Trace(stage.job("plan", plan).out).recorded
    assert 0 < ran <= every


KILLED = """\
\"\"\"`sameday train` of a process that is killed when it comes to a step, counted from 0.\"\"\"
import os
import signal
import sys

from sameday.cli import main
from sameday.train.steps import Steps

launch = Steps.launch


def launched(steps, step, *how):
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    launch(steps, step, *how)


Steps.launch = launched
sys.exit(main())
"""


def sets_of(plan: Plan) -> list[str]:
    """All of its fields, so that none is chosen for what else is on the GPU."""
    return [f"plan.{name}={json.dumps(value)}" for name, value in plan.model_dump(mode="json").items()]


@pytest.mark.parametrize(
    "plan", [pytest.param({}, id="eager"), pytest.param(COMPILED | KERNELS, id="fused, LoRA's kernels, compiled")]
)
def test_a_run_that_is_killed_and_resumed_ends_in_the_same_bits(
    tmp_path: Path, tiny_qwen3: Path, plan: dict[str, Any]
) -> None:
    """Each process records by itself. Killed in an epoch, and resumed in the middle of it, when features of all images
    were in memory; dropout is on. Without a GPU `test_vqa_recorded.py` does the same."""
    folder = worlds.write_world(tmp_path, 4, (6, 5, 1, 6, 2), sizes=recordings.SIZES)
    recipe = worlds.tiny_recipe(tiny_qwen3, **RECIPE | {"num_epochs": 8})
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    how = {"deterministic": True, "keep_features": True, "device": "cuda"}
    sets = sets_of(Plan(**PLAN | plan | how, save_steps=7, eval_steps=None))
    whole = finished(folder, *sets, out="whole")
    (folder / "killed.py").write_text(KILLED.format(step=13))
    killed = finished(folder, *sets, out="killed", script=folder / "killed.py", code=-signal.SIGKILL)
    assert last_step(folder / "killed") < training_steps(folder / "whole")[-1] == 40
    resumed = finished(folder, *sets, out="killed")
    assert "resumed from step-000007" in resumed.stdout, "an epoch has five"
    for process in (whole, killed, resumed):
        assert re.search(r"recorded \d+ size", process.stdout) and "keep_features: up to" in process.stdout
        assert "cuda_graphs: " not in process.stderr, "all that has a shape is recorded"
    assert records(folder / "killed") == records(folder / "whole")
    (content,), (wanted,) = weights(folder / "killed").values(), weights(folder / "whole").values()
    found = load(content)
    assert recipe.dropout and all(torch.equal(found[name], value) for name, value in load(wanted).items())
    assert_same_run(folder / "killed", folder / "whole")
