"""Commands of ms-swift, as its repository and others have them: each becomes a recipe, or every key that is lost is
named."""

from pathlib import Path
from typing import Any

import pytest
from converting import CAPTION, DATA, OURS, VQA, check_written, converted, lost, refused, script, whys

# ms-swift: examples/train/multimodal and examples/models of its repository, and scripts of others

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
    of_tower = converted(tmp_path, script("swift sft", {**OURS, "freeze_vit": "false", "target_modules": "qkv"}))
    assert of_tower.recipe.lora.target_modules == ("tower.qkv",)
    unknown = {**OURS, "freeze_vit": "false", "target_modules": "proj"}
    assert lost(refused(tmp_path, script("swift sft", unknown))) == {"freeze_vit"}


@pytest.mark.parametrize("vit", ["true", "false"])
def test_swift_names_of_layers_are_those_of_the_whole_model(tmp_path: Path, vit: str) -> None:
    """It hands them to PEFT, whatever is frozen."""
    named = {**OURS, "freeze_vit": vit, "freeze_aligner": vit, "vit_lr": "1e-5"}
    done = converted(tmp_path, script("swift sft", {**named, "target_modules": ["q_proj", "v_proj"]}))
    assert (done.recipe.lora.target_modules, done.recipe.learning_rates) == (("q_proj", "v_proj"), {})
    done = converted(tmp_path, script("swift sft", {**named, "target_modules": ["q_proj", "up_proj"]}))
    assert done.recipe.lora.target_modules == ("q_proj", "up_proj", "tower.up_proj")
    assert done.recipe.learning_rates == {"tower": 1e-5}


def test_swift_refuses(tmp_path: Path) -> None:
    lines = refused(tmp_path, script("swift sft", VIDEO, {"VIDEO_MAX_PIXELS": 50176, "FPS_MAX_FRAMES": 12}))
    assert lost(lines) == {"dataset", "split_dataset_ratio"}
    whole = converted(tmp_path, script("swift sft", {**VIDEO, "split_dataset_ratio": 0}), DATA)
    assert (whole.recipe.train, whole.recipe.train_vision, whole.plan.packing) == ("all", True, True)
    lines = refused(tmp_path, script("swift sft", CUSTOM), DATA)
    assert lost(lines) == {"train_type", "external_plugins"}
    lines = refused(tmp_path, script("swift sft", EXPERTS, {"IMAGE_MAX_TOKEN_NUM": 1024}), DATA)
    assert lost(lines) == {"model", "IMAGE_MAX_TOKEN_NUM", "router_aux_loss_coef", "split_dataset_ratio"}
    fine = {**VQA, "model": "Qwen/Qwen3-VL-4B-Instruct"}
    done = converted(tmp_path, script("swift sft", fine, {"IMAGE_MAX_TOKEN_NUM": 1024}), DATA)
    assert done.recipe.max_pixels == 1024 * 32 * 32


def test_the_sizes_of_ms_swifts_images(tmp_path: Path) -> None:
    """qwen_vl_utils has a lower limit of its own, which is that of Qwen2-VL's and Qwen2.5-VL's processors too."""
    qwen3 = {**OURS, "model": "Qwen/Qwen3-VL-4B-Instruct"}
    done = converted(tmp_path, script("swift sft", qwen3))
    assert (done.recipe.min_pixels, done.recipe.max_pixels) == (4096, None)
    assert whys(done)["recipe.min_pixels"].startswith("qwen_vl_utils enlarges smaller images to 4 tokens of 32x32 pix")
    for model in ("Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"):
        done = converted(tmp_path, script("swift sft", {**OURS, "model": model}, {"MAX_PIXELS": 602112}))
        assert (done.recipe.min_pixels, done.recipe.max_pixels) == (None, 602112)
        assert whys(done)["recipe.max_pixels"] == (
            "qwen_vl_utils 0.0.14 and later read IMAGE_MAX_TOKEN_NUM instead: if it was one, leave this out"
        )
    limits = {"IMAGE_MIN_TOKEN_NUM": 64, "IMAGE_MAX_TOKEN_NUM": 256, "MAX_PIXELS": 100352, "MIN_PIXELS": 3136}
    done = converted(tmp_path, script("swift sft", qwen3, limits))
    assert (done.recipe.min_pixels, done.recipe.max_pixels) == (65536, 256 * 32 * 32)
    assert whys(done)["MAX_PIXELS"] == (
        "does nothing: qwen_vl_utils 0.0.14 and later, which this model needs, read IMAGE_MAX_TOKEN_NUM instead"
    )
    lines = refused(tmp_path, script("swift sft", OURS, limits))
    assert lost(lines) == {"MAX_PIXELS", "MIN_PIXELS"}
    assert lines[0].startswith("MAX_PIXELS is 100352; but IMAGE_MAX_TOKEN_NUM is given too; qwen_vl_utils before 0.0")


