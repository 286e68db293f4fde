"""The shapes of small vision models that are trained from scratch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sameday.spec.identity import was
from sameday.spec.limits import at_most
from sameday.spec.recipe import Strict

MOST_TOKENS = 2**14 + 1
"""Of one image."""
MOST_PARAMETERS = 2**32

LAYERS = at_most(1024, "activations of all of them are kept for the backward pass")


class VisionModel(Strict):
    """What all of the models have: an image in patches, a width in heads."""

    kind: str = Field(description="Which model.")
    width: int = Field(
        192,
        ge=1,
        **at_most(16384, "weights grow with its square"),
        description="Numbers that stand for a patch; a multiple of heads.",
    )
    heads: int = Field(3, ge=1, description="Parts of the width that attend on their own.")
    patch: int = Field(
        4,
        ge=1,
        **at_most(256, "a patch becomes one token, by as many weights for each number as it has pixels"),
        description="Side of a square patch, in pixels.",
    )
    pool: Literal["class", "mean"] = Field(
        "class", description="What is classified: a token of its own, or the mean of all patches."
    )
    dropout: float = Field(0.0, ge=0, le=0.99, description="Dropout of the hidden units.")

    def tokens(self, image_size: int) -> int:
        """Of one image: its patches, and the class token where there is one."""
        return (image_size // self.patch) ** 2 + (self.pool == "class")

    @model_validator(mode="after")
    def _whole_heads(self) -> VisionModel:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")
        if (count := self.parameters()) > MOST_PARAMETERS:
            raise ValueError(
                f"width {self.width} gives {count:,} parameters with the other fields; at most {MOST_PARAMETERS:,}, "
                "since all of them are trained in memory"
            )
        return self

    def parameters(self) -> int:
        """Of the levels or layers, about."""
        return self.width**2

    def kept(self, image_size: int) -> int:
        """Numbers that the backward pass keeps of an image, at least."""
        return self.tokens(image_size) * self.width


class BdhModel(VisionModel):
    """Vision-BDH: one level with shared weights, gone through several times."""

    kind: Literal["vision_bdh"] = Field("vision_bdh", description="Vision-BDH.")
    levels: int = Field(6, ge=1, **LAYERS, description="How often the level is gone through.")
    heads: int = Field(6, ge=1, description="Parts of the width that attend on their own.")
    latents: int = Field(32, ge=1, description="Sparse units: each head has latents * width / heads of them.")
    attention: Literal["linear", "softmax"] = Field(
        "linear", description="Scores as they are, as published, or through a softmax."
    )
    dropout: float = Field(0.1, ge=0, le=0.99, description="Dropout of the sparse units.")
    start: Literal["xavier", "fan_in"] = Field(
        "xavier",
        description="How the patch convolution and the head start. xavier: as published, Xavier-uniform with biases of "
        "zero. fan_in: uniform within 1 / sqrt(inputs), biases too, as all runs did before there was a choice.",
        json_schema_extra=was("fan_in"),
    )

    @property
    def units(self) -> int:
        """Of each head."""
        return self.latents * self.width // self.heads

    def parameters(self) -> int:
        return 3 * self.latents * self.width**2

    def kept(self, image_size: int) -> int:
        # The units of both encoders; each head has its share of them.
        return 2 * self.levels * self.tokens(image_size) * self.latents * self.width

    @model_validator(mode="after")
    def _pairs(self) -> BdhModel:
        if self.units % 2:
            raise ValueError(f"latents {self.latents} give each head {self.units} units, and they are rotated in pairs")
        return self


class VitModel(VisionModel):
    """A vision transformer."""

    kind: Literal["vit"] = Field("vit", description="A vision transformer.")
    depth: int = Field(12, ge=1, **LAYERS, description="Layers.")
    mlp: int = Field(4, ge=1, description="Hidden units of a layer's perceptron, as a multiple of the width.")

    def parameters(self) -> int:
        return self.depth * (4 + 2 * self.mlp) * self.width**2

    def kept(self, image_size: int) -> int:
        return self.depth * self.tokens(image_size) * self.mlp * self.width

    @model_validator(mode="after")
    def _pairs(self) -> VitModel:
        if self.dropout and self.mlp * self.width % 2:
            raise ValueError(f"width {self.width} times mlp {self.mlp} is odd, and units are dropped by pairs of keys")
        return self
