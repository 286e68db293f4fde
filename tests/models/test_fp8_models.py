"""A base model in fp8: which layers, in every family; computed as with those weights; saved, resumed, evaluated, merged
and handed over as the model that was trained; plans of it agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arms import Stage
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText
from typed import refused, sameday, scores_in, write_recipe
from worlds import FAMILIES, SQUARE, make_task, readme_logits, stir, tiny_recipe, write_tiny, write_world

from sameday.hardware.machine import Machine
from sameday.hardware.peaks import Peaks
from sameday.hardware.ranks import Ranks
from sameday.kernels import fp8
from sameday.models.fp8 import Fp8Linear, fp8_layers
from sameday.models.handover import ROUNDED_TO_FP8
from sameday.models.start import ORIGIN
from sameday.models.vlm_flops import needed
from sameday.profile.floor import bound, matmul_seconds
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.base import StepCost
from sameday.tasks.vqa.automatic import choose_plan, language_bytes
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.vqa.words import recipe_words
from sameday.train.steps import Steps
from sameday.verify.arm import start_weights

pytestmark = pytest.mark.slow

FP8 = {"base_format": "fp8"}
SHARED = {"share_images": True, "packing": True, "max_questions": None, "token_budget": 400}
LAYER = "model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A world and a model for bf16 on a CPU that has none."""
    root = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    vision = sizes | {"depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0], "out_hidden_size": 32}
    text = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = write_tiny(root / "model", text=text, vision=vision)
    return write_world(root / "world", 3, counts=(2, 1), hard=False, sizes=((32, 32), (32, 48))), model


def recipe_of(small: tuple[Path, Path], precision: str = "float32", **more: Any) -> Any:
    return tiny_recipe(small[1], order="by_image", effective_batch=2, precision=precision, **(FP8 | more))


def gradient(task: VqaTask, step: int = 0) -> Tensor:
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    steps.accumulate(task.batches(step, None, Ranks()), step)
    return steps.gradients.all.clone()


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def in_fp8(task: VqaTask) -> dict[str, Fp8Linear]:
    return {n: m for n, m in task.model.module.named_modules() if isinstance(m, Fp8Linear)}


# Which layers


@pytest.mark.parametrize("family", [*FAMILIES, *SQUARE])
def test_linear_layers_of_decoder_and_tower(tiny_models: dict[str, Path], family: str) -> None:
    """And not embeddings, head, norms and the patch embedding, nor what fp8 matmuls have no shape for. The lines of the
    README round the same layers to the same weights."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_models[family], dtype=torch.bfloat16)
    odd = nn.Linear(24, 16, dtype=torch.bfloat16)
    model.model.odd = odd
    names = fp8_layers(model)
    linear = {n for n, m in model.named_modules() if type(m) is nn.Linear}
    fit = {n for n in linear if not any(size % 16 for size in model.get_submodule(n).weight.shape)}
    assert "lm_head" in linear and set(names) == fit - {"lm_head"}
    decoder = {n for n in linear if ".layers." in n and "language_model" in n}
    tower = {n for n in linear if "vis" in n}
    assert decoder and decoder <= set(names) and tower & set(names) and "model.odd" not in names
    before = {n: p.clone() for n, p in model.named_parameters()}
    exec(ROUNDED_TO_FP8, {"model": model, "torch": torch})
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        expected = before[name]
        if layer in names:
            codes, scale = fp8.quantize(expected)
            expected = fp8.dequantize(codes, scale[:, 0], torch.bfloat16)
            assert not torch.equal(expected, before[name])
        assert torch.equal(parameter, expected), name


def test_what_is_loaded_and_said(small: tuple[Path, Path]) -> None:
    task = make_task(small[0], recipe_of(small, "bf16"), Plan())
    layers = in_fp8(task)
    read = AutoModelForImageTextToText.from_pretrained(small[1], dtype=torch.bfloat16)
    assert len(layers) == len(fp8_layers(read)) > 7
    for name, layer in layers.items():
        plain = read.get_submodule(name.removeprefix("base_model.model.").removesuffix(".base_layer"))
        codes, scale = fp8.quantize(plain.weight.detach())
        assert torch.equal(layer.weight.float(), codes.float()) and torch.equal(layer.scale, scale[:, 0])
        assert layer.weight.nbytes == plain.weight.numel() and not layer.weight.requires_grad
    kinds = {p.dtype for n, p in task.model.module.named_parameters() if "norm" in n or "embed" in n or "lm_head" in n}
    assert kinds == {torch.bfloat16} and {p.dtype for p in task.trained().values()} == {torch.float32}
    assert task.model.notes == [
        f"base_format fp8: {len(layers)} linear layers; not lm_head; on a CPU fp8 matmuls are emulated in float32"
    ]
    full = make_task(small[0], recipe_of(small), Plan())
    assert full.model.notes == [
        f"base_format fp8: {len(layers)} linear layers; not lm_head; with precision float32 their matmuls are not in "
        "fp8"
    ]


# What is computed


class Reference(torch.autograd.Function):
    """By dequantised numbers, each product in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return (Reference.rounded(x) @ weight.double().T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grown: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        codes = weight.double() / scale.double()[:, None]
        return (Reference.rounded(grown.double() * scale) @ codes).to(grown.dtype), None, None

    @staticmethod
    def rounded(rows: Tensor) -> Tensor:
        rows = rows.double()
        powers = torch.exp2(torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448)))
        steps = torch.exp2(torch.floor(torch.log2((rows / powers).abs().clamp_min(2.0**-6))) - 3)
        return torch.round(rows / powers / steps) * steps * powers


