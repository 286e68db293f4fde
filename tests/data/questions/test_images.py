"""Every kind of file becomes upright RGB in the declared way, and grid and pixels are transformers' own."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sameday.data.questions.images import BadImage, digest, open_rgb
from sameday.data.questions.processor import ImageProcessor
from sameday.models.families import family_of
from sameday.spec.errors import BadInput

QWEN = family_of("qwen3_vl")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_rgb_is_unchanged(tmp_path: Path) -> None:
    image = noise(13, 9)
    assert open_rgb(saved(image, tmp_path / "a.png")).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(tmp_path: Path, mode: str) -> None:
    colour = (0, 0, 0, 0) if mode == "RGBA" else (0, 0)
    image = Image.new(mode, (4, 4), colour)
    image.putpixel((1, 1), (0, 0, 0, 255) if mode == "RGBA" else (0, 255))
    image.putpixel((2, 2), (0, 0, 0, 128) if mode == "RGBA" else (0, 128))
    rgb = open_rgb(saved(image, tmp_path / "a.png"))
    assert rgb.mode == "RGB"
    assert rgb.getpixel((0, 0)) == (255, 255, 255)
    assert rgb.getpixel((1, 1)) == (0, 0, 0)
    assert rgb.getpixel((2, 2)) == (127, 127, 127)


def test_transparent_palette_and_colour_key_are_white(tmp_path: Path) -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.putpixel((0, 0), 0)
    rgb = open_rgb(saved(palette, tmp_path / "a.png", transparency=0))
    assert (rgb.getpixel((0, 0)), rgb.getpixel((1, 1))) == ((255, 255, 255), (200, 0, 0))
    key = Image.new("RGB", (4, 4), (9, 9, 9))
    rgb = open_rgb(saved(key, tmp_path / "b.png", transparency=(9, 9, 9)))
    assert rgb.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
def test_16_bits_are_scaled_and_not_clipped_to_white(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 128, 129, 257], [1000, 32768, 65406, 65535]], dtype=np.uint16)
    path = saved(Image.fromarray(values), tmp_path / name)
    grey = np.asarray(open_rgb(path))[:, :, 0]
    assert np.array_equal(grey, np.round(values / 257).astype(np.uint8))


def test_32_bit_integers_are_16_bit_or_refused(tmp_path: Path) -> None:
    good = saved(Image.fromarray(np.array([[0, 65535]], dtype=np.int32)), tmp_path / "a.tiff")
    assert [open_rgb(good).getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]
    bad = saved(Image.fromarray(np.array([[0, 65536]], dtype=np.int32)), tmp_path / "b.tiff")
    with pytest.raises(BadImage, match="integer pixels from 0 to 65536; 0 to 65535 is allowed"):
        open_rgb(bad)


def test_float_pixels_are_refused(tmp_path: Path) -> None:
    path = saved(Image.fromarray(np.ones((2, 2), dtype=np.float32)), tmp_path / "a.tiff")
    with pytest.raises(BadImage, match=r"float pixels \(mode F\)"):
        open_rgb(path)


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P", "YCbCr", "LAB"])
def test_other_modes_go_through_pillow(tmp_path: Path, mode: str) -> None:
    source = Image.new("LAB", (5, 5), (100, 20, 30)) if mode == "LAB" else noise(5, 5).convert(mode)
    path = saved(source, tmp_path / ("a.png" if mode in "L1P" else "a.tiff"))
    with Image.open(path) as image:
        if mode == "YCbCr" and image.mode == "RGB":
            pytest.skip("this Pillow's libtiff turns YCbCr into RGB while it reads")
        assert image.mode == mode
        expected = image.convert("RGB").tobytes()
    assert open_rgb(path).tobytes() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    image, exif = noise(6, 4), Image.Exif()
    exif[0x0112] = orientation
    path = saved(image, tmp_path / "a.png", exif=exif)
    with Image.open(path) as stored:
        expected = ImageOps.exif_transpose(stored)
    found = open_rgb(path)
    assert found.size == ((4, 6) if orientation >= 5 else (6, 4))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("extension", ["jpg", "png", "gif", "bmp", "webp"])
def test_a_file_cut_in_half_is_bad(tmp_path: Path, extension: str) -> None:
    path = saved(noise(64, 64), tmp_path / f"a.{extension}")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BadImage):
        open_rgb(path)


def test_text_and_nothing_are_not_images(tmp_path: Path) -> None:
    for data in (b"", b"<html>not found</html>"):
        path = tmp_path / "a.jpg"
        path.write_bytes(data)
        with pytest.raises(BadImage, match="not an image that Pillow can read"):
            open_rgb(path)
    with pytest.raises(BadImage, match="No such file"):
        open_rgb(tmp_path / "b.jpg")


def header_only(width: int, height: int) -> bytes:
    """A PNG that promises so many pixels and holds none: refusing it must not need them."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_too_many_pixels_are_refused_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(header_only(20_000, 20_000))
    for pillow_limit in (Image.MAX_IMAGE_PIXELS, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pillow_limit)
        with pytest.raises(BadImage, match="400,000,000 pixels, more than the 178,956,970 that are allowed"):
            open_rgb(path)


