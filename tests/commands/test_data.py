"""`sameday data`: the screen, and recipes that load and train."""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path

import pytest
import yaml
from shapes import SHAPES, jpeg, write_parquet
from typer.testing import CliRunner
from worlds import write_world

from sameday.cli import app
from sameday.commands.launch import train_from_files
from sameday.spec.errors import BadInput
from sameday.spec.load import load_recipe
from sameday.spec.vlm import VlmRecipe

pytest.importorskip("pyarrow")


def png_header(width: int, height: int) -> bytes:
    """Of an image that claims a size, with next to nothing in it."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def run(*arguments: object) -> str:
    """What stands on the screen."""
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


MADE = {
    "kvasir": {
        "train": "data/raw-*.parquet",
        "image_root": "data",
        "skip": {"answer": ["nan"]},
        "split": {"val": 0.1, "test": 0.1, "seed": 0},
    },
    "kvasir_x1": {
        "train": "data/train-00000-of-00001.parquet",
        "test": "data/test-00000-of-00001.parquet",
        "image_root": "data",
        "fields": {"stage": "complexity"},
        "split": {"val": 0.1, "test": 0.0, "seed": 0},
    },
    "slake": {
        "train": "train.json",
        "val": "validate.json",
        "test": "test.json",
        "image_root": "imgs",
        "fields": {"image": "img_name"},
        "where": {"q_lang": ["en"]},
    },
}
SAID = {
    "kvasir": [
        "raw-*.parquet (train); images in",
        "answer 'nan' is none, and skipped",
        "1 of 45 lines are skipped",
    ],
    "kvasir_x1": ["complexity is taken for stage", "stages: 1 (14), 2 (14), 3 (7)", "types: polyp_type (21)"],
    "slake": [
        "img_name is taken for image",
        "q_lang has several values, of which en is taken",
        "train.json: 21 of 28 questions: where q_lang is en",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_sets_as_they_are_downloaded_train(shape: str, tmp_path: Path, tiny_qwen3: Path) -> None:
    folder = SHAPES[shape](tmp_path)
    said = run(folder, "--model", tiny_qwen3, "--recipe", folder / "recipe.yaml")
    for sentence in SAID[shape]:
        assert sentence in " ".join(said.split()), said
    assert f"written: {folder}/recipe.yaml; `sameday train {folder}/recipe.yaml` trains from it" in said
    written = yaml.safe_load((folder / "recipe.yaml").read_text())
    seed = written["data"].get("split", {}).get("seed")
    expected = json.loads(json.dumps(MADE[shape]))
    if seed is not None:
        expected["split"]["seed"] = seed  # of so few images, one under which no side is empty
    assert written["data"] == expected and written["order"] == "by_image"
    sets = ["plan.device=cpu", "recipe.max_steps=2", "recipe.precision=float32", "recipe.effective_batch=4"]
    scores = train_from_files(folder / "recipe.yaml", None, tmp_path / "run", sets)
    assert scores["samples"] > 0 and scores["loss"] > 0, "there is something to validate on"
    if shape == "kvasir":  # what is held out by content is asked about too
        arguments = ["eval", str(tmp_path / "run"), "--split", "test", "--scores-only", "--set", "plan.device=cpu"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    again = run(folder / "recipe.yaml")
    assert "order by_image" in again and "learned: " in again


def test_a_table_is_unpacked_once_where_its_images_are_looked_for(tmp_path: Path) -> None:
    """Rows that name files, and rows that hold them, in one table; the folder is said, and the same ever after."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/1.jpg").write_bytes(jpeg(1))
    rows = [
        {"image": {"bytes": None, "path": "1.jpg"} if n % 2 else {"bytes": jpeg(2), "path": None}, "question": q}
        | {"answer": "yes"}
        for n, q in enumerate(("what is it?", "where is it?", "is it red?", "is it large?"))
    ]
    table = write_parquet(tmp_path / "train.parquet", rows)
    first = CliRunner().invoke(app, ["data", str(table)], catch_exceptions=False)
    folder = tmp_path / "pictures/.unpacked"
    assert f"train.parquet: its images are unpacked into {folder}" in first.stderr
    assert "questions 4 images, by content 2 " in " ".join(first.stdout.split())
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")}
    assert [each for each in before if each.parent.name == ".unpacked" and each.parent != folder] == []
    again = CliRunner().invoke(app, ["data", str(table)], catch_exceptions=False)
    assert again.stdout == first.stdout and "unpack" not in again.stderr
    assert {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")} == before


def test_one_screen(tmp_path: Path, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = write_world(tmp_path, 3, counts=(6, 4, 4), hard=False)
    lines = (folder / "train.jsonl").read_text().splitlines()
    bad = [{"image": "0.png", "question": "", "answer": "x"}, {"image": "none.png", "question": "q?", "answer": "x"}]
    (folder / "train.jsonl").write_text("\n".join([*lines, lines[0], *map(json.dumps, bad)]) + "\n")
    said = run(folder, "--model", tiny_qwen3)
    too_long = [line for line in said.splitlines() if len(line) > 80 and str(folder) not in line]
    assert not too_long and len(said.splitlines()) <= 45
    rows = {" ".join(line.split()) for line in said.splitlines()}
    assert {
        "train.jsonl (train), val.jsonl (val); images in images",
        "rows in the file 17 9",
        "questions 15 9",
        "images, by content 3 2",
        "questions per image 4-7, median 4 3-6, median 4",
        "duplicates 1 0",
        "train and val have 2 images in common: scores of val will be too good",
        "steps of 15 questions images a step tokens alone shared fewer",
        "2 problems in 2 lines:",
        "train.jsonl:16: question is empty",
        "train.jsonl:17: image 'none.png' not found under",
    } <= rows, said
    (order,) = (line.split() for line in said.splitlines() if "order by_image" in line)
    images, alone, shared, fewer = (float(each.replace(",", "")) for each in order[2:6])
    assert images == 3 and 1 < fewer == pytest.approx(alone / shared, abs=0.06)
    assert re.search(r"<\|vision_start\|><\|image_pad\|>×\d+<\|vision_end\|>", said) and "learned: " in said
    plain = run(folder)
    assert "With --model: in tokens too." in plain and "answer: " in plain and "image_pad" not in plain
    out = folder / "made.yaml"
    run(folder, "--model", tiny_qwen3, "--recipe", out)
    assert "  on_bad: skip  # 2 lines with problems\n" in out.read_text()
    recipe = load_recipe(out)
    assert isinstance(recipe, VlmRecipe) and recipe.data.val == "val.jsonl" and recipe.effective_batch == 15


def test_recipes_are_written_where_nothing_is_lost(tmp_path: Path, tiny_qwen3: Path) -> None:
    folder = write_world(tmp_path, 3, counts=(2, 2), hard=False)
    with pytest.raises(BadInput, match=r"--recipe .*r\.yaml: needs --model, the name or folder of the model"):
        run(folder, "--recipe", folder / "r.yaml")
    (folder / "r.yaml").write_text("model: mine\n")
    with pytest.raises(BadInput, match=r"r\.yaml: is there already, and this command did not write it; choose another"):
        run(folder, "--model", tiny_qwen3, "--recipe", folder / "r.yaml")
    with pytest.raises(BadInput, match=r"--recipe .*: is for files of questions, and .*r\.yaml is a recipe already"):
        run(folder / "r.yaml", "--model", tiny_qwen3, "--recipe", folder / "other.yaml")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(folder / "train.jsonl", "--model", tiny_qwen3, "--recipe", elsewhere / "r.yaml")
    recipe = load_recipe(elsewhere / "r.yaml")
    assert isinstance(recipe, VlmRecipe) and recipe.data.train == str(folder / "train.jsonl")
    assert recipe.data.image_root == str(folder / "images") and recipe.data.split is None, "too few images to hold out"
    run(folder / "train.jsonl", "--model", tiny_qwen3, "--recipe", elsewhere / "r.yaml")  # its own is replaced


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"image": "a.png", "question": "q", "answer": "a"}, {"image": "b.png", "question": "q", "answer": "a"}],
         r"none of the images that train\.jsonl names is under .*, such as 'a\.png': .*; --image-root names it"),
        ([{"colour": 1}], r"unknown form with the keys 'colour'; (.|\n)*no good question remains in "),
    ],
)  # fmt: skip
def test_a_set_without_a_good_question(tmp_path: Path, rows: list[dict[str, object]], said: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput, match=said):
        run(tmp_path / "set/train.jsonl")