class ReferenceLinear(nn.Linear):
    def __init__(self, layer: Fp8Linear, rounds: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(layer.dequantized(torch.float32), requires_grad=False)
        self.scale, self.bias, self.rounds = layer.scale, layer.bias, rounds

    def forward(self, x: Tensor) -> Tensor:
        if not self.rounds:
            return F.linear(x, self.weight, self.bias)
        x = x.bfloat16()
        out: Tensor = Reference.apply(x.reshape(-1, x.shape[-1]), self.weight, self.scale).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias.to(out.dtype)


@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-5), ("bf16", 0.02)])
def test_gradients_are_those_of_a_reference(small: tuple[Path, Path], precision: str, limit: float) -> None:
    recipe = recipe_of(small, precision)
    one, other = (make_task(small[0], recipe, Plan()) for _ in range(2))
    for module in list(other.model.module.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Fp8Linear):
                setattr(module, name, ReferenceLinear(layer, precision == "bf16"))
    assert in_fp8(one) and not in_fp8(other)
    for task in (one, other):
        stir(task)
    expected = gradient(other)
    assert distance(gradient(one), expected) <= limit
    if precision == "bf16":  # and fp8 is further from what it rounds than that
        full = make_task(small[0], recipe_of(small), Plan())
        stir(full)
        assert distance(expected, gradient(full)) > 3 * limit


def test_layouts_and_recomputation_have_the_same_gradients(small: tuple[Path, Path]) -> None:
    plans = (Plan(), Plan(**SHARED), Plan(**SHARED, attention="split", checkpointing="full", label_only_logits=True))
    for precision, limit in (("float32", 1e-5), ("bf16", 0.1)):
        made = []
        for plan in plans:
            task = make_task(small[0], recipe_of(small, precision), plan)
            stir(task)
            made.append(gradient(task))
        assert all(distance(each, made[0]) <= limit for each in made[1:]), precision
    again = make_task(small[0], recipe_of(small, "bf16"), plans[1])
    recomputed = make_task(small[0], recipe_of(small, "bf16"), Plan(**SHARED, checkpointing="full"))
    for task in (again, recomputed):
        stir(task)
    assert torch.equal(gradient(again), gradient(recomputed)), "recomputation rounds alike"


def test_the_tower_may_have_adapters_too(small: tuple[Path, Path]) -> None:
    more = {"lora": {"r": 2, "alpha": 4, "target_modules": ["q_proj", "qkv"]}, "train_vision": True}
    one, other = (make_task(small[0], recipe_of(small, **more), plan) for plan in (Plan(), Plan(**SHARED)))
    for task in (one, other):
        stir(task)
    assert any("visual" in name for name in one.trained())
    assert distance(gradient(other), gradient(one)) <= 1e-5


