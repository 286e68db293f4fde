"""How long suites take: predicted, and as it came.

    python bench/suite.py real OUT                  three short trainings of Vision-BDH: `sameday suite plan --measure`,
                                                    then `suite run`, and the prediction while it runs beside the end
    python bench/suite.py kvasir OUT                examples/suites/kvasir.yaml at Qwen3-VL-8B's shapes on a made set of
                                                    Kvasir-VQA's size: a step of each experiment and a little of its
                                                    evaluation are measured, the whole is extrapolated (ten minutes)
    python bench/suite.py kvasir OUT --gpu a100-40gb --gpus 4       the same as an estimate for other GPUs
    python bench/suite.py kvasir OUT --no-remedies  the plan alone, and nothing that would make its deadline hold
    python bench/suite.py kvasir OUT --size tiny    tries the script on a CPU

Weights of the large model are random: answers never end by themselves and are as long as they may be, so that the
time of evaluation is an upper bound. What OUT has already is kept: measured steps too.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from mixture import QUESTIONS, write_mixture
from verify import SHAPES

from sameday.demo.patterns import write_patterns
from sameday.demo.tiny import write_model
from sameday.record.folder import read_metrics
from sameday.record.times import read_times
from sameday.suite.jobs import OpenSuite, open_suite
from sameday.suite.times.expected import expected
from sameday.suite.times.measured import read_measured
from sameday.suite.times.predict import predict

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LOOKS = (0.25, 0.5, 0.75)
"""Of the time that it took, when the prediction is looked at again."""


def sameday(*words: str | Path, log: Path | None = None) -> subprocess.Popen[bytes]:
    out = None if log is None else log.open("wb")
    return subprocess.Popen([sys.executable, "-m", "sameday", *map(str, words)], stdout=out, stderr=out)


# Three short trainings


def short(out: Path, size: str) -> Path:
    """Two one after the other, and one beside them where there are two GPUs."""
    tiny = size == "tiny"
    write_patterns(out / "data", *((512, 128) if tiny else (20_000, 2_000)))
    model: dict[str, Any] = {"kind": "vision_bdh", "dropout": 0.1}
    if tiny:
        model |= {"levels": 2, "heads": 2, "width": 48, "latents": 4, "patch": 8}
    fields = {
        "task": "classify",
        "name": "short",
        "model": model,
        "data": {"path": "data", "val": 64 if tiny else 1000},
        "precision": "float32" if tiny else "bf16",
        "effective_batch": 32 if tiny else 256,
        "num_epochs": 2 if tiny else 8,
    }
    (out / "recipe.yaml").write_text(yaml.safe_dump(fields))
    longer = f"recipe.num_epochs={3 if tiny else 12}"
    jobs = {
        "one": {"do": "train", "recipe": "recipe.yaml"},
        "two": {
            "do": "train",
            "recipe": "recipe.yaml",
            "set": ["recipe.seed=1", longer],
        },
        "three": {"do": "train", "recipe": "recipe.yaml", "set": ["recipe.seed=2"], "after": ["one"]},
    }
    text = {"deadline": "1h", "set": ["plan.device=cpu"] if tiny else [], "jobs": jobs}
    (out / "short.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    return out / "short.yaml"


def real(out: Path, size: str) -> None:
    suite = short(out, size)
    where = out / "run"
    if where.exists():
        shutil.rmtree(where)
    if sameday("suite", "plan", suite, "--out", where, "--measure").wait():
        raise SystemExit("could not be planned")
    opened = open_suite(suite, where)

    def end() -> float | None:
        return expected(opened, opened.folder.states(opened.suite), time.time()).finish

    planned = predict(opened.suite, opened.home, opened.folder)
    (measured,) = read_measured(opened.folder)
    print(f"measured: {measured.pace({'val': 64 if size == 'tiny' else 1000}, 'on')}")
    began = time.time()
    first = end()
    process, seen = sameday("suite", "run", suite, "--out", where, log=out / "run.log"), list[tuple[float, float]]()
    while process.poll() is None:
        if (found := end()) is not None:
            seen.append((time.time(), found))
        time.sleep(1)
    if process.returncode or first is None:
        raise SystemExit((out / "run.log").read_text()[-2000:])
    took = time.time() - began
    for name, one in planned.items():
        print_parts(opened, name, one.seconds)
    print(f"took {took:.1f} s; predicted at its start {first - began:.1f} s, {(first - began) / took - 1:+.1%}")
    for share in LOOKS:
        at, found = min(seen, key=lambda each: abs(each[0] - began - share * took))
        print(f"predicted after {at - began:.1f} s: {found - began:.1f} s, {(found - began) / took - 1:+.1%}")


def print_parts(opened: OpenSuite, name: str, planned: float | None) -> None:
    """Where a job's time went: to its first step, in steps and between them, after them."""
    folder, state = opened.folder.run(name), opened.folder.read(name)
    assert planned is not None and state.started is not None and state.ended is not None
    times = read_times(folder)
    spent = {what: sum(each["seconds"] for each in times if each["what"] == what) for what in ("validate", "save")}
    started, finished = times[0]["time"], times[-1]["time"]
    steps = [record["seconds"] for record in read_metrics(folder / "metrics.jsonl") if "seconds" in record]
    print(
        f"{name}: predicted {planned:.1f} s, took {state.ended - state.started:.1f}: "
        f"start {started - state.started:.1f}, "
        f"{len(steps)} steps {sum(steps):.1f} (first five {sum(steps[:5]):.2f}, median {median(steps):.4f}), "
        + ", ".join(f"{what} {seconds:.1f}" for what, seconds in spent.items())
        + f", all until its last word {finished - started:.1f}, then {state.ended - finished:.1f}"
    )


