"""Images are read in one declared way, told apart by their pixels, and patched by transformers' processor."""

from __future__ import annotations

import hashlib
import re
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from sameday.spec.errors import BadInput

MAX_SOURCE_PIXELS = 178_956_970
MAX_ASPECT_RATIO = 200

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow warns from half of our own limit on; ours is the one that counts. A filter set once, because
# `warnings.catch_warnings` around each file is not safe in threads.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class BadImage(ValueError):
    """A file that gives no usable image; the text is a short reason without the file's name."""


def open_rgb(path: Path) -> Image.Image:
    """The image as upright 8-bit RGB, decoded to its last pixel.

    - EXIF orientation is applied. Of several frames the first counts. Colour profiles are not applied.
    - Transparency (RGBA, LA, PA, a palette or a colour key with transparency) is composited on white.
    - 16-bit greyscale is divided by 257 and rounded, so that 65535 is 255. A 32-bit integer image is taken
      as 16-bit, and refused where its values lie outside 0 to 65535.
    - CMYK, L, 1, P, YCbCr, LAB and HSV go through Pillow's own conversion.
    - Float images are refused, for nothing says which value is white.
    - More than MAX_SOURCE_PIXELS are refused before anything is decoded.
    """
    try:
        with Image.open(path) as image:
            _check_size(image.width * image.height)
            image.load()
            return _to_rgb(_upright(image))
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        found = re.search(r"\d+", str(error))
        _check_size(int(found.group()) if found else MAX_SOURCE_PIXELS + 1)
        raise BadImage(f"cannot be decoded: {error}") from error
    except Image.UnidentifiedImageError as error:
        raise BadImage("is not an image that Pillow can read") from error
    except OSError as error:
        raise BadImage(f"cannot be decoded: {error.strerror or error}") from error
    # Decoders raise nearly anything on corrupt bytes: struct.error, zlib.error, SyntaxError, IndexError.
    except Exception as error:
        raise BadImage(f"cannot be decoded: {error or type(error).__name__}") from error


def _check_size(pixels: int) -> None:
    if pixels > MAX_SOURCE_PIXELS:
        raise BadImage(f"has {pixels:,} pixels, more than the {MAX_SOURCE_PIXELS:,} that are allowed")


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    # Broken metadata around good pixels is common, and every viewer shows such an image as it is stored.
    except Exception:
        return image
    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise BadImage("has float pixels (mode F), which say not which value is white; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    # A fresh image in every case: the file behind a lazily opened one is closed when we return.
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise BadImage(f"has integer pixels from {low} to {high}; 0 to 65535 is allowed")
    grey = ((values + 128) // 257).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


def check_aspect(width: int, height: int) -> None:
    """Refuse what the processor would refuse, in its own terms."""
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise BadImage(f"is {width}×{height}, an aspect ratio of {ratio:.0f}; at most {MAX_ASPECT_RATIO} is allowed")


def digest(image: Image.Image) -> str:
    """Equal exactly for images of equal size and pixels, whatever their files are called."""
    assert image.mode == "RGB", f"digest is taken of RGB images, not {image.mode}"
    content = hashlib.blake2b(f"{image.width}x{image.height}:".encode(), digest_size=16)
    content.update(image.tobytes())
    return content.hexdigest()


class ImageProcessor:
    """transformers' processor for Qwen-VL, and the arithmetic of its grid without any decoding."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.patch_size: int = processor.patch_size
        self.merge_size: int = processor.merge_size
        self.min_pixels: int = processor.size["shortest_edge"]
        self.max_pixels: int = processor.size["longest_edge"]

    @classmethod
    def load(
        cls,
        model_folder_or_name: str,
        revision: str | None = None,
        backend: Literal["pil", "torchvision"] = "pil",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> ImageProcessor:
        """The model's own settings, with another smallest and largest size where they are given."""
        processor_class = _processor_class(backend)
        try:
            settings, _ = processor_class.get_image_processor_dict(model_folder_or_name, revision=revision)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise BadInput(f"model {model_folder_or_name!r} has no image processor settings: {reason}") from error
        # Without a size of its own the constructor writes min_pixels and max_pixels into a dictionary that
        # the whole class shares, and the next model would inherit them. Old files have no size.
        size = {**processor_class.size, **(settings.pop("size", None) or {})}
        for edge, name, asked in (
            ("shortest_edge", "min_pixels", min_pixels),
            ("longest_edge", "max_pixels", max_pixels),
        ):
            in_size, in_settings = size.pop(name, None), settings.pop(name, None)
            size[edge] = asked or in_settings or in_size or size[edge]
        if size["shortest_edge"] > size["longest_edge"]:
            raise BadInput(
                f"min_pixels {size['shortest_edge']} is larger than max_pixels {size['longest_edge']}; model "
                f"{model_folder_or_name!r} gives the one that the recipe leaves out: set both"
            )
        return cls(processor_class.from_dict({**settings, "size": size}))

    def save(self, folder: Path) -> None:
        """The settings, as transformers reads them."""
        self._processor.save_pretrained(str(folder))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """How many patches high and wide an image of this size becomes."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        check_aspect(width, height)
        high, wide = smart_resize(
            height,
            width,
            factor=self.patch_size * self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        return high // self.patch_size, wide // self.patch_size

    def tokens(self, width: int, height: int) -> int:
        """How many tokens of the language model an image of this size becomes."""
        high, wide = self.grid(width, height)
        return high * wide // self.merge_size**2

    def pixels(self, image: Image.Image) -> np.ndarray:
        """What the vision tower takes: float32 of shape (patches, patch_dim)."""
        # Never as an array: one that is 1 or 3 pixels high would be taken for channels first.
        out = self._processor(images=[image], return_tensors="pt")
        return out["pixel_values"].numpy().astype(np.float32, copy=False)


def _processor_class(backend: str) -> Any:
    if backend == "pil":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    except ImportError as error:
        raise BadInput("image_backend torchvision needs torchvision, which is not installed; pil is allowed") from error
    return Qwen2VLImageProcessor