def test_layers_are_compiled(small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameday.models.vlm.COMPILE_BACKEND", "eager")  # what others make of the graphs is tested below
    torch._dynamo.reset()
    plain, compiled = (make_task(small[0], recipe_of(small), plan) for plan in (Plan(), Plan(compile="layers")))
    for task in (plain, compiled):
        stir(task)
    assert distance(gradient(compiled), gradient(plain)) <= 1e-5


MULTIPLIES = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        ("cpu", None),
        ("cpu", "aot_eager"),
        pytest.param("cuda", "inductor", marks=pytest.mark.skipif(not MULTIPLIES, reason="needs fp8 matmuls")),
    ],
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_no_other_weights_are_kept_for_the_backward_pass(device: str, compiled: str | None, kind: torch.dtype) -> None:
    """Neither dequantised nor transposed ones."""
    layer = Fp8Linear(nn.Linear(256, 128, bias=False), torch.device(device))
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    if compiled is not None:
        torch._dynamo.reset()
        layer.compile(backend=compiled)
    x, others = torch.randn(3, 256, dtype=kind, device=device, requires_grad=True), list[int]()

    def count(tensor: Tensor) -> Tensor:
        others.extend([tensor.nbytes] if tensor.data_ptr() not in own else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = layer(x)
    assert sum(others) < 64
    (back,) = torch.autograd.grad(out.sum(), x)
    expected = layer.dequantized(torch.float32).sum(0)
    assert distance(back.float(), expected.expand(3, -1)) < 0.05


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_plans_verify(tmp_path: Path, small: tuple[Path, Path], precision: str) -> None:
    found = Stage(tmp_path, small[0], recipe_of(small, precision), steps=4).compare(
        Plan(**SHARED, label_only_logits=True)
    )
    assert found.same and not found.bitwise, "\n".join(map(str, found.differences))


def test_the_reference_has_the_weights_that_fp8_matmuls_see(small: tuple[Path, Path]) -> None:
    """In float32, and in float64 as far as the modules go."""
    bf16, reference = (make_task(small[0], recipe_of(small, precision), Plan()) for precision in ("bf16", "float32"))
    for task in (bf16, reference):
        start_weights(task, True)
    for one, other in zip(in_fp8(bf16).values(), in_fp8(reference).values(), strict=True):
        assert torch.equal(one.dequantized(torch.bfloat16).float(), other.dequantized(torch.float32))
    plain = gradient(reference)
    reference.model.module.double()
    assert distance(gradient(reference).float(), plain) <= 1e-5


# As a recipe


def test_it_is_recipe_and_others_keep_their_fingerprints(tiny_qwen3: Path) -> None:
    plain, four, eight = (tiny_recipe(tiny_qwen3, **more) for more in ({}, {"base_format": "nf4"}, FP8))
    assert len({recipe.fingerprint for recipe in (plain, four, eight)}) == 3
    assert "base_format" not in plain.identity()
    assert "The base model's weights are stored as fp8. " in recipe_words(eight)[0]


@pytest.fixture
def world(tmp_path: Path, small: tuple[Path, Path]) -> Path:
    shutil.copytree(small[1], tmp_path / "base")
    shutil.copytree(small[0], tmp_path, dirs_exist_ok=True)
    return write_recipe(tmp_path, "base", precision="bf16", effective_batch=1, **FP8)


TRAIN = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--out", "run")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"train": "all"},
            "base_format fp8 stores weights that are not trained, and train is all; allowed: train lora, or "
            "base_format precision",
        ),
        ({"double_quant": True}, "double_quant is for base_format nf4, and base_format is fp8"),
    ],
)
def test_what_cannot_be(world: Path, changes: dict[str, Any], sentence: str) -> None:
    sets = [word for key, value in changes.items() for word in ("--set", f"recipe.{key}={json.dumps(value)}")]
    assert sentence in refused(world, *TRAIN, *sets)
    assert not (world / "run").exists()


