"""Plan: how a recipe is run. No field here may change the model; each says how strictly it keeps it, and what a task
must have for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from sameday.spec.limits import COUNTED, STEPS, at_most, steps_or_epoch
from sameday.spec.recipe import Recipe, Strict

NEEDS = {
    "shared prefixes": "samples that begin with the same image",
    "token rows": "samples of different lengths, in tokens",
    "decoder layers": "a language model's layers",
    "image cache": "image files that every step reads",
    "equal samples": "samples that are all of one size",
    "compiled layers": "a model whose layers can be compiled",
    "checked compile": "a model whose compiled layers are compared with eager ones",
    "fused levels": "levels that fused kernels can compute",
    "recorded steps": "micro-batches whose kernels can be recorded",
    "images in memory": "images that are all held in memory",
}
"""What plan fields may need of a task, with what each means. A recipe's `has` lists what its task has."""

Claim = Literal["bitwise", "rounding", "statistical"]
"""bitwise: the same bits. rounding: the same mathematics in another order. statistical: another draw of the
randomness. What changes the model on purpose is a recipe field, never a plan field."""

NUMERIC_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ALLOW_TF32_CUBLAS_OVERRIDE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables that change the numeric format, which belongs to the recipe."""
OF_PIECES = ("split", "fused")
"""Values of `attention` that take the pieces of packed rows, and have no mask. They can be recorded."""


def _field(
    default: Any,
    claim: Claim,
    description: str,
    *,
    with_dropout: Claim | None = None,
    needs: str | None = None,
    values_need: Mapping[str, str] | None = None,
    same_bits: Sequence[str] = (),
    **limits: Any,
) -> Any:
    """`needs` is what a task must have for the field, `values_need` for some of its values; between the values in
    `same_bits` the claim is bitwise."""
    assert {needs, *(values_need or {}).values()} <= {None, *NEEDS}, (needs, values_need)
    extra: dict[str, Any] = {"claim": claim, "claim_with_dropout": with_dropout or claim}
    extra |= {"needs": needs, "values_need": dict(values_need or {}), "same_bits": list(same_bits)}
    extra |= limits.pop("json_schema_extra", {})
    return Field(default, description=description, json_schema_extra=extra, **limits)


class Plan(Strict):
    """The plain plan is the default: nothing fused, nothing shared; a recipe's `plain` says how it goes through a
    step."""

    # How a step is cut into micro-batches and rows
    share_images: bool = _field(
        False,
        "rounding",
        "Compute each image once for all of its questions in a step. With dropout one mask serves the prefix of all "
        "questions of an image.",
        with_dropout="statistical",
        needs="shared prefixes",
    )
    share_text: bool = _field(
        False,
        "rounding",
        "Where share_images is true: share what an image's questions have in common after it, such as a template, too.",
        with_dropout="statistical",
        needs="shared prefixes",
    )
    packing: bool = _field(
        False, "rounding", "Put a micro-batch into one row instead of padded rows.", needs="token rows"
    )
    token_budget: int = _field(
        8192,
        "rounding",
        "Most tokens in a micro-batch, padding counted. A larger question runs alone.",
        needs="token rows",
        ge=1,
        **COUNTED,
    )
    max_questions: int | None = _field(
        1,
        "rounding",
        "Most questions in a micro-batch; null leaves it to the budget.",
        needs="token rows",
        ge=1,
        **COUNTED,
    )
    pad_to_multiple: int = _field(
        1,
        "rounding",
        "Row lengths are rounded up to a multiple of this.",
        needs="token rows",
        ge=1,
        **at_most(8192, "every row, however short, is padded to that many tokens"),
    )
    micro_batch: int | None = _field(
        None,
        "rounding",
        "Most {sample}s in a micro-batch; null takes the whole step at once.",
        needs="equal samples",
        ge=1,
        **COUNTED,
    )

    # What is computed how
    checkpointing: Literal["none", "selective", "full"] = _field(
        "none",
        "rounding",
        "Recompute decoder layers in the backward pass instead of keeping their activations. full: keep each layer's "
        "input. selective: keep attention and what it adds too, and recompute the matmuls before it and the MLP.",
        needs="decoder layers",
    )
    activation_budget: float = _field(
        1.0,
        "rounding",
        "The share of their activations that compiled decoder layers keep for the backward pass: they recompute what "
        "is cheapest for its bytes. 1 keeps what torch.compile keeps by itself.",
        needs="decoder layers",
        ge=0,
        le=1,
    )
    compile: Literal["none", "layers", "auto"] = _field(
        "none",
        "rounding",
        "torch.compile for the model's layers. auto: as long as it works and each size of batch gives what eager gives "
        "when it is first met.",
        needs="compiled layers",
        values_need={"auto": "checked compile"},
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = _field(
        "default", "rounding", "torch.compile's mode.", needs="checked compile"
    )
    attention: Literal["auto", "sdpa", "flex", "split", "fused"] = _field(
        "auto",
        "rounding",
        "Kernel where questions share a prefix or a row. sdpa: a dense mask. flex: a block mask, GPU only. split: a "
        "few variable-length calls merged, for packed rows; flash attention on a GPU. fused: the same in one pass, as "
        "Triton kernels. auto: the best of the others that is there.",
        needs="token rows",
    )
    keep_features: bool = _field(
        False,
        "rounding",
        "Keep the frozen vision tower's output in device memory that training leaves free, of as many images as there "
        "is room for: an image that comes again is not computed again.",
        needs="image cache",
    )
    embeddings_on: Literal["device", "host"] = _field(
        "device",
        "bitwise",
        "Where the table of token embeddings lies. host: in page-locked memory of the host, from which a GPU reads the "
        "rows of its tokens; for models that do not train it and whose head has weights of its own.",
        needs="decoder layers",
    )
    label_only_logits: bool = _field(
        False,
        "rounding",
        "Logits only at the positions that have a target, and in training the last layer's MLP too, if "
        "nothing else reads what it gives.",
        needs="token rows",
    )
    lora_kernel: Literal["plain", "triton"] = _field(
        "plain",
        "rounding",
        "LoRA's small matmuls with their dropout: in plain PyTorch, or as Triton kernels that compute layers with the "
        "same input together.",
        needs="decoder layers",
    )
    level_kernel: Literal["auto", "plain", "fused"] = _field(
        "plain",
        "rounding",
        "Vision-BDH's levels in plain PyTorch or as fused Triton kernels. auto: the best that is there.",
        needs="fused levels",
    )
    cuda_graphs: bool = _field(
        False,
        "rounding",
        "Record a micro-batch's kernels once and replay them, on a GPU. Where micro-batches differ in size, they are "
        "padded to few sizes, and large ones, whose kernels take longer than their launches, are launched.",
        needs="recorded steps",
    )
    optimizer_impl: Literal["loop", "foreach", "fused"] = _field(
        "loop", "rounding", "AdamW one tensor at a time, over lists of tensors, or as one kernel."
    )

    # How data reaches the device
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "rounding", "Where the model runs.")
    workers: int = _field(
        0,
        "bitwise",
        "Processes that prepare data ahead; 0 prepares it in the training process.",
        ge=0,
        **at_most(256, "each is a process with memory of its own"),
    )
    prefetch: int = _field(
        2,
        "bitwise",
        "Steps each worker prepares ahead.",
        ge=1,
        **at_most(64, "all of them are held in memory"),
    )
    pin_memory: bool = _field(False, "bitwise", "Page-locked host memory and copies that do not block, on a GPU.")
    images_on: Literal["auto", "host", "device"] = _field(
        "host",
        "bitwise",
        "Where images are prepared. host: on the CPU, by the workers. device: all of them as bytes in device memory, "
        "and augmented there. auto: on the device where they fit.",
        needs="images in memory",
    )
    cache: Literal["none", "pixels", "features", "auto"] = _field(
        "none",
        "rounding",
        "Keep what images become on disk, each content once. pixels: decoded and resized. features: the frozen vision "
        "tower's output. What is missing is made and kept on the way. auto: what `sameday cache` measured to be faster "
        "here, where it is complete.",
        needs="image cache",
        same_bits=("none", "pixels"),
    )
    cache_dir: str = _field(
        "sameday-cache",
        "bitwise",
        "Folder of the cache, relative to the recipe's folder; several runs may share it.",
        needs="image cache",
    )
    environment: dict[str, str] = _field(
        {},
        "rounding",
        "Environment variables, set before torch is loaded. Those that change the numeric format are refused.",
    )
    deterministic: bool = _field(False, "rounding", "Only kernels that give the same bits each time.")

    # How often to look
    log_steps: int = _field(10, "bitwise", "A line every so many steps; a record is kept of each.", ge=1, **STEPS)
    eval_steps: int | Literal["epoch"] | None = _field(
        "epoch", "bitwise", "Validate every so many steps, at each epoch's end, or only at the end (null)."
    )
    eval_token_budget: int | None = _field(
        None,
        "rounding",
        "Most tokens in an evaluation micro-batch; null takes token_budget.",
        needs="token rows",
        ge=1,
        **COUNTED,
    )
    eval_batch: int | None = _field(
        None,
        "rounding",
        "Most {sample}s in an evaluation micro-batch; null takes as many as training has.",
        needs="equal samples",
        ge=1,
        **COUNTED,
    )
    save_steps: int | Literal["epoch"] = _field("epoch", "bitwise", "Save every so many steps or at each epoch's end.")
    save_total_limit: int | None = _field(
        3, "bitwise", "Newest checkpoints to keep; the best one is kept besides. null keeps all.", ge=1, **STEPS
    )

    track: Literal["none", "wandb", "mlflow", "trackio"] = _field(
        "none",
        "bitwise",
        "A tracker of experiments that gets the metrics too, every log_steps steps. It never stops a run: "
        "metrics.jsonl has every record.",
    )

    _every = field_validator("eval_steps", "save_steps")(steps_or_epoch)

    @field_validator("environment")
    @classmethod
    def _can_be_set(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text or re.search("[\ud800-\udfff]", name + text):
                raise ValueError(
                    f"{name!r}: {text!r} is no environment variable; a name has at least one letter and no =, and "
                    "neither has a NUL or half of a surrogate pair"
                )
            if name in NUMERIC_VARIABLES:
                raise ValueError(f"{name} changes the numeric format: set recipe.precision instead")
        return value


def changed(before: Plan, after: Plan, dropout: bool) -> dict[str, tuple[Any, Any, Claim]]:
    """Every field in which two plans differ: both values and the claim."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in Plan.model_fields}
    known = claims(dropout)
    exact = {name: all(value in _extra(name)["same_bits"] for value in pair) for name, pair in pairs.items()}
    return {
        name: (*pair, "bitwise" if exact[name] else known[name]) for name, pair in pairs.items() if pair[0] != pair[1]
    }


