"""What an old config computes in, and whether what it trains has float32 master copies as a recipe's weights have."""

from __future__ import annotations

import re

from sameday.spec.convert import keys
from sameday.spec.convert.quantization import COMPUTE
from sameday.spec.convert.settings import Settings
from sameday.spec.load import resolve_path

_SHARDED = re.compile(r"deepspeed|zero\d|fsdp", re.IGNORECASE)
_LOADED = "without dtype transformers 5 loads a model in its checkpoint's format, {}, and earlier ones in float32"
_NEAR = "near, not the same: {} weights were trained there, and here they have float32 master copies"
_STORED = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32"}


def precision(work: Settings) -> None:
    """Called when recipe.train is set."""
    dtype, allowed = work.text("torch_dtype").lower().removeprefix("torch."), "(allowed: bf16, float32, tf32)"
    if work.get("fp16", bool):
        work.refuse("fp16", f"there is no fp16 recipe {allowed}")
    mixed = work.text("mixed_precision").lower()
    four_bits = work.new["recipe"].values.get("base_format") == "nf4"
    matmuls = work.text(COMPUTE).lower().removeprefix("torch.") if four_bits else ""
    for key, given in (("torch_dtype", dtype), ("mixed_precision", mixed), (COMPUTE, matmuls)):
        if given and given not in keys.DTYPES:
            work.refuse(key, f"no recipe has this precision {allowed}")
    stored = "" if dtype or four_bits else _stored(work)
    masters = _without_masters(work, dtype, stored) or "with float32 master copies of what is trained"
    doubt = f"; {_LOADED.format(stored)}: set bf16 if the old run had 5" if stored else ""
    silent = not mixed and work.get("bf16", bool) is None
    name, chosen, why = "bf16", "float32", f"bf16 is off{doubt}"
    if work.get("bf16", bool):
        chosen, why = "bf16", masters
    elif "bf16" in (keys.DTYPES.get(dtype), keys.DTYPES.get(mixed)):
        name = "torch_dtype" if keys.DTYPES.get(dtype) == "bf16" else "mixed_precision"
        chosen, why = "bf16", masters
    elif work.get("tf32", bool):
        name, chosen, why = "tf32", "tf32", f"float32 with TF32 matmuls{doubt}"
    elif keys.DTYPES.get(matmuls) == "bf16" and not dtype and silent:
        name, chosen, why = COMPUTE, "bf16", "what the matmuls compute in"
    elif stored and silent:
        name, chosen, why = "torch_dtype", "bf16", _as_stored(work, stored)
    if name not in work.old or work.is_null(name):
        said = f"the Trainer's default{doubt}" if chosen == "float32" else why
        work.default("recipe.precision", chosen, name, said)
    else:
        work.put("recipe.precision", chosen, [name], why)
    for other in ("bf16", "fp16", "tf32", "torch_dtype", "mixed_precision"):
        if other != name:
            work.drop(other, f"recipe.precision is {chosen}")
    if matmuls in keys.DTYPES and name != COMPUTE:
        if keys.DTYPES[matmuls] == chosen.replace("tf32", "float32"):
            work.drop(COMPUTE, f"recipe.precision is {chosen}")
        else:
            work.refuse(COMPUTE, f"but recipe.precision is {chosen}, which is what the matmuls compute in")


def _stored(work: Settings) -> str:
    """The checkpoint's format, where a model is loaded in it by transformers 5 and in another one by those before;
    empty where the version makes no difference."""
    if not work.trainer.loads_as_stored:
        return ""
    folder = resolve_path(work.folder, work.text("model_name_or_path"))
    told = _STORED.get(keys.model_dtype(folder / "config.json") or "")
    stored = told or (work.family.stored if work.family is not None else "bf16")
    return "" if stored == "float32" else stored


def _as_stored(work: Settings, stored: str) -> str:
    """Nothing says a precision: transformers 5, whose loss is assumed too, computes in the checkpoint's."""
    near = ""
    if stored != "bf16":
        near = f"near, not the same: no recipe has {stored}; "
    elif _trains_all_alone(work):
        near = f"{_NEAR.format(stored)}; "
    return f"{near}{_LOADED.format(stored)}: set float32 if the old run had an earlier one"


def _without_masters(work: Settings, dtype: str, stored: str) -> str:
    """Empty where it has them: adapters are float32, and so are the copies of DeepSpeed and FSDP."""
    if not _trains_all_alone(work):
        return ""
    if keys.DTYPES.get(dtype) == "bf16" or (not dtype and work.trainer.loads_as_computed):
        return _NEAR.format("bf16")
    return f"{_LOADED.format(stored)}: with 5 {_NEAR.format(stored)}" if stored else ""


def _trains_all_alone(work: Settings) -> bool:
    return work.new["recipe"].values.get("train") == "all" and not _sharded(work)


def _sharded(work: Settings) -> bool:
    for key, value in work.leaves.items():
        if key.split(".")[-1] == "fsdp_version":  # chooses none by itself
            continue
        if _SHARDED.search(key) and value not in (None, False, "", [], {}):
            return True
        if key in ("launch.config_file", "accelerate_config") and _SHARDED.search(str(value)):
            return True
    return "deepspeed" in work.command.split()
