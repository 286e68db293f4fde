"""A config of DeepSpeed, or a launcher's flags, beside the trainer's settings: "auto" follows the trainer, a value that
says the same is fine, and another one is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sameday.spec.convert import keys
from sameday.spec.convert.conversion import show
from sameday.spec.convert.launching import found, read_mapping
from sameday.spec.convert.settings import Settings
from sameday.spec.vqa import VqaRecipe

_SECTIONS = ("deepspeed", "deepspeed_config", "deepspeed_config_file")
_NAMED = tuple(
    f"{start}zero{stage}{end}" for start in ("", "default-") for stage in range(4) for end in ("", "_offload")
)
"""Configs that ms-swift brings along; everything in them that could change the model is "auto"."""
_HARMLESS = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print"),
    *("wall_clock_breakdown", "activation_checkpointing", "aio", "communication_data_type", "comms_logger"),
    *("tensorboard", "wandb", "csv_monitor", "flops_profiler", "checkpoint", "dump_state", "memory_breakdown"),
    *("prescale_gradients", "gradient_predivide_factor", "fp16", "bf16", "bfloat16", "hybrid_engine", "elasticity"),
)
_ROUNDED = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
_NO_CLIPPING = "has no gradient_clipping, so that DeepSpeed does not clip; but recipe.max_grad_norm is {}: give it"

Found = Iterator[tuple[str, Any, str]]


def agree(work: Settings) -> None:
    """Refuses what contradicts the trainer's settings. Called when recipe and plan have batch, optimizer, precision."""
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        key = f"launch.{name}"
        if key in work.leaves and key not in work.let_go:
            said = _simple(work).get(name)
            if said is not None and not _same(work.leaves[key], said[0]) and work.leaves[key] not in (None, "auto"):
                whose = (
                    f"it is DeepSpeed's (deepspeed_config.{name} in a file of accelerate's, --{name} of its launcher)"
                )
                work.refuse_key(key, f"{whose}, but {said[1]} is {show(said[0])}: give both one value, or --drop {key}")
            else:
                work.explain(key, "the trainer's own settings say the same")
    for root, named in _roots(work).items():
        if named is None:
            _section(work, root)
        else:
            _file(work, root, named)


def _roots(work: Settings) -> dict[str, str | None]:
    """Keys under which a config of DeepSpeed stands (None), or the name of its file."""
    roots: dict[str, str | None] = {}
    for key, value in work.leaves.items():
        steps = key.split(".")
        place = next((i for i, step in enumerate(steps) if step in _SECTIONS), None)
        if place is None or key in work.let_go:
            continue
        if place + 1 < len(steps):
            roots[".".join(steps[: place + 1])] = None
        elif isinstance(value, str) and value:
            roots[key] = value
    return roots


def _section(work: Settings, root: str) -> None:
    start = f"{root}."
    config = {key.removeprefix(start): value for key, value in work.leaves.items() if key.startswith(start)}
    for name, _, why in _wrong(work, config, root):
        if name:
            work.refuse_key(start + name, why)
        else:
            work.refused.append(f"{work.document.source}: {root} {why}")


def _file(work: Settings, root: str, named: str) -> None:
    file = found(named, work.folder)
    if file is None and work.trainer.short == "swift" and named in _NAMED:
        return work.explain(root, "all in it that could change the model follows the trainer")
    if file is None:
        why = f"not found at {work.folder / named}: it may set precision, optimizer, schedule, clipping and batch"
        return work.explain(root, f"{why}; look there")
    wrong = list(_wrong(work, dict(keys.leaves(read_mapping(file), "")), root))
    for name, value, why in wrong:
        work.refuse_key(root, f"{file}: {name} is {show(value)}; {why}" if name else f"{file}: {why}")
    return None if wrong else work.explain(root, "it says what the trainer's settings say, or nothing")


