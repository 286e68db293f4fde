"""Vectors that transformers' Trainer decays and a recipe does not: the conversion names them where they are trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from converting import DATA, LLAMA, OURS, converted, script, whys
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.trainer import Trainer

from sameday.spec.convert.families import FAMILIES

ALL = {"train_file": "train.jsonl", "weight_decay": 0.1}
MODELS = {
    "qwen2_vl": "Qwen/Qwen2-VL-7B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3_vl": "Qwen/Qwen3-VL-4B-Instruct",
    "llava": "llava-hf/llava-1.5-7b-hf",
    "gemma3": "google/gemma-3-4b-it",
}


@pytest.mark.parametrize("kind", MODELS)
def test_vectors_that_the_trainer_decays_are_named(tmp_path: Path, kind: str) -> None:
    """By its own words of them, on a model without weights."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind]())
    decayed = {*Trainer.get_decay_parameter_names(None, model)}
    both = [name for name, weight in model.named_parameters() if weight.ndim < 2 and name in decayed]
    vectors = {name.removesuffix(".weight").split(".")[-1] for name in both}
    said = FAMILIES[kind].decayed_vectors
    assert all(name in said for name in vectors) and bool(vectors) == bool(said)
    done = converted(tmp_path, {**ALL, "model_name_or_path": MODELS[kind]})
    near = f"near, not the same: the Trainer decays {said} too, a recipe no vectors"
    assert whys(done)["recipe.weight_decay"] == (near if vectors else "")


@pytest.mark.parametrize("more", [{"freeze_vision": True, "freeze_merger": True}, {"weight_decay": 0}])
def test_nothing_is_said_where_they_are_not_decayed(tmp_path: Path, more: dict[str, Any]) -> None:
    done = converted(tmp_path, {**ALL, "model_name_or_path": MODELS["qwen2_5_vl"], **more})
    assert whys(done)["recipe.weight_decay"] == ""


def test_a_model_of_which_nothing_tells_the_family(tmp_path: Path) -> None:
    done = converted(tmp_path, {**ALL, "model_name_or_path": "hospital/ours"})
    assert (
        "decays the tower's norms (norm1, norm2, ln_q) of qwen2_5_vl and the tower's class_embedding of llava too"
        in (whys(done)["recipe.weight_decay"])
    )


def test_the_lengths_that_dora_learns(tmp_path: Path) -> None:
    near = (
        "near, not the same: the Trainer decays the lengths that DoRA learns (lora_magnitude_vector) too, a recipe no "
    )
    done = converted(tmp_path, {**LLAMA, "use_dora": True, "weight_decay": 0.01}, DATA)
    assert whys(done)["recipe.weight_decay"].startswith(near)
    assert whys(converted(tmp_path, {**LLAMA, "weight_decay": 0.01}, DATA))["recipe.weight_decay"] == ""
    assert (
        whys(converted(tmp_path, {**LLAMA, "use_dora": True}, DATA))["recipe.weight_decay"] == "the Trainer's default"
    )
    swift = {key: value for key, value in OURS.items() if key != "weight_decay"}
    done = converted(tmp_path, script("swift sft", {**swift, "use_dora": "true"}))
    assert whys(done)["recipe.weight_decay"].startswith(f"ms-swift's default; {near}")
