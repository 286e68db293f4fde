"""Files of the command line stand instead of all that a config says about where its questions come from."""

from pathlib import Path
from typing import Any

import pytest
from converting import DATA, LLAMA, OURS, TARGETED, converted, lost, refused, script, whys

BOTH = {**DATA, "--val": "val.jsonl"}
PLAIN = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "bf16": True}
TRL = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "completion_only_loss": True, "use_peft": False}
TRL |= {"learning_rate": 1e-5}
SPLIT = "--train and --val replace it: the two files must hold the two parts"
LIMIT = "each of the 3 sets was cut to its first 1000 questions: FILE of --train must hold these"


def test_a_limit_of_each_of_several_sets(tmp_path: Path) -> None:
    """LLaMA-Factory counts max_samples in each; of one file, so many would be taken of all together."""
    done = converted(tmp_path, LLAMA, DATA)
    assert done.recipe.data.limit is None and whys(done)["max_samples"] == LIMIT
    listed = converted(tmp_path, {**LLAMA, "dataset": ["mllm_demo", "identity", "alpaca_en_demo"]}, DATA)
    assert listed.recipe.data.limit is None and whys(listed)["max_samples"] == LIMIT
    assert converted(tmp_path, {**LLAMA, "dataset": "mllm_demo"}, DATA).recipe.data.limit == 1000


def test_rows_that_were_drawn_are_said(tmp_path: Path) -> None:
    done = converted(tmp_path, script("swift sft", {**OURS, "dataset": ["my.jsonl#500", "other.jsonl"]}), DATA)
    assert whys(done)["dataset"] == (
        "--train replaces it; of its rows only some were taken (#500): FILE must hold these"
    )
    rows = converted(tmp_path, {**TARGETED, "optimizer": "adamw_torch"}, DATA)
    assert whys(rows)["datasets"] == (
        "--train replaces it; of its rows only some were taken ([:1%]): FILE must hold these"
    )
    whole = converted(tmp_path, script("swift sft", {**OURS, "dataset": "my#5.jsonl"}), DATA)
    assert whys(whole)["dataset"] == "--train replaces it"


@pytest.mark.parametrize(
    ("old", "more"),
    [
        (TRL, {"dataset_name": "my/set", "dataset_config": "default", "dataset_train_split": "train_sft"}),
        (TRL, {"datasets": [{"path": "my/a"}, {"path": "my/b", "split": "train"}], "dataset_configs": ["all"]}),
        (PLAIN, {"dataset_name": "my/set", "dataset_config_name": "default", "train_split": "train[:10]"}),
    ],
)
def test_what_names_the_questions_is_replaced(tmp_path: Path, old: dict[str, Any], more: dict[str, Any]) -> None:
    done = converted(tmp_path, {**old, **more}, DATA)
    assert all(whys(done)[key].startswith("--train replaces it") for key in more)
    assert lost(refused(tmp_path, {**old, **more})) >= {*more}


@pytest.mark.parametrize(
    ("old", "key"),
    [
        ({**LLAMA, "val_size": 0.1}, "val_size"),
        ({**OURS, "split_dataset_ratio": 0.1, "val_dataset": []}, "split_dataset_ratio"),
        ({**TARGETED, "optimizer": "adamw_torch", "val_set_size": 0.1}, "val_set_size"),
        ({**PLAIN, "val_ratio": 0.1}, "val_ratio"),
    ],
)
def test_a_part_held_out_is_replaced_by_two_files(tmp_path: Path, old: dict[str, Any], key: str) -> None:
    done = converted(tmp_path, old, BOTH)
    assert (done.recipe.data.train, done.recipe.data.val) == ("train.jsonl", "val.jsonl")
    assert whys(done)[key] == SPLIT
    assert lost(refused(tmp_path, old, DATA)) == {key}


@pytest.mark.parametrize(
    ("old", "key"),
    [
        ({**LLAMA, "eval_dataset": "a,b"}, "eval_dataset"),
        ({**OURS, "val_dataset": ["a#5", "b"]}, "val_dataset"),
        ({**TARGETED, "optimizer": "adamw_torch", "test_datasets": [{"path": "a"}, {"path": "b"}]}, "test_datasets"),
    ],
)
def test_questions_of_validation_are_replaced(tmp_path: Path, old: dict[str, Any], key: str) -> None:
    done = converted(tmp_path, old, BOTH)
    assert done.recipe.data.val == "val.jsonl" and whys(done)[key].startswith("--val replaces it")


@pytest.mark.parametrize("old", [TRL, PLAIN, {**TARGETED, "optimizer": "adamw_torch"}])
def test_a_preparation_that_is_skipped_changes_nothing(tmp_path: Path, old: dict[str, Any]) -> None:
    nested, flat = "dataset_kwargs.skip_prepare_dataset", "skip_prepare_dataset"
    done = converted(tmp_path, {**old, "dataset_kwargs": {flat: True}, flat: True}, DATA)
    assert {whys(done)[nested], whys(done)[flat]} <= {
        "questions are read as they are",
        "nothing in the model depends on it",
        f"says the same as {nested}",
        f"says the same as {flat}",
    }


def test_where_images_are_looked_for_is_said(tmp_path: Path) -> None:
    """The recipe would name a folder such as .. that no key of the config has."""
    said = "nothing says where images are: they are looked for from the config's folder; else give --images DIR"
    for old in (LLAMA, {**PLAIN, "image_root": None}, script("swift sft", OURS)):
        done = converted(tmp_path, old, {"--train": "train.jsonl"})
        (note,) = [note for note in done.notes if note.went_to == "recipe.data.image_root"]
        assert (note.key, note.became, note.why) == ("(not set) image_root", ".", said)
    assert said not in whys(converted(tmp_path, LLAMA, DATA)).values()
