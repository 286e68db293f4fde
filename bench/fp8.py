"""Base weights and matmuls in fp8 beside bf16.

    python bench/fp8.py                      one GPU with fp8 matmuls, about six minutes: rates of matmuls, rounding and
                                             transposing; a step's time and memory; how far gradients are from float32
    python bench/fp8.py --size tiny          the steps on any machine
    python bench/fp8.py --accuracy SCENES    on a CPU: exact match of tiny models over seeds, float32 beside fp8, whose
                                             matmuls are emulated (SCENES: python -m sameday.demo.experiments SCENES)

Weights of the first two are random, at Qwen3-VL-8B's shapes; the questions are those of bench/vlm_step.py, 16 a step
about 2 images of 1280×1024, or of 768×576. Random weights have no channels that are much larger than the others, as
trained ones do: real models may be further away."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from nf4 import HEADS, PLANS, forget, recipe_of, timed
from orders import EXAMPLES, interval
from vlm_step import SHARED, MadeData, build, measure

from sameday.hardware.peaks import best_seconds, fp8_rate, product_rate
from sameday.kernels import fp8
from sameday.spec.plan import Plan
from sameday.verify.compare import kind_of

GRIDS = {"1280×1024": (64, 80), "768×576": (36, 48)}
TIMED = ("shared", "shared, compiled")
SHAPES = [(3616, 4096, 12288), (3616, 12288, 4096), (3616, 4096, 4096), (1888, 4096, 12288), (1888, 12288, 4096)]
"""Tokens of a row, and a layer's sizes."""
ARMS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "bf16", "base_format": "fp8"},
    "fp8 weights, float32": {"precision": "float32", "base_format": "fp8"},
}
AGAINST = [
    ("bf16", "float32"),
    ("fp8", "float32"),
    ("fp8 weights, float32", "float32"),
    ("fp8", "fp8 weights, float32"),
]


def rates(device: torch.device) -> None:
    """Why there is no kernel of our own for rounding, and no second copy of the weights: what each would save."""
    print(
        "tokens, in, out: TFLOP/s in bf16, fp8, fp8 with fast sums, fp8 with one scale for all (scales that are powers"
    )
    print("of two could follow it, exactly); µs of rounding the tokens, eager and compiled, of transposing the codes,")
    print("eager and compiled, and of the fp8 matmul")
    round_, turn = torch.compile(fp8.quantize), torch.compile(lambda codes: codes.t().contiguous())
    for shape in SHAPES:
        tokens, wide, high = shape
        speeds = [product_rate(device, "bf16", shape), *(fp8_rate(device, shape, fast) for fast in (False, True))]
        speeds.append(fp8_rate(device, shape, whole=True))
        x = torch.randn(tokens, wide, device=device, dtype=torch.bfloat16)
        codes, _ = fp8.quantize(torch.randn(high, wide, device=device, dtype=torch.bfloat16))
        calls = (
            lambda x=x: fp8.quantize(x)[0],
            lambda x=x: round_(x)[0],
            lambda codes=codes: codes.t().contiguous(),
            lambda codes=codes: turn(codes),
        )
        taken = [1e6 * best_seconds(call, device) for call in calls]
        matmul = 1e6 * 2 * tokens * wide * high / speeds[1]
        print(
            f"{tokens:6d} {wide:6d} {high:6d}  "
            + " ".join(f"{speed / 1e12:6.0f}" for speed in speeds)
            + f"   {taken[0]:6.1f} {taken[1]:6.1f}  {taken[2]:6.1f} {taken[3]:6.1f}  {matmul:6.1f}",
            flush=True,
        )
    forget()


def steps(size: str, device: torch.device, count: int) -> list[dict[str, Any]]:
    rows = []
    for pixels, grid in GRIDS.items():
        print(f"\n{size}, 16 questions about 2 images of {pixels}\n{HEADS}")
        data = MadeData("by_image", size, 512, grid)
        for name in TIMED:
            if device.type != "cuda" and "compile" in PLANS[name]:
                print(f"{name:48s} not on a CPU")
                continue
            for chosen in ({}, {"base_format": "fp8"}):
                rows.append(timed(name, PLANS[name], chosen, data, size, device, count) | {"pixels": pixels})
    return rows


def gradients(size: str, device: torch.device) -> dict[str, dict[str, tuple[float, float]]]:
    """All arms have the same weights before they are rounded, and the same plan."""
    data, made, parts = MadeData("by_image", size, 512), {}, {}
    plan = Plan(**{**SHARED, "checkpointing": "full"})
    for name, chosen in ARMS.items():
        base = build(size, device, torch.bfloat16)
        base = base.float() if chosen == ARMS["float32"] else base
        row = measure(name, plan, recipe_of(device, **chosen), data, size, device, 1, base)
        del base
        forget()
        made[name], parts = row["gradient"].double(), row["sizes"]
    print("\nthe gradient of one step: relative error, cosine")
    print(f"{'':16s}" + "".join(f"{f'{arm} from {other}':>36s}" for arm, other in AGAINST))
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for part, at in _places(parts).items():
        found[part] = {}
        for arm, other in AGAINST:
            one, reference = made[arm][at], made[other][at]
            off = float((one - reference).norm() / reference.norm())
            cosine = float(torch.nn.functional.cosine_similarity(one, reference, 0))
            found[part][f"{arm} from {other}"] = off, cosine
        print(f"{part:16s}" + "".join(f"{off:27.4f}  {cosine:.5f}" for off, cosine in found[part].values()))
    return found


