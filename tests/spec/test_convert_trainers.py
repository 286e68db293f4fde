"""Configs of LLaMA-Factory, ms-swift, TRL and axolotl, with the keys and values of files in their repositories: each
becomes a recipe, or every key that is lost is named."""

import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import worlds
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer
from typed import sameday
from typer.testing import CliRunner

from sameday.cli import app
from sameday.models.families import family_of, known_families
from sameday.spec.convert.config import convert, examine
from sameday.spec.convert.conversion import Conversion, write
from sameday.spec.convert.families import FAMILIES
from sameday.spec.convert.script import read_script
from sameday.spec.convert.targets import LANGUAGE, matched
from sameday.spec.convert.trainers import TRAINERS
from sameday.spec.errors import BadInput
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.lora import OF_IMAGES

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


# LLaMA-Factory: examples/train_lora, train_full and train_qlora of its repository

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
QWEN25 = {
    **LLAMA,
    **{"model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "template": "qwen2_vl", "overwrite_cache": True},
}
FULL = {
    **{key: value for key, value in LLAMA.items() if not key.startswith("lora_")},
    **{"finetuning_type": "full", "freeze_vision_tower": True, "freeze_multi_modal_projector": True},
    **{"freeze_language_model": False, "deepspeed": "examples/deepspeed/ds_z3_config.json"},
    **{"gradient_accumulation_steps": 2, "learning_rate": 1e-5},
}
DPO = {**LLAMA, "stage": "dpo", "pref_beta": 0.1, "pref_loss": "sigmoid", "dataset": "rlhf_v", "learning_rate": 5e-6}
RAY = {
    **LLAMA,
    **{"model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "template": "llama3", "ray_num_workers": 4},
    **{"dataset_dir": "REMOTE:llamafactory/demo_data", "ray_run_name": "llama3_8b_sft_lora"},
    **{"placement_strategy": "PACK", "resources_per_worker": {"GPU": 1}},
}
ERNIE = {
    **LLAMA,
    **{"model_name_or_path": "ours/ERNIE-4.5-VL-28B-A3B-PT", "lora_rank": 16, "lora_alpha": 32},
    **{"lora_target": "q_proj,v_proj,k_proj,o_proj", "template": "ernie_vl", "quantization_bit": 4},
}
LLAVA = {
    **{key: value for key, value in LLAMA.items() if key not in ("lora_rank", "report_to")},
    **{"model_name_or_path": "llava-hf/llava-1.5-7b-hf", "template": "llava", "val_size": 0.1, "eval_steps": 500},
    **{"eval_strategy": "steps", "per_device_eval_batch_size": 1},
}


@pytest.mark.parametrize("old", [LLAMA, QWEN25, {**QWEN25, "model_name_or_path": "Qwen/Qwen2-VL-7B-Instruct"}])
def test_llama_factory_lora(tmp_path: Path, old: dict[str, Any]) -> None:
    done = converted(tmp_path, old, DATA)
    recipe, plan = done.recipe, done.plan
    assert done.trainer.name == "LLaMA-Factory" and done.told_by.startswith("cutoff_len, finetuning_type, ")
    assert (recipe.train, recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == ("lora", 8, 16.0, 0.0)
    assert (recipe.max_pixels, recipe.min_pixels, recipe.max_length) == (262144, 1024, 2048)
    assert (recipe.schedule, recipe.warmup_ratio, recipe.answer_end) == ("cosine", 0.1, "turn")
    assert (recipe.effective_batch, recipe.num_epochs, recipe.data.limit) == (8, 3, 1000)
    assert (plan.checkpointing, plan.workers, plan.save_steps, plan.log_steps) == ("full", 4, 500, 10)
    assert recipe.lora.target_modules[4:] == ("gate_proj", "up_proj", "down_proj")
    assert whys(done)["recipe.lora.alpha"] == "LLaMA-Factory's default"
    assert whys(done)["recipe.max_pixels"].startswith("near, not the same: it resizes to so many first")
    check_written(done, tmp_path)


def test_llama_factory_forms_and_parts(tmp_path: Path) -> None:
    done = converted(tmp_path, {**LLAMA, "use_dora": True, "use_rslora": True, "freeze_vision_tower": False}, DATA)
    lora = done.recipe.lora
    assert (lora.dora, lora.rslora, lora.target_modules[-2:]) == (True, True, ("down_proj", "tower.all-linear"))
    assert whys(done)["recipe.lora.target_modules"].endswith("linear layers, and those of what is not frozen")
    check_written(done, tmp_path)
    both = {**FULL, "freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    assert converted(tmp_path, both, DATA).recipe.train_vision
    # It looks for names in the language model alone, others in the whole model.
    named = {**LLAMA, "lora_target": "q_proj,gate_proj", "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct"}
    named |= {"template": "qwen2_vl"}
    assert converted(tmp_path, named, DATA).recipe.lora.target_modules == ("q_proj", "gate_proj")


def test_names_that_the_tower_has_too(tmp_path: Path) -> None:
    def targets(model: str, names: Any) -> tuple[str, ...]:
        return converted(
            tmp_path, {"model": model, "lora_rank": 2, "target_modules": names}, DATA
        ).recipe.lora.target_modules

    names = ["q_proj", "gate_proj"]
    assert targets("Qwen/Qwen3-VL-8B", names) == ("q_proj", "gate_proj")
    assert targets("Qwen/Qwen2.5-VL-7B-Instruct", names) == (*names, "tower.gate_proj")
    assert targets("llava-hf/llava-1.5-7b-hf", names) == (*names, "tower.q_proj")
    everything = ("all-linear", "tower.all-linear", "projector.all-linear")
    assert targets("Qwen/Qwen3-VL-8B", "all-linear") == targets("llava-hf/llava-1.5-7b-hf", "all-linear") == everything
    assert targets("google/gemma-3-4b-it", "all-linear") == everything[:2]
    done = converted(tmp_path, {"model": "some/model", "lora_rank": 2, "target_modules": names}, DATA)
    assert whys(done)["recipe.lora.target_modules"].startswith("the language model's; where the tower has layers of ")


VICUNA = "A chat between a curious user and an artificial intelligence assistant. "


def test_llama_factory_templates_of_every_family(tmp_path: Path) -> None:
    llava = {key: value for key, value in LLAVA.items() if key != "val_size"}
    done = converted(tmp_path, llava, DATA)
    recipe = done.recipe
    assert recipe.system_prompt is not None and recipe.system_prompt.startswith(VICUNA)
    assert (recipe.answer_end, recipe.min_pixels, recipe.max_pixels) == ("end_token", None, None)
    assert whys(done)["recipe.prompt"].startswith("near, not the same: there no line break follows an image")
    assert whys(done)["image_max_pixels"] == (
        "this model takes every image at one size, which its own image settings say"
    )
    check_written(done, tmp_path)
    own = converted(tmp_path, {**llava, "system": "Be brief."}, DATA)
    assert own.recipe.system_prompt == "Be brief."
    gemma = converted(tmp_path, {**llava, "model_name_or_path": "google/medgemma-4b-it", "template": "gemma3"}, DATA)
    assert (gemma.recipe.answer_end, gemma.recipe.system_prompt, gemma.recipe.max_pixels) == ("turn", None, None)
    (line,) = refused(tmp_path, {**llava, "template": "vicuna"}, DATA)
    assert line == "template is vicuna; the prompt would be another one (allowed: llava)"
    (line,) = refused(tmp_path, {**llava, "template": "qwen2_vl"}, DATA)
    assert line == "template is qwen2_vl; the prompt would be another one (allowed: llava)"
    (line,) = refused(tmp_path, {**LLAMA, "template": "llava"}, DATA)
    assert line.endswith("(allowed: qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_nothink)")


@pytest.mark.parametrize("trainer", ["LLaMA-Factory", "ms-swift", "axolotl"])
def test_a_template_of_another_family_is_never_the_models_own(tmp_path: Path, trainer: str) -> None:
    gemma, qwen2 = "google/gemma-3-4b-it", "Qwen/Qwen2.5-VL-7B-Instruct"

    def with_template(model: str, template: str) -> dict[str, Any] | str:
        if trainer == "axolotl":
            return {**TARGETED, "optimizer": "adamw_torch", "base_model": model, "chat_template": template}
        if trainer == "ms-swift":
            asked = {**OURS, "model": model, "template": template, "target_modules": "all-linear"}
            return script("swift sft", {key: value for key, value in asked.items() if key != "system"})
        return {**LLAMA, "model_name_or_path": model, "template": template}

    key, data = "chat_template" if trainer == "axolotl" else "template", None if trainer == "ms-swift" else DATA
    for model, template in ((gemma, "qwen2_vl"), (gemma, "qwen3_vl"), (qwen2, "qwen3_vl")):
        lines = refused(tmp_path, with_template(model, template), data)
        assert len(lines) == 1 and f"{key} is {template}; the prompt would be another one (allowed: " in lines[0], lines
    # Qwen2-VL's puts a system prompt first, and Qwen3-VL's none.
    done = converted(tmp_path, with_template("Qwen/Qwen3-VL-8B-Instruct", "qwen2_vl"), data)
    assert done.recipe.system_prompt == "You are a helpful assistant."
    assert whys(done)["recipe.system_prompt"] == "what this template puts first"
    for model, template in ((qwen2, "qwen2_vl"), ("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl")):
        assert converted(tmp_path, with_template(model, template), data).recipe.system_prompt is None
    done = converted(tmp_path, with_template("hospital/ours", "qwen2_vl"), data)
    doubt = ", if the model is of qwen2_vl, qwen2_5_vl or qwen3_vl, which neither its folder nor its name tells"
    assert whys(done)["chat_template" if trainer == "axolotl" else "recipe.answer_end"].endswith(
        f"the model's own chat template{doubt}"
    )


def test_llama_factory_all_weights(tmp_path: Path) -> None:
    done = converted(tmp_path, FULL, DATA)
    assert (done.recipe.train, done.recipe.train_vision, done.recipe.effective_batch) == ("all", False, 2)
    check_written(done, tmp_path)


@pytest.mark.parametrize(
    ("old", "keys"),
    [
        (DPO, {"stage", "pref_beta", "pref_loss"}),
        (RAY, {"model_name_or_path", "template"}),
        (ERNIE, {"template"}),
        (LLAVA, {"val_size"}),
        ({**LLAMA, "pure_bf16": True, "loraplus_lr_ratio": 16.0}, {"pure_bf16"}),
        ({**LLAMA, "freeze_multi_modal_projector": False}, {"freeze_multi_modal_projector"}),
    ],
)
def test_llama_factory_refuses(tmp_path: Path, old: dict[str, Any], keys: set[str]) -> None:
    lines = refused(tmp_path, old, DATA)
    assert keys <= lost(lines) and lost(lines) <= keys | {"loraplus_lr_ratio"}, lines
    if old is DPO:
        assert "stage is dpo; no recipe trains so (allowed: sft)" in lines


def test_llama_factory_keys_that_are_absent(tmp_path: Path) -> None:
    """Its defaults stand in the recipe where they are not ours, and say whose they are."""
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl"}
    done = converted(tmp_path, old, DATA)
    recipe = done.recipe
    assert (recipe.max_length, recipe.max_pixels, recipe.lora.r, recipe.lora.alpha) == (2048, 589824, 8, 16)
    assert (recipe.learning_rate, recipe.schedule, recipe.precision, recipe.seed) == (5e-5, "linear", "bf16", 42)
    assert (recipe.effective_batch, done.plan.checkpointing) == (8, "full")
    assert whys(done)["recipe.max_length"] == "LLaMA-Factory's default; never cuts image tokens or a whole answer"
    assert converted(tmp_path, {**old, "disable_gradient_checkpointing": True}, DATA).plan.checkpointing == "none"
    assert converted(tmp_path, {**old, "disable_shuffling": True}, DATA).recipe.order.kind == "listed"


def test_llama_factory_list_of_data(tmp_path: Path) -> None:
    old = {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "finetuning_type": "lora", "template": "qwen3_vl"}
    (line,) = refused(tmp_path, {**old, "dataset": "ours"})
    where = tmp_path / "data" / "dataset_info.json"
    assert line == f"dataset is ours; a name in {where}, which is not there: give --train FILE"
    tags = {"role_tag": "role", "content_tag": "content"}
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "ours.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    known = {"ours": entry, "llava": {"file_name": "l.json", "formatting": "sharegpt"}, "text": {"file_name": "t.json"}}
    known |= {"far": {"hf_hub_url": "x/y"}, "odd": {**entry, "columns": {"messages": "talk"}}}
    where.parent.mkdir()
    where.write_text(json.dumps(known))
    done = converted(tmp_path, {**old, "dataset": "ours", "eval_dataset": "llava", "eval_strategy": "epoch"})
    data = done.recipe.data
    assert (data.train, data.val, data.image_root) == ("data/ours.json", "data/l.json", "data")
    assert whys(done)["recipe.data.train"] == "as dataset_info.json has it"
    there = converted(tmp_path, {**old, "dataset": "ours", "dataset_dir": "data", "media_dir": "pictures"})
    assert there.recipe.data.image_root == "pictures"
    for name, why in (
        ("ours,text", "several sets of questions: join them in one file, and give --train FILE"),
        ("text", "its lines are no conversations (formatting sharegpt): give --train FILE in a form that is read"),
        ("far", "it is fetched from a hub: give --train FILE"),
        ("odd", "its columns have names that are not read here: rename them in the data, and give --train FILE"),
        ("none", f"{where} has no such name"),
    ):
        assert refused(tmp_path, {**old, "dataset": name}) == [f"dataset is {name}; {why}"]


@pytest.mark.parametrize(("family", "template"), [("qwen2_5_vl", "qwen2_vl"), ("llava", "llava")])
def test_what_comes_out_trains(tmp_path: Path, tiny_models: dict[str, Path], family: str, template: str) -> None:
    """Adapters on all layers of a language model whose tower has layers of the same names."""
    worlds.write_world(tmp_path / "data", 6, (3, 2), hard=False)
    rows = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    talks = [
        {
            "messages": [
                {"role": "user", "content": f"<image>{row['question']}"},
                {"role": "assistant", "content": row["answer"]},
            ],
            "images": [f"images/{row['image']}"],
        }
        for row in rows
    ]
    (tmp_path / "data" / "ours.json").write_text(json.dumps(talks))
    columns = {"messages": "messages", "images": "images"}
    entry = {"file_name": "ours.json", "formatting": "sharegpt", "columns": columns, "tags": {"role_tag": "role"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"ours": entry}))
    old = {**QWEN25, "model_name_or_path": str(tiny_models[family]), "dataset": "ours", "max_samples": 4, "bf16": False}
    old["template"] = template
    old |= {"use_fast_image_processor": False, "image_max_pixels": 16384, "gradient_accumulation_steps": 2}
    write(converted(tmp_path, {**old, "dataloader_num_workers": 0}), tmp_path / "new")
    words = ("--plan", "new/plan.yaml", "--out", "run", "--max-steps", "1", "--set", "plan.device=cpu")
    said = sameday(tmp_path, "train", "new/recipe.yaml", *words)
    assert said.code == 0, said.err
    names = list(load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors"))
    assert any("down_proj" in name for name in names) and all(".language_model." in name for name in names)


# ms-swift: examples/train/multimodal and examples/models of its repository, and scripts of others

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
VIDEO = {
    **{"model": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset": "swift/VideoChatGPT:all", "split_dataset_ratio": 0.01},
    **{"train_type": "full", "torch_dtype": "bfloat16", "learning_rate": "1e-5", "freeze_vit": "false"},
    **{"freeze_aligner": "false", "gradient_checkpointing": "false", "vit_gradient_checkpointing": "true"},
    **{"deepspeed": "zero3", "use_liger_kernel": "true", "attn_impl": "flash_attn", "padding_free": "true"},
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "save_only_model": "true"},
}
CUSTOM = {
    **CAPTION,
    **{"train_type": "custom", "external_plugins": "custom_plugin.py", "vit_lr": "1e-5", "aligner_lr": "1e-5"},
    **{"dataset_num_proc": 4, "deepspeed": "zero2"},
}
EXPERTS = {
    **CAPTION,
    **{"model": "Qwen/Qwen3-VL-30B-A3B-Instruct", "router_aux_loss_coef": "1e-3", "load_from_cache_file": "true"},
    **{"freeze_aligner": "true", "split_dataset_ratio": 0.01, "padding_free": "true", "attn_impl": "flash_attn"},
}
OURS = {
    **CAPTION,
    **{"model": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset": "./datasets/img_train.json", "split_dataset_ratio": 0},
    **{"val_dataset": "./datasets/img_test.json", "system": "You are a helpful assistant.", "weight_decay": 0.01},
    **{"model_author": "swift", "model_name": "swift-robot", "gradient_accumulation_steps": 1},
}


def test_swift_of_a_file(tmp_path: Path) -> None:
    done = converted(tmp_path, script("swift sft", OURS, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}))
    recipe = done.recipe
    assert (done.trainer.name, done.told_by) == ("ms-swift", "the command swift sft")
    assert (recipe.data.train, recipe.data.val) == ("./datasets/img_train.json", "./datasets/img_test.json")
    assert (recipe.lora.r, recipe.lora.alpha, recipe.lora.dropout) == (8, 32, 0.05)
    assert (recipe.weight_decay, recipe.betas, recipe.schedule) == (0.01, (0.9, 0.95), "cosine")
    assert (recipe.loss_weight, recipe.answer_end, recipe.image_backend) == ("token", "turn", "pil")
    assert (recipe.effective_batch, recipe.system_prompt) == (1, "You are a helpful assistant.")
    assert (done.plan.eval_steps, done.plan.save_total_limit) == (100, 2)
    check_written(done, tmp_path)


def test_swift_keys_that_are_absent(tmp_path: Path) -> None:
    text = script("swift sft", {"model": "Qwen/Qwen3-VL-8B", "dataset": "a.jsonl"}, {"NPROC_PER_NODE": 2})
    done = converted(tmp_path, text)
    recipe = done.recipe
    assert (recipe.learning_rate, recipe.weight_decay, recipe.betas) == (1e-4, 0.1, (0.9, 0.95))
    assert (recipe.schedule, recipe.precision, recipe.effective_batch, recipe.lora.dropout) == (
        "cosine",
        "bf16",
        16,
        0.05,
    )
    assert recipe.lora.target_modules[-1] == "down_proj" and recipe.max_length is None
    assert whys(done)["recipe.effective_batch"] == "ms-swift's default; 1 at once x 8 accumulated x 2 processes"
    assert whys(done)["recipe.weight_decay"] == "ms-swift's default"
    text = script("swift sft", {"model": "Qwen/Qwen3-VL-8B", "dataset": "a.jsonl", "train_type": "full"})
    assert converted(tmp_path, text).recipe.learning_rate == 1e-5


@pytest.mark.parametrize("old", [VQA, CAPTION])
def test_swift_with_a_file_of_ones_own(tmp_path: Path, old: dict[str, Any]) -> None:
    text = script("swift sft", old, {"CUDA_VISIBLE_DEVICES": 0, "MAX_PIXELS": 1003520})
    assert lost(refused(tmp_path, text)) == {"dataset"}
    done = converted(tmp_path, text, DATA)
    assert (done.recipe.max_pixels, done.recipe.data.train, done.recipe.effective_batch) == (1003520, "train.jsonl", 16)
    check_written(done, tmp_path)


@pytest.mark.parametrize(
    ("model", "template", "other"),
    [("llava-hf/llava-1.5-7b-hf", "llava1_5_hf", "llava"), ("google/medgemma-4b-it", "gemma3_vision", "gemma3")],
)
def test_swift_with_models_of_other_families(tmp_path: Path, model: str, template: str, other: str) -> None:
    old = {**OURS, "model": model, "target_modules": "all-linear"}
    for asked in ({}, {"template": template}):
        text = script("swift sft", {**old, **asked}, {"MAX_PIXELS": 1003520, "IMAGE_MAX_TOKEN_NUM": 1024})
        done = converted(tmp_path, text)
        recipe = done.recipe
        assert (recipe.answer_end, recipe.max_pixels, recipe.min_pixels) == ("end_token", None, None)
        assert "line break" not in whys(done)["recipe.answer_end"].removeprefix("no line break follows")
        assert "qwen_vl_utils" not in whys(done)["recipe.image_backend"]
        for key in ("MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM"):
            assert whys(done)[key].startswith("this model takes every image at one size")
        near = whys(done).get("recipe.prompt", "")
        assert near.startswith("near, not the same: a line break follows a question there") == ("llava" in model)
        check_written(done, tmp_path / template / str(len(asked)))
    (line,) = refused(tmp_path, script("swift sft", {**old, "template": other}))
    assert line == f"template is {other}; the prompt would be another one (allowed: {template})"
    qwen = converted(tmp_path, script("swift sft", OURS))
    assert qwen.recipe.answer_end == "turn" and "qwen_vl_utils" in whys(qwen)["recipe.image_backend"]


def test_swift_parts_and_their_rates(tmp_path: Path) -> None:
    thawed = {**OURS, "freeze_vit": "false", "freeze_aligner": "false", "vit_lr": "1e-5", "use_dora": "true"}
    done = converted(tmp_path, script("swift sft", {**thawed, "aligner_lr": "2e-5", "use_rslora": "true"}))
    recipe = done.recipe
    assert recipe.lora.target_modules[-3:] == ("down_proj", "tower.all-linear", "projector.all-linear")
    assert (recipe.learning_rates, recipe.lora.dora, recipe.lora.rslora) == (
        {"tower": 1e-5, "projector": 2e-5},
        True,
        True,
    )
    check_written(done, tmp_path)
    done = converted(tmp_path, script("swift sft", {**thawed, "freeze_vit": "true"}))
    assert done.recipe.lora.target_modules[-2:] == ("down_proj", "projector.all-linear")
    assert done.recipe.learning_rates == {}, "of a part that is frozen"
    named = {**OURS, "freeze_vit": "false", "target_modules": "q_proj"}
    assert lost(refused(tmp_path, script("swift sft", named))) == {"freeze_vit"}


def test_swift_refuses(tmp_path: Path) -> None:
    lines = refused(tmp_path, script("swift sft", VIDEO, {"VIDEO_MAX_PIXELS": 50176, "FPS_MAX_FRAMES": 12}))
    assert lost(lines) == {"dataset", "split_dataset_ratio"}
    whole = converted(tmp_path, script("swift sft", {**VIDEO, "split_dataset_ratio": 0}), DATA)
    assert (whole.recipe.train, whole.recipe.train_vision, whole.plan.packing) == ("all", True, True)
    lines = refused(tmp_path, script("swift sft", CUSTOM), DATA)
    assert lost(lines) == {"train_type", "external_plugins"}
    lines = refused(tmp_path, script("swift sft", EXPERTS, {"IMAGE_MAX_TOKEN_NUM": 1024}), DATA)
    assert lost(lines) == {"router_aux_loss_coef", "split_dataset_ratio"}
    fine = {**VQA, "model": "Qwen/Qwen3-VL-4B-Instruct"}
    done = converted(tmp_path, script("swift sft", fine, {"IMAGE_MAX_TOKEN_NUM": 1024}), DATA)
    assert done.recipe.max_pixels == 1024 * 32 * 32


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
    assert (recipe.precision, recipe.schedule, done.plan.checkpointing) == ("bf16", "linear", "full")
    check_written(done, tmp_path)
    plain = converted(tmp_path, {key: value for key, value in old.items() if key != "use_peft"})
    assert (plain.recipe.train, plain.recipe.train_vision, plain.recipe.max_length) == ("all", True, 1024)
    assert whys(plain)["recipe.train"] == "TRL's default: all weights, the vision tower's too"
    four = converted(tmp_path, {**old, "load_in_4bit": True})
    assert (four.recipe.base_format, four.recipe.double_quant) == ("nf4", False)


# axolotl: examples of its repository

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
PATTERN = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
OLD_PATTERN = r"language_model.model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
TARGETED = {key: value for key, value in AXOLOTL.items() if key != "lora_target_linear"}
TARGETED |= {"lora_target_modules": PATTERN, "base_model": "Qwen/Qwen2.5-VL-7B-Instruct"}
VISION = {**TARGETED, "base_model": "alpindale/Llama-3.2-11B-Vision-Instruct", "chat_template": "llama3_2_vision"}
QLORA = {
    **TARGETED,
    **{"base_model": "google/gemma-3-4b-it", "load_in_4bit": True, "adapter": "qlora", "val_set_size": 0.01},
    **{"chat_template": "gemma3", "lora_target_modules": OLD_PATTERN, "ddp_find_unused_parameters": True},
    **{"gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.parametrize(
    ("old", "keys"),
    [
        (AXOLOTL, {"datasets", "lora_target_linear", "optimizer"}),
        (TARGETED, {"datasets", "optimizer"}),
        (
            {**TARGETED, "sample_packing": True, "eval_sample_packing": False},
            {"datasets", "optimizer", "sample_packing"},
        ),
        (VISION, {"base_model", "chat_template", "datasets", "optimizer"}),
        (QLORA, {"datasets", "optimizer", "val_set_size", "lora_target_modules"}),
    ],
)
def test_axolotl_refuses(tmp_path: Path, old: dict[str, Any], keys: set[str]) -> None:
    lines = refused(tmp_path, old)
    assert lost(lines) == keys, lines
    said = "optimizer is adamw_bnb_8bit; no recipe has this optimizer (allowed: adamw, "
    assert any(line.startswith(said) for line in lines)


def test_axolotl_with_an_optimizer_that_a_recipe_has(tmp_path: Path) -> None:
    done = converted(tmp_path, {**TARGETED, "optimizer": "adamw_torch_fused"}, DATA)
    recipe, plan = done.recipe, done.plan
    assert done.trainer.name == "axolotl" and done.recognised.endswith("whatever train_on_inputs says.")
    assert recipe.lora.target_modules == (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    assert (recipe.lora.r, recipe.lora.alpha, recipe.max_length, recipe.answer_end) == (32, 16, 8192, "end_token")
    assert (recipe.effective_batch, recipe.num_epochs, recipe.warmup_ratio) == (4, 1, 0.1)
    assert (plan.save_steps, plan.eval_steps, plan.optimizer_impl) == ("epoch", "epoch", "fused")
    check_written(done, tmp_path)


@pytest.mark.parametrize(
    ("model", "template"), [("llava-hf/llava-1.5-7b-hf", "llava"), ("google/gemma-3-4b-it", "gemma3")]
)
def test_axolotl_with_models_of_other_families(tmp_path: Path, model: str, template: str) -> None:
    old = {**TARGETED, "optimizer": "adamw_torch_fused", "base_model": model, "chat_template": template}
    done = converted(tmp_path, old, DATA)
    assert whys(done)["chat_template"] == "the model's own chat template"
    assert (done.recipe.answer_end, done.recipe.max_pixels) == ("end_token", None)
    check_written(done, tmp_path)
    (line,) = refused(tmp_path, {**old, "chat_template": "qwen2_vl"}, DATA)
    allowed = f"(allowed: {template}, tokenizer_default)"
    assert line == f"chat_template is qwen2_vl; the prompt would be another one {allowed}"


def test_axolotl_keys_that_are_absent(tmp_path: Path) -> None:
    rows = [{"path": "data/a.jsonl", "type": "chat_template", "ds_type": "json"}]
    old = {"base_model": "Qwen/Qwen3-VL-8B", "datasets": rows, "learning_rate": 1e-4, "warmup_steps": 5}
    done = converted(tmp_path, old)
    recipe = done.recipe
    assert (recipe.train, recipe.train_vision, recipe.data.train) == ("all", True, "data/a.jsonl")
    assert (recipe.schedule, recipe.num_epochs, recipe.max_length, recipe.precision) == ("cosine", 1, 512, "bf16")
    assert (recipe.effective_batch, recipe.warmup_steps) == (1, 5)
    assert whys(done)["recipe.max_length"].startswith("axolotl's default; ")
    four = {**old, "adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_target_modules": ["q_proj"]}
    assert converted(tmp_path, four).recipe.double_quant is True
    (line,) = refused(tmp_path, {key: value for key, value in old.items() if key != "warmup_steps"})
    assert line == (
        "warmup_ratio is not set; axolotl then takes 3% of all steps, at most 100, and no recipe says that: give "
        "warmup_ratio or warmup_steps"
    )


@pytest.mark.parametrize(
    ("pattern", "kind", "names"),
    [
        (PATTERN, "qwen3_vl", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        (r".*language_model.*\.(q|v)_proj", "qwen2_5_vl", ["q_proj", "v_proj"]),
        (r".*language_model.*\.(q|v)_proj", None, ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", "qwen3_vl", ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", None, None),  # some families have them in the tower too
        (r".*proj", "qwen2_5_vl", None),
        (r"model.language_model.layers.[0-3].self_attn.q_proj", "qwen3_vl", None),
        (OLD_PATTERN, "qwen3_vl", None),
        ("(", "qwen3_vl", None),
    ],
)
def test_layers_of_a_pattern(pattern: str, kind: str | None, names: list[str] | None) -> None:
    assert matched(pattern, kind) == names


# Whose it is


def test_which_trainer(tmp_path: Path) -> None:
    both = {"model_name_or_path": "Qwen/Qwen3-VL-8B", "finetuning_type": "lora", "cutoff_len": 9, "train_type": "lora"}
    (line,) = refused(tmp_path, {**both, "freeze_vit": True})
    assert line == (
        "the keys are those of LLaMA-Factory (cutoff_len, finetuning_type) or ms-swift (freeze_vit, train_type): say "
        "which with --from llamafactory|swift"
    )
    forced = converted(tmp_path, {"model": "Qwen/Qwen3-VL-8B"}, DATA, trainer="swift")
    assert (forced.recipe.weight_decay, forced.told_by) == (0.1, "--from swift")
    (line,) = refused(tmp_path, both, trainer="unsloth")
    assert line == "--from unsloth: must be one of trainer, llamafactory, swift, trl, axolotl"
    plain = converted(tmp_path, {"model": "Qwen/Qwen3-VL-8B", "lora_rank": 2}, DATA)
    assert plain.recognised == (
        "read as a config of transformers' Trainer, or a script around it, by no keys of another trainer (--from says "
        "otherwise)"
    )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    secret = script("swift sft", {**VQA, "hub_token": "abcdef"}, {"WANDB_API_KEY": "abcdef"})
    (tmp_path / "configs" / "vqa.sh").write_text(secret)
    asked = ["convert", "configs/vqa.sh", "-o", "new", "--train", "data/t.jsonl", "--images", "pictures"]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("read as a config of ms-swift, by the command swift sft (--from says otherwise)\n")
    assert "abcdef" not in done.output and "WANDB_API_KEY = ***" in done.output
    data = load_recipe(tmp_path / "new" / "recipe.yaml").data
    assert (data.train, data.image_root) == ("../data/t.jsonl", "../pictures")


# Scripts


@pytest.mark.parametrize(
    ("text", "train", "batch"),
    [
        ("swift sft --model {m} --dataset a.jsonl --seed 3 >logs/x.log 2>&1 &", "a.jsonl", 16),
        ("pip install --upgrade x && swift sft --model {m} --dataset a.jsonl | tee --append x.log", "a.jsonl", 16),
        (
            'DATA="${{DATA:-b.jsonl}}"\nsrun -u swift sft --model {m} --dataset $DATA --output_dir o/${{M##*/}}',
            "b.jsonl",
            16,
        ),
        (
            "accelerate launch --config_file zero.yaml sft_vlm.py --model_name_or_path {m} --dataset_name a.jsonl "
            "--completion_only_loss true --per_device_train_batch_size 2",
            "a.jsonl",
            6,
        ),
    ],
)
def test_what_stands_around_a_command(tmp_path: Path, text: str, train: str, batch: int) -> None:
    (tmp_path / "zero.yaml").write_text("num_processes: 3\n")
    recipe = converted(tmp_path, text.format(m="Qwen/Qwen3-VL-8B")).recipe
    assert (recipe.data.train, recipe.effective_batch) == (train, batch)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="$`\\|&;<>"), min_size=1)
FLAGS = st.dictionaries(
    st.from_regex(r"[a-z][a-z_]{0,9}", fullmatch=True),
    st.just(True) | st.integers(0, 10**6) | WORDS.filter(lambda word: word[0] not in "-#{[" and word[-1] != ","),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(flags=FLAGS)
def test_flags_come_back_as_they_were_written(tmp_path_factory: Any, flags: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "flags.sh"
    path.write_text(script("swift sft", flags), encoding="utf-8")
    document, command = read_script(path)
    assert command == "swift sft" and list(document.values) == list(flags)
    for line, (name, value) in enumerate(flags.items(), 2):
        read = document.values[name]
        assert read == value or (not isinstance(read, str) and read == yaml.safe_load(value)), (read, value)
        assert document.places[(name,)] == f"{path}:{line}"


def test_a_number_sign_inside_a_word_is_no_comment(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, "swift sft --model Qwen/Qwen3-VL-8B --dataset a.jsonl#500 # all of it\n")
    assert line == (
        "dataset is a.jsonl#500; a subset that its program draws: write it to a file, and give --train FILE"
    )


def test_a_script_as_people_write_it(tmp_path: Path) -> None:
    text = """#!/bin/bash
# a comment
export CUDA_VISIBLE_DEVICES=0
MODEL=Qwen/Qwen3-VL-8B
cd /somewhere
swift sft --model ${MODEL} `# its model` \\
    --dataset=a.jsonl \\
    # in between
    --lora_rank 4 "$@"
"""
    recipe = converted(tmp_path, text).recipe
    assert (recipe.model, recipe.data.train, recipe.lora.r) == ("Qwen/Qwen3-VL-8B", "a.jsonl", 4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("swift sft --model $WHICH --seed 1 --seed 2\n", "--model is $WHICH; this script does not say what $WHICH is"),
        ("swift sft --seed 1 \\\n --seed 2\n", "--seed is given twice, first at "),
        (
            "swift sft --a 1\nswift sft --a 2\n",
            "starts 2 trainings (lines 1, 2); must be one command with --flags, of swift",
        ),
        ("pip install --upgrade x\n", "starts no trainer that is known; must be one command with --flags, of swift, "),
        ("llamafactory-cli train examples/a.yaml\n", "starts a training by examples/a.yaml: convert that file"),
        ("trl sft --config a.yaml --seed 1\n", "starts a training by a.yaml: convert that file"),
        ("swift sft --a 'b\n", "a quote is opened here and never closed"),
    ],
)
def test_scripts_that_cannot_be_read(tmp_path: Path, text: str, why: str) -> None:
    assert any(why in line for line in refused(tmp_path, text))


# Any of them

VALUES = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 2) | st.sampled_from(["no", "lora", "full", "x y"])
)


@pytest.mark.parametrize("short", TRAINERS)
def test_each_key_is_said_or_refused_or_dropped_once(tmp_path: Path, short: str) -> None:
    """Not twice, and never not at all."""
    trainer = TRAINERS[short]
    names = sorted({*trainer.marks, *trainer.aliases, *trainer.neutral, *trainer.dropped, *trainer.handled, "odd"})
    more = sorted({*LLAMA, *OURS, *ROBOT, *AXOLOTL} - {"model_name_or_path", "resources_per_worker"})

    @settings(deadline=None, max_examples=60)
    @given(old=st.dictionaries(st.sampled_from(names + more), VALUES | st.lists(VALUES, max_size=2), max_size=14))
    def check(old: dict[str, Any]) -> None:
        (tmp_path / "old.yaml").write_text(yaml.safe_dump({"model_name_or_path": "Qwen/Qwen3-VL-8B", **old}))
        work = examine(tmp_path / "old.yaml", trainer=short, data=DATA)
        said = [note.key for note in work.notes if not note.key.startswith(("(", "--"))]
        # A setting that was made of several keys stands with each of them.
        assert Counter(said + work.refused_keys) == dict.fromkeys({"model_name_or_path", *old}, 1)

    check()


# What converting knows of each family, beside the family itself


@pytest.mark.parametrize("kind", known_families())
def test_what_is_known_of_a_family_is_true_of_its_models(tiny_models: dict[str, Path], kind: str) -> None:
    facts, family, folder = FAMILIES[kind], family_of(kind), tiny_models[kind]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    last = {part: {name.split(".")[-1] for name in linear if family.part_of(name) == part} for part in OF_IMAGES}
    assert [part for part in OF_IMAGES if last[part]] == list(facts.image_parts)
    assert last["tower"] & {*LANGUAGE} == {*facts.alike}
    names = [name for name, _ in model.named_parameters()]
    now = [f"model.{each.format(0)}" for each in facts.tower_layers if ".vision_model." not in each]
    assert len(now) > 2 and all(any(name.startswith(each) for name in names) for each in now), now
    chat = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
    written = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    assert written.endswith(f"{family.markers.end_of_turn}\n") == facts.line_break
    fewest, most = family.pixel_limits(family.load_image_processor(str(folder), None, "pil", None, None))
    assert (fewest == most) == (facts.token_side is None)
