"""How fast images reach the model: each stage by itself, whole loaders beside a plain PyTorch DataLoader, and what an
8B step waits for.

python bench/pipeline.py stages     # images/s of one process: read, decode, resize, from the cache
python bench/pipeline.py loaders    # questions/s: ours cold and cached, and a DataLoader with transformers' processor
python bench/pipeline.py wait       # on a GPU: the share of an image-shared 8B step that is waited for
python bench/pipeline.py audit --images 6500 --size 256 256    # seconds of a first audit of a set, and of the next
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from sameday.cache.store import Store
from sameday.data.loader import feed
from sameday.data.questions.audit import audit, cores
from sameday.data.questions.images import open_rgb
from sameday.data.questions.sample import images_of
from sameday.data.questions.source import PIXELS, decode
from sameday.demo.tiny import write_model
from sameday.hardware.machine import detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models.families import family_of
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.vqa.cache import open_cache, settings_of
from sameday.tasks.vqa.fill import Filling
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

SHARED: dict[str, Any] = {
    "share_images": True,
    "packing": True,
    "max_questions": None,
    "label_only_logits": True,
    "token_budget": 8192,
}


def write_set(folder: Path, images: int, questions: int, size: tuple[int, int]) -> VqaRecipe:
    """JPEGs that are neither flat nor noise, each with some questions, and a model that only lends its tokenizer."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    rows = []
    for i in range(images):
        coarse = rng.integers(0, 256, (size[1] // 16, size[0] // 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
        grain = rng.integers(-12, 13, (size[1], size[0], 1), dtype=np.int16)
        Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(folder / f"images/{i}.jpg", quality=90)
        for q in range(questions):
            rows.append({"image": f"{i}.jpg", "question": f"what is at place {q} of this?", "answer": "a polyp"})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_model(folder / "model", [f"{row['question']} {row['answer']}" for row in rows], seed=0)
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3}
    settings |= {"image_std": [0.5] * 3, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    (folder / "model/preprocessor_config.json").write_text(json.dumps(settings))
    return VqaRecipe.model_validate(
        {
            "model": "model",
            "precision": "float32",
            "order": "by_image",
            "effective_batch": 16,
            "learning_rate": 1e-4,
            "data": {"train": "train.jsonl", "image_root": "images"},
        }
    )


def load(folder: Path, recipe: VqaRecipe, **plan: Any) -> VqaTask:
    setup = VqaSetup(recipe, folder)
    resolved = setup.resolve_auto(Plan(**SHARED, **plan), detect_machine("cpu"))
    return setup.load(resolved.plan, torch.device("cpu"), setup.audit(lambda _: None).splits)


def rate(work: Callable[[Any], Any], items: list[Any], seconds: float = 3.0) -> list[float]:
    """Items per second in each of five rounds."""
    found = []
    for _ in range(5):
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds / 5:
            work(items[done % len(items)])
            done += 1
        found.append(done / (time.perf_counter() - began))
    return found


def told(name: str, rates: list[float], what: str) -> None:
    print(f"{name:44s} {statistics.median(rates):8.1f} {what} ({min(rates):.1f}-{max(rates):.1f})", flush=True)


def stages(folder: Path, recipe: VqaRecipe) -> None:
    """One process, one thread: what a worker can do."""
    torch.set_num_threads(1)
    task = load(folder, recipe)
    images, processor = images_of(task.splits), task.processor
    store = Store(folder / "sameday-cache", settings_of("pixels", processor, None))
    opened = {image.path: open_rgb(image.path) for image in images[:8]}
    bytes_of = {image.digest: decode(image, processor).tensor for image in images[:8]}
    few = images[:8]
    told("read the file", rate(lambda image: image.path.read_bytes(), few), "images/s")
    told("read and decode to RGB", rate(lambda image: open_rgb(image.path), few), "images/s")
    told("resize", rate(lambda image: processor.resized(opened[image.path]), few), "images/s")
    told("all of it, as a worker does", rate(lambda image: decode(image, processor), few), "images/s")
    told("keep in the cache", rate(lambda i: store.write(i.digest, {PIXELS: bytes_of[i.digest]}), few), "images/s")
    told("from the cache", rate(lambda image: store.read(image.digest), few), "images/s")
    told("transformers' processor, from RGB", rate(lambda i: processor.pixels(opened[i.path]), few), "images/s")


class Questions(Dataset[torch.Tensor]):
    """What people write: each question opens its image and hands it to the processor."""

    def __init__(self, task: VqaTask) -> None:
        self.samples, self.processor = task.splits["train"], task.processor._processor

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> torch.Tensor:
        with Image.open(self.samples[i].images[0].path) as image:
            return self.processor(images=[image.convert("RGB")], return_tensors="pt")["pixel_values"]


def timed(batches: Iterator[Any], count: Callable[[Any], int], seconds: float) -> float:
    """Questions per second once the workers run."""
    next(batches)
    began, done = time.perf_counter(), 0
    for batch in batches:
        done += count(batch)
        if time.perf_counter() - began > seconds:
            break
    return done / (time.perf_counter() - began)


def ours(task: VqaTask, seconds: float) -> float:
    """Steps over and over, as the loop asks for them."""
    made = feed(task.plan, task.device, range(10**6), lambda step: task.batches(step, None, Ranks()))
    with closing(made) as steps:
        return timed(steps, lambda step: sum(len(batch.sample_ids) for batch in step), seconds)


def usual(task: VqaTask, workers: int, seconds: float) -> float:
    loader = DataLoader(Questions(task), batch_size=None, shuffle=True, num_workers=workers, prefetch_factor=2)

    def again() -> Iterator[torch.Tensor]:
        while True:
            yield from loader

    return timed(again(), lambda _: 1, seconds)


def loaders(folder: Path, recipe: VqaRecipe, questions: int, workers: int, seconds: float) -> None:
    torch.set_num_threads(1)
    cold = load(folder, recipe, workers=workers)
    filled = load(folder, recipe, workers=workers, cache="pixels")
    images = images_of(filled.splits)
    Filling("pixels", filled.processor, images, folder / "sameday-cache", lambda _: None).fill(cores())
    arms: dict[str, Callable[[], float]] = {
        "PyTorch DataLoader, transformers' processor": lambda: usual(cold, workers, seconds),
        "sameday, cold": lambda: ours(cold, seconds),
        "sameday, pixels cached": lambda: ours(filled, seconds),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(3):  # in turns, so that what else the machine does meets all of them
        for name, arm in arms.items():
            found[name].append(arm())
    plain = statistics.median(next(iter(found.values())))
    for name, rates in found.items():
        told(name, rates, f"questions/s, {statistics.median(rates) / plain:5.1f} times")
    print(f"{questions} questions per image, {workers} workers, median of 3 (least to most)")


def wait(folder: Path, recipe: VqaRecipe, workers: int, steps: int) -> None:
    """Steps of an 8B model (random weights) over the set, as the loop runs them; and how much of them was waited."""
    from vlm_step import build

    device = torch.device("cuda")
    compiled = {"compile": "layers", "pad_to_multiple": 32, "optimizer_impl": "fused", "pin_memory": True}
    host = load(folder, recipe)
    recipe = recipe.model_copy(update={"precision": "bf16"})
    model = None
    for cache in ("none", "pixels"):
        plan = Plan(**SHARED, **compiled, attention="split", workers=workers, cache=cache)
        if model is None:
            base = build("8b", device, torch.bfloat16)
            table = host.processor.byte_table
            model = VisionLanguageModel(base, family_of("qwen3_vl"), recipe, plan, device, table)
        contents = {image.digest for image in images_of(host.splits)}
        opened = open_cache(recipe, plan, folder / "sameday-cache", host.processor, model, contents)
        task = VqaTask(recipe, plan, model, host.encoder, host.processor, host.splits, cache=opened)
        with closing(Steps(recipe, plan, task, Ranks())) as computed:
            done = list(computed.run(range(steps)))
        seconds, waited = [good.seconds for good in done], [good.input["wait"] for good in done]
        late = slice(steps // 2, None)  # until then row lengths are compiled
        share = 100 * sum(waited[late]) / sum(seconds[late])
        print(
            f"cache {cache}: {1000 * statistics.median(seconds[late]):.0f} ms a step ({1000 * min(seconds[late]):.0f}-"
            f"{1000 * max(seconds[late]):.0f}), {share:.2f}% of it waiting for data, {workers} workers",
            flush=True,
        )


def audits(folder: Path, images: int) -> None:
    """What a start waits for: every image decoded once, and then known by its file."""
    old = time.time() - 60  # as of a set that was not written a moment ago
    for path in (folder / "images").iterdir():
        os.utime(path, (old, old))
    os.environ["SAMEDAY_CACHE_HOME"] = str(folder / "home")
    for name in ("first", "second", "third"):
        began, computed = time.perf_counter(), time.process_time()
        samples = audit(folder / "train.jsonl", folder / "images", None).samples
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
        what = f"{name} audit of {images} images with {len(samples)} questions"
        print(f"{what}: {seconds:.2f} s, {computed:.2f} s of CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stages", "loaders", "wait", "audit"))
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--questions", type=int, default=9)
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 1024), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of a loader")
    parser.add_argument("--steps", type=int, default=48, help="of the 8B model, the first half to warm up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = write_set(folder, args.images, args.questions, tuple(args.size))
        print(f"{args.images} JPEGs of {args.size[0]}×{args.size[1]}, {cores()} cores", flush=True)
        if args.what == "stages":
            stages(folder, recipe)
        elif args.what == "audit":
            audits(folder, args.images)
        elif args.what == "wait":
            wait(folder, recipe, args.workers, args.steps)
        else:
            loaders(folder, recipe, args.questions, args.workers, args.seconds)


if __name__ == "__main__":
    main()
