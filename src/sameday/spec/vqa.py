"""The recipe of visual question answering: answers are learned token by token."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sameday.spec.vlm import VlmRecipe


class VqaRecipe(VlmRecipe):
    """Answers to questions about images."""

    has: ClassVar[frozenset[str]] = VlmRecipe.has | {"recorded steps"}

    task: Literal["vqa"] = Field("vqa", description="What is learned: answers to questions about images.")