def _places(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Where the numbers of each part stand in the gradient."""
    ends = torch.tensor(list(sizes.values())).cumsum(0).tolist()
    spans = {name: torch.arange(end - sizes[name], end) for name, end in zip(sizes, ends, strict=True)}
    number = {name: next(int(word) for word in name.split(".") if word.isdigit()) for name in sizes}
    last = max(number.values())
    parts: dict[str, list[torch.Tensor]] = {}
    for name, span in spans.items():
        for part in ("all", kind_of(name), {0: "first layer", last: "last layer"}.get(number[name])):
            if part is not None:
                parts.setdefault(part, []).append(span)
    return {part: torch.cat(each) for part, each in parts.items()}


def accuracy(data: Path, formats: list[str], seeds: list[int], runs: Path, at_once: int, max_steps: int) -> None:
    """Trained and evaluated by the commands a user types. A CPU without bf16 computes the rest in float32: what fp8
    rounds is rounded, and nothing else."""
    data = data.resolve()
    runs.mkdir(parents=True, exist_ok=True)

    def share(stored: str, seed: int) -> float:
        run = runs / f"{stored}-{seed}"
        scores = run / "eval-test.json"
        if not scores.exists():
            files = {split: data / f"{split}.jsonl" for split in ("train", "val", "test")} | {"image_root": data}
            sets = [f"recipe.model={data / 'base'}", *(f"recipe.data.{key}={path}" for key, path in files.items())]
            sets += [f"recipe.seed={seed}", "recipe.evaluate=null", f"recipe.base_format={stored}"]
            sets += [f"recipe.max_steps={max_steps}"]
            words = [word for field in sets for word in ("--set", field)]
            plan = ["--plan", str(data / "plan.yaml")]
            _sameday(runs, "train", str(EXAMPLES / "scenes/exp1.yaml"), "--out", str(run), *plan, *words)
            _sameday(runs, "eval", str(run), "--split", "test", "--scores-only")
        found: float = json.loads(scores.read_text())["exact_match"]
        print(f"  {stored}, seed {seed}: {100 * found:.2f}%", flush=True)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        jobs = {(stored, seed): pool.submit(share, stored, seed) for seed in seeds for stored in formats}
        shares = {key: job.result() for key, job in jobs.items()}
    print(f"\n{max_steps} steps, {len(seeds)} seeds: exact match in %, difference to float32 in points, 95% intervals")
    for stored in formats:
        mean, half = interval([shares[stored, seed] for seed in seeds])
        line = f"{'float32' if stored == 'precision' else stored:10s} {mean:6.2f} ± {half:.2f}"
        if stored != "precision":
            mean, half = interval([shares[stored, seed] - shares["precision", seed] for seed in seeds])
            line += f"   {mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
        print(line)


def _sameday(folder: Path, *words: str) -> None:
    """In a process in which float32 operands are rounded to fp8 too."""
    code = (
        "import sys, torch; from sameday.kernels import fp8; from sameday.cli import main; "
        "fp8.ROUNDED += (torch.float32,); sys.argv = ['sameday', *sys.argv[1:]]; main()"
    )
    with (folder / "log").open("a") as log:
        done = subprocess.run([sys.executable, "-c", code, *words], stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:2])} failed:\n" + (folder / "log").read_text()[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two that are not")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--accuracy", type=Path, metavar="SCENES", help="train tiny models instead")
    parser.add_argument("--formats", nargs="+", default=["precision", "fp8"], help="recipe.base_format, nf4 too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--max-steps", type=int, default=338)
    parser.add_argument("--runs", type=Path, help="where they are kept; those that are there are not done again")
    parser.add_argument("--at-once", type=int, default=2)
    args = parser.parse_args()
    if args.accuracy is not None:
        runs = args.runs or Path(tempfile.mkdtemp(prefix="fp8-"))
        accuracy(args.accuracy, args.formats, args.seeds, runs, args.at_once, args.max_steps)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}")
    if device.type == "cuda":
        rates(device)
    rows = steps(args.size, device, args.steps)
    found = gradients(args.size, device) if device.type == "cuda" else {}  # a CPU may take an hour for bf16
    if args.json:
        args.json.write_text(json.dumps({"steps": rows, "gradients": found}, indent=1))


if __name__ == "__main__":
    main()
