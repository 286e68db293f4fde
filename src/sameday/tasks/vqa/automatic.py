"""Automatic choices, each with the sentence that explains it. What the user asked for is never replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from sameday.hardware.kernels import without_flash
from sameday.hardware.machine import Machine
from sameday.spec.errors import refuse
from sameday.spec.plan import Plan, fields_of
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.vqa.launches import most_recorded
from sameday.tasks.vqa.problems import (
    FLEX_WIDTH,
    NO_PIECES,
    Decoder,
    attention_problems,
    fused_problems,
    graph_problems,
    lora_limits,
    table_problems,
)
from sameday.tasks.vqa.words import image_parts_words

BYTES_PER_ACTIVATION = 30 * 2
"""Kept for the backward pass, per token, layer and unit of width: about 30 numbers of two bytes, uncompiled."""

SCALE_BYTES, DOUBLE_SCALE_BYTES = 4 / 64, (1 + 4 / 256) / 64
"""Of the scales of a weight in four bits: a float32 for 64 weights, or a byte, and a float32 for 256 such bytes."""
FEWEST_TOKENS = 3072
"""Of a micro-batch: where fewer fit, layers are recomputed instead, and nothing is recorded."""
FEWEST_SELECTIVE = 2048
"""The same where layers are recomputed in part: where fewer fit, they are recomputed whole."""
TIMED_FUSED = (((9, 0), 128),)
"""Compute capabilities of GPUs, and widths of heads, with which `fused` was timed and is faster than `split`."""
TIMED_LORA = ((9, 0),)
"""Compute capabilities of GPUs on which LoRA's Triton kernels were timed and are faster than plain ones."""
TIMED_RANK = 16
"""Up to which rank they are: at 64 they are not (`bench/lora.py`), and between the two nobody has looked."""


def attention_kernel(
    plan: Plan, machine: Machine, precision: str, decoder: Callable[[], Decoder] = Decoder
) -> tuple[str, str]:
    """Which kernel runs where rows hold several questions, and why. BadInput where the one asked for cannot. `decoder`
    is asked where it matters: it may have to read the model's configuration."""
    no_flash = without_flash(machine, precision)
    refuse(attention_problems(plan, machine, precision, decoder))
    if plan.attention != "auto":
        return plan.attention, "asked for"
    if not plan.share_images and not plan.packing:
        return "sdpa", "each row is one question, which plain causal attention serves"
    if machine.device == "cpu":
        return "sdpa", "on a CPU a dense mask is the fastest"
    cannot = None if not plan.packing or no_flash or decoder().splits else f"split {NO_PIECES}"
    if plan.packing and not no_flash and not cannot:
        timed = (machine.capability, decoder().width) in TIMED_FUSED
        if timed and not any(fused_problems(machine, precision, decoder)):
            return "fused", "rows are packed, and one pass over all that a piece sees is faster than several calls"
        return "split", "rows are packed and there is flash attention"
    missing = no_flash or cannot or "rows are not packed, which flash attention needs"
    if machine.triton and (width := decoder().width) < FLEX_WIDTH:
        return "sdpa", f"flex attention needs heads of width {FLEX_WIDTH} or more, not {width}, and {missing}"
    if machine.triton:
        return "flex", f"there is a GPU with Triton, and {missing}"
    return "sdpa", f"without Triton only the dense mask is there, and {missing}"


def lora_kernel(recipe: VlmRecipe, machine: Machine) -> tuple[str, str]:
    """What computes adapters on a GPU with Triton, whose layers are compiled, and why."""
    untimed = (f"is not known to be faster {where}" for where in _lora_untimed(recipe, machine))
    why_not = next(chain(lora_limits(recipe), untimed), None)
    if why_not is not None:
        return "plain", f"triton {why_not}"
    gpus = "GPUs of compute capability " + ".".join(map(str, machine.capability))
    return "triton", f"up to rank {TIMED_RANK} its kernels take less time and memory on {gpus}"


def _lora_untimed(recipe: VlmRecipe, machine: Machine) -> Iterator[str]:
    """Where nobody has shown yet that LoRA's kernels are faster in a run."""
    if machine.capability not in TIMED_LORA:
        yield f"on {machine.shown_name}"
    if recipe.precision != "bf16":
        yield f"in {recipe.precision}"
    if recipe.lora.r > TIMED_RANK:
        yield f"above rank {TIMED_RANK}, and recipe.lora.r is {recipe.lora.r}"
    if recipe.base_format != "precision":
        yield f"with base weights in {recipe.base_format}"
    if recipe.trains_image_parts:
        yield f"outside the language model, and {image_parts_words(recipe)}"


def low_memory(plan: Plan, recipe: VlmRecipe, machine: Machine, decoder: Callable[[], Decoder] = Decoder) -> Plan:
    """The same plan with as little memory as there are fields for."""
    less = plan.model_copy(update={"checkpointing": "full", "cuda_graphs": False, "keep_features": False})
    hosted = less.model_copy(update={"embeddings_on": "host"})
    spares = machine.device == "cuda" and not any(table_problems(hosted, recipe, machine, decoder))
    return hosted if spares else less


