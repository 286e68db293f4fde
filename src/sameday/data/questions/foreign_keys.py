"""Keys by which lines that were written for other trainers change what is learned, and which cannot be obeyed here: a
line that has one with a value is refused, because without it another text or objective would be trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sameday.spec.words import in_one_line

_LEARNED = ("loss", "weight", "train", "training")
"""Whether an answer is learned, as ms-swift, OpenAI and axolotl call it."""
_COMPARED = ("chosen", "rejected", "chosen_messages", "rejected_messages", "rejected_response")
"""Answers of which one is preferred, as TRL, LLaMA-Factory and ms-swift call them."""
_SEEN_OR_HEARD = ("videos", "audios")
_ONE = ("video", "audio")
"""The same in conversations; beside a plain question such a name may say where its image is from."""
_BOXES = ("<bbox>", "<ref-object>")
"""Places in texts that ms-swift fills from `objects`."""
_TOOLS = ("tools", "functions")
_CALLS = ("tool_calls", "function_call", "reasoning_content")
"""What a chat template writes into a turn besides its content."""


def check_line(line: Mapping[str, Any]) -> None:
    """ValueError for what changes the objective, in a line of any form."""
    for key in _COMPARED:
        if _holds(line, key):
            raise ValueError(
                f"has {key!r}, to be compared with another answer, and no answers are compared: leave it out"
            )
    _check_seen(line, _SEEN_OR_HEARD)
    if isinstance(line.get("kto_tag"), bool):
        raise ValueError("has 'kto_tag', and all answers are learned as good ones: leave it out, and lines of bad ones")


def check_conversation(line: Mapping[str, Any]) -> None:
    """ValueError for what stands in the prompt of a conversation besides its turns."""
    _check_seen(line, _ONE)
    turns = str(line.get("messages") or line.get("conversations"))
    if _holds(line, "objects") and (places := [each for each in _BOXES if each in turns]):
        raise ValueError(
            f"has 'objects', from which nothing is put into the text where {' and '.join(places)} stands: write names "
            "and boxes into the turns"
        )
    for key in _TOOLS:
        if _holds(line, key):
            raise ValueError(
                f"has {key!r}, and none are put into the prompt: leave it out, or write it as a system turn"
            )


def _check_seen(line: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if _holds(line, key):
            raise ValueError(
                f"has {key!r}, from which nothing is learned: leave the line out, or write frames as 'images'; without "
                f"{key!r} a line is learned from its texts and images alone"
            )


def check_plain(line: Mapping[str, Any], instructed: bool) -> None:
    """ValueError for what alpaca's form has beside a question: the other half of an instruction, and earlier turns as
    pairs of question and answer."""
    if instructed and _holds(line, "input"):
        raise ValueError(
            "has 'input' beside 'instruction', which is the whole user text: write both into 'instruction'"
        )
    history = line.get("history")
    if isinstance(history, list) and any(isinstance(pair, list) for pair in history):
        raise ValueError(
            "has earlier turns in 'history', which are not read in this form: write all turns as 'messages'"
        )


def check_turn(turn: Mapping[str, Any], role: str, where: str) -> None:
    """ValueError where an answer is marked as one that is not to be learned, or not as much as others, or where a turn
    has more than its content."""
    for key in _LEARNED if role == "assistant" else ():
        if turn.get(key) not in (None, 1):  # true is 1
            raise ValueError(
                f"{where}{key!r} is {in_one_line(json.dumps(turn[key]))}, and all answers of a line are learned alike: "
                "allowed are true and 1; an answer that is not to be learned is left out, or put into a user turn"
            )
    for key in _CALLS:
        if _holds(turn, key):
            raise ValueError(f"{where}has {key!r}, which is not put into the prompt: leave it out, or write it as text")


def _holds(line: Mapping[str, Any], key: str) -> bool:
    """Whether a text, a list or an object stands there, and not an empty one; a table has texts alone."""
    value = line.get(key)
    return isinstance(value, str | list | dict) and bool(value) and value not in ("[]", "{}")
