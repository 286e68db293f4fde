"""What is known about the keys of Trainer-style configs: other names, new fields, what is let go and why."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Sections about a cache of images, and the keys in them that turn it on.
CACHES = ("vision_cache", "image_cache", "cache")
CACHED = ("enabled", "enable", "use", "precompute_pixel_values", "cache_pixel_values", "pixel_values")

# Sections about validation, where its file may stand, or the share of the training questions that it takes.
HELD_OUT = ("val", "valid", "validation", "dev", "eval", "evaluation")

# What else a script's settings may call a key of a question's line, by ours (image_key, img_column): `columns` reads
# them. An instruction is none of these: here it is the whole user text, and other programs put it beside the question.
COLUMNS = {
    **{"image": ("image", "images", "img"), "question": ("question",), "answer": ("answer",)},
    **{"stage": ("stage",), "type": ("type", "question_type")},
}
_COLUMN = ("key", "column", "field", "col", "column_name")

# Names that scripts use, and the name Hugging Face has for the same thing. A longer path is looked up first.
ALIASES = {
    **dict.fromkeys(("model_name", "model", "base_model", "model_id", "model_path"), "model_name_or_path"),
    "pretrained_model_name_or_path": "model_name_or_path",
    **dict.fromkeys(("model.name", "model.path", "model.name_or_path", "model.id"), "model_name_or_path"),
    **dict.fromkeys(("train_bs", "batch_size", "train_batch_size"), "per_device_train_batch_size"),
    **{"dataloader_batch_size": "per_device_train_batch_size", "dataloader_shuffle": "shuffle"},
    **dict.fromkeys(("grad_accum", "grad_accum_steps", "accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("gradient_accumulation", "accumulate_grad_batches"), "gradient_accumulation_steps"),
    **dict.fromkeys(("eval_bs", "eval_batch_size"), "per_device_eval_batch_size"),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "model_max_length", "cutoff_len"), "max_length"),
    **dict.fromkeys(("train_jsonl", "train_json", "train_path", "train_data", "train_data_path"), "train_file"),
    **dict.fromkeys(("training_file", "train_annotations", "data_path", "data.train"), "train_file"),
    **dict.fromkeys(("val_jsonl", "val_json", "val_file", "val_path", "val_data"), "validation_file"),
    **dict.fromkeys(("eval_jsonl", "eval_json", "eval_file", "eval_path", "eval_data"), "validation_file"),
    **dict.fromkeys(("valid_file", "valid_json", "eval_data_path", "data.val", "data.validation"), "validation_file"),
    "val_annotations": "validation_file",
    **{f"{section}.{last}": "validation_file" for section in HELD_OUT for last in ("file", "path", "json", "jsonl")},
    **{f"{section}.{last}": "val_size" for section in HELD_OUT for last in ("size", "ratio", "split", "fraction")},
    **dict.fromkeys(("test_jsonl", "test_json", "test_path", "test_data", "data.test"), "test_file"),
    **dict.fromkeys(("image_dir", "image_folder", "images_dir", "images_root", "img_dir"), "image_root"),
    **dict.fromkeys(("img_root", "image_base", "media_dir", "data.images"), "image_root"),
    **dict.fromkeys(("system", "system_message"), "system_prompt"),
    **{"image_max_pixels": "max_pixels", "image_min_pixels": "min_pixels"},
    **dict.fromkeys(("experiment_name", "exp_name", "run.name", "experiment.name"), "run_name"),
    **dict.fromkeys(("optimizer.name", "optimizer.type", "optim.name", "optim.type"), "optim"),
    **dict.fromkeys(("optimizer.eps", "optim.eps", "adam_eps"), "adam_epsilon"),
    **dict.fromkeys(("vision_tower_lr", "mm_vision_tower_lr"), "vision_lr"),
    **dict.fromkeys(("projector_lr", "mm_projector_lr"), "merger_lr"),
    **dict.fromkeys(("scheduler.name", "scheduler.type", "lr_scheduler.name"), "lr_scheduler_type"),
    **dict.fromkeys(("use_fast_processor", "use_fast_image_processor"), "use_fast"),
    **dict.fromkeys(("vision_cache", "cache_vision", "cache_images", "cache_pixel_values"), "use_vision_cache"),
    **dict.fromkeys((f"{section}.{last}" for section in CACHES for last in CACHED), "use_vision_cache"),
    **{"image_cache_dir": "vision_cache_dir", "precision": "torch_dtype", "adam_betas": "betas"},
    **dict.fromkeys(("use_4bit", "use_qlora", "qlora", "q_lora"), "load_in_4bit"),
    **{"use_8bit": "load_in_8bit", "bits": "quantization_bit", "quantization": "quantization_method"},
    **dict.fromkeys(("quant", "quantize", "quant_method"), "quantization_method"),
    **dict.fromkeys(("quant_type", "quantization_type", "bnb_quant_type"), "bnb_4bit_quant_type"),
    **dict.fromkeys(("double_quant", "use_double_quant", "double_quantization"), "bnb_4bit_use_double_quant"),
    **dict.fromkeys(("use_nested_quant", "bnb_4bit_use_nested_quant"), "bnb_4bit_use_double_quant"),
    **dict.fromkeys(("compute_dtype", "bnb_compute_dtype"), "bnb_4bit_compute_dtype"),
    **dict.fromkeys(("freeze_vision", "freeze_vit", "freeze_vision_encoder"), "freeze_vision_tower"),
    **dict.fromkeys(("freeze_merger", "freeze_aligner", "freeze_projector"), "freeze_multi_modal_projector"),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "mask_inputs", "mask_prompts"), "mask_prompt"),
    **dict.fromkeys(("train_on_responses_only", "answer_only_loss"), "mask_prompt"),
    **dict.fromkeys(("prompt_template", "question_template", "user_template", "prompt_format"), "instruction_template"),
    **dict.fromkeys(("user_prompt_template", "prompt", "prompt_style", "instruction"), "instruction_template"),
    **dict.fromkeys(("augment", "augmentations", "image_augmentation", "data_augmentation"), "augmentation"),
    **dict.fromkeys(("val_split", "val_ratio", "validation_split", "eval_split_ratio", "test_size"), "val_size"),
    **dict.fromkeys(("use_peft", "lora_enable", "enable_lora", "lora.enabled", "lora.enable"), "use_lora"),
    **dict.fromkeys(("lora", "peft", "lora.use_lora", "peft.enabled", "peft.enable"), "use_lora"),
    **dict.fromkeys(("train_type", "tuner_type"), "finetuning_type"),
    **dict.fromkeys(("prev_checkpoint", "adapter_name_or_path"), "start_adapter"),
    **dict.fromkeys(("lora.r", "r", "lora_rank", "lora.rank"), "lora_r"),
    **dict.fromkeys(("lora.alpha", "lora.lora_alpha"), "lora_alpha"),
    **dict.fromkeys(("lora.dropout", "lora.lora_dropout"), "lora_dropout"),
    **dict.fromkeys(("lora.rslora", "lora.use_rslora", "rslora", "lora_use_rslora"), "use_rslora"),
    **dict.fromkeys(("lora.dora", "lora.use_dora", "dora", "lora_use_dora"), "use_dora"),
    **dict.fromkeys(("lora.target_modules", "target_modules", "lora_target", "lora.targets"), "lora_target_modules"),
    **{"lr": "learning_rate", "num_warmup_steps": "warmup_steps", "max_train_steps": "max_steps"},
    "max_train_samples": "max_samples",
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "num_train_epochs"),
    **{f"{each}_{end}": f"{ours}_key" for ours, names in COLUMNS.items() for each in names for end in _COLUMN},
    **{"num_workers": "dataloader_num_workers", "pin_memory": "dataloader_pin_memory"},
    **{"lr_scheduler": "lr_scheduler_type", "scheduler": "lr_scheduler_type", "optimizer": "optim"},
    **{"evaluation_strategy": "eval_strategy", "model_revision": "revision", "dtype": "torch_dtype"},
    **dict.fromkeys(
        (
            "NPROC_PER_NODE",
            "launch.nproc_per_node",
            "launch.num_processes",
            "launch.num_gpus",
            "num_gpus",
            "world_size",
        ),
        "num_processes",
    ),
    **dict.fromkeys(("nproc_per_node", "gpus_per_node", "num_gpus_per_node", "n_gpu", "n_gpus"), "num_processes"),
    **dict.fromkeys(("NNODES", "launch.nnodes", "launch.num_nodes", "nnodes"), "num_nodes"),
    "gradient_accumulation_kwargs.num_steps": "gradient_accumulation_steps",
    **{"launch.num_machines": "num_machines", "launch.mixed_precision": "mixed_precision"},
    **dict.fromkeys(("launch.include", "launch.exclude"), "num_processes"),
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    **{"log_steps": "logging_steps", "gradient_clipping": "max_grad_norm", "compile": "torch_compile"},
    **dict.fromkeys(
        ("grad_clip", "clip_grad", "clip_grad_norm", "gradient_clip_val", "gradient_clip", "grad_norm_clip"),
        "max_grad_norm",
    ),
}

# One old key, one new field, one value.
DIRECT: dict[str, tuple[str, type]] = {
    "model_name_or_path": ("recipe.model", str),
    "revision": ("recipe.revision", str),
    "start_adapter": ("recipe.start_adapter", str),
    "lora_r": ("recipe.lora.r", int),
    "lora_alpha": ("recipe.lora.alpha", float),
    "lora_dropout": ("recipe.lora.dropout", float),
    "use_rslora": ("recipe.lora.rslora", bool),
    "use_dora": ("recipe.lora.dora", bool),
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

# What these do to the model has no counterpart in a recipe: only the value that does nothing is let through. In a
# sentence {key} is the config's own key.
_QUANTIZED = "the base model would be quantized"
_PROMPT = "the prompt would be another one"
_RESIZED = "images would be resized otherwise than by recipe.min_pixels and max_pixels"
_BY_HAND = "if it got adapters, name layers of it by hand in recipe.lora.target_modules ("
LISTED = "questions would come in the order of the file: --drop {key} and then set order: listed in recipe.yaml"
SETS = ("dataset", "dataset_dir", "dataset_name", "dataset_config", "dataset_config_name", "train_split")
_SOME = "only some layers would get adapters: leave {key} out, and name"
_FORM, _WHERE = "the adapters would have another form", "the adapters would start elsewhere"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing_factor": ((0,), "the loss would be another one"),
    "group_by_length": ((False,), "the order would depend on lengths"),
    "dataloader_drop_last": ((False,), "the last questions of an epoch would be left out"),
    "split_batches": ((False,), "the processes would share the batch of one, instead of having one each"),
    "neftune_noise_alpha": ((0,), "noise would be added to the embeddings"),
    "packing": ((False,), "a packed row would count as one question of the batch"),
    "train_on_inputs": ((False,), "questions would be learned besides answers"),
    "early_stopping_patience": ((0,), "training would stop before its last step"),
    "early_stopping": ((False,), "training would stop before its last step"),
    "bias": (("none",), "biases would be trained"),
    "modules_to_save": (([],), "more than adapters would be trained"),
    "init_lora_weights": ((True,), _WHERE),
    "adafactor": ((False,), "the optimizer would be another one"),
    "use_qalora": ((False,), _QUANTIZED),
    **dict.fromkeys(("question_prefix", "question_suffix", "prompt_prefix", "prompt_suffix"), (("",), _PROMPT)),
    **dict.fromkeys(("answer_prefix", "answer_suffix", "answer_template"), (("",), "the answers would be other ones")),
    "chat_template": (("default",), _PROMPT),
    "augmentation": ((False, [], "none"), "images would be changed at random"),
    **dict.fromkeys(("image_size", "image_resolution", "resize", "resized_height", "resized_width"), ((), _RESIZED)),
    "max_image_size": ((), _RESIZED),
    "size": ((), f"{_RESIZED}: of a Qwen-VL give shortest_edge as min_pixels and longest_edge as max_pixels instead"),
    "val_size": (
        (0,),
        "some training questions would be held out: --drop {key} and then set data.split in recipe.yaml, which "
        "holds out images with all of their questions, where most trainers hold out single questions, or give --train "
        "FILE and --val FILE",
    ),
    "stages": (
        (),
        "it may choose questions, or order them by stages: --drop {key} and then set data.where or stages in "
        "recipe.yaml",
    ),
    **dict.fromkeys(SETS, ((), "questions would come from a list or a hub of the old program: give train_file")),
    "shuffle": ((True,), LISTED),
    "train_sampling_strategy": (("random",), "the order would be another one"),
    "mask_prompt": ((True,), "questions would be learned besides answers"),
    "freeze_llm": ((False,), "the language model would not be trained"),
    "freeze_multi_modal_projector": (
        (True,),
        f"what lies between tower and language model would be trained: {_BY_HAND}projector.all-linear)",
    ),
    "tune_mm_llm": ((True,), "the language model would not be trained"),
    "tune_mm_vision": ((False,), f"the vision tower would be trained: {_BY_HAND}tower.all-linear)"),
    "tune_mm_mlp": ((False,), "the merger between tower and language model would be trained"),
    "optim_target_modules": (([],), "the optimizer would be another one"),
    "exclude_modules": (
        ([],),
        f"{_SOME} those that are left in lora_target_modules (language_model.q_proj is the language model's alone)",
    ),
    **dict.fromkeys(
        ("layers_to_transform", "layers_pattern"),
        (([],), f"{_SOME} each of them in lora_target_modules, such as layers.20.self_attn.q_proj"),
    ),
    "lora_bias": ((False, "none"), "biases would be trained"),
    "trainable_token_indices": (([],), "more than adapters would be trained"),
    "target_parameters": (([],), _FORM),
    "layer_replication": (([],), "the model would have more layers"),
    "fan_in_fan_out": ((False,), _FORM),
    **dict.fromkeys(("use_bdlora", "ensure_weight_tying"), ((False,), _FORM)),
    **dict.fromkeys(("megatron_config", "alora_invocation_tokens", "arrow_config", "kasa_config"), (({}, []), _FORM)),
    **dict.fromkeys(("velora_config", "monteclora_config"), (({},), _FORM)),
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), (({},), _WHERE)),
    "freeze_vision_tower": ((True,), f"the vision tower would be trained: {_BY_HAND}tower.all-linear)"),
    "additional_target": (([],), "more than adapters would be trained"),
    "rank_pattern": (({},), "the adapters would have several ranks"),
    "alpha_pattern": (({},), "the adapters would have several scales"),
    "lr_scheduler_kwargs": (({},), "the schedule would be another one"),
    "optim_args": (("",), "the Trainer's AdamW does not read it, other programs may: --drop {key} if it was that"),
    "loss_type": (("default",), "the loss would be another one"),
}

_COMMAND = "the command says what to do"
EVALUATION = "what is trained does not depend on evaluation"
LOGGING = "a run always writes metrics.jsonl and TensorBoard events"
_RANKS = "ranks hold the whole model; gradients are added in one call"
_AHEAD = "batches are always prepared ahead, in order"
FILES = "nothing in the model depends on it"

# What these do leaves the model as it is.
DROPPED = {
    "per_device_eval_batch_size": "plan.eval_token_budget says how much is evaluated at once",
    "vision_cache_dir": "its entries cannot be read here: plan.cache_dir is filled anew, by a run or `sameday cache`",
    "data_seed": "recipe.seed decides the order too",
    "resume_from_checkpoint": "the same command goes on where the run stopped",
    **dict.fromkeys(("remove_unused_columns", "skip_prepare_dataset"), "questions are read as they are"),
    "report_to": f"{LOGGING}; plan.track sends them to a tracker too",
    "overwrite_output_dir": "a run folder is never overwritten",
    "attn_implementation": "plan.attention auto chooses the kernel",
    "task_type": "recipe.task says what is learned",
    "trust_remote_code": "no code from the Hub is run",
    "auto_find_batch_size": "plan.token_budget bounds the memory; where it is true and the old run ran out of memory, "
    "its steps took fewer questions than this recipe's: its log says so",
    "dataloader_persistent_workers": "workers always live as long as the run",
    **dict.fromkeys(("dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_timeout"), _AHEAD),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _COMMAND),
    "use_liger_kernel": "this version's plan has no such kernels",
    "liger_kernel_config": "this version's plan has no such kernels",
    "average_tokens_across_devices": "a step's loss is always divided once, over all devices",
    "use_fast_tokenizer": "the tokenizer is always the fast one",
    "max_new_tokens": EVALUATION,
    "prediction_loss_only": EVALUATION,
    "batch_eval_metrics": EVALUATION,
    "label_names": EVALUATION,
    **dict.fromkeys(("do_sample", "temperature", "top_p", "top_k", "num_beams", "metrics", "metric"), EVALUATION),
    **dict.fromkeys(("disable_tqdm", "project", "plot_loss", "entity", "tags", "notes", "description"), LOGGING),
    **dict.fromkeys(("skip_memory_metrics", "debug", "verbose", "comment", "author"), LOGGING),
    **dict.fromkeys(("accelerator_config", "parallelism_config", "local_rank"), _RANKS),
    **dict.fromkeys(("use_cpu", "no_cuda", "device", "gpu_ids"), "plan.device says where it is run"),
    **dict.fromkeys(("device_map", "low_cpu_mem_usage", "use_cache", "torch_empty_cache_steps"), FILES),
    **dict.fromkeys(("cache_dir", "token", "hf_token", "overwrite_cache", "preprocessing_num_workers"), FILES),
    **dict.fromkeys(("auto_mapping", "base_model_name_or_path", "peft_version", "runtime_config"), FILES),
    **dict.fromkeys(("megatron_core", "qalora_group_size", "inference_mode", "length_column_name"), FILES),
    **dict.fromkeys(("ignore_data_skip", "restore_callback_states_from_checkpoint"), "resuming is always exact"),
    **dict.fromkeys(("save_only_model", "save_on_each_node", "save_safetensors"), "a checkpoint is always whole"),
    "enable_jit_checkpoint": "a run that is asked to stop always saves",
}
_MACHINE = (
    *("CUDA_", "NCCL_", "WANDB_", "HF_", "TOKENIZERS_", "OMP_", "PYTORCH_", "TORCH_", "MASTER_", "MODELSCOPE_"),
    *("TRANSFORMERS_", "PYTHON", "PATH", "LD_", "ASCEND_", "DISABLE_VERSION_CHECK", "TMPDIR", "SLURM_"),
)
DROPPED_STARTS = {
    "ddp_": "under torchrun ranks add their gradients in one call",
    "fsdp": _RANKS,
    "deepspeed": _RANKS,
    "torch_compile_": "plan.compile has no such choice",
    "gradient_checkpointing_": "plan.checkpointing has no such choice",
    "logging_": "plan.log_steps says how often to log",
    "hub_": "nothing is uploaded",
    "push_to_hub": "nothing is uploaded",
    **dict.fromkeys(("eval_", "generation_", "include_for_metrics"), EVALUATION),
    **dict.fromkeys(("wandb", "mlflow", "tensorboard", "trackio", "log_", "include_num_", "include_tokens_"), LOGGING),
    **dict.fromkeys(_MACHINE, "a variable of the machine"),
    "bf16_full_eval": "evaluation has the recipe's precision",
    "fp16_full_eval": "evaluation has the recipe's precision",
}

# What turns a quantization of the base model on, the beginnings of its settings, and those that change no weight.
SWITCHES = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quantization_method")
QUANTIZATION = ("bnb_", "llm_int8_")
QUANTIZATION_DROPPED = {
    "bnb_4bit_quant_storage": "how the codes are stored changes no weight",
    **dict.fromkeys(
        ("llm_int8_threshold", "llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload"), "it is about eight bits"
    ),
    "llm_int8_skip_modules": "lm_head is not quantized",
}

# Names in models of families that are not supported, and in names of checkpoints that are quantized already.
OTHER_FAMILIES = re.compile(
    r"(?<![a-z])(?:qwen|llava|(?:med|pali)?gemma|llama|internvl|idefics|smolvlm|phi|minicpm|pixtral|mistral|blip|"
    r"instructblip|deepseek|molmo|kosmos|florence|glm|ovis|cogvlm|moondream)"
)
QUANTIZED = re.compile(r"(?<![a-z0-9])(?:bnb|awq|gptq|gguf|fp8|nf4|int4|int8|4bit|8bit)(?![a-z0-9])")

OPTIMIZERS = {"adamw": "loop", "adamw_hf": "loop", "adamw_torch": "foreach"}
OPTIMIZERS |= {"adamw_torch_fused": "fused", "adamw_apex_fused": "fused"}
OPTIMIZERS |= dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "foreach")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
DTYPES = dict.fromkeys(("bfloat16", "bf16", "bf16-mixed", "auto"), "bf16")
DTYPES |= dict.fromkeys(("float32", "fp32", "32", "no", "false"), "float32")
# Parts of the model that may have a learning rate of their own, by the settings that give it.
RATES = {"vision_lr": "tower", "merger_lr": "projector"}
# Options of the command that name files, each with the settings that it stands instead of.
REPLACED: dict[str, tuple[str, tuple[str, ...]]] = {
    "--train": ("train_file", SETS),
    "--val": ("validation_file", ()),
    "--images": ("image_root", ()),
}
PATHS = ("data.train", "data.val", "data.test", "data.image_root", "start_adapter")
# How many processes train together: together they make an effective batch.
WORLD = ("num_processes", "num_nodes")
# Booleans as people write them in texts, and words that some trainers take where others have true alone.
BOOLEANS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
AS_TRUE = {
    "bf16": ("auto", "full"),
    "torch_compile": ("auto",),
    "gradient_checkpointing": ("unsloth", "offload", "offload_disk"),
}
COMPUTED = (
    *(*SWITCHES, *RATES, *WORLD, *(f"{ours}_key" for ours in COLUMNS)),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "num_train_epochs", "max_steps", "warmup_steps", "warmup_ratio"),
    *("lr_scheduler_type", "max_grad_norm", "adam_beta1", "adam_beta2", "optim", "bf16", "fp16", "tf32"),
    *("torch_dtype", "gradient_checkpointing", "torch_compile", "lora_target_modules", "save_strategy", "save_steps"),
    *("eval_strategy", "eval_steps", "logging_steps", "run_name", "output_dir", "use_vision_cache", "use_fast"),
    *("template", "betas", "mixed_precision", "instruction_template", "stage", "stage_filter", "question_type"),
    *("question_types", "use_lora", "peft_type", "finetuning_type", "num_machines"),
)

_PYTHONS_NAME = re.compile(r"(?:SchedulerType|OptimizerNames|IntervalStrategy|SaveStrategy|PeftType|TaskType)\.(\w+)")
# How sections about adapters are called.
OF_ADAPTERS = ("lora", "peft", "adapter")

KNOWN = {*ALIASES, *DIRECT, *NEUTRAL, *DROPPED, *COMPUTED}


def replaced_by(option: str, of_trainer: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The settings that an option stands instead of; `of_trainer` are those of one trainer alone, by option."""
    name, others = REPLACED[option]
    return (name, *others, *of_trainer.get(option, ()))


