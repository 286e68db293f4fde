"""Generated answers in a report: tables with intervals, differences between runs, and files that are not what they
should be."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from answered import drawn, line, prediction, write_answers
from reported import EVIL, NASTY, profile
from test_page import Reader, nothing_runs
from typed import refused

from sameday.evaluate.compare import compare
from sameday.evaluate.measure import measure
from sameday.report.answers import read_answers, read_predictions
from sameday.report.gather import gather
from sameday.report.page import render
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan

pytest.importorskip("sacrebleu")

RECIPE = {"task": "vqa", "model": "someones/model", "data": {"train": "train.jsonl", "val": "val.jsonl"}}
ASKED = drawn(images=20, each=4, right=0.6)
BETTER = drawn(images=20, each=4, right=0.9, seed=1)

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A run folder with no more than a report needs, and with a few steps."""

    def make(name: str, **fields: Any) -> Path:
        run = tmp_path / name
        run.mkdir()
        (run / "recipe.yaml").write_text(dump_yaml(recipe_from(RECIPE | {"name": name} | fields)))
        (run / "plan.yaml").write_text(dump_yaml(Plan()))
        (run / "environment.json").write_text(json.dumps({"recipe_dir": str(tmp_path)}))
        steps = [{"step": n, "loss": 1.0, "seconds": 0.5, "samples": 16} for n in range(1, 4)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        return run

    return make


def page_of(*runs: Path) -> Reader:
    page = Reader(render(gather(runs)))
    nothing_runs(page)
    return page


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def test_a_runs_answers_with_their_intervals(made: Made) -> None:
    run = made("one")
    write_answers(run, "adapter-test", ASKED)
    text = page_of(run).text
    measured = measure(ASKED, 100)
    exact = measured["metrics"]["exact_match"]
    low, value, high = (percent(exact[key]) for key in ("low", "value", "high"))
    assert f"exact match (accuracy) {value}% {low} to {high}%" in text
    assert "Answers" in text and "questions 80 on 20 images" in text and "Difference from" not in text
    bleu = measured["metrics"]["bleu"]
    assert f"BLEU {bleu['value']:.3f} {bleu['low']:.3f} to {bleu['high']:.3f}" in text
    assert "loose match (contains, or 70% similar)" in text and "accuracy over" not in text
    for by, key, label in (
        ("answer", "closed", "closed"),
        ("stage", "3", "stage 3"),
        ("type", "colour", "type colour"),
    ):
        group = measured["groups"][by][key]
        each = group["metrics"]["exact_match"]
        spread = f"{percent(each['low'])} to {percent(each['high'])}%"
        counted = f"{group['questions']} questions on {group['images']} images"
        assert f"{label} {counted} {percent(each['value'])}% {spread}" in text
    table = measured["confusion"]
    assert f"Which answers are taken for which: the {len(table['answers'])} commonest of adapter-test" in text
    assert " ".join([table["answers"][0], *(str(n or "·") for n in table["counts"][0])]) in text


def test_runs_of_several_recipes_and_their_differences(made: Made) -> None:
    first, second = made("plain"), made("wide", order="by_image", lora={"r": 8}, max_pixels=200_704)
    write_answers(first, "adapter-test", ASKED)
    write_answers(second, "adapter-test", BETTER)
    (second / "profile.json").write_text(
        json.dumps(profile(gather([second])[0].fingerprint) | {"plan": {}, "memory_gib": 17.25})
    )
    text, page = page_of(first, second).text, render(gather([first, second]))
    assert "order.kind shuffle by_image" in text and "lora.r 4 8" in text and "max_pixels null 200704" in text
    assert "speed of training 32 questions/s 32 questions/s memory, at most – 17.25 GiB" in text
    assert "Difference from plain, on the same questions" in text
    compared = compare(ASKED, BETTER)
    each = compared["metrics"]["exact_match"]
    spread = f"{100 * each['low']:+.1f} to {100 * each['high']:+.1f}"
    assert f"exact match (accuracy) {100 * each['difference']:+.1f} points {spread}" in text
    stage = compared["groups"]["stage"]["1"]
    shown = stage["metrics"]["exact_match"]
    counted = f"{stage['questions']} questions on {stage['images']} images"
    assert f"stage 1 {counted} {100 * shown['difference']:+.1f} points" in text
    # Differences whose interval does not hold zero stand out.
    sure = [e for e in compared["metrics"].values() if e["low"] > 0 or e["high"] < 0]
    assert each in sure and len(sure) < len(compared["metrics"])
    assert f'<span class="strong">{100 * each["difference"]:+.1f} points</span>' in page


def test_equal_answers_differ_by_nothing(made: Made) -> None:
    runs = made("one"), made("two")
    for run in runs:
        write_answers(run, "adapter-val", ASKED)
    text = page_of(*runs).text
    assert "exact match (accuracy) +0.0 points no difference on 20 images, which gives no interval" in text
    assert "BLEU +0.000 no difference on 20 images, which gives no interval" in text and "to +0.0" not in text


def test_one_runs_weights_are_compared_with_the_base_models(made: Made) -> None:
    run = made("one")
    for name, given in (("adapter-test", BETTER), ("base-test", ASKED), ("adapter-val", ASKED), ("odd", ASKED)):
        write_answers(run, name, given, 20)
    [gathered] = gather([run])
    assert [(each.name, each.split) for each in gathered.answers] == [
        ("base-test", "test"),
        ("adapter-test", "test"),
        ("adapter-val", "val"),
        ("odd", "odd"),
    ]
    text = page_of(run).text
    assert "Difference from base-test, on the same questions" in text and text.count("Difference from") == 1
    assert "order.kind" not in text


def test_questions_that_only_one_run_answered_are_counted(made: Made) -> None:
    first, second, third = made("one"), made("two"), made("three")
    write_answers(first, "adapter-test", ASKED[:60], 20)
    write_answers(second, "adapter-test", BETTER[10:], 20)
    write_answers(third, "adapter-test", [replace(each, question="another?") for each in ASKED], 20)
    text = page_of(first, second, third).text
    assert re.search(r"stage 1 [\d.]+% [\d.]+ to [\d.]+%, 20 questions on 15 images", text)  # not the same for all
    assert (
        "the difference of two is of the 50 questions that both answered; 10 questions of one alone; "
        "20 questions of two alone." in text
    )
    assert "three and one share no question: there is no difference to tell." in text


def test_a_page_has_room_for_so_many_sets_of_answers(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sameday.report.answer_tables.MOST_COLUMNS", 2)
    run = made("one")
    folder = write_answers(run, "step-000000-val", ASKED[:4], 2)
    for n in (1, 2):
        shutil.copytree(folder, folder.with_name(f"step-{n:06d}-val"))
    text = page_of(run).text
    assert "the first 2 of 3 sets of answers are shown." in text
    assert "step-000001-val" in text and "step-000002-val" not in text


def test_questions_that_lacked_earlier_answers_are_told(made: Made) -> None:
    run = made("one")
    write_answers(run, "adapter-test", ASKED[:4], 2)
    file = write_answers(run, "adapter-test-cascade", ASKED[:4], 2) / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"without_earlier_answers": 2}))
    text = page_of(run).text
    lacking = "2 of 4 questions were asked without answers of earlier stages, which their images lack"
    assert f"adapter-test-cascade: {lacking}." in text and "Difference from adapter-test, on the same" in text