def choose_plan(
    recipe: VlmRecipe, machine: Machine, config: Any, ranks: int, decoder: Callable[[], Decoder] = Decoder
) -> tuple[Plan, dict[str, str]]:
    """A safe plan for this machine and model, field by field with its reason."""
    text = config.get_text_config()
    why: dict[str, str] = {}
    fields: dict[str, Any] = {}

    def pick(name: str, value: Any, reason: str) -> None:
        fields[name], why[name] = value, reason

    pick("share_images", True, "each image is computed once for all of its questions in a step; exact")
    pick(
        "share_text",
        True,
        "what its questions have in common after it, such as a template, is computed once too; exact",
    )
    pick("packing", True, "no padding is computed")
    pick("max_questions", None, "the token budget decides")
    pick("label_only_logits", True, "only answers have targets")
    if machine.device == "cpu":
        pick("token_budget", 2048, "a dense mask grows with the square of a row")
        pick("optimizer_impl", "foreach", "fewer calls than one tensor at a time")
        return Plan(**fields), why
    pick("optimizer_impl", "fused", f"one kernel on {machine.shown_name}")
    pick("pin_memory", True, "copies to the GPU do not block")
    if not recipe.trains_image_parts:
        pick("keep_features", True, "an image that comes again need not go through the vision tower again")
    workers = max(1, min(8, machine.cores // ranks - 1))
    pick("workers", workers, f"{machine.cores} cores for {ranks} {'process' if ranks == 1 else 'processes'}")
    if machine.triton:
        pick("compile", "layers", "Triton is there")
        pick("pad_to_multiple", 32, "fewer row lengths to compile for")
    if machine.triton and recipe.train == "lora":
        pick("lora_kernel", *lora_kernel(recipe, machine))
    each = text.num_hidden_layers * text.hidden_size * BYTES_PER_ACTIVATION
    budget = int(_spare(recipe, machine, text) / each)
    recordable = "cuda_graphs" in fields_of(recipe) and not any(
        graph_problems(Plan(**fields, cuda_graphs=True), recipe, machine, decoder)
    )
    taken, reason = _recorded_tokens(text, recipe, machine, budget) if recordable else (0, None)
    if reason is not None:
        pick("cuda_graphs", taken > 0, reason)
    budget -= taken
    partly = int(_spare(recipe, machine, text) / _selective_bytes(recipe, text))
    if budget >= FEWEST_TOKENS:
        beside = "the weights and what is recorded" if taken else "the weights"
        pick("checkpointing", "none", f"activations of {budget} tokens fit beside {beside}")
        pick("token_budget", min(budget, 16384), "what fits, at most 16384")
    elif partly >= FEWEST_SELECTIVE:
        only = f"only {max(0, budget)} tokens would fit without it"
        pick("checkpointing", "selective", f"{only}, and {partly} where layers keep attention and not the matmuls")
        pick("token_budget", min(partly, 8192), "what fits, at most 8192")
    else:
        fewer = f"and {max(0, partly)} with selective"
        pick("checkpointing", "full", f"only {max(0, budget)} tokens would fit without it, {fewer}")
        pick("token_budget", 8192, "with recomputation a layer's input per token is kept")
    return Plan(**fields), why


def _recorded_tokens(text: Any, recipe: VlmRecipe, machine: Machine, budget: int) -> tuple[int, str]:
    """Of a `budget` of tokens that memory has room for: how many recordings may take, as many as the largest of them
    has, and why. They keep their memory, and micro-batches that are launched take their own; none has more tokens than
    what is left to these."""
    most = most_recorded(text, recipe.train, machine.shown_name)
    if most is None:
        return 0, f"it is not known up to which size recording pays on {machine.shown_name}; true records all sizes"
    taken = min(most, budget // 2)
    if budget - taken < FEWEST_TOKENS:
        return 0, f"recordings of {most} tokens, up to which they pay, would take memory that activations need"
    return taken, f"up to {most} tokens a micro-batch's kernels end before the host has launched them"


def _spare(recipe: VlmRecipe, machine: Machine, text: Any) -> float:
    """Bytes left for activations: nine tenths of the memory less the weights, gradients and optimizer state."""
    return 0.9 * machine.memory - language_bytes(recipe, text)


def _selective_bytes(recipe: VlmRecipe, text: Any) -> int:
    """Of a token under selective checkpointing: what `models/recompute.py` counts, with a norm behind the MLP, of every
    layer, and all activations of the one whose turn it is."""
    each = 2 if recipe.precision == "bf16" else 4
    kept = (3 * text.hidden_size + _attention_width(text)) * each + 4 * text.num_attention_heads
    return int(text.num_hidden_layers * kept + text.hidden_size * BYTES_PER_ACTIVATION)


def _attention_width(text: Any) -> int:
    return int(text.num_attention_heads) * head_width(text)


def head_width(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def language_bytes(recipe: VlmRecipe, text: Any) -> float:
    """About what a language model's weights take, with gradients and optimizer state where they are trained."""
    half = recipe.precision == "bf16" and recipe.train == "lora"
    each = (2 if half else 4) + (12 if recipe.train == "all" else 0)
    four_bits = 0.5 + (DOUBLE_SCALE_BYTES if recipe.double_quant else SCALE_BYTES)
    linear = {"nf4": four_bits, "fp8": 1.0}.get(recipe.base_format, each)
    stored = _linear_weights(text)
    return (language_weights(text) - stored) * each + stored * linear


def language_weights(text: Any) -> int:
    """About how many parameters a language model of this configuration has."""
    return _linear_weights(text) + 2 * int(text.vocab_size * text.hidden_size)


def _linear_weights(text: Any) -> int:
    """Without embeddings and head."""
    return int(text.num_hidden_layers * text.hidden_size * (3 * text.intermediate_size + 4 * _attention_width(text)))
