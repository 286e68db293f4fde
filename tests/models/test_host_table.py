"""A table of embeddings in the host's memory gives the same bits as one on the device, and takes no room there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from worlds import FAMILIES

from sameday.data.questions.batch import Batch
from sameday.hardware.machine import Machine, detect_machine, set_deterministic
from sameday.hardware.ranks import Ranks
from sameday.kernels import host_rows as kernels
from sameday.kernels.host_rows import host_rows
from sameday.models import host_table
from sameday.models.host_table import HostTable, embeddings_to_host, tables
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.automatic import low_memory
from sameday.tasks.vqa.problems import Decoder, table_problems
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
H200 = Machine("cuda", "NVIDIA H200", 140 * 2**30, 16, True, 2**17, (9, 0))
KINDS = (torch.float32, torch.bfloat16, torch.float16)


def held(table: torch.Tensor) -> torch.Tensor:
    """As the kernel can read it."""
    return table.pin_memory() if CUDA else table


@pytest.fixture(autouse=True)
def by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def table_of(rows: int, width: int, kind: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width)).to(kind)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 16, 40, 96]),
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(1,), (5,), (2, 3), (1, 8)]),
    draw=st.randoms(use_true_random=False),
)
def test_rows_are_those_of_the_table(rows: int, width: int, kind: torch.dtype, shape: Any, draw: Any) -> None:
    table = table_of(rows, width, kind)
    at = torch.tensor([draw.randrange(rows) for _ in range(torch.Size(shape).numel())]).view(shape)
    found = host_rows(held(table), at.to(DEVICE))
    assert found.device.type == DEVICE.type and torch.equal(found.cpu(), F.embedding(at, table))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_several_programs_copy(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WIDEST", 32)
    table, at = table_of(5, 72, kind), torch.tensor([[4, 0], [4, 2]])
    assert torch.equal(host_rows(held(table), at.to(DEVICE)).cpu(), table[at])
    strided = torch.stack([at, at], -1)[..., 0]
    assert not strided.is_contiguous() and torch.equal(host_rows(held(table), strided.to(DEVICE)).cpu(), table[at])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_there_is_no_number(kind: torch.dtype) -> None:
    found = host_rows(held(table_of(3, 16, kind)), torch.tensor([1, 3, -1], device=DEVICE))
    assert found[0].isfinite().all() and found[1:].isnan().all()


# In a model

PLANS: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "shared, recomputed": {"share_images": True, "packing": True, "max_questions": None, "checkpointing": "full"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("table"), 2, (3, 1), sizes=((48, 32),))


def make(world: Path, model: Path, **plan: Any) -> VqaTask:
    recipe = worlds.tiny_recipe(model, effective_batch=4, order="by_image")
    task = worlds.make_task(world, recipe, Plan(**plan), DEVICE.type)
    worlds.stir(task)
    task.training(True)
    return task


def learned(task: VqaTask) -> torch.Tensor:
    """Of a step, all gradients and the loss."""
    steps = Steps(task.recipe, task.plan, task, Ranks())
    steps.accumulate((batch.to(task.device) for batch in task.batches(0, None, Ranks())), 0)
    return steps.gradients.buffer.clone()


def first(task: VqaTask) -> Batch:
    return next(iter(task.batches(0, None, Ranks())))


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(True)
    yield
    set_deterministic(False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_has_the_same_bits(family: str, plan: str, world: Path, tmp_path: Path, deterministic: None) -> None:
    model = worlds.write_tiny(tmp_path / "model", family)
    usual, hosted = (make(world, model, **PLANS[plan], embeddings_on=where) for where in ("device", "host"))
    assert isinstance(usual.model.text.embed_tokens, nn.Embedding)
    table = hosted.model.text.embed_tokens
    assert isinstance(table, HostTable) and table.weight.device.type == "cpu" and table.weight.is_pinned() == CUDA
    found, wanted = learned(hosted), learned(usual)
    assert wanted.norm() > 1e-3 and torch.equal(found, wanted)
    assert hosted.model.base_digest == usual.model.base_digest, "it is the same base model"


def test_a_table_that_holds_other_numbers_is_noticed(tiny_qwen3: Path, world: Path) -> None:
    usual, hosted = (make(world, tiny_qwen3, embeddings_on=where) for where in ("device", "host"))
    hosted.model.text.embed_tokens.weight[first(hosted).tokens[0, 0]] += 0.5
    assert not torch.equal(learned(hosted), learned(usual))


def test_it_stays_on_the_host_and_is_nothing_that_is_saved(tiny_qwen3: Path, world: Path, tmp_path: Path) -> None:
    usual, hosted = (make(world, tiny_qwen3, embeddings_on=where) for where in ("device", "host"))
    names = dict(usual.module().named_parameters()).keys() - dict(hosted.module().named_parameters()).keys()
    assert [name.rpartition("embed_tokens")[1:] for name in names] == [("embed_tokens", ".weight")]
    assert tables(hosted.module()).keys() == names and not tables(usual.module()), "by this name verify looks at it"
    table = hosted.model.text.embed_tokens.weight
    moved = hosted.module().to(torch.float64)
    assert hosted.model.text.embed_tokens.weight is table and table.dtype is torch.float32 and moved is not None
    for name, task in (("usual", usual), ("hosted", make(world, tiny_qwen3, embeddings_on="host"))):
        task.model.save(tmp_path / name)
    saved = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("usual", "hosted")]
    assert saved[0] == saved[1]
    make(world, tiny_qwen3, embeddings_on="host").model.restore(tmp_path / "usual")


@pytest.mark.skipif(not CUDA, reason="needs a GPU's memory")
def test_it_takes_no_room_on_a_gpu(world: Path, tmp_path: Path) -> None:
    model, taken = worlds.write_tiny(tmp_path / "model", text={"hidden_size": 2048}), {}
    for where in ("device", "device", "host"):  # the first time a process takes what it needs once
        before = allocated()
        task = make(world, model, embeddings_on=where)
        taken[where] = allocated() - before
        rows = task.model.text.embed_tokens.weight
        del task
    spared = taken["device"] - taken["host"]
    assert spared > rows.nbytes / 2, "libraries keep memory of their own, less than that"


def allocated() -> int:
    """By what is still needed: tensors of an earlier test may wait for the garbage collection."""
    gc.collect()
    return torch.cuda.memory_allocated()


# What is refused, and where it is chosen

TIED = Decoder(own_head=False)


def said(machine: Machine, decoder: Decoder = Decoder(), **recipe: Any) -> list[str]:  # noqa: B008 (a tuple)
    asked = worlds.tiny_recipe(Path("model"), **recipe)
    return list(table_problems(Plan(embeddings_on="host"), asked, machine, lambda: decoder))


def test_where_it_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked, allowed = "plan.embeddings_on host", "; allowed: device"
    assert said(H200) == []
    assert said(detect_machine("cpu")) == [f"{asked} spares a GPU's memory, and there is no GPU{allowed}"]
    assert said(replace(H200, triton=False)) == [f"{asked} needs Triton, which is not installed{allowed}"]
    assert said(H200, train="all") == [f"{asked} is for a table that is not trained, and recipe.train is all{allowed}"]
    assert said(H200, TIED) == [
        f"{asked} is for models whose head has weights of its own, and this one's are the table{allowed}"
    ]
    assert list(table_problems(Plan(), worlds.tiny_recipe(Path("model")), detect_machine("cpu"))) == []


def test_a_model_whose_head_is_its_table_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model = worlds.write_tiny(tmp_path / "model", "gemma3")
    setup = VqaSetup(worlds.tiny_recipe(model), tmp_path)
    for refuse in (setup.check_plan, setup.resolve_auto):
        with pytest.raises(BadInput, match=r"plan\.embeddings_on host is for models whose head has weights of its own"):
            refuse(Plan(embeddings_on="host"), H200)
    assert ("embeddings_on", "host") in setup.cannot(H200)


def test_what_is_found_out_when_it_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Embedding):
        pass

    text, head = nn.Module(), nn.Linear(4, 8, bias=False)
    text.embed_tokens = nn.Embedding(8, 4)
    head.weight = text.embed_tokens.weight
    with pytest.raises(BadInput, match="this model computes with its table of embeddings; allowed: device"):
        embeddings_to_host(text, head, DEVICE)
    text.embed_tokens = Scaled(8, 4)
    with pytest.raises(BadInput, match="this model computes with its table of embeddings; allowed: device"):
        embeddings_to_host(text, head, DEVICE)

    def none_left(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nand more")

    text.embed_tokens = nn.Embedding(8, 4)
    monkeypatch.setattr(host_table.torch, "empty", none_left)
    with pytest.raises(BadInput, match=r"0\.0 GiB of page-locked memory cannot be had: CUDA error: out of memory; all"):
        embeddings_to_host(text, head, DEVICE)


def test_a_plan_of_low_memory_has_it_where_it_can_be(tiny_qwen3: Path, tmp_path: Path) -> None:
    recipe = worlds.tiny_recipe(tiny_qwen3, precision="bf16")
    setup = VqaSetup(recipe, tmp_path)
    plan, _ = setup.choose_plan(H200, 1)
    less = low_memory(plan, recipe, H200, setup._decoder)
    assert (plan.embeddings_on, less.embeddings_on) == ("device", "host")
    setup.check_plan(less, H200)
    for machine, decoder in ((H200, TIED), (replace(H200, triton=False), Decoder())):
        assert low_memory(plan, recipe, machine, lambda decoder=decoder: decoder).embeddings_on == "device"
    assert setup.for_evaluation(less).embeddings_on == "device", "it is evaluated on any machine"
