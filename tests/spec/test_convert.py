"""A Trainer-style config is converted whole: every key is mentioned, and no change of the model slips by."""

import dataclasses
import enum
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.models.families import known_families
from sameday.spec.convert import keys as trainer_keys
from sameday.spec.convert.config import convert
from sameday.spec.convert.conversion import Conversion, render, write
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_config.yaml"
BASE = {"model_name_or_path": "tiny", "train_file": "train.jsonl"}


def converted(folder: Path, drop: tuple[str, ...] = (), **values: Any) -> Conversion:
    (folder / "old.yaml").write_text(yaml.safe_dump({**BASE, **values}, sort_keys=False))
    return convert(folder / "old.yaml", known_families(), drop)


def refused(folder: Path, drop: tuple[str, ...] = (), **values: Any) -> list[str]:
    with pytest.raises(BadInput) as error:
        converted(folder, drop, **values)
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
    *lines, blank, unsaid = render(conversion.notes).splitlines()
    assert blank == "" and unsaid.startswith("No config says what the old program does in its own code")
    dropped = [f"{note.key} = " for note in conversion.notes if note.went_to is None]
    if dropped:  # last, once, with their count
        heading = lines.index(f"{len(dropped)} {'key' if len(dropped) == 1 else 'keys'} dropped:")
        assert len(lines[heading + 1 :]) == len(dropped) and not any("dropped:" in line for line in lines[:heading])
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
            "image_backend": "torchvision",
        }
    )
    assert done.plan == Plan.model_validate(
        {"checkpointing": "full", "workers": 4, "save_steps": 250, "eval_steps": 250, "cache": "pixels"}
    )


def test_a_section_about_a_cache(tmp_path: Path) -> None:
    """What a cache is stored as is not what the model is computed in."""
    section = {"precompute_pixel_values": True, "dtype": "float16", "dir": "cache", "cache_features": False}
    done = converted(tmp_path, vision_cache=section, bf16=True)
    assert done.plan.cache == "pixels" and done.recipe.precision == "bf16"
    said = render(done.notes)
    for name in ("dtype", "dir", "cache_features"):
        assert re.search(rf"vision_cache\.{name} = .*dropped: plan.cache and plan.cache_dir say it", said), said


def test_rendered_lines(tmp_path: Path) -> None:
    values = {"report_to": "wandb", "lr": 5e-5, "use_vision_cache": True, "vision_cache_dir": "cache"}
    *lines, blank, heading, first, last, _, _ = render(converted(tmp_path, **values).notes).splitlines()
    assert len({line.index("  ->  ") for line in (*lines, first, last)}) == 1
    rows = [re.sub(" +", " ", line) for line in lines]
    assert "lr = 5e-05 -> recipe.learning_rate = 5e-05" in rows
    ahead = "made on the way, or ahead by `sameday cache --kind pixels`"
    assert f"use_vision_cache = true -> plan.cache = pixels ({ahead})" in rows
    assert (blank, heading) == ("", "2 keys dropped:")
    logged = "a run always writes metrics.jsonl and TensorBoard events; plan.track sends them to a tracker too"
    assert first.endswith(f"dropped: {logged}")
    assert last.startswith("vision_cache_dir = cache ") and "plan.cache_dir is filled anew" in last
    assert "(not set) num_train_epochs -> recipe.num_epochs = 3 (the Trainer's default)" in rows