def claims(dropout: bool = False) -> dict[str, Claim]:
    """Every plan field with its claim, for a recipe without or with dropout."""
    return {name: _extra(name)["claim_with_dropout" if dropout else "claim"] for name in Plan.model_fields}


def fields_of(recipe: Recipe | type[Recipe]) -> list[str]:
    """The plan fields that a recipe's task can follow."""
    return [name for name in Plan.model_fields if _extra(name)["needs"] in (None, *recipe.has)]


def description(name: str, recipe: Recipe | type[Recipe]) -> str:
    """What a field does, in the words of a recipe's task."""
    return (Plan.model_fields[name].description or "").replace("{sample}", recipe.sample)


def foreign(plan: Plan, recipe: Recipe | type[Recipe]) -> dict[str, str]:
    """The fields whose values a recipe's task cannot follow, each with the sentence that says why: a setting that is
    read by nothing would look as if it had been tried."""
    problems = {}
    for name, field in Plan.model_fields.items():
        extra, value = _extra(name), getattr(plan, name)
        lacking = extra["needs"] not in (None, *recipe.has)
        if lacking and value != field.get_default(call_default_factory=True):
            problems[name] = (
                f"it is for {NEEDS[extra['needs']]}, which {recipe.task_words()} does not have: leave it out"
            )
        need = extra["values_need"].get(value) if isinstance(value, str) else None
        if need is not None and not lacking and need not in recipe.has:
            rest = [
                each for each in get_args(field.annotation) if extra["values_need"].get(each) in (None, *recipe.has)
            ]
            problems[name] = (
                f"that is for {NEEDS[need]}, which {recipe.task_words()} does not have; allowed: "
                f"{', '.join(map(repr, rest))}"
            )
    return problems


def _extra(name: str) -> dict[str, Any]:
    extra = Plan.model_fields[name].json_schema_extra
    assert isinstance(extra, dict) and "claim" in extra, f"plan field {name} has no claim"
    return dict(extra)