def test_digest_is_of_content_and_shape(tmp_path: Path) -> None:
    image = noise(8, 6)
    a, b = saved(image, tmp_path / "a.png"), saved(image, tmp_path / "b.bmp")
    assert digest(open_rgb(a)) == digest(open_rgb(b))
    assert len(digest(image)) == 32
    assert digest(image) != digest(Image.frombytes("RGB", (6, 8), image.tobytes()))
    other = image.copy()
    other.putpixel((7, 5), (1, 2, 3))
    assert digest(image) != digest(other)


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processor")
    settings_text = '{"patch_size": 8, "merge_size": 2, "min_pixels": 1024, "max_pixels": 16384}'
    (folder / "preprocessor_config.json").write_text(settings_text)
    return folder


SIZES = [(96, 96), (28, 200), (200, 28), (1, 1), (3, 3), (50, 3), (1, 150), (640, 480), (17, 31)]


@pytest.mark.parametrize("size", SIZES)
def test_grid_and_pixels_are_those_of_transformers(processor_folder: Path, size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    reference = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 16384}
    )
    ours, image = ImageProcessor.load(QWEN, str(processor_folder)), noise(*size)
    expected = reference(images=[image], return_tensors="np")
    assert [1, *ours.grid(*size)] == expected["image_grid_thw"][0].tolist()
    pixels = ours.pixels(image)
    assert pixels.dtype == np.float32
    assert np.array_equal(pixels, expected["pixel_values"])
    assert ours.tokens(*size) * ours.merge_size**2 == len(pixels)


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_grid_is_whole_merged_blocks_or_refused(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ours = ImageProcessor(QWEN, Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 1_003_520}))
    if max(width, height) / min(width, height) > 200:
        with pytest.raises(BadImage, match="at most 200 is allowed"):
            ours.grid(width, height)
        return
    high, wide = ours.grid(width, height)
    assert high > 0 and wide > 0 and high % 2 == 0 and wide % 2 == 0
    assert ours.tokens(width, height) == high * wide // 4


def test_sizes_do_not_leak_into_the_next_processor(processor_folder: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    before = dict(Qwen2VLImageProcessorPil.size)
    small = ImageProcessor.load(QWEN, str(processor_folder), min_pixels=512, max_pixels=4096)
    own = ImageProcessor.load(QWEN, str(processor_folder))
    assert (small.min_pixels, small.max_pixels) == (512, 4096)
    assert (own.min_pixels, own.max_pixels) == (1024, 16384)
    assert before == Qwen2VLImageProcessorPil.size
    assert small.grid(640, 480) != own.grid(640, 480)


def test_bad_processor_settings_are_named(processor_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"min_pixels 1024 is larger than max_pixels 512; .* set both"):
        ImageProcessor.load(QWEN, str(processor_folder), max_pixels=512)
    with pytest.raises(BadInput, match="has no image processor settings"):
        ImageProcessor.load(QWEN, str(tmp_path))


def test_torchvision_is_asked_for_by_name(processor_folder: Path) -> None:
    try:
        import torchvision  # noqa: F401
    except ImportError:
        with pytest.raises(BadInput, match="needs torchvision, which is not installed; pil is allowed"):
            ImageProcessor.load(QWEN, str(processor_folder), backend="torchvision")
    else:
        processor = ImageProcessor.load(QWEN, str(processor_folder), backend="torchvision")
        assert processor.pixels(noise(96, 64)).shape == (96, 384)


def test_a_jpeg_is_read_from_its_own_bytes(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    noise(32, 32).save(buffer, "JPEG")
    path = tmp_path / "misnamed.png"
    path.write_bytes(buffer.getvalue())
    assert open_rgb(path).size == (32, 32)


def test_what_autoprocessor_would_do_otherwise_is_said(processor_folder: Path) -> None:
    processor = ImageProcessor.load(QWEN, str(processor_folder))
    assert processor.note(installed=False) is None
    said = processor.note(installed=True)
    assert said == "images are resized by Pillow (recipe.image_backend pil), not by torchvision as AutoProcessor does"
