"""What a config calls the keys of its lines becomes the recipe's fields, and the recipe reads such lines."""

import json
from pathlib import Path
from typing import Any

import pytest
from converting import OURS, converted, refused, script, whys
from PIL import Image

from sameday.data.questions.sets import Reading
from sameday.spec.convert.conversion import Conversion, write
from sameday.spec.load import load_recipe

PLAIN = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "train_file": "data/train.jsonl", "image_root": "data"}
LLAMA = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl_nothink"}
NAMES = {"image": "img_path", "question": "query", "answer": "reply"}
WHY = "what the data calls it"
READ_SO = "does nothing: the key is read by this name anyway"
INSTEAD = (
    "give --train FILE, with data.fields in recipe.yaml where its keys have other names than image, question and answer"
)


def write_lines(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (32, 32)).save(folder / "x.png")
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(done: Conversion, folder: Path) -> list[tuple[str, str, int]]:
    """Questions, answers and numbers of images, as a run of the recipe reads them."""
    recipe, _ = write(done, folder / "new")
    seen = Reading(load_recipe(recipe), recipe.parent, None, None, lambda _: None).read(("train",))
    assert not seen.errors
    return [(each.question, each.answer, len(each.images)) for each in seen.splits["train"]]


@pytest.mark.parametrize("ending", ["key", "column", "field"])
def test_keys_that_settings_name(tmp_path: Path, ending: str) -> None:
    write_lines(tmp_path / "data", "train.jsonl", {"img_path": "x.png", "query": "What?", "reply": "a polyp"})
    done = converted(tmp_path, {**PLAIN, "data": {f"{ours}_{ending}": theirs for ours, theirs in NAMES.items()}})
    assert done.recipe.data.fields == NAMES
    assert {whys(done)[f"recipe.data.fields.{ours}"] for ours in NAMES} == {WHY}
    assert read(done, tmp_path) == [("What?", "a polyp", 1)]


def test_a_list_of_images_beside_a_question(tmp_path: Path) -> None:
    """A conversation's images are read by this name anyway, those of a plain question are not."""
    row = {"images": ["x.png"], "question": "What?", "answer": "a polyp"}
    write_lines(tmp_path / "data", "train.jsonl", row)
    assert read(converted(tmp_path, {**PLAIN, "image_key": "images"}), tmp_path) == [("What?", "a polyp", 1)]


def test_stages_and_types_by_other_names(tmp_path: Path) -> None:
    old = {**PLAIN, "stage_key": "complexity", "data": {"question_type_key": "class"}, "stage": 2}
    data = converted(tmp_path, old).recipe.data
    assert (data.fields, data.where) == ({"stage": "complexity", "type": "class"}, {"stage": ("2",)})


def test_names_that_are_ours(tmp_path: Path) -> None:
    keys = {"image_key": "image_filename", "question_column": "question", "answer_field": None}
    done = converted(tmp_path, {**PLAIN, **keys})
    assert done.recipe.data.fields == {}
    assert [whys(done)[key] for key in keys] == [READ_SO, READ_SO, "null: the default"]


@pytest.mark.parametrize("value", [3, ["a", "b"], " ", ""])
def test_what_is_no_name_of_a_key(tmp_path: Path, value: Any) -> None:
    (line,) = refused(tmp_path, {**PLAIN, "answer_key": value})
    assert line.endswith("; must be the name of a key of the data's lines, such as answer")


def test_two_names_of_one_key(tmp_path: Path) -> None:
    assert refused(tmp_path, {**PLAIN, "image_key": "a", "image_column": "b"}) == [
        "image_column is b; but image_key, which means the same, is a"
    ]