def test_absent_keys_take_the_old_programs_defaults_and_say_so(tmp_path: Path) -> None:
    done = converted(tmp_path)
    recipe = done.recipe
    assert (recipe.num_epochs, recipe.learning_rate, recipe.schedule) == (3, 5e-5, "linear")
    assert (recipe.max_grad_norm, recipe.seed, recipe.weight_decay) == (1.0, 42, 0.0)
    assert (recipe.effective_batch, done.plan.max_questions, recipe.precision) == (8, 8, "bf16")
    assert (recipe.train, recipe.order.kind, recipe.loss_weight) == ("all", "shuffle", "token")
    for name in ("num_train_epochs", "learning_rate", "lr_scheduler_type", "max_grad_norm", "seed"):
        assert why(done, f"(not set) {name}") == "the Trainer's default"
    lora = converted(tmp_path, lora={"r": 2, "target_modules": ["q_proj"]})
    assert (lora.recipe.train, lora.recipe.lora.r, lora.recipe.lora.alpha) == ("lora", 2, 8.0)


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
        **{"modules_to_save": [], "logging_dir": "logs", "do_train": True},
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
        ({"mixed_precision": "bf16", "torch_dtype": "float32"}, "bf16"),
        ({"mixed_precision": False}, "float32"),
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
        **{"num_train_epochs": 0.5, "lora": {"r": 0, "target_modules": "all"}, "lr": 1e-3},
        learning_rate=1e-4,
    ) == [
        "old.yaml:15: learning_rate is 0.0001; but lr, which means the same, is 0.001",
        "old.yaml:3: load_in_4bit is true; without bnb_4bit_quant_type bitsandbytes takes fp4, which no recipe has "
        "(allowed: false, or give bnb_4bit_quant_type: nf4 if the old run had it)",
        f"old.yaml:4: label_smoothing_factor is 0.1; the loss would be another one{unsaid} 0)",
        f"old.yaml:8: group_by_length is true; the order would depend on lengths{unsaid} false)",
        f"old.yaml:9: dataloader_drop_last is true; the last questions of an epoch would be left out{unsaid} false)",
        "old.yaml:10: num_train_epochs is 0.5; must be whole: give max_steps for a part of an epoch",
        f"old.yaml:7: lr_scheduler_type is polynomial; no recipe has this schedule (allowed: {schedules})",
        "old.yaml:5: optim is adafactor; no recipe has this optimizer "
        "(allowed: adamw, adamw_hf, adamw_torch, adamw_torch_fused, adamw_apex_fused, paged_adamw, paged_adamw_32bit)",
        "old.yaml:13: lora.target_modules is all; must be a list of layer names, such as [q_proj, v_proj]",
        "old.yaml:6: fp16 is true; there is no fp16 recipe (allowed: bf16, float32, tf32)",
        "old.yaml:12: lora.r is 0; must be greater than or equal to 1",
    ]


