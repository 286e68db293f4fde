"""Which adapters are trained, for any model that has linear layers."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from sameday.spec.limits import at_most
from sameday.spec.recipe import Strict

Part = Literal["decoder", "tower", "projector"]
PARTS: tuple[Part, ...] = ("decoder", "tower", "projector")
"""Of a vision-language model: the language model, what looks at images, and what takes that to the language model."""
OF_IMAGES: tuple[Part, ...] = ("tower", "projector")
"""Parts whose layers a target names with the part before it."""
ALL_LINEAR = "all-linear"


def named_part(target: str) -> tuple[Part, str]:
    """Of which part a target is, and what it is called there: tower.qkv is qkv of the tower, q_proj the decoder's."""
    before, _, name = target.partition(".")
    for part in OF_IMAGES:
        if before == part and name:
            return part, name
    return "decoder", target


class Lora(Strict):
    """Low-rank adapters on some of a model's linear layers."""

    r: int = Field(
        4,
        ge=1,
        **at_most(8192, "a higher rank than a layer is wide adds nothing"),
        description="Rank of the adapters.",
    )
    alpha: float = Field(
        8,
        gt=0,
        **at_most(2**20, "far above every rank, adapters would drown the model"),
        description="Scale: an adapter's output is multiplied by alpha / r; with rslora by alpha / sqrt(r).",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the input of each adapter.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        min_length=1,
        description="Linear layers that get an adapter. A bare name (q_proj) is the language model's. With its part "
        "before it, it is the vision tower's (tower.qkv) or the projector's (projector.linear_fc1). all-linear stands "
        "for all layers of a part, or of a module in it: all-linear, tower.all-linear, projector.all-linear, "
        "projector.deepstack_merger_list.all-linear.",
    )
    rslora: bool = Field(
        False, description="Rank-stabilized: an adapter's output is multiplied by alpha / sqrt(r), not by alpha / r."
    )
    dora: bool = Field(
        False, description="Weight-decomposed (DoRA): the length of each row of a changed weight is learned by itself."
    )

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def parts(self) -> frozenset[Part]:
        return frozenset(named_part(target)[0] for target in self.target_modules)
