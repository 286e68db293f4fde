"""`sameday verify RECIPE --against transformers` of families whose images are squares of one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from test_peer import LAYOUTS, Bench, recipe_of, write_questions
from worlds import OF_THE_DECODER, SQUARE

from sameday.models.families.gemma3 import FAMILY
from sameday.verify.arm import Job
from sameday.verify.limits import LIMITS
from sameday.verify.trace import Trace

DENSE = {"attention": "sdpa"}
"""Split attention knows no windows."""
SIZES = {"min_pixels": None, "max_pixels": None}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer")
    write_questions(folder)
    return folder


def recipe(model: Path, **changes: Any) -> Any:
    lora = {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": OF_THE_DECODER}
    return recipe_of(model, **{**SIZES, "lora": lora, "loss_weight": "token", "system_prompt": "see and say"} | changes)


@dataclass(frozen=True)
class Arms:
    """Both trainers' first steps with a model of a family."""

    bench: Bench
    plan: dict[str, Job]
    theirs: Trace


@pytest.fixture(scope="module")
def arms(home: Path, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Arms]:
    @cache
    def made(family: str) -> Arms:
        bench = Bench(tmp_path_factory.mktemp(family), home, recipe(tiny_models[family]))
        plans = {layout: bench.ours(layout, layout) for layout in LAYOUTS}
        return Arms(bench, plans, bench.theirs(plans["one at a time"]))

    return made


@pytest.fixture(autouse=True)
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "llava" not in request.node.name:
        monkeypatch.setitem(LAYOUTS, "shared", LAYOUTS["shared"] | DENSE)


@pytest.mark.parametrize("family", SQUARE)
def test_nothing_but_rounding_lies_between_us_and_a_plain_loop(arms: Callable[[str], Arms], family: str) -> None:
    both = arms(family)
    for layout, ours in both.plan.items():
        found = both.bench.judged(ours, both.theirs)
        assert found.same, (layout, *map(str, found.differences))
        assert found.worst["gradient"] < LIMITS.gradient and found.worst["trained update"] < LIMITS.update
    pictured = [each for record in both.theirs.records for each in record.facts["samples"] if each.get("grids")]
    assert {len(each["grids"]) for each in pictured} == {1, 2, 3} and all("pixels" in each for each in pictured)


# Faults that all plans of ours would have alike


def window_ignored(_task: Any, _ranks: Any) -> Any:
    """Every layer sees everything before it."""
    return changed(lambda sight: sight._replace(window=None))


def window_one_longer(_task: Any, _ranks: Any) -> Any:
    """A token sees one place more than the window has."""
    return changed(lambda sight: sight._replace(window=sight.window and sight.window + 1))


def image_causal(_task: Any, _ranks: Any) -> Any:
    """An image's tokens see only those before them."""
    return changed(lambda sight: sight._replace(image=None))


def images_see_each_other(_task: Any, _ranks: Any) -> Any:
    """All images of a row are taken for one."""
    return changed(lambda sight: sight._replace(image=sight.image.clamp(max=0)))


def changed(change: Callable[[Any], Any]) -> Any:
    made = FAMILY.sight
    return patch.object(FAMILY, "sight", lambda *how: change(made(*how)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (window_ignored, "shared"),
        (window_one_longer, "one at a time"),
        (image_causal, "one at a time"),
        (images_see_each_other, "shared"),
    ],
)
def test_a_fault_in_what_layers_see_is_found(arms: Callable[[str], Arms], fault: Any, layout: str) -> None:
    both = arms("gemma3")
    found = both.bench.judged(both.bench.ours(fault.__name__, layout, fault), both.theirs)
    assert not found.same and "gradient" in {each.what.split(" (")[0] for each in found.differences}, fault.__doc__
    assert found.worst["gradient"] > 10 * LIMITS.gradient
