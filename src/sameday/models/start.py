"""An adapter to start from, taken on no trust: its files are what was written, its form is the recipe's, and every
tensor that the recipe needs is there, of its shape and finite. PEFT would only warn, and draw what is missing."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sameday.models.adapters import MAGNITUDE, adapted_layers, resolve_targets, ties_told_otherwise
from sameday.models.families.base import Family
from sameday.models.hub import known_type
from sameday.record.manifest import MANIFEST, fault
from sameday.spec.errors import BadInput
from sameday.spec.lora import Lora
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import first_names, in_one_line

CONFIG, WEIGHTS, ORIGIN = "adapter_config.json", "adapter_model.safetensors", "origin.json"
CODED = ("nf4", "fp8")
"""Base formats that make another model of the same weights."""
COMPARED = frozenset(
    {"r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "base_model_name_or_path", "peft_type"}
)
ASIDE = frozenset(
    {"lora_dropout", "task_type", "inference_mode", "auto_mapping", "revision", "peft_version", "runtime_config"}
)
"""Settings of PEFT that change nothing about the weights of an adapter. All others must be at their defaults."""
MOST_NAMES = 8
"""Of a list of layers, that are shown."""
SHOWN = 3
"""Tensors with the same fault that are named; a name has about 75 letters, and an adapter has hundreds of them."""
OWN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to draw new adapters which leave the base model as it is."""


def write_origin(
    folder: Path, digest: str, dtype: torch.dtype, stored: str | None = None, layers: Mapping[str, int] | None = None
) -> None:
    """Which base model an adapter belongs to, by its weights: names of folders may mean anything. `stored` says how
    they were stored while it was trained, where that was not the format they were read in, and `layers` which."""
    how = {} if stored is None else {"base_format": stored, "base_format_layers": dict(layers or {})}
    origin = {"base_model": digest, "dtype": str(dtype)} | how
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")


def load_start(
    model: nn.Module, family: Family, recipe: VlmRecipe, folder: Path, base: str, digest: str, dtype: torch.dtype
) -> Any:
    """Adapters of an earlier run to go on from. `base` is the base model's name or folder; `digest` is of its weights
    as they were read, in `dtype`, whatever they are stored as by now."""
    from peft import PeftModel

    check_start(model, family, recipe, folder, base, recipe.adapter_from)
    check_base(folder, digest, dtype, f"{recipe.adapter_from} {folder}", base)
    with ties_told_otherwise():
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def check_base(folder: Path, digest: str, dtype: torch.dtype, whose: str, base: str) -> None:
    """BadInput where an adapter says that it belongs to other weights, of the same format."""
    check_origin(origin_of(folder, whose), digest, dtype, whose, base)


def check_origin(origin: Mapping[str, Any] | None, digest: str, dtype: torch.dtype, whose: str, base: str) -> None:
    """The same, of what was read beside the adapter."""
    if origin is not None and origin.get("dtype") == str(dtype) and origin.get("base_model") != digest:
        raise BadInput(
            f"{whose}: was trained on another base model: its weights were not those of {base}; "
            "allowed: an adapter of this base model"
        )


def other_format(folder: Path, here: str, whose: str) -> Iterator[str]:
    """A sentence where an adapter was trained on base weights in codes and meets others, or the other way round:
    allowed, and another model than the one that was trained."""
    origin = origin_of(folder, whose) or {}
    there = origin.get("base_format") or str(origin.get("dtype", here)).removeprefix("torch.").replace(
        "bfloat16", "bf16"
    )
    if there != here and any(name in there + here for name in CODED):
        yield (
            f"{whose}: was trained on base weights stored as {there}, and here they are stored as {here}: this is "
            "another model than the one that was trained"
        )


def check_start(
    model: nn.Module, family: Family, recipe: VlmRecipe, folder: Path, base: str, whose: str = "start_adapter"
) -> None:
    """BadInput with all that is wrong. `model` may be without weights: its layers' names and shapes are asked for.
    `whose` is what named the folder."""
    wrong = []
    if (folder / MANIFEST).exists() and (why := fault(folder, (CONFIG, WEIGHTS))) is not None:
        wrong.append(why)
    config = _config(folder, whose)
    _check_type(config, family, base, f"{whose} {folder}")
    targets = resolve_targets(model, family, recipe.lora, recipe.train_vision)
    form = [*_wrong_form(model, targets, recipe, config)]
    # Tensors of another form are no second mistake.
    tensors = [] if form else [*_wrong_tensors(model, targets, recipe.lora, folder)]
    by_name = [*_wrong_base(config, folder, base, f"{whose} {folder}")]
    if not by_name and (form or tensors):
        by_name = [*_named_base(config, base)]
    wrong += [*by_name, *form, *tensors]
    if wrong:
        raise BadInput(f"{whose} {folder}: " + "; ".join(wrong))


