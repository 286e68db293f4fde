"""The multi-head step of 16 questions beside the VQA step of the same questions, at the same shapes and in one run.

Random weights, made images and texts, as in bench/vlm_step.py: two images with eight questions each, 60 + 4 tokens. The
eight questions of an image have stages 1, 1, 1, 2, 2, 2, 3, 3. The two steps take turns, so that both meet the same
machine; the ratio is taken pair by pair.

    python bench/cot_step.py                    # tiny, on a CPU
    python bench/cot_step.py --size 8b          # Qwen3-VL-8B's shapes, on a GPU
    python bench/cot_step.py --size 8b --rank full
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vlm_step import COMPILED, SHARED, SIZES, MadeData, build

from sameday.hardware.ranks import Ranks
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.cot import CotRecipe
from sameday.spec.plan import Plan
from sameday.spec.vlm import VlmRecipe
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.cot.task import CotTask
from sameday.tasks.vqa.cache import Opened
from sameday.tasks.vqa.task import VqaTask
from sameday.train.commit import StepCommit
from sameday.train.steps import Steps

STAGES = (1, 1, 1, 2, 2, 2, 3, 3)
ON_A_GPU = {**SHARED, **COMPILED, "attention": "split", "pad_to_multiple": 32}


def stepping(
    kind: type[VqaTask], recipe: VlmRecipe, plan: Plan, data: MadeData, size: str, device: torch.device
) -> Callable[[], tuple[float, float]]:
    """A function that makes one whole step, and gives its seconds and its loss."""
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    byte_table = np.linspace(-1, 1, 256, dtype=np.float32)[None].repeat(3, 0)
    model = VisionLanguageModel(build(size, device, dtype), data.family, recipe, plan, device, byte_table)
    samples = [e.sample for e in data.encoded.values()]
    made: Any = Opened(data, "none", [])  # type: ignore[arg-type]
    task = kind(recipe, plan, model, data, data, {"train": samples}, cache=made)  # type: ignore[arg-type]
    for i, (_, parameter) in enumerate(sorted(task.trained().items())):  # away from the start, where B and P are zero
        generator = torch.Generator().manual_seed(i)
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).to(device)
    steps = Steps(recipe, plan, task, Ranks())
    commit = StepCommit(steps.optimizer, steps.gradients, recipe.max_grad_norm)
    batches = [b.pin_memory() if device.type == "cuda" else b for b in task.batches(0, None, Ranks())]
    assert sum(len(b.sample_ids) for b in batches) == len(samples)
    task.training(True)

    def step() -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        steps.gradients.zero()
        steps.accumulate((batch.to(device, non_blocking=True) for batch in batches), 0)
        loss, out_of_memory, *_ = commit.finish(commit.begin(1e-7))
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert not out_of_memory
        return time.perf_counter() - began, loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--rank", default="16", help="of the heads, or full")
    parser.add_argument("--steps", type=int, default=9, help="timed pairs of steps, after two that are not")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields: dict[str, Any] = {"model": "made", "data": {"train": "made"}, "order": "listed"}
    fields |= {} if device.type == "cuda" else {"precision": "float32"}  # few CPUs multiply bf16 at speed
    heads = {"rank": args.rank if args.rank == "full" else int(args.rank)}
    plan = Plan(**(ON_A_GPU if device.type == "cuda" else SHARED | {"pin_memory": False, "optimizer_impl": "foreach"}))
    data = MadeData("by_image", args.size, 512)
    for i, encoded in data.encoded.items():
        data.encoded[i] = replace(encoded, sample=replace(encoded.sample, stage=STAGES[i % len(STAGES)]))
    recipes: dict[str, tuple[type[VqaTask], VlmRecipe]] = {
        "vqa": (VqaTask, VqaRecipe.model_validate(fields)),
        "cot": (CotTask, CotRecipe.model_validate(fields | {"heads": heads})),
    }
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.size}, 16 questions a step, 2 images, heads of rank {args.rank}, {where}, torch {torch.__version__}")
    both = {name: stepping(*each, plan, data, args.size, device) for name, each in recipes.items()}
    times: dict[str, list[float]] = {name: [] for name in both}
    for number in range(args.steps + 2):
        for name, step in both.items():
            seconds, loss = step()
            if number == 0:
                print(f"{name}: loss {loss:.4f}, first step {seconds:.3f} s", flush=True)
            if number >= 2:
                times[name].append(seconds)
    for name, each in times.items():
        print(f"{name}: {statistics.median(each):.4f} s/step ({min(each):.4f}-{max(each):.4f})")
    ratios = [cot / vqa for cot, vqa in zip(times["cot"], times["vqa"], strict=True)]
    print(f"cot / vqa: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    if args.json:
        args.json.write_text(json.dumps({"seconds": times, "ratio": ratios, "device": where}, indent=1))


if __name__ == "__main__":
    main()
