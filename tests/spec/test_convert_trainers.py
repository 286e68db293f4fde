"""What holds for configs of every other trainer: whose they are, their prompts, each key once, what is known of
families."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from converting import AXOLOTL, DATA, LLAMA, OURS, ROBOT, TARGETED, VQA, converted, refused, script, whys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer
from typer.testing import CliRunner

from sameday.cli import app
from sameday.models.adapters import resolve_targets, taken
from sameday.models.families import family_of, known_families
from sameday.spec.convert.config import examine
from sameday.spec.convert.families import FAMILIES, NOT_LINEAR, PROJECTORS
from sameday.spec.convert.targets import LANGUAGE, of_all_parts
from sameday.spec.convert.trainers.registry import TRAINERS
from sameday.spec.load import load_recipe
from sameday.spec.lora import OF_IMAGES, Lora

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
    plain = converted(tmp_path, {"model": "Qwen/Qwen3-VL-8B", "lora_rank": 2, "target_modules": ["q_proj"]}, DATA)
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
    assert "abcdef" not in done.output and "hub_token = ***" in done.output
    assert "(1 variable)" in done.output and "WANDB_API_KEY: the script's own or the machine's" in done.output
    data = load_recipe(tmp_path / "new" / "recipe.yaml").data
    assert (data.train, data.image_root) == ("../data/t.jsonl", "../pictures")


# Chat templates


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
    qwen3 = "qwen3_vl_nothink" if trainer == "LLaMA-Factory" else "qwen3_vl"
    for model, template in ((qwen2, "qwen2_vl"), ("Qwen/Qwen3-VL-8B-Instruct", qwen3)):
        assert converted(tmp_path, with_template(model, template), data).recipe.system_prompt is None
    done = converted(tmp_path, with_template("hospital/ours", "qwen2_vl"), data)
    doubt = ", if the model is of qwen2_vl, qwen2_5_vl or qwen3_vl, which neither its folder nor its name tells"
    assert whys(done)["chat_template" if trainer == "axolotl" else "recipe.answer_end"].endswith(
        f"the model's own chat template{doubt}"
    )


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

ADAPTABLE = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.Embedding)
NAMED = (
    *(["q_proj", "v_proj"], ["self_attn.k_proj"], ["mlp.down_proj", "o_proj"], ["language_model.layers.1.mlp.up_proj"]),
    *(["layers.1.self_attn.q_proj"], ["gate_proj", "layers.0.self_attn.v_proj"]),
)
"""Layers as people name them for PEFT."""


@pytest.mark.parametrize("kind", known_families())
def test_what_is_known_of_a_family_is_true_of_its_models(tiny_models: dict[str, Path], kind: str) -> None:
    facts, family, folder = FAMILIES[kind], family_of(kind), tiny_models[kind]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    last = {part: {name.split(".")[-1] for name in linear if family.part_of(name) == part} for part in OF_IMAGES}
    assert [part for part in OF_IMAGES if last[part]] == list(facts.image_parts)
    assert last["tower"] & {*LANGUAGE} == {*facts.alike}
    assert family.markers.end_of_turn == facts.end_of_turn
    called = {name.split(".")[-1] for name in linear} - {"lm_head"}
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Conv3d)]
    alike = [name for name in convolutions if name.split(".")[-1] in called]
    assert alike == ([f"model.{facts.convolution}"] if facts.convolution else [])
    adaptable = [name for name, each in model.named_modules() if isinstance(each, ADAPTABLE)]
    of_images = [name for name in adaptable if "language_model." not in name and name != "lm_head"]
    numbers = (name for name in facts.tower_layers if ".vision_model." not in name)
    assert {f"model.{name.format(number)}" for name in numbers for number in range(3)} >= {*of_images}
    assert {name for name in of_images if NOT_LINEAR.search(name)} == {*of_images} - {*linear}
    assert {name for name in of_images if PROJECTORS.match(name.removeprefix("model."))} == {
        name for name in of_images if family.part_of(name) == "projector"
    }
    chat = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
    written = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    assert written.endswith(f"{family.markers.end_of_turn}\n") == facts.line_break
    for names in NAMED:
        targets, _ = of_all_parts(names, kind)
        meant = resolve_targets(model, family, Lora(target_modules=tuple(targets)), False)
        unused = [module for idle in family.idle(model) for module in idle.modules()]
        theirs = {name for name in taken(adaptable, names) if model.get_submodule(name) not in unused}
        assert {*taken(adaptable, meant)} == theirs, names
    fewest, most = family.pixel_limits(family.load_image_processor(str(folder), None, "pil", None, None))
    assert (fewest == most) == (facts.token_side is None)