def test_what_may_be_meant_is_told_once_for_all_files(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.csv").write_text("Bild,question,answer\na.png,what?,yes\n")
    with pytest.raises(BadInput) as error:
        run(*(tmp_path / f"{name}.csv" for name in ("train", "val", "test")), "--image-root", tmp_path)
    hint = "no line has 'image': recipe.data.fields.image can name what is meant, of 'Bild'"
    assert str(error.value).count(hint) == 1


def test_what_splits_have_in_common_is_told_beside_a_test_file_without_its_images(tmp_path: Path) -> None:
    folder = write_world(tmp_path / "set", 3, (3, 2, 2), hard=False)
    (folder / "val.jsonl").write_text("".join((folder / "train.jsonl").read_text().splitlines(keepends=True)[:2]))
    rows = [{"image": f"moved/{name}.png", "question": "q?", "answer": "a"} for name in "ab"]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["data", str(folder), "--image-root", str(folder / "images")])
    assert "train and val have 1 image in common: scores of val will be too good" in done.stdout
    assert isinstance(done.exception, BadInput)
    assert str(done.exception) == (
        f"none of the images that test.jsonl names is under {folder / 'images'}, such as 'moved/a.png': "
        "recipe.data.image_root may be another folder; --image-root names it"
    )


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.jsonl: not found; files of questions, a folder or a recipe are needed"):
        run(tmp_path / "none.jsonl")
    (tmp_path / "c.yaml").write_text("task: classify\nmodel: {kind: vit}\ndata: {path: p}\n")
    with pytest.raises(BadInput, match=r"c\.yaml: is a recipe of task classify, which has no questions about images"):
        run(tmp_path / "c.yaml")
    good = {"image": {"bytes": jpeg(1), "path": None}, "question": "q?", "answer": "a"}
    path = write_parquet(tmp_path / "train.parquet", [good, good | {"image": {"bytes": b"no image", "path": None}}])
    said = " ".join(run(path).split())
    assert re.search(r"train\.parquet:2: image '\.unpacked/\w+\.bin' is not an image that Pillow can read", said)
    bomb = png_header(60_000, 60_000)
    write_parquet(path, [good, good | {"image": {"bytes": bomb, "path": None}}])
    assert "has 3,600,000,000 pixels, more than the" in " ".join(run(path).split()), "refused before it is decoded"
    write_parquet(path, [{name: value for name, value in good.items() if name != "answer"}])
    with pytest.raises(BadInput, match=r"train\.parquet:1: has no 'answer'(.|\n)*no good question remains in "):
        run(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"train\.parquet: is no parquet file, or only a part of one: "):
        run(path)


