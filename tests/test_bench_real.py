"""What the bench of real steps says of them is true of what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
from real import WARM, model_of, stalls

USUAL = [0.1] * (WARM + 10)
PIXELS = [1000] * len(USUAL)


def told(steps: dict[int, float], pixels: dict[int, int]) -> str:
    """Of a run whose steps and pixels are the usual ones but for these, counted from 1."""
    seconds = [steps.get(number, each) for number, each in enumerate(USUAL, 1)]
    seen = [pixels.get(number, each) for number, each in enumerate(PIXELS, 1)]
    return stalls(seconds, seen, [], "mixture, run 1: 9 s")


def test_a_long_step_is_judged_by_its_pixels() -> None:
    assert told({}, {}).endswith("later steps of more than 3 times the median: none")
    first, last = WARM + 1, WARM + 9
    large = told({first: 0.5}, {first: 2500})
    assert large.startswith("mixture, run 1: 9 s, 0.0 s of warm-up, 30 steps of 0.100 s; ")
    assert large.endswith(
        "later steps of more than 3 times the median: 21 (0.5 s, for 2.5 times the median's pixels); none of them took "
        "more than 3 times the median for their pixels"
    )
    small = told({first: 0.5, last: 0.4}, {first: 2500, last: 500})
    assert small.endswith(
        "29 (0.4 s, for 0.5 times the median's pixels); 1 of them took more than 3 times the median for their pixels"
    ), "few pixels do not make it allowed less"
    assert told({WARM: 0.9}, {}).endswith("none"), "things are compiled or recorded in the first ones"


def test_a_folder_is_of_one_size(tmp_path: Path) -> None:
    for _ in range(2):
        model_of(tmp_path, tiny=True)
    with pytest.raises(SystemExit, match="is of size tiny, and --size 8b was asked for; name another folder"):
        model_of(tmp_path, tiny=False)
    (tmp_path / "size").unlink()
    with pytest.raises(SystemExit, match="does not say of which size its model is; name another folder"):
        model_of(tmp_path, tiny=True)
