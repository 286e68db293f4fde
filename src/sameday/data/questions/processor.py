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

from sameday.data.questions.family import QuestionFamily
from sameday.kernels.patches import patches


class ImageProcessor:
    """transformers' processor for a family of models, and the arithmetic of its grid without any decoding."""

    def __init__(self, family: QuestionFamily, processor: Any) -> None:
        self.family, self._processor = family, processor
        self.backend: str = "pil" if type(processor).__name__.endswith("Pil") else "torchvision"
        self.patching = family.patching(processor)
        self.patch_size, self.merge_size = self.patching.side, self.patching.merge
        self.min_pixels, self.max_pixels = family.pixel_limits(processor)

    @classmethod
    def load(
        cls,
        family: QuestionFamily,
        model_folder_or_name: str,
        revision: str | None = None,
        backend: Literal["pil", "torchvision"] = "pil",
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> ImageProcessor:
        """The model's own settings, with another smallest and largest size where they are given."""
        processor = family.load_image_processor(model_folder_or_name, revision, backend, min_pixels, max_pixels)
        return cls(family, processor)

    @property
    def library_class(self) -> type:
        """transformers' own."""
        return type(self._processor)

    @property
    def whole_settings(self) -> dict[str, Any]:
        """What transformers' processor of text and images together has to know besides."""
        return self.family.processor_settings(self._processor)

    def save(self, folder: Path) -> None:
        """The settings, as transformers reads them."""
        self._processor.save_pretrained(str(folder))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """How many patches high and wide an image of this size becomes."""
        return self.family.grid(self._processor, width, height)

    def tokens(self, width: int, height: int) -> int:
        """How many tokens of the language model an image of this size becomes."""
        return self.family.image_tokens(self.grid(width, height), self.merge_size)

    def resized(self, image: Image.Image) -> np.ndarray:
        """The image as the processor resizes it, in bytes: (height, width, 3)."""
        return self.family.resize(self._processor, image)

    @cached_property
    def byte_table(self) -> np.ndarray:
        """What the processor makes of each byte in each colour, (3, 256) float32: asked of the processor itself."""
        side = self.patch_size * self.merge_size * -(-16 // (self.patch_size * self.merge_size))
        grey = np.arange(side * side).reshape(side, side, 1).repeat(3, 2).astype(np.uint8)
        made = self.family.pixel_values(self._processor, Image.fromarray(grey), resize=False)
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
        settings: dict[str, Any] = {
            "image_backend": self.backend,
            "resample": int(self._processor.resample),
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "multiple": self.patch_size * self.merge_size,
            "pillow": PIL.__version__,
            "transformers": transformers.__version__,
            **self.family.image_settings(self._processor),
        }
        if self.backend == "torchvision":
            import torchvision

            settings |= {"torch": torch.__version__, "torchvision": torchvision.__version__}
        return settings

    def identity(self) -> dict[str, Any]:
        """What the tower takes depends on this besides the image, and on the libraries' versions."""
        mine = self._processor
        flags = {name: getattr(mine, name) for name in ("do_convert_rgb", "do_normalize", "do_rescale")}
        scales = {name: np.atleast_1d(getattr(mine, name)).tolist() for name in ("image_mean", "image_std")}
        method = {"image_backend": self.backend, "resample": int(mine.resample), "rescale_factor": mine.rescale_factor}
        sizes = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels, "merge_size": self.merge_size}
        patch = {"patch_size": self.patch_size, "frames": self.patching.frames}
        return {**method, **flags, **scales, **sizes, **patch, **self.family.image_settings(mine)}

    def note(self, installed: bool) -> str | None:
        """What a user has to know where torchvision is `installed`, which transformers takes then by itself."""
        if self.backend != "pil" or not installed:
            return None
        return "images are resized by Pillow (recipe.image_backend pil), not by torchvision as AutoProcessor does"

    def pixels(self, image: Image.Image) -> np.ndarray:
        """What the vision tower takes, by transformers alone: float32 of shape (patches, patch_dim)."""
        # Never as an array: one that is 1 or 3 pixels high would be taken for channels first.
        return self.family.pixel_values(self._processor, image).numpy().astype(np.float32, copy=False)