# The experiments


def kvasir(out: Path, size: str, gpus: int, only: list[str], more: list[str]) -> None:
    tiny, examples = size == "tiny", out / "examples"
    if not (out / "model").is_dir():
        texts = [f"{question} {' '.join(answers)}" for _, question, answers in QUESTIONS]
        shapes: dict[str, Any] = {} if tiny else {"device": "cuda", "dtype": torch.bfloat16, **SHAPES["8b"]}
        write_model(out / "model.part", texts, 0, **shapes)
        (out / "model.part").rename(out / "model")
    if not (examples / "data").is_dir():
        write_mixture(examples / "data.part", *([(40, 8, 8)] if tiny else []), shrink=8 if tiny else 1)
        (examples / "data.part").rename(examples / "data")
    for path in sorted(EXAMPLES.glob("kvasir/*.yaml")):
        text = re.sub(r"(?m)^model: .*$", f"model: {out / 'model'}", path.read_text())
        if tiny:
            for before, after in (("bf16", "float32"), ("max_new_tokens: 64", "max_new_tokens: 4")):
                text = text.replace(before, after)
        (examples / "kvasir").mkdir(exist_ok=True)
        (examples / "kvasir" / path.name).write_text(text)
    suite = yaml.safe_load((EXAMPLES / "suites/kvasir.yaml").read_text())
    if only:
        suite["jobs"] = {name: job for name, job in suite["jobs"].items() if name in only}
    if tiny:
        suite["set"] = ["plan.device=cpu"]
    (examples / "suites").mkdir(exist_ok=True)
    (examples / "suites/kvasir.yaml").write_text(yaml.safe_dump(suite, sort_keys=False))
    words = ["suite", "plan", examples / "suites/kvasir.yaml", "--out", out / "plan", "--gpus", str(gpus), "--measure"]
    began = time.perf_counter()
    if sameday(*words, *more).wait():
        raise SystemExit("could not be planned")
    print(f"measured and planned in {time.perf_counter() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("real", "kvasir"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--gpu", help="another kind of GPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="of the experiments")
    parser.add_argument("--no-remedies", action="store_true", help="nothing of what would make a deadline hold")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if args.what == "real":
        real(out, args.size)
    else:
        more = [*([] if args.gpu is None else ["--gpu", args.gpu]), *(["--no-remedies"] if args.no_remedies else [])]
        kvasir(out, args.size, args.gpus, args.only, more)


if __name__ == "__main__":
    main()
