"""Fields of recipes and plans for a tiny model of drawn scenes: from random weights to one that sees, in minutes."""

from __future__ import annotations

from typing import Any

RECIPE: dict[str, Any] = {
    "train": "all",  # from random weights there is nothing yet for an adapter to adapt
    "train_vision": True,
    "precision": "float32",
    "order": "by_image",
    "effective_batch": 64,
    "loss_weight": "sample",
    "learning_rate": 3e-3,
    "schedule": "cosine",
    "warmup_ratio": 0.1,
}
PLAN: dict[str, Any] = {
    "environment": {"OMP_NUM_THREADS": "1"},  # at this size several threads spend their time waiting for each other
    "eval_steps": None,
}
SHARED: dict[str, Any] = {
    **PLAN,
    "share_images": True,
    "packing": True,
    "token_budget": 512,
    "max_questions": None,
    "label_only_logits": True,
    "optimizer_impl": "foreach",
}
