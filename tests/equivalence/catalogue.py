"""What a planted fault is. It is planted on the instances of one arm, which go with it, or on a name of a module, for
as long as the arm runs. Its function's name is its name, and its docstring says what it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sameday.verify.arm import Plant

SHARED = {"share_images": True, "max_questions": None, "packing": True, "label_only_logits": True}
"""All of a step's images and questions in one row."""
SPLIT = SHARED | {"attention": "split"}
TEXT = SHARED | {"share_text": True}
"""And what questions that are asked in one template have in common."""
UNEVEN = {"share_images": True, "max_questions": None, "token_budget": 120, "optimizer_impl": "foreach"}
"""Several micro-batches of different sizes to a step."""
PADDED = {"max_questions": 3, "optimizer_impl": "fused"}
RECOMPUTED = {"max_questions": 3, "checkpointing": "full"}
"""Plans that share no prefix draw the plain plan's masks: they are compared with dropout on."""
WORKER = SHARED | {"workers": 1}

NUMBERS = ("gradient", "update", "validation", "training", "after the resume")
"""Places where a fault shows by how far numbers are apart. All other places are compared exactly."""


@dataclass(frozen=True)
class Fault:
    """`place` has to be in the words by which the first difference names its place. `only_float32`: in bf16 it would be
    no fault. `task` is the one it is planted in, or `templates`, where questions are asked in templates."""

    name: str
    sentence: str
    where: str
    place: str
    plan: dict[str, Any]
    plant: Plant
    ranks: int = 1
    only_float32: bool = False
    task: str = "vqa"

    @property
    def structural(self) -> bool:
        return self.place not in NUMBERS


FAULTS: dict[str, Fault] = {}


def planted(plan: dict[str, Any], place: str, where: str, **more: Any) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, " ".join(inspect.getdoc(plant).split()), where, place, plan, plant, **more)
        return plant

    return keep
