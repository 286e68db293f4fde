"""Plan: how a recipe is run. No field here may change the model; each says how strictly it keeps it, and for which
tasks it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from sameday.spec.recipe import Strict

VQA, CLASSIFY = "vqa", "classify"
"""Tasks that have fields of their own here."""

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


def _field(
    default: Any,
    claim: Claim,
    description: str,
    *,
    with_dropout: Claim | None = None,
    task: str | None = None,
    values_for: Mapping[str, str] | None = None,
    same_bits: Sequence[str] = (),
    **limits: Any,
) -> Any:
    """`task` is the one that the field is for, where it is not for all; `values_for` names values that are for one
    task only; between the values in `same_bits` the claim is bitwise."""
    extra: dict[str, Any] = {"claim": claim, "claim_with_dropout": with_dropout or claim}
    extra |= {"task": task, "values_for": dict(values_for or {}), "same_bits": list(same_bits)}
    return Field(default, description=description, json_schema_extra=extra, **limits)


class Plan(Strict):
    """The plain plan is the default: nothing fused, nothing shared, one question at a time or all images of a step."""

    # How a step is cut into micro-batches and rows
    share_images: bool = _field(
        False,
        "rounding",
        "Compute each image once for all of its questions in a step. With dropout one mask serves the prefix of all "
        "questions of an image.",
        with_dropout="statistical",
        task=VQA,
    )
    packing: bool = _field(False, "rounding", "Put a micro-batch into one row instead of padded rows.", task=VQA)
    token_budget: int = _field(
        8192, "rounding", "Most tokens in a micro-batch, padding counted. A larger question runs alone.", task=VQA, ge=1
    )
    max_questions: int | None = _field(
        1, "rounding", "Most questions in a micro-batch; null leaves it to the budget.", task=VQA, ge=1
    )
    pad_to_multiple: int = _field(1, "rounding", "Row lengths are rounded up to a multiple of this.", task=VQA, ge=1)
    micro_batch: int | None = _field(
        None, "rounding", "Most images in a micro-batch; null takes the whole step at once.", task=CLASSIFY, ge=1
    )

    # What is computed how
    checkpointing: Literal["none", "full"] = _field(
        "none",
        "rounding",
        "Recompute each decoder layer in the backward pass instead of keeping its activations.",
        task=VQA,
    )
    compile: Literal["none", "layers", "auto"] = _field(
        "none",
        "rounding",
        "torch.compile for the model's layers. auto, for task classify: as long as it works and each size of batch "
        "gives what eager gives when it is first met.",
        values_for={"auto": CLASSIFY},
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = _field(
        "default", "rounding", "torch.compile's mode.", task=CLASSIFY
    )
    compile_backend: str = _field("inductor", "rounding", "torch.compile's backend.", task=CLASSIFY)
    attention: Literal["auto", "sdpa", "flex", "split"] = _field(
        "auto",
        "rounding",
        "Kernel where questions share a prefix or a row. sdpa: a dense mask. flex: a block mask, GPU only. split: two "
        "variable-length calls merged, for packed rows; flash attention on a GPU. auto: the best that is there.",
        task=VQA,
    )
    label_only_logits: bool = _field(False, "rounding", "Logits only at the positions that have a target.", task=VQA)
    level_kernel: Literal["auto", "plain", "fused"] = _field(
        "plain",
        "rounding",
        "Vision-BDH's levels in plain PyTorch or as fused Triton kernels. auto: the best that is there.",
        task=CLASSIFY,
    )
    rotary: Literal["computed", "cached"] = _field(
        "computed", "bitwise", "Rotary angles at every use, or once for all of them.", task=CLASSIFY
    )
    channels_last: bool = _field(False, "rounding", "Images with their colours side by side in memory.", task=CLASSIFY)
    cuda_graphs: bool = _field(
        False, "rounding", "Record a micro-batch's kernels once and replay them, on a GPU.", task=CLASSIFY
    )
    cudnn_benchmark: bool = _field(False, "rounding", "Let cuDNN try its kernels and take the fastest.", task=CLASSIFY)
    optimizer_impl: Literal["loop", "foreach", "fused"] = _field(
        "loop", "rounding", "AdamW one tensor at a time, over lists of tensors, or as one kernel."
    )

    # How data reaches the device
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "rounding", "Where the model runs.")
    workers: int = _field(0, "bitwise", "Processes that decode images ahead; 0 decodes in the training process.", ge=0)
    prefetch: int = _field(2, "bitwise", "Steps each worker prepares ahead.", ge=1)
    keep_workers: bool = _field(False, "bitwise", "Keep the worker processes of an evaluation for the next one.")
    pin_memory: bool = _field(False, "bitwise", "Page-locked host memory and copies that do not block, on a GPU.")
    images_on: Literal["auto", "host", "device"] = _field(
        "host",
        "bitwise",
        "Where images are prepared. host: on the CPU, by the workers. device: all of them as bytes in device memory, "
        "and augmented there. auto: on the device where they fit.",
        task=CLASSIFY,
    )
    cache: Literal["none", "pixels", "features", "auto"] = _field(
        "none",
        "rounding",
        "Keep what images become on disk, each content once. pixels: decoded and resized. features: the frozen vision "
        "tower's output. What is missing is made and kept on the way. auto: what `sameday cache` measured to be faster "
        "here, where it is complete.",
        task=VQA,
        same_bits=("none", "pixels"),
    )
    cache_dir: str = _field(
        "sameday-cache",
        "bitwise",
        "Folder of the cache, relative to the recipe's folder; several runs may share it.",
        task=VQA,
    )
    environment: dict[str, str] = _field(
        {},
        "rounding",
        "Environment variables, set before torch is loaded. Those that change the numeric format are refused.",
    )
    deterministic: bool = _field(False, "rounding", "Only kernels that give the same bits each time.")

    # How often to look
    log_steps: int = _field(10, "bitwise", "A line every so many steps; a record is kept of each.", ge=1)
    eval_steps: int | Literal["epoch"] | None = _field(
        "epoch", "bitwise", "Validate every so many steps, at each epoch's end, or only at the end (null)."
    )
    eval_token_budget: int | None = _field(
        None, "rounding", "Most tokens in an evaluation micro-batch; null takes token_budget.", task=VQA, ge=1
    )
    eval_batch: int | None = _field(
        None,
        "rounding",
        "Most images in an evaluation micro-batch; null takes as many as training has.",
        task=CLASSIFY,
        ge=1,
    )
    save_steps: int | Literal["epoch"] = _field("epoch", "bitwise", "Save every so many steps or at each epoch's end.")
    save_total_limit: int | None = _field(
        3, "bitwise", "Newest checkpoints to keep; the best one is kept besides. null keeps all.", ge=1
    )

    @field_validator("eval_steps", "save_steps")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"must be at least 1 or 'epoch', not {value}")
        return value

    @field_validator("environment")
    @classmethod
    def _keeps_precision(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
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


def fields_of(task: str) -> list[str]:
    """The plan fields that a task knows."""
    return [name for name in Plan.model_fields if _extra(name)["task"] in (None, task)]


def foreign(plan: Plan, task: str) -> dict[str, str]:
    """The fields whose values a task cannot follow, each with the sentence that says why: a setting that is read by
    nothing would look as if it had been tried."""
    found = {}
    for name, field in Plan.model_fields.items():
        extra, value = _extra(name), getattr(plan, name)
        if extra["task"] not in (None, task) and value != field.get_default(call_default_factory=True):
            found[name] = f"it is for task {extra['task']}, and the recipe's task is {task}: leave it out"
        owner = extra["values_for"].get(value) if isinstance(value, str) else None
        if owner not in (None, task):
            rest = [each for each in get_args(field.annotation) if extra["values_for"].get(each) in (None, task)]
            allowed = ", ".join(map(repr, rest))
            found[name] = f"that is for task {owner}, and the recipe's task is {task}; allowed: {allowed}"
    return found


def _extra(name: str) -> dict[str, Any]:
    extra = Plan.model_fields[name].json_schema_extra
    assert isinstance(extra, dict) and "claim" in extra, f"plan field {name} has no claim"
    return dict(extra)
