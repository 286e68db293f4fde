"""What `sameday verify` says on a GPU: plans at Qwen3-VL-8B's shapes, the array of all pairs of plan fields, and
equivalent plans over seeds, which must raise no alarm.

    python bench/verify.py best       # sameday verify, all that is fast together against plain, 8B shapes, timed
    python bench/verify.py nf4        # the same on base weights in four bits, a model of more than 1B parameters
    python bench/verify.py fp8        # the same on base weights and matmuls in fp8
    python bench/verify.py array      # every pair of plan values on a small model, bf16
    python bench/verify.py alarms     # 20 comparisons of equivalent plans, a model of more than 1B parameters
    python bench/verify.py answers    # how far generated tokens are below training's, in bf16 and fp8, and with a fault
    python bench/verify.py images     # 21 of Vision-BDH with 2, 3 and 4 classes, whose biases have few numbers
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from covering import trial_plans
from PIL import Image
from vlm_step import SIZES

from sameday.commands.session import silent
from sameday.demo.patterns import write_patterns
from sameday.demo.tiny import write_model
from sameday.spec.document import dump_yaml
from sameday.spec.load import load_recipe
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.registry import setup_of
from sameday.tasks.vqa import task as vqa
from sameday.tune.command import STEPS_TO_VERIFY
from sameday.verify.arm import Job, run_here
from sameday.verify.compare import Comparison, compare
from sameday.verify.limits import LIMITS, limits_of
from sameday.verify.trace import Trace
from sameday.verify.trial import make_trial, reference_job

WORDS = ["is", "there", "a", "red", "polyp", "near", "the", "left", "wall", "what", "size", "shape", "colour"]
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
TOWER |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "text": {
            k: v for k, v in SIZES["8b"]["text"].items() if k not in ("rope_parameters", "max_position_embeddings")
        },
        "vision": TOWER,
    },
    "1b": {
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "vision": TOWER,
    },
    "small": {"text": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}, "vision": {"depth": 3}},
}
BEST = {
    "share_images": True,
    "packing": True,
    "max_questions": None,
    "token_budget": 8192,
    "label_only_logits": True,
    "optimizer_impl": "fused",
    "compile": "layers",
    "attention": "auto",
    "pad_to_multiple": 32,
    "pin_memory": True,
    "workers": 4,
}
ALL_OF_IT = BEST | {"share_text": True, "cuda_graphs": True, "lora_kernel": "triton", "keep_features": True}
SHARED = {"share_images": True, "packing": True, "max_questions": None, "label_only_logits": True}


def write_data(folder: Path, images: int, each: int, size: tuple[int, int], words: int, seed: int) -> None:
    """So many images of noise with so many questions of random words."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    rows = []
    for i in range(images):
        pixels = noise.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"images/{i}.png")
        for _ in range(each):
            asked = " ".join(rng.choice(WORDS) for _ in range(rng.randint(words // 2, words)))
            answer = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))
            rows.append({"image": f"images/{i}.png", "question": asked, "answer": answer})
    for name, part in (("train", rows), ("val", rows[: 2 * each])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def recipe(folder: Path, **more: Any) -> VqaRecipe:
    fields = {
        "model": str(folder / "model"),
        "data": {"train": "train.jsonl", "val": "val.jsonl"},
        "order": "by_image",
        "loss_weight": "sample",
        "max_pixels": 2**22,
        "lora": {"r": 4, "alpha": 8},
    }
    return VqaRecipe.model_validate(fields | more)


def best(folder: Path, shapes: str = "8b", **more: Any) -> None:
    """The command as a user types it, at the workload of bench/vlm_step.py."""
    began = time.perf_counter()
    write_model(folder / "model", [" ".join(WORDS)], 0, device="cuda", dtype=torch.bfloat16, **SHAPES[shapes])
    write_data(folder, images=3, each=8, size=(1280, 1024), words=56, seed=0)
    (folder / "recipe.yaml").write_text(dump_yaml(recipe(folder, name=f"{shapes}-shapes", **more)))
    (folder / "best.yaml").write_text(dump_yaml(Plan(**ALL_OF_IT)))
    (folder / "plain.yaml").write_text(dump_yaml(Plan(checkpointing="full", token_budget=10**6, workers=4)))
    torch.cuda.empty_cache()
    print(f"model and data written in {time.perf_counter() - began:.0f} s", flush=True)
    words = ["recipe.yaml", "--plan", "best.yaml", "--against", "plain.yaml", "--steps", "4", "--json", "verdict.json"]
    print("sameday verify " + " ".join(words), flush=True)
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "sameday", "verify", *words], cwd=folder, check=False)
    print(f"exit code {done.returncode}, {time.perf_counter() - began:.0f} s on {torch.cuda.get_device_name()}")