def adapter_form(model: nn.Module, family: Family, folder: Path, base: str, whose: str) -> tuple[Lora, bool]:
    """The form of an adapter that somebody made, as a recipe says it, and whether it changes the vision tower too. What
    a recipe cannot say is for `check_start` to refuse."""
    config = _config(folder, whose)
    _check_type(config, family, base, f"{whose} {folder}")
    layers = adapted_layers(model, config.target_modules or [])
    if not layers:
        no_layer = f"its target_modules {_listed(config.target_modules)} name no linear layer of the recipe's model"
        raise BadInput(f"{whose} {folder}: " + "; ".join([*_named_base(config, base), no_layer]))
    tower = any(family.in_tower(name) for name in layers)
    # Names as they are written, where a recipe could have them; else every layer that the pattern means.
    names = config.target_modules
    exact = not isinstance(names, str) and {name.rsplit(".", 1)[-1] for name in layers} == set(names)
    targets = tuple(sorted(names if exact else layers))
    how = {"rslora": bool(config.use_rslora), "dora": bool(config.use_dora)}
    return Lora(r=config.r, alpha=float(config.lora_alpha), target_modules=targets, **how), tower


def _config(folder: Path, whose: str) -> Any:
    from peft import PeftConfig

    if not (folder / CONFIG).is_file():
        raise BadInput(f"{whose}: {folder} is not a PEFT adapter (it has no {CONFIG})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it would only warn of is refused below
            config = PeftConfig.from_pretrained(str(folder))
        written = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{whose} {folder}: {CONFIG} cannot be read: {reason}") from None
    if config.peft_type != "LORA":
        raise BadInput(f"{whose}: {folder} is an adapter of type {config.peft_type}; allowed: LORA")
    # At its default, which is nothing in most cases, a field that came later changes nothing.
    if unknown := sorted(name for name, value in written.items() if value and not hasattr(config, name)):
        raise BadInput(
            f"{whose} {folder}: {CONFIG} has {first_names(unknown)}, which PEFT {version('peft')} does not know, and "
            "which may change what the adapter computes; allowed: an adapter of what this version knows"
        )
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(value := getattr(config, name), kind) or isinstance(value, bool) or not 0 < value < 2**20:
            raise BadInput(f"{whose} {folder}: {CONFIG} has {name} {value!r}; must be a number above 0")
    return config


def _wrong_form(model: nn.Module, targets: list[str] | str, recipe: VlmRecipe, config: Any) -> Iterator[str]:
    from peft import LoraConfig

    lora = recipe.lora
    for name, there, here in (
        ("r", config.r, lora.r),
        ("alpha", config.lora_alpha, lora.alpha),
        ("rslora", bool(config.use_rslora), lora.rslora),
        ("dora", bool(config.use_dora), lora.dora),
    ):
        if there != here:
            yield f"{name} is {str(there).lower()} there, {str(here).lower()} in the recipe"
    usual = LoraConfig()
    for name, default in vars(usual).items():
        value = getattr(config, name, default)
        fine = value in OWN_STARTS if name == "init_lora_weights" else value == default or not (value or default)
        if name not in COMPARED | ASIDE and not fine:
            shown = "true" if value is True else repr(value)
            yield f"{name} is {shown} there, which a recipe cannot say"
    # By layers, not by names: a pattern and a list of names may mean the same.
    if adapted_layers(model, config.target_modules or []) != adapted_layers(model, targets):
        yield f"target_modules are {_listed(config.target_modules)} there, {_listed(lora.target_modules)} in the recipe"


def _listed(targets: Iterable[str] | str | None) -> str:
    """A pattern, or names, of which there may be one for every layer."""
    if isinstance(targets, str):
        return in_one_line(targets)
    names = sorted(targets or [])
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{names[:MOST_NAMES]}{more}"


def _check_type(config: Any, family: Family, base: str, whose: str) -> None:
    """BadInput where the base model that an adapter names is known here as one of another kind: nothing else that could
    be said of it would help."""
    named = config.base_model_name_or_path
    there = known_type(named) if named else None
    if there is not None and there != family.model_type:
        raise BadInput(
            f"{whose}: was made for another base model: {named!r}, of model_type {there}; the recipe's is {base!r}, of "
            f"model_type {family.model_type}; allowed: an adapter of this base model"
        )


def _named_base(config: Any, base: str) -> Iterator[str]:
    """Where the names differ, and the adapter does not fit: this is the likeliest reason."""
    named = config.base_model_name_or_path
    if named and Path(named).name != Path(base).name:
        yield f"it was made for the base model {named!r}, and the recipe's is {base!r}"


def _wrong_base(config: Any, folder: Path, base: str, whose: str) -> Iterator[str]:
    """By name, where the adapter does not say it better: the last part of it, since a folder may have been moved."""
    named = config.base_model_name_or_path
    if named and origin_of(folder, whose) is None and Path(named).name != Path(base).name:
        yield (
            f"its base model is {named!r}, the recipe's is {base!r}; where both are the same model, write so into its "
            f"{CONFIG} (base_model_name_or_path)"
        )


def origin_of(folder: Path, whose: str) -> dict[str, Any] | None:
    """None where an earlier release, or somebody else, wrote the adapter."""
    if not (folder / ORIGIN).is_file():
        return None
    try:
        return dict(json.loads((folder / ORIGIN).read_text()))
    except (OSError, ValueError, TypeError):
        raise BadInput(f"{whose}: {ORIGIN} is not what a run wrote") from None


def _wrong_tensors(model: nn.Module, targets: list[str] | str, lora: Lora, folder: Path) -> Iterator[str]:
    from safetensors import SafetensorError, safe_open

    if not (folder / WEIGHTS).is_file():
        yield f"it has no {WEIGHTS}"
        return
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    needed: dict[str, tuple[int, ...]] = {}
    for name in adapted_layers(model, targets):
        needed[f"base_model.model.{name}.lora_A.weight"] = (lora.r, layers[name].in_features)
        needed[f"base_model.model.{name}.lora_B.weight"] = (layers[name].out_features, lora.r)
        if lora.dora:
            needed[f"base_model.model.{name}.{MAGNITUDE}"] = (layers[name].out_features,)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            there = set(file.keys())
            both = sorted(there & needed.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in both}
            kinds = {name: file.get_tensor(name).dtype for name in both}
            infinite = [name for name in both if not file.get_tensor(name).float().isfinite().all()]
    except (OSError, SafetensorError) as error:
        yield f"{WEIGHTS} cannot be read: {error}"
        return
    other = [
        f"{name} ({[*shapes[name]]} instead of {[*needed[name]]})" for name in both if shapes[name] != needed[name]
    ]
    whole = [f"{name} ({kind})" for name, kind in kinds.items() if not kind.is_floating_point]
    lacking = sorted(needed.keys() - there)
    if lacking:
        which = f"{len(lacking)} of the {len(needed)} tensors that the recipe needs"
        yield f"{WEIGHTS} lacks {which}: {first_names(lacking, SHOWN)}"
    for names, what in (
        (sorted(there - needed.keys()), "tensors of no layer that the recipe adapts"),
        (other, "tensors of another shape"),
        (infinite, "tensors that are not finite"),
        (whole, "tensors that are no floating-point numbers"),
    ):
        if names:
            yield f"{WEIGHTS} has {what} ({len(names)}): {first_names(names, SHOWN)}"
    renamed = _renamed(needed, there)
    if lacking and renamed:
        how = " and ".join(f"{old} to {new}" for old, new in renamed.items())
        yield f"they are the same layers by the names that they had in earlier versions of transformers: rename {how}"


def _renamed(needed: Iterable[str], there: Iterable[str]) -> dict[str, str]:
    """How names of other tensors begin, with how those that are needed do, where all else in them is the same; empty
    where it is not, as for layers that are others."""
    starts: dict[str, str] = {}
    by_end = {_end(name): name for name in there}
    for name in needed:
        end = _end(name)
        old, new = by_end.pop(end, "").removesuffix(end), name.removesuffix(end)
        if not old or starts.setdefault(old, new) != new:
            return {}
    return {} if by_end else {old: new for old, new in starts.items() if old != new}


def _end(name: str) -> str:
    """From the list of layers on."""
    found = re.search(r"\w+\.\d+\..*$", name)
    return found[0] if found is not None else name
