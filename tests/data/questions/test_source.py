"""Images on their way to the tower: decoded, from the cache, and by transformers alone, to the same bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sameday.cache.key import Settings
from sameday.cache.store import Store
from sameday.data.questions.audit import _inspect
from sameday.data.questions.images import open_rgb
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef
from sameday.data.questions.source import Picture, Source, decode
from sameday.data.times import Times
from sameday.kernels.patches import patches
from sameday.models.families import family_of
from sameday.spec.errors import BadInput

BACKENDS = ["pil", *(["torchvision"] if importlib.util.find_spec("torchvision") else [])]


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(width * height + channels)
    small = rng.integers(0, 256, (height // 7 + 1, width // 7 + 1, channels), dtype=np.uint8)
    return np.kron(small, np.ones((7, 7, 1), np.uint8))[:height, :width]


def rgb(width: int, height: int) -> Image.Image:
    return Image.fromarray(noise(width, height))


def turned(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb(90, 61).save(path, exif=exif)


def sixteen(path: Path) -> None:
    values = noise(64, 80, 1)[:, :, 0].astype(np.uint16) * 257 + 3
    Image.fromarray(values).save(path)


MAKE: dict[str, Callable[[Path], None]] = {
    "small.png": lambda path: rgb(28, 28).save(path),
    "small.jpg": lambda path: rgb(28, 28).save(path),
    "strip.png": lambda path: rgb(28, 900).save(path),
    "usual.jpg": lambda path: rgb(640, 480).save(path),
    "large.jpg": lambda path: rgb(1280, 1024).save(path, quality=90),
    "largest.jpg": lambda path: rgb(4000, 3000).save(path),
    "largest.png": lambda path: rgb(4000, 500).save(path, compress_level=1),
    "odd.png": lambda path: rgb(37, 53).save(path),
    "grey.jpg": lambda path: rgb(90, 61).convert("L").save(path),
    "grey.png": lambda path: rgb(90, 61).convert("L").save(path),
    "inks.jpg": lambda path: rgb(90, 61).convert("CMYK").save(path),
    "palette.png": lambda path: rgb(90, 61).convert("P").save(path),
    "alpha.png": lambda path: Image.fromarray(noise(90, 61, 4), "RGBA").save(path),
    "sixteen.png": sixteen,
    "turned.jpg": turned,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for name, save in MAKE.items():
        save(folder / name)
    return folder


def audited(path: Path) -> ImageRef:
    found = _inspect(path)
    assert isinstance(found, ImageRef), found
    return found


@pytest.fixture(scope="module", params=BACKENDS)
def processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("processor")
    settings = '{"patch_size": 16, "merge_size": 2, "image_mean": [0.48, 0.5, 0.41], "image_std": [0.27, 0.26, 0.28], '
    (folder / "preprocessor_config.json").write_text(settings + '"min_pixels": 4096, "max_pixels": 1500000}')
    return ImageProcessor.load(family_of("qwen3_vl"), str(folder), backend=request.param)


def taken(
    picture: Picture, image: ImageRef, processor: ImageProcessor, kind: torch.dtype = torch.float32
) -> np.ndarray:
    assert not picture.ready and picture.content == image.digest
    table = torch.from_numpy(processor.byte_table).to(kind)
    grid = processor.grid(image.width, image.height)
    return patches(picture.tensor.flatten(), [grid], processor.patching, table).float().numpy()


@pytest.mark.parametrize("name", MAKE)
def test_pixels_are_transformers_own(files: Path, processor: ImageProcessor, name: str, tmp_path: Path) -> None:
    image = audited(files / name)
    expected = processor.pixels(open_rgb(files / name))
    store = Store(tmp_path, Settings("pixels", processor.settings()))
    filling, reading = Source(processor, pixels=store), Source(processor, pixels=store)
    pictures = {
        "decoded": Source(processor).read_image(image),
        "kept": filling.read_image(image),
        "read": reading.read_image(image),
    }
    assert store.contents() == {image.digest}
    for how, picture in pictures.items():
        assert np.array_equal(taken(picture, image, processor), expected), how
    assert pictures["decoded"].times.decode > 0 and pictures["read"].times.decode == 0 < pictures["read"].times.read
    if name != "largest.jpg":
        low = torch.from_numpy(expected).to(torch.bfloat16).float().numpy()
        assert np.array_equal(taken(pictures["read"], image, processor, torch.bfloat16), low)


def test_several_images_lie_one_after_the_other(files: Path, processor: ImageProcessor) -> None:
    names = ["odd.png", "strip.png", "turned.jpg"]
    images = [audited(files / name) for name in names]
    bytes_of = torch.cat([decode(image, processor).tensor.flatten() for image in images])
    grids = [processor.grid(image.width, image.height) for image in images]
    made = patches(bytes_of, grids, processor.patching, torch.from_numpy(processor.byte_table))
    assert np.array_equal(made.numpy(), np.concatenate([processor.pixels(open_rgb(files / name)) for name in names]))
    none = patches(bytes_of[:0], [], processor.patching, torch.from_numpy(processor.byte_table))
    assert none.shape == (0, made.shape[1])


def test_an_image_is_read_once_in_a_step(files: Path, processor: ImageProcessor) -> None:
    image = audited(files / "odd.png")
    read_image = Source(processor).once()
    first, second = read_image(image), read_image(image)
    assert second.tensor is first.tensor
    assert first.times.decode > 0 and second.times == Times()


# Faults


def test_a_changed_source_is_never_served(files: Path, processor: ImageProcessor, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    rgb(90, 61).save(path)
    before = audited(path)
    store = Store(tmp_path / "cache", Settings("pixels", processor.settings()))
    kept = Source(processor, pixels=store).read_image(before).tensor
    Image.fromarray(255 - noise(90, 61)).save(path)
    # The run that audited the old image goes on with it from the cache, and stops where it would have to decode it.
    assert torch.equal(Source(processor, pixels=store).read_image(before).tensor, kept)
    with pytest.raises(BadInput, match=r"image.png: has changed since the data was checked"):
        Source(processor).read_image(before)
    # A run that starts now sees the new one.
    after = audited(path)
    assert after.digest != before.digest
    assert not torch.equal(Source(processor, pixels=store).read_image(after).tensor, kept)
    assert store.contents() == {before.digest, after.digest}


def test_a_file_that_is_touched_but_not_changed_serves(files: Path, processor: ImageProcessor, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    rgb(90, 61).save(path)
    image = audited(path)
    rgb(90, 61).save(path, compress_level=0)  # other bytes, the same pixels
    assert audited(path) == image
    assert torch.equal(Source(processor).read_image(image).tensor, decode(image, processor, check=True).tensor)
    path.unlink()
    with pytest.raises(BadInput, match=r"was there when the data was checked, and now No such file"):
        Source(processor).read_image(image)


@pytest.mark.parametrize("harm", ["flipped", "truncated", "empty"])
def test_a_damaged_entry_is_made_again(
    files: Path, processor: ImageProcessor, tmp_path: Path, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    image = audited(files / "odd.png")
    store = Store(tmp_path, Settings("pixels", processor.settings()))
    right = Source(processor, pixels=store).read_image(image).tensor
    (entry,) = store.folder.glob("*.safetensors")
    whole = bytearray(entry.read_bytes())
    whole[-5] ^= 0x10
    entry.write_bytes({"flipped": whole, "truncated": whole[:-9], "empty": b""}[harm])
    again = Source(processor, pixels=store)
    assert torch.equal(again.read_image(image).tensor, right)
    assert "made again" in capfd.readouterr().err
    assert torch.equal(Source(processor, pixels=store).read_image(image).tensor, right)
    assert "made again" not in capfd.readouterr().err


def test_another_processor_finds_nothing(files: Path, processor: ImageProcessor, tmp_path: Path) -> None:
    image = audited(files / "usual.jpg")
    other = dict(processor.settings(), max_pixels=40_000)
    Source(processor, pixels=Store(tmp_path, Settings("pixels", other))).read_image(image)
    mine = Store(tmp_path, Settings("pixels", processor.settings()))
    assert mine.read(image.digest) is None
