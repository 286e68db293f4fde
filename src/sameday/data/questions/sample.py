"""One question about zero or more images, in the form that all three file dialects are read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

PLACEHOLDER = "<image>"
"""Stands in a text where an image does."""
TEXT_MARK = "\u00a7"
"""Stands for a question's text, to see what a chat template puts around it."""
SET_SPAN = 10**8
"""Ids of the questions of one set; those of the next that is mixed with it begin there."""
WITHOUT_IMAGE = "line "
"""How the key of a question begins that has no image: no image is called so."""


@dataclass(frozen=True)
class ImageRef:
    """An image that was opened, decoded and found good. Equal digest and size mean equal pixels."""

    path: Path
    digest: str
    width: int
    height: int
    stamp: tuple[int, int, int] | None = field(default=None, compare=False)
    """Of the file, as it was then."""


@dataclass(frozen=True)
class Message:
    """One turn. A part is a piece of text, or the number of one of the sample's images."""

    role: str
    parts: tuple[str | int, ...]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Sample:
    """`id` is the number of its line in the file, or of its item in an array, so that randomness keyed by it survives
    a changed selection; in the sets of a mix it goes on from `SET_SPAN`."""

    id: int
    where: str
    images: tuple[ImageRef, ...]
    messages: tuple[Message, ...]
    stage: int | None = None
    type: str | None = None
    """What kind of question it is (yes/no, colour, number ...), where the data says so."""
    plain: str | None = None
    """The question without its prompt, where the last user turn has more than the question."""

    @property
    def question(self) -> str:
        """The plain question, for people: without the prompt around it."""
        return self.prompt if self.plain is None else self.plain

    @property
    def prompt(self) -> str:
        """The text of the last user turn, without white space around it."""
        return last_user_text(self.messages)

    @property
    def turn(self) -> str:
        """The last user turn as the model reads it, with all its line breaks. An image is PLACEHOLDER, but for those at
        the beginning, which are left out."""
        parts = next(m.parts for m in reversed(self.messages) if m.role == "user")
        texts = dropwhile(lambda part: isinstance(part, int), parts)
        return "".join(part if isinstance(part, str) else PLACEHOLDER for part in texts)

    @property
    def answer(self) -> str:
        """The text of the last turn, which is always the assistant's."""
        return self.messages[-1].text

    @property
    def set(self) -> int:
        """Which of the sets of a mix it is from."""
        return self.id // SET_SPAN

    @property
    def image_key(self) -> str:
        """Equal for questions about the same images; unique to the question where it has none."""
        return "+".join(i.digest for i in self.images) or f"{WITHOUT_IMAGE}{self.id}"


def last_user_text(messages: Sequence[Message]) -> str:
    return next(m.text for m in reversed(messages) if m.role == "user").strip()


def images_of(splits: Mapping[str, Sequence[Sample]]) -> list[ImageRef]:
    """Each content once, whatever its names."""
    samples = (sample for split in splits.values() for sample in split)
    return list({image.digest: image for sample in samples for image in sample.images}.values())
