"""Every field says what it is, and every plan field how strictly it keeps the model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import sets
import worlds
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sameday.spec.plan import NEEDS, Claim, Plan, claims, description, fields_of
from sameday.spec.recipe import Recipe
from sameday.spec.registry import RECIPES
from sameday.tasks.registry import setup_of
from sameday.verify.registry import trial_values


def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from walk(inner, f"{prefix}{name}.")


RECIPE_FIELDS = [pair for task, recipe in RECIPES.items() for pair in walk(recipe, f"{task}.")]
FIELDS = [*RECIPE_FIELDS, *walk(Plan, "plan.")]
TINY: dict[str, Recipe] = {
    "vqa": worlds.tiny_recipe(Path("model")),
    "cot": worlds.cot_recipe(Path("model")),
    "classify": sets.tiny_recipe(),
}
NEED_A_GPU = {"compile_mode", "lora_kernel", "level_kernel", "cuda_graphs", "embeddings_on"}
"""On a CPU nothing but their plain values can be tried."""


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=[name for name, _ in FIELDS])
def test_every_field_has_a_description(name: str, field: FieldInfo) -> None:
    assert field.description and field.description.strip().endswith("."), name


def test_the_walk_reaches_nested_fields() -> None:
    assert {"vqa.lora.r", "vqa.data.train", "vqa.order.kind", "plan.token_budget"} <= dict(FIELDS).keys()
    assert {"classify.model.levels", "classify.model.depth", "classify.augment.flip"} <= dict(FIELDS).keys()


@pytest.mark.parametrize("name", Plan.model_fields)
def test_every_plan_field_has_a_claim(name: str) -> None:
    assert claims()[name] in get_args(Claim)


def test_no_recipe_field_has_a_claim() -> None:
    assert not [name for name, field in RECIPE_FIELDS if "claim" in (field.json_schema_extra or {})]


def test_recipe_and_plan_share_no_field() -> None:
    assert not [r for r in RECIPES.values() if r.model_fields.keys() & Plan.model_fields.keys()]


def test_each_field_is_for_all_tasks_or_for_one_of_them() -> None:
    assert {name for recipe in RECIPES.values() for name in fields_of(recipe)} == Plan.model_fields.keys()
    own = {task: set(fields_of(recipe)) for task, recipe in RECIPES.items()}
    assert {"token_budget", "share_images", "attention"} <= own["vqa"] - own["classify"]
    assert {"micro_batch", "level_kernel", "images_on"} <= own["classify"] - own["vqa"]
    assert {"workers", "compile", "optimizer_impl", "save_steps"} <= own["vqa"] & own["classify"]


def test_what_fields_need_and_tasks_have_are_words_that_are_explained() -> None:
    extra: dict[str, Any] = {name: field.json_schema_extra for name, field in Plan.model_fields.items()}
    needed = {need for each in extra.values() for need in (each["needs"], *each["values_need"].values())} - {None}
    assert needed == NEEDS.keys() == {name for recipe in RECIPES.values() for name in recipe.has}
    for name, each in extra.items():
        allowed = get_args(Plan.model_fields[name].annotation)
        assert {*each["values_need"], *each["same_bits"]} <= set(allowed), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("task", RECIPES)
def test_every_field_of_a_task_has_values_to_try(task: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    recipe = TINY[task]
    found: dict[str, tuple[Any, ...]] = trial_values(setup_of(recipe, Path()), device, 7)
    assert list(found) == fields_of(recipe)
    single = {name for name, values in found.items() if len(values) == 1}
    assert single == (NEED_A_GPU & found.keys() if device == "cpu" else set())
    for name, values in found.items():
        assert values[0] == Plan.model_fields[name].get_default(call_default_factory=True), name
        assert all(value != values[0] for value in values[1:]), name
        for value in values:
            Plan.model_validate({name: value})


def test_specs_are_read_without_torch() -> None:
    code = "import sys, sameday.spec.convert.config, sameday.record.folder; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


class RowRecipe(Recipe):
    """Of a task that has neither images nor questions."""

    has = frozenset({"equal samples", "compiled layers", "checked compile", "recorded steps"})
    sample = "row"


def test_a_field_is_described_in_the_words_of_the_task() -> None:
    assert description("micro_batch", RowRecipe) == "Most rows in a micro-batch; null takes the whole step at once."
    assert description("eval_batch", RECIPES["classify"]).startswith("Most images in an evaluation micro-batch; ")
    for name in fields_of(RowRecipe):
        words = description(name, RowRecipe)
        assert words and not [word for word in ("image", "question", "mask", "{", "token") if word in words.lower()], (
            words
        )
