"""Stripes, checks, rings and blobs in random colours: a set of images that a small model can learn on a CPU, and whose
classes differ in form alone."""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from sameday.data.labelled import cifar
from sameday.spec.words import tell

KINDS = ("stripes", "checks", "rings", "blobs")
NOISE = 24
"""Each value of each pixel is off by up to so much, to both sides."""


def write_patterns(
    folder: Path,
    train: int = 512,
    test: int = 128,
    classes: int = 4,
    size: int = 32,
    seed: int = 0,
    layout: Literal["cifar", "folders"] = "cifar",
) -> None:
    """Write CIFAR-10's python batches (images of 32 pixels), or `train/CLASS/*.png` and `test/CLASS/*.png`. Equal seeds
    give equal sets, and a larger set begins with the smaller one."""
    if not 2 <= classes <= len(KINDS):
        raise ValueError(f"classes {classes}: 2 to {len(KINDS)} are allowed")
    if layout == "cifar" and (size != cifar.SIDE or train < len(cifar.TRAIN_BATCHES)):
        raise ValueError(f"size {size}, train {train}: python batches hold images of {cifar.SIDE} pixels, five or more")
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        labels = [index % classes for index in range(count)]
        names = [f"{KINDS[label]}_{index:05d}.png" for index, label in enumerate(labels)]
        pixels = np.stack([picture(KINDS[label], size, f"{seed} {split} {i}") for i, label in enumerate(labels)])
        if layout == "folders":
            for image, label, name in zip(pixels, labels, names, strict=True):
                (folder / split / KINDS[label]).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / split / KINDS[label] / name)
            continue
        batches = cifar.TRAIN_BATCHES if split == "train" else (cifar.TEST_BATCH,)
        for number, batch in enumerate(batches):
            here = slice(count * number // len(batches), count * (number + 1) // len(batches))
            title = f"{split}ing batch {number + 1} of {len(batches)}"
            cifar.write_batch(folder / batch, pixels[here], labels[here], names[here], title)
    if layout == "cifar":
        cifar.write_meta(folder / cifar.META, KINDS[:classes], train // len(cifar.TRAIN_BATCHES))


def picture(kind: str, size: int, key: str) -> np.ndarray:
    """(size, size, 3) uint8. Place, direction, scale and both colours are drawn, so that a crop or a mirror image of a
    pattern is one of its class, and a mean colour says nothing about it."""
    rng = random.Random(key)
    y, x = np.mgrid[:size, :size] * 32 / size
    if kind == "rings":
        rows, columns = rng.uniform(9, 23), rng.uniform(9, 23)
        inside = np.hypot(y - rows, x - columns) / rng.uniform(3, 4) + rng.uniform(0, 2)
        shape = np.floor(inside) % 2
    elif kind == "blobs":
        shape = np.zeros((size, size))
        share = rng.uniform(0.4, 0.55)
        while shape.mean() < share:
            rows, columns, radius = rng.uniform(0, 32), rng.uniform(0, 32), rng.uniform(3, 4.5)
            shape[np.hypot(y - rows, x - columns) < radius] = 1
    else:
        angle, width = rng.uniform(0, math.pi), rng.uniform(3, 4)
        along, across = (math.cos(angle) * x + math.sin(angle) * y), (math.cos(angle) * y - math.sin(angle) * x)
        shape = np.floor(along / width + rng.uniform(0, 2))
        if kind == "checks":
            shape = shape + np.floor(across / width + rng.uniform(0, 2))
        shape = shape % 2
    ground, colour = ([rng.randint(low, low + 100) for _ in range(3)] for low in (10, 145))
    clean = np.where(shape[:, :, None] > 0, colour, ground)
    noise = np.frombuffer(rng.randbytes(clean.size), np.uint8).reshape(clean.shape).astype(np.int64)
    return np.clip(clean + noise * (2 * NOISE + 1) // 256 - NOISE, 0, 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sameday.demo.patterns", description=__doc__)
    parser.add_argument("folder", type=Path, help="where CIFAR-10's python batches of them are written")
    folder = parser.parse_args().folder
    write_patterns(folder)
    tell(f"{folder}: 512 images to train on and 128 to test, in CIFAR-10's format")


if __name__ == "__main__":
    main()