def test_conversations_without_an_answer_are_skipped(tmp_path: Path, tiny_qwen3: Path) -> None:
    folder = write_world(tmp_path, 3, counts=(4, 3), hard=False)
    for split, bad in (("train", 2), ("val", 0)):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for number, row in enumerate(rows):
            answer = "nan" if number < bad else row["answer"]
            turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
            rows[number] = {"messages": turns, "images": [row["image"]]}
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run(folder, "--model", tiny_qwen3, "--recipe", folder / "made.yaml")
    assert "answer 'nan' is none, and skipped\ntrain.jsonl: 2 of 7 lines are skipped: answer is nan\n" in said
    assert "val.jsonl: 0 of" not in said and "answers: nan" not in said
    recipe = load_recipe(folder / "made.yaml")
    assert isinstance(recipe, VlmRecipe) and recipe.data.skip == {"answer": ("nan",)}
    (folder / "made.yaml").write_text((folder / "made.yaml").read_text().replace("skip: {answer", "skip: {anwser"))
    unknown = (
        "recipe.data.skip.anwser: no line of train.jsonl has this field; there are answer, images, messages, question"
    )
    assert unknown in " ".join(run(folder / "made.yaml").split())


def test_a_recipe_is_looked_at_without_its_model(tmp_path: Path) -> None:
    write_world(tmp_path / "one", 3, counts=(3, 2), hard=False)
    write_world(tmp_path / "two", 4, counts=(4,), hard=False)
    data = {"train": "one/train.jsonl", "image_root": "one/images"}
    data |= {"mix": [{"train": "two/train.jsonl", "image_root": "two/images", "weight": 2}]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"model": "./nowhere", "data": data}))
    said = run(tmp_path / "r.yaml")
    names = "one/train.jsonl (train), two/train.jsonl (train); images in one/images, two/images"
    assert names in " ".join(said.split())
    assert "With --model: in tokens too." in said and re.search(r"rows in the file +9\n", said)


def test_images_that_turns_name_are_found(tmp_path: Path) -> None:
    """As in sets for TRL: the folder is guessed by them, too."""
    write_world(tmp_path / "made", 3, counts=(2, 2), hard=False)
    rows = [json.loads(line) for line in (tmp_path / "made/train.jsonl").read_text().splitlines()]
    (tmp_path / "set").mkdir()
    (tmp_path / "made/images").rename(tmp_path / "set/images")
    turns = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": row["image"]}, {"type": "text", "text": row["question"]}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": row["answer"]}]},
        ]
        for row in rows
    ]
    (tmp_path / "set/train.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    said = run(tmp_path / "set")
    assert "train.jsonl (train); images in images\n" in said
