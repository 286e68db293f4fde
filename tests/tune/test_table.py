"""What people read: nothing is credited with what was not measured, and lines fit a screen."""

from __future__ import annotations

from typing import Any

import pytest

from sameday.spec.plan import Plan
from sameday.tune.table import WIDTH, difference, duration, finish, in_words, lines, trial_line
from sameday.tune.trial import Result

GUESS = Plan(
    share_images=True,
    packing=True,
    max_questions=None,
    token_budget=16384,
    pad_to_multiple=128,
    compile="layers",
    attention="flex",
    label_only_logits=True,
    optimizer_impl="fused",
    workers=8,
    pin_memory=True,
    environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
)


def timed(median: float) -> dict[str, Any]:
    return {"seconds": {"median": median, "least": median, "most": median}, "memory_gib": None}


def row(name: str, value: Any, **measured: Any) -> dict[str, Any]:
    known = {"alone": None, "added": None, "left_out": None} | measured
    return {"field": name, "value": {name: value}, "claim": "rounding", **known}


def table(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    sides = {name: {**timed(s), "finish_hours": [s, s]} for name, s in (("plain", 8.0), ("best", 1.0))}
    rest = {"tried": True, "unsteady": 1.0, "looked_faster": 0, "not_tried": []}
    return {**sides, "steps": 84, "times": 8.0, "ablation": [*rows], **rest, **more}


def cells(line: str) -> list[str]:
    return line.split()[-3:]


@pytest.mark.parametrize("gap", [None, {"seconds": None, "memory_gib": None, "failed": "out of memory"}])
def test_no_choice_has_the_gain_of_one_before_it(gap: dict[str, Any] | None) -> None:
    found = lines(
        table(
            row("packing", True, added=timed(4.0), alone=timed(4.0)),
            row("share_images", True, added=gap),
            row("attention", "split", added=timed(1.0), left_out=timed(2.0)),
            row("optimizer_impl", "fused", added=timed(1.0)),
        )
    )
    assert [cells(line)[1] for line in found[1:5]] == ["2.00×", "failed" if gap else "-", "-", "1.00×"]
    assert cells(found[1])[0] == "2.00×" and cells(found[3])[2] == "0.50×"


def test_nothing_faster_is_a_sentence() -> None:
    found = lines(table(not_tried=["the search ended before workers"], looked_faster=1))
    assert found[0] == "nothing that was tried is faster than the plain plan for sure"
    assert found[1] == "looked faster, and was not when it was timed again: 1"
    assert found[2] == "not measured: the search ended before workers"
    assert found[3].startswith("plain ") and len(found) == 4
    assert lines(table(tried=False))[0] == "no other plan than the plain one could be timed: give more --minutes"


def test_a_machine_that_is_not_steady_is_told() -> None:
    told = "this machine is not steady: timed again, the best plan took 2.35 times as long"
    assert told in " ".join(lines(table(row("packing", True), unsteady=2.35)))
    assert not any("steady" in line for line in lines(table(row("packing", True), unsteady=1.2)))


def test_long_choices_are_cut_and_variables_read_as_such() -> None:
    found = lines(table(row("environment", {"V" * 90: "1"}), row("environment", {"OMP_NUM_THREADS": "2"})))
    assert found[1].split()[0].endswith("V…") and found[2].startswith("OMP_NUM_THREADS=2 ")
    assert len({len(line) for line in found[:3]}) == 1 and len(found[0]) <= WIDTH
    assert in_words({"environment": {}}) == "no environment"


@pytest.mark.parametrize("result", [Result({4: 0.1, 5: 0.2}, memory=30 * 2**30), Result({}, failed="no room " * 40)])
def test_a_trial_fits_a_screen(result: Result) -> None:
    line = trial_line(1234.5, GUESS, result, Result({4: 1.0}), {"plain": Plan(), "best": Plan(workers=1)})
    assert max(map(len, line.splitlines())) <= WIDTH and line.startswith("1234.5 min  ")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in line and "{" not in line
    assert "plain with share_images true, packing true" in " ".join(line.split())
    assert all(f"{name} " in line for name in ("max_questions", "pad_to_multiple", "workers"))
    assert ("…" in line) == bool(result.failed)


def test_a_plan_is_told_in_the_fewest_words() -> None:
    beside = {"plain": Plan(), "best": GUESS}
    assert difference(Plan(), beside) == "plain" and difference(GUESS, beside) == "best"
    assert difference(GUESS.model_copy(update={"attention": "split"}), beside) == "best with attention split"
    assert difference(Plan(workers=2), beside) == "plain with workers 2"


def test_finish_time_has_its_uncertainty() -> None:
    low, high = finish(Result(dict(enumerate([3.6, 3.6, 3.6]))), 1000)
    assert low == pytest.approx(1) and high == pytest.approx(1)
    low, high = finish(Result(dict(enumerate([1.8, 3.6, 5.4]))), 1000)
    assert low < 0.5 and high > 1.5


@pytest.mark.parametrize(
    ("hours", "said"),
    [
        ((14.53, 15.49), "14.5 to 15.5 hours"),
        ((3.001, 3.004), "3.001 to 3.004 hours"),
        ((0.5, 0.75), "30.0 to 45.0 minutes"),
        ((0.172 / 3600, 0.19 / 3600), "0.17 to 0.19 seconds"),
        ((1 / 60, 1 / 60), "60.0 seconds"),
        ((0.0, 1000.0), "0.0 to 1000.0 hours"),
    ],
)
def test_a_duration_in_the_unit_that_fits(hours: tuple[float, float], said: str) -> None:
    assert duration(*hours) == said
