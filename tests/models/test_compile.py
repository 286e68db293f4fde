"""Compiled layers: a graph serves every layer, length and number of images, and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch
import worlds
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import pad_mm
from torch._inductor.utils import fresh_cache
from worlds import FAMILIES, SQUARE

from sameday.hardware.machine import detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models import vlm
from sameday.models.layers import compile_layers
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

PLAN = {"share_images": True, "packing": True, "max_questions": None, "attention": "split", "token_budget": 300}
LAYERS, BLOCKS = 10, 5


def gradient(task: VqaTask, step: int) -> torch.Tensor:
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    steps.accumulate(task.batches(step, None, Ranks()), step)
    return steps.gradients.all.clone()


def also_by_hand(family: str) -> list[pytest.MarkDecorator]:
    """Families whose layers are built as another's are: their graphs are counted by hand."""
    return [pytest.mark.soak] if family in ("qwen2_vl", "llava") else []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds", "checkpointing"),
    [
        *(pytest.param(family, 1, "none", marks=also_by_hand(family)) for family in FAMILIES),
        *(pytest.param(family, 2, "none", marks=also_by_hand(family)) for family in SQUARE),
        ("qwen3_vl", 1, "selective"),
    ],
)
def test_graphs_are_shared_by_all_layers(
    tmp_path: Path, family: str, kinds: int, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kinds`: graphs of the tower; where images are whole squares, one image is a graph of its own."""
    # The graphs are what is tested; which backend turns them into kernels is not.
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    worlds.write_world(tmp_path, 3, (9, 1, 5, 3, 7))
    square = family in worlds.SQUARE
    sizes = {"text": {"num_hidden_layers": LAYERS}, "vision": {} if square else {"depth": BLOCKS}}
    model = worlds.write_tiny(tmp_path / family, family, **sizes)
    lora = {"r": 4, "alpha": 8, "dropout": 0.1} | ({"target_modules": worlds.OF_THE_DECODER} if square else {})
    recipe = worlds.tiny_recipe(model, order="by_image", effective_batch=8, lora=lora)
    plan = PLAN | ({"attention": "sdpa"} if family == "gemma3" else {}) | {"checkpointing": checkpointing}
    tasks = [worlds.make_task(tmp_path, recipe, Plan(**plan, compile=how)) for how in ("layers", "none")]
    for task in tasks:
        worlds.stir(task)
    for step in range(tasks[0].steps_per_epoch()):
        compiled, plain = (gradient(task, step) for task in tasks)
        assert (compiled - plain).norm() <= 1e-6 * plain.norm(), step
        # All layers, the tower's blocks: with the first step, and never again.
        assert counters["stats"]["unique_graphs"] == 1 + kinds, step
    scores = [task.evaluate("val", Ranks()) for task in tasks]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)
    assert counters["stats"]["unique_graphs"] == 2 + kinds
    assert not counters["graph_break"]


def test_layers_before_the_first_that_is_trained_have_no_gradient(tmp_path: Path, two_layers: Path) -> None:
    worlds.write_world(tmp_path, 3, (2, 1))
    recipe = worlds.tiny_recipe(two_layers, order="by_image")
    found = []
    for how, frozen in (("none", False), ("layers", False), ("layers", True)):
        task = worlds.make_task(tmp_path, recipe, Plan(**PLAN, compile=how))
        for parameter in task.model.text.layers[0].parameters() if frozen else ():
            parameter.requires_grad_(False)
        found.append(task.model.alike_from)
    assert found == [None, 0, 1]


@pytest.mark.soak
@functorch.patch(activation_memory_budget=1.0)
def test_compiled_layers_keep_a_share_of_their_activations_and_compute_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a backend that divides graphs into forward and backward as on a GPU, and computes them as eager does."""
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    worlds.write_world(tmp_path, 3, (9, 1, 5))
    model = worlds.write_tiny(tmp_path / "model", text={"num_hidden_layers": 2}, vision={"depth": 1})
    lora = {"r": 4, "alpha": 8, "dropout": 0.1}
    recipe = worlds.tiny_recipe(model, order="by_image", effective_batch=8, lora=lora)
    kept, gradients = [], []
    for share in (1.0, 0.2):
        plan = Plan(**PLAN, compile="layers", activation_budget=share, device="cpu")
        task = worlds.make_task(tmp_path, recipe, plan)
        worlds.stir(task)
        held: dict[int, int] = {}

        def hold(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            gradients.append(gradient(task, 0))
        weights = {each.untyped_storage().data_ptr() for each in task.module().parameters()}
        kept.append(sum(size for where, size in held.items() if where not in weights))
    assert (gradients[1] - gradients[0]).norm() <= 1e-6 * gradients[0].norm()
    assert kept[1] < 0.5 * kept[0], kept


def test_only_compiled_layers_have_a_budget(tmp_path: Path, tiny_qwen3: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(tiny_qwen3), tmp_path)
    machine = detect_machine("cpu")
    setup.check_plan(Plan(activation_budget=0.5, compile="layers"), machine)
    with pytest.raises(
        BadInput, match=r"plan\.activation_budget 0\.5 is for compiled layers: set plan\.compile layers"
    ):
        setup.check_plan(Plan(activation_budget=0.5), machine)


class Adapted(nn.Module):
    """As much of a layer with an adapter as matmuls are asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
def test_as_many_tokens_as_a_layer_is_wide_are_no_graph_of_their_own(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Where torch weighs whether to pad the adapter's matmuls, it compares their sizes: 2.11 makes other graphs then.
    Left to itself it weighs, which shows that this test would see it."""
    asked = []

    def weigh(m: int, k: int, n: int, _dtype: torch.dtype) -> bool:
        asked.append((m, k, n))
        return bool(k > m and k > n) and False

    gpu = torch.cuda.is_available()
    monkeypatch.setattr(pad_mm, "is_mm_compute_bound", weigh)
    if not gpu:
        monkeypatch.setattr(pad_mm, "check_device", lambda _a, _b: True)
        monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    torch._dynamo.reset()
    counters.clear()
    layer = Adapted().to("cuda" if gpu else "cpu", torch.bfloat16)
    with fresh_cache():  # what was compiled before is not asked about
        if ours:
            compile_layers([layer], "inductor", 1.0)
        else:
            layer.compile(dynamic=True)
        for tokens in (32, 64, 96):
            x = torch.ones(tokens, 64, device=layer.up.weight.device, dtype=torch.bfloat16)
            layer(x).sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    assert (asked == [] and graphs == 1) if ours else asked