def test_what_ms_swift_shrinks_before_the_model_sees_it(tmp_path: Path) -> None:
    """--max_pixels rounds sides down to whole pixels, qwen_vl_utils then to the next whole tokens: 1000x1000 pixels at
    602,112 are 28x28 tokens there, and 27x27 where one limit alone says it."""
    shrunk = {**OURS, "max_pixels": 602112}
    done = converted(tmp_path, script("swift sft", shrunk))
    assert done.recipe.max_pixels == 602112
    assert whys(done)["recipe.max_pixels"] == (
        "near, not the same: images are shrunk to so many pixels first, and their sides then rounded to whole tokens, "
        "so that a side may be one token longer there than here"
    )
    done = converted(tmp_path, script("swift sft", shrunk, {"MAX_PIXELS": 802816}))
    assert done.recipe.max_pixels == 602112
    assert whys(done)["MAX_PIXELS"] == "--max_pixels shrinks images to fewer pixels before"
    for smaller in ({"MAX_PIXELS": 200704}, {"IMAGE_MAX_TOKEN_NUM": 256}):
        done = converted(tmp_path, script("swift sft", shrunk, smaller))
        assert done.recipe.max_pixels == 200704
        assert whys(done)["max_pixels"] == (
            "images are shrunk to 200,704 pixels after it; near, not the same: those that it shrinks are resized twice "
            "there"
        )
    assert converted(tmp_path, script("swift sft", {**OURS, "max_pixels": -1})).recipe.max_pixels is None
    llava = {**shrunk, "model": "llava-hf/llava-1.5-7b-hf"}
    done = converted(tmp_path, script("swift sft", llava, {"MAX_PIXELS": 802816}))
    assert "ms-swift shrinks larger images to so many pixels before that" in whys(done)["max_pixels"]
    assert "near" not in whys(done)["MAX_PIXELS"] and done.recipe.max_pixels is None


