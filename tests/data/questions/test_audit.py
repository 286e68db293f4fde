"""One pass finds everything that is wrong with a file, and says so in words a user can act on."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sameday.data.problems import grouped
from sameday.data.questions import audit as audits
from sameday.data.questions.audit import Audit, audit, check
from sameday.data.questions.family import Markers
from sameday.data.questions.sample import ImageRef
from sameday.models.families import family_of
from sameday.spec.errors import BadInput

Write = Callable[..., Path]
QWEN = family_of("qwen3_vl")
SAVED = "allowed is a path; save the images as files under image_root and name these"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / "a.png")
    Image.new("RGB", (9, 8), "blue").save(folder / "b.png")
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*items: Any) -> Path:
        path = tmp_path / "train.jsonl"
        data = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in items]
        path.write_bytes(b"\n".join(data) + b"\n")
        return path

    return lines


def row(image: Any = "a.png", question: str = "What?", answer: Any = "red", **more: Any) -> dict[str, Any]:
    return {"image": image, "question": question, "answer": answer, **more}


def only(result: Audit) -> str:
    assert len(result.problems) == 1, result.problems
    assert not result.samples
    assert result.problems[0].where == "train.jsonl:1"
    return result.problems[0].what


def test_good_lines_become_samples(write: Write, root: Path) -> None:
    path = write(b"\xef\xbb\xbf" + json.dumps(row()).encode(), b"", b"  ", row(["a.png", "b.png"], stage=2))
    result = audit(path, root, QWEN)
    assert result.problems == []
    first, second = result.samples
    assert (first.id, first.where, first.stage) == (1, "train.jsonl:1", None)
    assert (second.id, second.where, second.stage) == (4, "train.jsonl:4", 2)
    assert (first.question, first.answer) == ("What?", "red")
    assert first.images[0] == second.images[0]
    assert (second.images[1].width, second.images[1].height) == (9, 8)
    assert second.images[1].path == root.resolve() / "b.png"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"image": "\xff.png"}', "not UTF-8: byte 0xff at column 12"),
        (b'{"image": "a.png" "question"}', "invalid JSON at column 19: Expecting ',' delimiter"),
        (b'{"image": NaN}', "invalid JSON: NaN is no JSON value"),
        (b'{"answer": -1e400}', "invalid JSON: -1e400 is too large for a number; allowed are up to 1.7e308"),
        (b'{"image": "a.png", "image": "b.png"}', "the key 'image' stands twice in one object"),
        (b'{"image": ' + b"[" * 100_000, "invalid JSON: nested too deeply"),
        (b"1", "not an object but a number; each line is one JSON object"),
        (
            {"img": "a.png"},
            "unknown form with the keys 'img'; known are {image|image_filename, question, answer",
        ),
        (row(answer=""), "answer is empty"),
        (row(answer=" \n"), "answer is empty"),
        (row(question="\t"), "question is empty"),
        (row(answer=True), "'answer' is a boolean, must be a text"),
        (row(question="a <|image_pad|>"), "question holds '<|image_pad|>', which would become a real token"),
        (
            row(answer="x<|im_end|>"),
            "answer holds '<|im_end|>', which would become a real token and not text",
        ),
        (row(question="\ud800?"), "question holds half of a surrogate pair (\\ud800), which is no character"),
        (row("c.png"), "image 'c.png' not found under "),
        (row("."), "image '.' is not a file but a folder or device under "),
        (row("../train.jsonl"), "image '../train.jsonl' leaves the image root "),
        (row("/etc/hostname"), "image '/etc/hostname' leaves the image root "),
        (row("a\0b"), "image 'a\\x00b' is no usable path: "),
        (row("x" * 5000), f"image '{'x' * 60}…' (5,000 characters) cannot be reached under "),
        (row("https://a.org/b.png"), f"image 'https://a.org/b.png' is an address and no path; {SAVED}"),
        (row("file:///b.png"), f"image 'file:///b.png' is an address and no path; {SAVED}"),
    ],
)
def test_each_problem_is_named(write: Write, root: Path, line: Any, reason: str) -> None:
    assert reason in only(audit(write(line), root, QWEN))


@pytest.mark.parametrize("before", ["data:image/png;base64,", ""])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP"])
def test_an_image_instead_of_its_name_is_shown_in_part(write: Write, root: Path, before: str, form: str) -> None:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, form)
    name = before + base64.b64encode(file.getvalue()).decode()
    shown = f"image '{name[:60]}…' ({len(name):,} characters) is an image itself and no path; {SAVED}"
    assert only(audit(write(row(name)), root, QWEN)) == shown
    many = audit(write(*(row(f"{name}{'A' * number}") for number in range(9))), root, QWEN)
    lines, _ = grouped(many.problems)
    assert len(lines) == 2 and max(map(len, lines)) < 300, "one kind of problem, in few words"


def test_long_names_of_images_that_are_not_there_are_shown_in_part(write: Write, root: Path) -> None:
    lost = f"{'deep/' * 50}a.png"
    with pytest.raises(BadInput) as error:
        check(write(row(lost), row("lost.png")), root, QWEN)
    assert f"such as '{lost[:60]}…' (255 characters): recipe.data" in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.csv"])
def test_an_encoding_that_is_not_read_is_named(tmp_path: Path, root: Path, name: str, encoding: str) -> None:
    text = "image,question,answer\na.png,q?,a\n" if name.endswith("csv") else json.dumps([row()])
    (tmp_path / name).write_text(text, encoding=encoding)
    known, length = ("UTF-32", 4) if encoding == "utf-32" else ("UTF-16", 2)
    first = (tmp_path / name).read_bytes()[:length].hex(" ").upper()
    with pytest.raises(BadInput) as error:
        audit(tmp_path / name, root, QWEN)
    assert str(error.value) == (
        f"{tmp_path / name}: is in {known} (its first bytes are {first}); UTF-8 is needed: "
        f"`iconv -f {known} -t UTF-8 {name}` prints it so"
    )


def test_the_line_of_a_table_that_is_not_utf_8(tmp_path: Path, root: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"image,question,answer\na.png,q?,a\na.png,\x97 q?,a\n")
    with pytest.raises(BadInput) as error:
        audit(tmp_path / "a.csv", root, QWEN)
    assert str(error.value) == (
        f"{tmp_path / 'a.csv'}:3: is not UTF-8: byte 0x97; if it is in Windows' encoding, "
        "`iconv -f CP1252 -t UTF-8 a.csv` prints it in UTF-8"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", json.dumps(row())),
        ("a.json", json.dumps([row()])),
        ("a.json", json.dumps({"info": "one", "questions": [row()]})),
        ("a.csv", "image,question,answer\na.png,What?,red\n"),
    ],
)
def test_a_mark_of_utf_8_is_no_part_of_a_file(tmp_path: Path, root: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    result = audit(tmp_path / name, root, QWEN)
    assert not result.problems and [sample.question for sample in result.samples] == ["What?"]


@pytest.mark.parametrize(
    "table",
    [
        {"image": {"0": "a.png", "1": "b.png"}, "question": {"0": "q?", "1": "r?"}, "answer": {"0": "a", "1": "b"}},
        {"0": row(), "1": row("b.png")},
        {"columns": ["image", "question", "answer"], "index": [0], "data": [["a.png", "q?", "a"]]},
        {"q": {"0": "q?"}},
    ],
)
def test_a_table_of_pandas_is_named(write: Write, root: Path, table: Any) -> None:
    assert only(audit(write(table), root, QWEN)) == (
        'is a whole table as pandas writes it by default; `to_json(FILE, orient="records", lines=True)` writes one '
        "object per line"
    )


def test_a_later_turn_is_checked_too(write: Write, root: Path) -> None:
    turns = [("user", "q"), ("assistant", ""), ("user", ""), ("assistant", "x")]
    line = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert [p.what for p in audit(write(line), root, QWEN).problems] == ["answer is empty", "question is empty"]


def test_a_link_may_not_lead_out_of_the_root(write: Write, root: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    os.symlink(tmp_path / "secret.png", root / "link.png")
    os.symlink(root / "a.png", root / "inside.png")
    os.symlink(root / "loop.png", root / "loop.png")
    assert "image 'link.png' leaves the image root" in only(audit(write(row("link.png")), root, QWEN))
    assert "'loop.png'" in only(audit(write(row("loop.png")), root, QWEN))
    names = ["inside.png", str(root / "a.png"), "../images/a.png"]
    assert len(audit(write(*map(row, names)), root, QWEN).samples) == 3


def test_a_linked_root_is_no_escape(write: Write, root: Path, tmp_path: Path) -> None:
    os.symlink(root, tmp_path / "linked")
    assert audit(write(row()), tmp_path / "linked", QWEN).problems == []


def test_bad_images_are_found_by_decoding(write: Write, root: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "half.jpg")
    data = (root / "half.jpg").read_bytes()
    (root / "half.jpg").write_bytes(data[: len(data) // 2])
    (root / "text.jpg").write_text("not found")
    Image.new("RGB", (201, 1)).save(root / "thin.png")
    result = audit(write(row("half.jpg"), row("text.jpg"), row("thin.png")), root, QWEN)
    half, text, thin = (problem.what for problem in result.problems)
    assert half.startswith("image 'half.jpg' cannot be decoded: ") and "truncated" in half
    assert text == "image 'text.jpg' is not an image that Pillow can read"
    assert thin == "image 'thin.png' is 201×1, an aspect ratio of 201; at most 200 is allowed"


def test_identity_is_content(write: Write, root: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(root / "copy.bmp")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4)).save(root / "turned.jpg", exif=exif)
    Image.fromarray(np.full((4, 4), 30_000, dtype=np.uint16)).save(root / "deep.png")
    first, copy, turned, deep = audit(
        write(*map(row, ["a.png", "copy.bmp", "turned.jpg", "deep.png"])), root, QWEN
    ).samples
    assert first.image_key == copy.image_key
    assert (turned.images[0].width, turned.images[0].height) == (4, 8)
    Image.new("RGB", (4, 4), "white").save(root / "white.png")
    assert audit(write(row("white.png")), root, QWEN).samples[0].image_key != deep.image_key


def test_all_problems_come_in_one_list(write: Write, root: Path) -> None:
    path = write(row(), b"{", row("c.png", "", " "), row(["c.png", "c.png"]), row(answer="<|im_end|>"), row("b.png"))
    result = audit(path, root, QWEN)
    assert [sample.id for sample in result.samples] == [1, 6]
    missing = f"image 'c.png' not found under {root.resolve()}"
    assert [(p.where, p.what) for p in result.problems] == [
        ("train.jsonl:2", "invalid JSON at column 2: Expecting property name enclosed in double quotes"),
        ("train.jsonl:3", "question is empty"),
        ("train.jsonl:3", "answer is empty"),
        ("train.jsonl:3", missing),
        ("train.jsonl:4", missing),
        ("train.jsonl:5", "answer holds '<|im_end|>', which would become a real token and not text"),
    ]


def test_check_stops_or_skips(write: Write, root: Path) -> None:
    path = write(row(), row("c.png"))
    with pytest.raises(BadInput) as caught:
        check(path, root, QWEN)
    message = f"train.jsonl:2: image 'c.png' not found under {root.resolve()}\nrecipe.data.on_bad=skip leaves them out"
    assert str(caught.value) == f"1 problem in 1 line:\n{message}"
    samples, problems = check(path, root, QWEN, on_bad="skip")
    assert [sample.id for sample in samples] == [1]
    assert [problem.where for problem in problems] == ["train.jsonl:2"]
    for on_bad in ("stop", "skip"):  # that all be left out is no advice
        with pytest.raises(BadInput) as caught:
            check(write(row("c.png")), root, QWEN, on_bad=on_bad)
        assert str(caught.value).endswith(f"\nno good question remains in {path}")
        assert "on_bad" not in str(caught.value)


def test_a_conversation_that_the_assistant_begins_is_a_bad_line(root: Path, write: Write) -> None:
    """No chat template writes what stands before its first answer: nothing."""
    begins = [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "What?"}, {"from": "gpt", "value": "red"}]
    path = write(row(), {"image": "a.png", "conversations": begins})
    what = "begins with a turn of role assistant, must begin with a user turn or a system turn"
    with pytest.raises(BadInput) as caught:
        check(path, root, QWEN)
    assert f"train.jsonl:2: {what}\nrecipe.data.on_bad=skip leaves them out" in str(caught.value)
    samples, problems = check(path, root, QWEN, on_bad="skip")
    assert [sample.id for sample in samples] == [1] and [problem.what for problem in problems] == [what]


def test_limit_counts_lines_that_are_not_blank(write: Write, root: Path) -> None:
    result = audit(write(row(), b"", b"{", row(), row("c.png")), root, QWEN, limit=3)
    assert [sample.id for sample in result.samples] == [1, 4]
    assert [problem.where for problem in result.problems] == ["train.jsonl:3"]


def test_special_tokens_are_the_familys(write: Write, root: Path) -> None:
    class Other(type(QWEN)):  # type: ignore[misc]
        model_type = "other"
        markers = Markers("<image>", "<eos>", "<user>", ("<eos>",))

    path = write(row(question="<|im_end|> <eos>?"))
    assert "question holds '<eos>'" in only(audit(path, root, Other()))
    assert "question holds '<|im_end|>'" in only(audit(path, root, QWEN))
    assert not audit(path, root, None).problems


def test_a_missing_or_empty_file_is_refused(write: Write, root: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.jsonl does not exist"):
        audit(tmp_path / "none.jsonl", root, QWEN)
    with pytest.raises(BadInput, match=r"train\.jsonl is empty: it holds no question"):
        audit(write(b"", b" "), root, QWEN)
    with pytest.raises(BadInput, match="is not a folder"):
        audit(write(row()), tmp_path / "none", QWEN)
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        audit(root, root, QWEN)


def test_many_images_are_decoded_at_once_with_the_same_result(
    write: Write, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet, inspect, together = Barrier(2), audits._inspect, count()

    def met(path: Path) -> ImageRef | str:
        if next(together) < 2:
            meet.wait(timeout=60)  # for one that is decoded meanwhile
        return inspect(path)

    for number in range(80):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(root / f"{number}.png")
    (root / "7.png").write_bytes(b"broken")
    path = write(*[row(f"{number}.png") for number in range(80)] * 2)
    seen: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(audits, "_inspect", met)
        pooled = audit(path, root, QWEN, workers=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 80) for done in range(1, 81)]
    assert pooled == audit(path, root, QWEN, workers=1)
    assert [problem.where for problem in pooled.problems] == ["train.jsonl:8", "train.jsonl:88"]


def test_keys_that_look_like_ours_are_suggested(write: Write, root: Path) -> None:
    lines = [{"img": "a.png", "Question": f"{n}?", "label": n, "answer_type": "open"} for n in range(9)]
    with pytest.raises(BadInput) as caught:
        check(write(*lines), root, QWEN)
    said = str(caught.value).splitlines()
    assert said[:2] == [
        "9 problems in 9 lines:",
        "train.jsonl:1: unknown form with the keys 'img', 'Question', 'label', 'answer_type'; known are "
        "{image|image_filename, question, answer, stage?, type?, instruction?}; {messages, images}; "
        "{image, conversations}",
    ]
    assert said[2] == "    9 of this kind: train.jsonl:1, train.jsonl:2, train.jsonl:3 and 6 more"
    assert said[4:7] == [
        "every line has 'img': did you mean 'image'?",
        "every line has 'Question': did you mean 'question'?",
        "every line has 'label': did you mean 'answer'?",
    ]
    listed = Path(said[3].removeprefix("all 9 are listed in ")).read_text().splitlines()
    assert [line.split(": ")[0] for line in listed] == [f"train.jsonl:{n}" for n in range(1, 10)]


def test_a_key_that_only_some_lines_have_is_not_suggested(write: Write, root: Path) -> None:
    assert audit(write({"img": "a.png", **row()}, row(answer=None)), root, QWEN).hints == []
    assert audit(write(row(img="x"), row(img="x")), root, QWEN).hints == []


def test_no_line_is_an_object(write: Write, root: Path, tmp_path: Path) -> None:
    (hint,) = audit(write(b"{", b'"a": 1', b"}"), root, QWEN).hints
    assert hint.endswith(
        "is a JSON object; a file with one JSON object per line, or with one JSON array of objects, CSV or parquet, "
        "is needed"
    )


def test_an_array_is_read_like_lines(write: Write, root: Path) -> None:
    rows = [row(), row("c.png"), row(["a.png", "b.png"], stage="stage 2"), row(answer=" ")]
    lines = audit(write(*rows), root, QWEN)
    path = root / "train.json"
    path.write_text(json.dumps(rows, indent=1))
    array = audit(path, root, QWEN)
    assert [(s.id, s.messages, s.stage, s.images) for s in array.samples] == [
        (s.id, s.messages, s.stage, s.images) for s in lines.samples
    ]
    assert [problem.what for problem in array.problems] == [problem.what for problem in lines.problems]
    assert [problem.where for problem in array.problems] == ["train.json:7 (item 2)", "train.json:21 (item 4)"]
    assert [s.id for s in audit(path, root, QWEN, few=1).samples] == [1]


def test_a_root_without_any_of_the_images_is_one_problem(write: Write, root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = write(row(), row("b.png"), row(answer=""))
    with pytest.raises(BadInput) as caught:
        check(path, tmp_path / "other", QWEN)
    assert str(caught.value).splitlines() == [
        "1 problem in 1 line:",
        "train.jsonl:3: answer is empty",
        f"none of the images is under {tmp_path / 'other'}, such as 'a.png': recipe.data.image_root may be another "
        "folder",
    ]
    with pytest.raises(BadInput) as caught:
        check(write(row(f"{root}/a.png"), row(f"{root}/b.png")), tmp_path / "other", QWEN)
    outside = f"none of the images is under {tmp_path / 'other'}, such as '{root}/a.png': recipe.data.image_root may be"
    assert str(caught.value) == f"{outside} another folder", "whole paths are told of once too"
    text = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    samples, problems = check(write(row(), row("b.png"), text), tmp_path / "other", QWEN, on_bad="skip")
    assert [sample.id for sample in samples] == [3] and len(problems) == 2
