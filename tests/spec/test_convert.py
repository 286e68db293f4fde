"""A Trainer-style config is converted whole: every key is mentioned, and no change of the model slips by."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.spec import trainer_keys
from sameday.spec.convert import Conversion, convert, render, write
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_config.yaml"
BASE = {"model_name_or_path": "tiny", "train_file": "train.jsonl"}


def converted(folder: Path, **values: Any) -> Conversion:
    (folder / "old.yaml").write_text(yaml.safe_dump({**BASE, **values}, sort_keys=False))
    return convert(folder / "old.yaml")


def refused(folder: Path, **values: Any) -> list[str]:
    with pytest.raises(BadInput) as error:
        converted(folder, **values)
    return [line.removeprefix(f"{folder}/") for line in str(error.value).splitlines()]


def went(conversion: Conversion, key: str) -> tuple[str | None, Any]:
    (note,) = [note for note in conversion.notes if note.key == key]
    return note.went_to, note.became


def why(conversion: Conversion, key: str) -> str:
    (note,) = [note for note in conversion.notes if note.key == key]
    return note.why


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        found += leaves(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return found


def assert_complete(conversion: Conversion, values: dict[str, Any]) -> None:
    counts = Counter(note.key for note in conversion.notes if not note.key.startswith("("))
    assert counts == dict.fromkeys(leaves(values), 1)
    lines = render(conversion.notes).splitlines()
    for key in leaves(values):
        assert sum(line.startswith(f"{key} = ") for line in lines) == 1
    assert all(note.why for note in conversion.notes if note.went_to is None)


def test_the_example() -> None:
    done = convert(EXAMPLE)
    assert_complete(done, yaml.safe_load(EXAMPLE.read_text()))
    assert done.recipe == VqaRecipe.model_validate(
        {
            "name": "kvasir-stage1",
            "model": "Qwen/Qwen3-VL-8B-Instruct",
            "lora": {"r": 4, "alpha": 8, "dropout": 0.05},
            "data": {"train": "data/train.jsonl", "val": "data/val.jsonl", "image_root": "data/images"},
            "max_length": 3072,
            "effective_batch": 16,
            "loss_weight": "sample",
            "learning_rate": 5e-5,
            "weight_decay": 0.01,
            "warmup_ratio": 0.03,
            "num_epochs": 5,
            "seed": 42,
        }
    )
    assert done.plan == Plan.model_validate(
        {"checkpointing": "full", "workers": 4, "save_steps": 250, "eval_steps": 250}
    )


def test_rendered_lines(tmp_path: Path) -> None:
    lines = render(converted(tmp_path, lr=5e-5, use_vision_cache=True).notes).splitlines()
    assert len({line.index("  ->  ") for line in lines}) == 1
    rows = [re.sub(" +", " ", line) for line in lines]
    assert "lr = 5e-05 -> recipe.learning_rate = 5e-05" in rows
    assert f"use_vision_cache = true -> dropped: {trainer_keys.DROPPED['use_vision_cache']}" in rows
    assert "(not set) num_train_epochs -> recipe.num_epochs = 3 (the Trainer's default)" in rows


def test_absent_keys_take_the_old_programs_defaults_and_say_so(tmp_path: Path) -> None:
    done = converted(tmp_path)
    recipe = done.recipe
    assert (recipe.num_epochs, recipe.learning_rate, recipe.schedule) == (3, 5e-5, "linear")
    assert (recipe.max_grad_norm, recipe.seed, recipe.weight_decay) == (1.0, 42, 0.0)
    assert (recipe.effective_batch, done.plan.max_questions, recipe.precision) == (8, 8, "float32")
    assert (recipe.train, recipe.order.kind, recipe.loss_weight) == ("all", "shuffle", "sample")
    for name in ("num_train_epochs", "learning_rate", "lr_scheduler_type", "max_grad_norm", "seed", "bf16"):
        assert why(done, f"(not set) {name}") == "the Trainer's default"
    lora = converted(tmp_path, lora={"r": 2})
    assert (lora.recipe.train, lora.recipe.lora.r, lora.recipe.lora.alpha) == ("lora", 2, 8.0)
    assert "check what the old run used" in why(lora, "(not set) lora_target_modules")


def test_hugging_face_names(tmp_path: Path) -> None:
    old = {
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_train_epochs": 2.0},
        **{"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "lora_target_modules": "q_proj,v_proj"},
        **{"max_steps": -1, "warmup_steps": 0, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine"},
        **{
            "bf16": True,
            "fp16": False,
            "tf32": True,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_epsilon": "1e-6",
        },
        **{"optim": "adamw_torch_fused", "max_grad_norm": 0.0, "gradient_checkpointing": False},
        **{"dataloader_num_workers": 2, "dataloader_pin_memory": True, "dataloader_prefetch_factor": None},
        **{"save_strategy": "epoch", "save_steps": 500, "save_total_limit": 2, "evaluation_strategy": "no"},
        **{"eval_steps": 10, "logging_steps": 5, "data_seed": 1, "per_device_eval_batch_size": 8},
        **{"torch_compile": True, "ddp_find_unused_parameters": False, "report_to": ["wandb"]},
        **{"max_pixels": 1000, "min_pixels": 10, "max_seq_length": 512, "validation_file": "val.jsonl"},
        **{"load_in_4bit": False, "group_by_length": False, "remove_unused_columns": False},
        **{
            "label_smoothing_factor": 0.0,
            "dataloader_drop_last": False,
            "run_name": "my run",
            "output_dir": "o",
        },
        **{"modules_to_save": [], "logging_dir": "logs", "do_train": True, "learning_rte": 3},
    }
    done = converted(tmp_path, **old)
    assert_complete(done, {**BASE, **old})
    recipe, plan = done.recipe, done.plan
    assert (recipe.effective_batch, plan.max_questions, recipe.num_epochs) == (32, 4, 2)
    assert recipe.lora.target_modules == ("q_proj", "v_proj")
    assert (recipe.schedule, recipe.warmup_ratio, recipe.warmup_steps) == ("cosine", 0.1, None)
    assert (recipe.betas, recipe.eps, recipe.max_grad_norm) == ((0.8, 0.95), 1e-6, None)
    assert (recipe.precision, recipe.name, recipe.max_length) == ("bf16", "my-run", 512)
    assert (plan.optimizer_impl, plan.compile, plan.checkpointing) == ("fused", "layers", "none")
    assert (plan.save_steps, plan.eval_steps, plan.save_total_limit, plan.log_steps) == ("epoch", None, 2, 5)
    assert went(done, "gradient_accumulation_steps") == ("recipe.effective_batch", 32)
    assert "multiply by their number" in why(done, "gradient_accumulation_steps")
    assert why(done, "learning_rte") == "not known; nearest: learning_rate"
    assert any("weighs by token inside a micro-batch" in note.why for note in done.notes)


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"bf16": True}, "bf16"),
        ({"bf16": False}, "float32"),
        ({"tf32": True}, "tf32"),
        ({"bf16": True, "tf32": True}, "bf16"),
        ({"torch_dtype": "torch.bfloat16"}, "bf16"),
        ({"bf16": False, "dtype": "float32", "tf32": False}, "float32"),
    ],
)
def test_precision(tmp_path: Path, old: dict[str, Any], expected: str) -> None:
    done = converted(tmp_path, **old)
    assert done.recipe.precision == expected
    assert_complete(done, {**BASE, **old})


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, ("constant", 0.0, None)),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}, ("constant", 0.0, 10)),
        ({"warmup_steps": 10, "warmup_ratio": 0.5}, ("linear", 0.0, 10)),
        ({"warmup_steps": 0.1}, ("linear", 0.1, None)),
    ],
)
def test_warm_up(tmp_path: Path, old: dict[str, Any], expected: tuple[Any, ...]) -> None:
    done = converted(tmp_path, **old)
    assert (done.recipe.schedule, done.recipe.warmup_ratio, done.recipe.warmup_steps) == expected
    assert_complete(done, {**BASE, **old})


def test_what_no_recipe_can_say_is_refused_all_at_once(tmp_path: Path) -> None:
    schedules = ", ".join(trainer_keys.SCHEDULES)
    unsaid = ", and no recipe says that (allowed:"
    assert refused(
        tmp_path,
        **{"load_in_4bit": True, "label_smoothing_factor": 0.1, "optim": "adafactor", "fp16": True},
        **{"lr_scheduler_type": "polynomial", "group_by_length": True, "dataloader_drop_last": True},
        **{"num_train_epochs": 0.5, "lora": {"r": 0, "target_modules": "all-linear"}, "lr": 1e-3},
        learning_rate=1e-4,
    ) == [
        "old.yaml:15: learning_rate is 0.0001; but lr, which means the same, is 0.001",
        f"old.yaml:3: load_in_4bit is true; the base model would be quantized{unsaid} false)",
        f"old.yaml:4: label_smoothing_factor is 0.1; the loss would be another one{unsaid} 0)",
        f"old.yaml:8: group_by_length is true; the order would depend on lengths{unsaid} false)",
        f"old.yaml:9: dataloader_drop_last is true; the last questions of an epoch would be left out{unsaid} false)",
        "old.yaml:10: num_train_epochs is 0.5; must be whole: give max_steps for a part of an epoch",
        f"old.yaml:7: lr_scheduler_type is polynomial; no recipe has this schedule (allowed: {schedules})",
        "old.yaml:5: optim is adafactor; no recipe has this optimizer "
        "(allowed: adamw, adamw_hf, adamw_torch, adamw_torch_fused, adamw_apex_fused)",
        "old.yaml:6: fp16 is true; there is no fp16 recipe (allowed: bf16, float32, tf32)",
        "old.yaml:13: lora.target_modules is all-linear; must be a list of layer names, such as [q_proj, v_proj]",
        "old.yaml:12: lora.r: lora.r is 0; must be greater than or equal to 1",
    ]


def test_a_config_without_model_or_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("lr: 5e-5\n")
    with pytest.raises(BadInput) as error:
        convert(tmp_path / "old.yaml")
    assert str(error.value).splitlines() == [
        f"{tmp_path}/old.yaml: names no model: give model_name_or_path",
        f"{tmp_path}/old.yaml: names no training questions: give train_file",
    ]


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"load_best_model_at_end": True}, {"metric": "loss", "every": "epoch"}),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 40, "greater_is_better": False},
            {"metric": "loss", "every": 40},
        ),
        (
            {"load_best_model_at_end": "true", "metric_for_best_model": "eval_exact_match", "greater_is_better": True},
            {"metric": "exact_match", "every": "epoch"},
        ),
        ({"load_best_model_at_end": False, "metric_for_best_model": "rouge"}, None),
    ],
)
def test_the_best_weights(tmp_path: Path, old: dict[str, Any], expected: dict[str, Any] | None) -> None:
    old["validation_file"] = "val.jsonl"
    done = converted(tmp_path, **old)
    assert_complete(done, {**BASE, **old})
    assert (done.recipe.best and done.recipe.best.model_dump()) == expected
    if expected is None:
        assert why(done, "load_best_model_at_end").startswith("the result is the last weights; ")


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        (
            {"metric_for_best_model": "rouge"},
            "rouge; no such validation score is known (allowed: loss, exact_match)",
        ),
        ({"greater_is_better": True}, "greater_is_better is true; the best loss is the lowest"),
        ({"validation_file": None}, "is true; without validation the best weights cannot be known"),
        ({"eval_strategy": "no"}, "is true; without validation the best weights cannot be known"),
    ],
)
def test_best_weights_that_cannot_be_known(tmp_path: Path, old: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        converted(tmp_path, **({"load_best_model_at_end": True, "validation_file": "val.jsonl"} | old))
    assert sentence in str(error.value)


def test_eight_bit_optimizers_are_not_adamw(tmp_path: Path) -> None:
    assert "optim is adamw_bnb_8bit; no recipe has this optimizer" in refused(tmp_path, optim="adamw_bnb_8bit")[0]


def test_one_setting_under_two_names(tmp_path: Path) -> None:
    done = converted(tmp_path, lr=1e-4, learning_rate=1e-4)
    assert why(done, "learning_rate") == "says the same as lr"
    assert done.recipe.learning_rate == 1e-4


def test_written_paths_name_the_same_files_from_another_folder(tmp_path: Path) -> None:
    config = tmp_path / "configs"
    for name in ("data", "models/tiny", "adapter"):
        (config / name).mkdir(parents=True)
    values = {"model_name": "models/tiny", "train_file": "data/t.jsonl", "validation_file": "/abs/v.jsonl"}
    (config / "old.yaml").write_text(yaml.safe_dump({**values, "prev_checkpoint": "adapter"}))
    done = convert(config / "old.yaml")
    out = tmp_path / "new" / "deep"
    recipe_path, plan_path = write(done, out)
    recipe = load_recipe(recipe_path)
    assert resolve_path(out, recipe.data.train).resolve() == config / "data/t.jsonl"
    assert recipe.data.val == "/abs/v.jsonl"
    assert resolve_path(out, recipe.model).resolve() == config / "models/tiny"
    assert recipe.start_adapter == "../../configs/adapter"
    assert resolve_path(out, recipe.data.image_root).resolve() == config
    assert load_plan(plan_path) == done.plan
    beside = load_recipe(write(done, config)[0])
    assert beside == done.recipe and beside.data.train == "data/t.jsonl"


def test_a_name_on_the_hub_is_no_path(tmp_path: Path) -> None:
    recipe, _ = write(converted(tmp_path, model_name_or_path="Qwen/Qwen3-VL-8B-Instruct"), tmp_path / "out")
    assert load_recipe(recipe).model == "Qwen/Qwen3-VL-8B-Instruct"


def test_write_never_destroys_another_recipe(tmp_path: Path) -> None:
    done = converted(tmp_path)
    write(done, tmp_path)
    write(done, tmp_path)
    with pytest.raises(BadInput, match=r"recipe\.yaml: already there, with other contents; choose another -o"):
        write(converted(tmp_path, lr=1.0), tmp_path)


ANY = st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 2) | st.sampled_from(["no", "steps", "x y", "3"])
NAMES = sorted({*trainer_keys.KNOWN, "ddp_timeout", "lr.x", "whatever"} - {*BASE, "model"})


@settings(deadline=None, max_examples=150)
@given(old=st.dictionaries(st.sampled_from(NAMES), ANY | st.lists(ANY, max_size=2), max_size=12))
def test_any_config_is_converted_whole_or_refused(tmp_path_factory: Any, old: dict[str, Any]) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        done = converted(folder, **old)
    except BadInput as error:
        assert str(error)
    else:
        counts = Counter(note.key for note in done.notes if not note.key.startswith("("))
        assert counts == dict.fromkeys({**BASE, **old}, 1)
