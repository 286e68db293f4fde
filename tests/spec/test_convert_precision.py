"""Whether what the old program trained had float32 master copies, as the weights of a recipe have."""

import json
from pathlib import Path
from typing import Any

import pytest
from converting import DATA, LLAMA, OURS, TARGETED, converted, script, whys

PLAIN = {"model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct", "train_file": "train.jsonl", "bf16": True}
LOADED = {**PLAIN, "torch_dtype": "bfloat16"}
AXOLOTL = {**TARGETED, "adapter": None, "optimizer": "adamw_torch_fused"}
SWIFT = {**{key: value for key, value in OURS.items() if key != "target_modules"}, "train_type": "full"}
SWIFT |= {"freeze_vit": "false", "freeze_aligner": "false"}
SWIFT_FULL = script("swift sft", SWIFT)
FULL = {**{key: value for key, value in LLAMA.items() if not key.startswith("lora_")}, "finetuning_type": "full"}
NEAR = "near, not the same: bf16 weights were trained there, and here they have float32 master copies"


@pytest.mark.parametrize(
    "old", [LOADED, {**PLAIN, "dtype": "auto"}, AXOLOTL, {**AXOLOTL, "fsdp_version": 2}, SWIFT_FULL]
)
def test_bf16_weights_that_were_trained_themselves(tmp_path: Path, old: dict[str, Any] | str) -> None:
    done = converted(tmp_path, old, DATA)
    assert (done.recipe.train, done.recipe.precision) == ("all", "bf16")
    assert NEAR in whys(done)["recipe.precision"]


@pytest.mark.parametrize(
    "old",
    [
        {**PLAIN, "torch_dtype": "float32"},
        {**PLAIN, "deepspeed": "zero3.json"},
        {**PLAIN, "lora_r": 8, "lora_target_modules": ["q_proj"]},
        {**LOADED, "lora_r": 8, "lora_target_modules": ["q_proj"]},
        {**LOADED, "deepspeed": "zero3.json"},
        {**LOADED, "fsdp": "full_shard auto_wrap"},
        script("accelerate launch --config_file deepspeed_zero3.yaml train.py", LOADED),
        {**AXOLOTL, "deepspeed": "zero1.json", "max_grad_norm": 1.0},
        script("swift sft", {**SWIFT, "deepspeed": "zero3"}),
        {**FULL, "template": "qwen3_vl_nothink"},
    ],
)
def test_float32_master_copies(tmp_path: Path, old: dict[str, Any] | str) -> None:
    assert "near" not in whys(converted(tmp_path, old, DATA))["recipe.precision"]


FORMAT = "without dtype transformers 5 loads a model in its checkpoint's format, {}, and earlier ones in float32"
SILENT = {key: value for key, value in PLAIN.items() if key != "bf16"}
ADAPTERS = {**SILENT, "lora_r": 8, "lora_target_modules": ["q_proj"]}
BF16, FP16 = FORMAT.format("bf16"), FORMAT.format("fp16")
LLAVA = {"model_name_or_path": "llava-hf/llava-1.5-7b-hf"}


@pytest.mark.parametrize(
    ("old", "precision", "why"),
    [
        (PLAIN, "bf16", f"{BF16}: with 5 {NEAR}"),
        ({**PLAIN, **LLAVA}, "bf16", f"{FP16}: with 5 {NEAR.replace('bf16', 'fp16')}"),
        (ADAPTERS, "bf16", f"{BF16}: set float32 if the old run had an earlier one"),
        (SILENT, "bf16", f"{NEAR}; {BF16}: set float32 if the old run had an earlier one"),
        (
            {**ADAPTERS, **LLAVA},
            "bf16",
            f"near, not the same: no recipe has fp16; {FP16}: set float32 if the old run had an earlier one",
        ),
        ({**ADAPTERS, "bf16": False}, "float32", f"bf16 is off; {BF16}: set bf16 if the old run had 5"),
        ({**ADAPTERS, "tf32": True}, "tf32", f"float32 with TF32 matmuls; {BF16}: set bf16 if the old run had 5"),
        (
            {**ADAPTERS, "mixed_precision": "no"},
            "float32",
            f"the Trainer's default; {BF16}: set bf16 if the old run had 5",
        ),
    ],
)
def test_what_depends_on_the_version_of_transformers(
    tmp_path: Path, old: dict[str, Any], precision: str, why: str
) -> None:
    done = converted(tmp_path, old)
    assert (done.recipe.precision, whys(done)["recipe.precision"]) == (precision, why)


@pytest.mark.parametrize(
    ("config", "precision", "why"),
    [
        ({"torch_dtype": "float32"}, "float32", "the Trainer's default"),
        ({"dtype": "bfloat16"}, "bf16", f"{BF16}: set float32 if the old run had an earlier one"),
        ([], "bf16", f"{BF16}: set float32 if the old run had an earlier one"),
    ],
)
def test_a_folder_says_its_format(tmp_path: Path, config: Any, precision: str, why: str) -> None:
    model = tmp_path / "qwen3-vl"
    model.mkdir()
    said = {"model_type": "qwen3_vl", **config} if config else config
    (model / "config.json").write_text(json.dumps(said))
    done = converted(tmp_path, {**ADAPTERS, "model_name_or_path": "qwen3-vl"})
    assert (done.recipe.precision, whys(done)["recipe.precision"]) == (precision, why)
