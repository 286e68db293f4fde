"""Layouts of user turns: told apart, counted, and compared between splits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sameday.data.questions.prompt import asked
from sameday.data.questions.read import Raw, parse_line
from sameday.data.questions.sample import ImageRef, Sample, last_user_text
from sameday.data.questions.turns import PLAIN, Asked, UserTurn, layouts_differ, merged, user_turns
from sameday.spec.questions import Prompt

IMAGE = ImageRef(Path("a.png"), "0" * 32, 40, 30)


def as_written(parts: tuple[str | int, ...]) -> str:
    return "".join(part if isinstance(part, str) else "<image>" for part in parts)


def without_spaces(parts: tuple[str | int, ...]) -> str:
    """As a chat template that trims texts."""
    return "".join(part.strip() if isinstance(part, str) else "<image>" for part in parts)


def images_first(parts: tuple[str | int, ...]) -> str:
    return "<image>" + "".join(part for part in parts if isinstance(part, str))


def plain(question: str, **more: Any) -> dict[str, Any]:
    return {"image": "a.png", "question": question, "answer": "yes", **more}


def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate((*turns, "yes"))]
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": before + said, "images": ["a.png"] * sum(turn.count("<image>") for turn in turns)}


def samples(rows: list[dict[str, Any]], prompt: Prompt | None = None) -> list[Sample]:
    """As the audit makes them of lines."""
    made = []
    for number, row in enumerate(rows):
        line: Raw = parse_line(row)
        raw = (asked(line, prompt) if prompt is not None else None) or line
        question = line.question if line.question != last_user_text(raw.messages) else None
        images = (IMAGE,) * len(raw.images)
        made.append(Sample(number, f"a:{number}", images, raw.messages, raw.stage, raw.type, question))
    return made


def layouts(rows: list[dict[str, Any]], prompt: Prompt | None = None) -> dict[str, int]:
    return {str(turn): count for turn, count in user_turns(samples(rows, prompt), prompt).items()}


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        ([plain("red?"), chat("<image>where?")], "'<image>{question}'"),
        ([chat("<image>\nred?"), chat("<image>\nwhere?")], r"'<image>\n{question}'"),
        ([chat("red?\n<image>"), chat("where?\n<image>")], r"'{question}\n<image>'"),
        ([chat("<image>\n<image>\nred?"), chat("<image>\nwhere?")], r"'<image>\n{question}'"),
        ([plain(" red? "), plain(" where? ")], "'<image> {question} '"),
        ([chat("Picture 1: <image>\nred?"), chat("Picture 1: <image>\nwhere?")], r"'Picture 1: <image>\n{question}'"),
        ([chat("red? <image> In a word."), chat("where? <image> In a word.")], "'{question} <image> In a word.'"),
        ([chat("Is <image> red?"), chat("Does <image> move?")], "'{text}<image>{text}'"),
        ([chat("<image>\nred?", "no", "where?"), chat("hello", "yes", "<image>\nred?")], r"'<image>\n{question}'"),
    ],
)
def test_a_layout_is_told(rows: list[dict[str, Any]], layout: str) -> None:
    assert layouts(rows) == {layout: len(rows)}


def test_a_question_without_an_image_has_none() -> None:
    assert layouts([chat("red?"), {"image": [], "question": "red?", "answer": "no"}]) == {}


def test_white_space_of_a_template_is_not_the_lines() -> None:
    prompt = Prompt(default="Look.\n{question}\n", by="type", templates={"count": " How many? {question}"})
    rows = [chat("<image>\nred?"), chat("<image>\nwhere?") | {"type": "count"}]
    assert layouts(rows, prompt) == {r"'<image>\n{question}'": 2}
    assert layouts([plain("red?"), plain("where?", type="count")], prompt) == {str(PLAIN): 2}


def test_text_that_no_template_was_put_around_is_told_apart() -> None:
    prompt = Prompt(default="Look. {question}")
    rows = [plain("red?"), plain("red?", instruction="Say: red?"), chat("<image>red?", "no", "where?")]
    assert layouts(rows, prompt) == {str(PLAIN): 1, "'<image>{question without prompt}'": 2}


def test_pieces_put_a_question_where_it_was() -> None:
    (turn,) = user_turns(samples([chat("Look: <image>\nred?"), chat("Look: <image>\nwhere?")]), None)
    assert turn.usable and turn.pieces("how?") == ["Look: ", "<image>", "\nhow?"]


def test_what_the_chat_template_writes_alike_is_one_layout() -> None:
    line, end = UserTurn(around=("\n", "")), UserTurn(("", "<image>"), 0)
    counts = Counter({PLAIN: 3, line: 2, end: 1})
    assert merged([counts], as_written) == [counts]
    assert merged([counts], without_spaces) == [{PLAIN: 5, end: 1}]
    assert merged([counts], images_first) == [{PLAIN: 4, line: 2}]


def test_the_most_common_layout_is_asked_in_and_the_others_are_counted() -> None:
    rows = [chat("<image>\nred?")] * 3 + [plain("red?")] * 2 + [chat("red?<image>")]
    found = Asked.of(samples(rows), None, as_written)
    assert str(found.turn) == r"'<image>\n{question}'" and found.system is None
    assert found.words() == (
        r"The lines below ask as `'<image>\n{question}'`, the layout of 3 of 6 training questions; there were others, "
        "too: `'<image>{question}'` (2 questions), `'{question}<image>'` (1 question)."
    )
    assert Asked.from_json(json.loads(json.dumps(found.json()))) == found
    alone = Asked.of(samples([plain("red?")]), None, as_written)
    assert (
        alone.words() == "All training questions have the layout `'<image>{question}'`, in which the lines below ask."
    )


def test_a_layout_that_cannot_be_asked_in_is_said() -> None:
    found = Asked.of(samples([chat("Is <image> red?"), chat("Does <image> move?")]), None, as_written)
    assert found.turn == PLAIN
    assert found.words() == (
        "The lines below ask as `'<image>{question}'`, which is no layout of the training questions: "
        "`'{text}<image>{text}'` (2 questions)."
    )
    assert Asked.of([], None, as_written).words() == "" and Asked().turn == PLAIN


def test_a_system_turn_of_the_data_is_asked_with() -> None:
    rows = [chat("<image>red?", system="Be brief.")] * 2 + [plain("red?")]
    found = Asked.of(samples(rows), None, as_written)
    assert found.system == "Be brief."
    assert found.words().endswith(" The system turn is that of 2 of 3 training questions.")
    few = Asked.of(samples([*rows[1:], plain("where?")]), None, as_written)
    assert few.system is None and few.words().endswith(
        " 1 of 3 training questions had a system turn of their own, which the lines below do not ask with."
    )
    assert "system" not in Asked.of(samples([plain("red?")]), None, as_written).words()
    assert Asked.from_json(json.loads(json.dumps(found.json()))) == found


def test_splits_in_different_layouts_are_told() -> None:
    def differ(render: Any = as_written, **sides: list[dict[str, Any]]) -> str | None:
        return layouts_differ({name: samples(rows) for name, rows in sides.items()}, None, lambda: render)

    mixed = [plain("red?"), plain("where?"), chat("<image>\nred?")]
    assert differ(train=[plain("red?")] * 3, val=[chat("<image>\nred?")], test=[plain("red?")]) == (
        "the layouts of user turns differ: train has `'<image>{question}'` (3 questions); val has "
        r"`'<image>\n{question}'` (1 question). A model answers best in the layout that it was trained on"
    )
    assert differ(train=[plain("red?")], val=mixed) is not None
    assert differ(train=mixed, val=[plain("red?")]) is None
    assert differ(train=mixed, val=[chat("<image>\nred?")]) is not None, "most of training had another"
    assert differ(without_spaces, train=[plain("red?")], val=[chat("<image>\nred?")]) is None
    assert differ(None, train=[plain("red?")], val=[chat("<image>\nred?")]) is not None
    assert differ(val=[plain("red?")], test=[chat("<image>\nred?")]) is None
    assert differ(train=[chat("red?")], val=[plain("red?")]) is None