def test_few_questions_come_with_their_count(made: Made) -> None:
    run = made("one")
    asked = [prediction("red", "red", n, stage=3, image="one") for n in range(2)]
    write_answers(run, "adapter-test", asked, 20)
    text = page_of(run).text
    assert "stage 3 2 questions on 1 image 100.0% 2.5 to 100.0%" in text
    assert "no closed question: left out." in text and "no question has a type: left out." in text


def test_answers_that_are_not_all_there_are_told(made: Made) -> None:
    run, other = made("one"), made("two")
    folder = write_answers(run, "adapter-test", ASKED, 20)
    (folder / "metrics.json").unlink()
    said = "answers/adapter-test has no metrics.json yet: the command that began it goes on with it."
    assert said in page_of(run).text
    (write_answers(other, "adapter-test", ASKED, 20) / "predictions.jsonl").unlink()
    (folder / "metrics.json").write_text(json.dumps(measure(ASKED, 20)))
    assert "there is no difference to tell: no predictions.jsonl of two." in page_of(run, other).text


def test_a_last_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    whole = [json.dumps(line(each)) for each in ASKED[:3]]
    for torn, known in (("", 3), (whole[0][:40], 3), (whole[0], 4), ('{"id": 1}', 3), ("[" * 100_000, 3)):
        file.write_text("\n".join([*whole, torn]))
        assert read_predictions(file) == [*ASKED[:3], *ASKED[: known - 3]]


