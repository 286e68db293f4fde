"""`sameday tune` and `sameday profile` on a GPU, as a user types them, beside plans that were made by hand.

python bench/tune.py vqa      # Qwen3-VL-8B's shapes, random weights: steps of two images with eight questions each
python bench/tune.py bdh      # Vision-BDH at CIFAR-10's size
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verify import BEST, SHAPES, WORDS, recipe, write_data

from sameday.demo.patterns import write_patterns
from sameday.demo.tiny import write_model
from sameday.spec.document import dump_yaml
from sameday.spec.load import load_plan, load_recipe
from sameday.spec.plan import Plan
from sameday.tasks.registry import setup_of
from sameday.tune.command import Trials
from sameday.tune.search import middle

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HAND: dict[str, dict[str, dict[str, Any]]] = {
    "vqa": {
        "shared, compiled, split attention": BEST,
        "shared, compiled, flex attention": {**BEST, "attention": "flex", "pad_to_multiple": 128},
        "shared, compiled, dense mask": {**BEST, "attention": "sdpa", "pad_to_multiple": 128},
    },
    "bdh": {
        "fused, CUDA graphs, images on the device": {
            "level_kernel": "fused",
            "cuda_graphs": True,
            "images_on": "device",
            "optimizer_impl": "fused",
            "pin_memory": True,
        },
    },
}


def prepare(what: str, folder: Path, small: bool, size: str = "8b") -> None:
    """Data, model and recipe, where they are not there yet."""
    if (folder / "recipe.yaml").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if what == "bdh":
        write_patterns(folder / "set", train=512 if small else 20000, test=64, classes=4)
        text = (EXAMPLES / "cifar10_bdh.yaml").read_text()
        (folder / "recipe.yaml").write_text(text.replace("data/cifar-10-batches-py, val: 10000", "set, val: 64"))
        return
    shapes = {"device": "cuda", "dtype": torch.bfloat16, **SHAPES[size]} if not small else {}
    write_model(folder / "model", [" ".join(WORDS)], 0, **shapes)
    pixels = (128, 96) if small else (1280, 1024)
    write_data(folder, images=24, each=8, size=pixels, words=56, seed=0)
    more = {"name": "tiny", "precision": "float32"} if small else {"name": f"{size}-shapes"}
    (folder / "recipe.yaml").write_text(dump_yaml(recipe(folder, effective_batch=16, num_epochs=100, **more)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(HAND))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this on a CPU")
    parser.add_argument("--out", type=Path, help="keep plan, table and profile here")
    parser.add_argument("--work", type=Path, help="keep model and data here, for the next time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        began = time.perf_counter()
        prepare(args.what, folder, args.small)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"model and data written in {time.perf_counter() - began:.0f} s", flush=True)
        out = args.out or folder
        out.mkdir(parents=True, exist_ok=True)

        def sameday(*words: str) -> int:
            print("sameday " + " ".join(words), flush=True)
            began = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "sameday", *words], cwd=folder, check=False)
            print(f"exit code {done.returncode}, {time.perf_counter() - began:.0f} s", flush=True)
            return done.returncode

        files = {
            name: str(out.resolve() / f"{args.what}-{name}") for name in ("plan.yaml", "tune.json", "profile.json")
        }
        minutes = ["--minutes", str(args.minutes)]
        if sameday("tune", "recipe.yaml", *minutes, "-o", files["plan.yaml"], "--json", files["tune.json"]) != 0:
            raise SystemExit(1)
        by_hand(args.what, folder, load_plan(Path(files["plan.yaml"])))
        sameday("profile", "recipe.yaml", "--plan", files["plan.yaml"], "--json", files["profile.json"])
        found = json.loads(Path(files["profile.json"]).read_text())
        if found["busy"] is not None:
            print(f"{args.what}: the GPU is busy {100 * found['busy']:.1f}% of the best plan's time")


def by_hand(what: str, folder: Path, best: Plan) -> None:
    """The plan that was found and those made by hand, timed one after another in the same way."""
    given = load_recipe(folder / "recipe.yaml")
    (folder / "data.pickle").write_bytes(pickle.dumps(setup_of(given, folder).audit(lambda _: None).splits))
    shutil.rmtree(folder / "trials", ignore_errors=True)
    (folder / "trials").mkdir()
    trials = Trials(given, folder, folder / "data.pickle", folder / "trials", 1200.0, partial(print, flush=True))
    plans = {"found by tune": best, **{name: Plan(**fields) for name, fields in HAND[what].items()}}
    found = {name: trials.measure(plan) for name, plan in plans.items()}
    fastest = min(middle(result) for name, result in found.items() if name != "found by tune" and not result.failed)
    print(
        f"{what}: the plan that tune found takes {middle(found['found by tune']) / fastest:.3f} of the best hand-made"
    )


if __name__ == "__main__":
    main()
