"""Greedy answers to nine questions per image: questions per second of this package, each image prefilled once, and of
transformers' `generate` with PEFT at batches of 1, 8, 32 ... questions for as long as more are faster, in one run.

Random weights never end an answer, so that both generate the same number of tokens. Images and questions are made
beforehand; `generate` has its patches on the device already, this package makes them from bytes. For `generate` one
batch is timed, again and again; here a pass over all images.

    python bench/eval.py                        # tiny, on a CPU: tries the script, and compares the tokens
    python bench/eval.py --size 8b              # Qwen3-VL-8B's shapes in bf16, images of 1280×1024 and 768×576
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vlm_step import IMAGE_TOKEN, SIZES, build

from sameday.data.questions.encode import Encoded
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.data.questions.source import Picture, ReadImage
from sameday.data.times import Times
from sameday.hardware.ranks import Ranks
from sameday.kernels.dropout import name_key
from sameday.models.families import family_of
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.errors import RunStopped
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.base import Answer
from sameday.tasks.vqa import answers as answering
from sameday.tasks.vqa.cache import Opened
from sameday.tasks.vqa.task import VqaTask

PER_IMAGE = 9
BATCHES = (1, 8, 32, 64, 128, 256)
GRIDS = {"8b": {"1280×1024": (64, 80), "768×576": (36, 48)}, "tiny": {"160×128": (8, 10), "96×96": (6, 6)}}
BUDGETS = {"8b": (32768, 65536), "tiny": (512, 2048)}
HEADS = "{:34s}" + f" {'questions/s':>12s} {'(least-most)':>20s} {'GiB':>7s} {'first s':>7s}"
BYTE_TABLE = np.linspace(-1, 1, 256, dtype=np.float32)[None].repeat(3, 0)


class MadePrompts:
    """Stands where encoder and image processor stand."""

    family = family_of("qwen3_vl")
    merge_size, end_token, learned_behind_end = 2, 0, 0

    def __init__(self, images: int, grid: tuple[int, int], text: int) -> None:
        rng = np.random.default_rng(0)
        patches = grid[0] * grid[1]
        self.grid, self.per_image = grid, patches
        self.pixels = torch.from_numpy(rng.integers(0, 256, (images, patches * 16 * 16 * 3), dtype=np.uint8))
        self.prompts: list[Encoded] = []
        span = (4, 4 + patches // 4)  # three tokens of frame and <vision_start> before, <vision_end> after
        head = rng.integers(1, 400, 4)
        for i in range(images * PER_IMAGE):
            image = i // PER_IMAGE
            ref = ImageRef(Path(str(image)), f"image {image}", 16 * grid[1], 16 * grid[0])
            tail = rng.integers(1, 400, text)
            tokens = np.concatenate([head, np.full(patches // 4, IMAGE_TOKEN), [450], tail]).astype(np.int64)
            sample = Sample(i, f"made:{i}", (ref,), (Message("user", (0, "")), Message("assistant", ("",))))
            self.prompts.append(Encoded(sample, tokens, np.zeros(len(tokens), bool), span[1] + 1, (grid,), (span,)))

    @property
    def samples(self) -> list[Sample]:
        return [prompt.sample for prompt in self.prompts]

    def encode(self, sample: Sample) -> Encoded:
        return self.prompts[sample.id]

    prompt = encode

    def note(self, _torchvision: bool) -> None:
        return None

    def read_image(self, image: ImageRef) -> Picture:
        return Picture(image.digest, self.pixels[int(image.path.name)], False, Times())

    def once(self) -> ReadImage:
        return self.read_image


class NeverEnding(VqaTask):
    """Keeps the tokens of its answers."""

    end_tokens = frozenset()  # type: ignore[assignment]

    def answer(self, tokens: Sequence[int]) -> Answer:
        return Answer(json.dumps(list(tokens)), len(tokens))


def stir(model: torch.nn.Module) -> None:
    """Adapters away from their start, alike wherever they have the same names."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(name_key("bench", name) & 0xFFFF)
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=generator))


def timed(work: Callable[[], Any], repeats: int, device: torch.device) -> tuple[list[float], Any]:
    """Seconds of the first, which compiles what there is to compile, and of each after it; and what the last gave."""
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        made = work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds, made


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")


# transformers


