"""What is almost surely a slip is told before a training, in one line each, and the training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sets
import yaml
from typed import sameday, write_recipe
from worlds import tiny_recipe, write_world

from sameday.commands.hints import slips
from sameday.spec.document import dump_yaml

LARGE = 8 * 10**9
ON_CPU = ("--set", "plan.device=cpu")


@pytest.fixture
def questions(tmp_path: Path, tiny_qwen3: Path) -> Path:
    return write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)


@pytest.mark.usefixtures("own_signals")
def test_each_is_told_once_and_the_run_goes_on(questions: Path) -> None:
    odd = ("recipe.learning_rate=0.02", "recipe.warmup_steps=3", "recipe.lora={r: 2, alpha: 256}")
    said = sameday(questions, "train", "recipe.yaml", *ON_CPU, *(word for each in odd for word in ("--set", each)))
    assert said.code == 0, said.err
    lines = [line for line in said.out.splitlines() if "usual" in line]
    assert lines == [
        "recipe.warmup_steps 3: the run has 2 steps, all of them warm-up, so that the learning rate never reaches "
        "0.02; usual is a warm-up of 3 to 10% of the steps",
        "recipe.learning_rate 0.02 is far above what is usual with recipe.train lora: 1e-5 to 5e-4; the loss may grow "
        "instead of falling",
        "recipe.lora.alpha 256 and recipe.lora.r 2 multiply what adapters make by alpha / r = 128; usual is 1 to 4",
    ]


@pytest.mark.usefixtures("own_signals")
def test_a_warm_up_of_all_steps_of_images_is_told(tmp_path: Path) -> None:
    sets.write_set(tmp_path, train=20)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4}, effective_batch=8, num_epochs=1, warmup_steps=2)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    said = sameday(tmp_path, "train", "recipe.yaml", *ON_CPU)
    assert said.code == 0, said.err
    assert "recipe.warmup_steps 2: the run has 2 steps, all of them warm-up" in said.out


@pytest.mark.usefixtures("own_signals")
def test_questions_with_more_tokens_than_the_model_has_positions(questions: Path) -> None:
    """The longest is named, and training does not stop at it: positions are computed for any length."""
    config = questions / "short"
    config.mkdir()
    for file in Path(yaml.safe_load((questions / "recipe.yaml").read_text())["model"]).iterdir():
        (config / file.name).symlink_to(file)
    written = json.loads((config / "config.json").read_text())
    written["text_config"]["max_position_embeddings"] = 16
    (config / "config.json").unlink()
    (config / "config.json").write_text(json.dumps(written))
    said = sameday(questions, "train", "recipe.yaml", *ON_CPU, "--set", f"recipe.model={config}")
    assert said.code == 0, said.err
    line, of_val = [line for line in said.out.splitlines() if "max_position_embeddings" in line]
    assert line.startswith("train: 5 of 5 questions have more tokens than the model has positions ")
    assert of_val.startswith("val: 5 of 5 questions")
    assert line.endswith("; recipe.max_length and recipe.max_pixels make questions shorter")


def test_nothing_usual_is_told(tmp_path: Path) -> None:
    usual = {"learning_rate": 1e-4, "warmup_ratio": 0.1, "lora": {"r": 8, "alpha": 16}}
    assert list(slips(tiny_recipe(tmp_path, **usual), 100, LARGE)) == []
    assert list(slips(tiny_recipe(tmp_path, **usual, train="all"), 100, LARGE)) == []
    assert list(slips(tiny_recipe(tmp_path, **usual), 1, LARGE)) == [], "a trial of one step is all warm-up"
    assert "all of them warm-up" in next(slips(tiny_recipe(tmp_path, **usual | {"warmup_ratio": 0.95}), 10, LARGE))


def test_all_weights_of_a_large_model_have_a_limit_of_their_own(tmp_path: Path) -> None:
    """A small model, trained from random weights, may learn faster."""
    recipe = tiny_recipe(tmp_path, train="all", learning_rate=3e-3)
    assert list(slips(recipe, 100, 10**6)) == []
    assert list(slips(recipe, 100, LARGE)) == [
        "recipe.learning_rate 0.003 is far above what is usual with recipe.train all: 1e-6 to 1e-4; the loss may grow "
        "instead of falling"
    ]


def test_scales_and_shares(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, learning_rate=1e-4, lora={"r": 256, "alpha": 2}, warmup_ratio=0.95)
    assert list(slips(recipe, 10, LARGE)) == [
        "recipe.warmup_ratio 0.95: the run has 10 steps, all of them warm-up, so that the learning rate never reaches "
        "0.0001; usual is a warm-up of 3 to 10% of the steps",
        "recipe.lora.alpha 2 and recipe.lora.r 256 multiply what adapters make by alpha / r = 0.00781; usual is 1 to 4",
    ]
    ranked = tiny_recipe(tmp_path, learning_rate=1e-4, lora={"r": 256, "alpha": 2, "rslora": True})
    assert list(slips(ranked, 10, LARGE)) == [], "alpha / sqrt(r) is 1/8"
