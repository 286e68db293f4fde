"""The work that `bench/real.py`, `bench/peers.py` and `bench/growth.py` time: which images, how many questions of each,
in which order, and a model with random weights. What a folder has of it already is used again."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mixture import LARGE, QUESTIONS, USUAL, write_mixture, write_split
from verify import SHAPES

from sameday.commands.session import silent
from sameday.data.order import Place, epoch_steps
from sameday.demo.tiny import write_model
from sameday.spec.load import recipe_from
from sameday.tasks.registry import setup_of

BATCH = 16
"""Questions of a step."""
WARM = 20
"""First steps, in which things are compiled or recorded."""


@dataclass(frozen=True)
class Row:
    """Of which pictures, each with so many questions; None is the mixture. `template`: words of an instruction.
    `steps`: how many are timed behind the first ones, and `later` in later epochs."""

    order: str
    pictures: tuple[tuple[tuple[int, int], int], ...] | None = None
    template: int = 0
    steps: int = 30
    later: int = 25
    least_memory: bool = False


ROWS = {
    "768×576, by_image": Row("by_image", ((USUAL[0], 8),) * 100),
    "mixture": Row("by_image", steps=200, later=100),
    "mixture, templates": Row("by_image", template=120, steps=200, later=100),
    "768×576, shuffle": Row("shuffle", ((USUAL[0], 8),) * 100),
    "2 of 1280×1024": Row("by_image", ((LARGE, 8),) * 100, template=45),
    "16 of 1280×1024": Row("shuffle", ((LARGE, 1),) * 720, template=45, steps=25),
    "least memory": Row("by_image", ((LARGE, 8),) * 100, template=45, least_memory=True),
}
"""Those of one size have enough pictures for `steps` behind the first ones in an epoch."""
MIXTURE = (400, 40, 0)
"""Pictures to train and validate on."""


def row_name(typed: str) -> str:
    """Also where somebody has no × on the keyboard."""
    return next((name for name in ROWS if name.replace("×", "x") == typed.replace("×", "x")), typed)


def data_of(out: Path, name: str, row: Row, tiny: bool) -> Path:
    folder = out / "data" / name.replace(",", "").replace(" ", "_").replace("×", "x")
    if not folder.is_dir():
        part, shrink = folder.with_suffix(".part"), 8 if tiny else 1
        if row.pictures is None:
            write_mixture(part, (40, 4, 0) if tiny else MIXTURE, template=row.template, shrink=shrink)
        else:
            rng = random.Random(0)
            write_split(part, "train", row.pictures, rng, row.template, shrink)
            write_split(part, "val", row.pictures[:2], rng, row.template, shrink)
        part.rename(folder)
    return folder


def recipe_of(out: Path, data: Path, row: Row, tiny: bool) -> dict[str, Any]:
    return {
        "name": "real",
        "model": str(out / "model"),
        "lora": {"r": 4, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "precision": "float32" if tiny else "bf16",
        "data": {name: str(data / f"{name}.jsonl") for name in ("train", "val")} | {"image_root": str(data / "images")},
        "max_pixels": 1310720,
        "order": row.order,
        "effective_batch": BATCH,
        "loss_weight": "sample",
        "learning_rate": 5e-5,
        "num_epochs": 1000,
    }


def samples_of(out: Path, fields: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Of each step of a run, in its order."""
    recipe = recipe_from(fields)
    samples = setup_of(recipe, out).audit(silent, ("train",)).splits["train"]
    places = [Place(each.id, each.image_key, each.stage) for each in samples]
    for epoch in range(recipe.num_epochs):
        for step in epoch_steps(places, recipe.order, recipe.effective_batch, recipe.seed, epoch):
            yield [samples[i] for i in step]


def claim(out: Path, size: str) -> None:
    """A folder has a model and data of one size, which are written once and used by every bench that is given it."""
    file, there = out / "size", (out / "model").is_dir()
    known = file.read_text().strip() if file.is_file() else None
    if known is None and there:
        raise SystemExit(f"{out}: does not say of which size its model is; name another folder")
    if known not in (None, size):
        raise SystemExit(f"{out}: is of size {known}, and --size {size} was asked for; name another folder")
    file.write_text(f"{size}\n")


def model_of(out: Path, tiny: bool) -> None:
    """Written once."""
    claim(out, "tiny" if tiny else "8b")
    if (out / "model").is_dir():
        return
    texts = [f"{question} {' '.join(answers)}" for _, question, answers in QUESTIONS]
    shapes: dict[str, Any] = {} if tiny else {"device": "cuda", "dtype": torch.bfloat16, **SHAPES["8b"]}
    write_model(out / "model.part", texts, 0, **shapes)
    (out / "model.part").rename(out / "model")
    gc.collect()
