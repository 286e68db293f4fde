"""A step of 16 questions at Qwen3-VL-8B's shapes, launched as it is, padded to a shape and launched, and recorded.

    python bench/recorded.py                    # one GPU: 768×576 and 1280×1024 pixels, two images a step
    python bench/recorded.py --only 768×576     # one of them alone
    python bench/recorded.py --size tiny        # tries the script on a CPU, where nothing is recorded
    python bench/recorded.py --plan compile=none --plan checkpointing=full --dropout 0.05

Random weights, made images and questions, batches made beforehand. All sizes are recorded, also those that a run
launches since it does not pay, the largest first as in a run. Before a row is timed its steps are repeated for some
seconds, so that clocks and caches are warm in each. Of each row: seconds of a step, median (least to most), one step
launched ahead as the loop does it; seconds of the host until a step is launched; tokens of a step; memory that the
allocator held at most, and afterwards; how far its gradient is from the launched one's, relatively, and from the padded
one's; and of what is recorded how many shapes and the seconds that took.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vlm_step import IMAGE_TOKEN, SIZES, MadeData, build

from sameday.data.questions.encode import Encoded
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.hardware.ranks import Ranks
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.cache import Opened
from sameday.tasks.vqa.task import VqaTask
from sameday.train.commit import StepCommit
from sameday.train.steps import Steps

QUESTIONS, EACH = 16, 8
"""Of a step, and of an image."""
PICTURES = {"768×576": ((36, 48), 30), "1280×1024": ((64, 80), 64)}
"""Patches of an image, and about how many tokens of text a question has."""
PLAN: dict[str, Any] = {
    "share_images": True,
    "share_text": True,
    "packing": True,
    "max_questions": None,
    "token_budget": 16384,
    "attention": "split",
    "label_only_logits": True,
    "optimizer_impl": "fused",
    "pin_memory": True,
    "compile": "layers",
    "pad_to_multiple": 32,
    "cuda_graphs": True,
}
ARMS = ("launched", "padded, launched", "recorded")
STEPS = 4
"""Different ones, in turn."""
WARM_SECONDS = 5.0
"""Of steps that are not timed."""


class Photographs(MadeData):
    """So many steps of questions, whose lengths differ by a third."""

    def __init__(self, size: str, grid: tuple[int, int], text: int) -> None:
        super().__init__("by_image", size, 512, grid)
        rng = np.random.default_rng(1)
        patches, images = self.grid[0] * self.grid[1], STEPS * QUESTIONS // EACH
        self.image_pixels = torch.from_numpy(rng.integers(0, 256, (images, patches * 16 * 16 * 3), dtype=np.uint8))
        head, span = rng.integers(1, 400, 4), (4, 4 + patches // 4)
        self.encoded = {}
        for number in range(STEPS * QUESTIONS):
            image = number // EACH
            ref = ImageRef(Path(str(image)), f"image {image}", 16 * self.grid[1], 16 * self.grid[0])
            tail = rng.integers(1, 400, int(rng.integers(text * 5 // 6, text * 7 // 6)))
            tokens = np.concatenate([head, np.full(patches // 4, IMAGE_TOKEN), [450], tail]).astype(np.int64)
            targets = np.arange(len(tokens)) >= len(tokens) - 3
            message = (Message("user", (0, "")), Message("assistant", ("",)))
            sample = Sample(number, f"made:{number}", (ref,), message)
            self.encoded[number] = Encoded(sample, tokens, targets, span[1] + 1, (self.grid,), (span,))


class Arms:
    """One model and one task; an arm is a way to run its steps."""

    def __init__(self, data: Photographs, recipe: VqaRecipe, plan: Plan, base: Any, device: torch.device) -> None:
        byte_table = np.linspace(-1, 1, 256, dtype=np.float32)[None].repeat(3, 0)
        model = VisionLanguageModel(base, data.family, recipe, plan, device, byte_table)
        self.model, self.device, self.cuda = model, device, device.type == "cuda"
        self.use(data, recipe, plan)
        for i, (_, parameter) in enumerate(sorted(self.task.trained().items())):  # away from the start, where B is zero
            generator = torch.Generator().manual_seed(i)
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).to(device)
        self.task.training(True)

    def use(self, data: Photographs, recipe: VqaRecipe, plan: Plan) -> None:
        samples = [encoded.sample for encoded in data.encoded.values()]
        made: Any = Opened(data, "none", [])  # type: ignore[arg-type]
        self.task = VqaTask(recipe, plan, self.model, data, data, {"train": samples}, cache=made)  # type: ignore[arg-type]
        self.pays, self.task.most_recorded = self.task.most_recorded, None
        self.steps = Steps(recipe, plan, self.task, Ranks())
        self.commit = StepCommit(self.steps.optimizer, self.steps.gradients, recipe.max_grad_norm)

    def choose(self, arm: str) -> None:
        self.task.plan = self.task.plan.model_copy(update={"cuda_graphs": arm != "launched"})
        self.task.recorder.forget()
        self.task.recorder.records = arm == "recorded" and self.cuda

    def batches(self, step: int) -> list[Any]:
        made = self.task.batches(step % STEPS, None, Ranks())
        return [batch.pin_memory() if self.cuda else batch for batch in made]

    def launch(self, batches: list[Any], step: int) -> Any:
        self.steps.gradients.zero()
        moved = (batch.to(self.device, non_blocking=True) for batch in batches)
        self.steps.accumulate(moved, step)
        return self.commit.begin(0.0)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def measure(arms: Arms, arm: str, steps: int) -> dict[str, Any]:
    arms.choose(arm)
    gc.collect()
    if arms.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    batches = [arms.batches(step) for step in range(STEPS)]
    first, gradient = 0.0, torch.zeros(())
    largest_first = sorted(range(STEPS), key=lambda step: -max(batch.tokens.numel() for batch in batches[step]))
    for step, number in enumerate([*largest_first, *range(STEPS)]):  # the second time nothing is new
        arms.wait()
        began = time.perf_counter()
        _, short, *_ = arms.commit.finish(arms.launch(batches[number], step))
        assert not short, f"{arm}: out of memory"
        arms.wait()
        spent = time.perf_counter() - began
        first += spent if step < STEPS else -spent
        if step == STEPS:
            gradient = arms.steps.gradients.all.clone()
    began = time.perf_counter()
    while arms.cuda and time.perf_counter() - began < WARM_SECONDS:
        for step in range(STEPS):
            arms.commit.finish(arms.launch(batches[step], step))
    host, times = [], []
    for step in range(steps):
        arms.wait()
        began = time.perf_counter()
        scalars = arms.launch(batches[step % STEPS], step)
        host.append(time.perf_counter() - began)
        arms.commit.finish(scalars)
    arms.wait()
    mark, ahead = time.perf_counter(), None
    for step in range(steps + 2):
        launched = arms.launch(batches[step % STEPS], step)
        if ahead is not None:
            arms.commit.finish(ahead)
            times.append((now := time.perf_counter()) - mark)
            mark = now
        ahead = launched
    arms.commit.finish(ahead)
    return {
        "arm": arm,
        "seconds": statistics.median(times[1:]),
        "least": min(times[1:]),
        "most": max(times[1:]),
        "host": statistics.median(host),
        "tokens": statistics.fmean(sum(batch.tokens.numel() for batch in each) for each in batches),
        "GiB": torch.cuda.max_memory_reserved() / 2**30 if arms.cuda else float("nan"),
        "held": torch.cuda.memory_reserved() / 2**30 if arms.cuda else float("nan"),
        "first": first,
        "shapes": len(arms.task.recorder._made),
        "gradient": gradient,
    }


def words(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    off = [float((row["gradient"] - other["gradient"]).norm() / other["gradient"].norm()) for other in rows[:2]]
    spread = f"({row['least']:.3f}-{row['most']:.3f})"
    return (
        f"{row['arm']:18s} {row['seconds']:7.3f} {spread:>15s} {row['host']:7.3f} {row['tokens']:7.0f} "
        f"{row['GiB']:6.1f} {row['held']:6.1f} {off[0]:9.2e} {off[-1]:9.2e} {row['shapes']:6d} {row['first']:7.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="8b")
    parser.add_argument("--only", nargs="+", choices=tuple(PICTURES), default=tuple(PICTURES), metavar="PIXELS")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--layers", type=int, help="decoder layers, if not all")
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--plan", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    asked = dict(each.split("=", 1) for each in args.plan) | ({"compile": "none"} if args.size == "tiny" else {})
    plan = Plan.model_validate(PLAN | asked)
    recipe = VqaRecipe.model_validate(
        {"model": "made", "data": {"train": "made"}, "order": "listed", "effective_batch": QUESTIONS}
        | {"lora": {"r": 4, "alpha": 8, "dropout": args.dropout}, "num_epochs": 100}
        | ({} if device.type == "cuda" else {"precision": "float32"})
    )
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    base, arms, all_rows = build(args.size, device, dtype, args.layers), None, []
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, nothing is recorded"
    print(
        f"{args.size}, {QUESTIONS} questions on {QUESTIONS // EACH} images a step, {where}, torch {torch.__version__}"
    )
    for name in args.only:
        grid, text = PICTURES[name]
        data = Photographs(args.size, grid, text)
        if arms is None:
            arms = Arms(data, recipe, plan, base, device)
        else:
            arms.use(data, recipe, plan)
        pays = "" if arms.pays is None else f"; a run records up to {arms.pays} tokens"
        print(f"\n{name}, {text} tokens of text. {arms.task.shapes(1).words()}{pays}")
        print(
            f"{'':18s} {'s/step':>7s} {'(least-most)':>15s} {'host':>7s} {'tokens':>7s} {'GiB':>6s} {'after':>6s} "
            f"{'launched':>9s} {'padded':>9s} {'shapes':>6s} {'first':>7s}"
        )
        rows: list[dict[str, Any]] = []
        for arm in ARMS:
            rows.append(measure(arms, arm, args.steps))
            print(words(rows[-1], rows), flush=True)
        all_rows += [{"pictures": name} | {k: v for k, v in row.items() if k != "gradient"} for row in rows]
    if args.json:
        args.json.write_text(json.dumps(all_rows, indent=1))


if __name__ == "__main__":
    main()
