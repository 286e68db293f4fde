"""The recipe of multi-head chain of thought: a head per stage, and contexts from an image's earlier stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from sameday.spec.heads import STAGES, Heads
from sameday.spec.order import Order
from sameday.spec.vlm import VlmRecipe


class CotRecipe(VlmRecipe):
    """Answers to questions of three stages about images."""

    sample: ClassVar[str] = "question"
    scores: ClassVar[tuple[str, ...]] = (*VlmRecipe.scores, *(f"exact_match_stage{stage}" for stage in STAGES))
    plain: ClassVar[str] = "one image at a time, each of its questions in a row of its own"

    task: Literal["cot"] = Field(
        "cot", description="What is learned: answers by stage, each stage with a head and the earlier ones' context."
    )
    heads: Heads = Field(default_factory=Heads, description="The heads of the stages.")
    order: Order = Field(
        default_factory=lambda: Order(kind="by_image"),
        description="In which order images are seen; all of an image's questions stand in one step.",
    )

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        order = self.order
        if order.kind not in ("by_image", "listed"):
            apart = "spreads an image's questions over the epoch" if order.kind == "shuffle" else "takes stages apart"
            yield (
                f"order {order.kind} {apart}, and a stage's context comes from the image's other questions in the same "
                "step; allowed: by_image (images at random), listed (images as in the file)"
            )
        for name, part in zip(
            ("data", *(f"data.mix[{n}]" for n in range(len(self.data.mix)))), self.data.sets, strict=True
        ):
            if part.weight != 1:
                yield (
                    f"{name}.weight is {part.weight:g}, which takes some of an image's questions more often than "
                    "others, and a stage's context comes from all of them in the same step; must be 1"
                )
        if order.max_per_image is not None:
            yield (
                f"order.max_per_image {order.max_per_image} would take an image's questions apart, and a stage's "
                "context comes from the image's other questions in the same step: leave it out"
            )
