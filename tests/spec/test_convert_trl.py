"""TRL's scripts for vision-language models, and others around them: each becomes a recipe, or every key that is lost
is named."""

from pathlib import Path
from typing import Any

import pytest
from converting import ROBOT, check_written, converted, lost, refused, script, whys

# TRL: its sft_vlm scripts and configs, and scripts of others around them

ACCELERATE = "accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml"
SFT_VLM = {
    **{"dataset_name": "HuggingFaceH4/llava-instruct-mix-vsft", "model_name_or_path": "llava-hf/llava-1.5-7b-hf"},
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "output_dir": "sft-llava-1.5-7b-hf"},
    **{"bf16": True, "torch_dtype": "bfloat16", "gradient_checkpointing": True},
}
GEMMA = {
    **SFT_VLM,
    **{"model_name_or_path": "google/gemma-3-4b-it", "use_peft": True, "lora_target_modules": "all-linear"},
    **{"attn_implementation": "eager"},
}
SMOL = {
    **SFT_VLM,
    **{"model_name_or_path": "HuggingFaceTB/SmolVLM-Instruct", "use_peft": True},
    **{"lora_target_modules": ["down_proj,", "o_proj,", "k_proj,", "q_proj,", "gate_proj,", "up_proj,", "v_proj"]},
}
SAT = {
    **{"model_name_or_path": "Qwen/Qwen2-VL-2B", "dataset_name": "SAT", "learning_rate": "2.0e-5", "packing": "True"},
    **{"max_seq_length": 1024, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "bf16": "True"},
    **{"eval_strategy": "no", "run_name": "Qwen2_VL-2B-SFT-SAT", "report_to": "wandb", "num_train_epochs": 2},
}
TEXT = {
    **{"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "stanfordnlp/imdb", "report_to": "none"},
    **{"learning_rate": 0.0001, "lr_scheduler_type": "cosine"},
}
MASK = (
    "completion_only_loss is not set; TRL then learns questions besides answers, unless lines have prompt and "
    "completion, and no recipe says that: give completion_only_loss: true if they had"
)


@pytest.mark.parametrize(
    ("old", "keys"),
    [
        (script(f"{ACCELERATE} sft_vlm.py", SFT_VLM), {"dataset_name"}),
        (script(f"{ACCELERATE} sft_vlm_gemma3.py", GEMMA), {"dataset_name"}),
        (script(f"{ACCELERATE} sft_vlm_smol_vlm.py", SMOL), {"model_name_or_path", "dataset_name"}),
        (script(f"{ACCELERATE} src/open_r1/sft.py", SAT), {"dataset_name", "packing"}),
        (ROBOT, {"dataset_configs", "packing"}),
        (script("trl sft", TEXT), {"model_name_or_path", "dataset_name"}),
    ],
)
def test_trl_refuses(tmp_path: Path, old: dict[str, Any] | str, keys: set[str]) -> None:
    lines = refused(tmp_path, old)
    assert MASK in lines
    assert lost(lines) - {"completion_only_loss"} == keys, lines


def test_trl_that_learns_answers_alone(tmp_path: Path) -> None:
    old = {
        **SFT_VLM,
        **{"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "use_peft": True, "completion_only_loss": "true"},
        **{"lora_target_modules": ["q_proj", "v_proj"], "dataset_name": "data/train.jsonl"},
    }
    launched = f"{ACCELERATE} --num_processes 4 examples/scripts/sft_vlm.py"
    done = converted(tmp_path, script(launched, old))
    recipe = done.recipe
    assert (done.trainer.name, done.told_by) == ("TRL", "the command sft_vlm")
    assert (recipe.learning_rate, recipe.max_length, recipe.effective_batch) == (2e-5, None, 256)
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == (16, 32, 0.05)
    assert recipe.answer_end == "turn" and whys(done)["recipe.answer_end"] == (
        "all that follows a prompt is learned, the line break behind the answer's end token too"
    )
    assert (recipe.precision, recipe.schedule, done.plan.checkpointing) == ("bf16", "linear", "full")
    check_written(done, tmp_path)
    plain = converted(tmp_path, {key: value for key, value in old.items() if key != "use_peft"})
    assert (plain.recipe.train, plain.recipe.train_vision, plain.recipe.max_length) == ("all", True, 1024)
    assert whys(plain)["recipe.train"] == "TRL's default: all weights, the vision tower's too"
    four = converted(tmp_path, {**old, "load_in_4bit": True})
    assert (four.recipe.base_format, four.recipe.double_quant) == ("nf4", False)


def test_a_null_is_what_the_trainer_makes_of_it(tmp_path: Path) -> None:
    old = {
        **{key: value for key, value in SFT_VLM.items() if key != "gradient_checkpointing"},
        **{"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "use_peft": True, "completion_only_loss": True},
        **{"lora_target_modules": ["q_proj", "v_proj"], "dataset_name": "data/train.jsonl", "bf16": None},
    }
    done = converted(tmp_path, {**old, "max_length": None, "max_grad_norm": None, "gradient_checkpointing": None})
    assert (done.recipe.max_length, done.recipe.max_grad_norm, done.recipe.precision) == (None, None, "bf16")
    assert done.plan.checkpointing == "none"
    assert whys(done)["max_length"] == "null: nothing is cut"
    assert whys(done)["recipe.max_grad_norm"] == "null does not clip"
    check_written(done, tmp_path)
    plain = converted(tmp_path, old)
    assert (plain.recipe.max_length, plain.recipe.max_grad_norm, plain.plan.checkpointing) == (1024, 1.0, "full")
    (line,) = refused(tmp_path, {**old, "lora_dropout": None})
    assert line == (
        "lora_dropout is null; in TRL null is not its default: leave it out for that (0.05), or give the value that "
        "the old run had"
    )


def test_a_config_of_accelerate_by_name(tmp_path: Path) -> None:
    old = {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "use_peft": True, "completion_only_loss": True}
    old |= {"lora_target_modules": ["q_proj"], "dataset_name": "data/train.jsonl", "per_device_train_batch_size": 4}

    def told(**more: Any) -> tuple[str, int]:
        done = converted(tmp_path, script("trl sft", {**old, **more}))
        return whys(done)["accelerate_config"], done.recipe.effective_batch

    unknown = "its number of processes is not known: multiply recipe.effective_batch by it"
    assert told(accelerate_config="multi_gpu") == (unknown, 4)
    assert told(accelerate_config="zero2", num_processes=2) == ("num_processes says how many there are", 8)
    assert told(accelerate_config="single_gpu") == ("one process", 4)
    assert refused(tmp_path, script("trl sft", {**old, "accelerate_config": "mine.cfg"})) == [
        "accelerate_config is mine.cfg; a file that is not read here: give its num_processes instead (allowed: "
        "single_gpu, multi_gpu, fsdp1, fsdp2, zero1, zero2, zero3)"
    ]


@pytest.mark.parametrize(
    ("model", "own"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", "<|im_end|>"),
        ("Qwen/Qwen3-VL-8B-Instruct", "<|im_end|>"),
        ("google/gemma-3-4b-it", "<end_of_turn>"),
        ("llava-hf/llava-1.5-7b-hf", "</s>"),
    ],
)
def test_the_token_that_ends_an_answer(tmp_path: Path, model: str, own: str) -> None:
    old = {"model_name_or_path": model, "completion_only_loss": True, "dataset_name": "data/train.jsonl"}
    done = converted(tmp_path, script("trl sft", {**old, "eos_token": own}))
    assert whys(done)["eos_token"] == "the token that ends an answer of this model anyway"
    (line,) = refused(tmp_path, script("trl sft", {**old, "eos_token": "<|endoftext|>"}))
    assert line == f"eos_token is <|endoftext|>; an answer would end with another token (allowed: {own})"
    (line,) = refused(tmp_path, script("trl sft", {**old, "model_name_or_path": "our/model", "eos_token": own}))
    assert line.endswith("(allowed: the model's own; neither its folder nor its name tells which that is)")


def test_a_loss_on_answers_by_their_marks_in_a_template(tmp_path: Path) -> None:
    """TRL raises an error for data with images."""
    old = {"model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "dataset_name": "train.jsonl"}
    (line,) = refused(tmp_path, {**old, "assistant_only_loss": True})
    assert line == (
        "assistant_only_loss is true; TRL stops at it where there are images, so that no run learned so: give "
        "completion_only_loss: true if answers alone were learned"
    )
    done = converted(tmp_path, {**old, "assistant_only_loss": True, "completion_only_loss": True})
    assert whys(done)["completion_only_loss"] == "answers alone are learned"


def test_flags_that_turn_a_setting_off(tmp_path: Path) -> None:
    """transformers' parser has --no_NAME for every setting that is on by default."""
    flags = {"model_name_or_path": "Qwen/Qwen3-VL-8B", "dataset_name": "train.jsonl", "completion_only_loss": True}
    off = {"no_gradient_checkpointing": True, "no-remove-unused-columns": True}
    done = converted(tmp_path, script("trl sft", {**flags, **off}))
    assert (done.plan.checkpointing, whys(done)["no_remove_unused_columns"]) == (
        "none",
        "questions are read as they are",
    )
    (line,) = refused(tmp_path, {**flags, "no_gradient_checkpointing": True})
    assert line.startswith("no_gradient_checkpointing is true; not known (nearest: gradient_checkpointing)")
