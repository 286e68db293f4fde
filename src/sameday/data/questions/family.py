"""What reading, encoding and laying out questions ask of a family of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

    from sameday.data.questions.encode import Encoded
    from sameday.kernels.patches import Patching


@dataclass(frozen=True)
class Markers:
    """The tokens that a chat template is made of. `image` stands once for each of an image's tokens, `user_header`
    opens a user's turn, and `special` are those that must not stand in text: they would become real tokens. Where a
    template writes something else for an image, `written` is that, and what the library's processor makes of it, with
    `image` in it once."""

    image: str
    end_of_turn: str
    user_header: str
    special: tuple[str, ...]
    written: tuple[str, str] | None = None


class QuestionFamily(Protocol):
    """`processor` is always transformers' own image processor, as `load_image_processor` gives it. A grid is how many
    patches an image is high and wide; `merge` is the side of the square of patches that become one token."""

    markers: Markers
    max_aspect_ratio: int
    """Longer images are refused, as the image processor would."""
    position_axes: int
    """How many positions a token has: 1 in plain RoPE, 3 in M-RoPE."""

    def load_image_processor(
        self, model: str, revision: str | None, backend: str, min_pixels: int | None, max_pixels: int | None
    ) -> Any:
        """With the model's own settings, and another smallest and largest size where they are given."""

    def pixel_limits(self, processor: Any) -> tuple[int, int]:
        """Fewest and most pixels of a resized image."""

    def patching(self, processor: Any) -> Patching:
        """How a resized image is cut."""

    def grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        """Of an image of this size, without decoding it."""

    def resize(self, processor: Any, image: Image.Image) -> np.ndarray:
        """The image as the processor resizes it, in bytes: (height, width, 3)."""

    def pixel_values(self, processor: Any, image: Image.Image, resize: bool = True) -> Tensor:
        """What the processor makes of an image, or of one that need not be resized: (patches, numbers of a patch), in
        the order in which patches are cut."""

    def image_settings(self, processor: Any) -> dict[str, Any]:
        """What a resized image depends on besides the library's usual settings."""

    def processor_settings(self, processor: Any) -> dict[str, Any]:
        """What transformers' processor of text and images together has to know besides, as it is saved."""

    def image_tokens(self, grid: tuple[int, int], merge: int) -> int:
        """How many tokens of the language model an image becomes."""

    def positions(self, encoded: Encoded, merge: int) -> np.ndarray:
        """Of one question alone, (position_axes, length)."""
