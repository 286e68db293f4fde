"""The demo: draw a question set, build a tiny vision-language model, train it under two plans with the commands a user
would type, put losses, speed and exact match side by side, and write the report of both runs."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sameday.demo import small
from sameday.record.folder import RunFolder
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_OK, EXIT_STOPPED
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.spec.words import tell

COMPARED_STEPS = 12
STEPS = 300
RECIPE: dict[str, Any] = {
    **small.RECIPE,
    "name": "demo",
    "model": "model",
    "data": {"train": "train.jsonl", "val": "val.jsonl"},
    "max_steps": STEPS,
}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {**small.PLAN, "log_steps": 4, "save_steps": 100},
    "shared": {**small.SHARED, "log_steps": 20, "save_steps": 100},
}


def show(out: Path) -> None:
    began = time.perf_counter()
    for name in PLANS:  # what an earlier demo left
        shutil.rmtree(out / f"{name}_run", ignore_errors=True)
    baseline = _prepare(out)
    tell(f"\n1. One question at a time, the first {COMPARED_STEPS} steps")
    _train(out, "plain", "--stop-after", str(COMPARED_STEPS), expected=EXIT_STOPPED)
    tell("\n2. The same recipe, each image computed once for all of its questions")
    _train(out, "shared", expected=EXIT_OK)
    _compare(out, baseline)
    tell("\n3. All of it on one page, which opens in any browser")
    _type("report", *(out / f"{name}_run" for name in PLANS), "-o", out / "report.html", expected=EXIT_OK)
    tell(f"\nTook {time.perf_counter() - began:.0f} s. Recipe, plans, runs and report.html are in {out}.")


def _prepare(out: Path) -> float:
    """Data, model, recipe and plans; gives the exact match of never looking at the image."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import transformers

    from sameday.demo.scenes import draw, majority_baseline
    from sameday.demo.tiny import write_model

    transformers.utils.logging.disable_progress_bar()
    draw(out, train_images=300, val_images=40, seed=0, size=64)
    rows, val = ([json.loads(line) for line in (out / f"{name}.jsonl").open()] for name in ("train", "val"))
    two_layers = {"num_hidden_layers": 2}
    write_model(out / "model", [f"{r['question']} {r['answer']}" for r in rows], seed=0, text=two_layers)
    (out / "recipe.yaml").write_text(dump_yaml(recipe_from(RECIPE)))
    for name, fields in PLANS.items():
        (out / f"{name}_plan.yaml").write_text(dump_yaml(Plan(**fields)))
    tell(f"{len(rows)} questions about {len({r['image'] for r in rows})} drawn scenes, for example:")
    for row in rows[:3]:
        tell(f"  {row['image']}  {row['question']}  {row['answer']}")
    return majority_baseline(rows, val)


def _train(out: Path, plan: str, *more: str, expected: int) -> None:
    files = (out / "recipe.yaml", "--plan", out / f"{plan}_plan.yaml", "--out", out / f"{plan}_run")
    _type("train", *files, *more, expected=expected)


def _type(*words: str | Path, expected: int) -> None:
    """One command, as a user would type it."""
    arguments = [str(word) for word in words]
    tell("   sameday " + " ".join(arguments))
    done = subprocess.run([sys.executable, "-m", "sameday", *arguments])
    if done.returncode != expected:
        sys.exit(done.returncode or 1)


def _compare(out: Path, baseline: float) -> None:
    plain, shared = (RunFolder.read(out / f"{name}_run").metrics for name in PLANS)
    plain, shared = ([r for r in records if "split" not in r] for records in (plain, shared))
    tell(f"\n{'step':>6} {'plain loss':>12} {'shared loss':>12} {'difference':>12}")
    for a, b in zip(plain, shared[: len(plain)], strict=True):
        tell(f"{a['step']:6d} {a['loss']:12.6f} {b['loss']:12.6f} {abs(a['loss'] - b['loss']):12.1e}")
    speeds = {name: _speed(records) for name, records in (("plain", plain), ("shared", shared))}
    tell("\nsamples/s (median over steps, quartiles)")
    for name, (low, middle, high) in speeds.items():
        tell(f"  {name:8s}{middle:8.1f}  ({low:.1f} to {high:.1f})")
    tell(f"  shared is {speeds['shared'][1] / speeds['plain'][1]:.1f} times faster on this machine, order by_image")
    scores = json.loads((out / "shared_run" / "eval.json").read_text())["val"]
    gain = 100 * (scores["exact_match"] - baseline)
    tell(f"\nexact match on {scores['samples']} new questions after {STEPS} steps: {100 * scores['exact_match']:.1f}%")
    tell(f"always giving each question's most frequent answer:  {100 * baseline:.1f}%  ({gain:+.1f} points)")


def _speed(records: list[dict[str, Any]]) -> tuple[float, float, float]:
    rates = [r["samples"] / r["seconds"] for r in records[1:]]
    low, middle, high = statistics.quantiles(rates, n=4)
    return low, middle, high
