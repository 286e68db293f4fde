"""What the bench of real steps says of them is true of what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import rows
from real import LATER, asked, parts_of
from rows import BATCH, MIXTURE, ROWS, USUAL, WARM, Row, model_of
from stalls import stalls, whole_run

SECONDS = [0.1] * (WARM + 10)
PIXELS = [1000] * len(SECONDS)


def told(steps: dict[int, float], pixels: dict[int, int]) -> str:
    """Of a run whose steps and pixels are the usual ones but for these, counted from 1."""
    seconds = [steps.get(number, each) for number, each in enumerate(SECONDS, 1)]
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


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_epoch_has_the_steps_that_are_timed_in_it(row: Row) -> None:
    pictures = row.pictures or ((USUAL[0], 9),) * MIXTURE[0]
    epoch = sum(count for _, count in pictures) // BATCH
    first, later = parts_of("some", row, epoch, True, None)
    assert first.timed == range(WARM, WARM + row.steps) and first.timed.stop <= epoch, "twenty at least, in one epoch"
    assert len(first.timed) >= 20 and len(later.timed) == row.later >= 20
    assert later.timed.start == epoch + 1 and later.since == first.timed.stop, "no step is left out"
    assert (first.name, later.name) == ("some", f"some{LATER}")


def test_where_nothing_is_kept_one_epoch_is_as_another() -> None:
    (only,) = parts_of("some", ROWS["mixture"], 5, False, 7)
    assert only.timed == range(WARM, WARM + 7)


def test_an_epoch_that_is_too_short_to_be_timed_is_told() -> None:
    with pytest.raises(SystemExit, match=f"some: an epoch of {WARM} steps has none behind the first {WARM}"):
        parts_of("some", ROWS["mixture"], WARM, True, None)


def test_words_behind_peers_are_those_of_its_own_script() -> None:
    given = asked(["out", "--steps", "3", "--peers", "--only", "liger", "--steps", "5"])
    assert given.peers == ["--only", "liger", "--steps", "5"] and given.steps == 3 and given.only == tuple(ROWS)
    assert asked(["out"]).peers is None and asked(["out", "--peers"]).peers == []


def test_rows_can_be_typed_with_an_x() -> None:
    assert asked(["out", "--only", "2 of 1280x1024", "mixture"]).only == ["2 of 1280×1024", "mixture"]
    assert {asked(["out", "--only", name.replace("×", "x")]).only[0] for name in ROWS} == set(ROWS)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.least_memory])
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
    monkeypatch.setitem(rows.ROWS, "768×576, by_image", Row("by_image", ((rows.USUAL[0], 8),) * 2))
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
