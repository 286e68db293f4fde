"""What an old config says about quantized base weights: four bits in NF4 are a recipe, everything else is refused."""

from __future__ import annotations

from collections.abc import Iterator

from sameday.spec.convert import keys
from sameday.spec.convert.settings import Settings

FOUR, EIGHT, BITS, METHOD = keys.SWITCHES
TYPE, DOUBLE, COMPUTE = "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"
SKIPPED, STORAGE = "llm_int8_skip_modules", "bnb_4bit_quant_storage"
NOTHING = "does nothing: no quantization is asked for"


def quantization(work: Settings) -> None:
    """Sets base_format and double_quant. What the matmuls compute in is left to `precision`."""
    given = [name for name in work.old if name in keys.SWITCHES or name.startswith(keys.QUANTIZATION)]
    for name in [name for name in given if work.old[name][1] is None]:
        work.drop(name, "null: the default")
        given.remove(name)
    asking = [name for name in given if _asks(work, name)]
    wrong = {} if not asking and any(name in keys.SWITCHES for name in given) else dict(_wrong(work, given, asking))
    wrong |= dict(_other_switches(work, given))
    for name, why in wrong.items():
        work.refuse(name, why)
    if wrong:
        return
    if not asking:
        for name in given:
            work.drop(name, NOTHING)
        return
    layers = "the same layers as bitsandbytes', the vision tower's too"
    if work.trainer.short == "swift":
        layers = (
            "near, not the same: ms-swift leaves vision tower and projector in bf16; here they are in four bits too"
        )
    work.put("recipe.base_format", "nf4", asking, layers)
    if DOUBLE in given:
        work.put("recipe.double_quant", work.get(DOUBLE, bool), [DOUBLE])
    else:
        whose = "QLoRA's and LLaMA-Factory's default" if BITS in asking else "bitsandbytes' default"
        work.default("recipe.double_quant", BITS in asking, DOUBLE, whose)
    for name in given:
        if name not in (*asking, DOUBLE, COMPUTE):
            work.drop(name, keys.QUANTIZATION_DROPPED.get(name, "recipe.base_format is nf4"))


def _asks(work: Settings, name: str) -> bool:
    """For four bits. Settings of NF4 do where no switch says whether there are four bits at all."""
    value = work.text(name).lower()
    return {
        FOUR: name == FOUR and work.get(FOUR, bool) is True,
        BITS: value == "4",
        METHOD: value == "nf4",
        TYPE: value == "nf4" and not any(work.text(switch) for switch in keys.SWITCHES),
    }.get(name, False)


def _other_switches(work: Settings, given: list[str]) -> Iterator[tuple[str, str]]:
    if work.get(EIGHT, bool) is True:
        yield EIGHT, "no recipe has base weights in int8 (allowed: false; four bits in nf4 are base_format nf4)"
    if BITS in given and work.text(BITS) not in ("4", "16", "32"):
        yield BITS, "no recipe has base weights of so many bits (allowed: 4, 16, 32)"
    if METHOD in given and work.text(METHOD).lower() not in ("nf4", "none", "false", "bnb", "bitsandbytes"):
        yield METHOD, "no recipe has this quantization (allowed: nf4, none)"


def _wrong(work: Settings, given: list[str], asking: list[str]) -> Iterator[tuple[str, str]]:
    """Of settings that are used, or might be."""
    kind = work.text(TYPE).lower()
    if kind and kind != "nf4":
        yield TYPE, "no recipe has base weights in this format (allowed: nf4)"
    elif not kind and asking == [FOUR] and not work.old[FOUR][0].endswith("lora"):
        yield (
            FOUR,
            "without bnb_4bit_quant_type bitsandbytes takes fp4, which no recipe has (allowed: false, or give "
            "bnb_4bit_quant_type: nf4 if the old run had it)",
        )
    for name in given:
        if name == SKIPPED and work.get(name, list) != ["lm_head"]:
            yield name, "other layers would be quantized, and no recipe says that (allowed: [lm_head])"
        elif (
            not asking
            and name != TYPE
            and name not in keys.SWITCHES
            and keys.cast(work.old[name][1], bool) is not False
        ):
            yield name, "nothing says whether the base model is quantized (load_in_4bit: true or false does)"
        elif name not in (*keys.SWITCHES, TYPE, DOUBLE, COMPUTE, SKIPPED, *keys.QUANTIZATION_DROPPED):
            yield name, f"not known, and it may change the model; --drop {work.old[name][0]} leaves it out"
