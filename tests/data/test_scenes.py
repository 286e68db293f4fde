"""The generated set is sound, balanced, and the same again for the same seed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from PIL import Image

from sameday.data.questions.audit import audit
from sameday.demo.scenes import COLOURS, GROUNDS, draw, majority_baseline, notes


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    draw(folder, train_images=400, val_images=100, seed=0)
    return folder


def test_the_audit_finds_it_good(scenes: Path) -> None:
    result = audit(scenes / "val.jsonl", scenes, None, workers=1)
    assert result.problems == []
    assert len({sample.image_key for sample in result.samples}) == 100
    assert {(i.width, i.height) for sample in result.samples for i in sample.images} == {(96, 96)}
    assert {sample.stage for sample in result.samples} == {1, 2, 3}


def test_an_image_has_about_nine_different_questions(scenes: Path) -> None:
    train = rows(scenes / "train.jsonl")
    questions: dict[str, list[str]] = defaultdict(list)
    for row in train:
        questions[row["image"]].append(row["question"])
    counts = [len(asked) for asked in questions.values()]
    assert len(counts) == 400 and min(counts) == 8 and max(counts) == 10
    assert 8.5 < sum(counts) / len(counts) < 9.5
    assert all(len(set(asked)) == len(asked) for asked in questions.values())


def test_answers_without_the_image_are_mostly_wrong(scenes: Path) -> None:
    train, val = rows(scenes / "train.jsonl"), rows(scenes / "val.jsonl")
    assert 0.25 < majority_baseline(train, val) < 0.45
    yes_no = Counter(row["answer"] for row in train if row["question"].startswith("Is there"))
    assert set(yes_no) == {"yes", "no"}
    assert 0.45 < yes_no["yes"] / yes_no.total() < 0.55


def test_answers_fit_the_pixels(scenes: Path) -> None:
    for row in rows(scenes / "val.jsonl"):
        with Image.open(scenes / row["image"]) as image:
            ground = image.getpixel((0, 0))
            if row["question"] == "What colour is the background?":
                assert ground == GROUNDS[row["answer"]]
            elif row["question"].endswith("corner?"):
                left, top = 48 * ("right" in row["question"]), 48 * ("bottom" in row["question"])
                cell = image.crop((left, top, left + 48, top + 48))
                expected = {ground} | ({COLOURS[row["answer"]]} if row["answer"] != "none" else set())
                colours = cell.getcolors()
                assert colours is not None and {colour for _, colour in colours} == expected


def test_the_seed_decides_and_a_larger_set_begins_with_the_smaller(tmp_path: Path) -> None:
    for name, count, seed in (("a", 3, 1), ("b", 3, 1), ("c", 5, 1), ("d", 3, 2)):
        draw(tmp_path / name, count, 2, seed, size=48)

    def content(name: str) -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path / name)): p.read_bytes() for p in (tmp_path / name).rglob("*.*")}

    assert content("a") == content("b")
    assert content("a") != content("d")
    small, large = content("a"), content("c")
    assert large["train.jsonl"].startswith(small["train.jsonl"])
    assert all(large[name] == small[name] for name in small if name.startswith("images/"))


def test_majority_baseline_by_hand() -> None:
    train = [{"question": "a", "answer": x} for x in "xxy"] + [{"question": "b", "answer": "y"}] * 4
    val = [{"question": q, "answer": a} for q, a in (("a", "x"), ("a", "y"), ("b", "y"), ("new", "y"))]
    assert majority_baseline(train, val) == 0.75


def test_notes_are_not_the_questions_and_the_last_line_is_what_is_asked(scenes: Path, tmp_path: Path) -> None:
    """A base model learns from notes: what it has read must not hold a question of the set, nor a false finding."""
    draw(tmp_path, train_images=30, val_images=1, seed=0, ask=notes)
    taken = rows(tmp_path / "train.jsonl")
    true: dict[str, dict[str, str]] = defaultdict(dict)
    for row in taken:
        true[row["image"]][row["question"].splitlines()[-1]] = row["answer"]
    behind = [row for row in taken if "\n" in row["question"]]
    assert 0.3 < len(behind) / len(taken) < 0.5
    for row in behind:
        head, *findings, empty, asked = row["question"].splitlines()
        assert (head, empty) == ("Earlier findings:", "") and 1 <= len(findings) <= 6
        facts = {f"- {question} {answer}" for question, answer in true[row["image"]].items() if question != asked}
        assert facts.issuperset(findings)
    read = "\n".join(row["question"] for row in taken)
    assert not [row for row in rows(scenes / "train.jsonl") if row["question"] in read]
    wordings = {asked for of_image in true.values() for asked in of_image}
    assert len(wordings) == 4 * (1 + 1 + 4 + 4 + 7), "four for each note: background, count, corners, things"
