"""The drawn images are read back as they were drawn, look the same everywhere, and are learned by their form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sameday.data.labelled import augment
from sameday.data.labelled.pictures import Pictures, read_pictures
from sameday.demo.patterns import KINDS, picture, write_patterns

HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pictures, Pictures]:
    folder = tmp_path_factory.mktemp("patterns")
    write_patterns(folder)
    return read_pictures(folder, "train", 32), read_pictures(folder, "test", 32)


def test_batches_hold_what_was_drawn(drawn: tuple[Pictures, Pictures]) -> None:
    for pictures, split, count in zip(drawn, ("train", "test"), (512, 128), strict=True):
        assert pictures.classes == KINDS and len(pictures) == count
        assert np.bincount(pictures.labels).tolist() == [count // 4] * 4
        for i, (image, label) in enumerate(zip(pictures.pixels, pictures.labels, strict=True)):
            assert np.array_equal(image, picture(KINDS[label], 32, f"0 {split} {i}"))


def test_folders_hold_the_same_images(tmp_path: Path, drawn: tuple[Pictures, Pictures]) -> None:
    write_patterns(tmp_path, layout="folders")
    for pictures, split in zip(drawn, ("train", "test"), strict=True):
        read = read_pictures(tmp_path, split, 32)
        # Folders give labels by the alphabet.
        assert read.classes == tuple(sorted(KINDS))
        here = sorted(
            (KINDS[label], image.tobytes()) for image, label in zip(pictures.pixels, pictures.labels, strict=True)
        )
        there = sorted(
            (read.classes[label], image.tobytes()) for image, label in zip(read.pixels, read.labels, strict=True)
        )
        assert here == there


def test_sizes_and_counts_are_as_asked(tmp_path: Path) -> None:
    write_patterns(tmp_path, train=7, test=3, classes=2, size=48, seed=5, layout="folders")
    train = read_pictures(tmp_path, "train", 48)
    assert train.pixels.shape == (7, 48, 48, 3) and train.classes == ("checks", "stripes")
    with pytest.raises(ValueError, match="size 48"):
        write_patterns(tmp_path, size=48)
    with pytest.raises(ValueError, match="classes 5: 2 to 4"):
        write_patterns(tmp_path, classes=5)


def test_the_seed_decides_and_a_larger_set_begins_with_the_smaller(tmp_path: Path) -> None:
    def first(name: str, train: int, seed: int) -> bytes:
        write_patterns(tmp_path / name, train=train, test=4, seed=seed)
        return read_pictures(tmp_path / name, "train", 32, limit=10).pixels.tobytes()

    a = first("a", 10, 1)
    assert a == first("b", 10, 1) == first("c", 20, 1) != first("d", 10, 2)
    files = [{f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]


def test_colours_tell_nothing(drawn: tuple[Pictures, Pictures]) -> None:
    """A least-squares fit on each image's mean colours, their spread and the squares of both is hardly above chance."""

    def colours(pictures: Pictures) -> Tensor:
        values = torch.from_numpy(pictures.pixels).double() / 255
        known = torch.cat([values.mean((1, 2)), values.std((1, 2))], 1)
        return torch.cat([known, known**2, torch.ones(len(known), 1)], 1)

    train, test = drawn
    fit = torch.linalg.lstsq(colours(train), F.one_hot(torch.from_numpy(train.labels)).double()).solution
    right = (colours(test) @ fit).argmax(1) == torch.from_numpy(test.labels)
    assert right.double().mean() < 0.45


class Small(nn.Module):
    """Patches of 4 pixels and two layers of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 64, 32) * 0.02)
        layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(32, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.layers(x).mean(1))
        return out


def test_a_small_model_learns_them(drawn: tuple[Pictures, Pictures]) -> None:
    torch.manual_seed(0)
    train, test = drawn
    pixels, labels = torch.from_numpy(train.pixels), torch.from_numpy(train.labels)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for epoch in range(6):
        for ids in torch.randperm(len(labels)).split(32):
            boxes = augment.draw(0, epoch, ids, 32, (0.8, 1.0))
            values = augment.normalise(augment.apply(pixels[ids], boxes), HALF, HALF)
            F.cross_entropy(model(values), labels[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    seen = augment.normalise(torch.from_numpy(test.pixels).permute(0, 3, 1, 2), HALF, HALF)
    right = model(seen).argmax(1) == torch.from_numpy(test.labels)
    assert right.double().mean() > 0.8
