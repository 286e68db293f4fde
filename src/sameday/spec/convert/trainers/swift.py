"""Command lines and configs of ms-swift: its names and defaults (swift/arguments and swift/trainers)."""

from __future__ import annotations

import math
from typing import Any

from sameday.spec.convert.columns import FIELDS, renamed
from sameday.spec.convert.conversion import show
from sameday.spec.convert.families import QWEN_TEMPLATES, ChatTemplate
from sameday.spec.convert.keys import LISTED
from sameday.spec.convert.settings import Settings, not_found
from sameday.spec.convert.targets import alike
from sameday.spec.convert.trainers.llamafactory import NAMED, method, thawed_parts, trained_layers
from sameday.spec.convert.trainers.swift_images import SHRUNK, TOKENS, image_sizes
from sameday.spec.convert.trainers.trainer import Trainer, each, only, words
from sameday.spec.load import resolve_path

_SPEED = "the plan says how it is computed"
_VIDEO = "images alone are learned here"
_HUB = "nothing in the model depends on where it is fetched from"
_FORM = "the adapters would have another form"
FILES = (".json", ".jsonl", ".csv", ".parquet")
_LINE = "near, not the same: a line break follows a question there, where the model's own chat template has a space"

_COLUMNS = {"images": "image", "query": "question", "response": "answer"}
"""Its own names of keys that it may give others, by ours."""
_WRITTEN = (
    *("model_info", "model_meta", "model_suffix", "model_dir", "hub", "swift_version", "training_args", "tools_prompt"),
    *("rank", "local_world_size"),
)
"""Of args.json, which it writes into the folder of each run, what is no setting of its own."""
_TOO_LONG = {
    "delete": "ms-swift leaves out longer questions (truncation_strategy delete, its default), and then takes fewer "
    "steps",
    "left": "ms-swift cuts the beginning of longer questions (truncation_strategy left)",
    "right": "",
}
"""What its truncation_strategy does to questions, where that is not what a recipe does."""


def _defaults(settings: Settings) -> dict[str, Any]:
    full = settings.text("tuner_type") == "full"
    size, world = settings.get("per_device_train_batch_size", int) or 1, settings.world()
    values: dict[str, Any] = {"tuner_type": "lora", "per_device_train_batch_size": 1}
    if isinstance(size, int) and size > 0:
        values["gradient_accumulation_steps"] = max(1, math.ceil(16 / size / world))
    values |= {"learning_rate": 1e-5 if full else 1e-4, "weight_decay": 0.1, "adam_beta2": 0.95}
    values |= {"lr_scheduler_type": "cosine", "gradient_checkpointing": True}
    if not any(settings.get(name, bool) for name in ("bf16", "fp16")) and not settings.text("torch_dtype"):
        values["torch_dtype"] = "auto"
    values |= _evaluated(settings)
    if not full:
        values |= {"lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": "all-linear"}
    return values


def _evaluated(settings: Settings) -> dict[str, Any]:
    """It evaluates when it saves."""
    if settings.text("val_dataset") in ("", "[]") and not settings.text("validation_file"):
        return {}
    saved = settings.text("save_strategy").lower() or "steps"
    values: dict[str, Any] = {} if settings.text("eval_strategy") else {"eval_strategy": saved}
    if (settings.text("eval_strategy").lower() or saved) == "steps":
        values["eval_steps"] = settings.old["save_steps"][1] if settings.given("save_steps") else 500
    return values


def _prepare(settings: Settings) -> None:
    full = settings.text("tuner_type") == "full"
    _rates(settings)
    method(settings, "tuner_type")
    _held_out(settings)
    asked = settings.get("lora_target_modules", list)
    trained_layers(settings, full, asked in ("all-linear", ["all-linear"], ["ALL"], "ALL"))
    for name, field, option in (("dataset", "train", "--train"), ("val_dataset", "val", "--val")):
        if name in settings.old:
            local_file(settings, name, field, option)
    _columns(settings)
    image_sizes(settings)
    _too_long(settings)
    for name in _WRITTEN:
        settings.drop(name, "it follows from the other settings, or is about tools")
        settings.done(name)
    if settings.get("padding_free", bool):
        settings.put("plan.packing", True, ["padding_free"])
    else:
        settings.drop("padding_free", "does nothing at this value")
    settings.done("padding_free")


