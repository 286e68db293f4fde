"""An adapter to start from is used whole or refused: nothing is drawn at random, nothing is another model's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typed import refused, sameday, write_recipe
from worlds import write_tiny, write_world

from sameday.models.start import CONFIG, ORIGIN, WEIGHTS
from sameday.record.manifest import MANIFEST

Tensors = dict[str, torch.Tensor]
COUNT = 2 * 4 * 3
"""A and B of four layers in each of three."""
A_NAME = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"


@dataclass
class World:
    folder: Path

    def copy(self, *without: str) -> Path:
        """The good adapter as `start`, without some of its files."""
        start = self.folder / "start"
        shutil.rmtree(start, ignore_errors=True)
        shutil.copytree(self.folder / "first" / "adapter", start)
        for name in without:
            (start / name).unlink()
        return start

    def refusal(self, *more: str) -> str:
        """Of a run from `start`, before anything is written."""
        words = ("train", "recipe.yaml", "--out", "run", "--set", "recipe.start_adapter=start", *more)
        said = refused(self.folder, *words)
        assert not (self.folder / "run").exists(), "refused, and yet there is a run folder"
        prefix = f"start_adapter {self.folder / 'start'}: "
        assert said.startswith(prefix), said
        return said.removeprefix(prefix)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = write_world(tmp_path_factory.mktemp("start"), 3, counts=(3, 2), hard=False)
    write_recipe(folder, "base")
    write_tiny(folder / "base")
    assert sameday(folder, "train", "recipe.yaml", "--out", "first", "--max-steps", "1").code == 0
    assert len(load_file(folder / "first" / "adapter" / WEIGHTS)) == COUNT
    return World(folder)


def change(start: Path, how: Callable[[Tensors], Tensors]) -> None:
    save_file(how(load_file(start / WEIGHTS)), start / WEIGHTS)


def renamed(tensors: Tensors) -> Tensors:
    return {name.replace(".language_model", ""): tensor for name, tensor in tensors.items()}


def fewer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "layers.0" in name}


def more(tensors: Tensors) -> Tensors:
    return tensors | {"base_model.model.lm_head.weight": torch.zeros(3)}


def wider(tensors: Tensors) -> Tensors:
    return tensors | {A_NAME: torch.zeros(2, 65)}


def with_nan(tensors: Tensors) -> Tensors:
    tensors[A_NAME][1, 3] = torch.nan
    return tensors


def too_large(tensors: Tensors) -> Tensors:
    """Finite in their own format, and not in the one that is trained."""
    return tensors | {A_NAME: tensors[A_NAME].double() + 1e60}


def in_bytes(tensors: Tensors) -> Tensors:
    return tensors | {A_NAME: tensors[A_NAME].to(torch.int8)}


NEEDED = f"of the {COUNT} tensors that the recipe needs: base_model.model.model.language_model.layers."
FOREIGN = "tensors of no layer that the recipe adapts"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (renamed, f"{WEIGHTS} lacks {COUNT} {NEEDED}"),
        (renamed, f"{WEIGHTS} has {FOREIGN} ({COUNT}): base_model.model.model.layers.0."),
        (
            renamed,
            "they are the same layers by the names that they had in earlier versions of transformers: rename "
            "base_model.model.model. to base_model.model.model.language_model.",
        ),
        (fewer, f"{WEIGHTS} lacks 16 {NEEDED}"),
        (more, f"{WEIGHTS} has {FOREIGN} (1): base_model.model.lm_head.weight"),
        (wider, f"{WEIGHTS} has tensors of another shape (1): {A_NAME} ([2, 65] instead of [2, 64])"),
        (with_nan, f"{WEIGHTS} has tensors that are not finite (1): {A_NAME}"),
        (too_large, f"{WEIGHTS} has tensors that are not finite (1): {A_NAME}"),
        (in_bytes, f"{WEIGHTS} has tensors that are no floating-point numbers (1): {A_NAME} (torch.int8)"),
    ],
)
def test_every_tensor_is_there_of_its_shape_and_finite(
    world: World, how: Callable[[Tensors], Tensors], sentence: str
) -> None:
    change(world.copy(MANIFEST), how)
    assert sentence in world.refusal()


def test_of_many_tensors_the_first_few_are_named_with_the_count(world: World) -> None:
    change(world.copy(MANIFEST), renamed)
    said, each = world.refusal(), r"base_model\.model\.model\.\S+\.weight"
    first = rf"{each}, {each}, {each} and {COUNT - 3} more"
    lacks = rf"{WEIGHTS} lacks {COUNT} of the {COUNT} tensors that the recipe needs: {first}"
    assert re.search(rf"{lacks}; {WEIGHTS} has {FOREIGN} \({COUNT}\): {first}", said), said


def test_files_that_are_not_what_was_written(world: World) -> None:
    change(world.copy(), lambda tensors: tensors | {A_NAME: tensors[A_NAME] + 1e-3})
    assert world.refusal() == f"{WEIGHTS} is not what was written"
    path = world.copy() / MANIFEST
    listed = json.loads(path.read_text())
    path.write_text(json.dumps({name: entry for name, entry in listed.items() if name != WEIGHTS}))
    assert world.refusal() == f"{WEIGHTS} is needed, and its manifest does not list it"
    path.write_text(json.dumps({name: entry for name, entry in listed.items() if name != ORIGIN}))
    assert world.refusal() == f"{ORIGIN} is there, and its manifest does not list it"


def test_files_that_cannot_be_read(world: World) -> None:
    start = world.copy(MANIFEST)
    whole = (start / WEIGHTS).read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        (start / WEIGHTS).write_bytes(whole[:length])
        assert world.refusal().startswith(f"{WEIGHTS} cannot be read: ")
    (start / WEIGHTS).unlink()
    assert world.refusal() == f"it has no {WEIGHTS}"
    for text in ("{", "[]", '{"r": 2}', '{"peft_type": "WHAT"}'):
        (start / CONFIG).write_text(text)
        assert world.refusal().startswith(f"{CONFIG} cannot be read: ")


def configured(start: Path, **values: Any) -> None:
    config = json.loads((start / CONFIG).read_text())
    (start / CONFIG).write_text(json.dumps(config | values))


@pytest.mark.parametrize(("name", "value"), [("lora_alpha", "x"), ("r", "4"), ("r", True), ("lora_alpha", 0)])
def test_numbers_that_are_none(world: World, name: str, value: Any) -> None:
    configured(world.copy(MANIFEST), **{name: value})
    assert world.refusal().endswith(f"{CONFIG} has {name} {value!r}; must be a number above 0")


def test_what_a_newer_peft_may_have_written(world: World, recwarn: pytest.WarningsRecorder) -> None:
    start = world.copy(MANIFEST)
    config = json.loads((start / CONFIG).read_text())
    (start / CONFIG).write_text(json.dumps(config | {"use_later_lora": True, "later_config": None}))
    said = world.refusal().replace(version("peft"), "X")
    assert said == (
        f"{CONFIG} has use_later_lora, which PEFT X does not know, and which may change what the adapter computes; "
        "allowed: an adapter of what this version knows"
    )
    assert not [each for each in recwarn if "Unexpected keyword" in str(each.message)], "no second, vaguer word of it"
    (start / CONFIG).write_text(json.dumps(config | {"use_later_lora": False, "later_config": None}))
    words = ("train", "recipe.yaml", "--out", "later", "--max-steps", "1", "--set", "recipe.start_adapter=start")
    assert sameday(world.folder, *words).code == 0, "nothing of it is in use"


def test_another_form_and_all_problems_at_once(world: World) -> None:
    start = world.copy(MANIFEST, ORIGIN)
    configured(start, r=3, init_lora_weights="pissa", rank_pattern={"q_proj": 8}, base_model_name_or_path="org/other")
    assert world.refusal("--set", "recipe.lora.alpha=5") == (
        f"its base model is 'org/other', the recipe's is '{world.folder}/base'; where both are the same model, write "
        f"so into its {CONFIG} (base_model_name_or_path); r is 3 there, 2 in the recipe; alpha is 4 there, 5.0 in the "
        "recipe; init_lora_weights is 'pissa' there, which a recipe cannot say; rank_pattern is {'q_proj': 8} there, "
        "which a recipe cannot say"
    )


def test_an_adapter_of_another_base_model_is_said_to_be_one_first(world: World) -> None:
    """By what is known of the model that it names: its kind, where its configuration is here, or else its name."""
    start = world.copy(MANIFEST)
    write_tiny(world.folder / "llava", family="llava")
    configured(start, base_model_name_or_path=str(world.folder / "llava"))
    other = (
        f"was made for another base model: '{world.folder}/llava', of model_type llava; the recipe's is "
        f"'{world.folder}/base', of model_type qwen3_vl; allowed: an adapter of this base model"
    )
    assert world.refusal() == other
    said = refused(world.folder, "eval", "recipe.yaml", "--adapter", "start", "--split", "val")
    assert said == f"--adapter start: {other}"
    change(start, renamed)
    configured(start, base_model_name_or_path="org/other")
    named = f"it was made for the base model 'org/other', and the recipe's is '{world.folder}/base'; "
    assert world.refusal().startswith(f"{named}{WEIGHTS} lacks {COUNT} {NEEDED}")
    configured(start, target_modules="|".join(f"model.layers.{n}.nothing" for n in range(99)))
    shown = "model.layers.0.nothing|model.layers.1.nothing|model.layers.…"
    assert world.refusal() == (
        f"{named}target_modules are {shown} there, ['k_proj', 'o_proj', 'q_proj', 'v_proj'] in the recipe"
    )
    said = refused(world.folder, "eval", "recipe.yaml", "--adapter", "start", "--split", "val")
    assert said == f"--adapter start: {named}its target_modules {shown} name no linear layer of the recipe's model"
    configured(start, target_modules=[f"model.layers.{n}.q_proj" for n in range(10, 50)])
    assert f"'model.layers.17.q_proj'] and 32 more there, {['k_proj', 'o_proj', 'q_proj', 'v_proj']}" in world.refusal()


def test_another_base_model_of_the_same_name_is_known_by_its_weights(world: World) -> None:
    start = world.copy()
    write_tiny(world.folder / "elsewhere" / "base", seed=2)
    words = ("train", "recipe.yaml", "--out", "other", "--set", "recipe.start_adapter=start")
    said = refused(world.folder, *words, "--set", "recipe.model=elsewhere/base")
    assert said == (
        f"start_adapter {start}: was trained on another base model: its weights were not those of "
        f"{world.folder}/elsewhere/base; allowed: an adapter of this base model"
    )


@pytest.mark.parametrize("without", [(), (ORIGIN, MANIFEST)], ids=["ours", "somebody's"])
def test_a_good_one_is_the_start_bit_for_bit(world: World, without: tuple[str, ...]) -> None:
    """Wherever its base lies now: of the same name, for an adapter that does not say more."""
    start = world.copy(*without)
    if not without:
        shutil.copytree(world.folder / "base", world.folder / "renamed", dirs_exist_ok=True)
    model = "base" if without else "renamed"
    out = f"from-{model}"
    words = ("train", "recipe.yaml", "--out", out, "--max-steps", "1", "--set", "recipe.start_adapter=start")
    done = sameday(world.folder, *words, "--set", f"recipe.model={model}", "--set", "recipe.learning_rate=1e-30")
    assert done.code == 0, done.err
    here, there = (load_file(folder / WEIGHTS) for folder in (world.folder / out / "adapter", start))
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    # What it started from is not needed to evaluate what came out.
    shutil.rmtree(start)
    said = sameday(world.folder, "eval", out, "--split", "val")
    assert said.code == 0, said.err
