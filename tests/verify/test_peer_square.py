"""`sameday verify RECIPE --against transformers` of families whose images are squares of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_peer import LAYOUTS, Bench, recipe_of, write_questions
from worlds import OF_THE_DECODER, SQUARE

from sameday.verify.limits import LIMITS
from sameday.verify.trace import Trace

SIZES = {"min_pixels": None, "max_pixels": None}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer")
    write_questions(folder)
    return folder


def recipe(model: Path, **changes: Any) -> Any:
    lora = {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": OF_THE_DECODER}
    return recipe_of(model, **{**SIZES, "lora": lora, "loss_weight": "token", "system_prompt": "see and say"} | changes)


@pytest.mark.parametrize("family", SQUARE)
def test_nothing_but_rounding_lies_between_us_and_a_plain_loop(
    family: str, home: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    bench = Bench(tmp_path, home, recipe(tiny_models[family]))
    theirs: Trace | None = None
    for layout in LAYOUTS:
        ours = bench.ours(layout, layout)
        theirs = theirs or bench.theirs(ours)
        found = bench.judged(ours, theirs)
        assert found.same, (layout, *map(str, found.differences))
        assert found.worst["gradient"] < LIMITS.gradient and found.worst["trained update"] < LIMITS.update
    assert theirs is not None
    pictured = [each for record in theirs.records for each in record.facts["samples"] if each.get("grids")]
    assert {len(each["grids"]) for each in pictured} == {1, 2, 3} and all("pixels" in each for each in pictured)
