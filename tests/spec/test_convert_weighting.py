"""The loss_weight of a converted config is what the old trainer computed with that model and that micro-batch."""

from pathlib import Path
from typing import Any

import pytest
from converting import converted, whys

from sameday.spec.convert.families import FAMILIES

NAMES = {
    **{"qwen2_vl": "Qwen/Qwen2-VL-7B-Instruct", "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct"},
    **{"qwen3_vl": "Qwen/Qwen3-VL-8B-Instruct", "llava": "llava-hf/llava-1.5-7b-hf", "gemma3": "google/gemma-3-4b-it"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_the_installed_trainer_computes(
    family: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

    model = AutoModelForImageTextToText.from_pretrained(tiny_models[family])
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=model, args=arguments)
    assert trainer.model_accepts_loss_kwargs is FAMILIES[family].whole_step_loss


def weight_of(folder: Path, model: str, at_once: int, accumulated: int, **more: Any) -> tuple[str, str]:
    old = {"model_name_or_path": model, "train_file": "train.jsonl", "per_device_train_batch_size": at_once}
    done = converted(folder, {**old, "gradient_accumulation_steps": accumulated, **more})
    return done.recipe.loss_weight, whys(done)["recipe.loss_weight"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("at_once", "accumulated"), [(1, 8), (4, 1), (4, 2)])
def test_by_family_and_micro_batch(tmp_path: Path, family: str, at_once: int, accumulated: int) -> None:
    weight, why = weight_of(tmp_path, NAMES[family], at_once, accumulated)
    if FAMILIES[family].whole_step_loss:
        said = "transformers 5's Trainer divides a step's loss of this model by all of its answer tokens"
        assert (weight, why) == ("token", said)
    elif accumulated == 1:
        assert weight == "token" and why.startswith("a step is one micro-batch: the Trainer divides it by its answer")
    elif at_once == 1:
        assert weight == "sample" and why.endswith("and at one question at a time weighs each question the same")
    else:
        near = "near, not the same: the Trainer weighs by token inside a micro-batch of several questions, and each "
        assert (weight, why) == ("sample", near + "micro-batch the same")


def test_a_family_that_is_not_known(tmp_path: Path) -> None:
    weight, why = weight_of(tmp_path, "hospital/ours", 1, 8)
    assert weight == "sample"
    assert why.endswith(
        "; if the model is of qwen2_vl, llava or gemma3, set token: transformers 5's Trainer divides a step's loss of "
        "these by all of its answer tokens"
    )
    assert weight_of(tmp_path, "hospital/ours", 8, 1)[0] == "token"


def test_devices_that_divide_by_their_own_tokens(tmp_path: Path) -> None:
    weight, why = weight_of(tmp_path, NAMES["llava"], 1, 8, average_tokens_across_devices=False)
    assert weight == "token" and why.endswith(
        "; average_tokens_across_devices is false: on several devices near, not the same, as each divided by its own "
        "answer tokens"
    )


def test_llama_factory_divides_by_micro_batch_whatever_the_model(tmp_path: Path) -> None:
    llama = {"finetuning_type": "lora", "cutoff_len": 512, "template": "llava", "image_root": "."}
    weight, why = weight_of(tmp_path, NAMES["llava"], 1, 8, **llama)
    assert weight == "sample"
    assert why.startswith("LLaMA-Factory (since March 2025) divides the loss of each micro-batch by its own answer tok")
    weight, why = weight_of(tmp_path, NAMES["llava"], 2, 8, **llama)
    assert weight == "sample" and why.startswith("near, not the same: LLaMA-Factory (since March 2025) divides")