def leaves(values: dict[Any, Any], prefix: str, whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Each setting with its sections before it; a mapping in `whole` is one setting."""
    for key, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" not in whole:
            yield from leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


def canonical(key: str, aliases: Mapping[str, str], known: Collection[str], starts: Mapping[str, str]) -> str | None:
    """Hugging Face's name for a key, whatever section it stands in. None if it is not known."""
    *sections, last = key.split(".")
    names = [key, ".".join(key.split(".")[-2:]), last]
    if sections and sections[-1].startswith(OF_ADAPTERS):
        names.insert(0, f"lora.{last}")
    for name in names:
        name = aliases.get(name, name)
        if name in known or ("." not in name and begins(name, starts)) or name.startswith(QUANTIZATION):
            return name
    return None


def begins(name: str, starts: Mapping[str, str]) -> str | None:
    return next((why for start, why in starts.items() if name.startswith(start)), None)


def model_type(config: Path) -> str | None:
    """As a model's folder has it; None where there is no such folder."""
    read = _model_config(config)
    return None if read is None else str(read.get("model_type"))


def model_dtype(config: Path) -> str | None:
    """The format of a folder's weights as its configuration says it, also by the name before transformers 5."""
    read = _model_config(config) or {}
    return next((str(read[name]) for name in ("dtype", "torch_dtype") if read.get(name)), None)


def _model_config(config: Path) -> dict[str, Any] | None:
    try:
        with config.open(encoding="utf-8") as file:
            read = json.loads(file.read(1_000_000))
    except (OSError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def plain(value: Any) -> Any:
    """A value that was written as Python's name for it, SchedulerType.COSINE, as configs have it."""
    named = _PYTHONS_NAME.fullmatch(value) if isinstance(value, str) else None
    return named[1].lower() if named is not None else value


def cast(value: Any, kind: type) -> Any:
    """Numbers and booleans written as texts, counts written as floats. What does not fit is left for validation."""
    if kind is bool and isinstance(value, str):
        return BOOLEANS.get(value.strip().lower(), value)
    if kind is bool and isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if kind not in (int, float) or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if kind is int and number.is_integer() else number
