"""What the bench of real steps says of them is true of what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import real
from real import ROWS, WARM, asked, model_of, stalls, whole_run

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


def test_rows_can_be_typed_with_an_x() -> None:
    assert asked(["out", "--only", "2 of 1280x1024", "mixture"]).only == ["2 of 1280×1024", "mixture"]
    assert {asked(["out", "--only", name.replace("×", "x")]).only[0] for name in ROWS} == set(ROWS)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.kept or row.least_memory])
def test_a_whole_run_is_not_of_a_row_about_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked(["out", "--run", "--only", name])
    assert f"and {name!r} is about another plan" in capsys.readouterr().err
    assert asked(["out", "--run"]).run and asked(["out", "--run", "--only", "768×576, shuffle"]).run


def test_first_steps_that_are_faster_than_others_cost_nothing() -> None:
    assert "the first 20 took 0.0 s and" in told({1: 0.01, 2: 0.02}, {})


@pytest.mark.slow
def test_a_first_run_may_end_before_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its last step, which is no mistake."""
    monkeypatch.setitem(real.ROWS, "768×576, by_image", real.Row("by_image", ((real.USUAL[0], 8),) * 2))
    args = asked([str(tmp_path), "--size", "tiny", "--run", "--only", "768×576, by_image", "--steps", "3"])
    model_of(tmp_path, tiny=True)
    whole_run(tmp_path, args)
    said = capsys.readouterr().out
    assert "768×576, by_image, run 1: " in said and "768×576, by_image, run 2: " in said
    assert said.count("seconds of the 1 steps of each epoch: ") == 2


def test_a_folder_is_of_one_size(tmp_path: Path) -> None:
    for _ in range(2):
        model_of(tmp_path, tiny=True)
    with pytest.raises(SystemExit, match="is of size tiny, and --size 8b was asked for; name another folder"):
        model_of(tmp_path, tiny=False)
    (tmp_path / "size").unlink()
    with pytest.raises(SystemExit, match="does not say of which size its model is; name another folder"):
        model_of(tmp_path, tiny=True)