def test_what_ms_swift_holds_out(tmp_path: Path) -> None:
    """Its default changed; where there are questions of validation, nothing is held out."""
    old = {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset": "train.jsonl", "train_type": "lora", "freeze_vit": True}
    done = converted(tmp_path, old)
    assert done.recipe.data.val is None
    assert whys(done)["recipe.data.val"] == (
        "ms-swift 3.6 and later hold nothing out; versions before held out 1% of the training questions, and learned "
        "only the others"
    )
    assert "recipe.data.val" not in whys(converted(tmp_path, {**old, "split_dataset_ratio": 0}))
    given = converted(tmp_path, {**old, "split_dataset_ratio": 0.01, "val_dataset": ["val.jsonl"]})
    assert given.recipe.data.val == "val.jsonl"
    assert whys(given)["split_dataset_ratio"] == "does nothing: val_dataset is given"
    (line,) = refused(tmp_path, {**old, "split_dataset_ratio": 0.01})
    assert line.startswith("split_dataset_ratio is 0.01; some training questions would be held out")


def test_what_ms_swift_does_otherwise_is_said(tmp_path: Path) -> None:
    four = {"quant_method": "bnb", "quant_bits": "4"}
    done = converted(tmp_path, script("swift sft", {**OURS, **four}))
    assert whys(done)["recipe.base_format"] == (
        "near, not the same: ms-swift leaves vision tower and projector in bf16; here they are in four bits too"
    )
    rates = {"freeze_vit": "false", "vit_lr": "1e-5", "optimizer": "multimodal"}
    done = converted(tmp_path, script("swift sft", {**OURS, **rates}))
    assert whys(done)["optimizer"] == "AdamW with the learning rates of vit_lr and aligner_lr"
    (line,) = refused(tmp_path, script("swift sft", {**OURS, "optimizer": "multimodal"}))
    assert line.startswith("optimizer is multimodal; no recipe has this optimizer")


def test_questions_longer_than_max_length(tmp_path: Path) -> None:
    """What ms-swift did with them is said of max_length, also where only its default says it."""
    cut = "; here the end of their answers is cut"
    delete = "near, not the same: ms-swift leaves out longer questions (truncation_strategy delete, its default), and "
    for given in ({}, {"truncation_strategy": "delete"}):
        done = converted(tmp_path, script("swift sft", {**OURS, **given}))
        assert whys(done)["recipe.max_length"] == f"{delete}then takes fewer steps{cut}"
    done = converted(tmp_path, script("swift sft", {**OURS, "truncation_strategy": "left"}))
    assert whys(done)["recipe.max_length"] == (
        f"near, not the same: ms-swift cuts the beginning of longer questions (truncation_strategy left){cut}"
    )
    done = converted(tmp_path, script("swift sft", {**OURS, "truncation_strategy": "right"}))
    assert whys(done)["recipe.max_length"] == "never cuts image tokens or a whole answer"
    assert whys(done)["truncation_strategy"] == "recipe.max_length 2048 cuts the end of answers"
    unlimited = {key: value for key, value in OURS.items() if key != "max_length"}
    done = converted(tmp_path, script("swift sft", {**unlimited, "truncation_strategy": "delete"}))
    assert done.recipe.max_length is None and "near" not in whys(done)["truncation_strategy"]
    (line,) = refused(tmp_path, script("swift sft", {**OURS, "truncation_strategy": "split"}))
    assert line == (
        "truncation_strategy is split; too long questions would be cut otherwise (allowed: delete, left, right)"
    )


ARGS = {
    **{"model": "Qwen/Qwen2.5-VL-7B-Instruct", "train_type": "lora", "freeze_vit": True, "dataset": ["train.jsonl"]},
    **{"fp16_opt_level": "O1", "half_precision_backend": "auto", "fp16_backend": "auto", "tpu_metrics_debug": False},
    **{"past_index": -1, "use_legacy_prediction_loop": False, "include_inputs_for_metrics": False, "stream": False},
    **{"ray_scope": "last", "sortish_sampler": False, "optim": "adamw_torch", "optimizer": None, "logprobs": False},
    **{"stopping_strategy": "first_exhausted", "shuffle_buffer_size": 1000, "load_data_args": False, "columns": {}},
    **{"ignore_args_error": False, "use_swift_lora": False, "adapter_act": "gelu", "adapter_length": 128},
    **{"external_plugins": [], "custom_register_path": [], "custom_dataset_info": [], "model_kwargs": {}},
    **{"val_dataset": [], "target_modules": ["all-linear"], "adapters": [], "template_backend": "swift"},
    **{"rank": 0, "global_world_size": 4, "local_world_size": 4, "hub": "<class 'swift.hub.hub.MSHub'>"},
    **{"model_suffix": "Qwen2.5-VL-7B-Instruct", "model_info": "ModelInfo(model_type='qwen2_5_vl')"},
    **{"model_meta": "ModelMeta(model_type='qwen2_5_vl')", "model_dir": "/models/qwen", "swift_version": "3.8.0"},
    **{"training_args": "Seq2SeqTrainingArguments(output_dir='/output')", "tools_prompt": "react_en"},
    **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "truncation_strategy": "delete"},
}


def test_the_arguments_that_ms_swift_writes_into_the_folder_of_a_run(tmp_path: Path) -> None:
    """All of its settings, and what it made of them; the number of processes is one of them."""
    done = converted(tmp_path, ARGS)
    assert done.trainer.name == "ms-swift"
    assert (done.recipe.data.train, done.recipe.start_adapter) == ("train.jsonl", None)
    assert done.recipe.effective_batch == 16
    assert whys(done)["recipe.effective_batch"] == "1 at once x 4 accumulated x 4 processes"
    assert whys(done)["adapters"] == "empty: none"
    nested = {**ARGS, "training_args": {"learning_rate": 3e-4}}
    assert converted(tmp_path, nested).recipe.learning_rate == 3e-4
    lines = refused(tmp_path, {**ARGS, "template_backend": "jinja", "external_plugins": ["mine.py"]})
    assert lost(lines) == {"template_backend", "external_plugins"}


def test_a_rate_of_the_tower_by_longer_names_of_its_layers(tmp_path: Path) -> None:
    """PEFT finds them whatever is frozen."""
    old = {"model": "llava-hf/llava-1.5-7b-hf", "train_type": "lora", "dataset": "train.jsonl", "vit_lr": 1e-6}
    done = converted(tmp_path, {**old, "target_modules": ["self_attn.q_proj", "mlp.fc1"], "freeze_vit": False})
    assert done.recipe.lora.target_modules == ("self_attn.q_proj", "tower.mlp.fc1", "tower.self_attn.q_proj")
    assert done.recipe.learning_rates == {"tower": 1e-6}
    assert whys(done)["freeze_vit"].startswith("does nothing: PEFT looks for the names of ")
