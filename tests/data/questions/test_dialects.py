"""Each dialect gives the same record, and what is wrong with a line is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sameday.data.questions.audit import audit
from sameday.data.questions.read import FORMS, Raw, parse_line
from sameday.data.questions.sample import Message

EXPECTED = Raw(["a.png"], (Message("user", (0, "What is it?")), Message("assistant", ("a cat",))))


@pytest.mark.parametrize(
    "line",
    [
        {"image": "a.png", "question": "What is it?", "answer": "a cat"},
        {"image": ["a.png"], "question": "What is it?", "answer": "a cat", "stage": None},
        {"image_filename": "a.png", "image_id": 7, "question": "What is it?", "answer": "a cat"},
        {"image": "a.png", "question": "other", "instruction": "What is it?", "answer": "a cat"},
        {"image": "a.png", "question": "What is it?", "instruction": " ", "answer": "a cat"},
        {
            "messages": [
                {"role": "user", "content": "<image>What is it?"},
                {"role": "assistant", "content": "a cat"},
            ],
            "images": ["a.png"],
        },
        {
            "messages": [
                {"role": "user", "content": "What is it?"},
                {"role": "assistant", "content": "a cat"},
            ],
            "images": ["a.png"],
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
            ],
            "images": ["a.png"],
        },
        *(
            {
                "messages": [
                    {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
                ],
                **listed,
            }
            for part in (
                {"type": "image", "image": "a.png"},
                {"type": "image", "path": "a.png", "text": None},
                {"type": "image", "url": "a.png"},
                {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}},
            )
            for listed in ({}, {"images": ["a.png"]})
        ),
        {
            "image": "a.png",
            "conversations": [
                {"from": "human", "value": "<image>What is it?"},
                {"from": "gpt", "value": "a cat"},
            ],
        },
        {
            "image": "a.png",
            "conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "a cat"}],
        },
    ],
)
def test_all_dialects_give_one_record(line: dict[str, Any]) -> None:
    assert parse_line(line) == EXPECTED


def test_images_stand_where_their_places_are() -> None:
    raw = parse_line(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "First <image>, then <image>\nWhich?"},
                {"role": "assistant", "content": "the first"},
                {"role": "user", "content": [{"type": "text", "text": "And now? "}, {"type": "image"}]},
                {"role": "assistant", "content": "the third"},
            ],
            "images": ["a", "b", "c"],
            "stage": 2,
        }
    )
    assert [message.parts for message in raw.messages] == [
        ("Be brief.",),
        ("First ", 0, ", then ", 1, "\nWhich?"),
        ("the first",),
        ("And now? ", 2),
        ("the third",),
    ]
    assert raw.stage == 2


def test_images_without_a_place_go_before_the_first_user_text() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Which?"},
        {"from": "gpt", "value": "b"},
    ]
    raw = parse_line({"image": ["a", "b"], "conversations": turns})
    assert [message.parts for message in raw.messages] == [("Be brief.",), (0, 1, "Which?"), ("b",)]


@pytest.mark.parametrize("stage", [2, "2", " 2", "stage 2", "Stage_2", "stage2"])
def test_a_stage_may_be_written_as_a_text(stage: Any) -> None:
    assert parse_line({"image": "a", "question": "q", "answer": "x", "stage": stage}).stage == 2


def test_conversations_take_their_images_by_either_name() -> None:
    turns = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "b"}]
    messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "b"}]
    for key in ("image", "images"):
        assert parse_line({"conversations": turns, key: ["a"]}).images == ["a"]
        assert parse_line({"messages": messages, key: "a"}).messages[0].parts == (0, "Which?")


@pytest.mark.parametrize(("answer", "text"), [(3, "3"), (2.5, "2.5"), (-1, "-1")])
def test_a_number_is_an_answer(answer: float, text: str) -> None:
    assert parse_line({"image": "a", "question": "q", "answer": answer}).messages[-1].text == text


def test_a_question_without_an_image_says_so(tmp_path: Path) -> None:
    for image in ([], "[]"):
        raw = parse_line({"image": image, "question": "How many legs has a spider?", "answer": "eight"})
        assert raw.images == [] and raw.messages[0].parts == ("How many legs has a spider?",)
    (tmp_path / "train.csv").write_text("image,question,answer\n[],how many?,eight\n,how many?,six\n")
    result = audit(tmp_path / "train.csv", tmp_path, None)
    assert [(each.answer, each.images) for each in result.samples] == [("eight", ())]
    assert [str(each.what) for each in result.problems] == ["has no 'image'; a question without an image has [] there"]


def plain(**changes: Any) -> dict[str, Any]:
    line = {"image": "a", "question": "q", "answer": "x", **changes}
    return {key: value for key, value in line.items() if value != "absent"}


def chat(*turns: tuple[str, Any], images: Any = ()) -> dict[str, Any]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, "images": list(images) if isinstance(images, tuple) else images}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([1], "not an object but a list"),
        (None, "not an object but null"),
        (
            {"img": "a", "q": "b"},
            "unknown form with the keys 'img', 'q'; known are {image|image_filename, question",
        ),
        ({}, "unknown form with the keys none"),
        ({"question": "q", "answer": "a"}, "has no 'image'; a question without an image has [] there"),
        ({"img": 3, "question": "q", "answer": "a"}, "unknown form with the keys 'img', 'question', 'answer'"),
        ({"messages": [], "conversations": []}, "has both 'messages' and 'conversations'"),
        (plain(answer=True), "'answer' is a boolean, must be a text"),
        (plain(answer=None), "'answer' is null, must be a text"),
        (plain(answer=["x"]), "'answer' is a list, must be a text"),
        (plain(answer="absent"), "has no 'answer'"),
        (plain(question="absent"), "has no 'question'"),
        (plain(question=4), "'question' is a number, must be a text"),
        (plain(question="<image>\nq"), "'question' holds '<image>', but in this form images stand before"),
        (plain(instruction=4), "'instruction' is a number, must be a text"),
        (plain(stage="early"), "'stage' is 'early', must be a whole number (2, \"2\" or \"stage 2\") or null"),
        (plain(stage="-1"), "'stage' is '-1', must be a whole number"),
        (plain(stage=True), "'stage' is True, must be a whole number"),
        (plain(stage=1.0), "'stage' is 1.0, must be a whole number"),
        ({**chat(("user", "q"), ("assistant", "x"), images=("a",)), "image": "b"}, "'images' and 'image' differ"),
        (
            plain(image=None),
            "'image' is null, must be a path or a list of paths; a question without an image has [] there",
        ),
        (plain(image=[1]), "'image' holds a number, must be a path or a list of paths"),
        (plain(image=" "), "'image' holds an empty path; a question without an image has [] there"),
        (plain(image_filename="b"), "'image' and 'image_filename' differ"),
        (chat(("user", "q"), ("tool", "x")), "messages[1]: role 'tool' is unknown; known are system, user"),
        (chat(("user", "q")), "ends with a turn of role user, must end with the assistant's answer"),
        (chat(("assistant", "x")), "has no user turn"),
        (
            chat(("assistant", "hello"), ("user", "q"), ("assistant", "x")),
            "begins with a turn of role assistant, must begin with a user turn or a system turn",
        ),
        (
            chat(("system", "s"), ("assistant", "hello"), ("user", "q"), ("assistant", "x")),
            "a turn of role assistant stands behind the system turn, and a user turn must stand there",
        ),
        (
            {**chat(("assistant", "hello"), ("user", "q"), ("assistant", "x")), "system": "s"},
            "a turn of role assistant stands behind the system turn, and a user turn must stand there",
        ),
        (
            {**chat(("system", "Be brief."), ("user", "q"), ("assistant", "x")), "system": "Be kind."},
            "the system prompt beside the turns and their system turn differ; one of them is allowed",
        ),
        (plain(system="a", system_prompt="b"), "'system' and 'system_prompt' differ; one of them is allowed"),
        (plain(system=["a"]), "'system' is a list, must be a text"),
        (plain(system="<image>"), "'system' holds '<image>'; only user turns can show an image"),
        (chat(("user", "q"), ("system", "s"), ("assistant", "x")), "a system turn may only stand first"),
        (chat(("user", "<image>q"), ("assistant", "x")), "has 0 image path(s) but 1 place(s)"),
        (
            chat(("user", "<image>q"), ("assistant", "x"), images=("a", "b")),
            "has 2 image path(s) but 1 place",
        ),
        (
            chat(("user", "q"), ("assistant", "<image>"), images=("a",)),
            "an image stands in a turn of role assistant",
        ),
        (chat(("user", None), ("assistant", "x")), "messages[0]: 'content' is null, must be a text"),
        (chat(("user", [3]), ("assistant", "x")), "a part of 'content' is a number, must be an object"),
        (
            chat(("user", [{"type": "audio"}]), ("assistant", "x")),
            "has type 'audio'; image and text are allowed",
        ),
        (
            chat(("user", [{"type": "image", "file": "a"}]), ("assistant", "x")),
            "messages[0]: an image part has 'file'; its file is named by one of image, path, url, image_url",
        ),
        (
            chat(("user", [{"type": "image", "image": "a", "url": "a"}]), ("assistant", "x")),
            "messages[0]: an image part has 'image' and 'url'; one of them is allowed",
        ),
        (
            chat(("user", [{"type": "image", "image": {"bytes": "a"}}]), ("assistant", "x")),
            "'image' is an object, must be a path",
        ),
        (
            chat(("user", [{"type": "image", "image": "a"}]), ("assistant", "x"), images=("b",)),
            "'images' and the image parts of 'messages' name other files; one of them is enough",
        ),
        (
            chat(("user", [{"type": "image", "image": "a"}, {"type": "image"}]), ("assistant", "x")),
            "has 1 image path(s) but 2 place(s)",
        ),
        (chat(("user", "q"), ("assistant", "x"), images={"a": 1}), "'images' is an object, must be a path"),
        ({"messages": []}, "'messages' is empty, must be a list of turns"),
        ({"messages": "hi"}, "'messages' is a text, must be a list of turns"),
        ({"messages": ["hi"]}, "messages[0]: is a text, must be an object"),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            "conversations[0]: from 'bot' is unknown; known are human",
        ),
        ({"conversations": [{"from": "human"}]}, "conversations[0]: has no 'value'"),
    ],
)
def test_what_is_wrong_is_named(line: Any, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_line(line)
    assert reason in str(caught.value)


def turns(form: str, *said: tuple[str, str], **marks: Any) -> dict[str, Any]:
    """A line in either form of a conversation, with these keys in the first answer."""
    role, text, names = {
        "messages": ("role", "content", {}),
        "conversations": ("from", "value", {"user": "human", "assistant": "gpt"}),
    }[form]
    listed: list[dict[str, Any]] = [{role: names.get(who, who), text: what} for who, what in said]
    next(turn for turn in listed if turn[role] in ("assistant", "gpt")).update(marks)
    return {form: listed, "images": []}


CONVERSATION_FORMS = ("messages", "conversations")
TWO_ANSWERS = (("user", "q"), ("assistant", "a"), ("user", "and?"), ("assistant", "b"))


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_system_prompt_beside_the_turns_is_their_system_turn(key: str) -> None:
    for line in (plain(), turns("messages", *TWO_ANSWERS), turns("conversations", *TWO_ANSWERS)):
        raw = parse_line(line)
        whole = parse_line({**line, key: "Be brief. "})
        assert whole.messages == (Message("system", ("Be brief. ",)), *raw.messages)
        for nothing in (None, "", " "):
            assert parse_line({**line, key: nothing}) == raw
    own = chat(("system", "Be brief."), ("user", "q"), ("assistant", "x"))
    assert parse_line({**own, key: "Be brief."}) == parse_line(own)


COMPARED = ["chosen", "rejected", "chosen_messages", "rejected_messages", "rejected_response"]


@pytest.mark.parametrize(
    ("line", "key", "values", "said"),
    [
        *(
            (line, key, ("worse", [{"role": "assistant", "content": "worse"}], {"value": "worse"}), said)
            for line in (plain(), turns("messages", *TWO_ANSWERS), turns("conversations", *TWO_ANSWERS))
            for key in COMPARED
            for said in (f"has '{key}', to be compared with another answer, and no answers are compared: leave it out",)
        ),
        (plain(), "kto_tag", (True, False), "has 'kto_tag', and all answers are learned as good ones"),
        *(
            (
                turns(form, *TWO_ANSWERS),
                key,
                ([{"name": "crop"}], '[{"name": "crop"}]'),
                f"has '{key}', and none are put",
            )
            for form in CONVERSATION_FORMS
            for key in ("tools", "functions")
        ),
        *(
            (line, key, (["a.mp4"], '["a.mp4"]'), f"has '{key}', from which nothing is learned: leave the line out")
            for line in (plain(), turns("messages", *TWO_ANSWERS), turns("conversations", *TWO_ANSWERS))
            for key in ("videos", "audios")
        ),
        *(
            (turns(form, *TWO_ANSWERS), key, ("a.mp4",), f"has '{key}', from which nothing is learned")
            for form in CONVERSATION_FORMS
            for key in ("video", "audio")
        ),
        *(
            (
                chat(("user", f"where is {place}?"), ("assistant", "there")),
                "objects",
                ({"ref": ["polyp"]}, '{"ref": ["polyp"]}'),
                f"has 'objects', from which nothing is put into the text where {place} stands: write names and boxes",
            )
            for place in ("<bbox>", "<ref-object>")
        ),
        (plain(instruction="i"), "input", ("more",), "has 'input' beside 'instruction', which is the whole user text"),
        (plain(), "history", ([["q", "a"]],), "has earlier turns in 'history', which are not read in this form"),
    ],
)
def test_what_other_trainers_would_learn_otherwise_is_refused(
    line: dict[str, Any], key: str, values: tuple[Any, ...], said: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{said}"):
            parse_line({**line, key: value})
    for nothing in (None, "", [], "[]"):
        assert parse_line({**line, key: nothing}) == parse_line(line)


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content"])
def test_what_a_turn_holds_besides_its_content_is_refused(key: str) -> None:
    for form in CONVERSATION_FORMS:
        said = f"messages[1]: has '{key}', which is not put into the prompt: leave it out, or write it as text"
        with pytest.raises(ValueError, match=re.escape(said.replace("messages", form))):
            parse_line(turns(form, *TWO_ANSWERS, **{key: "because"}))
        assert parse_line(turns(form, *TWO_ANSWERS, **{key: None})).question == "and?"


def test_columns_that_only_share_a_name_are_not_read() -> None:
    """Instruments in an image, a patient's history, a flag, the video that a frame is from."""
    told = {**turns("messages", *TWO_ANSWERS), "objects": {"ref": ["polyp"]}}
    assert parse_line(told) == parse_line(turns("messages", *TWO_ANSWERS))
    for more in (
        {"video": "a.mp4"},
        {"objects": ["polyp"]},
        {"tools": ["forceps"]},
        {"history": "none"},
        {"history": ["2019"]},
        {"input": "x"},
        {"rejected": False},
    ):
        assert parse_line(plain(**more)) == parse_line(plain())


