"""The recipe of classification: a small vision model, trained from scratch on images with labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from sameday.spec.identity import IS_PATH
from sameday.spec.limits import COUNTED, SEEDS, at_most
from sameday.spec.recipe import Recipe, Strict
from sameday.spec.vision import MOST_TOKENS, BdhModel, VitModel

FARTHEST = 1000
"""From 0, of what pixels between 0 and 1 become: beyond it a model sees rounding, or numbers that are not finite."""


class ImageData(Strict):
    """Images with labels, a training and a test part."""

    path: str = Field(description="Folder of the images. Relative to the recipe's folder.", json_schema_extra=IS_PATH)
    val: int = Field(0, ge=0, **COUNTED, description="Images of the training part that are held out for validation.")
    split_seed: int = Field(0, ge=0, **SEEDS, description="Which images are held out.")
    image_size: int = Field(
        32,
        ge=1,
        **at_most(4096, "all images are held in memory at this size"),
        description="Side of the square that the model sees, a multiple of the patch.",
    )
    limit: int | None = Field(None, ge=1, **COUNTED, description="Use only the first so many images of each part.")


class Augment(Strict):
    """Each image anew in each epoch: a part of it, resized, perhaps mirrored."""

    crop_scale: tuple[float, float] = Field((0.8, 1.0), description="Least and most of the image's area that is kept.")
    crop_ratio: tuple[float, float] = Field((0.75, 4 / 3), description="Least and most width over height of that part.")
    flip: bool = Field(True, description="Mirror every other image, left to right.")

    @field_validator("crop_scale")
    @classmethod
    def _area(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError("must be the least and the most, above 0 and at most 1")
        return value

    @field_validator("crop_ratio")
    @classmethod
    def _form(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("must be the least and the most, above 0")
        if not (value[0] >= 1 / 256 and value[1] <= 256):
            raise ValueError("must lie between 1/256 and 256")
        return value


class ClassifyRecipe(Recipe):
    """Labels of images."""

    has: ClassVar[frozenset[str]] = frozenset(
        {"equal samples", "compiled layers", "checked compile", "fused levels", "recorded steps", "images in memory"}
    )
    sample: ClassVar[str] = "image"
    plain: ClassVar[str] = "a whole step at once, nothing fused"
    scored_by: ClassVar[tuple[str, ...]] = ("label_smoothing",)
    scored_on: ClassVar[tuple[str, ...]] = ("data.path", "data.val", "data.split_seed", "data.limit")
    names: ClassVar[Mapping[str, tuple[str, ...]]] = {"training data": ("data",)}
    scores: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    task: Literal["classify"] = Field("classify", description="What is learned: labels of images.")

    model: BdhModel | VitModel = Field(discriminator="kind", description="The model, by its kind.")
    data: ImageData = Field(description="Where the images are.")
    augment: Augment | None = Field(default_factory=Augment, description="How images vary; null leaves them alone.")
    normalize_mean: float | tuple[float, float, float] = Field(
        0.5, description="Taken from pixels between 0 and 1: one number, or one each for red, green and blue."
    )
    normalize_std: float | tuple[float, float, float] = Field(
        0.5, description="What pixels are divided by after that: one number, or one for each colour."
    )
    order: Literal["shuffle", "listed"] = Field("shuffle", description="Images at random, or as in the data.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of a target that is spread evenly over all classes."
    )

    @field_validator("normalize_mean")
    @classmethod
    def _near(cls, value: float | tuple[float, float, float]) -> float | tuple[float, float, float]:
        if not all(abs(each) <= FARTHEST for each in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"must lie between -{FARTHEST} and {FARTHEST}: it is taken from pixels between 0 and 1")
        return value

    @field_validator("normalize_std")
    @classmethod
    def _divides(cls, value: float | tuple[float, float, float]) -> float | tuple[float, float, float]:
        if not all(1 / FARTHEST <= each <= FARTHEST for each in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(
                f"must lie between {1 / FARTHEST} and {FARTHEST}: pixels between 0 and 1 are divided by it"
            )
        return value

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        size, patch = self.data.image_size, self.model.patch
        if size % patch:
            yield f"data.image_size {size} is no multiple of model.patch {patch}"
        elif (tokens := self.model.tokens(size)) > MOST_TOKENS:
            yield (
                f"data.image_size {size} with model.patch {patch} gives {tokens:,} tokens; at most {MOST_TOKENS:,}, "
                "since attention computes a score for each pair of them"
            )
        if self.augment is not None and size > 256:
            yield f"data.image_size {size}: crops can be made of at most 256; larger needs augment null"

    @property
    def dropout(self) -> float:
        return self.model.dropout
