"""Metrics of a set of answers agree with scikit-learn, and their intervals with what intervals are."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from answered import ANSWERS, answered, drawn, prediction
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.evaluate.bootstrap import bound_of_agreement, draws, interval
from sameday.evaluate.compare import compare, matched
from sameday.evaluate.measure import confusion, measure
from sameday.evaluate.normal import normalise
from sameday.evaluate.prediction import Prediction
from sameday.evaluate.scores import question_scores
from sameday.evaluate.sums import MACRO, Questions, Sums
from sameday.evaluate.words import apart, told

few = settings(max_examples=25)


@pytest.fixture(scope="module")
def asked() -> list[Prediction]:
    return drawn(images=40, each=6, right=0.7)


@pytest.fixture(scope="module")
def measured(asked: list[Prediction]) -> dict[str, Any]:
    return measure(asked, resamples=400)


def test_every_metric_has_its_count_and_its_interval(asked: list[Prediction], measured: dict[str, Any]) -> None:
    assert (measured["questions"], measured["images"]) == (240, 40)
    assert json.loads(json.dumps(measured)) == measured
    metrics = measured["metrics"]
    expected = {"exact_match", "label_f1", "label_micro_f1", "numeric_match", "loose_match", "tokens", "label_match"}
    assert expected <= metrics.keys()
    scores = [question_scores(each) for each in asked]
    for name in ("exact_match", "label_precision", "loose_match"):
        assert metrics[name]["value"] == pytest.approx(np.mean([each[name] for each in scores]))
        assert metrics[name]["questions"] == 240
    numeric = [each["numeric_match"] for each in scores if "numeric_match" in each]
    assert metrics["numeric_match"]["questions"] == len(numeric) < 240
    assert metrics["numeric_match"]["value"] == pytest.approx(np.mean(numeric))
    assert metrics["tokens"]["value"] == pytest.approx(np.mean([each.tokens for each in asked]))
    assert all(each["high"] - each["low"] > 0.0 for each in metrics.values())
    assert measured["interval"] == {"level": 0.95, "resamples": 400, "seed": 0, "over": "images"}
    assert measured["versions"].get("nltk") == (metadata.version("nltk") if find_spec("nltk") else None)


def test_groups_of_questions(asked: list[Prediction], measured: dict[str, Any]) -> None:
    groups = measured["groups"]
    assert list(groups["answer"]) == ["closed", "open", "list"] and list(groups["stage"]) == ["1", "2", "3"]
    assert list(groups["type"]) == ["colour", "count"]
    for by, key, rows in (
        ("answer", "closed", [each for each in asked if each.answer in ("yes", "no")]),
        ("answer", "open", [each for each in asked if each.answer not in ("yes", "no")]),
        ("answer", "list", [each for each in asked if ";" in each.answer]),
        ("stage", "2", [each for each in asked if each.stage == 2]),
        ("type", "colour", [each for each in asked if each.type == "colour"]),
    ):
        group = groups[by][key]
        assert group["questions"] == len(rows) and group["images"] == len({each.image for each in rows})
        alone = measure(rows, resamples=2)["metrics"]
        for name, each in group["metrics"].items():
            assert each["value"] == pytest.approx(alone[name]["value"]), name
    closed = (
        prediction("left", "left", type="CLOSED"),
        prediction("yes", "no"),
        prediction("left", "left", type="yes/no"),
    )
    assert list(measure(closed, resamples=2)["groups"]["answer"]) == ["closed"]


def test_what_is_not_there_is_left_out_with_a_word() -> None:
    measured = measure([prediction("yes", "yes")], resamples=20)
    assert [note for note in measured["notes"] if "installed" not in note and "METEOR" not in note] == [
        "no open question: left out",
        "no answer is a list of several labels: lists have no line of their own",
        "no answer is a number: numeric match is left out",
        "no question has a stage: left out",
        "no question has a type: left out",
    ]
    assert measured["groups"]["stage"] == {} and "numeric_match" not in measured["metrics"]
    assert measure([])["notes"] == ["no question was answered"] and measure([])["questions"] == 0


def test_few_questions_all_right_are_not_certain() -> None:
    """Resampling sees no spread where all images agree; six of six right is still no proof of 100%."""
    six = measure([prediction("red", "red", n) for n in range(6)], resamples=50)["metrics"]["exact_match"]
    assert six["value"] == six["high"] == 1.0 and six["low"] == pytest.approx(0.5407, abs=1e-4)  # Clopper and Pearson
    none = measure([prediction("red", "no", n) for n in range(6)], resamples=50)["metrics"]["exact_match"]
    assert none["value"] == none["low"] == 0.0 and none["high"] == pytest.approx(1 - six["low"])
    assert bound_of_agreement(1) == pytest.approx(0.975)
    half = [prediction("red", given_, n, image="one") for n, given_ in enumerate(("red", "no"))]
    alone = measure(half, resamples=50)["metrics"]["exact_match"]
    assert alone == {"value": 0.5, "low": None, "high": None, "questions": 2}  # one image knows of no other


def test_few_images_that_all_differ_are_not_certain() -> None:
    """The bound of a single run, for a difference too."""
    wrong = [prediction("red", "no", n) for n in range(2)]
    right = [replace(each, prediction="red") for each in wrong]
    better, worse = (compare(*both, resamples=50)["metrics"] for both in ((wrong, right), (right, wrong)))
    least = 1 - bound_of_agreement(2)
    assert (better["exact_match"]["low"], better["exact_match"]["high"]) == (pytest.approx(least), 1.0)
    assert (worse["exact_match"]["low"], worse["exact_match"]["high"]) == (-1.0, pytest.approx(-least))
    alone = compare(wrong[:1], right[:1], resamples=50)["metrics"]["exact_match"]
    assert alone["low"] == pytest.approx(0.025)


def test_a_zero_of_texts_overlap_has_no_bound_of_shares() -> None:
    """Right answers of one word have no n-grams of four: that is no share of wrong images."""
    metrics = measure([prediction("red", "red", n) for n in range(6)], resamples=50)["metrics"]
    for name in {"bleu", "rouge2"} & metrics.keys():
        assert (metrics[name]["value"], metrics[name]["low"], metrics[name]["high"]) == (0.0, 0.0, 0.0)


@pytest.mark.slow
@few
@given(answered())
def test_accuracy_and_macro_scores_are_scikit_learns(predictions: list[Prediction]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    texts = [[normalise(getattr(each, name)) for each in predictions] for name in ("answer", "prediction")]
    # By numbers: NumPy takes a text that ends with a NUL for the same without it.
    numbers = {text: number for number, text in enumerate(sorted({*texts[0], *texts[1]}))}
    right, told = ([numbers[text] for text in each] for each in texts)
    counted = metrics.precision_recall_fscore_support(
        right, told, labels=sorted(set(right)), average="macro", zero_division=0
    )
    measured = measure(predictions, resamples=5)["metrics"]
    assert [measured[name]["value"] for name in MACRO] == pytest.approx(counted[:3], abs=1e-9)
    assert measured["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(right, told))
    assert measured["accuracy"]["value"] == pytest.approx(measured["exact_match"]["value"])


@pytest.mark.slow
@few
@given(answered(), st.integers(0, 99))
def test_a_resample_is_measured_as_if_it_were_the_set(predictions: list[Prediction], seed: int) -> None:
    """An image that is drawn twice stands there twice."""
    questions = Questions.of(predictions)
    sums = Sums(questions, range(len(predictions)))
    weights = next(draws(int(questions.images.max()) + 1, 1, seed))
    times = weights[0].astype(int)
    again = [
        replace(each, image=f"{each.image} {n}", id=each.id + 1000 * n)
        for each, image in zip(questions.predictions, questions.images, strict=True)
        for n in range(times[image])
    ]
    plain = {name: each["value"] for name, each in measure(again, resamples=2)["metrics"].items()}
    resampled = {name: value[0] for name, value in sums.resampled(weights).items() if not np.isnan(value[0])}
    assert resampled == pytest.approx(plain, abs=1e-9)


@pytest.mark.slow
@few
@given(answered(), st.randoms())
def test_intervals_hold_their_values_and_do_not_depend_on_the_order(
    predictions: list[Prediction], shuffle: random.Random
) -> None:
    measured = measure(predictions, resamples=60)
    groups = [measured, *(group for of in measured["groups"].values() for group in of.values())]
    for each in (each for group in groups for each in group["metrics"].values()):
        assert each["low"] is None or each["low"] <= each["value"] <= each["high"]
    shuffled = list(predictions)
    shuffle.shuffle(shuffled)
    assert measure(shuffled, resamples=60) == measured


def test_a_seed_gives_the_same_interval_and_another_one_another(asked: list[Prediction]) -> None:
    one, again, other = (measure(asked, resamples=60, seed=seed)["metrics"] for seed in (0, 0, 1))
    assert one == again and one["exact_match"] != other["exact_match"]


def test_images_are_drawn_with_all_of_their_questions() -> None:
    """Where an image's questions are right or wrong together, counting them as independent would be too sure."""
    guess = random.Random(0)
    given_ = [guess.choice(("yes", "no")) for _ in range(40)]
    together = [prediction("yes", given_[n // 9], n, image=str(n // 9)) for n in range(360)]
    apart = [replace(each, image=str(each.id)) for each in together]
    wide, narrow = (measure(each, resamples=500)["metrics"]["exact_match"] for each in (together, apart))
    assert wide["value"] == narrow["value"]
    assert wide["high"] - wide["low"] == pytest.approx(3 * (narrow["high"] - narrow["low"]), rel=0.3)


def test_intervals_cover_as_often_as_they_say() -> None:
    """Of sets that are drawn at 80%, about 95 in 100 intervals hold 80%."""
    source = np.random.default_rng(0)
    held = 0
    for seed in range(200):
        right = source.random(60) < 0.8
        resampled = np.concatenate([weights @ right / 60 for weights in draws(60, 400, seed)])
        ends = interval(float(right.mean()), resampled)
        assert ends is not None
        held += ends[0] <= 0.8 <= ends[1]
    assert 180 <= held <= 198


@given(st.integers(1, 50), st.integers(1, 40), st.integers(0, 5))
def test_draws_take_as_many_images_as_there_are(images: int, resamples: int, seed: int) -> None:
    rows = np.concatenate(list(draws(images, resamples, seed)))
    assert rows.shape == (resamples, images) and (rows.sum(axis=1) == images).all()


def test_large_sets_are_drawn_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameday.evaluate.bootstrap.AT_ONCE", 100)
    assert [len(rows) for rows in draws(30, 8)] == [3, 3, 2]


def test_confusion_of_the_commonest_answers(asked: list[Prediction]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    table = confusion(asked, most=4)
    assert len(table["answers"]) == 4 and table["rest"] > 0
    keys = [*table["answers"], "other"]
    right, told = ([normalise(getattr(each, name)) for each in asked] for name in ("answer", "prediction"))
    counted = metrics.confusion_matrix(right, [each if each in keys else "other" for each in told], labels=keys)
    assert np.array_equal(np.column_stack([table["counts"], table["other"]]), counted[:4])
    assert sum(map(sum, table["counts"])) + sum(table["other"]) + table["rest"] == len(asked)
    assert confusion(asked)["rest"] == 0 and set(confusion(asked)["answers"]) == {normalise(a) for a in ANSWERS}


def test_many_different_answers_have_macro_scores_without_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn.metrics")
    monkeypatch.setattr("sameday.evaluate.sums.MOST_CLASSES", 3)
    monkeypatch.setattr("sameday.evaluate.measure.MOST_CLASSES", 3)
    measured = measure([prediction(f"thing {n}", "thing 0", n) for n in range(4)], resamples=20)
    assert measured["metrics"]["macro_f1"]["low"] is None and measured["metrics"]["exact_match"]["low"] is not None
    assert "macro scores have no interval: there are more than 3 different answers" in measured["notes"]


def test_what_a_terminal_says(asked: list[Prediction], measured: dict[str, Any]) -> None:
    first, *groups = told(measured)
    exact = measured["metrics"]["exact_match"]
    low, value, high = (f"{100 * exact[key]:.1f}" for key in ("low", "value", "high"))
    assert first.startswith(f"240 questions on 40 images: exact match (accuracy) {value}% ({low} to {high}%); ")
    assert first.split("; ")[-1].startswith("loose match (contains, or 70% similar) ")
    stage = measured["groups"]["stage"]["3"]["metrics"]["exact_match"]
    shown = f"{100 * stage['value']:.1f}% ({100 * stage['low']:.1f} to {100 * stage['high']:.1f}%)"
    assert f"stage 3, 80 questions on 40 images: exact match (accuracy) {shown}" in groups
    assert (
        any(each.startswith("closed, ") for each in groups) and groups[-len(measured["notes"]) :] == measured["notes"]
    )
    assert list(told(measure([]))) == ["no question was answered"]
    alone = [prediction("red", "red", n, image="one") for n in range(2)] + [prediction("red", "no", 2, image="one")]
    assert "exact match (accuracy) 66.7% (no interval)" in next(told(measure(alone, resamples=5)))


# Two sets of answers


def test_equal_runs_do_not_differ(asked: list[Prediction]) -> None:
    compared = compare(asked, reversed(asked), resamples=60)
    assert (compared["questions"], compared["only_first"], compared["only_second"]) == (240, 0, 0)
    groups = [compared, *(group for of in compared["groups"].values() for group in of.values())]
    for each in (each for group in groups for each in group["metrics"].values()):
        assert each["difference"] == 0.0 and each["first"] == each["second"]
        assert each["alike"] and each["low"] is each["high"] is None, "no image says how far apart they may be"
    assert apart("exact_match", compared) == "no difference on 40 images, which gives no interval"
    alone = compare(asked[:1], asked[:1], resamples=5)
    assert apart("exact_match", alone) == "no difference on 1 image, which gives no interval"
    without = [replace(each, image=f"line {each.id}") for each in asked[:3]]
    said = apart("exact_match", compare(without, without, resamples=5))
    assert said == "no difference on 3 questions, which gives no interval"
    numbers = compare(asked, asked, resamples=5)["metrics"]["numeric_match"]["questions"]
    assert 0 < numbers < 240
    assert apart("numeric_match", compared) == f"no difference on {numbers} questions, which gives no interval"


def test_what_cancels_out_is_no_agreement() -> None:
    """One image better, one worse: the difference is nothing, and its interval is not."""
    first = [prediction("red", given_, n) for n, given_ in enumerate(("red", "no", "red", "no"))]
    second = [prediction("red", given_, n) for n, given_ in enumerate(("no", "red", "red", "no"))]
    compared = compare(first, second, resamples=400)
    each = compared["metrics"]["exact_match"]
    assert each["difference"] == 0.0 and not each["alike"] and each["low"] < 0 < each["high"]
    assert apart("exact_match", compared) == f"{100 * each['low']:+.1f} to {100 * each['high']:+.1f}"


def test_a_paired_difference(asked: list[Prediction]) -> None:
    better = drawn(images=40, each=6, right=0.9, seed=1)
    there, here = measure(asked, resamples=2)["metrics"], measure(better, resamples=2)["metrics"]
    compared, turned = compare(asked, better, resamples=400), compare(better, asked, resamples=400)
    for name, each in compared["metrics"].items():
        assert each["first"] == pytest.approx(there[name]["value"])
        assert each["second"] == pytest.approx(here[name]["value"])
        assert each["difference"] == pytest.approx(here[name]["value"] - there[name]["value"])
        assert each["low"] <= each["difference"] <= each["high"]
        assert turned["metrics"][name]["difference"] == pytest.approx(-each["difference"])
    assert compared["metrics"]["exact_match"]["low"] > 0
    assert compared["groups"]["stage"]["1"]["questions"] == 80
    assert json.loads(json.dumps(compared)) == compared


def test_what_is_hard_for_both_does_not_widen_a_difference() -> None:
    """Images that are right or wrong in both runs alike: each run's interval is wide, their difference's is not."""
    guess = random.Random(0)
    hard = [guess.random() < 0.5 for _ in range(100)]
    first = [prediction("yes", "no" if hard[n] else "yes", n) for n in range(100)]
    second = [replace(each, prediction="yes") if n < 3 else each for n, each in enumerate(first)]
    alone = measure(first, resamples=400)["metrics"]["exact_match"]
    paired = compare(first, second, resamples=400)["metrics"]["exact_match"]
    assert paired["high"] - paired["low"] < 0.5 * (alone["high"] - alone["low"])


def test_questions_of_one_run_alone_are_counted() -> None:
    first = [prediction("yes", "yes", n) for n in range(5)]
    second = [prediction("yes", "no", n) for n in range(2, 9)]
    compared = compare(first, second, resamples=20)
    assert (compared["questions"], compared["only_first"], compared["only_second"]) == (3, 2, 4)
    changed = [replace(each, answer="no") for each in first]  # another right answer is another question
    assert compare(first, changed)["questions"] == 0 and compare(first, changed)["metrics"] == {}


def test_questions_are_the_same_by_what_they_ask_about_which_image() -> None:
    first = [prediction("yes", "yes", n) for n in range(4)]
    moved = [replace(each, where=f"/elsewhere/{each.where}") for each in first]
    pairs, *alone = matched(first, moved)
    assert alone == [0, 0] and all(one == other for one, other in pairs)
    elsewhere = [replace(each, id=each.id + 9, where=f"other.jsonl:{each.id + 9}") for each in first]
    assert matched(first, reversed(elsewhere)) == (pairs, 0, 0)
    for others in (first, moved, elsewhere):  # the same lines about other images are other questions
        compared = compare(first, [replace(each, image=f"another {each.image}") for each in others])
        assert (compared["questions"], compared["only_first"], compared["only_second"]) == (0, 4, 4)
    without = [replace(each, image=f"line {each.id}") for each in first]  # named by their lines, and no image has them
    behind = [replace(each, id=each.id + 9, where=f"x:{each.id + 9}", image=f"line {each.id + 9}") for each in first]
    assert matched(without, behind)[1:] == (0, 0)


def test_a_question_that_is_asked_twice_is_told_apart_by_its_place() -> None:
    twice = [prediction("yes", f"answer {n}", n, image="one", question="is it?") for n in range(3)]
    moved = [replace(each, where=f"/elsewhere/{each.where}") for each in twice]
    later = [replace(each, id=each.id + 9, where=f"other.jsonl:{each.id + 9}") for each in twice]
    for others in (twice, moved, later):
        pairs, *alone = matched(twice, reversed(others))
        assert alone == [0, 0] and [one.prediction for one, _ in pairs] == [other.prediction for _, other in pairs]
    ((one, other),), *alone = matched(twice, moved[1:2])
    assert alone == [2, 0] and one.prediction == other.prediction == "answer 1"
    assert matched(twice, twice[:1] * 5)[1:] == (0, 2)


def test_questions_without_an_image_are_no_images() -> None:
    """Each is drawn by itself, as images are."""
    three = [prediction("yes", "yes", n, image=f"line {n}") for n in range(3)]
    alone = measure(three, resamples=20)
    assert (alone["images"], alone["without_image"]) == (0, 3)
    assert next(told(alone)).startswith("3 questions without an image: ")
    both = measure([*three, prediction("yes", "no", 9, image="one")], resamples=20)
    assert (both["images"], both["without_image"]) == (1, 3)
    assert next(told(both)).startswith("4 questions on 1 image, 3 of them without an image: ")
    assert measure(three, resamples=20)["metrics"]["exact_match"]["low"] == pytest.approx(0.2924, abs=1e-4)


def test_a_type_is_told_in_one_line() -> None:
    lines = list(told(measure([prediction("yes", "yes", type="colour\r\nrc=0 done " + 90 * "x")], resamples=20)))
    (line,) = (line for line in lines if line.startswith("type "))
    assert line.startswith(f"type colour rc=0 done {42 * 'x'}…, 1 question on ")
