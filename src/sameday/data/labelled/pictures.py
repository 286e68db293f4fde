"""Labelled image sets, small enough to be held whole as uint8: CIFAR's python batches, or a folder for each class."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from sameday.data.labelled import cifar
from sameday.data.order import permutation
from sameday.data.problems import Problem, report
from sameday.data.questions.images import BadImage, check_aspect, open_rgb
from sameday.spec.errors import BadInput

Split = Literal["train", "val", "test"]
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
NAMED = 5
"""Other suffixes that are named, the most common ones."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """`pixels` (n, size, size, 3) uint8, `labels` (n,) int64 into `classes`; `names[i]` is where a user finds image i:
    its file, or the batch and the row in it; `passed` is a sentence about files beside them that are not read."""

    pixels: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    names: tuple[str, ...]
    passed: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digest(self) -> str:
        """Equal exactly for equal pixels, labels and class names, wherever they were read from."""
        content = hashlib.sha256(json.dumps([self.pixels.shape, self.classes]).encode())
        content.update(np.ascontiguousarray(self.labels, "<i8").tobytes())
        content.update(np.ascontiguousarray(self.pixels).data)
        return content.hexdigest()

    @cached_property
    def contents(self) -> set[str]:
        """A digest of each image's pixels."""
        return {hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).hexdigest() for image in self.pixels}


