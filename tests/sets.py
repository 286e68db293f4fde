"""Small image sets and the recipes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sameday.demo.patterns import write_patterns
from sameday.hardware.machine import detect_machine
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.plan import Plan
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.classify.task import ClassifyTask

TINY = {"kind": "vision_bdh", "levels": 2, "heads": 2, "width": 32, "latents": 2, "patch": 8}
"""17 tokens, 32 latents in each of two heads."""


def write_set(folder: Path, train: int = 40, test: int = 16) -> Path:
    write_patterns(folder / "set", train=train, test=test)
    return folder


def tiny_recipe(**changes: Any) -> ClassifyRecipe:
    fields: dict[str, Any] = {
        "task": "classify",
        "model": TINY,
        "data": {"path": "set", "val": 10},
        "precision": "float32",
        "effective_batch": 8,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "num_epochs": 2,
        "seed": 3,
    }
    return ClassifyRecipe.model_validate(fields | changes)


def make_task(home: Path, recipe: ClassifyRecipe, plan: Plan | None = None, device: str = "cpu") -> ClassifyTask:
    setup = ClassifySetup(recipe, home)
    audited = setup.audit(lambda _: None, ("train", "val", "test"))
    resolved = setup.resolve_auto(plan or Plan(), detect_machine(device))
    return setup.load(resolved.plan, torch.device(device), audited.splits)