class Stage:
    """One model and its data, read from disk once; the plain arm and the reference are run once."""

    def __init__(self, folder: Path, recipe: Recipe, steps: int) -> None:
        self.folder, self.trial = folder, make_trial(recipe, steps)
        self.plain = self.run("plain", Plan())
        reference = reference_job(self.job("plain", Plan()), folder / "reference")
        run_here(reference)
        self.reference = Trace(reference.out)

    def job(self, name: str, plan: Plan) -> Job:
        return self.trial.job(plan, self.folder, self.folder / name)

    def run(self, name: str, plan: Plan) -> Trace:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        run_here(self.job(name, plan))
        return Trace(self.folder / name)

    def compare(self, plan: Plan) -> Comparison:
        return compare(self.run("plan", plan), self.plain, self.reference, limits=limits_of(self.trial.recipe))


def show(count: int, name: str, found: Comparison, seconds: float, alarms: list[str]) -> None:
    new = [f"{name}: {difference}" for difference in found.differences]
    alarms += new
    ratios = "  ".join(f"{k} {found.worst[k]:.3f}" for k in ("ratio_all", "ratio_group", "ratio_tensor", "slope"))
    rest = "  ".join(f"{k} {found.worst[k]:.1e}" for k in ("loss", "trained gradient", "trained update", "validation"))
    print(f"{count:3d} {seconds:5.1f} s  {ratios}  {rest}  {name}" + "".join(f"\n    {x}" for x in new), flush=True)


def array(folder: Path) -> None:
    write_model(folder / "model", [" ".join(WORDS)], 0, sharpen=1.5, **SHAPES["small"])
    write_data(folder, images=3, each=5, size=(96, 64), words=12, seed=0)
    made = recipe(folder, effective_batch=6)
    plans = trial_plans(setup_of(made, folder), "cuda", 45)
    report(Stage(folder, made, 4), enumerate(plans), f"array of {len(plans)} plans")


def report(stage: Stage, plans: Iterator[tuple[int, Plan]], title: str) -> None:
    alarms: list[str] = []
    for number, plan in plans:
        began = time.perf_counter()
        changed = {k: v for k, v in plan.model_dump().items() if v != getattr(Plan(), k)}
        try:
            found = stage.compare(plan)
        except Exception as error:  # the others are still worth having
            alarms.append(f"{type(error).__name__}: {error}")
            print(f"{number:3d} failed: {changed}\n    {alarms[-1][:600]}", flush=True)
            continue
        show(number, str(changed), found, time.perf_counter() - began, alarms)
    print(f"{title}: {len(alarms)} differences; limits {LIMITS}")


def alarms(folder: Path, first_seed: int) -> None:
    from sameday.models.vlm import load_base

    write_model(folder / "model", [" ".join(WORDS)], 0, device="cuda", dtype=torch.bfloat16, **SHAPES["1b"])
    kept: dict[str, Any] = {}

    def load_once(name: str, asked: VqaRecipe, device: torch.device) -> Any:
        """Other noise in the weights for each seed would be another model; data, order and adapters differ."""
        import copy

        if asked.precision not in kept:
            kept[asked.precision] = load_base(name, asked, device)
        return copy.deepcopy(kept[asked.precision])

    vqa.load_base = load_once
    plans = {
        "4x4": Plan(max_questions=4),
        "shared, dense mask": Plan(**SHARED, attention="sdpa", optimizer_impl="fused"),
        "shared, split, checkpointing": Plan(**SHARED, attention="split", checkpointing="full"),
        "best": Plan(**ALL_OF_IT),
    }

    def stage(seed: int) -> Stage:
        home = folder / str(seed)
        write_data(home, images=4, each=6, size=(448, 384), words=24, seed=seed)
        return Stage(home, recipe(home, effective_batch=8, seed=seed, model=str(folder / "model")), 6)

    compared(stage, range(first_seed, first_seed + 5), plans)
    print(f"{sum(p.numel() for p in kept['bf16'].parameters()) / 1e9:.2f} B parameters")


