"""Test images that were trained on are told wherever their scores stand: before the training, beside the scores, and
on the model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sets
import worlds
from typed import sameday, write_recipe

from sameday.demo.patterns import write_patterns
from sameday.spec.document import dump_yaml

ON_CPU = ("--set", "plan.device=cpu")
BEFORE = "train and test have 1 image in common: scores of test will be too good"
SEEN = "1 of the 2 images of test was trained on: its scores are too good"
VALIDATED = "1 of the 2 images of validation was trained on: its scores are too good."


def lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A run, and test questions about two images, one of them an image of the training under another name. Not to be
    written to."""
    folder = worlds.write_world(tmp_path_factory.mktemp("trained"), 6, (3, 2, 2), hard=False)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    shutil.copy(folder / "images/0.png", folder / "images/renamed.png")
    lines(folder / "train.jsonl", rows[:5])
    lines(folder / "val.jsonl", rows[4:6])
    lines(folder / "test.jsonl", [*({**row, "image": "renamed.png"} for row in rows[:2]), *rows[5:]])
    data = {"train": "train.jsonl", "val": "val.jsonl", "test": "test.jsonl", "image_root": "images"}
    write_recipe(folder, tiny_qwen3, data=data)
    said = sameday(folder, "train", "recipe.yaml", "--out", "run", *ON_CPU)
    assert said.code == 0, said.err
    assert said.out.splitlines().count(BEFORE) == 1
    return folder


@pytest.fixture
def world(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "world"))


def evaluated(folder: Path, *words: str) -> list[str]:
    said = sameday(folder, "eval", *words)
    assert said.code == 0, said.err
    return [line.strip() for line in said.out.splitlines()]


@pytest.mark.usefixtures("own_signals")
def test_beside_scores_and_answers_also_where_the_training_data_is_gone(world: Path) -> None:
    (world / "train.jsonl").unlink()
    (world / "images/0.png").unlink()
    said = evaluated(world, "run", "--split", "test", "--max-new-tokens", "2")
    assert said.count(SEEN) == 2  # with the scores, and with the answers
    assert json.loads((world / "run/eval-test.json").read_text())["trained_on"] == {"images": 1, "of": 2}
    metrics = json.loads((world / "run/answers/adapter-test/metrics.json").read_text())
    assert metrics["notes"][0] == SEEN
    assert metrics["trained_on"] == {"images": 1, "of": 2}
    pushed = sameday(world, "push", "run", "me/polyps", "--dry-run", "--base", "me/base")
    assert pushed.code == 0, pushed.err
    card = (world / "run/push/README.md").read_text().splitlines()
    assert card.count(f"{SEEN}.") == card.count(VALIDATED) == 1
    scores = card.index("## Scores")
    assert scores < card.index(f"{SEEN}.") < card.index("## Record")


@pytest.mark.usefixtures("own_signals")
def test_weights_that_learned_from_them_and_others(world: Path) -> None:
    asked = ("recipe.yaml", "--split", "test", "--scores-only")
    assert SEEN in evaluated(world, *asked, "--adapter", "run/adapter")
    assert not [line for line in evaluated(world, *asked, "--base") if "trained on" in line]
    (world / "run/images.json").unlink()  # as an earlier release left it
    assert not [line for line in evaluated(world, "run", *asked[1:]) if "trained on" in line]


@pytest.mark.usefixtures("own_signals")
def test_what_the_weights_learned_before_counts_too(world: Path) -> None:
    """A run that goes on from another's adapter, on other images."""
    rows = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    lines(world / "train.jsonl", rows[3:])
    words = ("recipe.yaml", "--set", "recipe.start_adapter=run/adapter", *ON_CPU)
    said = sameday(world, "train", *words, "--out", "next")
    assert said.code == 0, said.err
    assert BEFORE not in said.out
    assert SEEN in evaluated(world, "next", "--split", "test", "--scores-only")


@pytest.mark.usefixtures("own_signals")
def test_test_questions_that_eval_will_refuse_stop_no_training(world: Path) -> None:
    (world / "test.jsonl").write_text('{"image": "none.png", "question": "what?", "answer": "a"}\n')
    said = sameday(world, "train", "recipe.yaml", "--out", "other", *ON_CPU)
    assert said.code == 0, said.err
    (hint,) = (line for line in said.out.splitlines() if "will refuse" in line)
    assert hint.startswith("`sameday eval --split test` will refuse the test questions: 1 problem in 1 line: ")
    assert "none.png" in hint


@pytest.mark.usefixtures("own_signals")
def test_labelled_images(tmp_path: Path) -> None:
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    first = min((tmp_path / "set/train").rglob("*.png"))
    shutil.copy(first, tmp_path / "set/test" / first.parent.name / "again.png")
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4}, effective_batch=4, num_epochs=1)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    said = sameday(tmp_path, "train", "recipe.yaml", "--out", "run", *ON_CPU)
    assert said.code == 0, said.err
    assert BEFORE in said.out
    seen = "1 of the 5 images of test was trained on: its scores are too good"
    assert seen in evaluated(tmp_path, "run", "--split", "test")
    pushed = sameday(tmp_path, "push", "run", "me/patterns", "--dry-run")
    assert pushed.code == 0, pushed.err
    assert f"{seen}." in (tmp_path / "run/push/README.md").read_text()
