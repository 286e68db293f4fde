"""Configs of other trainers for the tests: one or two of each, with the keys and values of files in their
repositories, and what comes of them."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from sameday.models.families import known_families
from sameday.spec.convert.config import convert
from sameday.spec.convert.conversion import Conversion, write
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe

LLAMA = {
    **{"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "image_max_pixels": 262144, "video_max_pixels": 16384},
    **{"trust_remote_code": True, "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8},
    **{"lora_target": "all", "dataset": "mllm_demo,identity,alpaca_en_demo", "template": "qwen3_vl_nothink"},
    **{"cutoff_len": 2048, "max_samples": 1000, "preprocessing_num_workers": 16, "dataloader_num_workers": 4},
    **{"output_dir": "saves/qwen3-vl-4b/lora/sft", "logging_steps": 10, "save_steps": 500, "plot_loss": True},
    **{"overwrite_output_dir": True, "save_only_model": False, "report_to": "none"},
    **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4},
    **{"num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True},
    **{"ddp_timeout": 180000000, "resume_from_checkpoint": None},
}
VQA = {
    **{"model": "Qwen/Qwen2-VL-7B-Instruct", "train_type": "lora", "dataset": "swift/OK-VQA_train#1000"},
    **{"num_train_epochs": 1, "per_device_train_batch_size": 1, "learning_rate": "1e-4", "lora_rank": 8},
    **{"lora_alpha": 32, "gradient_accumulation_steps": 16, "eval_steps": 100, "save_steps": 100},
    **{"save_total_limit": 2, "logging_steps": 5},
}
CAPTION = {
    **VQA,
    **{"dataset": "modelscope/coco_2014_caption#20000", "torch_dtype": "bfloat16", "target_modules": "all-linear"},
    **{"freeze_vit": "true", "max_length": 2048, "output_dir": "output", "warmup_ratio": 0.05},
    **{"per_device_eval_batch_size": 1, "dataloader_num_workers": 4},
}
OURS = {
    **CAPTION,
    **{"model": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset": "./datasets/img_train.json", "split_dataset_ratio": 0},
    **{"val_dataset": "./datasets/img_test.json", "system": "You are a helpful assistant.", "weight_decay": 0.01},
    **{"model_author": "swift", "model_name": "swift-robot", "gradient_accumulation_steps": 1},
}
ROBOT = {
    **{"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "model_revision": "main", "torch_dtype": "bfloat16"},
    **{"dataset_name": "merged_problems.json", "dataset_configs": ["all"], "preprocessing_num_workers": 8},
    **{"bf16": True, "do_eval": True, "eval_strategy": "no", "gradient_accumulation_steps": 8, "packing": True},
    **{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    **{
        "hub_model_id": "x",
        "log_level": "info",
        "lr_scheduler_type": "cosine",
        "max_seq_length": 4096,
        "max_steps": -1,
    },
}
AXOLOTL = {
    **{"base_model": "Qwen/Qwen2-VL-7B-Instruct", "processor_type": "AutoProcessor", "strict": False},
    **{"skip_prepare_dataset": True, "remove_unused_columns": False, "sample_packing": False},
    "chat_template": "qwen2_vl",
    "datasets": [
        {
            **{"path": "HuggingFaceH4/llava-instruct-mix-vsft", "type": "chat_template"},
            **{"split": "train[:1%]", "field_messages": "messages"},
        }
    ],
    **{"dataset_prepared_path": "last_run_prepared", "val_set_size": 0.0, "output_dir": "./outputs/out"},
    **{"adapter": "lora", "lora_model_dir": None, "sequence_len": 8192, "pad_to_sequence_len": False},
    **{"lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_linear": True, "wandb_project": None},
    **{"gradient_accumulation_steps": 4, "micro_batch_size": 1, "num_epochs": 1, "optimizer": "adamw_bnb_8bit"},
    **{"lr_scheduler": "cosine", "learning_rate": 0.0002, "train_on_inputs": False, "group_by_length": False},
    **{"bf16": True, "fp16": None, "tf32": True, "gradient_checkpointing": True, "local_rank": None},
    **{"logging_steps": 1, "flash_attention": True, "eager_attention": None, "warmup_ratio": 0.1},
    **{"evals_per_epoch": 1, "saves_per_epoch": 1, "debug": None, "deepspeed": None, "weight_decay": 0.0, "fsdp": None},
}
TARGETED = {key: value for key, value in AXOLOTL.items() if key != "lora_target_linear"}
TARGETED |= {"lora_target_modules": ["q_proj", "v_proj"]}

DATA = {"--train": "train.jsonl", "--images": "images"}


def script(command: str, flags: dict[str, Any], variables: dict[str, Any] | None = None) -> str:
    """A command line over several lines, as people write it."""
    lines = [f"{name}={value}" for name, value in (variables or {}).items()] + [command]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        lines.append(" ".join([f"--{name}", *(shlex.quote(str(each)) for each in values)]))
    return " \\\n    ".join(lines) + "\n"


def converted(folder: Path, old: dict[str, Any] | str, data: dict[str, str] | None = None, **more: Any) -> Conversion:
    path = folder / ("old.sh" if isinstance(old, str) else "old.yaml")
    path.write_text(old if isinstance(old, str) else yaml.safe_dump(old, sort_keys=False))
    return convert(path, known_families(), data=data, **more)


def refused(folder: Path, old: dict[str, Any] | str, data: dict[str, str] | None = None, **more: Any) -> list[str]:
    with pytest.raises(BadInput) as error:
        converted(folder, old, data, **more)
    return [re.sub(r"^.*?/old\.(?:yaml|sh)(?::\d+)?: ", "", line) for line in str(error.value).splitlines()]


def lost(lines: list[str]) -> set[str]:
    return {line.split(" is ")[0] for line in lines}


def whys(done: Conversion) -> dict[str, str]:
    return {note.went_to or note.key: note.why for note in done.notes}


def check_written(done: Conversion, folder: Path) -> None:
    recipe, plan = write(done, folder / "new")
    assert load_recipe(recipe).fingerprint and load_plan(plan) == done.plan
