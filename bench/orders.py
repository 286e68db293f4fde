"""Which order of questions learns better, at equal effective batch and steps: final exact match of new questions (each
token right, nothing generated) over seeds, and the difference to `shuffle`, seed by seed, with 95% intervals (Student's
t over seeds).

python bench/orders.py --data SCENES [--seeds 0 1 2 3 4] [--runs DIR] [--at-once 2]
python bench/orders.py --recipe RECIPE --split val [--plan PLAN] ...     # any recipe of questions about images

SCENES is what `python -m sameday.demo.experiments SCENES` writes. Runs that are there are not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ORDERS = {
    "shuffle": ["recipe.order.kind=shuffle"],
    "by_image": ["recipe.order.kind=by_image"],
    **{f"by_image, at most {n}": ["recipe.order.kind=by_image", f"recipe.order.max_per_image={n}"] for n in (2, 4, 8)},
}
# Two-sided 95% of Student's t for so many differences less one.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def sameday(folder: Path, name: str, *words: str) -> None:
    with (folder / f"{name}.log").open("a") as log:
        done = subprocess.run([sys.executable, "-m", "sameday", *words], stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n" + (folder / f"{name}.log").read_text()[-3000:])


def exact_match(folder: Path, args: Any, order: str, seed: int) -> float:
    """Of one run, trained and evaluated by the commands a user types: the exact match of the scores, every token of an
    answer and its end. Nothing is generated for it. That of `metrics.json` compares generated answers after
    normalisation, and is another figure (docs/answers.md, "Two figures of exact match")."""
    name = f"{order.replace(', at most ', '-')}-{seed}"
    run, scores = folder / name, folder / name / f"eval-{args.split}.json"
    if not scores.exists():
        sets = [*ORDERS[order], f"recipe.seed={seed}", "recipe.evaluate=null", *args.set]
        if args.data is not None:
            data = args.data.resolve()
            files = {split: data / f"{split}.jsonl" for split in ("train", "val", "test")} | {"image_root": data}
            sets += [f"recipe.model={data / 'base'}", *(f"recipe.data.{key}={path}" for key, path in files.items())]
        plan = ["--plan", str(args.plan)] if args.plan else []
        words = [word for field in sets for word in ("--set", field)]
        sameday(folder, name, "train", str(args.recipe), "--out", str(run), *plan, *words)
        sameday(folder, name, "eval", str(run), "--split", args.split, "--scores-only")
    share: float = json.loads(scores.read_text())["exact_match"]
    print(f"  {order}, seed {seed}: {100 * share:.2f}%", flush=True)
    return share


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of the 95% interval, in points."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return 100 * statistics.fmean(values), 100 * T95.get(len(values) - 1, 1.96) * spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--recipe", type=Path, default=EXAMPLES / "scenes" / "exp1.yaml")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    if args.data is not None and args.plan is None:
        args.plan = args.data / "plan.yaml"
    folder = args.runs or Path(tempfile.mkdtemp(prefix="orders-"))
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        runs = {(o, s): pool.submit(exact_match, folder, args, o, s) for s in args.seeds for o in ORDERS}
        shares = {key: run.result() for key, run in runs.items()}
    print(f"\n{args.split}, {len(args.seeds)} seeds: exact match in %, difference to shuffle in points, 95% intervals")
    for order in ORDERS:
        mean, half = interval([shares[order, seed] for seed in args.seeds])
        line = f"{order:22s} {mean:6.2f} ± {half:.2f}"
        if order != "shuffle":
            mean, half = interval([shares[order, seed] - shares["shuffle", seed] for seed in args.seeds])
            line += f"   {mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
        print(line)


if __name__ == "__main__":
    main()
