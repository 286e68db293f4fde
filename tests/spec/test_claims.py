"""Every field says what it is, and every plan field how strictly it keeps the model."""

import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sameday.spec.plan import Claim, Plan, claims
from sameday.spec.recipe import Recipe


def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from walk(field.annotation, f"{prefix}{name}.")


FIELDS = [*walk(Recipe, "recipe."), *walk(Plan, "plan.")]


@pytest.mark.parametrize(("name", "field"), FIELDS, ids=[name for name, _ in FIELDS])
def test_every_field_has_a_description(name: str, field: FieldInfo) -> None:
    assert field.description and field.description.strip().endswith("."), name


def test_the_walk_reaches_nested_fields() -> None:
    assert {"recipe.lora.r", "recipe.data.train", "recipe.order.kind", "plan.token_budget"} <= dict(FIELDS).keys()


@pytest.mark.parametrize("name", Plan.model_fields)
def test_every_plan_field_has_a_claim(name: str) -> None:
    assert claims()[name] in get_args(Claim)


def test_no_recipe_field_has_a_claim() -> None:
    assert not [name for name, field in walk(Recipe, "") if field.json_schema_extra]


def test_recipe_and_plan_share_no_field() -> None:
    assert not Recipe.model_fields.keys() & Plan.model_fields.keys()


def test_specs_are_read_without_torch() -> None:
    code = "import sys, sameday.spec.convert, sameday.spec.record; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
