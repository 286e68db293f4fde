"""Values of plan fields that are tried for a recipe of questions about images, by tuner, profiler and verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sameday.spec.plan import Plan, fields_of
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.setup import Choice

if TYPE_CHECKING:
    from sameday.hardware.machine import Machine

SHARING: dict[str, Any] = {"share_images": True, "share_text": True, "packing": True, "max_questions": None}
TUNED_BUDGETS = tuple(2**n for n in range(8, 18))
"""Tokens of a micro-batch that the tuner tries."""
USUAL_BUDGET = 8192
"""Tokens of a micro-batch that keep a GPU busy."""
CPU_BUDGETS = (256, 512, 1024, 2048)
"""Tokens of a micro-batch that a CPU may be told to try. It has only dense masks, which grow with the square of a row:
the last is what would be chosen for it."""


def choices(recipe: VlmRecipe, machine: Machine, cannot: frozenset[tuple[str, Any]]) -> list[Choice]:
    """What the tuner tries, without what `cannot` run."""
    compiles = machine.device == "cuda" and machine.triton
    fused = () if ("attention", "fused") in cannot else ("fused",)
    kernels = ("sdpa", "split", *(("flex", *fused) if compiles else ()))
    budgets = tuple({"token_budget": tokens, "max_questions": None} for tokens in TUNED_BUDGETS)
    tried = [
        Choice("share_images", (SHARING,)),
        Choice("label_only_logits", ({"label_only_logits": True},)),
        Choice("checkpointing", ({"checkpointing": "none"}, {"checkpointing": "selective"})),
        Choice("token_budget", budgets, climb=True, cuts=True),
    ]
    if machine.device == "cuda" and ("keep_features", True) not in cannot:
        tried.append(Choice("keep_features", ({"keep_features": True},)))
    if compiles:
        padded = tuple({"compile": "layers", "pad_to_multiple": multiple} for multiple in (32, 128))
        tried.append(Choice("compile", padded))
    if compiles and ("lora_kernel", "triton") not in cannot:
        tried.append(Choice("lora_kernel", ({"lora_kernel": "triton"},)))
    tried.append(Choice("attention", tuple({"attention": kernel} for kernel in kernels)))
    if "cuda_graphs" in fields_of(recipe) and ("cuda_graphs", True) not in cannot:
        recorded = tuple({"cuda_graphs": True, "attention": kernel} for kernel in ("split", *fused))
        tried.append(Choice("cuda_graphs", recorded))
    return tried


def cuts(device: str, plan: Plan) -> list[dict[str, Any]]:
    """Those that share images and text are for plans that do not."""
    if device == "cpu":
        other = [{"token_budget": tokens, "max_questions": None} for tokens in CPU_BUDGETS]
        shared = [SHARING | {"token_budget": tokens} for tokens in CPU_BUDGETS]
    else:
        more = plan.token_budget if plan.max_questions is not None else 4 * plan.token_budget
        other, shared = [{"token_budget": max(USUAL_BUDGET, more), "max_questions": None}], [SHARING]
    return [*other, *(() if plan.share_images and plan.share_text else shared)]


def trial_values(device: str, size: int) -> dict[str, tuple[Any, ...]]:
    """Under which each field's claim is tested, for questions of about `size` tokens."""
    return {
        "share_images": (False, True),
        "share_text": (False, True),
        "packing": (False, True),
        "token_budget": (8192, 2 * size, 5 * size),
        "max_questions": (1, 4, None),
        "pad_to_multiple": (1, 16),
        "checkpointing": ("none", "selective", "full"),
        "activation_budget": (1.0, 0.5),
        "attention": ("auto", "sdpa", "split", *(("flex", "fused") if device == "cuda" else ())),
        "keep_features": (False, True),
        "embeddings_on": ("device", *(("host",) if device == "cuda" else ())),
        "label_only_logits": (False, True),
        "lora_kernel": ("plain", *(("triton",) if device == "cuda" else ())),
        "cuda_graphs": (False, *((True,) if device == "cuda" else ())),
        "cache": ("none", "pixels", "features"),
        "cache_dir": ("sameday-cache", "sameday-cache/other"),
        "eval_token_budget": (None, 3 * size),
    }
