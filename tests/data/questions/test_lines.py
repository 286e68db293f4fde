"""A JSON array gives the questions that the same objects on lines give, each with its place."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.data.questions import lines
from sameday.data.questions.lines import read_lines
from sameday.spec.errors import BadInput

TEXTS = st.text() | st.sampled_from(['"', "\\", '\\"', "[", "]}", ",", "\n", "\u2028", "\x00"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def items(path: Path, content: str | bytes, limit: int | None = None) -> list[tuple[str, Any]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    return [(line.place, line.parse()) for line in read_lines(path, limit)]


@settings(max_examples=50)
@given(values=st.lists(VALUES, max_size=6), indent=st.none() | st.integers(0, 3), ascii_only=st.booleans())
def test_any_array_is_read_item_by_item(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    read = items(path, json.dumps(values, indent=indent, ensure_ascii=ascii_only))
    assert [value for _, value in read] == values
    assert [place.split(" (item ")[1] for place, _ in read] == [f"{n})" for n in range(1, len(values) + 1)]
    assert all(int(place.split()[0]) == 1 for place, _ in read) or indent is not None


def test_the_place_is_the_line_and_the_item(tmp_path: Path) -> None:
    text = '\ufeff\n [\n  {"a": 1},\n\n  {"a":\n 2}, {"a": 3}\n]\n\n'
    assert items(tmp_path / "a.json", text) == [
        ("3 (item 1)", {"a": 1}),
        ("5 (item 2)", {"a": 2}),
        ("6 (item 3)", {"a": 3}),
    ]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (b'{"a": tru}', "invalid JSON at character 7 of the item: Expecting value"),
        (b'{"a": 1\n "b": 2}', "invalid JSON at line 3, column 2: Expecting ',' delimiter"),
        (b'{"a": "x\n}', "invalid JSON at character 9 of the item: Invalid control character at"),
        (b'{"a":\n "\xff"}', "not UTF-8: byte 0xff at line 3, column 3"),
        (b"", "invalid JSON at character 1 of the item: Expecting value"),
    ],
)
def test_a_broken_item_spoils_no_other(tmp_path: Path, broken: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"a": 1},\n' + broken + b',\n{"a": 2}]')
    first, second, third = read_lines(tmp_path / "a.json")
    assert (first.parse(), third.parse()) == ({"a": 1}, {"a": 2})
    with pytest.raises(ValueError) as caught:
        second.parse()
    assert str(caught.value).startswith(reason)


NEEDED = "a file with one JSON object per line, or with one JSON array of objects, CSV or parquet, is needed"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '[{"a": 1},\n{"a": 2},\n{"a": [3',
            ": the JSON array has no end: the file is cut off, or a bracket of item 3, which begins at line 3, is not "
            "closed",
        ),
        ('[{"a": 1}]\n{"a": 2}', f":1: the JSON array ends here, after item 1, and more follows; {NEEDED}"),
        ('[{"a": 1}},\n{"a": 2}]', f":1: the JSON array ends here, after item 1, by '}}' instead of ']'; {NEEDED}"),
    ],
)
def test_an_array_that_cannot_be_divided_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(BadInput) as caught:
        items(tmp_path / "a.json", text)
    assert str(caught.value) == f"{tmp_path / 'a.json'}{reason}"


def test_an_array_is_not_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text(json.dumps([{"text": "x" * 100_000}] * 200))
    assert len(items(tmp_path / "few.json", path.read_text() + "nonsense", limit=3)) == 3
    tracemalloc.start()
    assert sum(1 for _ in read_lines(path)) == 200
    assert tracemalloc.get_traced_memory()[1] < 2_000_000 < path.stat().st_size / 5
    tracemalloc.stop()


def test_empty_files_and_arrays_hold_nothing(tmp_path: Path) -> None:
    for text in ("", " \n\n", "[]", "[ \n]\n", "\ufeff"):
        assert items(tmp_path / "a.json", text) == []


def test_a_pipe_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(
            BadInput, match="cannot be read: it is a pipe or a device, not a file; a file with one JSON"
        ):
            list(read_lines(path))


def test_a_file_without_line_breaks_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", 100)
    (tmp_path / "tar").write_bytes(b"\0" * 500)
    with pytest.raises(BadInput, match="cannot be read: line 1 is longer than 100 bytes, which no question is"):
        list(read_lines(tmp_path / "tar"))


def test_a_folder_is_no_file_of_questions(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: Is a directory; a file with one JSON object per line"):
        list(read_lines(tmp_path))


ITEM = st.fixed_dictionaries({"image": st.text(), "question": st.text(), "answer": st.text() | st.lists(st.text())})
OTHER = st.dictionaries(
    st.text().filter(lambda key: key not in ("data", "question", "answer", "messages", "conversations")),
    st.none() | st.text() | st.lists(st.integers() | st.text(), max_size=3) | st.dictionaries(st.text(), st.text()),
    max_size=3,
)


@given(items=st.lists(ITEM, min_size=1, max_size=4), before=OTHER, after=OTHER, indent=st.sampled_from([None, 0, 2]))
def test_the_only_array_of_objects_in_a_file_holds_its_questions(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[dict[str, Any]],
    before: dict[str, Any],
    after: dict[str, Any],
    indent: int | None,
) -> None:
    path = tmp_path_factory.mktemp("inner") / "train.json"
    text = json.dumps({**before, "data": items, **after}, indent=indent, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    found = list(read_lines(path))
    assert [line.parse() for line in found] == items
    assert [line.number for line in found] == list(range(1, len(items) + 1))
    if indent is not None:
        assert {text.split("\n")[line.line - 1].strip() for line in found} == {"{"}


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"role": "user", "content": "q"}], "images": ["a.png"]}',
        '{"image": "a.png", "question": "q?", "answer": "a", "original": [{"q": "q?"}]}',
        '{"image": "a.png", "query": "q?", "response": "a", "made_of": [{"q": "q?"}]}',
        '{"data": []}',
        '{"data": [1, 2]}',
    ],
)
def test_a_single_question_is_no_list_of_others(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    assert [line.parse() for line in read_lines(path)] == [json.loads(text)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"images": [{"id": 1}], "annotations": [{"question": "q?"}]}',
            ": is one JSON object, and 'images' and 'annotations' hold arrays of objects: which of them are questions "
            f"is not known; {NEEDED}, or one object with one such array",
        ),
        (
            '{"info": 1, "data": [{"question": "q?"},\n{"quest',
            ": the JSON object that holds 'data' has no end: the file is cut off",
        ),
    ],
)
def test_an_object_whose_questions_are_not_known(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        list(read_lines(path))
    assert str(error.value) == f"{path}{said}"


def test_a_first_line_that_is_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"messages": [{"role": "us\n{"image": "a", "question": "q", "answer": "a"}\n')
    first, second = read_lines(path)
    assert second.parse()["question"] == "q"
    with pytest.raises(ValueError, match="invalid JSON at column"):
        first.parse()