@pytest.mark.parametrize("form", CONVERSATION_FORMS)
@pytest.mark.parametrize("key", ["loss", "weight", "train", "training"])
def test_an_answer_that_is_not_to_be_learned_is_refused(form: str, key: str) -> None:
    plain = parse_line(turns(form, *TWO_ANSWERS))
    for value in (True, 1, 1.0, None):
        assert parse_line(turns(form, *TWO_ANSWERS, **{key: value})) == plain
    for value, said in ((False, "false"), (0, "0"), (0.5, "0.5"), ("no", '"no"')):
        with pytest.raises(ValueError) as caught:
            parse_line(turns(form, *TWO_ANSWERS, **{key: value}))
        assert str(caught.value) == (
            f"{form}[1]: '{key}' is {said}, and all answers of a line are learned alike: allowed are true and 1; an "
            "answer that is not to be learned is left out, or put into a user turn"
        )


def test_a_question_may_be_marked_as_not_learned() -> None:
    """As none is."""
    asked = {"role": "user", "content": "q", "loss": False, "weight": 0}
    assert parse_line({"messages": [asked, {"role": "assistant", "content": "a"}]}).question == "q"


def test_the_readme_has_the_keys_of_every_form() -> None:
    """As errors name them."""
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (plain|messages|LLaVA) \| (.*) \|$", readme, re.MULTILINE))
    for name, form in zip(("plain", "messages", "LLaVA"), FORMS, strict=True):
        keys = [key for each in form.strip("{}").split(", ") for key in each.removesuffix("?").split("|")]
        assert keys and all(f"`{key}`" in rows[name] for key in keys), (name, keys)
