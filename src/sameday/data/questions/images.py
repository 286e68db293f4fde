"""Images are read in one declared way, and told apart by their pixels."""

from __future__ import annotations

import hashlib
import re
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

MAX_SOURCE_PIXELS = 178_956_970
MAX_ASPECT_RATIO = 200
"""Where no image processor says another."""

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


def open_rgb(path: Path | BinaryIO) -> Image.Image:
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
        number = re.search(r"\d+", str(error))
        _check_size(int(number.group()) if number else MAX_SOURCE_PIXELS + 1)
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


def check_aspect(width: int, height: int, most: int = MAX_ASPECT_RATIO) -> None:
    """Refuse what an image processor would refuse, in its own terms."""
    ratio = max(width, height) / min(width, height)
    if ratio > most:
        raise BadImage(f"is {width}×{height}, an aspect ratio of {ratio:.0f}; at most {most} is allowed")


Stamp = tuple[int, int, int]
"""Of a file: its size, the time of its contents and the time of its last change of any kind, in nanoseconds."""


def stamp(path: Path) -> Stamp:
    """Another one means that a file may have been changed. The time of the contents can be set back, and `cp -p`,
    `rsync -t` and `tar` do so; the time of the last change of any kind cannot."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest(image: Image.Image) -> str:
    """Equal exactly for images of equal size and pixels, whatever their files are called."""
    assert image.mode == "RGB", f"digest is taken of RGB images, not {image.mode}"
    content = hashlib.blake2b(f"{image.width}x{image.height}:".encode(), digest_size=16)
    content.update(image.tobytes())
    return content.hexdigest()
