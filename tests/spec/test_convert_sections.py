"""Keys in sections about validation, another model or a part of this one are not those of the training."""

from pathlib import Path
from typing import Any

import pytest
from converting import converted, refused, whys

PLAIN = {
    **{"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "train_file": "train.jsonl", "learning_rate": 3e-5},
    **{"per_device_train_batch_size": 2, "max_length": 512},
}


@pytest.mark.parametrize("section", ["val", "dev", "eval", "validation"])
def test_sections_about_validation(tmp_path: Path, section: str) -> None:
    inner = {"batch_size": 64, "lr": 1.0, "max_length": 9, "path": "val.jsonl"}
    done = converted(tmp_path, {**PLAIN, section: inner})
    recipe = done.recipe
    assert (recipe.effective_batch, recipe.learning_rate, recipe.max_length) == (2, 3e-5, 512)
    assert recipe.data.val == "val.jsonl"
    assert whys(done)[f"{section}.batch_size"] == "what is trained does not depend on evaluation"
    without = {key: value for key, value in PLAIN.items() if key not in ("learning_rate", "max_length")}
    alone = converted(tmp_path, {**without, section: inner}).recipe
    assert (alone.learning_rate, alone.max_length) == (5e-5, None)


@pytest.mark.parametrize("inner", [{"split": 0.1}, {"ratio": 0.1}, {"early_stopping_patience": 3}])
def test_what_validation_changes_is_refused(tmp_path: Path, inner: dict[str, Any]) -> None:
    (line,) = refused(tmp_path, {**PLAIN, "val": inner})
    said = "training would stop before its last step" if "early_stopping_patience" in inner else "some training questio"
    assert said in line


DISTILLED = "a model would learn from another one (distillation), and no recipe says that; --drop {} leaves it out"


@pytest.mark.parametrize(
    ("old", "lines"),
    [
        (
            {"vision": {"lr": 1e-6}, "vision_lr": 1e-5},
            ["vision_lr is 1e-05; but vision.lr, which means the same, is 1e-06"],
        ),
        (
            {"vision": {"weight_decay": 0.1}},
            ["vision.weight_decay is 0.1; it is about the tower alone, and no recipe says that; --drop vision leaves "
             "it out"],
        ),
        ({"teacher": {"model": "big"}}, [f"teacher.model is big; {DISTILLED.format('teacher')}"]),
        ({"student": {"model": "Qwen/x"}}, [f"student.model is Qwen/x; {DISTILLED.format('student')}"]),
        (
            {"train": {"distill": {"alpha": 0.5, "temperature": 2}}},
            [f"train.distill.alpha is 0.5; {DISTILLED.format('train.distill')}",
             f"train.distill.temperature is 2; {DISTILLED.format('train.distill')}"],
        ),
    ],
)  # fmt: skip
def test_other_models_and_parts_of_this_one(tmp_path: Path, old: dict[str, Any], lines: list[str]) -> None:
    assert refused(tmp_path, {**PLAIN, **old}) == lines


def test_sections_that_are_off_or_about_images(tmp_path: Path) -> None:
    old = {"distill": {"enabled": False, "teacher_model": "big", "alpha": 0.5}, "vision": {"max_pixels": 200_000}}
    done = converted(tmp_path, {**PLAIN, **old})
    assert whys(done)["distill.alpha"] == "its section is turned off"
    assert done.recipe.max_pixels == 200_000
    assert converted(tmp_path, {**PLAIN, "teacher": {"model": None}}).recipe.model == PLAIN["model_name_or_path"]


RATES = {"vision": {"lr": 1e-6}, "optimizer": {"merger": {"learning_rate": 1e-5}}}


def test_a_learning_rate_in_a_section_about_a_part_is_the_parts(tmp_path: Path) -> None:
    done = converted(tmp_path, {**PLAIN, **RATES})
    assert done.recipe.learning_rates == {"tower": 1e-6, "projector": 1e-5}
    assert whys(done)["recipe.learning_rates.tower"] == ""
    adapters = {**PLAIN, "lora_r": 4, "lora_target_modules": ["q_proj", "tower.all-linear"]}
    assert refused(tmp_path, {**adapters, **RATES}) == [
        "optimizer.merger.learning_rate is 1e-05; a learning rate of the projector, which gets no adapters: if it got "
        "some, add projector.all-linear to lora_target_modules; else --drop optimizer.merger.learning_rate"
    ]
    dropped = converted(tmp_path, {**adapters, **RATES}, drop=["optimizer.merger.learning_rate"]).recipe
    added = converted(
        tmp_path, {**adapters, **RATES, "lora_target_modules": ["tower.all-linear", "projector.all-linear"]}
    ).recipe
    assert (dropped.learning_rates, len(added.learning_rates)) == ({"tower": 1e-6}, 2)
    frozen = converted(tmp_path, {**PLAIN, **RATES, "freeze_vision": True, "freeze_merger": True})
    assert whys(frozen)["vision.lr"] == "does nothing: the tower is not trained"


SWALLOWED = {
    **{"model": "Qwen/Qwen3-VL-8B-Instruct", "data": {"train": "train.jsonl"}, "train": {"batch_size": 2}},
    "project": {"name": "kvasir", "seed": 17},
    "distributed": {"num_gpus": 8, "gradient_accumulation_steps": 8, "mixed_precision": "bf16", "backend": "nccl"},
}


def test_settings_of_the_training_in_a_section_about_how_it_is_run(tmp_path: Path) -> None:
    done = converted(tmp_path, SWALLOWED)
    assert (done.recipe.effective_batch, done.recipe.seed, done.recipe.precision) == (128, 17, "bf16")
    said = whys(done)
    assert said["distributed.backend"] == "nothing in the model depends on it"
    assert "metrics.jsonl" in said["project.name"]


@pytest.mark.parametrize(
    ("inner", "field", "value"),
    [
        ({"wandb": {"lr": 1e-3, "name": "x"}}, "learning_rate", 1e-3),
        ({"slurm": {"nproc_per_node": 4, "time": "1:00:00", "scheduler": "backfill"}}, "effective_batch", 8),
        ({"launch": {"seed": 3}}, "seed", 3),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "effective_batch", 8),
        ({"hydra": {"job": {"num_epochs": 7}}}, "num_epochs", 7),
        ({"project": {"lora_r": 4, "target_modules": ["q_proj"], "model": "kvasir"}}, "train", "lora"),
        ({"distributed": {"enabled": False, "num_gpus": 8}}, "effective_batch", 2),
    ],
)
def test_wherever_they_stand(tmp_path: Path, inner: dict[str, Any], field: str, value: Any) -> None:
    old = {key: each for key, each in PLAIN.items() if key != "learning_rate"}
    assert getattr(converted(tmp_path, {**old, **inner}).recipe, field) == value


