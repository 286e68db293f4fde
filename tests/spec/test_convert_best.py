"""Which weights of the old run are the result, and how often they were compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from converting import DATA, LLAMA, OURS, TARGETED, converted, refused, whys

PLAIN = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "train_file": "train.jsonl"}
BEST = {**PLAIN, "validation_file": "val.jsonl", "load_best_model_at_end": True, "eval_strategy": "steps"}
SHARE = "a share of all steps, and how many there are is not known here"


@pytest.mark.parametrize(
    ("old", "every"),
    [
        ({"eval_steps": 0.1, "save_steps": 0.1, "max_steps": 25}, 3),
        ({"eval_steps": 100, "save_steps": 100, "eval_delay": 100}, 100),
        ({"eval_steps": 100, "save_strategy": "best"}, 100),
        ({"eval_strategy": "epoch", "save_strategy": "epoch", "eval_delay": 1}, "epoch"),
    ],
)
def test_how_often_weights_are_compared(tmp_path: Path, old: dict[str, Any], every: Any) -> None:
    done = converted(tmp_path, {**BEST, **old})
    assert done.recipe.best is not None and done.recipe.best.every == every
    assert whys(done)["recipe.best"] == ""


@pytest.mark.parametrize(
    ("old", "how"), [({"save_strategy": "steps", "save_steps": 500}, "save_steps"), ({}, "save_steps by default")]
)
def test_weights_that_were_evaluated_and_not_saved(tmp_path: Path, old: dict[str, Any], how: str) -> None:
    done = converted(tmp_path, {**BEST, **old, "eval_steps": 100})
    assert done.recipe.best is not None and done.recipe.best.every == 500
    assert done.plan.eval_steps == 100
    said = whys(done)["recipe.best"]
    assert said.startswith("near, not the same: the Trainer's result is one of the weights that it saved, every 500 ")
    assert f"({how})" in said


@pytest.mark.parametrize(
    ("old", "line"),
    [
        (
            {"eval_steps": 0.1, "save_steps": 0.1},
            f"eval_steps is 0.1; {SHARE}, which decides the best weights: give max_steps, or eval_steps as a number "
            "of steps",
        ),
        (
            {"eval_steps": 50, "save_steps": 50, "eval_delay": 200},
            "eval_delay is 200; earlier weights would be compared too, and no recipe leaves them out (allowed: at most "
            "50, the first comparison)",
        ),
        (
            {"eval_strategy": "epoch", "save_strategy": "epoch", "eval": {"eval_delay": 2}},
            "eval.eval_delay is 2; earlier weights would be compared too, and no recipe leaves them out (allowed: at "
            "most 1, the first epoch)",
        ),
    ],
)
def test_best_weights_that_no_recipe_has(tmp_path: Path, old: dict[str, Any], line: str) -> None:
    assert refused(tmp_path, {**BEST, **old}) == [line]


def test_a_share_of_all_steps_is_no_number_of_them(tmp_path: Path) -> None:
    done = converted(tmp_path, {**PLAIN, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.2})
    assert (done.plan.eval_steps, done.plan.save_steps) == ("epoch", "epoch")
    assert whys(done)["eval_steps"] == f"{SHARE}; plan.eval_steps is a number of them"
    known = converted(tmp_path, {**PLAIN, "eval_steps": 0.1, "save_steps": 0.2, "max_steps": 45})
    assert (known.plan.eval_steps, known.plan.save_steps) == (5, 9)


ENTRY = {"file_name": "val.json", "formatting": "sharegpt"}
EPOCHS = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
AXOLOTL = {key: value for key, value in TARGETED.items() if key not in ("evals_per_epoch", "saves_per_epoch")}


@pytest.mark.parametrize(
    ("old", "val"),
    [
        ({**LLAMA, "eval_dataset": "held_out"}, "data/val.json"),
        ({**LLAMA, "eval_dataset": ["held_out"]}, "data/val.json"),
        ({**OURS, "eval_steps": None, "save_steps": None}, "./datasets/img_test.json"),
        ({**AXOLOTL, "optimizer": "adamw_torch", "test_datasets": [{"path": "val.jsonl"}]}, "val.jsonl"),
    ],
)
def test_by_questions_that_the_trainers_own_key_names(tmp_path: Path, old: dict[str, Any], val: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"held_out": ENTRY}))
    recipe = converted(tmp_path, {**old, **EPOCHS}, DATA).recipe
    assert recipe.best is not None and (recipe.best.every, recipe.data.val) == ("epoch", val)


SWIFT = {**OURS, "load_best_model_at_end": True, "eval_steps": None}
TRL = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "dataset_name": "t.jsonl", "completion_only_loss": True}
AS_LOGGED = "without eval_steps the Trainer evaluates as often as it logs"


@pytest.mark.parametrize(
    ("old", "every", "why"),
    [
        ({**BEST, "logging_steps": 25, "save_steps": 25}, 25, AS_LOGGED),
        ({**BEST, "logging_steps": 25, "save_steps": 25, "eval_steps": 0}, 25, AS_LOGGED),
        (BEST, 500, AS_LOGGED),
        ({**BEST, "logging_steps": 0.1, "save_steps": 0.1, "max_steps": 50}, 5, AS_LOGGED),
        ({**TRL, **BEST, "save_steps": 10}, 10, AS_LOGGED),
        ({**LLAMA, **BEST, "logging_steps": 20, "save_steps": 20, "dataset": None}, 20, AS_LOGGED),
        ({**SWIFT, "save_steps": 40}, 40, "ms-swift's default"),
        ({**SWIFT, "save_steps": 40, "eval_strategy": "steps"}, 40, "ms-swift's default"),
        ({**SWIFT, "save_steps": None}, 500, "ms-swift's default"),
    ],
)
def test_how_often_it_is_where_eval_steps_is_not_given(
    tmp_path: Path, old: dict[str, Any], every: int, why: str
) -> None:
    done = converted(tmp_path, old)
    assert done.recipe.best is not None and (done.recipe.best.every, done.plan.eval_steps) == (every, every)
    (said,) = [note.why for note in done.notes if note.key == "(not set) eval_steps"]
    assert said == why


def test_axolotl_decides_itself_how_often_it_logs(tmp_path: Path) -> None:
    old = {**AXOLOTL, "optimizer": "adamw_torch", "test_datasets": [{"path": "val.jsonl"}], "eval_strategy": "steps"}
    old = {key: value for key, value in old.items() if key != "logging_steps"}
    (line,) = refused(tmp_path, {**old, "load_best_model_at_end": True}, DATA)
    assert line == (
        "eval_strategy is steps; without eval_steps axolotl evaluates as often as it logs, and how often that is by "
        "default it decides itself, which decides the best weights: give eval_steps"
    )
    assert converted(tmp_path, old, DATA).plan.eval_steps == "epoch"