def test_a_config_without_model_or_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("lr: 5e-5\n")
    with pytest.raises(BadInput) as error:
        convert(tmp_path / "old.yaml")
    assert str(error.value).splitlines() == [
        f"{tmp_path}/old.yaml: names no model: give model_name_or_path",
        f"{tmp_path}/old.yaml: names no training questions: give train_file, or --train FILE",
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
        ({"validation_file": None}, "is true; without validation the best weights cannot be known: give --val FILE"),
        (
            {"eval_strategy": "no"},
            "is true; without validation the best weights cannot be known: give eval_strategy, epoch or steps",
        ),
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
    (config / "old.yaml").write_text(
        yaml.safe_dump({**values, "prev_checkpoint": "adapter", "target_modules": ["q_proj"]})
    )
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


# What would be another model


def test_a_key_that_is_not_known_is_refused_until_it_is_let_go(tmp_path: Path) -> None:
    old = {"learning_rte": 3, "data": {"new_thing": {"a": 1, "b": [2]}, "empty": None}, "wandb": {"anything": "x"}}
    why_not = "and it may change the model; --drop"
    assert refused(tmp_path, **old) == [
        f"old.yaml:3: learning_rte is 3; not known (nearest: learning_rate), {why_not} learning_rte leaves it out",
        f"old.yaml:6: data.new_thing.a is 1; not known, {why_not} data.new_thing.a leaves it out",
        f"old.yaml:7: data.new_thing.b is [2]; not known, {why_not} data.new_thing.b leaves it out",
    ]
    done = converted(tmp_path, ("learning_rte", "data.new_thing"), **old)
    assert_complete(done, {**BASE, **old})
    assert why(done, "data.new_thing.b").startswith("left out, as --drop asks")
    assert why(done, "data.empty") == "not known, and empty"
    (line,) = refused(tmp_path, ("lr",), load_in_8bit=False)
    assert line == f"--drop lr: {tmp_path}/old.yaml has no such key"


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        (
            {"data": {"instruction_template": "Answer briefly.\n{text}"}},
            "data.instruction_template is 'Answer briefly.\\n{text}'; the prompt must have no other placeholder than "
            "{question}, and has {text}",
        ),
        (
            {"prompt_style": "vicuna"},
            "the prompt must hold {question}: all questions would be the same text without it",
        ),
        ({"question_suffix": "in one word", "question_prefix": "Say"}, "the prompt would be another one"),
        ({"template": "vicuna"}, "the prompt would be another one (allowed: qwen2_vl, qwen2_5_vl, qwen3_vl_nothink"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            "bnb_4bit_quant_type is fp4; no recipe has base weights in this format (allowed: nf4)",
        ),
        (
            {"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}},
            "quantization_config.load_in_8bit is true; no recipe has base weights in int8 (allowed: false; four",
        ),
        ({"bits": 8}, "bits is 8; no recipe has base weights of so many bits (allowed: 4, 16, 32)"),
        ({"quantization": "awq"}, "quantization is awq; no recipe has this quantization (allowed: nf4, none)"),
        ({"quantization": "fp8"}, "quantization is fp8; no recipe has this quantization (allowed: nf4, none)"),
        (
            {"bnb_4bit_compute_dtype": "bfloat16"},
            "bnb_4bit_compute_dtype is bfloat16; nothing says whether the base model is quantized (load_in_4bit: true",
        ),
        (
            {"use_qlora": True, "llm_int8_skip_modules": ["visual"]},
            "llm_int8_skip_modules is [visual]; other layers would be quantized, and no recipe says that (allowed: [lm",
        ),
        (
            {"use_qlora": True, "bnb_4bit_compute_dtype": "float16"},
            "bnb_4bit_compute_dtype is float16; no recipe has this precision (allowed: bf16, float32, tf32)",
        ),
        (
            {"use_qlora": True, "bnb_4bit_compute_dtype": "torch.float32", "bf16": True},
            "bnb_4bit_compute_dtype is torch.float32; but recipe.precision is bf16, which is what the matmuls compute",
        ),
        ({"use_qlora": True, "bnb_4bit_new": 1}, "bnb_4bit_new is 1; not known, and it may change the model; --drop"),
        ({"use_qlora": True}, "base_format nf4 stores weights that are not trained, and train is all; allowed: train"),
        ({"precision": "nf4"}, "precision is nf4; no recipe has this precision (allowed: bf16, float32, tf32)"),
        (
            {"stage": "first"},
            "stage is first; no recipe has such a stage (allowed: a whole number, a list of them, sft)",
        ),
        ({"stages": [1, 2]}, "it may choose questions, or order them by stages: --drop stages and then set data"),
        ({"stage": 1, "stage_filter": 2}, "stage is 1; but stage_filter, which means the same, is 2"),
        ({"val_size": 0.1}, "some training questions would be held out"),
        ({"image_size": 448}, "images would be resized otherwise"),
        (
            {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs.num_cycles is 2; the schedule would be another one, and no recipe says that; --drop "
            "lr_scheduler_kwargs leaves it out",
        ),
        (
            {"peft": {"rank_pattern": {"model.o_proj": 4}}},
            "peft.rank_pattern.model.o_proj is 4; the adapters would have several ranks, and no recipe says that; "
            "--drop peft.rank_pattern leaves it out",
        ),
        ({"mask_prompt": False}, "questions would be learned besides answers"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path: Path, old: dict[str, Any], reason: str) -> None:
    assert any(reason in line for line in refused(tmp_path, **old)), refused(tmp_path, **old)


def test_a_quantization_that_is_off_is_dropped(tmp_path: Path) -> None:
    old = {"load_in_4bit": "false", "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    done = converted(tmp_path, **old)
    assert_complete(done, {**BASE, **old})
    assert why(done, "bnb_4bit_quant_type") == "does nothing: no quantization is asked for"


QLORA = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("old", "double", "precision"),
    [
        (QLORA, False, "float32"),
        ({"quantization_config": QLORA | {"bnb_4bit_use_double_quant": True}, "bf16": True}, True, "bf16"),
        ({"model": {**QLORA, "use_nested_quant": False}, "dtype": "bfloat16"}, False, "bf16"),
        ({**QLORA, "bnb_4bit_compute_dtype": "torch.bfloat16", "bnb_4bit_quant_storage": "uint8"}, False, "bf16"),
        ({**QLORA, "bnb_4bit_compute_dtype": "float32", "tf32": True, "llm_int8_threshold": 6.0}, False, "tf32"),
        ({"use_qlora": True, "bnb_4bit_compute_dtype": "bfloat16", "bf16": True}, False, "bf16"),
        ({"bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"], "load_in_8bit": None}, False, "float32"),
        ({"quantization": "nf4", "load_in_8bit": False}, False, "float32"),
        # LLaMA-Factory, and QLoRA's own script
        ({"quantization_bit": 4, "quantization_method": "bnb", "bf16": True}, True, "bf16"),
        ({"bits": 4, "quant_type": "nf4", "double_quant": False}, False, "float32"),
    ],
)
def test_four_bits_are_kept(tmp_path: Path, old: dict[str, Any], double: bool, precision: str) -> None:
    old = old | {"lora_r": 8, "lora_target_modules": ["q_proj"], "optim": "paged_adamw_32bit"}
    done = converted(tmp_path, **old)
    assert (done.recipe.base_format, done.recipe.double_quant, done.recipe.precision) == ("nf4", double, precision)
    assert_complete(done, {**BASE, **old})
    assert "-> recipe.base_format = nf4 " in re.sub(" +", " ", render(done.notes))


OTHERS = ["llava-hf/llava-v1.6-mistral-7b-hf", "google/paligemma-3b-pt-224", "google/gemma-3n-E4B-it"]
OTHERS += ["Qwen/Qwen2.5-7B-Instruct", "llava-hf/llava-onevision-qwen2-7b-ov-hf"]
OTHERS += ["llava-hf/vip-llava-7b-hf", "microsoft/llava-med-v1.5-mistral-7b"]
MIXTURE, TEXTS = "a mixture of experts, and those are not supported", "a model of texts alone"
LAYOUT = "in LLaVA's first layout; transformers' has names such as llava-hf/llava-1.5-7b-hf"


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_family_is_refused(tmp_path: Path, name: str) -> None:
    allowed = f"by its name it is of a family that is not supported (allowed: {', '.join(known_families())})"
    assert refused(tmp_path, model_name_or_path=name) == [f"old.yaml:1: model_name_or_path is {name}; {allowed}"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", MIXTURE),
        ("Qwen/Qwen3-VL-235B-A22B-Thinking", MIXTURE),
        ("google/gemma-3-1b-it", TEXTS),
        ("google/gemma-3-270m", TEXTS),
        ("google/medgemma-27b-text-it", TEXTS),
        ("liuhaotian/llava-v1.5-7b", LAYOUT),
    ],
)
def test_a_model_that_is_called_like_those_of_a_family(tmp_path: Path, name: str, what: str) -> None:
    (line,) = refused(tmp_path, model_name_or_path=name)
    assert line.endswith(f" is {name}; by its name it is {what} (allowed: {', '.join(known_families())})")


def test_models_by_name_and_by_folder(tmp_path: Path) -> None:
    qwen = ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2-VL-2B", "unsloth/Qwen3-VL-8B-Instruct")
    for name in (*qwen, "llava-hf/llava-1.5-7b-hf", "google/medgemma-4b-it", "google/gemma-3-12b-it"):
        assert why(converted(tmp_path, model_name_or_path=name), "model_name_or_path") == ""
    done = converted(tmp_path, model_name_or_path="hospital/ours")
    assert why(done, "model_name_or_path").startswith(
        "its family is not told by its name: `train` looks at it (allowed"
    )
    (line,) = refused(tmp_path, model_name_or_path="unsloth/Qwen3-VL-8B-Instruct-bnb-4bit")
    assert "by its name its weights are quantized, and no recipe says that: give the model that it was made of" in line
    for kind in ("qwen3_vl", "gemma3n"):
        (tmp_path / "ours").mkdir(exist_ok=True)
        (tmp_path / "ours" / "config.json").write_text(json.dumps({"model_type": kind}))
        if kind == "qwen3_vl":
            assert why(converted(tmp_path, model_name_or_path="ours"), "model_name_or_path") == ""
    (line,) = refused(tmp_path, model_name_or_path="ours")
    assert "its model type is gemma3n, which is not supported (allowed: gemma3, llava, qwen2_5_vl," in line


def test_data_under_other_names(tmp_path: Path) -> None:
    old = {"model": {"name": "tiny"}, "data": {"train_json": "a.json", "val_json": "b.json", "img_dir": "i"}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    data = convert(tmp_path / "old.yaml").recipe.data
    assert (data.train, data.val, data.image_root) == ("a.json", "b.json", "i")


def test_sections_of_a_script(tmp_path: Path) -> None:
    old = {
        "lora_config": {"r": 2, "alpha": 6, "lora_dropout": 0.1, "target_modules": ["q_proj"], "bias": "none"},
        "training": {
            "optimizer": {"name": "adamw_torch", "lr": 1e-3, "betas": [0.9, 0.95]},
            "scheduler": {"type": "cosine"},
        },
        "data": {"answer_key": "answer", "image_column": "image_filename"},
    }
    done = converted(tmp_path, **old)
    assert_complete(done, {**BASE, **old})
    recipe = done.recipe
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == (2, 6, 0.1)
    assert (recipe.learning_rate, recipe.betas, recipe.schedule) == (1e-3, (0.9, 0.95), "cosine")
    (line,) = refused(tmp_path, betas=[0.9, 0.95], adam_beta2=0.99)
    assert line == "old.yaml:6: adam_beta2 is 0.99; but betas, which says both, is [0.9, 0.95]"


def test_sections_about_something_else_say_nothing_about_training(tmp_path: Path) -> None:
    old = {"train": {"batch_size": 2}, "eval": {"batch_size": 8, "eval_steps": 7, "seed": 1}, "logging": {"steps": 3}}
    done = converted(tmp_path, **old)
    assert_complete(done, {**BASE, **old})
    assert (done.plan.max_questions, done.plan.eval_steps, done.recipe.seed) == (2, 7, 42)
    assert why(done, "eval.batch_size") == "what is trained does not depend on evaluation"


@pytest.mark.parametrize(
    ("old", "backend"),
    [({}, "torchvision"), ({"use_fast": True}, "torchvision"), ({"processor": {"use_fast": False}}, "pil")],
)
def test_images_are_resized_as_the_old_program_did(tmp_path: Path, old: dict[str, Any], backend: str) -> None:
    done = converted(tmp_path, **old)
    assert done.recipe.image_backend == backend
    (note,) = [note for note in done.notes if note.went_to == "recipe.image_backend"]
    assert "the two resize about a third of the pixels one level apart" in note.why
    missing = "torchvision is not installed here: a run will need it" in note.why
    assert missing == (backend == "torchvision" and importlib.util.find_spec("torchvision") is None)


@pytest.mark.parametrize("name", ["train.py", "train.ipynb"])
def test_a_program_is_no_config(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("import transformers\n")
    with pytest.raises(BadInput) as error:
        convert(tmp_path / name)
    assert str(error.value) == (
        f"{tmp_path / name}: is a program, and what it would do is not known before it runs; allowed: a trainer's "
        "config in YAML or JSON, or a shell script with its command line"
    )


def test_where_an_answer_ended_is_set_or_said(tmp_path: Path) -> None:
    factory = {"template": "qwen3_vl_nothink", "stage": "sft", "finetuning_type": "lora", "cutoff_len": 1024}
    assert converted(tmp_path, **factory).recipe.answer_end == "turn"
    done = converted(tmp_path)
    assert done.recipe.answer_end == "end_token"
    (note,) = [note for note in done.notes if note.went_to == "recipe.answer_end"]
    assert note.why == "a program that masks the prompt alone learns the line break after an answer too: then set turn"


def test_every_field_of_the_trainer_and_of_peft_is_known(tmp_path: Path) -> None:
    """What `TrainingArguments.to_dict` and an adapter's configuration hold at their defaults converts."""
    from peft import LoraConfig
    from transformers import TrainingArguments

    values = {}
    for kind in (TrainingArguments, LoraConfig):
        for each in dataclasses.fields(kind):
            default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
            if default is None or isinstance(default, bool | int | float | str | list | dict):
                values[each.name] = default.value if isinstance(default, enum.Enum) else default
    assert len(values) > 120
    done = converted(tmp_path, **{**values, "target_modules": ["q_proj"]})
    assert (done.recipe.learning_rate, done.recipe.lora.r, done.recipe.num_epochs) == (5e-5, 8, 3)


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


def test_prompts_and_stages_become_recipe(tmp_path: Path) -> None:
    old: dict[str, Any] = {
        "data": {"instruction_template": "Answer briefly.\n{}", "stage": "stage 2", "question_types": "yes/no, count"}
    }
    done = converted(tmp_path, **old)
    assert_complete(done, {**BASE, **old})
    assert done.recipe.prompt is not None and done.recipe.prompt.default == "Answer briefly.\n{question}"
    assert done.recipe.data.where == {"stage": ("2",), "type": ("count", "yes/no")}
    assert went(done, "data.stage") == ("recipe.data.where.stage", [2])
    write(done, tmp_path)
    assert load_recipe(tmp_path / "recipe.yaml").fingerprint == done.recipe.fingerprint
    for nothing in ({"prompt_template": "{question}"}, {"instruction_template": ""}, {"stage": "sft"}):
        assert converted(tmp_path, **nothing).recipe.fingerprint == converted(tmp_path).recipe.fingerprint
