"""A base model whose weights are not all there is refused: what is missing would be drawn at random, without a seed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import worlds
from safetensors.torch import load_file, save_file
from typed import refused, sameday, write_recipe

TENSOR = "model.language_model.layers.0.self_attn.q_proj.weight"
WORDS = ("train", "recipe.yaml", "--max-steps", "1", "--set", "plan.device=cpu", "--out", "run")


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Path:
    shutil.copytree(tiny_qwen3, tmp_path / "base")
    return write_recipe(worlds.write_world(tmp_path, 3, counts=(3, 2), hard=False), Path("base"))


def changed(world: Path, **tensors: torch.Tensor | None) -> None:
    """The base model with this tensor replaced, or without it."""
    path = world / "base" / "model.safetensors"
    there = load_file(path) | tensors
    save_file({name: tensor for name, tensor in there.items() if tensor is not None}, path, {"format": "pt"})


def test_a_tensor_is_missing(world: Path) -> None:
    changed(world, **{TENSOR: None})
    assert refused(world, *WORDS).endswith(f"base: its weights lack 1 of the model's tensors: {TENSOR}")
    assert not (world / "run").exists()


def test_a_tensor_of_another_shape(world: Path) -> None:
    changed(world, **{TENSOR: torch.zeros(3, 3)})
    assert "base: its weights cannot be read: " in refused(world, *WORDS)
    assert not (world / "run").exists()


@pytest.mark.parametrize(("part", "key"), [("text_config", "num_hidden_layers"), ("vision_config", "depth")])
def test_a_configuration_of_fewer_layers(world: Path, part: str, key: str) -> None:
    """Another model, with the weights of this one."""
    path = world / "base" / "config.json"
    config = json.loads(path.read_text())
    config[part][key] -= 1
    path.write_text(json.dumps(config))
    said = refused(world, *WORDS)
    assert re.search(r"base: its weights have \d+ tensors for which its config.json has no layer: model\.", said)
    assert not (world / "run").exists()


def test_tensors_of_no_layer_are_passed_over(world: Path) -> None:
    """Older releases of libraries saved buffers too."""
    changed(world, **{"model.language_model.rotary_emb.inv_freq": torch.ones(4)})
    assert sameday(world, *WORDS).code == 0


def test_a_tensor_that_is_not_finite(world: Path) -> None:
    whole = load_file(world / "base" / "model.safetensors")[TENSOR]
    changed(world, **{TENSOR: torch.full_like(whole, torch.nan)})
    assert refused(world, *WORDS).endswith(f"base: holds weights that are not finite: {TENSOR}")
    # A split by content is recorded beside the recipe, and is taken back with it.
    split = ("--set", "recipe.data.split={val: 0.2, test: 0.2}", "--set", "recipe.data.val=null")
    assert refused(world, *WORDS, *split).endswith(f"base: holds weights that are not finite: {TENSOR}")
    assert not (world / "run").exists()


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_cannot_be_read(world: Path, damage: str) -> None:
    path = world / "base" / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    assert "base: its weights cannot be read: " in refused(world, *WORDS)
    assert not (world / "run").exists()


def test_eval_on_another_base_than_the_one_that_was_trained_on(world: Path) -> None:
    assert sameday(world, *WORDS).code == 0
    changed(world, **{TENSOR: 2 * load_file(world / "base" / "model.safetensors")[TENSOR]})
    said = refused(world, "eval", "run", "--split", "val")
    assert said.startswith("run/adapter: was trained on another base model: its weights were not those of ")