def their_model(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    from peft import LoraConfig, get_peft_model

    # Adapters in the model's own format, which spares PEFT conversions.
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(build(size, device, dtype), lora, autocast_adapter_dtype=False).eval()
    stir(model)
    return model


def their_inputs(data: MadePrompts, chosen: Sequence[int], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    from sameday.kernels.patches import Patching, patches

    prompts = [data.prompts[i] for i in chosen]
    tokens = torch.from_numpy(np.stack([prompt.tokens for prompt in prompts])).to(device)
    images = torch.cat([data.pixels[int(prompt.sample.images[0].path.name)] for prompt in prompts]).to(device)
    grids = [data.grid] * len(prompts)
    table = torch.from_numpy(BYTE_TABLE).to(device, dtype)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": patches(images, grids, Patching(16, 2, 2), table),
        "image_grid_thw": torch.tensor([(1, *grid) for grid in grids], device=device),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
    }


def their_rows(model: Any, data: MadePrompts, new: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    dtype, rows = next(model.parameters()).dtype, []
    for batch in BATCHES:
        if batch > len(data.prompts):
            break
        free(device)
        # Questions far from each other, as a loader gives them; how they are chosen changes no time.
        chosen = [i * len(data.prompts) // batch for i in range(batch)]
        try:
            inputs = their_inputs(data, chosen, device, dtype)
            work = partial(model.generate, **inputs, do_sample=False, max_new_tokens=new, pad_token_id=0)
            with torch.no_grad():
                seconds, made = timed(work, repeats, device)
                tokens = made[:, inputs["input_ids"].shape[1] :].tolist()
        except torch.OutOfMemoryError:
            print(f"{f'generate, {batch} at once':34s} out of memory", flush=True)
            break
        answers = dict(zip(chosen, tokens, strict=True))
        rows.append(row(f"generate, {batch} at once", batch, seconds, device) | {"answers": answers})
        if len(rows) > 1 and rows[-1]["questions/s"] < rows[-2]["questions/s"]:
            break
    return rows


# This package


def our_model(size: str, recipe: VqaRecipe, plan: Plan, device: torch.device, dtype: torch.dtype) -> Any:
    model = VisionLanguageModel(build(size, device, dtype), MadePrompts.family, recipe, plan, device, BYTE_TABLE)
    stir(model.module)
    return model


def our_rows(
    model: VisionLanguageModel,
    recipe: VqaRecipe,
    data: MadePrompts,
    budgets: Sequence[int],
    new: int,
    repeats: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    rows = []
    how = "compiled" if model.plan.compile == "layers" else "shared"
    for budget in budgets:
        free(device)
        plan = model.plan.model_copy(update={"eval_token_budget": budget})
        made: Any = Opened(data, "none", [])  # type: ignore[arg-type]
        task = NeverEnding(recipe, plan, model, data, data, {"test": data.samples}, cache=made)  # type: ignore[arg-type]
        work = partial(all_answers, task, data.samples, new)
        try:
            seconds, answers = timed(work, repeats, device)
        except RunStopped:  # its batches are halved first: not even one question has room
            print(f"{f'{how}, {budget} tokens at once':34s} out of memory", flush=True)
            break
        rows.append(row(f"{how}, {budget} tokens at once", len(data.prompts), seconds, device) | {"answers": answers})
    return rows


def all_answers(task: VqaTask, samples: list[Sample], new: int) -> dict[int, list[int]]:
    parts = list(task.answers(samples, new, Ranks()))
    return {number: json.loads(answer.text) for part in parts for number, answer in part.items()}


def row(name: str, questions: int, seconds: Sequence[float], device: torch.device) -> dict[str, Any]:
    first, *rest = seconds
    rates = [questions / each for each in rest]
    made = {"name": name, "questions/s": statistics.median(rates), "least": min(rates), "most": max(rates)}
    made |= {"GiB": peak(device), "first": first}
    spread = f"({made['least']:.2f}-{made['most']:.2f})"
    print(f"{name:34s} {made['questions/s']:12.2f} {spread:>20s} {made['GiB']:7.1f} {first:7.1f}", flush=True)
    return made


def compared(name: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of both, and how many answers are the same tokens."""
    best = [max(rows, key=lambda each: each["questions/s"]) for rows in (theirs, ours)]
    times = best[1]["questions/s"] / best[0]["questions/s"]
    one = next(each["answers"] for each in theirs)
    pairs = [(found, best[1]["answers"][number]) for each in theirs for number, found in each["answers"].items()]
    same = sum(found == expected for found, expected in pairs)
    print(
        f"{name}: {best[1]['name']} is {times:.1f} times {best[0]['name']}; {same} of {len(pairs)} answers have "
        f"the same {len(next(iter(one.values())))} tokens",
        flush=True,
    )
    return {"times": times, "same": same, "of": len(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--new", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--text", type=int, default=60, help="tokens of each question, behind its image")
    parser.add_argument("--images", type=int, help="how many; default 64, or 4 for the tiny model")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes, after one that is not")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.size == "8b" and device.type == "cpu":
        parser.error("--size 8b is for a GPU")
    half = args.size == "8b"
    dtype, images = torch.bfloat16 if half else torch.float32, args.images or (64 if half else 4)
    recipe = VqaRecipe.model_validate(
        {"model": "made", "data": {"train": "made"}, "precision": "bf16" if half else "float32"}
    )
    plan = Plan(
        **{"share_images": True, "packing": True, "max_questions": None, "pin_memory": device.type == "cuda"},
        attention="split" if half else "sdpa",
        label_only_logits=True,
    )
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{args.size}, {PER_IMAGE} questions per image, {args.text} + {args.new} tokens, {where}, {torch.__version__}\n"
    )
    # One model after the other: none waits in memory while the other is timed.
    worlds = {name: MadePrompts(images, grid, args.text) for name, grid in GRIDS[args.size].items()}
    rows: dict[str, dict[str, Any]] = {}
    theirs = their_model(args.size, device, dtype)
    for name, data in worlds.items():
        print(HEADS.format(name))
        rows[name] = {"generate": their_rows(theirs, data, args.new, args.repeats, device)}
    del theirs
    free(device)
    plans = [plan]
    worth, answering.WORTH_COMPILING = answering.WORTH_COMPILING, 0  # as for a set that is large enough
    if half:  # a CPU's compiler is slow
        plans.append(plan.model_copy(update={"compile": "layers", "pad_to_multiple": 32}))
    for plan in plans:
        ours = our_model(args.size, recipe, plan, device, dtype)
        for name, data in worlds.items():
            print(HEADS.format(name))
            own = our_rows(ours, recipe, data, BUDGETS[args.size], args.new, args.repeats, device)
            rows[name]["compiled" if plan.compile == "layers" else "shared"] = own
            free(device)
        del ours
    if half:
        print(f"compiled is what sets of {worth:,} questions and more get, shared what smaller ones get")
    for name, made in rows.items():
        beside = {how: compared(name, made["generate"], made[how]) for how in ("shared", "compiled") if how in made}
        rows[name] |= {f"{how}, beside generate": found for how, found in beside.items()}
    if args.json:
        for made in rows.values():
            for each in (*made["generate"], *made["shared"], *made.get("compiled", ())):
                del each["answers"]
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
