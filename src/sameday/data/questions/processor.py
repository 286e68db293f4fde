"""transformers' image processor: its sizes without decoding, its resizing by itself, and what it makes of each byte."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
import torch
import transformers
from PIL import Image

from sameday.data.questions.images import check_aspect
from sameday.kernels.patches import Patching, patches
from sameday.spec.errors import BadInput


class ImageProcessor:
    """transformers' processor for Qwen-VL, and the arithmetic of its grid without any decoding."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.backend: str = "pil" if type(processor).__name__.endswith("Pil") else "torchvision"
        self.patch_size: int = processor.patch_size
        self.merge_size: int = processor.merge_size
        self.patching = Patching(self.patch_size, self.merge_size, processor.temporal_patch_size)
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

    def resized(self, image: Image.Image) -> np.ndarray:
        """The image as the processor resizes it, in bytes: (height, width, 3)."""
        high, wide = (self.patch_size * count for count in self.grid(*image.size))
        if self.backend == "pil":
            return np.array(image.resize((wide, high), self._processor.resample))
        from transformers.image_utils import SizeDict

        size = SizeDict(shortest_edge=self.min_pixels, longest_edge=self.max_pixels)
        channels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()[None]
        made = self._processor.resize(
            channels, size=size, resample=self._processor.resample, factor=self.patch_size * self.merge_size
        )
        assert made.dtype == torch.uint8 and made.shape == (1, 3, high, wide), f"resized to {made.dtype} {made.shape}"
        return made[0].permute(1, 2, 0).contiguous().numpy()

    @cached_property
    def levels(self) -> np.ndarray:
        """What the processor makes of each byte in each colour, (3, 256) float32: asked of the processor itself."""
        side = self.patch_size * self.merge_size * -(-16 // (self.patch_size * self.merge_size))
        grey = np.arange(side * side).reshape(side, side, 1).repeat(3, 2).astype(np.uint8)
        made = self._processor(images=[Image.fromarray(grey)], do_resize=False, return_tensors="pt")["pixel_values"]
        bytes_of = torch.arange(256, dtype=torch.int32).expand(3, 256)
        grid = side // self.patch_size
        places = patches(torch.from_numpy(grey).flatten(), [(grid, grid)], self.patching, bytes_of)
        colour = torch.arange(3)[:, None].expand(3, self.patching.frames * self.patch_size**2).flatten()
        table = torch.full((3, 256), torch.nan)
        table[colour.expand_as(places), places.long()] = made.float()
        assert torch.equal(table[colour.expand_as(places), places.long()], made.float()), (
            "this processor does not treat each byte by itself"
        )
        return table.numpy()

    def settings(self) -> dict[str, Any]:
        """Everything that `resized` depends on besides the image."""
        found: dict[str, Any] = {
            "image_backend": self.backend,
            "resample": int(self._processor.resample),
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "multiple": self.patch_size * self.merge_size,
            "pillow": PIL.__version__,
            "transformers": transformers.__version__,
        }
        if self.backend == "torchvision":
            import torchvision

            found |= {"torch": torch.__version__, "torchvision": torchvision.__version__}
        return found

    def identity(self) -> dict[str, Any]:
        """What the tower takes depends on this besides the image, and on the libraries' versions."""
        mine = self._processor
        flags = {name: getattr(mine, name) for name in ("do_convert_rgb", "do_normalize", "do_rescale")}
        scales = {name: np.atleast_1d(getattr(mine, name)).tolist() for name in ("image_mean", "image_std")}
        found = {"image_backend": self.backend, "resample": int(mine.resample), "rescale_factor": mine.rescale_factor}
        sizes = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels, "merge_size": self.merge_size}
        patch = {"patch_size": self.patch_size, "frames": mine.temporal_patch_size}
        return {**found, **flags, **scales, **sizes, **patch}

    def pixels(self, image: Image.Image) -> np.ndarray:
        """What the vision tower takes, by transformers alone: float32 of shape (patches, patch_dim)."""
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
