"""A short run of a tiny model, for tests of what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from worlds import make_task, tiny_recipe, write_world

from sameday.commands.launch import train_from_files
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.task import VqaTask

QUICK = {
    "effective_batch": 4,
    "learning_rate": 0.05,
    "max_steps": 4,
    "lora": {"r": 2, "alpha": 4, "dropout": 0.1},
}
PLAN = {"share_images": True, "packing": True, "max_questions": None, "save_steps": 2, "eval_steps": None}


@dataclass
class Finished:
    folder: Path
    model: Path
    recipe: VqaRecipe
    run: Path

    def task(self) -> VqaTask:
        """Our own forward pass, at the recipe's start."""
        task = make_task(self.folder, self.recipe, Plan())
        task.training(False)
        return task


def trained(folder: Path, model: Path, plan: Mapping[str, Any] = PLAN, **changes: Any) -> Finished:
    """`changes` replace recipe fields."""
    write_world(folder, 11, counts=(4, 3), hard=False)
    recipe = tiny_recipe(model, **(QUICK | changes))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    (folder / "plan.yaml").write_text(yaml.safe_dump(dict(plan)))
    train_from_files(folder / "recipe.yaml", folder / "plan.yaml", folder / "run", [])
    return Finished(folder, model, recipe, folder / "run")
