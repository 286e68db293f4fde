"""One answer beside the right one: what matches, what does not, and that scikit-learn counts labels alike."""

from __future__ import annotations

import pytest
from answered import prediction, texts
from hypothesis import given
from hypothesis import strategies as st

from sameday.evaluate.normal import Number, labels, normalise, number
from sameday.evaluate.scores import loose_match, numeric_match, question_scores


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Polyp", " polyp. "),
        ("the cecum", "Cecum"),
        ("an  ulcer", "“Ulcer!”"),
        ("ﬁne", "FINE"),
        ("Straße", "STRASSE"),
        ("５ mm", "5 MM"),
        ("'a polyp'.", "polyp"),
        ("", "  "),
        ("…", "..."),
    ],
)
def test_answers_that_are_one(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("grade A", "grade"),  # no article
        ("a", "the"),
        (">20mm", "20mm"),
        ("<5mm", "5mm"),
        ("-3", "3"),
        ("5-10mm", "5 10mm"),
        ("paris iia", "paris iib"),
        ("no", "none"),
        ("?", "."),
        ("…", "?"),
        ("", "."),
        ("!", "polyp!"),
    ],
)
def test_answers_that_are_two(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


@given(texts)
def test_a_normal_form_is_its_own(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once == normalise(text.casefold()) and bool(once) == bool(text.strip())
    # Of punctuation alone each sign counts.
    assert normalise(f"  {text}.") == once or not normalise(f"x{text}").removeprefix("x").strip("\"'`“”‘’«».,;:!? ")


def test_labels_of_a_list() -> None:
    assert (
        labels("polyp; Ulcerative Colitis") == labels("ulcerative colitis, a polyp,") == {"polyp", "ulcerative colitis"}
    )
    assert labels("red;pink; red.") == {"red", "pink"}
    assert labels("1,000") == {"1,000"} and labels("1, 2") == {"1", "2"} and labels(" ") == set()
    assert labels("；，") == {";,"} and labels("?") == {"?"} and labels("red; ?") == {"red"}


@given(st.lists(st.sampled_from(["red", "pink", "white", "z-line"]), max_size=6), st.randoms())
def test_order_and_repeats_of_labels_do_not_matter(names: list[str], random: object) -> None:
    shuffled = names * 2
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    scores = question_scores(prediction("; ".join(names), ", ".join(shuffled)))
    keys = ("label_match", "label_precision", "label_recall", "label_f1")
    assert [scores[key] for key in keys] == [1.0] * 4


@given(st.sets(st.integers(0, 5), min_size=1), st.sets(st.integers(0, 5), min_size=1))
def test_labels_are_counted_as_scikit_learn_counts_them(right: set[int], told: set[int]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rows = [[[n in side for n in range(6)]] for side in (right, told)]
    counted = metrics.precision_recall_fscore_support(*rows, average="samples", zero_division=0)[:3]
    names = [f"l{n}" for n in range(6)]
    answer, given_ = ("; ".join(names[n] for n in side) for side in (right, told))
    scores = question_scores(prediction(answer, given_))
    assert [scores[f"label_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(counted)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("3", (3, "")),
        ("3 polyps", (3, "polyps")),
        ("Two.", (2, "")),
        ("2.5 cm", (2.5, "cm")),
        ("30%", (30, "%")),
        ("1,200 ml", (1200, "ml")),
        ("-4", (-4, "")),
        ("10mm long", (10, "mm long")),
        (".5 cm", (0.5, "cm")),
        ("-.25", (-0.25, "")),
        ("\u22120.5", (-0.5, "")),  # a minus sign of typography
        ("\u22124 °", (-4, "°")),
    ],
)
def test_a_number(text: str, meant: tuple[float, str]) -> None:
    assert number(text) == Number(*meant)


@pytest.mark.parametrize(
    "text",
    [
        *("5-10mm", ">20mm", "<5mm", "~3", "T2", "grade 3", "3 of 4", "1, 2", "2,5", "3rd", "one or two", "none"),
        *("", "nan", "inf", "9" * 400, "3 small red polyps", "1/2", "½", "2 3"),
        *(".", ".5.5", "5\u221210mm", "1..5", "-", "+.cm"),
    ],
)
def test_no_number(text: str) -> None:
    assert number(text) is None and "numeric_match" not in question_scores(prediction(text, text))


def test_numbers_within_a_tolerance_and_of_one_unit() -> None:
    assert numeric_match("20", "21") and not numeric_match("20", "21.1") and numeric_match("0", "0.0")
    assert not numeric_match("0", "0.001") and not numeric_match("2", "3") and numeric_match("2", "3", tolerance=0.5)
    assert numeric_match("3 polyps", "three") and numeric_match("3", "3 polyps")
    assert not numeric_match("3 cm", "3 mm") and not numeric_match("3", "between 3 and 4")
    assert numeric_match("0.5 cm", ".5 cm") and numeric_match("\u22120.5", "-0.5") and numeric_match("-2", "\u22122.05")
    assert not numeric_match("\u22120.5", "0.5")
    assert question_scores(prediction("3 polyps", "3"))["numeric_match"] == 1.0
    assert question_scores(prediction("?", "…")) == dict.fromkeys(question_scores(prediction("?", "…")), 0.0)


def test_the_loose_match_is_loose() -> None:
    assert loose_match("polyp", "I see a Polyp here") and loose_match("no", "unknown")
    assert loose_match("colonoscopy", "colonoscope") and not loose_match("polyp", "ulcer")
    assert not loose_match("", "anything") and loose_match("", " ") and not loose_match("yes", "")
    scores = question_scores(prediction("no", "unknown"))
    assert scores["loose_match"] == 1.0 and scores["exact_match"] == 0.0 and "accuracy" not in scores


@given(texts, texts)
def test_scores_are_shares_and_right_answers_are_right(one: str, other: str) -> None:
    assert set(question_scores(prediction(one, one)).values()) == {1.0}
    scores = question_scores(prediction(one, other))
    assert all(0 <= score <= 1 for score in scores.values())
    if scores["exact_match"]:
        assert scores["label_match"] == scores["label_f1"] == 1.0
