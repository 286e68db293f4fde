"""The registry of claims: for every plan field the values under which its claim is put to the test, and the plans that
try every pair of them. A field without a line here fails a test."""

from __future__ import annotations

from typing import Any

from sameday.hardware.choose import attention_kernel
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.verify.covering import pairwise


def trial_values(device: str, question: int) -> dict[str, tuple[Any, ...]]:
    """The plain value first. `question` is about how many tokens a question has: budgets are meant to cut groups of
    questions, and rows of groups."""
    cuda = device == "cuda"
    return {
        "share_images": (False, True),
        "packing": (False, True),
        "token_budget": (8192, 2 * question, 5 * question),
        "max_questions": (1, 4, None),
        "pad_to_multiple": (1, 16),
        "checkpointing": ("none", "full"),
        "compile": ("none", "layers"),
        "attention": ("auto", "sdpa", "split", *(("flex",) if cuda else ())),
        "label_only_logits": (False, True),
        "optimizer_impl": ("loop", "foreach", "fused"),
        "device": ("auto", device),
        "workers": (0, 1),
        "prefetch": (2, 1),
        "pin_memory": (False, True),
        "environment": ({}, {"OMP_NUM_THREADS": "1"}),
        "deterministic": (False, True),
        "log_steps": (10, 1),
        "eval_steps": ("epoch", 2, None),
        "eval_token_budget": (None, 3 * question),
        "save_steps": ("epoch", 2),
        "save_total_limit": (3, 1, None),
    }


def trial_plans(device: str, question: int, precision: str) -> list[Plan]:
    """Every pair of values that can stand together, in as few plans as are found."""

    def can_run(row: dict[str, Any]) -> bool:
        try:
            attention_kernel(Plan(**row), device, precision, triton=device == "cuda")
        except BadInput:
            return False
        return True

    return [Plan(**row) for row in pairwise(trial_values(device, question), can_run)]
