"""In which order questions about images are seen, for any task that has such questions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sameday.spec.limits import COUNTED
from sameday.spec.recipe import Strict


class Order(Strict):
    """In which order questions are seen. Order is recipe: it decides what model comes out."""

    kind: Literal["shuffle", "listed", "by_image", "curriculum"] = Field(
        "shuffle",
        description="shuffle: all questions at random. listed: as in the file. by_image: images at random, an "
        "image's questions together. curriculum: by stage, lowest first.",
    )
    within_image: Literal["listed", "stage"] = Field(
        "listed", description="by_image: an image's questions as in the file, or by clinical stage."
    )
    max_per_image: int | None = Field(
        None,
        ge=1,
        **COUNTED,
        description="by_image: at most so many questions of one image in a step, for more images per step. "
        "Exceeded only where no order of the questions could keep it.",
    )
    within_stage: Literal["shuffle", "by_image"] = Field("shuffle", description="curriculum: the order inside a stage.")

    @model_validator(mode="after")
    def _fits_kind(self) -> Order:
        if self.kind != "by_image" and (self.max_per_image is not None or self.within_image != "listed"):
            raise ValueError(f"within_image and max_per_image belong to kind by_image, not {self.kind}")
        if self.kind != "curriculum" and self.within_stage != "shuffle":
            raise ValueError(f"within_stage belongs to kind curriculum, not {self.kind}")
        return self