def read_pictures(
    path: Path,
    split: Split,
    image_size: int,
    val: int = 0,
    split_seed: int = 0,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pictures:
    """One split of the set at `path`.

    `val` images of the training part are held out, as `held_out` says; a set with a `val` folder of its own needs none.
    `limit` takes the first so many of the split, and only those are looked at. Of a tree of folders the images come
    class by turns: the first of each class, then the second. Images are brought to image_size by `fitted`.
    `progress` is called with the number of files decoded and of all, at each tenth of a tree."""
    if not path.is_dir():
        raise BadInput(f"{path} {'is not a folder' if path.exists() else 'does not exist'}; {_KNOWN}")
    if image_size < 1 or val < 0 or (limit is not None and limit < 1):
        raise BadInput(f"image_size {image_size}, val {val}, limit {limit}: from 1 on is allowed, for val from 0 on")
    files = {entry.name for entry in path.iterdir() if entry.is_file()}
    if (path / "train").is_dir():
        if files & set(cifar.TRAIN_BATCHES):
            raise BadInput(f"{path} holds both a train folder and CIFAR-10's batches; give a folder with one of them")
        return _read_tree(path, split, image_size, val, split_seed, limit, progress)
    if files & {*cifar.TRAIN_BATCHES, cifar.TEST_BATCH, cifar.META}:
        form = _Form(cifar.TRAIN_BATCHES, cifar.TEST_BATCH, cifar.META, "labels", "label_names")
    elif {"train", "test"} & files:
        form = _Form(("train",), "test", "meta", "fine_labels", "fine_label_names")
    else:
        raise BadInput(f"{path} holds no images in a known layout: {_KNOWN}{_nearby(path)}")
    return _read_batches(path, form, split, image_size, val, split_seed, limit)


def has_test(path: Path) -> bool:
    """Whether the set at `path` has a test part, in any of the layouts."""
    return any((path / name).exists() for name in ("test", cifar.TEST_BATCH))


def held_out(count: int, val: int, seed: int) -> np.ndarray:
    """True at `val` of `count` places. A pure function of its arguments: the places with the smallest hashes, so that
    a larger `val` holds out the same images and more."""
    chosen = np.zeros(count, bool)
    chosen[permutation(count, "held out", seed)[:val]] = True
    return chosen


def fitted(image: Image.Image, size: int) -> Image.Image:
    """The shorter side scaled to `size` (bilinear), then the middle."""
    width, height = image.size
    short = min(width, height)
    if short != size:
        image = image.resize((width * size // short, height * size // short), Image.Resampling.BILINEAR)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image if image.size == (size, size) else image.crop((left, top, left + size, top + size))


_KNOWN = (
    "a folder is needed with data_batch_1 to data_batch_5, test_batch and batches.meta (CIFAR-10), with files train, "
    "test and meta (CIFAR-100), or with folders train/CLASS and test/CLASS of images"
)


def _nearby(path: Path) -> str:
    for inside in ("cifar-10-batches-py", "cifar-100-python"):
        if (path / inside).is_dir():
            return f". Is {path / inside} meant?"
    return ""


def _chosen(path: Path, split: Split, count: int, val: int, seed: int, limit: int | None) -> np.ndarray:
    """Which of the `count` images of a part belong to the split, in their order. A test part is taken as it is."""
    if split == "test":
        return np.arange(count)[:limit]
    if val >= count:
        raise BadInput(f"val {val} leaves nothing to train on: the training part of {path} has {count} images")
    if split == "val" and not val:
        raise BadInput(f"{path} has no validation part: val says how many training images to hold out, and it is 0")
    return np.flatnonzero(held_out(count, val, seed) == (split == "val"))[:limit]


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        heading = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {path}:"
        raise BadInput(report([Problem(*each.split(": ", 1)) for each in problems], heading, path))


# ---- CIFAR's batches


@dataclass(frozen=True)
class _Form:
    train: tuple[str, ...]
    test: str
    meta: str
    label_key: str
    names_key: str


def _read_batches(
    path: Path, form: _Form, split: Split, image_size: int, val: int, seed: int, limit: int | None
) -> Pictures:
    problems: list[str] = []
    classes: tuple[str, ...] = ()
    try:
        classes = cifar.class_names(cifar.load(path / form.meta), form.names_key)
    except cifar.BadBatch as error:
        problems.append(f"{form.meta}: {error}")
    pixels, labels, names = [], [], []
    for batch in (form.test,) if split == "test" else form.train:
        try:
            batch_pixels, batch_labels = cifar.rows(cifar.load(path / batch), form.label_key)
        except cifar.BadBatch as error:
            problems.append(f"{batch}: {error}")
            continue
        if classes:
            problems += _label_problems(batch, batch_labels, len(classes))
        pixels.append(batch_pixels)
        labels.append(batch_labels)
        names += [f"{batch}:{row}" for row in range(len(batch_labels))]
    _refuse(path, problems)
    if not names:
        raise BadInput(f"the {'test' if split == 'test' else 'training'} part of {path} holds no image")
    chosen = _chosen(path, split, len(names), val, seed, limit)
    kept = np.concatenate(pixels)[chosen]
    if image_size != cifar.SIDE:
        kept = np.stack([np.asarray(fitted(Image.fromarray(image), image_size)) for image in kept])
    return Pictures(kept, np.concatenate(labels)[chosen], classes, tuple(names[i] for i in chosen))


def _label_problems(batch: str, labels: np.ndarray, classes: int) -> list[str]:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    return [f"{batch}:{row}: label {labels[row]} is out of range; 0 to {classes - 1} are named" for row in wrong]


# ---- a folder for each class


def _read_tree(
    path: Path,
    split: Split,
    image_size: int,
    val: int,
    seed: int,
    limit: int | None,
    progress: Callable[[int, int], None] | None,
) -> Pictures:
    own_val = (path / "val").is_dir()
    if own_val and val:
        raise BadInput(f"{path} has a val folder of its own; val {val} would hold out others: set it to 0")
    part = path / split if split == "test" or own_val else path / "train"
    if not part.is_dir():
        raise BadInput(f"{part} does not exist; {path} needs it for its {split} images")
    classes = tuple(folder.name for folder in _folders(path / "train"))
    if not classes:
        raise BadInput(f"{path / 'train'} holds no folders; one for each class is needed, with its images")
    problems = [
        f"{file}: this image stands outside any class folder" for file in sorted(part.iterdir()) if _is_image(file)
    ]
    listed: list[tuple[int, int, Path]] = []
    others: Counter[str] = Counter()
    for folder in _folders(part):
        inside = sorted(folder.rglob("*"))
        files = [file for file in inside if _is_image(file)]
        passed = Counter(_suffix(file) for file in inside if _is_other(file))
        others += passed
        if folder.name not in classes:
            problems.append(f"{folder}: this class is not among the training classes {', '.join(classes)}")
        elif not files:
            problems.append(f"{folder}: this class has no image ({', '.join(SUFFIXES)}){_instead(passed)}")
        else:
            listed += [(turn, classes.index(folder.name), file) for turn, file in enumerate(files)]
    _refuse(path, problems)
    if not listed:
        raise BadInput(f"{part} holds no image")
    listed.sort()
    chosen = _chosen(path, "test" if own_val else split, len(listed), val, seed, limit)
    taken = [listed[i] for i in chosen]
    files = [file for _, _, file in taken]
    labels = np.array([label for _, label, _ in taken], np.int64)
    return Pictures(
        _decoded(path, files, image_size, progress), labels, classes, tuple(map(str, files)), _told(part, others)
    )


def _told(part: Path, others: Counter[str]) -> str:
    if not others:
        return ""
    are = "file is" if others.total() == 1 else "files are"
    kinds = f"{_listed(others)}; read are {', '.join(SUFFIXES)}"
    return f"{part}: {others.total():,} {are} passed over because of the suffix: {kinds}"


def _instead(others: Counter[str]) -> str:
    return f"; passed over because of the suffix: {_listed(others)}" if others else ""


def _listed(others: Counter[str]) -> str:
    most = others.most_common(NAMED)
    rest = others.total() - sum(times for _, times in most)
    return ", ".join([*(f"{suffix} ({times:,})" for suffix, times in most), *([f"others ({rest:,})"] if rest else [])])


def _suffix(file: Path) -> str:
    return file.suffix.lower() or "no suffix"


def _is_other(file: Path) -> bool:
    return not _is_image(file) and not file.name.startswith(".") and not file.is_dir()


def _folders(parent: Path) -> list[Path]:
    return sorted(entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _is_image(file: Path) -> bool:
    """By its name: what has an image's name and cannot be opened, a dead link say, is a problem to be told."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and not file.is_dir()


def _decoded(path: Path, files: Sequence[Path], size: int, progress: Callable[[int, int], None] | None) -> np.ndarray:
    pixels = np.empty((len(files), size, size, 3), np.uint8)

    def decode(i: int) -> str | None:
        try:
            image = open_rgb(files[i])
            check_aspect(*image.size)
        except BadImage as error:
            return f"{files[i]}: {error}"
        pixels[i] = np.asarray(fitted(image, size))
        return None

    problems = []
    # Threads: decoding lets go of the interpreter's lock.
    with ThreadPoolExecutor() as pool:
        for done, problem in enumerate(pool.map(decode, range(len(files))), start=1):
            if problem is not None:
                problems.append(problem)
            if progress is not None and done * 10 // len(files) > (done - 1) * 10 // len(files):
                progress(done, len(files))
    _refuse(path, problems)
    return pixels
