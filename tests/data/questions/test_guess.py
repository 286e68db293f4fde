"""What names, columns and folders suggest, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.data.questions.guess import by_split, grouped_shards, image_root, meaning_of, question_files, split_named
from sameday.data.questions.read import meant_keys
from sameday.spec.errors import BadInput


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("train-00000-of-00004.parquet", "train"),
        ("kvasir_vqa_validation.csv", "val"),
        ("Slake/validate.json", "val"),
        ("dev.tsv", "val"),
        ("test/questions.json", "test"),
        ("training/latest.json", "train"),
        ("raw-00000-of-00031.parquet", None),
        ("contest.json", None),
        ("test_of_ours/a.json", None),
    ],
)
def test_a_file_is_the_split_that_its_name_says(path: str, split: str | None) -> None:
    assert split_named(Path("/data") / path) == split


def touch(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return [folder / name for name in names]


def test_numbered_parts_are_one(tmp_path: Path) -> None:
    files = touch(tmp_path, "raw-00000-of-00002.parquet", "raw-00001-of-00002.parquet", "test.jsonl", "v-1.csv")
    assert grouped_shards(files) == [tmp_path / "raw-*.parquet", tmp_path / "test.jsonl", tmp_path / "v-1.csv"]
    touch(tmp_path, "raw-other.parquet")
    assert grouped_shards(files)[:2] == files[:2], "a pattern that means another file too is none"


def test_what_is_trained_on_must_be_known(tmp_path: Path) -> None:
    one, other, val = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "val.json"
    assert by_split([one]) == {"train": one} and by_split([val, one]) == {"train": one, "val": val}
    train = tmp_path / "train.json"
    assert by_split([one, train, other]) == {"train": train}, "others are left"
    assert by_split([val]) == {"train": val}, "a single file is looked at, whatever it is called"
    with pytest.raises(BadInput) as error:
        by_split([one, other])
    listed = "which file is trained on is not known of a.json, b.json; give one file, or name them train, val, test"
    assert str(error.value) == listed
    with pytest.raises(BadInput, match=r"val\.json and .*dev\.json: both are val by their names; give one of them"):
        by_split([one, val, tmp_path / "dev.json"])


def test_questions_are_told_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "data/imgs").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "data/train.json").write_text('[{"img_name": "a.png", "question": "q", "answer": "a"}]')
    (tmp_path / "data/boxes.json").write_text('[{"box": [1, 2]}]')
    (tmp_path / "data/imgs/question.json").write_text('[{"img_name": "a.png", "question": "q", "answer": "a"}]')
    assert question_files(tmp_path) == [tmp_path / "data/train.json"]
    with pytest.raises(BadInput, match=r"has no file of questions; known are \.jsonl, \.json, \.csv, \.tsv, \.parquet"):
        question_files(touch(tmp_path, "empty/x.png")[0].parent)


ROW: dict[str, Any] = {"image": "a.png", "question": "what?", "answer": "yes"}
SPOKEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "NaN"}],
    "images": ["a"],
}


@pytest.mark.parametrize(
    ("rows", "fields", "where", "skip"),
    [
        ([ROW], {}, {}, {}),
        (
            [{"img_path": "a.png", "query": "what?", "gt": "yes"}],
            {"image": "img_path", "question": "query", "answer": "gt"}, {}, {},
        ),
        ([{"img_id": 3, "img_name": "a.png", "question": "q", "answer": "a"}], {"image": "img_name"}, {}, {}),
        ([ROW | {"complexity": 1}, ROW | {"complexity": 3}], {"stage": "complexity"}, {}, {}),
        ([ROW | {"complexity": "easy"}], {}, {}, {}),
        ([ROW | {"complexity": 2, "stage": 1}], {}, {}, {}),
        ([ROW | {"q_lang": "zh"}] * 2 + [ROW | {"q_lang": "en"}], {}, {"q_lang": ["en"]}, {}),
        ([ROW | {"lang": "fr"}] * 2 + [ROW | {"lang": "de"}], {}, {"lang": ["fr"]}, {}),
        ([ROW | {"lang": "fr"}] * 2, {}, {}, {}),
        ([ROW, ROW | {"answer": "nan"}, ROW | {"answer": "N/A"}], {}, {}, {"answer": ["N/A", "nan"]}),
        ([ROW | {"answer": "none"}], {}, {}, {}),
        ([SPOKEN, SPOKEN | {"messages": 3}, SPOKEN | {"messages": SPOKEN["messages"][1:]}], {}, {},
         {"answer": ["NaN"]}),
        ([{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "n/a"}]}], {}, {},
         {"answer": ["n/a"]}),
        (["no object", 3, None], {}, {}, {}),
    ],
)  # fmt: skip
def test_columns_say_what_they_are(rows: list[Any], fields: Any, where: Any, skip: Any) -> None:
    meaning = meaning_of(rows)
    assert (meaning.fields, meaning.where, meaning.skip) == (fields, where, skip)


VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=2)
NAMES = st.sampled_from(["img", "image", "query", "answer", "gt", "lang", "level", "stage", "x"])


@given(st.lists(st.dictionaries(NAMES, VALUES), max_size=12))
def test_whatever_rows_hold_a_guess_is_made(rows: list[dict[str, Any]]) -> None:
    meaning = meaning_of(json.loads(json.dumps(rows)))
    every = set.intersection(*map(set, rows)) if rows else set()
    assert set(meaning.fields.values()) <= every, "a column that some row lacks is not taken"
    assert not meant_keys(every - {"img", "gt", "query"}).keys() & set(meaning.fields.values())


def test_images_are_searched_beside_their_questions(tmp_path: Path) -> None:
    files = touch(tmp_path, "questions/a.json", "pictures/deep/x/1.png", "pictures/deep/x/2.png")
    names = ["x/1.png", "x/2.png", "x/3.png"]
    assert image_root(names, files[0].parent) == tmp_path / "pictures/deep"
    assert image_root(["1.png", "2.png"], files[1].parents[1]) == tmp_path / "pictures/deep/x"
    assert image_root(["y.png"], files[0].parent) is None
    other = tmp_path / "other/imgs"
    other.mkdir(parents=True)
    (other / "mine.png").touch()
    assert image_root(["mine.png"], files[0].parent) is None, "of another set"
    assert image_root(["mine.png"], tmp_path / "other") == other
    assert image_root(["../questions/a.json"], tmp_path / "pictures/deep") is None, "names may not leave the folder"
    assert image_root(["a\0b"], tmp_path) is None
