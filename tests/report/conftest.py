"""Real runs of the real command on tiny data, made once. Tests that change one take a copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reported import EVIL, NASTY, Runs
from sets import TINY, write_set
from typed import sameday, write_recipe
from worlds import write_world


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Runs:
    home = write_world(tmp_path_factory.mktemp("reported"), 3, counts=(3, 2), hard=False)
    write_recipe(home, tiny_qwen3, name="asked", max_steps=3, system_prompt=f"be brief {EVIL}")
    good = (home / "train.jsonl").read_text()
    bad = json.dumps({"image": f"{NASTY}.png", "question": EVIL, "answer": "no"})
    (home / "train.jsonl").write_text(f"{good}{bad}\n")
    words = ("train", "recipe.yaml", "--on-bad", "skip", "--out")
    assert sameday(home, *words, NASTY, "--set", "plan.log_steps=2").code == 0
    (home / "plain.yaml").write_text("log_steps: 1\n")
    assert sameday(home, *words, "stopped", "--plan", "plain.yaml", "--stop-after", "1").code == 75
    write_set(home)
    fields: dict[str, Any] = {"task": "classify", "name": "seen", "model": TINY, "precision": "float32"}
    fields |= {"effective_batch": 8, "num_epochs": 2}
    for name, held in (("pictures", 10), ("bare", 0)):
        (home / f"{name}.yaml").write_text(json.dumps(fields | {"data": {"path": "set", "val": held}}))
        assert sameday(home, "train", f"{name}.yaml", "--out", name).code == 0
    return Runs(home, home / NASTY, home / "stopped", home / "pictures", home / "bare")


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    def copy(run: Path) -> Path:
        return Path(shutil.copytree(run, tmp_path / run.name))

    return copy
