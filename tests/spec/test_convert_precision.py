"""Whether what the old program trained had float32 master copies, as the weights of a recipe have."""

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
        PLAIN,
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