@pytest.mark.parametrize(
    ("field", "bad", "said"),
    [
        ("tokens", float("nan"), "tokens is nan; must be a whole number"),
        ("tokens", 10**400, "tokens is 1000"),
        ("tokens", True, "tokens is True; must be a whole number"),
        ("id", "7", "id is '7'; must be a whole number"),
        ("stage", 1.5, "stage is 1.5; must be a whole number"),
        ("answer", None, "answer is None; must be text"),
        ("prediction", ["red"], "prediction is ['red']; must be text"),
        ("type", 3, "type is 3; must be text"),
    ],
)
def test_a_line_that_is_no_prediction_is_named(tmp_path: Path, field: str, bad: Any, said: str) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (line(ASKED[0]), line(ASKED[1]) | {field: bad})))
    with pytest.raises(BadInput) as refusal:
        read_predictions(file)
    assert str(refusal.value).startswith(f"{file}:2: {said}") and len(str(refusal.value)) < 400


def test_texts_that_would_take_hours_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text(json.dumps(line(ASKED[0]) | {"answer": "a " * 50_000, "prediction": "b " * 50_000}) + "\n")
    with pytest.raises(BadInput, match=r"predictions\.jsonl: its answers are too long to be compared in a report"):
        read_predictions(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.pop("questions"), "it has no questions"),
        (lambda data: data["metrics"]["bleu"].update(value=float("nan")), "metrics.bleu.value: "),
        (lambda data: data["metrics"]["bleu"].update(low=1e308), "metrics.bleu.low: "),
        (lambda data: data.update(images=-1), "images: "),
        (lambda data: data["groups"].update(stage=[]), "groups.stage: "),
        (lambda data: data["confusion"]["counts"].pop(), "confusion: must have a row, a column and an `other`"),
        (lambda data: data["confusion"]["counts"][0].append(1), "confusion: must have a row, a column and an `other`"),
    ],
)
def test_metrics_that_are_none_are_named(made: Made, tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    run = made("one")
    folder = run / "answers/adapter-test"
    folder.mkdir(parents=True)
    data = measure(ASKED, 2)
    change(data)
    (folder / "metrics.json").write_text(json.dumps(data))
    place = "one/answers/adapter-test/metrics.json: is no metrics of this program: "
    assert refused(tmp_path, "report", "one").startswith(f"{place}{said}")


def test_pipes_and_odd_folders_are_as_good_as_missing(made: Made) -> None:
    run = made("one")
    (run / "answers/empty").mkdir(parents=True)
    (run / "answers/file").write_text("")
    (run / "answers/pipes").mkdir()
    for name in ("predictions.jsonl", "metrics.json"):
        os.mkfifo(run / "answers/pipes" / name)
    assert read_answers(run) == []
    assert "Answers" not in page_of(run).text


def test_answers_are_text_and_half_characters_stop_nothing(made: Made, tmp_path: Path) -> None:
    first, second = made("one"), made("two")
    asked = [
        prediction(f"{EVIL} {n}", NASTY if n else "half \ud800", n, type=EVIL, image=f"\udc00{n % 2}") for n in range(4)
    ]
    for run in (first, second):
        write_answers(run, NASTY, asked, 20)
    page = page_of(first, second)
    assert f"type {EVIL}" in page.text and NASTY in page.text
    (tmp_path / "page.html").write_text(render(gather([first, second])), encoding="utf-8")


def test_what_was_answered_is_not_written_over(made: Made, tmp_path: Path) -> None:
    write_answers(made("one"), "adapter-test", ASKED[:4], 2)
    for name in ("predictions.jsonl", "metrics.json"):
        out = f"one/answers/adapter-test/{name}"
        said = refused(tmp_path, "report", "one", "-o", out)
        assert said == f"--out {out}: is one of the files that are read; choose another one"
