"""Recipes and plans in examples/ are good, and the small experiments start from what one command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sameday.demo.experiments import prepare
from sameday.spec.load import load_plan, load_recipe
from sameday.tasks.registry import setup_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLANS = sorted(EXAMPLES.glob("*_plan.yaml"))
OLD = EXAMPLES / "trainer_config.yaml"
RECIPES = sorted({*EXAMPLES.rglob("*.yaml")} - {*PLANS, OLD, *(EXAMPLES / "data").rglob("*")})
SCENES = [path for path in RECIPES if path.parent.name == "scenes"]


@pytest.mark.parametrize("path", [*RECIPES, *PLANS], ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_it_can_be_read(path: Path) -> None:
    if path in PLANS:
        load_plan(path)
    else:
        assert load_recipe(path).name != "run", "a run is found again by its name"


def test_an_experiment_on_real_images_has_a_small_one() -> None:
    small = {path.stem for path in SCENES}
    assert small == {"exp1", "exp1_by_image", "exp2", "exp3", "exp4", "exp5", "cot"}
    assert small | {"exp1_448", "exp1_r8"} == {p.stem for p in RECIPES if p.parent.name == "kvasir"}
    for name in small:
        large, here = (load_recipe(EXAMPLES / folder / f"{name}.yaml") for folder in ("kvasir", "scenes"))
        assert (large.task, large.order, large.evaluate.cascade) == (here.task, here.order, here.evaluate.cascade)
        starts = [[(stage.where, stage.start) for stage in recipe.stages[1:]] for recipe in (large, here)]
        assert starts[0] == starts[1]


@pytest.mark.slow
def test_the_small_experiments_have_all_they_need(tmp_path: Path) -> None:
    baseline = prepare(tmp_path / "examples/data/scenes", steps=1)
    assert 0.3 < baseline < 0.45
    folder = tmp_path / "examples/scenes"
    folder.mkdir()
    for path in SCENES:
        (folder / path.name).write_text(path.read_text())
        setup = setup_of(load_recipe(folder / path.name), folder)
        if path.stem in ("exp1", "cot"):
            audited = setup.audit(lambda _text: None, ("train", "val", "test"))
            assert audited.sizes["train"] > 2500 and audited.sizes["test"] > 600 and not audited.left_out
