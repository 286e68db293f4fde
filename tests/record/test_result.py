"""The folder of the finished weights is named by what lies in it: an adapter, or a whole model."""

from pathlib import Path
from typing import Any

import pytest

from sameday.record.folder import RunFolder
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.vqa import VqaRecipe


def vqa(**values: Any) -> VqaRecipe:
    return VqaRecipe.model_validate({"model": "base", "data": {"train": "train.jsonl"}, **values})


CLASSIFY = ClassifyRecipe.model_validate({"model": {"kind": "vit"}, "data": {"path": "images"}})


@pytest.mark.parametrize(
    ("recipe", "name"), [(vqa(), "adapter"), (vqa(train="all"), "model"), (CLASSIFY, "model")], ids=str
)
def test_it_is_named_by_what_is_trained(recipe: Recipe, name: str, tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "run", recipe, Plan(), tmp_path)
    run.close()
    assert recipe.result == name and run.result == RunFolder.read(run.path).result == run.path / name


def test_whole_models_of_earlier_releases_are_read(tmp_path: Path) -> None:
    """They lie in adapter/. A run that was not finished gets its model/."""
    run = RunFolder.open(tmp_path / "run", vqa(train="all"), Plan(), tmp_path)
    run.close()
    (run.path / "adapter").mkdir()
    assert RunFolder.read(run.path).result == run.path / "adapter"
    (run.path / "model").mkdir()
    assert RunFolder.read(run.path).result == run.path / "model"


def test_a_folder_of_the_other_name_is_no_result(tmp_path: Path) -> None:
    """A model may have been put into the run's folder, for the recipe to start from."""
    run = RunFolder.open(tmp_path / "run", vqa(model="run/model"), Plan(), tmp_path)
    run.close()
    (run.path / "model").mkdir()
    assert run.result == run.path / "adapter" and not run.result.is_dir()
    RunFolder.open(run.path, vqa(model="run/model"), Plan(), tmp_path).close()


@pytest.mark.parametrize(
    ("recipe", "written"),
    [
        (vqa(train="all", model="./model"), "./model"),
        (vqa(train="all", data={"train": "data/../model/train.jsonl"}), "data/../model/train.jsonl"),
        (vqa(start_adapter="adapter"), "adapter"),
        (CLASSIFY.model_copy(update={"data": CLASSIFY.data.model_copy(update={"path": "model"})}), "model"),
    ],
)
def test_what_the_recipe_reads_is_not_written_over(recipe: Recipe, written: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(BadInput) as error:
        RunFolder.open(tmp_path, recipe, Plan(), tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: the finished {recipe.result}/ would be written over {written!r}, which the recipe reads; "
        "choose another --out"
    )
    RunFolder.open(tmp_path / "run", recipe, Plan(), tmp_path).close()
