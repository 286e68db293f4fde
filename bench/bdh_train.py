"""Vision-BDH trained whole, by the commands a user types.

python bench/bdh_train.py accuracy --data CIFAR [--recipe cifar10_bdh] [--seeds 0 1 2]    # time and test accuracy
python bench/bdh_train.py curves --data CIFAR [--epochs 5] [--seeds 0 1 2]        # the plain plan beside the fused
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLAN = EXAMPLES / "bdh_plan.yaml"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sameday", *words]


def start(folder: Path, args: Any, seed: int, name: str, plan: Sequence[str]) -> tuple[subprocess.Popen[str], Path]:
    """`sameday train` of the recipe with this seed, its output in a file."""
    words = ["train", str(EXAMPLES / f"{args.recipe}.yaml"), "--out", str(folder / name), *plan]
    fields = [f"recipe.data.path={args.data.resolve()}", f"recipe.seed={seed}", *args.set]
    words += [part for field in fields for part in ("--set", field)]
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command(*words), stdout=log, stderr=log, text=True), folder / name


def wait(process: subprocess.Popen[str], run: Path) -> None:
    if process.wait() != 0:
        raise SystemExit(f"{run.name} failed:\n" + run.with_suffix(".log").read_text()[-3000:])


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def validated(run: Path) -> list[float]:
    """The validation loss of each epoch that is done."""
    if not (run / "metrics.jsonl").exists():
        return []
    return [r["loss"] for r in records(run) if r.get("split") == "val"]


def accuracy(folder: Path, args: Any) -> None:
    """Each seed by itself, timed from the command to its end."""
    found = []
    for seed in args.seeds:
        began = time.perf_counter()
        process, run = start(folder, args, seed, f"seed-{seed}", ["--plan", str(args.plan)])
        wait(process, run)
        seconds = time.perf_counter() - began
        done = subprocess.run(command("eval", str(run), "--split", "test"), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"eval failed:\n{done.stderr[-2000:]}")
        test = json.loads((run / "eval-test.json").read_text())
        steps = [r for r in records(run) if "split" not in r]
        last = [r for r in records(run) if r.get("split") == "val"][-1]
        pace = statistics.median(r["seconds"] for r in steps[len(steps) // 4 :])
        found.append((seconds, test["accuracy"]))
        print(
            f"{args.recipe} seed {seed}: {seconds:.0f} s whole, {1000 * pace:.2f} ms a step, "
            f"{steps[-1]['samples'] / pace:,.0f} images/s; val {100 * last['accuracy']:.2f}%, "
            f"test {100 * test['accuracy']:.2f}%, test loss {test['loss']:.4f}",
            flush=True,
        )
    if len(found) > 1:
        seconds_each, right = zip(*found, strict=True)
        print(
            f"{args.recipe}: {len(found)} seeds, test accuracy {100 * statistics.mean(right):.2f}% "
            f"({100 * min(right):.2f}-{100 * max(right):.2f}), {min(seconds_each):.0f}-{max(seconds_each):.0f} s each"
        )


def curves(folder: Path, args: Any) -> None:
    """Every seed under both plans, at once: what is compared are losses, not times. Runs that are finished under --out
    are taken as they are, so that seeds can be added."""
    args.set += [f"recipe.num_epochs={args.epochs}"]
    often = ["--set", "plan.eval_steps=epoch", "--set", "plan.save_steps=epoch"]
    plain = folder / "plain.yaml"
    plain.write_text("images_on: device\neval_batch: 1000\n")
    runs = {
        (name, seed): start(folder, args, seed, f"{name}-{seed}", ["--plan", str(path), *often])
        for name, path in (("fused", args.plan), ("plain", plain))
        for seed in args.seeds
        if len(validated(folder / f"{name}-{seed}")) < args.epochs
    }
    for process, run in runs.values():
        wait(process, run)
    found = {name: [validated(folder / f"{name}-{seed}") for seed in args.seeds] for name in ("fused", "plain")}
    print(f"{args.recipe}, validation loss after each epoch, seeds {args.seeds}: mean (least to most)")
    for epoch in range(args.epochs):
        line, spans = f"epoch {epoch + 1}", []
        for name, each in found.items():
            values = [curve[epoch] for curve in each]
            spans.append((min(values), max(values)))
            line += f"   {name} {statistics.mean(values):.4f} ({min(values):.4f}-{max(values):.4f})"
        meet = max(low for low, _ in spans) <= min(high for _, high in spans)
        print(line + ("   spreads meet" if meet else "   spreads do not meet"))
        apart = [a[epoch] - b[epoch] for a, b in zip(*found.values(), strict=True)]
        if len(apart) > 1:
            error = statistics.stdev(apart) / len(apart) ** 0.5
            print(
                f"          fused less plain, seed by seed: {statistics.mean(apart):+.4f}, standard error {error:.4f}"
            )
    pairs = zip(found["fused"], found["plain"], strict=True)
    apart = [abs(a[-1] - b[-1]) / b[-1] for a, b in pairs]
    print(f"with one seed the plans end {100 * statistics.mean(apart):.2f}% apart, {100 * max(apart):.2f}% at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "curves"))
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10's python batches")
    parser.add_argument("--recipe", default="cifar10_bdh", help="one of examples/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--out", type=Path, help="keep the runs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        {"accuracy": accuracy, "curves": curves}[args.what](folder, args)


if __name__ == "__main__":
    main()
