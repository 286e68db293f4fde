"""Base weights in four bits: bitsandbytes' own codes, scales and weights, in the layers that transformers would take,
computed as with those weights; saved, resumed, evaluated and handed over as the model that was trained."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from arms import Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig
from typed import refused, sameday, scores_in, write_recipe
from worlds import FAMILIES, make_task, readme_logits, stir, tiny_recipe, write_tiny, write_world

from sameday.hardware.machine import Machine
from sameday.hardware.ranks import Ranks
from sameday.kernels import nf4
from sameday.models.nf4 import Nf4Linear
from sameday.models.start import ORIGIN
from sameday.spec.plan import Plan
from sameday.tasks.vqa.automatic import choose_plan, language_bytes
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.vqa.words import recipe_words
from sameday.train.steps import Steps
from sameday.verify.arm import start_weights

bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = pytest.mark.slow

NF4 = {"base_format": "nf4"}
SHARED = {"share_images": True, "packing": True, "max_questions": None, "token_budget": 400}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
TENSOR = "model.language_model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("nf4"), 3, counts=(5, 1, 3), hard=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A world and a model for bf16 on a CPU that has none."""
    root = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    vision = sizes | {"depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0], "out_hidden_size": 32}
    text = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = write_tiny(root / "model", text=text, vision=vision)
    return write_world(root / "world", 3, counts=(2, 1), hard=False, sizes=((32, 32), (32, 48))), model


def gradient(task: VqaTask, step: int = 0) -> torch.Tensor:
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    steps.accumulate(task.batches(step, None, Ranks()), step)
    return steps.gradients.all.clone()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


# The matmul


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_layer_is_the_plain_one_with_the_librarys_weights(
    rows: int, wide: int, high: int, double: bool, biased: bool, seed: int
) -> None:
    """Whatever its shape, blocks that lines break included, forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(8 * wide, 6 * high, biased)
    linear.weight.data.normal_(generator=generator)
    layer = Nf4Linear(linear, double, torch.float32, torch.device("cpu"))
    codes, state = bitsandbytes.functional.quantize_4bit(
        linear.weight.data.bfloat16(), compress_statistics=double, quant_type="nf4"
    )
    state.dtype = torch.float32
    weights = bitsandbytes.functional.dequantize_4bit(codes, state)
    assert torch.equal(layer.dequantized(), weights)
    x = torch.randn(rows, 8 * wide, generator=generator, requires_grad=True)
    grown = torch.randn(rows, 6 * high, generator=generator)
    mine = layer(x)
    (back,) = torch.autograd.grad(mine, x, grown)
    plain = F.linear(x, weights, linear.bias)
    (plain_back,) = torch.autograd.grad(plain, x, grown)
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(back, plain_back)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_weights_are_kept_for_the_backward_pass(compiled: bool) -> None:
    """Where a compiler sees both passes, too: in one graph each, and with the same gradient."""
    layer = Nf4Linear(nn.Linear(256, 128), True, torch.float32, torch.device("cpu"))
    run: Any = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x, kept = torch.randn(3, 256, requires_grad=True), list[int]()

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = run(x)
    assert 0 < sum(kept) < 256 * 128
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], layer.dequantized().sum(0).expand(3, -1))


def test_operators_are_registered_as_torch_wants_them() -> None:
    layer = Nf4Linear(nn.Linear(64, 32), True, torch.float32, torch.device("cpu"))
    x, grown = torch.randn(2, 3, 64, requires_grad=True), torch.randn(2, 3, 32)
    scales = [*layer.scales]
    torch.library.opcheck(nf4._forward, (x, layer.weight, scales, layer.bias, 32, torch.float32))
    torch.library.opcheck(nf4._backward, (grown, layer.weight, scales, 64, torch.float32))


# The model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("precision", "double"), [("float32", False), ("bf16", True)])
def test_the_model_is_the_librarys(
    home: Path, tiny_models: dict[str, Path], family: str, precision: str, double: bool
) -> None:
    """The same layers as BitsAndBytesConfig takes by default, bit for bit."""
    recipe = tiny_recipe(tiny_models[family], precision=precision, double_quant=double, **NF4)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=DTYPES[precision],
    )
    library = AutoModelForImageTextToText.from_pretrained(
        tiny_models[family], dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
    )
    theirs = {n: m for n, m in library.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    module = make_task(home, recipe, Plan()).model.module
    ours = {n.removesuffix(".base_layer"): m for n, m in module.named_modules() if isinstance(m, Nf4Linear)}
    ours = {n.removeprefix("base_model.model."): m for n, m in ours.items()}
    assert ours.keys() == theirs.keys() and any("visual" in name for name in ours) and "lm_head" not in ours
    for name, layer in ours.items():
        weight = theirs[name].weight
        weight.quant_state.dtype = DTYPES[precision]
        assert torch.equal(layer.weight, weight.data), name
        assert torch.equal(
            layer.dequantized(), bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        )
    assert {p.dtype for n, p in module.named_parameters() if "norm" in n or "embed" in n} == {DTYPES[precision]}


@pytest.fixture(scope="module")
def base(home: Path, tiny_qwen3: Path) -> VqaTask:
    recipe = tiny_recipe(tiny_qwen3, order="by_image", effective_batch=8, **NF4)
    task = make_task(home, recipe, Plan())
    stir(task)
    return task


def with_plain_weights(task: VqaTask) -> None:
    """Each layer in four bits as a plain one with the weights that bitsandbytes' codes stand for."""
    for module in list(task.model.module.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Nf4Linear):
                plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
                plain.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
                plain.bias = layer.bias
                setattr(module, name, plain)


@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-5), ("bf16", 0.02)])
def test_gradients_are_those_of_dequantised_weights(small: tuple[Path, Path], precision: str, limit: float) -> None:
    home, model = small
    recipe = tiny_recipe(model, order="by_image", effective_batch=2, precision=precision, **NF4)
    tasks = [make_task(home, recipe, Plan()) for _ in range(2)]
    with_plain_weights(tasks[1])
    assert not any(isinstance(module, Nf4Linear) for module in tasks[1].model.module.modules())
    for task in tasks:
        stir(task)
    assert distance(*(gradient(task) for task in tasks)) <= limit


