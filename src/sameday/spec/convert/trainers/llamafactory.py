"""Configs of LLaMA-Factory: its names and defaults (src/llamafactory/hparams of its repository)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sameday.spec.convert.columns import FIELDS, as_written
from sameday.spec.convert.conversion import show
from sameday.spec.convert.frozen import refuse_alone
from sameday.spec.convert.pixels import least_pixels
from sameday.spec.convert.settings import Settings, not_found
from sameday.spec.convert.targets import LANGUAGE, alike, image_parts
from sameday.spec.convert.trainers.dataset_info import LIST, Listed, listed
from sameday.spec.convert.trainers.trainer import Trainer, each, only, words
from sameday.spec.load import resolve_path

_PREFERENCES = "it belongs to a training by preferences or rewards"
_OPTIMIZER = "the optimizer would be another one"
_TOKENS = "the vocabulary would be another one"
_OTHER = "the model would be another one"
_SPEED = "the plan says how it is computed"
_VIDEO = "images alone are learned here"
NAMED = "lora_target_modules"
DEEPSTACK = {"qwen3_vl": "projector.deepstack_merger_list.all-linear"}
"""Mergers of the tower's inner layers, which it counts to the tower."""
FREEZES = {"freeze_vision_tower": "tower", "freeze_multi_modal_projector": "projector"}