def _columns(settings: Settings) -> None:
    """It renames keys of lines to its own names: {"img": "images"}."""
    name = "columns"
    given = settings.old[name][1] if name in settings.old else None
    if not given:
        settings.drop(name, "does nothing at this value")
    elif not isinstance(given, dict) or not {*map(str, given.values())} <= {*_COLUMNS}:
        allowed = ", ".join(f"KEY: {each}" for each in _COLUMNS)
        settings.refuse(
            name,
            f"questions would be read otherwise (allowed: {allowed}): rename others in the data instead",
        )
    elif len({*given.values()}) < len(given):
        settings.refuse(name, "two keys would have the same name")
    elif fields := renamed({_COLUMNS[theirs]: str(key) for key, theirs in given.items()}):
        settings.put(FIELDS, fields, [name], "what the data calls them")
    else:
        settings.drop(name, "does nothing: the keys are read by these names anyway")
    settings.done(name)


def _too_long(settings: Settings) -> None:
    """What becomes of questions longer than max_length: a recipe cuts the end of their answers."""
    name = "truncation_strategy"
    asked, limit = settings.text(name) or "delete", settings.get("max_length", int)
    if asked not in _TOO_LONG:
        settings.refuse(name, f"too long questions would be cut otherwise (allowed: {', '.join(_TOO_LONG)})")
    elif limit is None:
        settings.drop(name, "max_length is not set, and no question is cut here")
    else:
        if _TOO_LONG[asked]:
            settings.why["max_length"] = f"near, not the same: {_TOO_LONG[asked]}; here the end of their answers is cut"
        settings.drop(name, f"recipe.max_length {show(limit)} cuts the end of answers")
    settings.done(name)


def _held_out(settings: Settings) -> None:
    """A part of the training questions, where there are none of validation."""
    if settings.text("val_dataset") not in ("", "[]") or settings.replaced.get("val_dataset"):
        settings.drop("val_size", "does nothing: val_dataset is given")
        settings.done("val_size")
    elif settings.get("val_size", float) is None and not settings.text("validation_file"):
        why = "ms-swift 3.6 and later hold nothing out; versions before held out 1% of the training questions"
        settings.default("recipe.data.val", None, "val_size", f"{why}, and learned only the others")
        settings.done("val_size")


def _rates(settings: Settings) -> None:
    """Of parts; one that is frozen, or has no layer of the names that get adapters, has none."""
    trained = [*thawed_parts(settings).values()]
    if (
        settings.text("tuner_type") != "full"
        and (namesakes := alike(settings.get(NAMED, list), settings.kind)) is not None
    ):
        trained = ["tower"] if namesakes else []
    if not settings.text("optimizer"):
        settings.drop("optimizer", "null: what optim says")
    elif settings.text("optimizer") == "multimodal" and (settings.given("vit_lr") or settings.given("aligner_lr")):
        settings.drop("optimizer", "AdamW with the learning rates of vit_lr and aligner_lr")
    else:
        settings.refuse("optimizer", "no recipe has this optimizer (allowed: null, or multimodal with vit_lr)")
    settings.done("optimizer")
    for name, part in (("vit_lr", "tower"), ("aligner_lr", "projector")):
        if settings.get(name, float) is None or part not in trained:
            settings.drop(name, "does nothing: not set, or of what is not trained")
        else:
            settings.put(f"recipe.learning_rates.{part}", settings.get(name, float), [name])
        settings.done(name)


