"""A task that this package does not know is trained, resumed, verified, profiled, tuned and reported as its own are."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sameday.record.folder import read_metrics
from sameday.spec.errors import EXIT_OUT_OF_MEMORY
from sameday.spec.load import load_plan
from sameday.tasks.setup import TaskSetup

RECIPE = """\
task: tabular
data: {train: train.jsonl, val: val.jsonl}
effective_batch: 8
learning_rate: 0.01
num_epochs: 2
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with an entry point, as pip would install it, and a table to learn from."""
    home = tmp_path_factory.mktemp("tabular")
    site, about = home / "site", home / "site" / "sameday_tabular-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("tabular.py"), site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sameday-tabular\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sameday.tasks]\ntabular = tabular:TabularSetup\n")
    draw = random.Random(0)
    for split, count in (("train", 44), ("val", 10)):
        rows = [[draw.gauss(0, 1) for _ in range(4)] for _ in range(count)]
        lines = [json.dumps({"x": row, "y": row[0] * row[1] - row[2]}) for row in rows]
        (home / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (home / "recipe.yaml").write_text(RECIPE)
    return home


def sameday(home: Path, *words: str, code: int = 0) -> str:
    return run(home, "-m", "sameday", *words, code=code)


def python(home: Path, script: str) -> str:
    return run(home, "-c", script)


def run(home: Path, *words: str, code: int = 0) -> str:
    path = os.pathsep.join([str(home / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_it_trains_and_resumes_to_the_same_bits(home: Path) -> None:
    sameday(home, "train", "recipe.yaml", "--out", "whole")
    said = sameday(home, "train", "recipe.yaml", "--out", "parts", "--stop-after", "7", code=75)
    assert "asked to stop: step 7 of 12 is saved" in said
    assert "resumed from step-000007" in sameday(home, "train", "recipe.yaml", "--out", "parts")
    weights = [(home / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert weights[0] == weights[1]
    losses = [record["loss"] for record in read_metrics(home / "whole" / "metrics.jsonl") if "split" in record]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert "loss" in sameday(home, "eval", "whole", "--split", "val")
    assert "whole: the recipe has no data.test" in sameday(home, "eval", "whole", code=2)


def test_it_is_loaded_from_python(home: Path) -> None:
    sameday(home, "train", "recipe.yaml", "--out", "used")
    said = python(home, "import sameday; print(sameday.load('used').model)")
    assert "in_features=4, out_features=8" in said


def test_without_memory_to_evaluate_its_steps_are_kept(home: Path) -> None:
    """A task need not look for it by itself."""
    script = """
import sameday, tabular, torch

def evaluate(*_):
    raise torch.OutOfMemoryError("no room")

tabular.TabularTask.evaluate = evaluate
for call in (lambda: sameday.train("recipe.yaml", out="short"), lambda: sameday.evaluate("whole", "val")):
    try:
        call()
    except sameday.RunStopped as stopped:
        print(stopped.code, stopped)
"""
    sameday(home, "train", "recipe.yaml", "--out", "whole")
    words = (
        f"{EXIT_OUT_OF_MEMORY} out of memory in evaluation. What is left to try: a smaller model or smaller samples."
    )
    assert python(home, script).splitlines().count(words) == 2
    assert list((home / "short" / "checkpoints").iterdir()), "the steps before it are lost"


def test_ranks_that_start_apart_do_not_train(home: Path) -> None:
    """Such as those of a task whose weights are drawn without a seed."""
    (home / "apart.py").write_text("""
import os, tabular, torch
from sameday.cli import main

made = tabular.TabularTask.__init__

def apart(self, *given):
    made(self, *given)
    self.model[2].bias.data += float(os.environ["RANK"])

tabular.TabularTask.__init__ = apart
main()
""")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--out", "apart")
    said = run(home, *ranks, "apart.py", *words, code=1)
    assert "ranks start from different weights: 2.bias; a task draws its weights from recipe.seed alone" in said
    assert not (home / "apart" / "metrics.jsonl").exists()


def test_a_recipe_may_have_its_data_under_another_name() -> None:
    setup: Any = SimpleNamespace(recipe=SimpleNamespace(task="fit", table="rows.csv"))
    assert TaskSetup.lacks(setup, "val") == "the recipe has no data.val"


def test_two_plans_are_compared(home: Path) -> None:
    (home / "pieces.yaml").write_text("micro_batch: 3\noptimizer_impl: foreach\n")
    said = sameday(home, "verify", "recipe.yaml", "--plan", "pieces.yaml", "--steps", "4", "--json", "verify.json")
    assert json.loads((home / "verify.json").read_text())["verdict"] == "rounding", said
    assert "equal: samples, row, rates" in said and "no rate of false alarms was measured for task tabular" in said


def test_its_steps_are_profiled_with_a_floor(home: Path) -> None:
    sameday(home, "profile", "recipe.yaml", "--steps", "3", "--warmup", "1", "--json", "profile.json")
    profiled = json.loads((home / "profile.json").read_text())
    # Two layers, 4 by 8 and 8 by 1: forward, and backward without the input's gradient.
    each = 2 * (4 * 8) * 2 + 2 * 8 * 3
    rate = profiled["floor"]["peaks"]["flop_per_second"]
    assert profiled["floor"]["executed"] * rate == pytest.approx(8 * each)
    assert sum(profiled["phases"].values()) == pytest.approx(profiled["seconds"]["median"], rel=2)


def test_the_tuner_tries_its_choices_and_no_one_elses(home: Path) -> None:
    # A GPU is started for each trial.
    minutes = "1" if torch.cuda.is_available() else "0.4"
    said = sameday(home, "tune", "recipe.yaml", "--minutes", minutes, "-o", "tuned.yaml", "--json", "tune.json")
    assert "micro_batch 2" in said
    assert not {"share_images", "level_kernel", "token_budget"} & set(said.split())
    sys.path.insert(0, str(home / "site"))
    try:
        from tabular import TabularRecipe
    finally:
        sys.path.remove(str(home / "site"))
    load_plan(home / "tuned.yaml", (), TabularRecipe)


def test_the_report_has_its_words(home: Path) -> None:
    sameday(home, "train", "recipe.yaml", "--out", "reported")
    sameday(home, "report", "reported", "-o", "report.html")
    page = (home / "report.html").read_text()
    assert "A perceptron of 8 units learns numbers." in page and "Rows of train.jsonl." in page


def test_plan_fields_that_it_cannot_follow_are_refused(home: Path) -> None:
    said = sameday(home, "train", "recipe.yaml", "--set", "plan.share_images=true", code=2)
    assert "share_images is true; it is for samples that begin with the same image, which task tabular does not" in said
    said = sameday(home, "train", "recipe.yaml", "--set", "plan.compile=layers", code=2)
    assert "it is for a model whose layers can be compiled, which task tabular does not have: leave it out" in said
    said = sameday(home, "train", "recipe.yaml", "--set", "recipe.precision=bf16", code=2)
    assert "precision is 'bf16'; must be 'float32'" in said
    assert "must be one of 'vqa', 'cot', 'classify', 'tabular'" in sameday(
        home, "train", "recipe.yaml", "--set", "recipe.task=table", code=2
    )
    assert "task tabular has no use for a cache" in sameday(home, "cache", "recipe.yaml", "--kind", "pixels", code=2)