def answers(folder: Path, first_seed: int) -> None:
    """On any machine, with few weights but a real vocabulary: the more tokens there are, the nearer are the likeliest.
    The fault generates every token after an answer's first one position too far on."""
    text = SHAPES["small"]["text"] | {"vocab_size": 151936, "num_hidden_layers": 16}
    for seed in range(first_seed, first_seed + 8):
        home = folder / str(seed)
        write_model(home / "model", [" ".join(WORDS)], seed, sharpen=1.5, text=text, vision=SHAPES["small"]["vision"])
        write_data(home / "data", images=3, each=8, size=(96, 64), words=12, seed=seed)
        for stored in ("precision", "fp8"):
            made = recipe(home / "data", seed=seed, model=str(home / "model"), base_format=stored)
            setup = setup_of(made, home / "data")
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            task = setup.load(Plan(**SHARED, attention="sdpa"), device, setup.audit(silent).splits)
            right = max(task.generation_gaps(range(24)))
            following = task.model.next_hidden
            task.model.next_hidden = lambda tokens, at, keys, following=following: following(tokens, at + 1, keys)
            wrong = max(task.generation_gaps(range(24)))
            print(f"seed {seed}  {made.base_words:10s} {right:.3f}  with the fault {wrong:.2f}", flush=True)


def images(folder: Path, first_seed: int) -> None:
    """In as few steps as `sameday tune` compares."""
    made = load_recipe(Path(__file__).resolve().parents[1] / "examples" / "cifar10_bdh.yaml")
    cuda = torch.cuda.is_available()
    if not cuda:  # only to see that this runs
        made = made.model_copy(update={"model": made.model.model_copy(update={"levels": 1, "width": 48, "latents": 2})})
    fast = {"optimizer_impl": "fused"}
    fused = {"level_kernel": "fused" if cuda else "plain", **fast}
    plans = {
        "fused": Plan(**fused),
        "fused, recorded": Plan(cuda_graphs=cuda, images_on="device", **fused),
        "compiled": Plan(compile="layers" if cuda else "none", micro_batch=16, **fast),
    }

    def stage(seed: int) -> Stage:
        home, classes = folder / str(seed), (2, 3, 4)[seed % 3]
        write_patterns(home / "set", train=96, test=16, classes=classes, seed=seed)
        data = made.data.model_copy(update={"path": "set", "val": 16})
        return Stage(home, made.model_copy(update={"seed": seed, "data": data}), STEPS_TO_VERIFY)

    compared(stage, range(first_seed, first_seed + (7 if cuda else 1)), plans)


def compared(stage_of: Callable[[int], Stage], seeds: Iterable[int], plans: Mapping[str, Plan]) -> None:
    found, count, largest = [], 0, Comparison("bf16")
    for seed in seeds:
        stage = stage_of(seed)
        for name, plan in plans.items():
            began = time.perf_counter()
            result = stage.compare(plan)
            count += 1
            show(count, f"seed {seed}, {name}", result, time.perf_counter() - began, found)
            for measure, value in result.worst.items():
                largest.note(measure, value, result.names[measure], result.bounds.get(measure))
    print(f"{count} comparisons, {len(found)} false alarms; the largest of each measure:")
    for measure, value in largest.worst.items():
        print(f"  {measure:20s} {value:9.2e}  {largest.names[measure]}")


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, and some of the plans are deterministic
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("best", "nf4", "fp8", "array", "alarms", "answers", "images"))
    parser.add_argument("--first-seed", type=int, default=0, help="alarms, answers, images: some seeds from here on")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if args.what in ("alarms", "answers", "images"):
            {"alarms": alarms, "answers": answers, "images": images}[args.what](Path(folder), args.first_seed)
        else:
            nf4 = partial(best, shapes="1b", base_format="nf4", double_quant=True)
            fp8 = partial(best, shapes="1b", base_format="fp8")
            {"best": best, "nf4": nf4, "fp8": fp8, "array": array}[args.what](Path(folder))


if __name__ == "__main__":
    main()