def _wrong(work: Settings, config: Mapping[str, Any], root: str) -> Found:
    """What contradicts: the name in DeepSpeed's config (empty where it is missing), its value, and why."""
    off = {key.split(".")[0] for key, value in config.items() if key.endswith(".enabled") and _same(value, False)}
    simple = _simple(work)
    for name, value in config.items():
        section, last = name.split(".")[0], name.split(".")[-1]
        if value in (None, "auto") or (section in off and section not in ("fp16", "bf16", "bfloat16")):
            continue
        if name in simple:
            if not _same(value, simple[name][0]):
                yield name, value, f"but {simple[name][1]} is {show(simple[name][0])}"
        elif name == "fp16.enabled" and not _same(value, False):
            yield name, value, "there is no fp16 recipe (allowed: false)"
        elif last in _ROUNDED and not _same(value, False):
            yield name, value, "weights or gradients would be rounded on their way (allowed: false)"
        elif section == "optimizer":
            yield from _optimizer(name, value)
        elif section not in (*_HARMLESS, "scheduler"):
            yield name, value, f"not known, and it may change the model; --drop {root} leaves out DeepSpeed's config"
    if config.get("scheduler.type") is not None:
        yield from _scheduler(work, config)
    norm = work.new["recipe"].values.get("max_grad_norm")
    if config.get("gradient_clipping") is None and norm is not None:
        yield "", None, f"{_NO_CLIPPING.format(show(norm))}, or max_grad_norm: 0"


def _simple(work: Settings) -> dict[str, tuple[Any, str]]:
    """What recipe and plan have for names of DeepSpeed, and whose it is."""
    recipe, plan = work.new["recipe"].values, work.new["plan"].values

    def has(name: str) -> Any:
        return recipe.get(name, VqaRecipe.model_fields[name].default)

    times = work.get("gradient_accumulation_steps", int)
    batch = "recipe.effective_batch (num_processes gives the number of processes)"
    bf16 = (recipe.get("precision") == "bf16", "bf16 of the trainer")
    return {
        "train_micro_batch_size_per_gpu": (plan.get("max_questions"), "the trainer's batch of one device"),
        "gradient_accumulation_steps": (1 if times is None else times, "gradient_accumulation_steps of the trainer"),
        "train_batch_size": (recipe.get("effective_batch"), batch),
        "gradient_clipping": (recipe.get("max_grad_norm") or 0, "recipe.max_grad_norm"),
        **dict.fromkeys(("bf16.enabled", "bfloat16.enabled"), bf16),
        "optimizer.params.lr": (has("learning_rate"), "recipe.learning_rate"),
        "optimizer.params.betas": (list(has("betas")), "recipe.betas"),
        "optimizer.params.eps": (has("eps"), "recipe.eps"),
        "optimizer.params.weight_decay": (has("weight_decay"), "recipe.weight_decay"),
    }


def _optimizer(name: str, value: Any) -> Found:
    # DeepSpeed's Adam decouples weight decay too, unless adam_w_mode is false.
    if name == "optimizer.type" and str(value).lower() not in ("adam", "adamw"):
        yield name, value, "no recipe has this optimizer (allowed: AdamW, Adam)"
    elif name in ("optimizer.params.adam_w_mode", "optimizer.params.bias_correction") and not _same(value, True):
        yield name, value, "the optimizer would be another one (allowed: true)"
    elif name == "optimizer.params.amsgrad" and not _same(value, False):
        yield name, value, "the optimizer would be another one (allowed: false)"


def _scheduler(work: Settings, config: Mapping[str, Any]) -> Found:
    """It replaces the trainer's schedule."""
    recipe, kind = work.new["recipe"].values, config["scheduler.type"]
    start = "scheduler.params."
    given = {name.removeprefix(start): value for name, value in config.items() if name.startswith(start)}
    if kind != "auto" and _SCHEDULES.get(str(kind)) != recipe.get("schedule"):
        allowed = [name for name, ours in _SCHEDULES.items() if ours == recipe.get("schedule")]
        said = f"but recipe.schedule is {recipe.get('schedule')}"
        yield "scheduler.type", kind, f"{said} (allowed: {', '.join(allowed) or 'no scheduler'})"
        return
    warm = recipe.get("warmup_steps") or recipe.get("warmup_ratio")
    if warm and given.get("warmup_type", "log") not in ("linear", "auto"):
        log = "DeepSpeed's warm-up follows a logarithm, and no recipe says that: give warmup_type linear if it was"
        yield "scheduler.type", kind, log
    allowed_values = {
        **{
            "warmup_min_lr": 0,
            "warmup_max_lr": recipe.get("learning_rate"),
            "total_num_steps": recipe.get("max_steps"),
        },
        **{"warmup_num_steps": recipe.get("warmup_steps") or 0, "last_batch_iteration": -1},
    }
    for name, value in given.items():
        if name != "warmup_type" and value not in (None, "auto") and not _same(value, allowed_values.get(name)):
            yield start + name, value, f"but by the recipe it is {show(allowed_values.get(name))}; auto follows it"


def _same(one: Any, other: Any) -> bool:
    """As numbers, where they are written as texts."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    kind = bool if isinstance(other, bool) else float
    return bool(keys.cast(one, kind) == keys.cast(other, kind))
