"""Recipes and plans in examples/ are good, and the small experiments start from what one command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sameday.demo.experiments import prepare
from sameday.spec.load import load_plan, load_recipe
from sameday.suite.jobs import open_suite
from sameday.suite.times.work import work_of
from sameday.tasks.registry import setup_of

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLANS = sorted(EXAMPLES.glob("*_plan.yaml"))
OLD = EXAMPLES / "trainer_config.yaml"
SUITES = sorted((EXAMPLES / "suites").glob("*.yaml"))
RECIPES = sorted({*EXAMPLES.rglob("*.yaml")} - {*PLANS, OLD, *SUITES, *(EXAMPLES / "data").rglob("*")})
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


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_has_all_experiments(path: Path) -> None:
    opened = open_suite(path, Path("nowhere"))
    trained = {Path(str(job.recipe)) for job in opened.suite.jobs.values() if job.do == "train"}
    assert {recipe.stem for recipe in trained} >= {"exp1", "exp2", "exp3", "exp4", "exp5", "cot"}
    assert {recipe.parent.name for recipe in trained} == {path.stem} and opened.suite.deadline is not None
    for name in opened.suite.jobs:
        work = work_of(opened.suite, opened.home, opened.folder, name)
        assert work.evaluation is not None, "what is trained is evaluated"
        limit = 30 * len(work.trainings)
        short = sum(each.recipe.max_steps or limit + 1 for each in work.trainings) <= limit
        assert short or path.stem != "scenes", "the small one is short"


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
