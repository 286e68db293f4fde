"""An instruction is the whole user text of its line: one that stands for different questions, and holds none of them,
would make them the same question."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sameday.data.questions.read import Raw
from sameday.data.questions.sample import last_user_text
from sameday.spec.words import count, first_names, in_one_line


def questions_lost(raws: Mapping[int, Raw], places: Mapping[int, str], label: str) -> str | None:
    """A sentence about the first such instruction; `raws` and `places` are lines and where they stand, by number."""
    lines: dict[str, dict[str, int]] = {}
    for number, raw in raws.items():
        instruction, question = last_user_text(raw.messages), _words(raw.question)
        if raw.instructed and f" {question} " not in f" {_words(instruction)} ":
            lines.setdefault(instruction, {}).setdefault(question, number)
    replaced = {instruction: asked for instruction, asked in lines.items() if len(asked) > 1}
    if not replaced:
        return None
    instruction, asked = next(iter(replaced.items()))
    others = f", and so it is with {count(len(replaced) - 1, 'other instruction')}" if len(replaced) > 1 else ""
    where = first_names([f"{label}:{places[number]}" for number in asked.values()], 3)
    return (
        f"{where}: 'instruction' is {in_one_line(instruction)!r} for {len(asked):,} different questions{others}; it "
        "must hold its line's question: all questions would be the same text without it. Leave it out, or let "
        "recipe.prompt with over_instruction: true put a text around {question}"
    )


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
