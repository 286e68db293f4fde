"""What an old config computes in, and whether what it trains has float32 master copies as a recipe's weights have."""

from __future__ import annotations

import re

from sameday.spec.convert import keys
from sameday.spec.convert.quantization import COMPUTE
from sameday.spec.convert.settings import Settings

_SHARDED = re.compile(r"deepspeed|zero\d|fsdp", re.IGNORECASE)


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
    masters = _without_masters(work, dtype) or "with float32 master copies of what is trained"
    name, chosen, why = "bf16", "float32", "bf16 is off"
    if work.get("bf16", bool):
        chosen, why = "bf16", masters
    elif "bf16" in (keys.DTYPES.get(dtype), keys.DTYPES.get(mixed)):
        name = "torch_dtype" if keys.DTYPES.get(dtype) == "bf16" else "mixed_precision"
        chosen, why = "bf16", masters
    elif work.get("tf32", bool):
        name, chosen, why = "tf32", "tf32", "float32 with TF32 matmuls"
    elif keys.DTYPES.get(matmuls) == "bf16" and not dtype and not mixed and work.get("bf16", bool) is None:
        name, chosen, why = COMPUTE, "bf16", "what the matmuls compute in"
    if name not in work.old or work.is_null(name):
        work.default("recipe.precision", chosen, name)
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


def _without_masters(work: Settings, dtype: str) -> str:
    """Empty where it has them: adapters are float32, and so are the copies of DeepSpeed and FSDP."""
    loaded = keys.DTYPES.get(dtype) == "bf16" or (not dtype and work.trainer.loads_as_computed)
    if work.new["recipe"].values.get("train") != "all" or not loaded or _sharded(work):
        return ""
    return "near, not the same: bf16 weights were trained there, and here they have float32 master copies"


def _sharded(work: Settings) -> bool:
    for key, value in work.leaves.items():
        if key.split(".")[-1] == "fsdp_version":  # chooses none by itself
            continue
        if _SHARDED.search(key) and value not in (None, False, "", [], {}):
            return True
        if key in ("launch.config_file", "accelerate_config") and _SHARDED.search(str(value)):
            return True
    return "deepspeed" in work.command.split()
