"""Which layers a recipe's targets mean, and that PEFT takes exactly these for what it is told."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForImageTextToText
from worlds import FAMILIES, SQUARE, tiny_recipe

from sameday.models.adapters import adapted_layers, pattern_of, resolve_targets, taken
from sameday.models.families import family_of
from sameday.spec.errors import BadInput
from sameday.spec.lora import Lora
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.words import recipe_words

ALL = (*FAMILIES, *SQUARE)
DECODER = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, Path]) -> dict[str, Any]:
    """Without weights."""
    made = {}
    for family in ALL:
        with torch.device("meta"):
            made[family] = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tiny_models[family]))
    return made


def layers_of(models: dict[str, Any], family: str, *targets: str, allow_tower: bool = False) -> set[str]:
    told = resolve_targets(models[family], family_of(family), Lora(target_modules=targets), allow_tower)
    layers = adapted_layers(models[family], told)
    assert layers == set(taken([name for name, _ in models[family].named_modules()], told)), "PEFT takes other modules"
    return layers


def parts(family: str, layers: set[str]) -> set[str]:
    return {family_of(family).part_of(name) for name in layers}


@pytest.mark.parametrize("family", ALL)
def test_a_bare_name_is_the_decoders(models: dict[str, Any], family: str) -> None:
    for targets in (("q_proj", "v_proj"), ("gate_proj",), ("all-linear",), ("language_model.up_proj",)):
        layers = layers_of(models, family, *targets)
        assert layers and parts(family, layers) == {"decoder"} and "lm_head" not in layers
    assert {name.rsplit(".", 1)[1] for name in layers_of(models, family, "all-linear")} == set(DECODER)
    assert layers_of(models, family, "lm_head") == {"lm_head"}


def test_names_stay_names_where_peft_takes_no_other_layers_for_them(models: dict[str, Any]) -> None:
    def told(family: str, *targets: str) -> Any:
        return resolve_targets(models[family], family_of(family), Lora(target_modules=targets), False)

    assert told("qwen3_vl", "q_proj", "up_proj") == ["q_proj", "up_proj"]
    assert told("qwen2_5_vl", "up_proj") == r"model\.language_model\.layers\.\d+\.mlp\.up_proj"
    assert told("llava", "q_proj") == r"model\.language_model\.layers\.\d+\.self_attn\.q_proj"
    assert told("qwen3_vl", "tower.qkv") == r"model\.visual\.blocks\.\d+\.attn\.qkv"
    assert told("qwen2_vl", "projector.all-linear") == r"model\.visual\.merger\.mlp\.(0|2)"
    assert told("llava", "tower.fc1") == r"model\.vision_tower\.encoder\.layers\.(0|1)\.mlp\.fc1"


PROJECTORS = {
    "qwen2_vl": {"merger.mlp.0", "merger.mlp.2"},
    "qwen2_5_vl": {"merger.mlp.0", "merger.mlp.2"},
    "qwen3_vl": {
        *("merger.linear_fc1", "merger.linear_fc2"),
        *(f"deepstack_merger_list.{n}.linear_fc{m}" for n in (0, 1) for m in (1, 2)),
    },
    "llava": {"multi_modal_projector.linear_1", "multi_modal_projector.linear_2"},
}
TOWERS = {
    "qwen2_vl": {"qkv", "proj", "fc1", "fc2"},
    "qwen2_5_vl": {"qkv", "proj", "gate_proj", "up_proj", "down_proj"},
    "qwen3_vl": {"qkv", "proj", "linear_fc1", "linear_fc2"},
    "llava": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
    "gemma3": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
}


@pytest.mark.parametrize("family", ALL)
def test_all_linear_layers_of_tower_and_projector(models: dict[str, Any], family: str) -> None:
    tower = layers_of(models, family, "tower.all-linear")
    assert parts(family, tower) == {"tower"} and {name.rsplit(".", 1)[1] for name in tower} == TOWERS[family]
    assert not any("patch_embed" in name for name in tower), "no linear layer"
    if family in PROJECTORS:
        layers = layers_of(models, family, "projector.all-linear")
        assert {re.sub(r".*(?=merger\.|deepstack|multi_modal)", "", name) for name in layers} == PROJECTORS[family]
        both = layers_of(models, family, "projector.all-linear", "tower.all-linear", "q_proj")
        assert both == layers | tower | layers_of(models, family, "q_proj")
    one = sorted(tower)[0].split(".")
    assert layers_of(models, family, "tower." + ".".join(one[-3:])) == {".".join(one)}, "a path is a name too"


def test_with_train_vision_a_bare_name_is_of_any_part(models: dict[str, Any]) -> None:
    layers = layers_of(models, "llava", "q_proj", allow_tower=True)
    assert Counter(family_of("llava").part_of(name) for name in layers) == {"decoder": 3, "tower": 3}
    assert parts("qwen3_vl", layers_of(models, "qwen3_vl", "linear_fc1", allow_tower=True)) == {"tower", "projector"}
    everything = layers_of(models, "llava", "all-linear", "tower.all-linear", "projector.all-linear")
    assert layers_of(models, "llava", "all-linear", allow_tower=True) == everything
    assert layers_of(models, "qwen3_vl", "proj", allow_tower=True) == layers_of(models, "qwen3_vl", "tower.proj")


def test_what_no_layer_is_called_is_told_with_what_there_is(models: dict[str, Any]) -> None:
    def said(family: str, *targets: str) -> list[str]:
        with pytest.raises(BadInput) as error:
            layers_of(models, family, *targets)
        return str(error.value).splitlines()

    known = ", ".join(sorted([*DECODER, "lm_head (with lora.dropout 0)"]))
    language = f"lora.target_modules: no linear layer of the language model is called %r; it has {known}"
    assert said("qwen3_vl", "q_proj", "query", "qkv") == [
        language % "query",
        language % "qkv" + "; the vision tower has one: write 'tower.qkv'",
    ]
    assert said("qwen2_vl", "tower.q_proj", "projector.fc1") == [
        "lora.target_modules: no linear layer of the vision tower is called 'q_proj'; it has fc1, fc2, proj, qkv",
        "lora.target_modules: no linear layer of the projector is called 'fc1'; it has 0, 2; the vision tower has one: "
        "write 'tower.fc1'",
    ]
    assert said("gemma3", "projector.all-linear") == [
        "lora.target_modules: 'projector.all-linear': the projector of this model has no linear layer, and only these "
        "get adapters"
    ]


@pytest.mark.parametrize("family", ALL)
def test_no_dropout_on_the_head(models: dict[str, Any], family: str) -> None:
    for targets, allow_tower in ((("q_proj", "lm_head"), False), (("lm_head", "q_proj"), True)):
        lora = Lora(target_modules=targets, dropout=0.05)
        with pytest.raises(BadInput) as error:
            resolve_targets(models[family], family_of(family), lora, allow_tower)
        assert str(error.value) == (
            "lora.target_modules: 'lm_head' with lora.dropout 0.05: dropout is keyed by every token, and the lm_head "
            "computes only those that have a target; allowed: lora.dropout 0, or targets without lm_head"
        )


# Patterns

NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "12", "a.b", "x+y"]), min_size=1, max_size=4).map(".".join)


@given(st.sets(NAMES, min_size=1, max_size=25), st.randoms())
def test_a_pattern_means_the_layers_and_nothing_else(modules: set[str], rng: Any) -> None:
    listed = sorted(modules)
    layers = set(rng.sample(listed, rng.randint(1, len(listed))))
    assert {name for name in modules if re.fullmatch(pattern_of(layers, listed), name)} == layers


def test_layers_that_differ_in_a_number_are_written_once() -> None:
    blocks = [f"m.{n}.{name}" for n in range(12) for name in ("q", "k")]
    assert pattern_of(set(blocks), ["m", *blocks]) == r"m\.\d+\.q|m\.\d+\.k"
    assert pattern_of({"m.3.q", "m.10.q"}, blocks) == r"m\.(3|10)\.q"
    assert pattern_of({"a.0.1", "a.1.0"}, [f"a.{n}.{m}" for n in (0, 1) for m in (0, 1)]) == r"a\.0\.1|a\.1\.0"


# Adapters that somebody made


def test_the_form_of_somebodys_adapter_is_followed(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    pattern = r".*\.visual\.merger\..*fc1|.*language_model.*\.v_proj"
    form = {"use_dora": True, "use_rslora": True, "r": 3, "target_modules": pattern}
    base = AutoModelForImageTextToText.from_pretrained(tiny_models["qwen3_vl"])
    get_peft_model(base, LoraConfig(**form)).save_pretrained(str(tmp_path))
    recipe = tiny_recipe(
        tiny_models["qwen3_vl"], learning_rates={"tower": 1e-5}, lora={"target_modules": ["tower.qkv"]}
    )
    found = VqaSetup(recipe, tmp_path).recipe_with_adapter(tmp_path)
    assert (found.lora.r, found.lora.dora, found.lora.rslora, found.train_vision) == (3, True, True, True)
    assert "model.visual.merger.linear_fc1" in found.lora.target_modules and len(found.lora.target_modules) == 4


def test_dora_of_weights_in_four_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.dora measures rows of the base model's weights, and base_format"):
        tiny_recipe(tmp_path, base_format="nf4", lora={"dora": True})


def test_a_recipe_in_words_says_what_is_trained(tmp_path: Path) -> None:
    def said(**changes: Any) -> str:
        return recipe_words(tiny_recipe(tmp_path, **changes))[0]

    form = {"r": 4, "alpha": 8, "dora": True, "rslora": True, "target_modules": ["q_proj", "projector.linear_fc1"]}
    assert said(lora=form, learning_rates={"projector": 1e-5}).endswith(
        "Trained are adapters (DoRA) of rank 4, alpha 8 over the root of the rank, on q_proj, projector.linear_fc1. "
        "The vision tower is frozen, the projector behind it is trained. The projector has a peak learning rate of its "
        "own, 1e-5."
    )
    assert said().endswith("The vision tower is frozen.")
    assert said(train="all", train_vision=True).endswith("The vision tower is trained too.")


def test_all_layers_of_a_module_in_a_part(models: dict[str, Any]) -> None:
    layers = layers_of(models, "qwen3_vl", "projector.deepstack_merger_list.all-linear")
    every = layers_of(models, "qwen3_vl", "projector.all-linear")
    assert layers == {name for name in every if ".deepstack_merger_list." in name} and layers < every
    with pytest.raises(BadInput, match=r"no linear layer of the projector is called 'nowhere\.all-linear'"):
        layers_of(models, "qwen3_vl", "projector.nowhere.all-linear")