def test_both_layouts_and_recomputation_have_the_same_gradients(home: Path, base: VqaTask) -> None:
    plain = gradient(base)
    for plan in (Plan(**SHARED), Plan(**SHARED, attention="split", checkpointing="full", label_only_logits=True)):
        task = make_task(home, base.recipe, plan)
        stir(task)
        assert distance(gradient(task), plain) <= 1e-5, plan


def test_the_tower_may_have_adapters_too(home: Path, tiny_qwen3: Path) -> None:
    lora = {"r": 2, "alpha": 4, "target_modules": ["q_proj", "qkv"]}
    recipe = tiny_recipe(tiny_qwen3, order="by_image", effective_batch=4, lora=lora, train_vision=True, **NF4)
    one, other = (make_task(home, recipe, plan) for plan in (Plan(), Plan(**SHARED)))
    for task in (one, other):
        stir(task)
    assert distance(gradient(other), gradient(one)) <= 1e-5


# As a recipe


def test_it_is_recipe_and_others_keep_their_fingerprints(tiny_qwen3: Path) -> None:
    plain, four, double = (tiny_recipe(tiny_qwen3, **more) for more in ({}, NF4, NF4 | {"double_quant": True}))
    assert len({recipe.fingerprint for recipe in (plain, four, double)}) == 3
    assert not {"base_format", "double_quant"} & plain.identity().keys()
    assert "The base model's weights are stored as nf4 with double_quant. " in recipe_words(double)[0]
    assert "stored as" not in recipe_words(plain)[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            NF4 | {"train": "all"},
            "base_format nf4 stores weights that are not trained, and train is all; allowed: train lora, or "
            "base_format precision",
        ),
        (
            {"base_format": "precision", "double_quant": True},
            "double_quant is for base_format nf4, and base_format is precision",
        ),
        ({"base_format": "fp4"}, "base_format is 'fp4'; must be one of 'precision', 'nf4'"),
    ],
)
def test_what_cannot_be(world: Path, changes: dict[str, Any], sentence: str) -> None:
    sets = [word for key, value in changes.items() for word in ("--set", f"recipe.{key}={json.dumps(value)}")]
    assert sentence in refused(world, *TRAIN, *sets)
    assert not (world / "run").exists()


# Commands

TRAIN = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--out", "run")


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Path:
    shutil.copytree(tiny_qwen3, tmp_path / "base")
    return write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), "base", **NF4)


