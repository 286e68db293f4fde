"""Configs of axolotl: its names and defaults (src/axolotl/utils/schemas and core/builders of its repository)."""

from __future__ import annotations

from typing import Any

from sameday.spec.convert.conversion import show
from sameday.spec.convert.families import FAMILIES, OF_QWEN2, OF_QWEN3, ChatTemplate
from sameday.spec.convert.keys import LISTED
from sameday.spec.convert.settings import Settings
from sameday.spec.convert.targets import LANGUAGE, image_parts
from sameday.spec.convert.trainers.swift import FILES
from sameday.spec.convert.trainers.trainer import Trainer, each, only, words

_PROMPT = "the prompt would be another one"
_BATCH = "micro_batch_size and gradient_accumulation_steps"
_SPEED = "the plan says how it is computed"
_FILES = "nothing in the model depends on it"
_OTHER = "the model would be another one"
_SCHEDULE = "the schedule would be another one"
# Templates that are the models' own, by whose.
_TEMPLATES = {"qwen2_vl": OF_QWEN2, "qwen3_vl": OF_QWEN3}
_TEMPLATES |= {"llava": ChatTemplate(("llava",)), "gemma3": ChatTemplate(("gemma3",))}
_TEMPLATES |= {"tokenizer_default": ChatTemplate(tuple(FAMILIES))}
_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")
_END_TOKENS = ("special_tokens.eos_token", "eot_tokens")
_ROWS = ("path", "type", "field_messages", "ds_type", "split", "message_field_role", "message_field_content")


