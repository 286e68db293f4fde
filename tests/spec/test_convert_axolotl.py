"""Configs of axolotl, as its repository has them: each becomes a recipe, or every key that is lost is named."""

from pathlib import Path
from typing import Any

import pytest
from converting import AXOLOTL, DATA, TARGETED, check_written, converted, lost, refused, whys

from sameday.spec.convert.targets import matched

# axolotl: examples of its repository

PATTERN = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
OLD_PATTERN = r"language_model.model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
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
        (QLORA, {"datasets", "optimizer", "val_set_size"}),
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
    assert matched(pattern, kind).names == tuple(names or ())


def test_a_null_is_absent_to_axolotl_but_for_bf16(tmp_path: Path) -> None:
    old = {**TARGETED, "lora_target_modules": ["q_proj"], "optimizer": "adamw_torch_fused", "tf32": None}
    nulls = {"max_grad_norm": None, "sequence_len": None, "peft_init_lora_weights": None}
    recipe = converted(tmp_path, {**old, **nulls}, DATA).recipe
    assert (recipe.max_grad_norm, recipe.max_length) == (1.0, 512)
    (line,) = refused(tmp_path, {**old, "bf16": None}, DATA)
    assert line.startswith("bf16 is null; in axolotl null is not its default: leave it out for that (auto), or ")


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QWEN_PATTERN = r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    ("pattern", "model", "template"),
    [
        (OLD_PATTERN, "google/gemma-3-4b-it", "gemma3"),
        (OLD_PATTERN, "llava-hf/llava-1.5-7b-hf", "llava"),
        (OLD_PATTERN, "hospital/ours", "tokenizer_default"),
        (QWEN_PATTERN, "Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl"),
        (QWEN_PATTERN, "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl"),
    ],
)
def test_names_that_layers_had_before(tmp_path: Path, pattern: str, model: str, template: str) -> None:
    old = {**TARGETED, "optimizer": "adamw_torch", "base_model": model, "chat_template": template}
    done = converted(tmp_path, {**old, "lora_target_modules": pattern}, DATA)
    assert done.recipe.lora.target_modules == ALL
    assert whys(done)["recipe.lora.target_modules"] == (
        "the layers that it takes, by the names that transformers had for them before 4.52"
    )


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            OLD_PATTERN,
            "it takes no layer of the model, whose names are such as model.language_model.layers.0.",
        ),
        (r".*(q_proj|qkv)", "it takes layers of the vision tower or of the projector too"),
        (r".*layers\.[0-3]\..*q_proj", "it takes q_proj in some layers of the language model and not in others"),
        (r"(.*q_proj", "it is no regular expression (missing ), unterminated subpattern at position 0)"),
        (
            r"(([a-z_.0-9]+)+)+X",
            "it was not done with the names of the model's layers after 2 seconds: a repeat inside a repeat, such as "
            "(a+)+, tries every way to cut a name into pieces",
        ),
    ],
)
def test_why_a_pattern_is_refused(tmp_path: Path, pattern: str, said: str) -> None:
    old = {**TARGETED, "optimizer": "adamw_torch", "base_model": "Qwen/Qwen3-VL-8B-Instruct"}
    old |= {"chat_template": "qwen3_vl", "lora_target_modules": pattern}
    (line,) = refused(tmp_path, old, DATA)
    assert f"; {said}" in line and line.endswith(": give a list of layer names, such as [q_proj, v_proj]")


