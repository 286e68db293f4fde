"""Small generated question sets and tiny models for the tests: real files, real tokenizer, real images."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sameday.data.questions.audit import check
from sameday.demo.tiny import write_model
from sameday.hardware.machine import detect_machine
from sameday.models.families import known_families
from sameday.spec.cot import CotRecipe
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.cot.task import CotTask
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask

WORDS = ["is", "there", "a", "red", "polyp", "near", "the", "left", "wall", "what", "size", "shape", "colour"]
WORDS += ["how", "many", "instruments", "can", "you", "see", "here"]
SQUARE = ("gemma3", "llava")
"""Families whose images are squares of one size; their towers have a q_proj too."""
FAMILIES = tuple(family for family in known_families() if family not in SQUARE)
"""The others: images of many sizes, positions along three axes."""
OF_THE_DECODER = [f"language_model.{name}_proj" for name in "qkvo"]
SIZES = ((48, 48), (96, 64), (64, 112), (32, 80), (120, 120))


def text(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def draw_image(path: Path, rng: random.Random, size: tuple[int, int]) -> None:
    generator = np.random.default_rng(rng.randrange(2**32))
    noise = generator.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def write_world(
    folder: Path,
    seed: int,
    counts: tuple[int, ...] = (17, 1, 5, 3),
    hard: bool = True,
    chats: bool = False,
    sizes: tuple[tuple[int, int], ...] = SIZES,
) -> Path:
    """`counts[i]` questions about image i. `hard` adds what sharing must get right: questions about two
    images, some of another system prompt about the first image, two images of one size, long answers. `chats`
    adds conversations of two turns (some with an image in the second one) and a question without an image."""
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for i, count in enumerate(counts):
        draw_image(folder / f"images/{i}.png", rng, sizes[i % len(sizes)])
        for _ in range(count):
            asked, answer = text(rng, 2, 9) + "?", text(rng, 1, 4)
            rows.append({"image": f"{i}.png", "question": asked, "answer": answer, "stage": rng.randint(1, 3)})
    if hard:
        draw_image(folder / "images/twin.png", rng, sizes[0])  # as large as image 0, other pixels
        both = ["0.png", "twin.png"]
        rows += [
            {"image": "twin.png", "question": text(rng, 2, 5), "answer": text(rng, 1, 3), "stage": 1},
            {"image": both, "question": "what differs?", "answer": text(rng, 2, 5), "stage": 2},
            {"image": both, "question": "and is that so?", "answer": "no", "stage": 2},
            {"image": "1.png", "question": text(rng, 3, 6), "answer": text(rng, 30, 40), "stage": 3},
        ]
        rows += [
            {
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": "<image>" + text(rng, 2, 5)},
                    {"role": "assistant", "content": text(rng, 1, 3)},
                ],
                "images": ["0.png"],
                "stage": 1,
            }
            for _ in range(2)
        ]
        rng.shuffle(rows)
    if chats:
        said = [
            (["0.png"], ("<image>" + text(rng, 2, 5), text(rng, 2, 5), text(rng, 2, 5), text(rng, 1, 3))),
            (["0.png"], ("<image>" + text(rng, 2, 5), text(rng, 2, 5), text(rng, 2, 5), text(rng, 1, 3))),
            (["0.png"], ("is it so?", text(rng, 2, 5), "<image>" + text(rng, 2, 5), text(rng, 1, 3))),
            (["1.png"], ("is it so?", text(rng, 2, 5), "<image>" + text(rng, 2, 5), text(rng, 1, 3))),
            (["0.png", "1.png"], ("<image>" + text(rng, 2, 5), "yes", "<image> and here?", text(rng, 1, 3))),
            ([], (text(rng, 2, 5), text(rng, 1, 3))),
        ]
        for images, turns in said:
            messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
            rows.append({"messages": messages, "images": images, "stage": 1})
        rng.shuffle(rows)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:9]))
    return folder


def write_tiny(folder: Path, family: str = "qwen3_vl", sharpen: float = 2.0, seed: int = 1, **more: Any) -> Path:
    texts = [*WORDS, " ".join(WORDS)]
    write_model(folder, texts, seed=seed, family=family, sharpen=sharpen, **more)
    return folder


def tiny_recipe(model: Path, **changes: Any) -> VqaRecipe:
    whole = {"lora": {}} if changes.get("train") == "all" else {}
    return VqaRecipe.model_validate(_fields(model) | changes | whole)


def cot_recipe(model: Path, **changes: Any) -> CotRecipe:
    return CotRecipe.model_validate(_fields(model) | {"heads": {"rank": 3}} | changes)


def _fields(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "precision": "float32",
        "data": {"train": "train.jsonl", "val": "val.jsonl", "image_root": "images"},
        "lora": {"r": 4, "alpha": 8},
        "effective_batch": 16,
        "learning_rate": 1e-3,
    }


def make_cot(folder: Path, recipe: CotRecipe, plan: Plan, device: str = "cpu") -> CotTask:
    setup = CotSetup(recipe, folder)
    splits = setup.audit(lambda _: None, ("train", "val")).splits
    return setup.load(setup.resolve_auto(plan, detect_machine(device)).plan, torch.device(device), splits)


def make_task(folder: Path, recipe: VqaRecipe, plan: Plan, device: str = "cpu") -> VqaTask:
    setup = VqaSetup(recipe, folder)
    splits = {
        name: check(folder / f"{name}.jsonl", folder / "images", setup.family, recipe.data.limit, wanted=setup.wanted)[
            0
        ]
        for name in ("train", "val")
    }
    return setup.load(setup.resolve_auto(plan, detect_machine(device)).plan, torch.device(device), splits)


def once(load: Callable[..., Any]) -> Callable[..., Any]:
    """What was read, as a copy for each who asks for it."""
    known: dict[str, Any] = {}

    def copied(*what: Any) -> Any:
        if repr(what) not in known:
            known[repr(what)] = load(*what)
        return deepcopy(known[repr(what)])

    return copied


def stir(task: VqaTask, seed: int = 7) -> None:
    """Move adapters away from their start, where every B is zero and so is every A's gradient."""
    for name, parameter in sorted(task.trained().items()):
        generator = torch.Generator().manual_seed(hash_name(name) + seed)
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.device)


def hash_name(name: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(name)) % 2**31


def lines_of(readme: Path) -> str:
    """The Python that a README shows."""
    (lines,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    return str(lines)


def readme_logits(task: Any, image: str) -> tuple[Tensor, Tensor]:
    """Of the model that README.md here loads, and of the task, for the part of a prompt that both have: `image` is the
    file of the image in the data that the README asks about."""
    held: dict[str, Any] = {}
    exec(lines_of(Path("README.md")), held)
    tokens = held["inputs"]["input_ids"][0].tolist()
    every = [task._encode(s) for s in task.splits["train"] if [each.path.name for each in s.images] == [image]]
    encoded = next(e for e in every if e.tokens[: e.prefix].tolist() == tokens[: e.prefix])
    [[part]] = task._partition([encoded], task._cut(None), 1)
    with torch.no_grad():
        hidden = task.model.hidden(task._build([encoded], part))
        mine = task.model.logits(hidden, torch.arange(encoded.prefix))
        return held["model"](**held["inputs"]).logits[0, : encoded.prefix], mine
