"""The registry of claims: for every plan field of a task the values under which its claim is put to the test, and the
plans that try every pair of them. A field without a line here fails a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sameday.hardware.choose import attention_kernel
from sameday.hardware.choose_classify import check_plan, interpreted
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan, fields_of
from sameday.verify.covering import pairwise

Values = dict[str, tuple[Any, ...]]

CHECKS: dict[str, Callable[[Plan, str, str, bool], object]] = {
    "vqa": attention_kernel,
    "classify": check_plan,
}
"""For each task what refuses, by BadInput, a plan that cannot run: of plan, device, precision, and whether Triton is
there."""


def trial_values(task: str, device: str, size: int) -> Values:
    """The plain value first. `size` is about how large a sample is, in what the task's budgets count: they are meant to
    cut a step into several micro-batches. A field that needs a GPU has one value where there is none."""
    own = {"vqa": _vqa, "classify": _classify}[task]
    known = _everywhere(device) | own(device, size)
    return {name: known[name] for name in fields_of(task)}


def _everywhere(device: str) -> Values:
    return {
        "compile": ("none", "layers"),
        "optimizer_impl": ("loop", "foreach", "fused"),
        "device": ("auto", device),
        "workers": (0, 1),
        "prefetch": (2, 1),
        "keep_workers": (False, True),
        "pin_memory": (False, True),
        "environment": ({}, {"OMP_NUM_THREADS": "1"}),
        "deterministic": (False, True),
        "log_steps": (10, 1),
        "eval_steps": ("epoch", 2, None),
        "save_steps": ("epoch", 2),
        "save_total_limit": (3, 1, None),
    }


def _vqa(device: str, size: int) -> Values:
    return {
        "share_images": (False, True),
        "packing": (False, True),
        "token_budget": (8192, 2 * size, 5 * size),
        "max_questions": (1, 4, None),
        "pad_to_multiple": (1, 16),
        "checkpointing": ("none", "full"),
        "attention": ("auto", "sdpa", "split", *(("flex",) if device == "cuda" else ())),
        "label_only_logits": (False, True),
        "cache": ("none", "pixels", "features"),
        "cache_dir": ("sameday-cache", "sameday-cache/other"),
        "eval_token_budget": (None, 3 * size),
    }


def _classify(device: str, size: int) -> Values:
    cuda = device == "cuda"
    triton = cuda or interpreted()
    return {
        "micro_batch": (None, 5 * size, size),
        "compile": ("none", "layers", "auto"),
        "compile_mode": ("default", *(("reduce-overhead", "max-autotune") if cuda else ())),
        "compile_backend": ("inductor", "aot_eager"),
        "level_kernel": ("plain", *(("fused", "auto") if triton else ())),
        "rotary": ("computed", "cached"),
        "channels_last": (False, True),
        "cuda_graphs": (False, *((True,) if cuda else ())),
        "cudnn_benchmark": (False, True),
        "images_on": ("host", "device", "auto"),
        "eval_batch": (None, 3 * size),
    }


def trial_plans(task: str, device: str, size: int, precision: str) -> list[Plan]:
    """Every pair of values that can stand together, in as few plans as are found."""
    check = CHECKS[task]

    def can_run(row: dict[str, Any]) -> bool:
        try:
            check(Plan(**row), device, precision, device == "cuda")
        except BadInput:
            return False
        return True

    return [Plan(**row) for row in pairwise(trial_values(task, device, size), can_run)]
