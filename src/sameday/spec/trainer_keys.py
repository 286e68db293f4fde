"""What is known about the keys of Trainer-style configs: other names, new fields, what is let go and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Names that scripts use, and the name Hugging Face has for the same thing. A longer path is looked up first.
ALIASES = {
    **dict.fromkeys(("model_name", "model", "base_model", "model_id"), "model_name_or_path"),
    **dict.fromkeys(("train_bs", "batch_size", "train_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("grad_accum", "grad_accum_steps", "accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("eval_bs", "eval_batch_size"), "per_device_eval_batch_size"),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "model_max_length", "cutoff_len"), "max_length"),
    **dict.fromkeys(("train_jsonl", "train_path", "data.train"), "train_file"),
    **dict.fromkeys(("val_jsonl", "val_file", "eval_file", "val_path", "data.val"), "validation_file"),
    **dict.fromkeys(("test_jsonl", "test_path"), "test_file"),
    **dict.fromkeys(("image_dir", "image_folder", "images_dir"), "image_root"),
    **dict.fromkeys(("prev_checkpoint", "adapter_name_or_path"), "start_adapter"),
    **dict.fromkeys(("lora.r", "r", "lora_rank", "lora.rank"), "lora_r"),
    **dict.fromkeys(("lora.alpha", "lora.lora_alpha"), "lora_alpha"),
    **dict.fromkeys(("lora.dropout", "lora.lora_dropout"), "lora_dropout"),
    **dict.fromkeys(("lora.target_modules", "target_modules", "lora_target"), "lora_target_modules"),
    **{"lr": "learning_rate", "epochs": "num_train_epochs", "num_epochs": "num_train_epochs"},
    **{"num_workers": "dataloader_num_workers", "pin_memory": "dataloader_pin_memory"},
    **{"lr_scheduler": "lr_scheduler_type", "scheduler": "lr_scheduler_type", "optimizer": "optim"},
    **{"evaluation_strategy": "eval_strategy", "model_revision": "revision", "dtype": "torch_dtype"},
    **{"log_steps": "logging_steps", "gradient_clipping": "max_grad_norm", "compile": "torch_compile"},
}

# One old key, one new field, one value.
DIRECT: dict[str, tuple[str, type]] = {
    "model_name_or_path": ("recipe.model", str),
    "revision": ("recipe.revision", str),
    "start_adapter": ("recipe.start_adapter", str),
    "lora_r": ("recipe.lora.r", int),
    "lora_alpha": ("recipe.lora.alpha", float),
    "lora_dropout": ("recipe.lora.dropout", float),
    "train_file": ("recipe.data.train", str),
    "validation_file": ("recipe.data.val", str),
    "test_file": ("recipe.data.test", str),
    "image_root": ("recipe.data.image_root", str),
    "system_prompt": ("recipe.system_prompt", str),
    "min_pixels": ("recipe.min_pixels", int),
    "max_pixels": ("recipe.max_pixels", int),
    "max_length": ("recipe.max_length", int),
    "max_samples": ("recipe.data.limit", int),
    "learning_rate": ("recipe.learning_rate", float),
    "weight_decay": ("recipe.weight_decay", float),
    "adam_epsilon": ("recipe.eps", float),
    "seed": ("recipe.seed", int),
    "dataloader_num_workers": ("plan.workers", int),
    "dataloader_pin_memory": ("plan.pin_memory", bool),
    "dataloader_prefetch_factor": ("plan.prefetch", int),
    "save_total_limit": ("plan.save_total_limit", int),
    "full_determinism": ("plan.deterministic", bool),
}

# What the old programs took where a key was absent: value, the key's name, whose default it is.
DEFAULTS: dict[str, tuple[Any, str, str]] = {
    "learning_rate": (5e-5, "learning_rate", "the Trainer's default"),
    "weight_decay": (0.0, "weight_decay", "the Trainer's default"),
    "seed": (42, "seed", "the Trainer's default"),
    "lora_r": (8, "lora_r", "PEFT's default"),
    "lora_alpha": (8.0, "lora_alpha", "PEFT's default"),
    "lora_dropout": (0.0, "lora_dropout", "PEFT's default"),
}

WHY = {
    "max_length": "never cuts image tokens or a whole answer",
}

# What these do to the model has no counterpart in a recipe: only the value that does nothing is let through.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "load_in_4bit": ((False,), "the base model would be quantized"),
    "load_in_8bit": ((False,), "the base model would be quantized"),
    "label_smoothing_factor": ((0,), "the loss would be another one"),
    "group_by_length": ((False,), "the order would depend on lengths"),
    "dataloader_drop_last": ((False,), "the last questions of an epoch would be left out"),
    "neftune_noise_alpha": ((0,), "noise would be added to the embeddings"),
    "packing": ((False,), "a packed row would count as one question of the batch"),
    "train_on_inputs": ((False,), "questions would be learned besides answers"),
    "early_stopping_patience": ((0,), "training would stop before its last step"),
    "use_dora": ((False,), "the adapters would have another form"),
    "use_rslora": ((False,), "the adapters would have another scale"),
    "bias": (("none",), "biases would be trained"),
    "modules_to_save": (([],), "more than adapters would be trained"),
    "init_lora_weights": ((True,), "the adapters would start elsewhere"),
    "adafactor": ((False,), "the optimizer would be another one"),
    "quantization_bit": ((16, 32), "the base model would be quantized"),
    "quantization_method": (("none",), "the base model would be quantized"),
    "finetuning_type": (("lora",), "another part of the model would be trained"),
    "freeze_vision_tower": ((True,), "the vision tower would be trained: set recipe.train_vision by hand"),
    "additional_target": (([],), "more than adapters would be trained"),
    "rank_pattern": (({},), "the adapters would have several ranks"),
    "alpha_pattern": (({},), "the adapters would have several scales"),
    "layers_to_transform": (([],), "only some layers would get adapters"),
    "lr_scheduler_kwargs": (({},), "the schedule would be another one"),
    "optim_args": (("",), "the optimizer would have other settings"),
    "loss_type": (("default",), "the loss would be another one"),
}

_NO_CACHE = "no caches in this version; plan.share_images computes an image once for its questions"

# What these do leaves the model as it is.
DROPPED = {
    "per_device_eval_batch_size": "plan.eval_token_budget says how much is evaluated at once",
    "use_vision_cache": _NO_CACHE,
    "vision_cache_dir": _NO_CACHE,
    "data_seed": "recipe.seed decides the order too",
    "resume_from_checkpoint": "the same command goes on where the run stopped",
    "remove_unused_columns": "questions are read as they are",
    "report_to": "a run always writes metrics.jsonl and TensorBoard events",
    "overwrite_output_dir": "a run folder is never overwritten",
    "attn_implementation": "plan.attention auto chooses the kernel",
    "task_type": "recipe.task says what is learned",
    "trust_remote_code": "no code from the Hub is run",
    "auto_find_batch_size": "plan.token_budget bounds the memory",
    "dataloader_persistent_workers": "workers always live as long as the run",
    "use_liger_kernel": "this version's plan has no such kernels",
}
DROPPED_STARTS = {
    "ddp_": "under torchrun ranks add their gradients in one call",
    "fsdp": "ranks hold the whole model; gradients are added in one call",
    "deepspeed": "ranks hold the whole model; gradients are added in one call",
    "torch_compile_": "plan.compile has no such choice",
    "gradient_checkpointing_": "plan.checkpointing has no such choice",
    "logging_": "plan.log_steps says how often to log",
    "hub_": "nothing is uploaded",
    "push_to_hub": "nothing is uploaded",
    "do_train": "the command says what to do",
    "do_eval": "the command says what to do",
    "do_predict": "the command says what to do",
    "bf16_full_eval": "evaluation has the recipe's precision",
    "fp16_full_eval": "evaluation has the recipe's precision",
}

OPTIMIZERS = {"adamw": "loop", "adamw_hf": "loop", "adamw_torch": "foreach"}
OPTIMIZERS |= {"adamw_torch_fused": "fused", "adamw_apex_fused": "fused"}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "auto": "bf16", "float32": "float32", "fp32": "float32"}
PATHS = ("data.train", "data.val", "data.test", "data.image_root", "start_adapter")
COMPUTED = (
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
    *(
        "warmup_steps",
        "warmup_ratio",
        "lr_scheduler_type",
        "max_grad_norm",
        "adam_beta1",
        "adam_beta2",
        "optim",
    ),
    *(
        "bf16",
        "fp16",
        "tf32",
        "torch_dtype",
        "gradient_checkpointing",
        "torch_compile",
        "lora_target_modules",
    ),
    *(
        "save_strategy",
        "save_steps",
        "eval_strategy",
        "eval_steps",
        "logging_steps",
        "run_name",
        "output_dir",
    ),
)

KNOWN = {*ALIASES, *DIRECT, *NEUTRAL, *DROPPED, *COMPUTED}


def leaves(values: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def canonical(key: str) -> str | None:
    """Hugging Face's name for a key, whatever section it stands in. None if it is not known."""
    for name in (key, ".".join(key.split(".")[-2:]), key.split(".")[-1]):
        name = ALIASES.get(name, name)
        if name in KNOWN or dropped_start(name):
            return name
    return None


def dropped_start(name: str) -> str | None:
    return next((why for start, why in DROPPED_STARTS.items() if name.startswith(start)), None)


def cast(value: Any, kind: type) -> Any:
    """Numbers written as strings, counts written as floats. What does not fit is left for validation."""
    if kind is bool and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    if kind not in (int, float) or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if kind is int and number.is_integer() else number
