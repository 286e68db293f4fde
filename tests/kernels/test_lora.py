"""LoRA's kernels against PEFT's own modules: outputs and all gradients, masks to the bit, at shapes that leave
remainders of every tile; and a model that is trained with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from sameday.hardware.machine import detect_machine
from sameday.hardware.ranks import Ranks
from sameday.kernels import lora, lora_launch
from sameday.kernels.dropout import DropoutKeys, ImageKeys, KeyedDropout
from sameday.kernels.lora_launch import Launch, Tiles
from sameday.models import lora_kernel, vlm
from sameday.models.adapters import _PaddedDown, pad_ranks, prepare_adapters
from sameday.models.families import family_of
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROWS, WIDTH = 40, 40
SMALL = Tiles(
    down=Launch(32, 16, 4, 1, 2),
    up=Launch(32, 32, 4, 1),
    up_back=Launch(16, 32, 4, 1, 2),
    down_back=Launch(16, 32, 4, 1, 2),
    total=512,
)
"""Several tiles, steps of a loop and parts of a sum even here."""
LARGE = Tiles(*[Launch(512, 64, 4, 1)] * 4, total=4096)
"""Few programs: it is their number that takes the interpreter long. No GPU has room for such tiles."""
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no bf16, and is slow")


class Layers:
    """Layers that share their input, as PEFT computes them: a base layer and A, B and a scale of any rank beside it."""

    def __init__(self, ranks: Sequence[int], outputs: Sequence[int], dropout: float, kind: torch.dtype) -> None:
        torch.manual_seed(0)
        self.keys = DropoutKeys()
        self.keys.set(torch.arange(7, 7 + ROWS, dtype=torch.int32, device=DEVICE)[None], 0, 0)
        self.drops = [KeyedDropout(dropout, f"layer {i}", WIDTH, self.keys).to(DEVICE) for i in range(len(ranks))]
        made: dict[str, Any] = {"device": DEVICE, "dtype": kind}
        self.base = [nn.Linear(WIDTH, n, **made).requires_grad_(False) for n in outputs]
        self.a = [nn.Parameter(torch.randn(r, WIDTH, **made)) for r in ranks]
        self.b = [nn.Parameter(torch.randn(n, r, **made)) for n, r in zip(outputs, ranks, strict=True)]
        self.scales = [0.5, 2.0, -1.0][: len(ranks)]
        self.x = torch.randn(1, ROWS, WIDTH, **made)
        self.weights = [torch.randn(1, ROWS, n, **made) for n in outputs]

    def plain(self, x: Tensor) -> list[Tensor]:
        each = zip(self.base, self.drops, self.a, self.b, self.scales, strict=True)
        return [base(x) + drop(x) @ a.T @ b.T * scale for base, drop, a, b, scale in each]

    def fused(self, x: Tensor) -> list[Tensor]:
        first = self.drops[0]
        each = zip(self.a, self.b, self.scales, self.drops, strict=True)
        adapters = [lora.Adapter(a, b, scale, drop.columns) for a, b, scale, drop in each]
        drop = lora.Dropped(first.p, first.threshold, self.keys.of(x.shape[:-1])) if first.p else None
        return lora.add_lora(x, [base(x) for base in self.base], adapters, drop)

    def results(self, how: Callable[[Tensor], list[Tensor]], needed: bool = True) -> list[Tensor]:
        """Outputs, and gradients of x where they are needed, and of every A and B."""
        x = self.x.clone().requires_grad_(needed)
        outputs = how(x)
        loss = sum((out * weight).sum() for out, weight in zip(outputs, self.weights, strict=True))
        wanted = [*([x] if needed else []), *self.a, *self.b]
        return [*(out.detach() for out in outputs), *torch.autograd.grad(loss, wanted)]


def assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor], limit: float) -> None:
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    assert max(apart) <= limit, apart


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_launch, "tiles", lambda _kind, _padded: SMALL)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators compute without Triton where there is no GPU: what is around them is tested, and that is slow in its
    interpreter."""
    monkeypatch.setattr(lora, "interpreted", lambda: False)


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], float, torch.dtype]] = {
    "one": ((4,), (24,), 0.0, torch.float32),
    "three of other ranks, dropout": ((3, 17, 1), (17, 33, 16), 0.3, torch.float64),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_plain_layers(case: str, small: None) -> None:
    layers = Layers(*CASES[case])
    assert_close(layers.results(layers.fused), layers.results(layers.plain), 1e-6)


@on_a_gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [4, 20, 64])
def test_the_tiles_of_a_gpu_compute_the_same(rank: int, kind: torch.dtype) -> None:
    layers = Layers((rank, 4, rank), (24, 17, 17), 0.25, kind)
    assert_close(layers.results(layers.fused), layers.results(layers.plain), 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_plain_computation_is_that_of_plain_layers(case: str, plainly: None) -> None:
    layers = Layers(*CASES[case])
    assert_close(layers.results(layers.fused), layers.results(layers.plain), 1e-6)


def test_an_input_without_gradient_leaves_the_others_as_they_are(small: None) -> None:
    layers = Layers((4,), (24,), 0.25, torch.float64)
    assert_close(layers.results(layers.fused, False), layers.results(layers.plain, False), 1e-6)


def test_the_mask_is_that_of_keyed_dropout_to_the_bit() -> None:
    """With ones as input and an identity as A, u is the mask of each layer."""
    layers = Layers((WIDTH,) * 3, (1,) * 3, 0.3, torch.float32)
    ones = torch.ones(ROWS, WIDTH, device=DEVICE)
    columns, rows = [drop.columns for drop in layers.drops], layers.keys.of(torch.Size((1, ROWS)))[0]
    eye, threshold = torch.eye(WIDTH, device=DEVICE), layers.drops[0].threshold
    masks = lora.down(ones, rows, columns, [eye] * 3, [1.0] * 3, threshold)
    assert float(masks.mean()) == pytest.approx(0.7, abs=0.05) and not masks[0].equal(masks[1])
    for mask, drop in zip(masks, layers.drops, strict=True):
        assert mask.equal((drop(ones[None])[0] != 0).float())


@on_a_gpu
def test_it_gives_the_same_bits_each_time() -> None:
    layers = Layers((4, 4, 4), (24, 17, 17), 0.25, torch.float32)
    assert all(map(torch.equal, layers.results(layers.fused), layers.results(layers.fused)))


@on_a_gpu
@pytest.mark.parametrize("rank", [4, 16, 32, 64])
def test_bf16_is_no_further_from_float64_than_plain_bf16(rank: int) -> None:
    exact = Layers((rank,) * 3, (24, 17, 17), 0.25, torch.float64)
    wanted, half = exact.results(exact.plain), Layers((rank,) * 3, (24, 17, 17), 0.25, torch.float32)
    for mine, yours in zip((*half.a, *half.b), (*exact.a, *exact.b), strict=True):
        mine.data.copy_(yours.data)
    half.x, half.weights = exact.x.bfloat16(), [weight.float() for weight in exact.weights]
    half.base = [layer.to(torch.bfloat16) for layer in exact.base]
    with torch.autocast(DEVICE, torch.bfloat16):
        fused, plain = half.results(half.fused), half.results(half.plain)
    for a, b, w in zip(fused, plain, wanted, strict=True):
        assert (a - w).norm() <= 1.1 * (b - w).norm()


# A model that is trained with them

SHARED: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None, "attention": "sdpa"}
LORA = {"r": 4, "alpha": 8, "dropout": 0.2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("lora"), 0, (3, 1), hard=False, sizes=((48, 32),))