def test_validation_questions_have_the_names_of_training_questions(tmp_path: Path) -> None:
    """It was dropped as a matter of evaluation, and the run refused the file."""
    same = {**PLAIN, "validation_file": "val.jsonl", "image_key": "img"}
    (line,) = refused(tmp_path, {**same, "val": {"image_key": "other"}})
    assert line.endswith(
        "val.image_key is other; but training questions have it as img, and a recipe has one name for both "
        "(recipe.data.fields.image): give the keys the same names in the data"
    )
    (line,) = refused(tmp_path, {**PLAIN, "validation_file": "val.jsonl", "eval": {"answer_column": "reply"}})
    assert "eval.answer_column is reply; but training questions have it as answer, and" in line
    for held_out in ({"image_key": "img"}, {"image_key": None}, {"question_key": "question"}):
        assert converted(tmp_path, {**same, "val": held_out}).recipe.data.fields == {"image": "img"}


def listed(folder: Path, **entries: dict[str, Any]) -> None:
    (folder / "data").mkdir(exist_ok=True)
    known = {name: {"file_name": f"{name}.jsonl", **entry} for name, entry in entries.items()}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(known))


ALPACA = {"columns": {"prompt": "query", "response": "reply", "images": "img_path"}}


def test_a_listed_set_in_alpacas_form(tmp_path: Path) -> None:
    listed(tmp_path, ours=ALPACA)
    write_lines(tmp_path / "data", "ours.jsonl", {"query": "What?", "reply": "a polyp", "img_path": ["x.png", "x.png"]})
    done = converted(tmp_path, {**LLAMA, "dataset": "ours"})
    assert done.recipe.data.fields == NAMES
    assert whys(done)["recipe.data.train"] == (
        "as dataset_info.json has it; recipe.data.fields = {image: img_path, question: query, answer: reply}; take "
        "<image> out of questions: here an image stands before them, as it does where they begin with <image>; a "
        "line's own instruction stands instead of its question; a line's own system or system_prompt stands before its "
        "question, though no column names it"
    )
    assert read(done, tmp_path) == [("What?", "a polyp", 2)]


def test_alpacas_own_names_and_a_question_in_its_other_half(tmp_path: Path) -> None:
    own = {"columns": {"prompt": "instruction", "response": "output", "images": "images", "system": "system"}}
    listed(tmp_path, ours=own, half={"columns": {"query": "q", "response": "answer", "images": "image"}})
    row = {"instruction": "What?", "input": "", "output": "a polyp", "images": ["x.png"], "system": "Be short."}
    write_lines(tmp_path / "data", "ours.jsonl", row)
    done = converted(tmp_path, {**LLAMA, "dataset": "ours"})
    assert done.recipe.data.fields == {"image": "images", "question": "instruction", "answer": "output"}
    assert whys(done)["recipe.data.train"].endswith("where they begin with <image>")
    assert read(done, tmp_path) == [("What?", "a polyp", 1)]
    assert converted(tmp_path, {**LLAMA, "dataset": "half"}).recipe.data.fields == {"question": "q"}


def test_images_of_conversations_by_another_name(tmp_path: Path) -> None:
    talk = {"columns": {"messages": "messages", "images": "img_path"}, "tags": {"role_tag": "role"}}
    listed(tmp_path, ours={"formatting": "sharegpt", **talk})
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "a polyp"}]
    write_lines(tmp_path / "data", "ours.jsonl", {"messages": turns, "img_path": ["x.png"]})
    done = converted(tmp_path, {**LLAMA, "dataset": "ours"})
    assert done.recipe.data.fields == {"image": "img_path"}
    assert read(done, tmp_path) == [("What?", "a polyp", 1)]


def test_each_of_several_sets_has_its_own_names(tmp_path: Path) -> None:
    listed(tmp_path, ours=ALPACA, more={"columns": {"prompt": "question", "response": "answer", "images": "image"}})
    write_lines(tmp_path / "data", "ours.jsonl", {"query": "What?", "reply": "a polyp", "img_path": "x.png"})
    write_lines(tmp_path / "data", "more.jsonl", {"question": "Where?", "answer": "left", "image": "x.png"})
    done = converted(tmp_path, {**LLAMA, "dataset": "ours,more"})
    assert read(done, tmp_path) == [("What?", "a polyp", 1), ("Where?", "left", 1)]