def local_file(settings: Settings, name: str, field: str, option: str) -> None:
    """One file of questions is a recipe's; names on a hub, subsets and lists of files are not."""
    value = settings.old[name][1]
    files = value if isinstance(value, list) else [value]
    only = str(files[0]) if len(files) == 1 else ""
    if value in (None, "", []):
        settings.drop(name, "null: none")
    elif len(files) > 1:
        settings.refuse(name, f"several sets of questions: join them in one file, and give {option} FILE")
    elif only.endswith(FILES):
        settings.put(f"recipe.data.{field}", only, [name], not_found(resolve_path(settings.folder, only)))
    elif "#" in only:
        settings.refuse(name, f"a subset that its program draws: write it to a file, and give {option} FILE")
    else:
        settings.refuse(name, f"no file of questions ({', '.join(FILES)}): fetch it, and give {option} FILE")
    settings.done(name)


TRAINER = Trainer(
    name="ms-swift",
    short="swift",
    marks=words(
        "train_type tuner_type sft_type freeze_vit freeze_aligner split_dataset_ratio val_dataset attn_impl "
        "truncation_strategy tuner_backend target_regex lora_dtype model_author loss_scale "
        "load_from_cache_file lazy_tokenize vit_lr aligner_lr vit_gradient_checkpointing padding_free"
    ),
    commands=("swift sft", "swift", "swift.cli"),
    aliases={
        **{"train_type": "tuner_type", "tuner_type": "tuner_type"},
        **{"model": "model_name_or_path", "model_id_or_path": "model_name_or_path", "model_name": "model_name_told"},
        **{"max_pixels": SHRUNK, "MAX_PIXELS": "max_pixels", "MIN_PIXELS": "min_pixels"},
        **{"IMAGE_MAX_TOKEN_NUM": "image_max_token_num", "IMAGE_MIN_TOKEN_NUM": "image_min_token_num"},
        **{"split_dataset_ratio": "val_size", "adapters": "start_adapter", "lora_bias_trainable": "lora_bias"},
        **{"init_weights": "init_lora_weights", "num_epochs": "num_train_epochs", "use_liger": "use_liger_kernel"},
        **{"quant_bits": "quantization_bit", "train_dataloader_shuffle": "shuffle"},
        **{"global_world_size": "num_processes", "optimizer": "optimizer"},
        "max_epochs": "max_epochs",
        "dataset_shuffle": "dataset_shuffle",
    },
    neutral={
        **only("init_lora_weights", "the adapters would start elsewhere", True, "true"),
        **only("task_type", "no recipe learns so", "causal_lm", "CAUSAL_LM"),
        **only("num_labels problem_type", "no recipe learns so"),
        **only("rlhf_type", "it trains by preferences or rewards"),
        **only("use_chat_template", "the prompt would be another one", True),
        **only("template_backend", "the prompt would be another one", "swift"),
        **only("loss_scale", "tokens of an answer would weigh differently", "default"),
        **only("loss_type metric_class", "the loss would be another one", "cross_entropy"),
        **only("tuner_backend", "the adapters would be another program's", "peft", "unsloth"),
        **only("external_plugins custom_register_path custom_dataset_info", "code of its own may change anything", []),
        **only("model_kwargs agent_template response_prefix", "questions would be read or asked otherwise", {}),
        **only("load_data_args", "questions would be those of another run: give --train FILE", False),
        **only("use_swift_lora", _FORM, False),
        **only("sortish_sampler", "the order would depend on lengths", False),
        **only("past_index", "the model would see what it said before", -1),
        **only(
            "sft_type",
            "it is of ms-swift 2, whose defaults were others: give the names of ms-swift 3, train_type for it",
        ),
        **only("lorap_lr_ratio lora_lr_ratio", "A and B would have learning rates of their own"),
        **only("target_regex", "it stands instead of target_modules: give it as target_modules, and leave it out"),
        **only("target_parameters", _FORM, []),
        **only("freeze_parameters trainable_parameters", "other parts of the model would be trained", []),
        **only("freeze_parameters_regex trainable_parameters_regex", "other parts of the model would be trained"),
        **only("freeze_parameters_ratio", "other parts of the model would be trained", 0),
        **only("router_aux_loss_coef", "the loss would be another one", 0),
        **only("enable_dft_loss enable_channel_loss use_galore", "the loss or the optimizer would be others", False),
        **only("lisa_activated_layers", "the optimizer would be another one", 0),
        **only("sequence_parallel_size", "a step would be cut otherwise", 1),
        **only("streaming interleave_prob", "the order would depend on a buffer", False),
        **only("dataset_shuffle", LISTED, True),
        **only("rope_scaling max_model_len new_special_tokens", "the model would be another one", []),
        **only("enable_thinking add_non_thinking_prefix", "the prompt would be another one"),
        **only("resume_only_model", "the adapters would start elsewhere", False),
        **only("max_epochs", "training would stop before its last step"),
    },
    dropped={
        "lora_dtype": "what is trained has float32 copies",
        "model_type": "its configuration says what the model is",
        "model_name_told": "its name for itself, in data that asks for it",
        "model_author": "its name for itself, in data that asks for it",
        **each("attn_impl use_liger_kernel vit_gradient_checkpointing padding_side", _SPEED),
        **each("use_logits_to_keep ds3_gather_for_generation zero_hpz_partition_size", _SPEED),
        **each("dataset_num_proc load_from_cache_file lazy_tokenize strict", "all lines are checked"),
        **each("download_mode use_hf check_model local_repo_path", _HUB),
        **each("add_version create_checkpoint_symlink save_args load_args use_flash_ckpt", _HUB),
        **each("acc_strategy acc_steps predict_with_generate val_dataset_shuffle", "for evaluation"),
        **each("use_legacy_prediction_loop include_inputs_for_metrics stream logprobs", "for evaluation"),
        **each("fp16_opt_level half_precision_backend fp16_backend", "about fp16"),
        **each("stopping_strategy shuffle_buffer_size", "about questions that are streamed or drawn from several sets"),
        **each("adapter_act adapter_length", "not used"),
        **each("ignore_args_error ray_scope", "how it was started changes nothing"),
        "FPS": _VIDEO,
        "NODE_RANK": "which of the machines this is",
    },
    starts={
        **dict.fromkeys(("VIDEO_", "FPS_", "AUDIO_", "video_"), _VIDEO),
        **dict.fromkeys(("swanlab", "vllm_", "lmdeploy_", "sglang_"), "for logging, or after training"),
        **dict.fromkeys(
            ("galore_", "adalora_", "reft_", "boft_", "vera_", "fourier_", "llamapro_", "lisa_"), "not used"
        ),
        "lora_ga_": "not used",
        "tpu_": "about other devices",
    },
    handled=(
        *("tuner_type", "dataset", "val_dataset", "padding_free", "vit_lr", "aligner_lr", "columns"),
        *(*TOKENS, SHRUNK, "truncation_strategy", "optimizer", *_WRITTEN),
    ),
    whole=("columns",),
    data={"--train": ("dataset",), "--val": ("val_dataset",)},
    defaults=_defaults,
    keeps_form=True,
    prepare=_prepare,
    loss_weight=("token", "it divides a step's loss by all of its answer tokens"),
    loads_as_computed=True,
    templates={
        **QWEN_TEMPLATES,
        "gemma3_vision": ChatTemplate(("gemma3",), line_break=False),
        "llava1_5_hf": ChatTemplate(("llava",), near=_LINE, line_break=False),
    },
    prompts={"llava": _LINE},
    answer_end=("turn", "its templates end an answer with a line break"),
    answer_ends={"gemma3": ("end_token", "its template of this model ends an answer with that token alone")},
    image_backend=("pil", "it resizes by qwen_vl_utils, which uses Pillow"),
)