def _defaults(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {"finetuning_type": "lora", "max_length": 2048}
    values |= {"max_pixels": 768 * 768, "min_pixels": 32 * 32}
    if settings.get("disable_gradient_checkpointing", bool) is not True:
        values["gradient_checkpointing"] = True
    if not any(settings.get(name, bool) for name in ("bf16", "fp16", "pure_bf16")):
        values["bf16"] = True
        settings.why["bf16"] = "the base model's own format"
    if settings.text("finetuning_type") in ("", "lora"):
        rank = settings.get("lora_r", int)
        rank = 8 if rank is None else rank
        values |= {"lora_r": rank, "lora_dropout": 0.0, NAMED: "all"}
        values |= {"lora_alpha": 2 * rank} if isinstance(rank, int) else {}
    return values


def _prepare(settings: Settings) -> None:
    _image_sizes(settings)
    if settings.text("stage") in ("", "sft"):
        settings.drop("stage", "a recipe is supervised fine-tuning")
    else:
        settings.refuse("stage", "no recipe trains so (allowed: sft)")
    settings.done("stage")
    full = settings.text("finetuning_type") == "full"
    method(settings, "finetuning_type")
    if not full and settings.text(NAMED) == "all":
        _all_linear(settings)
    trained_layers(settings, full, False)
    if settings.get("disable_gradient_checkpointing", bool):
        settings.put("plan.checkpointing", "none", ["disable_gradient_checkpointing"])
    else:
        settings.drop("disable_gradient_checkpointing", "does nothing at this value")
    settings.done("disable_gradient_checkpointing")
    if settings.get("disable_shuffling", bool):
        settings.put("recipe.order", "listed", ["disable_shuffling"])
    else:
        settings.drop("disable_shuffling", "does nothing at this value")
    settings.done("disable_shuffling")
    settings.get("enable_thinking", bool)  # refuses what is neither true nor false
    settings.drop("enable_thinking", "does nothing: only templates that put a thought before answers ask for it")
    _system(settings)
    _questions(settings)


def _system(settings: Settings) -> None:
    """What stands before questions that have no system prompt of their own, instead of the template's."""
    key, text = settings.old.get("system_prompt", ("", None))
    if text == "":
        settings.refuse(
            "system_prompt",
            f"the template's system prompt would be left out, and no recipe says that: leave {key} out where the "
            "template has none",
        )
        settings.done("system_prompt")
    elif text is not None:
        settings.put("recipe.system_prompt", text, ["system_prompt"], "of questions that have none of their own")
        settings.done("system_prompt")


def _image_sizes(settings: Settings) -> None:
    """It resizes an image to its own limits, and the model's processor then to the processor's: of two numbers that
    images are enlarged to the larger one counts."""
    for name in ("max_pixels", "min_pixels"):
        settings.why[name] = "near, not the same: it resizes to so many first, and the processor then to whole patches"
    own, fewest, most = least_pixels(settings), settings.get("min_pixels", int), settings.get("max_pixels", int)
    if own is None or settings.one_size():
        return
    if isinstance(most, int) and most < own:
        settings.refuse(
            "max_pixels",
            f"images are shrunk to so many pixels first, and the model's own processor enlarges them to {own:,} again, "
            f"which no recipe says (allowed: {own:,} or more)",
        )
    if isinstance(fewest, int) and fewest < own:
        settings.put("recipe.min_pixels", None, ["min_pixels"], "the model's own processor enlarges images to more")
        settings.done("min_pixels")


def _all_linear(settings: Settings) -> None:
    """It looks for names of linear layers everywhere but in the projector, and in the tower where that is not frozen.
    Then it takes all layers of these names that are not frozen: the projector's too, where the tower's are called so.
    """
    thawed, kind = thawed_parts(settings), settings.kind
    tower, projector = (name in thawed for name in FREEZES)
    linear = ["tower.all-linear"] if tower else []
    why = "the language model's linear layers" + (", and those of what is not frozen" if tower else "")
    if tower and kind in DEEPSTACK:
        linear.append("projector.all-linear" if projector else DEEPSTACK[kind])
        why += "" if projector else "; it counts the mergers of inner layers to the tower"
    elif tower and settings.family is None:
        why += f"; if the model is a Qwen3-VL, its {DEEPSTACK['qwen3_vl']} too"
    done = [NAMED, *(name for name in thawed if name == "freeze_vision_tower")]
    settings.put("recipe.lora.target_modules", [*LANGUAGE, *linear], done, why)
    if projector and settings.family is not None:
        name = "freeze_multi_modal_projector"
        taken = "projector.all-linear" in linear
        settings.drop(name, "its layers get adapters too" if taken else "does nothing: no layer of it has such a name")
        done.append(name)
    for name in done:
        settings.done(name)


def method(settings: Settings, name: str) -> None:
    """Adapters or all weights; of adapters nothing is said where there are none."""
    chosen = settings.text(name)
    if chosen in ("lora", "full"):
        settings.put("recipe.train", "lora" if chosen == "lora" else "all", [name])
    else:
        settings.refuse(name, "another part of the model would be trained (allowed: lora, full)")
    settings.done(name)
    if chosen == "full":
        for each in [each for each in settings.old if each.startswith("lora_")]:
            settings.drop(each, "does nothing: all weights are trained")
            settings.done(each)


def thawed_parts(settings: Settings) -> dict[str, str]:
    """Parts in front of the language model that are trained, by the names of the settings that say so."""
    return {name: part for name, part in FREEZES.items() if settings.get(name, bool) is False}


def trained_layers(settings: Settings, full: bool, all_linear: bool) -> None:
    """What of tower and projector is trained too, where that is said by what is frozen. `all_linear`: all linear layers
    of what is not frozen get adapters."""
    thawed = thawed_parts(settings)
    done: list[str] = []
    if full and thawed.keys() == FREEZES.keys():
        settings.put("recipe.train_vision", True, list(thawed), "tower and merger are trained with all the rest")
        done = list(thawed)
    elif full:
        for name in thawed:
            refuse_alone(settings, name)
    elif all_linear:
        linear = [f"{part}.all-linear" for part in thawed.values() if part in image_parts(settings.kind)]
        why = "the language model's linear layers" + (", and those of what is not frozen" if linear else "")
        done = [NAMED, *thawed]
        settings.put("recipe.lora.target_modules", [*LANGUAGE, *linear], done, why)
    elif (namesakes := alike(settings.get(NAMED, list), settings.kind)) is not None:
        for name, part in thawed.items():
            _named_layers(settings, name, namesakes if part == "tower" else [])
        done = list(thawed)
    for name in done:
        settings.done(name)


def _named_layers(settings: Settings, name: str, namesakes: Sequence[str]) -> None:
    """Of a part that this setting thaws only layers get adapters that are called like those of the language model."""
    if settings.trainer.bare_names == "all":
        settings.drop(name, f"does nothing: PEFT looks for the names of {NAMED} in the whole model, whatever is frozen")
    elif namesakes:
        hand = " and ".join(f"tower.{each}" for each in namesakes)
        settings.refuse(
            name,
            f"layers of the vision tower are called {' and '.join(namesakes)} too, and would get adapters: set it to "
            f"true, and add {hand} to recipe.lora.target_modules by hand (allowed: true)",
        )
    else:
        settings.drop(name, "does nothing: no layer of it has such a name")


def _names(value: Any) -> list[str]:
    """Of sets of questions: a list, or one text with commas between them."""
    given = value if isinstance(value, list) else [value]
    return [each.strip() for text in given for each in str(text).split(",")]


def _limit(settings: Settings) -> None:
    """It counts in each set, and of the sets that --train replaces here is one file."""
    sets = _names(settings.replaced.get("dataset"))
    if len(sets) > 1 and settings.given("max_samples"):
        count = show(settings.old["max_samples"][1])
        why = f"each of the {len(sets)} sets was cut to its first {count} questions: FILE of --train must hold these"
        settings.drop("max_samples", why)
        settings.done("max_samples")


def _questions(settings: Settings) -> None:
    """By the names in dataset_info.json, where it is found: beside the config, or where the command was typed."""
    folder = settings.text("dataset_dir") or "data"
    places = [resolve_path(settings.folder, folder), Path(folder)]
    try:
        places = [each.resolve() for each in places]
        place = next((each for each in places if (each / LIST).is_file()), None)
    except (OSError, ValueError):  # a name that no folder can have
        place = None
    used = False
    _limit(settings)
    for name, field in (("dataset", "train"), ("eval_dataset", "val")):
        if name not in settings.old:
            continue
        if not settings.text(name):
            settings.drop(name, "null: none")
        elif place is None:
            option = "--train" if field == "train" else "--val"
            settings.refuse(name, f"a name in {places[0] / LIST}, which is not there: give {option} FILE")
        else:
            used = _listed_sets(settings, name, field, place) or used
        settings.done(name)
    if used and place is not None and settings.get("image_root", str) is None:
        why = "LLaMA-Factory looks for images beside the list of its questions, as media_dir is not set"
        settings.drop("image_root", "null: the default")
        if settings.given("dataset_dir"):
            settings.put("recipe.data.image_root", settings.near(place), ["dataset_dir"], why)
        else:
            settings.default("recipe.data.image_root", settings.near(place), "media_dir", why)
        settings.done("image_root")
    else:
        settings.drop("dataset_dir", "where the list of its questions stands")
    settings.done("dataset_dir")


def _listed_sets(settings: Settings, name: str, field: str, place: Path) -> bool:
    """Several are one after another there, and each question counts once, which a mix with weights of 1 does too."""
    option, names = "--train" if field == "train" else "--val", _names(settings.old[name][1])
    if len(names) > 1 and field == "val":
        settings.refuse(name, f"several sets of validation questions: join them in one file, and give {option} FILE")
        return False
    found = [listed(place, one, option) for one in names]
    wrong = [
        f"{one}: {each.wrong}" if len(names) > 1 else each.wrong
        for one, each in zip(names, found, strict=True)
        if each.wrong
    ]
    first, *others = found
    if field == "val" and not wrong and "dataset" not in settings.refused_keys:
        wrong = [*_other_fields(settings, first)]
    for why in wrong:
        settings.refuse(name, why)
    if wrong:
        return False
    missing = "; ".join(filter(None, (not_found(each.file) for each in found)))
    listing = ", ".join(settings.near(each.file) for each in others)
    mixed = f"recipe.data.mix has {listing}: each question of all sets counts once" if others else ""
    renamed = f"{FIELDS} = {as_written(first.fields)}" if first.fields and field == "train" else ""
    plain = next((each.note for each in found if each.note), "")
    why = "; ".join(filter(None, (f"as {LIST} has it", renamed, plain, mixed, missing)))
    settings.put(f"recipe.data.{field}", settings.near(first.file), [name], why)
    if first.fields:
        settings.also(FIELDS, first.fields)
    if others:
        root = settings.text("image_root") or settings.near(place)
        mix = [{"train": settings.near(each.file), "image_root": root, "fields": each.fields} for each in others]
        settings.also("recipe.data.mix", mix)
    return True


def _other_fields(settings: Settings, val: Listed) -> Iterator[str]:
    """A recipe's fields are those of its training questions and of its validation questions."""
    fields = settings.new["recipe"].values.get("data", {}).get("fields", {})
    if val.fields != fields:
        yield (
            f"{FIELDS} would be {as_written(val.fields)} for it and {as_written(fields)} for the training questions, "
            "and a recipe has one for both: give its keys the same names in the data, and give --val FILE"
        )


TRAINER = Trainer(
    name="LLaMA-Factory",
    short="llamafactory",
    marks=words(
        "finetuning_type cutoff_len lora_target template dataset_dir image_max_pixels video_max_pixels "
        "overwrite_cache plot_loss quantization_bit pref_beta neat_packing media_dir flash_attn"
    ),
    commands=("llamafactory-cli", "llamafactory"),
    aliases={"default_system": "system_prompt"},
    neutral={
        **only("do_train", "it trains nothing", True),
        **only("train_on_prompt", "questions would be learned besides answers", False),
        **only("mask_history", "only the last answer of a conversation would be learned", False),
        **only("streaming", "the order would depend on a buffer", False),
        **only("mix_strategy", "questions would be drawn from several sets", "concat"),
        **only("interleave_probs tool_format", "questions would be drawn or asked otherwise"),
        **only("neat_packing", "a packed row would count as one question of the batch", False),
        **only("pissa_init create_new_adapter", "the adapters would start elsewhere", False),
        **only("loraplus_lr_ratio", "A and B would have learning rates of their own"),
        **only("use_galore use_apollo use_badam use_adam_mini use_muon", _OPTIMIZER, False),
        **only("use_llama_pro shift_attn train_from_scratch use_mca", _OTHER, False),
        **only("rope_scaling mixture_of_depths moe_aux_loss_coef adapter_folder", _OTHER),
        **only("use_dft_loss use_asft_loss use_eaft_loss", "the loss would be another one", False),
        **only("freeze_language_model", "the language model would not be trained", False),
        **only("pure_bf16", "what is trained would have no float32 copies", False),
        **only("fp8 upcast_layernorm upcast_lmhead_output", "another numeric format", False),
        **only("resize_vocab split_special_tokens", _TOKENS, False),
        **only("add_tokens add_special_tokens new_special_tokens_config", _TOKENS),
        **only("early_stopping_steps", "training would stop before its last step"),
        **only("image_do_pan_and_scan crop_to_patches", "images would be cut into several", False),
        **only("pref_beta pref_ftx pref_loss pref_bco_weight dpo_label_smoothing ld_alpha", _PREFERENCES),
        **only("kto_chosen_weight kto_rejected_weight simpo_gamma ref_model reward_model", _PREFERENCES),
        **only("reward_model_type reward_model_adapters ref_model_adapters", _PREFERENCES),
    },
    dropped={
        **each("flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels", _SPEED),
        **each("use_reentrant_gc use_kv_cache offload_folder quantization_device_map", _SPEED),
        **each("tokenized_path preprocessing_batch_size buffer_size", "questions are read as they are"),
        **each("ignore_pad_token_for_loss pad_to_multiple_of", "padding is never learned"),
        "init_special_tokens": "the vocabulary stays as it is",
        "use_audio_in_video": _VIDEO,
        **each("compute_accuracy predict_with_generate", "evaluation has scores of its own"),
        **each("include_effective_tokens_per_second print_param_status", "only printed"),
        **each("placement_strategy resources_per_worker", "where it ran changes nothing"),
        "FORCE_TORCHRUN": "how it was started changes nothing",
    },
    starts={
        **{"video_": _VIDEO, "audio_": _VIDEO},
        **dict.fromkeys(("ray_", "swanlab", "use_swanlab"), "where it ran and was logged changes nothing"),
        **dict.fromkeys(("export_", "infer_", "vllm_", "sglang_"), "for what is done after training"),
        **dict.fromkeys(("hf_hub_", "ms_hub_", "om_hub_", "loraplus_lr_e"), "nothing in the model depends on it"),
        **dict.fromkeys(("galore_", "apollo_", "badam_", "freeze_trainable_", "freeze_extra_", "pissa_"), "not used"),
        **dict.fromkeys(("ppo_", "oft_"), "not used by supervised fine-tuning of adapters"),
    },
    handled=(
        "finetuning_type",
        "disable_gradient_checkpointing",
        "disable_shuffling",
        "dataset",
        "eval_dataset",
        "enable_thinking",
    ),
    shrinks_first=True,
    data={"--train": ("dataset", "dataset_dir"), "--val": ("eval_dataset",)},
    defaults=_defaults,
    keeps_form=True,
    no_nulls=("finetuning_type", "max_length", "max_pixels", "min_pixels", "lora_r", "lora_dropout", NAMED),
    prepare=_prepare,
    bare_names="decoder",
    micro_batch_loss="LLaMA-Factory (since March 2025) divides the loss of each micro-batch by its own answer tokens",
    answer_end=("turn", "its templates end an answer with a line break"),
)
