"""What the experiments of `examples/scenes` start from: drawn scenes with questions in three stages, and a tiny model
that has learned to see such scenes, but has never met these questions. A few minutes on a CPU."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sameday.demo import small
from sameday.demo.scenes import draw, majority_baseline, notes
from sameday.spec.document import dump_yaml
from sameday.spec.load import recipe_from
from sameday.spec.plan import Plan
from sameday.spec.words import tell

SIZE = 64
RECIPE: dict[str, Any] = {
    **small.RECIPE,
    "name": "base",
    "model": "random",
    "data": {"train": "notes/train.jsonl", "val": "notes/val.jsonl", "image_root": "notes"},
    "max_steps": 800,
}
PLAN: dict[str, Any] = {**small.SHARED, "device": "cpu", "log_steps": 50, "save_steps": 250}


def prepare(out: Path, steps: int | None = None) -> float:
    """Data, `base/` and a `plan.yaml` for such small models, in `out`; a base that is there is kept. Gives the exact
    match that the test questions get without looking: each question's most frequent answer."""
    draw(out, train_images=300, val_images=40, test_images=80, seed=0, size=SIZE)
    (out / "plan.yaml").write_text(dump_yaml(Plan(**PLAN)))
    rows, test = ([json.loads(line) for line in (out / f"{name}.jsonl").open()] for name in ("train", "test"))
    if not (out / "base").is_dir():
        _pretrain(out, [f"{row['question']} {row['answer']}" for row in rows], steps)
    return majority_baseline(rows, test)


def _pretrain(out: Path, texts: list[str], steps: int | None) -> None:
    import transformers

    from sameday.demo.tiny import write_model

    transformers.utils.logging.disable_progress_bar()
    draw(out / "notes", train_images=600, val_images=40, seed=7, size=SIZE, ask=notes)
    texts += [f"{row['question']} {row['answer']}" for row in map(json.loads, (out / "notes" / "train.jsonl").open())]
    write_model(out / "random", texts, seed=0, text={"num_hidden_layers": 2})
    (out / "base.yaml").write_text(dump_yaml(recipe_from(RECIPE if steps is None else {**RECIPE, "max_steps": steps})))
    run = out / "base_run"
    command = ["train", str(out / "base.yaml"), "--plan", str(out / "plan.yaml"), "--out", str(run)]
    subprocess.run([sys.executable, "-m", "sameday", *command], check=True)
    shutil.copytree(run / "model", out / "base.part", dirs_exist_ok=True)
    (out / "base.part").rename(out / "base")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sameday.demo.experiments", description=__doc__)
    parser.add_argument("folder", type=Path, help="where images, questions and the model are written")
    folder = parser.parse_args().folder
    baseline = prepare(folder)
    tell(
        f"{folder}: ready. Always giving each question's most frequent answer gets {100 * baseline:.1f}% of test right"
    )


if __name__ == "__main__":
    main()