def _defaults(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    values |= {"num_train_epochs": 1, "lr_scheduler_type": "cosine", "optim": "adamw_torch_fused", "max_length": 512}
    if not settings.get("fp16", bool):
        values["bf16"] = "auto"
    if settings.text("adapter") == "qlora":
        values |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return values


def _prepare(settings: Settings) -> None:
    _adapter(settings)
    _questions(settings)
    _intervals(settings)
    if not settings.text("warmup_steps") and not settings.text("warmup_ratio"):
        settings.refused.append(
            f"{settings.document.source}: warmup_ratio is not set; axolotl then takes 3% of all steps, at most 100, "
            "and no recipe says that: give warmup_ratio or warmup_steps"
        )
    _warm_up(settings)
    asked, kind = settings.text("chat_template"), settings.kind
    allowed = [name for name, each in _TEMPLATES.items() if kind not in FAMILIES or kind in each.kinds]
    chosen = _TEMPLATES.get(asked or "tokenizer_default", _TEMPLATES["tokenizer_default"])
    first = chosen.system_prompts.get(kind or "")
    if asked in allowed and first is not None and not settings.text("system_prompt"):
        settings.put("recipe.system_prompt", first, ["chat_template"], "what this template puts first")
    elif asked in ("", *allowed):
        doubt = settings.if_of(chosen.kinds) if chosen.kinds != tuple(FAMILIES) else ""
        settings.drop("chat_template", f"the model's own chat template{doubt}")
    else:
        settings.refuse("chat_template", f"{_PROMPT} (allowed: {', '.join(allowed)})")
    settings.done("chat_template")
    plugins = settings.old.get("plugins", ("", []))[1] or []
    if isinstance(plugins, list) and all(str(each).endswith(_PLUGINS) for each in plugins):
        settings.drop("plugins", _SPEED)
    else:
        settings.refuse("plugins", f"code of its own may change anything (allowed: {', '.join(_PLUGINS)})")
    settings.done("plugins")


def _warm_up(settings: Settings) -> None:
    """It rounds a share of all steps down, where a recipe rounds up, and makes two steps of one."""
    steps, share = settings.get("warmup_steps", int), settings.get("warmup_ratio", float)
    limit, twice = settings.get("max_steps", int), "axolotl makes two steps of one"
    if settings.text("lr_scheduler_type") == "constant":
        return
    if isinstance(steps, int):
        settings.put("recipe.warmup_steps", 2 if steps == 1 else steps, ["warmup_steps"], twice if steps == 1 else "")
        settings.drop("warmup_ratio", "warmup_steps replaces it")
    elif isinstance(share, float | int) and 0 < share <= 1 and isinstance(limit, int) and limit > 0:
        down = int(share * limit)
        why = f"{show(share)} of max_steps, rounded down, where the questions are enough for so many steps"
        why += f"; {twice}" if down == 1 else ""
        settings.put("recipe.warmup_steps", 2 if down == 1 else down, ["warmup_ratio"], why)
    elif isinstance(share, float | int) and share > 0:
        settings.why["warmup_ratio"] = (
            "near, not the same: axolotl rounds the number of steps down, a recipe rounds up, and axolotl makes two "
            "steps of one: give warmup_steps where the old run's log tells them"
        )
        return
    else:
        return
    for name in ("warmup_steps", "warmup_ratio"):
        settings.done(name)


def _adapter(settings: Settings) -> None:
    chosen = settings.text("adapter")
    if chosen in ("lora", "qlora"):
        settings.put("recipe.train", "lora", ["adapter"])
        if settings.get("lora_target_linear", bool):
            _all_linear(settings)
        else:
            settings.drop("lora_target_linear", "does nothing at this value")
    elif chosen:
        settings.refuse("adapter", "the adapters would have another form (allowed: lora, qlora)")
        settings.drop("lora_target_linear", "of an adapter that is refused")
    else:
        settings.drop("adapter", "null: none")
        for name in [name for name in settings.old if name.startswith("lora_")]:
            settings.drop(name, "does nothing: no adapter is asked for")
            settings.done(name)
        settings.default("recipe.train", "all", "adapter ", "axolotl's default: all weights, the vision tower's too")
        settings.default("recipe.train_vision", True, "adapter, of the tower", "axolotl freezes nothing")
    for name in ("adapter", "lora_target_linear"):
        settings.done(name)


def _all_linear(settings: Settings) -> None:
    """It hands PEFT the last parts of the names of all linear layers but the head, and PEFT takes what is called so:
    also a convolution, or a whole layer of the decoder that is called like the first one of a merger, 0."""
    name, also = "lora_target_linear", "lora_target_modules"
    named = settings.old[also][1] if settings.given(also) else []
    if settings.family is None or settings.family.convolution:
        what = settings.family.convolution if settings.family is not None else "the convolution of a Qwen-VL's patches"
        settings.refuse(
            name,
            f"PEFT takes all that is called like a linear layer, here {what} too, and no recipe has adapters there: "
            f"give {also}: all-linear for all linear layers, or [{', '.join(LANGUAGE)}] for layers of these names",
        )
    elif not isinstance(named, list) or not {*map(str, named)} <= {*LANGUAGE}:
        settings.refuse(name, f"but {also} is {show(named)}, and both would get adapters: leave one of the two out")
    else:
        layers = ["all-linear", *(f"{part}.all-linear" for part in image_parts(settings.kind))]
        settings.put("recipe.lora.target_modules", layers, [name], "all linear layers of the model but its head")
        settings.drop(also, f"{name} takes them too")
        settings.done(also)


def _questions(settings: Settings) -> None:
    for name, field, option in (("datasets", "train", "--train"), ("test_datasets", "val", "--val")):
        if name not in settings.old:
            continue
        rows = settings.old[name][1]
        only = rows[0] if isinstance(rows, list) and len(rows) == 1 and isinstance(rows[0], dict) else None
        path = str(only.get("path", "")) if only else ""
        unread = sorted(str(key) for key in only if key not in _ROWS) if only else []
        if not rows:
            settings.drop(name, "null: none")
        elif only is None:
            settings.refuse(name, f"several sets of questions: join them in one file, and give {option} FILE")
        elif unread or "[" in str(only.get("split", "")) or only.get("type", "chat_template") != "chat_template":
            said = ", ".join(unread) or f"type {only.get('type')}, split {only.get('split')}"
            settings.refuse(name, f"{said}: questions would be chosen or read otherwise; give {option} FILE")
        elif not path.endswith(FILES):
            settings.refuse(
                name, f"{path} is no file of questions ({', '.join(FILES)}): fetch it, and give {option} FILE"
            )
        else:
            settings.put(f"recipe.data.{field}", path, [name])
        settings.done(name)


def _intervals(settings: Settings) -> None:
    for what in ("save", "eval"):
        name, field = f"{what}s_per_epoch", f"plan.{what}_steps"
        count = settings.get(name, int)
        if not count:
            settings.drop(name, "does nothing at this value")
        else:
            why = "" if count == 1 else "a plan has each epoch's end, or a number of steps"
            settings.put(field, "epoch", [name], why)
            for each in (f"{what}_steps", f"{what}_strategy"):
                settings.drop(each, f"{name} says it")
                settings.done(each)
        settings.done(name)


TRAINER = Trainer(
    name="axolotl",
    short="axolotl",
    marks=words(
        "base_model micro_batch_size sequence_len sample_packing val_set_size datasets adapter processor_type "
        "lora_target_linear dataset_prepared_path skip_prepare_dataset pad_to_sequence_len evals_per_epoch "
        "saves_per_epoch lora_model_dir flash_attention sdp_attention base_model_config special_tokens"
    ),
    commands=("axolotl",),
    aliases={
        **{"base_model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"},
        **{"sequence_len": "max_length", "sample_packing": "packing", "val_set_size": "val_size"},
        **{"lora_model_dir": "start_adapter", "batch_size": "whole_batch_size", "bfloat16": "bf16"},
        **{"peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora", "lora_modules_to_save": "modules_to_save"},
        **{"peft_init_lora_weights": "init_lora_weights", "lora_fan_in_fan_out": "fan_in_fan_out"},
        **{"peft_layers_to_transform": "layers_to_transform", "peft_layers_pattern": "layers_pattern"},
        **{"revision_of_model": "revision", "default_system_message": "system_prompt", "model_type": "model_class"},
        "bnb_config_kwargs": "quantization_kwargs",
    },
    neutral={
        **only("whole_batch_size", f"the batch would be another one: give {_BATCH}"),
        **only("roles_to_train", "other parts of a conversation would be learned", ["assistant"]),
        **only("train_on_eos train_on_eot", "an answer would end elsewhere", "turn"),
        **only("role_boundaries", "other parts of a conversation would be learned", []),
        **only("chat_template_jinja", _PROMPT),
        **only("rl reward_model relora lisa_n_layers", "no recipe trains so", False),
        **only("special_tokens tokens added_tokens_overrides resize_token_embeddings_to_32x", _OTHER, {}, [], False),
        **only("unfrozen_parameters", "other parts of the model would be trained", []),
        **only("overrides_of_model_config overrides_of_model_kwargs rope_theta gptq", _OTHER, {}, False),
        **only("cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_quadratic_warmup", _SCHEDULE, False),
        **only("lr_groups embedding_lr embedding_lr_scale loraplus_lr_ratio", "parts would have other rates", []),
        **only(
            "curriculum_sampling",
            LISTED,
            False,
        ),
        **only("peft_layer_replication lora_target_parameters peft", "the adapters would have another form", [], {}),
        **only("image_resize_algorithm", "images would be resized otherwise"),
        **only("adam_beta3 adam_epsilon2", "the optimizer would be another one"),
        **only("streaming pretraining_dataset", "questions would be read otherwise", False),
        **only("excess_length_strategy", "too long questions would be treated otherwise", "drop"),
        **only("quantization_kwargs", "the base model would be quantized otherwise", {}),
    },
    dropped={
        **each("processor_type tokenizer_type model_class is_falcon_derived_model", _FILES),
        **each("base_model_config tokenizer_config processor_config is_llama_derived_model", _FILES),
        **each("skip_prepare_dataset dataset_prepared_path dataset_processes strict", _FILES),
        **each("dataset_map_batch_size dataset_writer_batch_size dataset_num_proc dataset_keep_in_memory", _FILES),
        **each("flash_attention sdp_attention eager_attention xformers_attention flex_attention", _SPEED),
        **each("pad_to_sequence_len cut_cross_entropy xformers s2_attention lora_on_cpu", _SPEED),
        **each("lora_mlp_kernel lora_qkv_kernel lora_o_kernel unsloth_cross_entropy_loss", _SPEED),
        "special_tokens.pad_token": "padding is never learned",
        "auto_resume_from_checkpoints": "the same command goes on where the run stopped",
        **each("save_first_step gc_steps profiler_steps axolotl_config_path", _FILES),
        **each("shuffle_merged_datasets sample_packing_eff_est merge_lora merge_method", _FILES),
        **each("qlora_sharded_model_loading torchdistx_path peft_autocast_adapter_dtype", _FILES),
    },
    starts={
        **dict.fromkeys(("use_wandb", "use_mlflow", "use_comet", "comet_", "use_tensorboard"), "only logged"),
        **dict.fromkeys(("liger_", "sample_packing_", "deepspeed_", "tensor_parallel", "context_parallel"), _SPEED),
    },
    handled=(
        *("adapter", "lora_target_linear", "datasets", "test_datasets", "saves_per_epoch", "evals_per_epoch"),
        *("chat_template", "plugins", *_END_TOKENS),
    ),
    end_tokens=_END_TOKENS,
    data={"--train": ("datasets",), "--val": ("test_datasets",)},
    defaults=_defaults,
    keeps_form=True,
    logging_steps=None,
    null_is_default=True,
    no_nulls=("bf16",),
    prepare=_prepare,
    loads_as_computed=True,
    answer_end=("end_token", "train_on_eos: turn, its default, learns the token that ends an answer and no line break"),
    remarks=("axolotl before June 2026 learned questions about images too, whatever train_on_inputs says.",),
)