def test_without_the_library(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert refused(world, *TRAIN) == (
        "recipe.base_format nf4 needs the package bitsandbytes, which is not installed: pip install "
        "'bitsandbytes>=0.50,<0.51'; allowed without it: precision"
    )
    assert not (world / "run").exists()


def test_with_a_library_that_does_not_work_here(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no library for this CUDA version\nlong explanation")

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", fails)
    assert refused(world, *TRAIN) == (
        f"recipe.base_format nf4 needs the package bitsandbytes, and version {bitsandbytes.__version__}, which is "
        "installed, does not work on this machine's cpu: no library for this CUDA version"
    )


def test_base_weights_are_checked_before_they_are_quantized(world: Path) -> None:
    path = world / "base" / "model.safetensors"
    whole = load_file(path)
    save_file({name: tensor for name, tensor in whole.items() if name != TENSOR}, path, {"format": "pt"})
    assert refused(world, *TRAIN).endswith(f"base: its weights lack 1 of the model's tensors: {TENSOR}")
    save_file(whole | {TENSOR: torch.full_like(whole[TENSOR], torch.nan)}, path, {"format": "pt"})
    assert refused(world, *TRAIN).endswith(f"base: holds weights that are not finite: {TENSOR}")
    config = json.loads((world / "base/config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (world / "base/config.json").write_text(json.dumps(config))
    assert refused(world, *TRAIN).endswith(
        "model 'base': its weights are stored quantized; allowed: a model in bf16 or float32, which recipe.base_format "
        "nf4 takes to four bits, and fp8 to eight"
    )
    assert not (world / "run").exists()


@pytest.mark.usefixtures("own_signals")
def test_saved_resumed_evaluated_and_continued(world: Path) -> None:
    """Stopped after its first step and gone on with, a run is the same to the bit."""
    whole = sameday(world, *TRAIN[:-1], "whole", "--set", "plan.save_steps=1")
    assert whole.code == 0, whole.err
    assert sameday(world, *TRAIN, "--stop-after", "1").code in (0, 75)
    again = sameday(world, *TRAIN)
    assert again.code == 0 and "resumed from step-000001" in again.out, again.err
    one, other = (load_file(world / run / "adapter/adapter_model.safetensors") for run in ("whole", "run"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((world / "run/adapter" / ORIGIN).read_text())["base_format"] == "nf4"
    scores = sameday(world, "eval", "run", "--split", "val")
    assert scores.code == 0 and not scores.err, scores.err
    assert scores_in(world / "run/eval-val.json") == pytest.approx(
        json.loads((world / "run/eval.json").read_text())["val"]
    )
    # On weights in another format it is used, and said to be another model.
    words = ("--max-steps", "1", "--set", "recipe.start_adapter=run/adapter", "--set", "recipe.base_format=precision")
    said = sameday(world, *TRAIN[:-1], "other", *words)
    assert said.code == 0, said.err
    assert (
        f"start_adapter {world}/run/adapter: was trained on base weights stored as nf4, and here they are stored as "
        "float32: this is another model than the one that was trained"
    ) in said.out
    # Both ways: the same files are read in another format here, and are no other base for that.
    words = ("--max-steps", "1", "--set", "recipe.start_adapter=other/adapter")
    said = sameday(world, *TRAIN[:-1], "back", *words)
    assert said.code == 0, said.err
    assert (
        f"start_adapter {world}/other/adapter: was trained on base weights stored as float32, and here they are stored "
        "as nf4: this is another model than the one that was trained"
    ) in said.out
    # Another base is known by its weights.
    path = world / "base" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {TENSOR: 2 * tensors[TENSOR]}, path, {"format": "pt"})
    said = refused(world, "eval", "run", "--split", "val")
    assert said.startswith("run/adapter: was trained on another base model: its weights were not those of ")
    said = refused(world, *TRAIN[:-1], "again", "--set", "recipe.start_adapter=run/adapter")
    assert "run/adapter: was trained on another base model: its weights were not those of " in said


def test_weights_that_are_stored_otherwise_are_said(
    home: Path, tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four, plain = (make_task(home, tiny_recipe(tiny_qwen3, **more), Plan()) for more in (NF4, {}))
    for name, task, other in (("four", four, plain), ("plain", plain, four)):
        (tmp_path / name).mkdir()
        task.save(tmp_path / name)
        task.restore(tmp_path / name)
        assert not capsys.readouterr().err
        other.restore(tmp_path / name)
        there, here = ("nf4", "float32") if name == "four" else ("float32", "nf4")
        assert capsys.readouterr().err == (
            f"{tmp_path / name}: was trained on base weights stored as {there}, and here they are stored as {here}: "
            "this is another model than the one that was trained\n"
        )


@pytest.mark.parametrize("double", [False, True])
def test_the_readme_loads_the_base_in_four_bits(
    home: Path, tiny_qwen3: Path, tmp_path: Path, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tiny_qwen3, double_quant=double, **NF4)
    task = make_task(home, recipe, Plan())
    stir(task)
    task.training(False)
    (tmp_path / "saved").mkdir()
    task.save(tmp_path / "saved")
    words = "nf4 with double_quant" if double else "nf4"
    assert (
        f"The base model's weights were stored as {words} (bitsandbytes)" in (tmp_path / "saved/README.md").read_text()
    )
    shutil.copy(home / "images/0.png", tmp_path / "saved/image.png")
    monkeypatch.chdir(tmp_path / "saved")
    # Compared in float32 on the CPU, without bitsandbytes' own kernels for some CPUs, which compute in bf16.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    torch.testing.assert_close(*readme_logits(task, "0.png"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_plans_verify(tmp_path: Path, small: tuple[Path, Path], precision: str) -> None:
    home, model = small
    recipe = tiny_recipe(model, effective_batch=2, order="by_image", precision=precision, **NF4)
    found = Stage(tmp_path, home, recipe, steps=4).compare(Plan(**SHARED, label_only_logits=True))
    assert found.same and not found.bitwise, "\n".join(map(str, found.differences))


def test_the_reference_has_the_weights_that_bf16_matmuls_see(home: Path, tiny_qwen3: Path) -> None:
    """In float32, and in float64 as far as the modules go. Without rounding they would be others."""
    bf16, float32, rounded = (
        make_task(home, tiny_recipe(tiny_qwen3, precision=precision, effective_batch=2, **NF4), Plan())
        for precision in ("bf16", "float32", "float32")
    )
    for task, how in ((bf16, True), (float32, False), (rounded, True)):
        start_weights(task, how)
    modules = [
        [m for m in task.model.module.modules() if isinstance(m, Nf4Linear)] for task in (bf16, float32, rounded)
    ]
    for seen, unrounded, reference in zip(*modules, strict=True):
        assert torch.equal(seen.dequantized().float(), reference.dequantized().float())
        assert not torch.equal(seen.dequantized().float(), unrounded.dequantized())
    plain, kept = gradient(rounded), dict(rounded.model.module.named_parameters())
    scales = [p.clone() for name, p in kept.items() if ".scales." in name]
    rounded.model.module.double()
    assert distance(gradient(rounded).float(), plain) <= 1e-5
    again = [p for name, p in rounded.model.module.named_parameters() if ".scales." in name]
    assert all(torch.equal(one.double(), other.double()) for one, other in zip(scales, again, strict=True))


# Tools


def test_what_memory_a_plan_is_chosen_for(tiny_qwen3: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_qwen3)
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    for name, value in (sizes | {"vocab_size": 151936, "head_dim": 128}).items():
        setattr(config.text_config, name, value)
    text = config.get_text_config()
    recipes = [tiny_recipe(tiny_qwen3, precision="bf16", **more) for more in ({}, NF4, NF4 | {"double_quant": True})]
    sizes_in_gib = [language_bytes(recipe, text) / 2**30 for recipe in recipes]
    assert sizes_in_gib == pytest.approx([16.94, 6.41, 6.07], abs=0.05)
    machine = Machine("cuda", "a GPU", 40 * 2**30, 8, True)
    plain, four = (choose_plan(recipe, machine, config, 1)[0] for recipe in recipes[:2])
    assert (plain.checkpointing, four.checkpointing) == ("selective", "none")


def test_the_floor_counts_bytes_as_they_are_stored(home: Path, base: VqaTask, tiny_qwen3: Path) -> None:
    plain = make_task(home, base.recipe.model_copy(update={"base_format": "precision"}), Plan())
    four = base.cost(0, None, Ranks())
    usual = plain.cost(0, None, Ranks())
    assert four.flop == usual.flop and four.executed_flop == usual.executed_flop
    layers = [m for m in base.model.module.modules() if isinstance(m, Nf4Linear)]
    tower = [m for m in base.model.tower.modules() if isinstance(m, Nf4Linear)]
    saved = lambda many: sum(m.in_features * m.out_features * (4 - 0.5 - 4 / 64) for m in many)  # noqa: E731
    times = usual.micro_batches
    expected = times * (2 * saved(layers) - saved(tower))
    assert usual.memory_bytes - four.memory_bytes == pytest.approx(expected, rel=0.01)
