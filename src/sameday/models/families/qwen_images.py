"""Images as all Qwen-VL families take them: one image processor, and positions in three axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from sameday.data.questions.encode import Encoded
from sameday.data.questions.images import check_aspect
from sameday.kernels.patches import Patching
from sameday.spec.errors import BadInput

MAX_ASPECT_RATIO = 200
INPUTS_IN_PYTHON = """\
inputs = processor(images=[image], return_tensors="pt")
slots = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
text = text.replace("{slot}", "{slot}" * slots)
inputs |= tokenizer(text, add_special_tokens=False, return_tensors="pt")
inputs["mm_token_type_ids"] = (inputs["input_ids"] == tokenizer.convert_tokens_to_ids("{slot}")).int()
"""


def load_image_processor(
    model: str, revision: str | None, backend: str, min_pixels: int | None, max_pixels: int | None
) -> Any:
    processor_class = _processor_class(backend)
    try:
        settings, _ = processor_class.get_image_processor_dict(model, revision=revision)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"model {model!r} has no image processor settings: {reason}") from error
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
            f"{model!r} gives the one that the recipe leaves out: set both"
        )
    return processor_class.from_dict({**settings, "size": size})


def _processor_class(backend: str) -> Any:
    if backend == "pil":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    except ImportError as error:
        raise BadInput("image_backend torchvision needs torchvision, which is not installed; pil is allowed") from error
    return Qwen2VLImageProcessor


def patching(processor: Any) -> Patching:
    return Patching(processor.patch_size, processor.merge_size, processor.temporal_patch_size)


def pixel_limits(processor: Any) -> tuple[int, int]:
    return processor.size["shortest_edge"], processor.size["longest_edge"]


def grid(processor: Any, width: int, height: int) -> tuple[int, int]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    check_aspect(width, height, MAX_ASPECT_RATIO)
    fewest, most = pixel_limits(processor)
    side = processor.patch_size
    factor = side * processor.merge_size
    high, wide = smart_resize(height, width, factor=factor, min_pixels=fewest, max_pixels=most)
    return high // side, wide // side


def resize(processor: Any, image: Image.Image) -> np.ndarray:
    high, wide = (processor.patch_size * count for count in grid(processor, *image.size))
    if type(processor).__name__.endswith("Pil"):
        return np.array(image.resize((wide, high), processor.resample))
    from transformers.image_utils import SizeDict

    fewest, most = pixel_limits(processor)
    channels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None]
    resized = processor.resize(
        channels,
        size=SizeDict(shortest_edge=fewest, longest_edge=most),
        resample=processor.resample,
        factor=processor.patch_size * processor.merge_size,
    )
    assert resized.dtype == torch.uint8, f"resized to {resized.dtype}"
    assert resized.shape == (1, 3, high, wide), f"resized to {resized.shape}"
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def mrope_positions(encoded: Encoded, merge: int) -> np.ndarray:
    """M-RoPE positions (time, height, width) of one question alone, (3, length). Text counts on by one; an image
    spans a grid and is followed by 1 + its largest position."""
    positions = np.zeros((3, encoded.length), np.int64)
    at, start = 0, 0
    for (first, end), (high, wide) in zip(encoded.image_spans, encoded.grids, strict=True):
        positions[:, at:first] = start + np.arange(first - at)
        start += first - at
        rows, columns = np.divmod(np.arange(end - first), wide // merge)
        positions[:, first:end] = start + np.stack([np.zeros_like(rows), rows, columns])
        start += max(high, wide) // merge
        at = end
    positions[:, at:] = start + np.arange(encoded.length - at)
    return positions
