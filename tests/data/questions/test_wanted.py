"""The questions of a file as a recipe asks for them: chosen by fields, sorted by tables and rules, put into prompts."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sameday.data.questions import categories
from sameday.data.questions.audit import NoneLeft, audit, check
from sameday.data.questions.categories import Categorizer, known_as, read_table
from sameday.data.questions.prompt import asked
from sameday.data.questions.read import parse_line
from sameday.data.questions.sample import Sample
from sameday.data.questions.wanted import Wanted
from sameday.data.questions.where import holds
from sameday.models.families import family_of
from sameday.spec.errors import BadInput
from sameday.spec.questions import Categories, Prompt
from sameday.spec.vlm import Data

QWEN = family_of("qwen3_vl")
Row = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "images/a.png")
    return tmp_path / "images"


def row(question: str = "What?", **more: Any) -> Row:
    return {"image": "a.png", "question": question, "answer": "red", **more}


def write(root: Path, rows: Sequence[Any], name: str = "train.jsonl") -> Path:
    path = root.parent / name
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def where(**conditions: Any) -> dict[str, tuple[str, ...]]:
    return Data(train="t", where=conditions).where


def samples_of(root: Path, rows: Sequence[Any], wanted: Wanted, **more: Any) -> tuple[list[Sample], list[str]]:
    said: list[str] = []
    samples, _ = check(write(root, rows), root, QWEN, wanted=wanted, say=said.append, **more)
    return samples, said


# Which lines


def test_only_lines_that_match_are_looked_at(root: Path) -> None:
    rows = [
        row(stage=1),
        row(stage=2, image="not there.png"),
        row(stage="stage 1", type="yes/no"),
        row(image="not there either.png"),
        row(stage="two, or so"),
        {"image": "a.png", "question": "no answer", "stage": 2},
    ]
    samples, said = samples_of(root, [*rows[:4], rows[5]], Wanted(where(stage=1)))
    assert [(each.id, each.stage, each.type) for each in samples] == [(1, 1, None), (3, 1, "yes/no")]
    assert said == ["train.jsonl: 2 of 5 questions: where stage is 1"]
    # What no condition can be held against is a problem, as without conditions.
    with pytest.raises(BadInput, match=r"train\.jsonl:2: invalid JSON at column 1: Expecting value"):
        check(write(root, [rows[0], "nothing"]), root, QWEN, wanted=Wanted(where(stage=1)))
    with pytest.raises(BadInput, match=r"train\.jsonl:2: has no 'answer'"):
        check(write(root, [rows[0], rows[5] | {"stage": 1}]), root, QWEN, wanted=Wanted(where(stage=1)))


def test_several_fields_and_values(root: Path) -> None:
    rows = [row(stage=n % 3, type=("a", "b")[n % 2], level=n / 2, tags=["x", str(n)]) for n in range(12)]

    def ids(**conditions: Any) -> list[int]:
        return [each.id - 1 for each in samples_of(root, rows, Wanted(where(**conditions)))[0]]

    assert ids(stage=[0, 2], type="a") == [0, 2, 6, 8]
    assert ids(level=2) == [4] and ids(level="2.5") == [5]
    assert ids(tags=["3", 4]) == [3, 4]


def test_the_limit_counts_what_matches(root: Path) -> None:
    rows = [row(stage=1 + n % 2) for n in range(10)]
    samples, said = samples_of(root, rows, Wanted(where(stage=2)), limit=3)
    assert [each.id for each in samples] == [2, 4, 6]
    assert said == ["train.jsonl: 5 of 10 questions: where stage is 2; the first 3 are taken"]
    _, said = samples_of(root, rows, Wanted(where(stage=2)), limit=5)
    assert said == ["train.jsonl: 5 of 10 questions: where stage is 2"]
    rows[1]["answer"] = rows[2]["answer"] = "nan"
    _, said = samples_of(root, rows, Wanted(where(stage=2), skip=where(answer="nan")))
    assert said == [
        "train.jsonl: 4 of 8 questions: where stage is 2",
        "train.jsonl: 2 of 10 lines are skipped: answer is nan",
    ]
    few, _ = samples_of(root, rows, Wanted(where(stage=2)), few=2)
    assert [each.id for each in few] == [2, 4]


def test_fields_and_values_that_are_nowhere(root: Path) -> None:
    rows = [row(stage=1 + n % 2, kind=f"k{n}") for n in range(20)]
    with pytest.raises(BadInput) as caught:
        samples_of(root, rows, Wanted(where(sage=1)))
    assert not isinstance(caught.value, NoneLeft)
    assert str(caught.value) == (
        "train.jsonl: none of 20 questions: where sage is 1; recipe.data.where.sage: no line of train.jsonl has this "
        "field; there are answer, image, kind, question, stage"
    )
    with pytest.raises(NoneLeft) as none:
        samples_of(root, rows, Wanted(where(stage=7)))
    assert str(none.value) == (
        "train.jsonl: none of 20 questions: where stage is 7; recipe.data.where.stage is 7, which no line of "
        "train.jsonl has; stage is 1 (10), 2 (10) there"
    )
    with pytest.raises(BadInput) as caught:
        samples_of(root, rows, Wanted(where(stage=[1, 3])), all_values=True)
    assert str(caught.value) == (
        "recipe.data.where.stage is 3, which no line of train.jsonl has; stage is 1 (10), 2 (10) there"
    )
    assert len(samples_of(root, rows, Wanted(where(stage=[1, 3])))[0]) == 10
    with pytest.raises(NoneLeft, match=r"kind is k0 \(1\), .* and 8 other values there"):
        samples_of(root, rows, Wanted(where(kind="other")))


def test_conversations_are_skipped_by_their_last_answer(root: Path) -> None:
    def turns(*answers: str) -> list[tuple[str, str]]:
        return [
            turn for answer in answers for turn in (("user", "<image>q" if answer is answers[0] else "q"), ("", answer))
        ]

    def messages(*answers: str) -> Row:
        spoken = [{"role": who or "assistant", "content": text} for who, text in turns(*answers)]
        return {"images": ["a.png"], "messages": spoken}

    def llava(*answers: str) -> Row:
        spoken = [{"from": "human" if who else "gpt", "value": text} for who, text in turns(*answers)]
        return {"image": "a.png", "conversations": spoken}

    for form in (messages, llava, lambda *answers: row(answer=answers[-1])):
        rows = [form("red"), form("nan"), form("nan", "blue"), form("red", " nan ")]
        samples, said = samples_of(root, rows, Wanted(skip=where(answer="nan")), all_fields=True)
        assert [each.id for each in samples] == [1, 3]
        assert said == ["train.jsonl: 2 of 4 lines are skipped: answer is nan"]
        samples, _ = samples_of(root, rows, Wanted(where(answer=["red", "blue"])))
        assert [each.id for each in samples] == [1, 3]


def test_lines_are_skipped_by_fields_that_there_are(root: Path) -> None:
    rows = [row(note="good"), row(answer="blue")]
    with pytest.raises(BadInput) as caught:
        samples_of(root, rows, Wanted(skip=where(anwser="nan")), all_fields=True)
    assert not isinstance(caught.value, NoneLeft)
    assert str(caught.value) == (
        "recipe.data.skip.anwser: no line of train.jsonl has this field; there are answer, image, note, question"
    )
    with pytest.raises(BadInput) as caught:
        wanted = Wanted(where(stage=1), skip=where(anwser="nan"), place="recipe.data.mix[1]")
        samples_of(root, rows, wanted, all_fields=True)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()[-2:]] == [
        "train.jsonl",
        "recipe.data.mix[1].skip.anwser",
    ]
    # A value that occurs nowhere is no mistake, and other files than that of training need not have the field.
    _, said = samples_of(root, rows, Wanted(skip=where(note="bad")), all_fields=True)
    assert said == ["train.jsonl: 0 of 2 lines are skipped: note is bad"]
    assert samples_of(root, rows, Wanted(skip=where(other="bad")))[1] == []


VALUES = st.one_of(st.integers(0, 3), st.sampled_from(["a", "1", "stage 2", " b "]), st.booleans(), st.none())
LINES = st.dictionaries(st.sampled_from(["stage", "type", "x"]), st.one_of(VALUES, st.lists(VALUES, max_size=2)))


@given(LINES, st.dictionaries(st.sampled_from(["stage", "x"]), st.sampled_from([0, 1, "a", True]), max_size=2))
def test_more_conditions_never_take_more(line: Row, conditions: Row) -> None:
    taken = holds(where(**conditions), line)
    for name in conditions:
        fewer = {key: value for key, value in conditions.items() if key != name}
        assert holds(where(**fewer), line) >= taken
        assert holds(where(**{**conditions, name: [conditions[name], "q"]}), line) >= taken
    assert holds({}, line) and holds(where(**conditions), line, unknown=True) >= taken


# Types


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({}, None),
        ({"answer_type": "CLOSED", "content_type": "Organ"}, "CLOSED"),
        ({"question_class": ["polyp_count", "size"]}, "polyp_count, size"),
        ({"question_type": "yes/no", "type": " "}, "yes/no"),
        ({"type": 3}, "3"),
        ({"type": {"a": 1}, "content_type": None}, None),
    ],
)
def test_what_kind_of_question_a_line_has(line: Row, expected: str | None) -> None:
    assert parse_line(row(**line)).type == expected


# Categories


def sorted_by(root: Path, rows: Sequence[Any], **categories: Any) -> tuple[list[Sample], list[str]]:
    made = Categories.model_validate(categories)
    return samples_of(root, rows, Wanted(categorizer=Categorizer.load(made, root.parent)))


RULES = [
    {"match": "(?i)^(is|are) ", "type": "yes/no"},
    {"match": "polyp", "stage": 1},
    {"match": "(?i)how many", "type": "count", "stage": 2},
]


def test_the_first_rule_that_says_it_counts(root: Path) -> None:
    rows = [
        row("Is there a polyp?"),
        row("is it so, and how many?"),
        row("How many polyps?"),
        row("How many polyps?", stage=3, type="own"),
    ]
    samples, said = sorted_by(root, rows, rules=RULES)
    assert [(each.stage, each.type) for each in samples] == [(1, "yes/no"), (2, "yes/no"), (1, "count"), (3, "own")]
    assert not said


def test_unsure_questions_are_listed_with_their_counts(root: Path) -> None:
    rows = [*[row("Where is it?")] * 7, row("How many polyps?"), row("What now?", stage=1, type="b"), row("Is it?")]
    with pytest.raises(BadInput) as caught:
        sorted_by(root, rows, rules=RULES, strict=True)
    lines = str(caught.value).splitlines()
    assert lines[:3] == [
        "9 questions have no sure category:",
        "train.jsonl:1: nothing says the stage of 'Where is it?'",
        "    7 of this kind: train.jsonl:1, train.jsonl:2, train.jsonl:3 and 4 more",
    ]
    assert "train.jsonl:8: rules disagree on the stage of 'How many polyps?': 1 or 2" in lines
    assert lines[-1] == "recipe.categories.on_unsure=keep takes them as they are"
    listed = Path(lines[-2].partition(" are listed in ")[2])
    assert lines[-2].startswith("all 16 are listed in ") and len(listed.read_text().splitlines()) == 16
    samples, said = sorted_by(root, rows, rules=RULES, on_unsure="keep")
    assert len(samples) == len(rows) and samples[0].stage is None and samples[7].stage == 1
    assert said[0].startswith("8 questions have no sure category:\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("table.csv", 'Question,stage,type\n"Is  THERE a polyp?",stage 1,yes/no\n"Where, then?",2,\n'),
        ("table.csv", "question;stage;type\nIs there a polyp?;1;yes/no\nWhere, then?;2;\n"),
        (
            "table.json",
            '[{"question": "is there a polyp?", "stage": 1, "type": "yes/no"},\n'
            '{"question": "where, then?", "stage": 2}]',
        ),
        (
            "table.jsonl",
            '{"question": "Is there a polyp? ", "stage": "1", "type": "yes/no"}\n'
            '{"question": "where, then?", "stage": 2}',
        ),
    ],
)
def test_a_table_knows_questions_whatever_their_case_and_spaces(root: Path, name: str, text: str) -> None:
    (root.parent / name).write_text(text)
    rows = [row("is there a  polyp?"), row("Where, then?", type="place"), row("How many polyps?")]
    samples, _ = sorted_by(root, rows, table=name, rules=RULES)
    assert [(each.stage, each.type) for each in samples] == [(1, "yes/no"), (2, "place"), (1, "count")]
    with pytest.raises(BadInput, match="nothing says the type of 'How many polyps"):
        sorted_by(root, rows, table=name)


def test_all_that_is_wrong_with_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("question,stage,type\na,1,x\n,2,y\nb,two,\nc,,\nA ,2,x\n")
    with pytest.raises(BadInput) as caught:
        read_table(path)
    assert str(caught.value).splitlines() == [
        "recipe.categories.table: 4 problems in 4 lines:",
        "table.csv:3: has no question",
        'table.csv:4: stage is \'two\', must be a whole number (2, "2" or "stage 2")',
        "table.csv:5: has neither a stage nor a type",
        "table.csv:6: the question 'A ' stands in the table twice, otherwise",
    ]
    path.write_text("frage,stage\na,1\n")
    with pytest.raises(BadInput, match=r"table\.csv:1: the columns are frage, stage; must be question, stage, type"):
        read_table(path)
    for text, why in (("", "the columns are none"), ("question,stage\n", "is empty: it holds no question")):
        path.write_text(text)
        with pytest.raises(BadInput, match=why):
            read_table(path)
    with pytest.raises(BadInput, match=r"missing\.csv cannot be read: No such file"):
        read_table(tmp_path / "missing.csv")
    (tmp_path / "table.json").write_text('{"question": "a", "stage": 1}\n[2]\n{"question": "b", "type": 3}\n')
    with pytest.raises(BadInput, match=r"json:2: not an object but a list\ntable\.json:3: type is a number, must be a"):
        read_table(tmp_path / "table.json")


def test_categories_are_known_before_lines_are_chosen(root: Path) -> None:
    rows = [row("Is there a polyp?"), row("How many?"), row("How many?", stage=1)]
    categorizer = Categorizer(Categories.model_validate({"rules": RULES, "on_unsure": "keep"}))
    samples, said = samples_of(root, rows, Wanted(where(stage=1), categorizer))
    assert [each.id for each in samples] == [1, 3]
    assert said == ["train.jsonl: 2 of 3 questions: where stage is 1"]


@given(st.text())
def test_a_question_is_known_by_its_words(text: str) -> None:
    assert known_as(f"  {text}\n") == known_as(known_as(text)) == known_as(text.replace(" ", "   "))


# Prompts

CHATS: dict[str, Row] = {
    "plain": {"image": "a.png", "question": "What?", "answer": "red"},
    "llava": {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}],
    },
    "messages": {
        "images": ["a.png"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image"}]},
            {"role": "assistant", "content": "red"},
        ],
    },
}


@pytest.mark.parametrize("line", CHATS.values(), ids=CHATS)
def test_a_template_goes_around_the_question(line: Row) -> None:
    raw = parse_line(line)
    same, changed = asked(raw, Prompt()), asked(raw, Prompt(default="Look: {question} Say it."))
    assert same == raw and changed is not None
    users = [next(m for m in each.messages if m.role == "user") for each in (raw, changed)]
    texts = ["What?", "Look: What? Say it."]
    for user, text in zip(users, texts, strict=True):
        assert [part.strip() if isinstance(part, str) else part for part in user.parts] in ([0, text], [text, 0])
    assert users[0].parts.index(0) == users[1].parts.index(0), "the image stays where it was"
    assert [m for m in raw.messages if m.role != "user"] == [m for m in changed.messages if m.role != "user"]


def test_what_keeps_its_own_words(root: Path) -> None:
    turns = [("human", "<image>What?"), ("gpt", "red"), ("human", "And?"), ("gpt", "blue")]
    rows = [
        row("What?", stage=2),
        row("Short?", instruction="A long instruction."),
        {"image": "a.png", "conversations": [{"from": who, "value": text} for who, text in turns]},
    ]
    prompt = Prompt.model_validate({"by": "stage", "templates": {2: "Second: {question}"}, "default": "Q: {question}"})
    samples, said = samples_of(root, rows, Wanted(prompt=prompt))
    assert [each.prompt for each in samples] == ["Second: What?", "A long instruction.", "And?"]
    assert [each.question for each in samples] == ["What?", "Short?", "And?"]
    assert said == ["train.jsonl: 2 lines keep their own text, and recipe.prompt is not put around it"]
    over, _ = samples_of(root, rows, Wanted(prompt=prompt.model_copy(update={"over_instruction": True})))
    assert [each.prompt for each in over] == ["Second: What?", "Q: Short?", "And?"]


def test_an_instruction_that_replaces_different_questions_is_refused(root: Path) -> None:
    brief = "Answer briefly."
    rows = [row(f"Question {number}?", instruction=brief) for number in range(5)]
    with pytest.raises(BadInput) as caught:
        samples_of(root, rows, Wanted())
    assert str(caught.value) == (
        "train.jsonl:1, train.jsonl:2, train.jsonl:3 and 2 more: 'instruction' is 'Answer briefly.' for 5 different "
        "questions; it must hold its line's question: all questions would be the same text without it. Leave it out, "
        "or let recipe.prompt with over_instruction: true put a text around {question}"
    )
    other = [row("How many?", instruction="Count."), row("How big?", instruction="Count.")]
    with pytest.raises(BadInput, match="for 5 different questions, and so it is with 1 other instruction; "):
        samples_of(root, rows + other, Wanted())
    with pytest.raises(
        BadInput, match=r"^train.jsonl:1, train.jsonl:3: .* for 2 different questions;"
    ):  # the others hold theirs
        samples_of(root, [rows[0], row("Is it red?", instruction="Look: is it red? Say yes or no."), rows[1]], Wanted())
    over = Prompt(default="{question}", over_instruction=True)
    samples, _ = samples_of(root, rows, Wanted(prompt=over))
    assert [each.prompt for each in samples] == [f"Question {number}?" for number in range(5)]


def test_instructions_that_hold_their_questions_or_stand_for_one_are_taken(root: Path) -> None:
    rows = [
        row("Is it red?", instruction="Yes or no: is  it red?"),
        row("is it blue", instruction="Yes or no: is it blue?"),
        row("Colour?", instruction="Which colour has it?"),
        row("colour", instruction="Which colour has it?"),
        row("", instruction="Describe the image."),
    ]
    samples, _ = samples_of(root, rows, Wanted())
    assert [each.prompt for each in samples] == [each["instruction"] for each in rows]


def test_a_template_hides_no_empty_question(root: Path) -> None:
    with pytest.raises(BadInput, match="question is empty"):
        samples_of(root, [row(" ")], Wanted(prompt=Prompt(default="Answer this: {question}")))
    token = QWEN.markers.special[0]
    hidden = [row(f"What {token}?", instruction="a")]
    over = Prompt(default="{question}", over_instruction=True)
    assert len(samples_of(root, hidden, Wanted(prompt=Prompt()))[0]) == 1
    with pytest.raises(BadInput, match="which would become a real token"):
        samples_of(root, hidden, Wanted(prompt=over))


def test_what_the_audit_says_of_it(root: Path) -> None:
    result = audit(write(root, [row(stage=1), row(stage=2)]), root, QWEN, wanted=Wanted(where(stage=1)))
    assert (result.tally.taken, result.tally.lines, result.own_words, result.unsure) == (1, 2, 0, [])


def test_a_rule_that_would_search_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(categories, "PATIENCE", 0.05)
    rules = [{"match": "(yes|no)+", "stage": 1}, {"match": "(a+)+$", "stage": 2}]
    endless = Categorizer(Categories.model_validate({"rules": rules}))
    with pytest.raises(BadInput) as error:
        endless.sort(parse_line(row("a" * 60 + "!")))
    assert str(error.value) == (
        f"recipe.categories.rules.1.match: '(a+)+$' was not done with the question '{'a' * 59}…' after 0.05 seconds: a "
        "repeat inside a repeat, such as (a+)+, tries every way to cut a text into pieces; write it with one repeat, "
        "such as a+"
    )
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert endless.sort(parse_line(row("aaa")))[0].stage == 2