def tasks(home: Path, model: Path, plan: dict[str, Any], **recipe: Any) -> list[VqaTask]:
    """By kernels and without them, in float64, where nothing hides behind rounding."""
    asked = worlds.tiny_recipe(model, **{"order": "by_image", "effective_batch": 4, "lora": LORA} | recipe)
    made = [worlds.make_task(home, asked, Plan(**plan, lora_kernel=kernel), DEVICE) for kernel in ("triton", "plain")]
    for task in made:
        worlds.stir(task)
        task.module().double()
    return made


def gradient(task: VqaTask) -> Tensor:
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    steps.accumulate((batch.to(task.device) for batch in task.batches(0, None, Ranks())), 0)
    return steps.gradients.all.clone()


def distance(pair: Sequence[VqaTask]) -> float:
    found, wanted = map(gradient, pair)
    assert wanted.norm() > 1e-3
    return float((found - wanted).norm() / wanted.norm())


def test_a_model_has_the_same_gradients(home: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(lora_launch, "tiles", lambda _kind, _padded: LARGE)
    lora = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj"]}
    assert distance(tasks(home, two_layers, SHARED, lora=lora)) < 1e-7


ALL_OF_IT = ["all-linear", "tower.all-linear", "projector.all-linear"]
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointing": (SHARED | {"checkpointing": "full"}, {}),
    "selective": (SHARED | {"checkpointing": "selective"}, {}),
    "padded rows, rsLoRA": ({"max_questions": 3}, {"lora": LORA | {"rslora": True}}),
    "two of an attention's layers": (SHARED, {"lora": LORA | {"target_modules": ["q_proj", "v_proj", "up_proj"]}}),
    "all layers, tower included": (SHARED, {"lora": LORA | {"target_modules": ALL_OF_IT}}),
    "base weights in fp8": (SHARED, {"base_format": "fp8"}),
    "base weights in nf4": (SHARED, {"base_format": "nf4"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_other_recipes_and_plans_have_the_same_gradients(
    name: str, home: Path, two_layers: Path, plainly: None
) -> None:
    plan, recipe = RECIPES[name]
    if "nf4" in name:
        pytest.importorskip("bitsandbytes")
    if DEVICE == "cuda" and "base_format" in recipe:
        pytest.skip("a GPU multiplies such weights in half precision, where rounding hides the rest")
    pair = tasks(home, two_layers, plan, **recipe)
    assert all(hasattr(type(module), "alone") for module in adapters(pair[0])), "none stays as PEFT computes it"
    assert distance(pair) < 1e-6


def adapters(task: VqaTask) -> list[nn.Module]:
    found = [module for module in task.module().modules() if isinstance(module, LoraLayer)]
    assert found
    return found


class Toy(nn.Module):
    """Three layers with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x) * self.k_proj(x) + self.v_proj(x)


@pytest.mark.slow
def test_layers_are_compiled_whole(plainly: None) -> None:
    names = ["q_proj", "k_proj", "v_proj"]
    model = get_peft_model(Toy(), LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    keys = DropoutKeys()
    prepare_adapters(model, family_of("qwen3_vl"), 0.3, keys, ImageKeys())
    keys.set(torch.arange(5, dtype=torch.int32)[None], 0, 0)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    trained = [parameter for parameter in model.double().parameters() if parameter.requires_grad]
    wanted = torch.autograd.grad(model(x).square().sum(), trained)
    lora_kernel.use_kernels(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.base_model.model, backend="aot_eager", fullgraph=True)
    assert_close(torch.autograd.grad(compiled(x).square().sum(), trained), wanted, 1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({}, id="all is kept", marks=pytest.mark.soak),
        pytest.param(
            {"checkpointing": "selective"}, id="selective", marks=pytest.mark.slow if CUDA else pytest.mark.soak
        ),
        pytest.param({"checkpointing": "full"}, id="full", marks=pytest.mark.soak),
        pytest.param({"activation_budget": 0.5}, id="half is kept", marks=pytest.mark.soak),
    ],
)
def test_compiled_layers_have_no_break_and_the_same_gradients(
    plan: dict[str, Any], home: Path, two_layers: Path, plainly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A backend that divides graphs into forward and backward as on a GPU, and computes them as eager does.
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert distance(tasks(home, two_layers, SHARED | {"compile": "layers"} | plan)) < 1e-6
    assert not torch._dynamo.utils.counters["graph_break"]


def test_ranks_are_not_padded_for_them(home: Path, two_layers: Path, plainly: None) -> None:
    """Compiled layers have padded matrices, which the kernels do not ask: they read the parameters."""
    pair = tasks(home, two_layers, SHARED)
    for task in pair:
        pad_ranks([task.module()])
    asked: list[VqaTask] = []
    for task in pair:
        for module in task.module().modules():
            if isinstance(module, _PaddedDown):
                module.register_forward_hook(lambda *_, task=task: asked.append(task))
    assert distance(pair) < 1e-6
    assert asked == [pair[1]] * len(adapters(pair[1]))


def test_layers_with_one_input_are_computed_together(
    home: Path, two_layers: Path, plainly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, groups = lora_kernel.add_lora, []

    def counted(x: Tensor, outputs: Any, adapters: Any, drop: Any) -> list[Tensor]:
        groups.append(len(adapters))
        return add(x, outputs, adapters, drop)

    monkeypatch.setattr(lora_kernel, "add_lora", counted)
    task = tasks(home, two_layers, SHARED)[0]
    gradient(task)
    assert groups == [3, 1, 3, 1]
    with torch.no_grad():
        task.evaluate("val", Ranks())
    assert groups == [3, 1, 3, 1], "without gradients layers stay as they are"


def test_chain_of_thought_has_the_same_gradients(home: Path, two_layers: Path, plainly: None) -> None:
    recipe = worlds.cot_recipe(two_layers, effective_batch=4, lora=LORA)
    pair = [worlds.make_cot(home, recipe, Plan(**SHARED, lora_kernel=kernel), DEVICE) for kernel in ("triton", "plain")]
    for task in pair:
        worlds.stir(task)
        task.module().double()
    assert all(hasattr(type(module), "alone") for module in adapters(pair[0]))
    assert distance(pair) < 1e-6


def test_the_mask_of_another_layer_is_found(
    home: Path, two_layers: Path, plainly: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = lora_kernel.add_lora

    def mistaken(x: Tensor, outputs: Any, adapters: Any, drop: Any) -> list[Tensor]:
        return add(x, outputs, [each._replace(columns=adapters[0].columns) for each in adapters], drop)

    monkeypatch.setattr(lora_kernel, "add_lora", mistaken)
    assert distance(tasks(home, two_layers, SHARED)) > 1e-2


REFUSED = {
    "train": ({"train": "all"}, r"plan\.lora_kernel triton is for adapters, and recipe\.train is all; allowed: plain"),
    "dora": ({"lora": LORA | {"dora": True}}, r"does not compute DoRA, and recipe\.lora\.dora is true; allowed: plain"),
    "rank": ({"lora": LORA | {"r": 65}}, r"has tiles for ranks up to 64, and recipe\.lora\.r is 65; allowed: plain"),
    "precision": ({"precision": "bf16"}, r"has no bf16 in Triton's interpreter; allowed there: float32, or plain"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_cannot_do_is_refused(
    name: str, tmp_path: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recipe, said = REFUSED[name]
    setup, machine = VqaSetup(worlds.tiny_recipe(two_layers, **recipe), tmp_path), detect_machine("cpu")
    for refuse in (setup.check_plan, setup.resolve_auto):
        with pytest.raises(BadInput, match=said):
            refuse(Plan(lora_kernel="triton"), machine)
    assert ("lora_kernel", "triton") in setup.cannot(machine)


def test_they_need_triton_and_are_tried_where_it_is(
    tmp_path: Path, two_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    setup, machine = VqaSetup(worlds.tiny_recipe(two_layers), tmp_path), detect_machine("cpu")
    with pytest.raises(BadInput, match=r"plan\.lora_kernel triton needs Triton, which there is not on a CPU"):
        setup.check_plan(Plan(lora_kernel="triton"), machine)
    gpu = replace(machine, device="cuda", triton=True, capability=(9, 0))
    setup.check_plan(Plan(lora_kernel="triton"), gpu)
    assert "lora_kernel" in [choice.name for choice in setup.choices(gpu)]
    assert "lora_kernel" not in [choice.name for choice in setup.choices(machine)]
