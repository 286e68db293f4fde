"""Configs of TRL's SFT and command lines of its scripts: the names and defaults of SFTConfig and ModelConfig."""

from __future__ import annotations

from typing import Any

from sameday.spec.convert.settings import Settings
from sameday.spec.convert.trainers.swift import local_file
from sameday.spec.convert.trainers.trainer import Trainer, each, only, words

_LEARNED = "questions would be learned besides answers"
_SETS = ("dataset_config", "dataset_configs", "datasets")
_SOME = "other questions would be used: give --train FILE"
_PROFILES = ("single_gpu", "multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
_SPEED = "the plan says how it is computed"


def _defaults(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {"learning_rate": 2e-5, "gradient_checkpointing": True}
    if not settings.get("fp16", bool):
        values["bf16"] = True
    if "sft_vlm" not in settings.command:  # that script sets it to none
        values["max_length"] = 1024
    if settings.get("use_peft", bool):
        values |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    if settings.get("load_in_4bit", bool):
        values["bnb_4bit_quant_type"] = "nf4"
    return values


def _prepare(settings: Settings) -> None:
    if settings.get("use_peft", bool):
        settings.put("recipe.train", "lora", ["use_peft"])
    else:
        for name in [name for name in settings.old if name.startswith("lora_")]:
            settings.drop(name, "does nothing: use_peft is not set")
            settings.done(name)
        why = "all weights, the vision tower's too"
        if settings.given("use_peft"):
            settings.put("recipe.train", "all", ["use_peft"], why)
        else:
            settings.default("recipe.train", "all", "use_peft", f"TRL's default: {why}")
        settings.default("recipe.train_vision", True, "use_peft, of the tower", "TRL freezes nothing")
    settings.done("use_peft")
    if "dataset_name" in settings.old:
        local_file(settings, "dataset_name", "train", "--train")
    _masked(settings)
    _launched(settings)


def _launched(settings: Settings) -> None:
    """By a config of accelerate's that TRL brings along, or by a file."""
    name = "accelerate_config"
    if settings.text(name) not in ("", *_PROFILES):
        settings.refuse(
            name, f"a file that is not read here: give its num_processes instead (allowed: {', '.join(_PROFILES)})"
        )
    elif settings.world() == 1 and settings.text(name) not in ("", "single_gpu"):
        settings.drop(name, "its number of processes is not known: multiply recipe.effective_batch by it")
    else:
        settings.drop(name, "num_processes says how many there are" if settings.world() > 1 else "one process")
    settings.done(name)


def _masked(settings: Settings) -> None:
    """Which tokens are learned, where nothing is said, depends on the lines' form."""
    names = ("completion_only_loss", "assistant_only_loss")
    if settings.get(names[0], bool):
        for name in names:
            settings.drop(name, "answers alone are learned")
    elif settings.get(names[1], bool):
        settings.refuse(
            names[1],
            "TRL stops at it where there are images, so that no run learned so: give completion_only_loss: true if "
            "answers alone were learned",
        )
        settings.drop(names[0], "does nothing at this value")
    elif any(settings.get(name, bool) is False for name in names[:1]):
        settings.refuse(names[0], f"{_LEARNED}, and no recipe says that (allowed: true)")
        settings.drop(names[1], "does nothing at this value")
    else:
        settings.refused.append(
            f"{settings.document.source}: completion_only_loss is not set; TRL then learns questions besides answers, "
            "unless lines have prompt and completion, and no recipe says that: give completion_only_loss: true if they "
            "had"
        )
        for name in names:
            settings.drop(name, "does nothing at this value")
    for name in names:
        settings.done(name)


TRAINER = Trainer(
    name="TRL",
    short="trl",
    marks=words(
        "dataset_name dataset_config dataset_configs dataset_train_split dataset_test_split dataset_text_field "
        "use_peft lora_modules_to_save completion_only_loss assistant_only_loss dataset_kwargs "
        "lora_task_type use_bnb_nested_quant chat_template_path packing_strategy"
    ),
    commands=("trl sft", "trl", "sft_vlm", "sft.py", "sft_video_llm", "vsft"),
    aliases={
        **{"use_peft": "use_peft", "completion_only_loss": "completion_only_loss"},
        **{"assistant_only_loss": "assistant_only_loss", "use_bnb_nested_quant": "bnb_4bit_use_double_quant"},
        **{"lora_modules_to_save": "modules_to_save", "lora_task_type": "task_type"},
        **{"lora_bias": "bias", "model_revision": "revision", "chat_template": "chat_template_path"},
    },
    neutral={
        **dict.fromkeys(_SETS, ((False,), _SOME)),
        **only("dataset_streaming", _SOME, False),
        **only("dataset_train_split", _SOME, "train"),
        **only("chat_template_path chat_template", "the prompt would be another one"),
        **only("loss_type", "the loss would be another one", "nll", "chunked_nll"),
        **only("model_init_kwargs", "the model would be another one", {}),
        **only("lora_target_parameters", "the adapters would have another form", []),
    },
    dropped={
        **each("dataset_num_proc dataset_text_field dataset_kwargs", "questions are read as they are"),
        **each("use_flash_attention_2 padding_free pad_to_multiple_of", _SPEED),
        **each("activation_offloading gradient_checkpointing_use_reentrant", _SPEED),
        "dataset_test_split": "questions of validation are a file of their own (--val FILE)",
        "dataset_batch_size": "questions are read as they are",
        "truncation_mode": "recipe.max_length never cuts image tokens or a whole answer",
        "packing_strategy": "nothing is packed",
        "pad_token": "padding is never learned",
        "shuffle_dataset": "recipe.order shuffle is another order in every epoch",
        "ignore_bias_buffers": "for other models",
        "model_code_revision": "no code from the Hub is run",
        "use_cache": "for generation",
        "config": "this is it",
    },
    starts={"env": "variables of the machine"},
    handled=(
        "use_peft",
        "dataset_name",
        "completion_only_loss",
        "assistant_only_loss",
        "accelerate_config",
        "eos_token",
    ),
    end_tokens=("eos_token",),
    data={"--train": ("dataset_name", *_SETS, "dataset_streaming", "dataset_train_split")},
    defaults=_defaults,
    logging_steps=10,
    answer_end=("turn", "all that follows a prompt is learned, the line break behind the answer's end token too"),
    own_nulls={"max_length": "null: nothing is cut", "gradient_checkpointing": "null: off"},
    no_nulls=("learning_rate", "lora_r", "lora_alpha", "lora_dropout", "bnb_4bit_quant_type"),
    prepare=_prepare,
)
