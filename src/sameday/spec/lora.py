"""Which adapters are trained, for any model that has linear layers."""

from __future__ import annotations

from pydantic import Field

from sameday.spec.limits import at_most
from sameday.spec.recipe import Strict


class Lora(Strict):
    """Low-rank adapters on some of the language model's linear layers."""

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
        description="Scale: an adapter's output is multiplied by alpha / r.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the input of each adapter.")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        min_length=1,
        description="Names of the linear layers that get an adapter. A name that only the vision tower has, "
        "or that it has too, is refused unless train_vision is true.",
    )
