"""One whole small truth: `sameday train` and `sameday eval` from the command line, and where each second of them went.

    python bench/whole.py OUT --data VQA_RAD --tokenizer DIR     one GPU, Qwen3-VL-8B's shapes, five epochs
    python bench/whole.py OUT --size tiny                        the same lines on any machine, on drawn scenes

VQA_RAD is a folder with train.jsonl, val.jsonl, test.jsonl (image, question, answer) and images.tar or images/. Weights
are random, so that answers never end by themselves and are as long as they may be. Plans are automatic. What is made
beforehand, the model's files and the images', is not counted. Each table adds up to the wall clock of its command; a
stall is what a step took beyond the median where that is more than three times the median: compiling, above all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from verify import SHAPES

from sameday.demo.scenes import draw
from sameday.demo.tiny import write_model
from sameday.record.folder import read_metrics
from sameday.record.times import read_times
from sameday.spec.document import dump_yaml
from sameday.spec.load import recipe_from

ANSWERS = 16
"""Tokens of each generated answer, at most."""
Part = tuple[str, float, str]


def prepare(out: Path, args: argparse.Namespace) -> Path:
    """Model, images and recipe."""
    data, tiny = args.data or out / "scenes", args.size == "tiny"
    if args.data is None:
        draw(data, train_images=24, val_images=6, test_images=6, seed=0, size=64)
    elif not (out / "images").is_dir() and (data / "images.tar").is_file():
        with tarfile.open(data / "images.tar") as tar:
            tar.extractall(out, filter="data")
    folder = next(path for path in (out / "images", data / "images", data) if path.is_dir())
    if not (out / "model").is_dir():
        rows = [json.loads(line) for line in (data / "train.jsonl").open(encoding="utf-8")]
        texts = [f"{row['question']} {row['answer']}" for row in rows]
        tokenizer = None
        if args.tokenizer is not None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        shapes: dict[str, Any] = {} if tiny else {"device": "cuda", "dtype": torch.bfloat16, **SHAPES["8b"]}
        write_model(out / "model", texts, 0, tokenizer=tokenizer, **shapes)
    image_root = data if args.data is None else folder
    fields = {
        "name": "whole",
        "model": str(out / "model"),
        "lora": {"r": 4, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "precision": "float32" if tiny else "bf16",
        "data": {name: str(data / f"{name}.jsonl") for name in ("train", "val", "test")}
        | {"image_root": str(image_root)},
        "max_pixels": 1310720,
        "order": args.order,
        "effective_batch": 16,
        "loss_weight": "sample",
        "learning_rate": 5e-5,
        "num_epochs": args.epochs,
    }
    (out / "recipe.yaml").write_text(dump_yaml(recipe_from(fields)))
    return out / "recipe.yaml"


def command(out: Path, *words: str | Path) -> float:
    """Its wall clock."""
    began = time.perf_counter()
    with (out / f"{words[0]}.log").open("w") as log:
        ended = subprocess.run([sys.executable, "-m", "sameday", *map(str, words)], stdout=log, stderr=log, cwd=out)
    if ended.returncode:
        raise SystemExit((out / f"{words[0]}.log").read_text()[-3000:])
    return time.perf_counter() - began


def of_start(record: dict[str, Any]) -> Iterator[Part]:
    parts = record["parts"]
    yield "libraries", parts["libraries"], ""
    yield "audit of the data", parts["audit"], ""
    yield "loading the model", parts["load"], ""
    yield "compiling", parts.get("compile", 0.0), "before the first step"
    yield "other start", record["seconds"] - sum(parts.values()), "interpreter, choices, first batches' workers"


def of_training(run: Path) -> Iterator[Part]:
    steps = [record["seconds"] for record in read_metrics(run / "metrics.jsonl") if "split" not in record]
    median = statistics.median(steps)
    stalled = [seconds - median for seconds in steps if seconds > 3 * median]
    times = read_times(run)
    yield from of_start(next(record for record in times if record["what"] == "start"))
    yield "stalls in steps", sum(stalled), f"{len(stalled)} of {len(steps)} steps"
    quartiles = statistics.quantiles(steps, n=4)
    yield (
        "steps",
        sum(steps) - sum(stalled),
        f"median {median:.3f} s, half between {quartiles[0]:.3f} and {quartiles[2]:.3f}",
    )
    for what, words in (("validate", "validation"), ("save", "saving"), ("finish", "finished weights")):
        each = [record["seconds"] for record in times if record["what"] == what]
        yield words, sum(each), f"{len(each)} times, the first {each[0]:.1f} s" if each else "none"


def of_evaluation(folder: Path) -> Iterator[Part]:
    times = {record["what"]: record for record in read_times(folder)}
    yield from of_start(times["start"])
    parts = times["evaluate"]["parts"]
    questions = sum(1 for _ in (folder / "predictions.jsonl").open())
    yield "scores", parts["scores"], ""
    yield "generation", parts["answers"], f"{questions} questions, {questions / parts['answers']:.1f} a second"
    yield "metrics", parts["metrics"], ""


def table(title: str, wall: float, parts: Iterable[Part]) -> None:
    listed = list(parts)
    print(f"{title}: {wall:.1f} s")
    for name, seconds, more in [*listed, ("all else", wall - sum(part[1] for part in listed), "its end, above all")]:
        print(f"  {name:20s} {seconds:8.1f} s {seconds / wall:6.1%}  {more}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--data", type=Path, help="default: drawn scenes")
    parser.add_argument("--tokenizer", type=Path, help="a real one; default: one made of the questions")
    parser.add_argument("--order", choices=("by_image", "shuffle"), default="by_image")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    for name in ("out", "data", "tokenizer"):
        path = getattr(args, name)
        setattr(args, name, None if path is None else path.absolute())
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    recipe = prepare(out, args)
    device = [] if args.size == "8b" else ["--set", "plan.device=cpu"]
    os.environ["PYTHONUNBUFFERED"] = "1"
    trained = command(out, "train", recipe, "--out", out / "run", *device)
    evaluated = command(out, "eval", out / "run", "--split", "test", "--max-new-tokens", str(ANSWERS))
    where = torch.cuda.get_device_name() if args.size == "8b" else "CPU"
    print(f"{args.size}, order {args.order}, {args.epochs} epochs, {where}, torch {torch.__version__}")
    table("sameday train", trained, of_training(out / "run"))
    table("sameday eval", evaluated, of_evaluation(out / "run/answers/adapter-test"))


if __name__ == "__main__":
    main()