def test_a_gpu_without_fp8_matmuls_is_refused(small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    setup, plan = VqaSetup(recipe_of(small, "bf16"), small[0]), Plan(attention="split")
    old, new = (
        Machine("cuda", name, 2**35, 8, True, capability=has)
        for name, has in (("an A100", (8, 0)), ("an H200", (9, 0)))
    )
    with pytest.raises(BadInput) as error:
        setup.resolve_auto(plan, old)
    assert (
        str(error.value)
        .splitlines()[0]
        .endswith(
            "recipe.base_format fp8 needs a GPU of compute capability 8.9 or more, and an A100 has 8.0; allowed there: "
            "precision, nf4; plan.device cpu emulates fp8, slowly"
        )
    )
    assert "plan.attention split is for packed rows" in str(error.value), "all problems at once"
    assert setup.resolve_auto(Plan(), new).plan.attention == "sdpa"

    def fails() -> None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

    monkeypatch.setattr("sameday.models.fp8._try", fails)
    with pytest.raises(BadInput) as error:
        setup.resolve_auto(Plan(), new)
    assert str(error.value) == (
        f"recipe.base_format fp8: torch {torch.__version__} does not multiply in fp8, with a scale for each row, on an "
        "H200: CUBLAS_STATUS_NOT_SUPPORTED; allowed there: precision, nf4; plan.device cpu emulates fp8, slowly"
    )


# Commands


@pytest.mark.usefixtures("own_signals")
def test_saved_resumed_evaluated_continued_and_merged(world: Path) -> None:
    """Stopped after its first step and gone on with, a run is the same to the bit."""
    whole = sameday(world, *TRAIN[:-1], "whole", "--set", "plan.save_steps=1")
    assert whole.code == 0, whole.err
    assert "linear layers; not lm_head; on a CPU fp8 matmuls are emulated in float32" in whole.out
    assert sameday(world, *TRAIN, "--stop-after", "1").code in (0, 75)
    again = sameday(world, *TRAIN)
    assert again.code == 0 and "resumed from step-000001" in again.out, again.err
    one, other = (load_file(world / run / "adapter/adapter_model.safetensors") for run in ("whole", "run"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    origin = json.loads((world / "run/adapter" / ORIGIN).read_text())
    assert origin["base_format"] == "fp8"
    assert origin["base_format_layers"]["model.language_model.layers.*.mlp.down_proj"] == 1
    assert any("visual.blocks.*" in name for name in origin["base_format_layers"])
    assert not [name for name in origin["base_format_layers"] if "lm_head" in name or "embed" in name]
    scores = sameday(world, "eval", "run", "--split", "val", "--set", "plan.device=cpu")
    assert scores.code == 0 and not scores.err, scores.err
    assert scores_in(world / "run/eval-val.json") == pytest.approx(
        json.loads((world / "run/eval.json").read_text())["val"]
    )
    # Merged, it has the weights that training saw.
    merged = sameday(world, "merge", "run", "-o", "merged")
    assert merged.code == 0 and "of them changed by the adapter; bf16 rounds what" in merged.out, merged.err
    plain, made = (
        AutoModelForImageTextToText.from_pretrained(world / name, dtype=torch.bfloat16) for name in ("base", "merged")
    )
    for name in fp8_layers(plain):
        codes, scale = fp8.quantize(plain.get_submodule(name).weight.detach())
        seen = fp8.dequantize(codes, scale[:, 0], torch.float32)
        a, b = (other.get(f"base_model.model.{name}.lora_{which}.weight") for which in "AB")
        seen = seen if a is None or b is None else seen + 2.0 * b @ a
        assert torch.equal(made.get_submodule(name).weight.detach(), seen.bfloat16()), name
    assert "fp8" not in (world / "merged/README.md").read_text()


def test_an_adapter_to_start_from_keeps_its_bits(small: tuple[Path, Path], tmp_path: Path) -> None:
    """PEFT would make adapters in the format of the weights."""
    first = make_task(small[0], recipe_of(small, "bf16"), Plan())
    stir(first)
    first.save(tmp_path)
    second = make_task(small[0], recipe_of(small, "bf16", start_adapter=str(tmp_path)), Plan())
    kept, taken = first.trained(), second.trained()
    assert kept.keys() == taken.keys() and all(torch.equal(kept[name], taken[name]) for name in kept)
    assert second.model.notes[1:] == [], "the same format"
    other = make_task(small[0], recipe_of(small, "bf16", start_adapter=str(tmp_path), base_format="precision"), Plan())
    assert other.model.notes == [
        f"start_adapter {tmp_path}: was trained on base weights stored as fp8, and here they are stored as bf16: this "
        "is another model than the one that was trained"
    ]


def test_the_readme_loads_the_weights_that_were_trained_on(
    small: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(small[0], recipe_of(small), Plan())
    stir(task)
    task.training(False)
    task.save(tmp_path)
    said = (tmp_path / "README.md").read_text()
    assert "stored as fp8 (float8_e4m3fn, a power of two as scale of each output channel)" in said
    assert "They compute in bf16" not in said
    (tmp_path / "half").mkdir()
    make_task(small[0], recipe_of(small, "bf16"), Plan()).save(tmp_path / "half")
    assert (
        "They compute in bf16 what the training computed in fp8, which is close and not the same; `sameday eval` "
        "computes as the training did."
    ) in (tmp_path / "half/README.md").read_text()
    shutil.copy(small[0] / "images/0.png", tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.testing.assert_close(*readme_logits(task, "0.png"), atol=1e-5, rtol=1e-5)


# Tools


def test_what_memory_a_plan_is_chosen_for(tiny_qwen3: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_qwen3)
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    for name, value in (sizes | {"vocab_size": 151936, "head_dim": 128}).items():
        setattr(config.text_config, name, value)
    plain, eight = (tiny_recipe(tiny_qwen3, precision="bf16", **more) for more in ({}, FP8))
    text = config.get_text_config()
    weights = 36 * 4096 * (3 * 12288 + 4 * 4096)
    assert language_bytes(plain, text) - language_bytes(eight, text) == weights, "a byte for each"
    machine = Machine("cuda", "a GPU", 44 * 2**30, 8, True)
    chosen = [choose_plan(recipe, machine, config, 1)[0].checkpointing for recipe in (plain, eight)]
    assert chosen == ["selective", "none"]


@pytest.fixture
def counted(small: tuple[Path, Path]) -> Iterator[tuple[VqaTask, VqaTask]]:
    yield tuple(
        make_task(small[0], recipe_of(small, "bf16", base_format=name), Plan()) for name in ("precision", "fp8")
    )


def test_the_floor_has_bytes_as_stored_and_fp8_matmuls_at_their_rate(counted: tuple[VqaTask, VqaTask]) -> None:
    plain, eight = counted
    usual, cost = (task.cost(0, None, Ranks()) for task in counted)
    assert (cost.flop, cost.executed_flop) == (usual.flop, usual.executed_flop)
    layers = in_fp8(eight)
    saved = {name: m.in_features * m.out_features - 4 * m.out_features for name, m in layers.items()}
    tower = sum(each for name, each in saved.items() if "visual" in name)
    assert usual.memory_bytes - cost.memory_bytes == usual.micro_batches * (2 * sum(saved.values()) - tower)
    assert cost.fp8_flop == cost.executed_fp8_flop == 0, "a CPU computes them otherwise"
    for batch in eight.batches(0, None, Ranks()):
        work, other = needed(eight.model, batch), needed(plain.model, batch)
        assert work.layers.fp8 == work.layers.total == other.layers.total and other.fp8 == 0
        assert work.adapters.fp8 == work.attention.fp8 == work.head.fp8 == 0 < work.tower.fp8 < work.tower.total
    peaks = Peaks("", "bf16", 10.0, 1.0, 1.0, None, fp8_flop_per_second=20.0)
    assert bound(StepCost(1, 1, 100, 100, 0, 0, 0, fp8_flop=60), peaks).seconds == pytest.approx(4 + 3)
    assert matmul_seconds(100, 0, peaks) == pytest.approx(10)
