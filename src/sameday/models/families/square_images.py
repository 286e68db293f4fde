"""Images that all become one square, whatever their size: resized, cropped and normalised by transformers' own
processor, and cut into patches row by row, or in blocks that the tower's output is pooled over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sameday.kernels.patches import Patching
from sameday.spec.errors import BadInput
from sameday.spec.vlm import VlmRecipe

INPUTS_IN_PYTHON = """\
inputs = processor(images=[image], return_tensors="pt")
"""
MADE_OF = ("do_resize", "do_center_crop", "do_pad", "size", "crop_size")
"""Settings that a resized image depends on."""


def other_sizes(config: Any, recipe: VlmRecipe) -> Iterator[str]:
    side = config.vision_config.image_size
    for name in ("min_pixels", "max_pixels"):
        if (asked := getattr(recipe, name)) is not None:
            yield (
                f"recipe.{name} is {asked}: models of type {config.model_type} take every image at {side}×{side} "
                "pixels; remove it"
            )


def load_image_processor(model: str, revision: str | None, backend: str) -> Any:
    """With the sides of patches and of the blocks that become one token, which the model's configuration has."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    config = AutoConfig.from_pretrained(model, revision=revision)
    vision = config.vision_config
    side = int(vision.image_size)
    if backend == "torchvision":
        try:
            import torchvision  # noqa: F401
        except ImportError as error:
            raise BadInput(
                "image_backend torchvision needs torchvision, which is not installed; pil is allowed"
            ) from error
    kind = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type][backend])
    try:
        processor = kind.from_pretrained(model, revision=revision)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"model {model!r} has no image processor settings: {reason}") from error
    if getattr(processor, "do_pan_and_scan", None):
        raise BadInput(
            f"model {model!r}: its image settings cut an image into several (do_pan_and_scan), which is not supported; "
            "allowed: do_pan_and_scan false"
        )
    made = _squares(processor, Image.new("RGB", (3 * side, 2 * side))).shape[1:3]
    if tuple(made) != (side, side):
        raise BadInput(
            f"model {model!r}: its image settings make {made[1]}×{made[0]} pixels of an image, and its vision tower "
            f"takes {side}×{side}"
        )
    tokens = getattr(config, "mm_tokens_per_image", None)
    processor.patch_size = int(vision.patch_size)
    processor.merge_size = 1 if tokens is None else side // processor.patch_size // int(tokens**0.5)
    processor.image_size = side
    return processor


def patching(processor: Any) -> Patching:
    return Patching(processor.patch_size, processor.merge_size, 1)


def grid(processor: Any) -> tuple[int, int]:
    count = processor.image_size // processor.patch_size
    return count, count


def resize(processor: Any, image: Image.Image) -> np.ndarray:
    (made,) = _squares(processor, image)
    assert made.dtype == np.uint8, f"resized to {made.dtype}"
    return made


def _squares(processor: Any, image: Image.Image) -> np.ndarray:
    """As the processor has it before it turns bytes into numbers: (1, height, width, 3)."""
    made = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"]
    return np.ascontiguousarray(np.asarray(made).transpose(0, 2, 3, 1))


def pixel_values(processor: Any, image: Image.Image, resize: bool) -> Tensor:
    how = {} if resize else {"do_resize": False, "do_center_crop": False, "do_pad": False}
    made: Tensor = processor(images=[image], return_tensors="pt", **how)["pixel_values"]
    side, merge, _ = patching(processor)
    high, wide = (n // side // merge for n in made.shape[2:])
    blocks = made.view(-1, 3, high, merge, side, wide, merge, side).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return blocks.reshape(-1, 3 * side * side)


def whole_images(patches: Tensor, grid: tuple[int, int], how: Patching) -> Tensor:
    """(images, 3, height, width) from the patches of images of one grid."""
    side, merge, _ = how
    high, wide = grid
    blocks = patches.view(-1, high // merge, wide // merge, merge, merge, 3, side, side)
    return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, high * side, wide * side)


def settings(processor: Any) -> dict[str, Any]:
    saved = processor.to_dict()
    return {name: json.dumps(saved.get(name), sort_keys=True) for name in MADE_OF}


def one_axis(length: int) -> np.ndarray:
    """Plain RoPE: every token counts, those of images too."""
    return np.arange(length, dtype=np.int64)[None]


def rotary(inv_freq: Tensor, scaling: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Elementwise, where the library multiplies matrices: TF32 would corrupt the angles."""
    angles = positions[0][..., None].float() * inv_freq.float()
    both = torch.cat([angles, angles], -1)
    return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)