def test_validation_questions_with_names_of_their_own(tmp_path: Path) -> None:
    listed(tmp_path, ours=ALPACA, same=ALPACA, plain={"columns": {**ALPACA["columns"], "prompt": "question"}})
    old = {**LLAMA, "dataset": "ours", "eval_strategy": "epoch"}
    assert converted(tmp_path, {**old, "eval_dataset": "same"}).recipe.data.fields == NAMES
    assert refused(tmp_path, {**old, "eval_dataset": "plain"}) == [
        "eval_dataset is plain; recipe.data.fields would be {image: img_path, answer: reply} for it and {image: "
        "img_path, question: query, answer: reply} for the training questions, and a recipe has one for both: give "
        "its keys the same names in the data, and give --val FILE"
    ]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"columns": {"prompt": "instruction", "query": "input", "response": "output", "images": "images"}},
            "a question is instruction, a line break and input (columns prompt and query), and no recipe joins two "
            f"keys: leave columns.query out if input is always empty, or write one text and {INSTEAD}",
        ),
        (
            {"columns": {**ALPACA["columns"], "history": "turns"}},
            "columns.history is turns, and earlier turns are read in conversations alone: write all turns as messages, "
            f"and {INSTEAD}",
        ),
        ({"columns": {"prompt": "q", "images": "i"}}, f"columns has no response: {INSTEAD}"),
        ({"columns": {"response": "a", "images": "i"}}, f"columns has no prompt: {INSTEAD}"),
        (
            {"columns": {"prompt": "q", "response": "a"}},
            "columns has no images, and here each line names its images ([] for none): write them, and " + INSTEAD,
        ),
        (
            {"columns": {**ALPACA["columns"], "system": "rule"}},
            f"columns.system is rule; system and system_prompt are read here: rename it in the data, and {INSTEAD}",
        ),
        (
            {"columns": {**ALPACA["columns"], "videos": "films"}},
            f"columns.videos is films, which is not read here: leave it out of the data, and {INSTEAD}",
        ),
        ({"columns": {"prompt": ["q"]}}, "columns.prompt is [q], and must be a name: give --train FILE"),
        ({"formatting": "openai"}, "formatting is openai, and alpaca and sharegpt are read here: give --train FILE"),
        ({"ranking": True}, "ranking is true: answers are compared, and no recipe learns that: give --train FILE"),
    ],
)
def test_a_listed_set_that_fields_cannot_say(tmp_path: Path, more: dict[str, Any], why: str) -> None:
    listed(tmp_path, ours={**ALPACA, **more})
    assert refused(tmp_path, {**LLAMA, "dataset": "ours"}) == [f"dataset is ours; {why}"]


def test_keys_that_ms_swift_renames(tmp_path: Path) -> None:
    swift = {name: value for name, value in OURS.items() if name != "val_dataset"} | {"dataset": "data/train.jsonl"}
    write_lines(tmp_path / "data", "train.jsonl", {"img_path": "data/x.png", "query": "What?", "reply": "a polyp"})
    columns = {"img_path": "images", "query": "query", "reply": "response"}
    for old in (script("swift sft", {**swift, "columns": json.dumps(columns)}), {**swift, "columns": columns}):
        done = converted(tmp_path, old)
        assert done.recipe.data.fields == NAMES and whys(done)["recipe.data.fields"] == "what the data calls them"
    assert read(done, tmp_path) == [("What?", "a polyp", 1)]
    ours = converted(tmp_path, {**swift, "columns": {"question": "query", "answer": "response"}})
    assert whys(ours)["columns"] == "does nothing: the keys are read by these names anyway"
    allowed = "questions would be read otherwise (allowed: KEY: images, KEY: query, KEY: response): rename others in "
    for value in ({"talk": "messages"}, {"system": "system"}, "img"):
        (line,) = refused(tmp_path, {**swift, "columns": value})
        assert line.startswith("columns is ") and line.endswith(f"; {allowed}the data instead")
    (line,) = refused(tmp_path, {**swift, "columns": {"a": "images", "b": "images"}})
    assert line.endswith("; two keys would have the same name")
