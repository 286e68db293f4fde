"""The small experiments, each from one command: trained, evaluated, compared.

python bench/experiments.py OUT [--only exp1 exp4] [--at-once 2]

OUT gets drawn scenes and a tiny pretrained model (`python -m sameday.demo.experiments`), a run for each recipe of
examples/scenes, and report.html over all of them. Runs that are there go on or are not done again. The table has exact
match of generated answers with its 95% interval, the gain over always giving each question's commonest answer, and
the paired difference to exp1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sameday.demo.experiments import prepare
from sameday.evaluate.compare import compare
from sameday.evaluate.predictions import METRICS, PREDICTIONS, read_predictions
from sameday.evaluate.words import apart

SCENES = Path(__file__).resolve().parents[1] / "examples" / "scenes"
NAMES = ("exp1", "exp1_by_image", "exp2", "exp3", "exp4", "exp5", "cot")


def sameday(out: Path, name: str, *words: str | Path) -> None:
    with (out / f"{name}.log").open("a") as log:
        done = subprocess.run([sys.executable, "-m", "sameday", *map(str, words)], stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n" + (out / f"{name}.log").read_text()[-3000:])


def recipe(out: Path, name: str) -> Path:
    """The example with its data in OUT."""
    text = (SCENES / f"{name}.yaml").read_text().replace("../data/scenes", str(out.resolve() / "data"))
    path = out / f"{name}.yaml"
    path.write_text(text)
    return path


def run(out: Path, name: str) -> float:
    began = time.perf_counter()
    sameday(out, name, "train", recipe(out, name), "--plan", out / "data" / "plan.yaml", "--out", out / name)
    return time.perf_counter() - began


def answers(out: Path, name: str) -> Path:
    (folder,) = [path for path in (out / name / "answers").iterdir() if path.name.startswith("adapter-test")]
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    baseline = prepare(args.out / "data")
    with ThreadPoolExecutor(args.at_once) as pool:
        seconds = dict(zip(args.only, pool.map(lambda name: run(args.out, name), args.only), strict=True))
    report = args.out / "report.html"
    sameday(args.out, "report", "report", *(args.out / name for name in args.only), "-o", report)
    print(f"always giving each question's commonest answer: {100 * baseline:.1f}%")
    print(f"{'':14s} {'exact match, %':>22s} {'gain':>6s}   {'against ' + args.only[0]:>22s}  seconds")
    predictions = {name: read_predictions(answers(args.out, name) / PREDICTIONS) for name in args.only}
    for name in args.only:
        found = json.loads((answers(args.out, name) / METRICS).read_text())["metrics"]["exact_match"]
        value, low, high = (100 * found[key] for key in ("value", "low", "high"))
        line = f"{name:14s} {value:6.1f} ({low:5.1f} to {high:5.1f}) {value - 100 * baseline:+6.1f}"
        if name != args.only[0]:
            paired = compare(predictions[args.only[0]], predictions[name])
            each = paired["metrics"]["exact_match"]
            spread = apart("exact_match", paired)
            if each["low"] is not None:
                spread = f"{100 * each['low']:+5.1f} to {100 * each['high']:+5.1f}"
            line += f"   {100 * each['difference']:+6.1f} ({spread})"
        else:
            line += " " * 26
        print(f"{line}  {seconds[name]:7.0f}")
    print(f"written: {report}")


if __name__ == "__main__":
    main()
