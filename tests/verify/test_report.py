"""The verdict says what was compared, by which limits, and where the arms part, in 40 lines of 100 columns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.spec.plan import Plan, changed
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.compare import Comparison
from sameday.verify.limits import LIMITS
from sameday.verify.report import HEIGHT, WIDTH, WORDS, Report
from sameday.verify.structure import Difference

TENSOR = "base_model.model.model.language_model.layers.{}.self_attn.q_proj.lora_A.default.weight"
TRAINED = {"loss": 1e-7, "trained gradient": 1e-6, "trained update": 1e-6, "validation": 1e-7, "replay": 1e-7}
SEEN = ["tokens", "positions", "images", "patches", "targets", "weights"]
FAST = Plan(share_images=True, packing=True, max_questions=None, environment={"A": "b" * 200})


def found(half: bool, kinds: int = 3, differences: int = 0) -> Comparison:
    result = Comparison("bf16" if half else "float32", bitwise=False, seen=SEEN)
    if half:
        one = {"R": 1.02, "slope": 0.998, "plain slope": 0.997, "error": 0.02, "off": 0.05}
        result.groups = {"all": one, **{f"{'long.' * (i % 9)}kind_{i}": one for i in range(kinds)}}
        result.worst = {"ratio_all": 1.02, "ratio_group": 1.1, "ratio_tensor": 17.4, "slope": 1.25, **TRAINED}
        result.bounds = {"ratio_group": 1.8, "ratio_tensor": 54.6, "slope": 4.0}
    else:
        result.worst = {"gradient": 2e-6, "tensor": 3e-6, **TRAINED}
    result.names = dict.fromkeys(result.worst, TENSOR.format(7))
    result.differences = [Difference(3 + i, "gradient", TENSOR.format(i), "R 2.00 (1.2)") for i in range(differences)]
    return result


def report(comparison: Comparison, **changes: Any) -> Report:
    recipe = VqaRecipe.model_validate({"name": "mine", "model": "m", "data": {"train": "t"}, "lora": {"dropout": 0.1}})
    fields: dict[str, Any] = {
        "recipe": recipe,
        "names": ("fast.yaml", "plain.yaml"),
        "fields": changed(Plan(), FAST, dropout=True),
        "precision": comparison.precision,
        "steps": 8,
        "sizes": (16, 16, 16, 8) * 2,
        "killed_in": 6,
        "resumed_from": 4,
        "ranks": 1,
        "comparison": comparison,
        "seconds": 12.0,
        "dropout": False,
    }
    return Report(**(fields | changes))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("differences", [0, 1, 9])
def test_it_names_what_was_compared(half: bool, differences: int) -> None:
    made = report(found(half, differences=differences))
    text = " ".join(" ".join(made.lines()).split())
    for words in (
        *("plan fast.yaml", "against plain.yaml", "steps 8 of 16, 16, 16, 8,", made.recipe.fingerprint),
        "share_images false -> true (statistical)",
        "dropout 0.1, off, since its masks are another draw in one of the plans",
        f"precision {'bf16' if half else 'float32'}",
        *((" R limit slope", f"1.020 {LIMITS.ratio_all:.2f}") if half else (f"(limit {LIMITS.gradient:.0e})",)),
        *((f"step 3, gradient: {TENSOR.format(0)}",) if differences else ("no difference beyond a limit",)),
    ):
        assert words in text, (words, text)
    verdict = "different" if differences else "statistical"
    assert made.verdict == verdict and made.lines()[0] == f"{verdict}: {WORDS[verdict]}"
    assert made.exit_code == (1 if differences else 0)
    assert json.loads(json.dumps(made.as_json()))["verdict"] == verdict


@pytest.mark.parametrize(("bitwise", "dropout", "verdict"), [(True, 0.0, "bitwise"), (False, 0.0, "rounding")])
def test_the_milder_verdicts(bitwise: bool, dropout: float, verdict: str) -> None:
    comparison = found(half=False)
    comparison.bitwise = bitwise
    made = report(comparison)
    recipe = made.recipe.model_copy(update={"lora": made.recipe.lora.model_copy(update={"dropout": dropout})})
    assert report(comparison, recipe=recipe).verdict == verdict


@settings(max_examples=40)
@given(
    half=st.booleans(),
    kinds=st.integers(0, 60),
    differences=st.integers(0, 30),
    name=st.text("abc/ .", min_size=1, max_size=300),
    ranks=st.integers(1, 3),
)
def test_it_fits(half: bool, kinds: int, differences: int, name: str, ranks: int) -> None:
    lines = report(found(half, kinds, differences), names=(name, name[::-1]), ranks=ranks).lines()
    assert len(lines) <= HEIGHT == 40 and max(map(len, lines)) <= WIDTH == 100
    text = "\n".join(lines)
    assert ("no difference" in text) == (differences == 0)
    assert not differences or "first       step 3, gradient" in text, "the end is never what is cut"


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("differences", [1, 9])
def test_the_first_difference_is_told_to_its_end(half: bool, differences: int) -> None:
    comparison = found(half, kinds=30, differences=differences)
    words = "their processor makes 12 tokens of this question, and ours makes 14; " * 6 + "the two part here."
    comparison.differences[0] = Difference(1, "tokens", "question 3", words)
    lines = report(comparison).lines()
    assert words in " ".join(" ".join(lines).split()) and len(lines) <= HEIGHT
    comparison.differences[0] = Difference(1, "tokens", "question 3", words * 20)
    lines = report(comparison).lines()
    assert "            (the rest of this sentence is in what --json writes)" in lines and len(lines) <= HEIGHT
    assert differences == 1 or "and 5 more; --json has all of them" in lines[-1], "the end is never what is cut"


def test_each_number_has_its_own_limit_beside_it() -> None:
    """A bias of few numbers may be further from the reference than others."""
    made = report(found(half=True))
    text = " ".join(" ".join(made.lines()).split())
    assert "one tensor, largest for its limit 17.400 54.60 base_model.mod" in text
    assert "slope, largest for its limit: 1.25 of the error further from 1 (limit 4.00), of base_mod" in text
    data = json.loads(json.dumps(made.as_json()))
    assert data["largest"]["ratio_tensor"] == 17.4 and data["bounds"]["ratio_tensor"] == 54.6


@pytest.mark.parametrize("half", [False, True])
def test_all_that_was_compared_exactly_is_named(half: bool) -> None:
    text = " ".join(" ".join(report(found(half)).lines()).split())
    assert f"structure equal: samples, {', '.join(SEEN)}, rates, groups, dtypes, flags" in text


def test_the_rate_of_false_alarms_is_claimed_only_where_it_was_measured() -> None:
    for half in (False, True):
        measured = " ".join(report(found(half), false_alarms=VqaSetup.false_alarms).lines())
        assert "fewer than 3 in 100" in measured and "no rate of" not in measured
        unknown = " ".join(report(found(half), false_alarms=ClassifySetup.false_alarms).lines())
        assert "no rate of false alarms was measured for task vqa" in unknown  # of the recipe's task


@pytest.mark.parametrize(
    ("dropout", "on", "said", "kept"),
    [
        (0.1, True, "dropout 0.1, on, with the same masks", "on"),
        (0.1, False, "dropout 0.1, off, since its masks are another draw in one of the plans", "off"),
        (0.0, True, None, "none"),
    ],
)
def test_it_says_whether_dropout_was_on(dropout: float, on: bool, said: str | None, kept: str) -> None:
    made = report(found(half=False), dropout=on)
    recipe = made.recipe.model_copy(update={"lora": made.recipe.lora.model_copy(update={"dropout": dropout})})
    made = report(found(half=False), dropout=on, recipe=recipe)
    text = " ".join(" ".join(made.lines()).split())
    assert said in text if said else "dropout 0" not in text
    assert made.as_json()["dropout"] == kept


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({}, None),
        ({"plan": (12, 16)}, "recorded plan: 12 of 16 micro-batches dropout"),
        ({"plan": (12, 16), "against": (1, 32)}, "recorded plan: 12 of 16 micro-batches; against: 1 of 32 micro-"),
        (
            {"plan": (0, 16)},
            "recorded plan: 0 of 16 micro-batches. NOTHING was recorded in plan: the verdict says nothing about "
            "cuda_graphs; sizes that do not come again within --steps, or are too large for it to pay, are launched",
        ),
    ],
)
def test_it_says_how_much_ran_recorded(recorded: dict[str, tuple[int, int]], said: str | None) -> None:
    made = report(found(half=True, kinds=40), recorded=recorded)
    text = " ".join(" ".join(made.lines()).split())
    assert said in text if said else "recorded" not in text
    assert len(made.lines()) <= HEIGHT
    kept = made.as_json()["recorded"]
    assert kept == {name: {"recorded": n, "micro_batches": m} for name, (n, m) in recorded.items()}


def test_rounding_that_hides_faults_is_told() -> None:
    noisy, usual = found(half=True), found(half=True)
    noisy.groups["all"] = noisy.groups["all"] | {"error": 1.33}
    said = " ".join(" ".join(report(noisy).lines()).split())
    assert "rounding alone is 133% of the gradient here" in said and "--precision float32 compares strictly" in said
    assert "rounding alone" not in " ".join(report(usual).lines())
