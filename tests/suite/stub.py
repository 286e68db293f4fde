"""A task that trains nothing: it notes when it was where, and ends as its recipe says. Scenarios about who waits for
whom take it in place of a training."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from sameday.spec.recipe import Recipe, Strict
from sameday.tasks.base import Say, Task
from sameday.tasks.setup import Audited, TaskSetup


class Nothing(Strict):
    train: str = "nothing"


class StubRecipe(Recipe):
    task: Literal["stub"] = "stub"
    data: Nothing = Nothing()
    seconds: float = Field(0.0, description="How long it takes.")
    file: str | None = Field(None, description="It fails while this is not there.")


class StubSetup(TaskSetup):
    recipe_type = StubRecipe
    recipe: StubRecipe

    def audit(self, say: Say, splits: Sequence[str] = (), few: Mapping[str, int] | None = None) -> Audited:
        began = time.time()
        say(f"this is {self.recipe.name}")
        time.sleep(self.recipe.seconds)
        lacks = self.recipe.file is not None and not (self.home / self.recipe.file).exists()
        if lacks:
            print("a line of the output before it", flush=True)
            print(f"the file {self.recipe.file} is not there", file=sys.stderr)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        record = {"name": self.recipe.name, "began": began, "ended": time.time(), "gpus": gpus, "failed": lacks}
        with (self.home / "records.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        sys.exit(7 if lacks else 0)

    def load(self, plan: Any, device: Any, splits: Any) -> Task:
        raise NotImplementedError


def write_stub(home: Path) -> Path:
    """A package with an entry point, as pip would install it: the folder to put before those of modules."""
    site, about = home / "site", home / "site" / "sameday_stub-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "stub.py").write_text(Path(__file__).read_text())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sameday-stub\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sameday.tasks]\nstub = stub:StubSetup\n")
    (home / "stub.yaml").write_text("task: stub\n")
    return site
