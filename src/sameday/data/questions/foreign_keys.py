"""Keys by which lines that were written for other trainers change what is learned, and which cannot be obeyed here: a
line that has one with a value is refused, because without it another text or objective would be trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sameday.spec.words import in_one_line

_LEARNED = ("loss", "weight", "train", "training")
"""Whether an answer is learned, as ms-swift, OpenAI and axolotl call it."""


def check_turn(turn: Mapping[str, Any], role: str, where: str) -> None:
    """ValueError where an answer is marked as one that is not to be learned, or not as much as others."""
    for key in _LEARNED if role == "assistant" else ():
        if turn.get(key) not in (None, 1):  # true is 1
            raise ValueError(
                f"{where}{key!r} is {in_one_line(json.dumps(turn[key]))}, and all answers of a line are learned alike: "
                "allowed are true and 1; an answer that is not to be learned is left out, or put into a user turn"
            )