def test_all_linear_layers(tmp_path: Path) -> None:
    """By the last parts of their names, as axolotl finds them: a Qwen-VL's are those of a convolution too."""
    linear = {**AXOLOTL, "optimizer": "adamw_torch"}
    llava = {**linear, "base_model": "llava-hf/llava-1.5-7b-hf", "chat_template": "llava"}
    gemma = {**linear, "base_model": "google/gemma-3-4b-it", "chat_template": "gemma3"}
    done = converted(tmp_path, llava, DATA)
    assert done.recipe.lora.target_modules == ("all-linear", "tower.all-linear", "projector.all-linear")
    assert whys(done)["recipe.lora.target_modules"] == "all linear layers of the model but its head"
    both = converted(tmp_path, {**gemma, "lora_target_modules": ["q_proj", "v_proj"]}, DATA)
    assert both.recipe.lora.target_modules == ("all-linear", "tower.all-linear")
    assert whys(both)["lora_target_modules"] == "lora_target_linear takes them too"
    (line,) = refused(tmp_path, {**gemma, "lora_target_modules": ["embed_tokens"]}, DATA)
    assert line == (
        "lora_target_linear is true; but lora_target_modules is [embed_tokens], and both would get adapters: leave one "
        "of the two out"
    )
    (line,) = refused(tmp_path, linear, DATA)
    assert line == (
        "lora_target_linear is true; PEFT takes all that is called like a linear layer, here visual.patch_embed.proj "
        "too, and no recipe has adapters there: give lora_target_modules: all-linear for all linear layers, or "
        "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] for layers of these names"
    )
    qwen = {**linear, "lora_target_linear": False, "lora_target_modules": "all-linear"}
    assert converted(tmp_path, qwen, DATA).recipe.lora.target_modules[0] == "all-linear"


def test_what_changes_no_weight(tmp_path: Path) -> None:
    old = {**TARGETED, "optimizer": "adamw_torch", "torch_compile": "auto", "auto_resume_from_checkpoints": False}
    done = converted(tmp_path, {**old, "special_tokens": {"pad_token": "<|endoftext|>"}}, DATA)
    assert done.plan.compile == "layers"
    assert whys(done)["special_tokens.pad_token"] == "padding is never learned"
    assert whys(done)["auto_resume_from_checkpoints"] == "the same command goes on where the run stopped"
    assert lost(refused(tmp_path, {**old, "special_tokens": {"eos_token": "x"}}, DATA)) == {"special_tokens.eos_token"}


def test_the_token_that_ends_an_answer(tmp_path: Path) -> None:
    qwen = {**TARGETED, "optimizer": "adamw_torch", "lora_target_modules": ["q_proj"]}
    gemma = {**qwen, "base_model": "google/gemma-3-4b-it", "chat_template": "gemma3"}
    done = converted(tmp_path, {**qwen, "special_tokens": {"eos_token": "<|im_end|>"}, "eot_tokens": []}, DATA)
    assert whys(done)["special_tokens.eos_token"] == "the token that ends an answer of this model anyway"
    done = converted(tmp_path, {**gemma, "eot_tokens": ["<end_of_turn>"], "train_on_eot": "turn"}, DATA)
    assert whys(done)["eot_tokens"] == "the token that ends an answer of this model anyway"
    for given in (["<|im_end|>"], ["<end_of_turn>", "<eos>"]):
        (line,) = refused(tmp_path, {**gemma, "eot_tokens": given}, DATA)
        assert line.endswith("; an answer would end with another token (allowed: <end_of_turn>)")


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [
        ({"warmup_ratio": 0.29, "max_steps": 100}, 28, "0.29 of max_steps, rounded down, where the questions are"),
        ({"warmup_ratio": 0.015, "max_steps": 100}, 2, "enough for so many steps; axolotl makes two steps of one"),
        ({"warmup_ratio": 0.009, "max_steps": 100}, 0, "rounded down"),
        ({"warmup_steps": 1}, 2, "axolotl makes two steps of one"),
        ({"warmup_steps": 10}, 10, ""),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, 0, ""),
    ],
)
def test_the_steps_of_a_warm_up(tmp_path: Path, given: dict[str, Any], steps: int, said: str) -> None:
    """It rounds a share down and never warms up for one step alone."""
    old = {**TARGETED, "optimizer": "adamw_torch", "warmup_ratio": None, "lora_target_modules": ["q_proj"], **given}
    done = converted(tmp_path, old, DATA)
    assert done.recipe.warmup_steps == steps and said in whys(done)["recipe.warmup_steps"]


def test_a_share_of_steps_that_are_not_counted_yet(tmp_path: Path) -> None:
    done = converted(tmp_path, {**TARGETED, "optimizer": "adamw_torch", "lora_target_modules": ["q_proj"]}, DATA)
    assert (done.recipe.warmup_ratio, done.recipe.warmup_steps) == (0.1, None)
    assert whys(done)["recipe.warmup_ratio"] == (
        "near, not the same: axolotl rounds the number of steps down, a recipe rounds up, and axolotl makes two steps "
        "of one: give warmup_steps where the old run's log tells them"
    )