def test_what_no_recipe_says_in_such_a_section(tmp_path: Path) -> None:
    old = {**PLAIN, "project": {"seed": 1, "label_smoothing_factor": 0.1}, "seed": 2}
    lines = refused(tmp_path, {**old, "accelerator_config": {"split_batches": True}})
    assert lines[0] == "seed is 2; but project.seed, which means the same, is 1"
    assert lines[1].startswith("project.label_smoothing_factor is 0.1; the loss would be another one")
    assert lines[2].startswith("accelerator_config.split_batches is true; the processes would share")


def test_a_section_that_no_recipe_can_say_is_dropped_where_it_is_off(tmp_path: Path) -> None:
    stopping = {"enabled": False, "patience": 3}
    done = converted(tmp_path, {**PLAIN, "early_stopping": stopping, "augmentation": {"use": "no", "flip": True}})
    assert whys(done)["early_stopping.patience"] == whys(done)["augmentation.flip"] == "its section is turned off"
    assert refused(tmp_path, {**PLAIN, "early_stopping": {**stopping, "enabled": True}}) == [
        f"early_stopping.{key} is {value}; training would stop before its last step, and no recipe says that; --drop "
        "early_stopping leaves it out"
        for key, value in (("enabled", "true"), ("patience", 3))
    ]
