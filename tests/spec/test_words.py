"""Nothing that stands in a file reaches a terminal as a command to it."""

from __future__ import annotations

import ast
import io
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed import refused

import sameday
from sameday.data.labelled.cifar import BadBatch, load
from sameday.demo import patterns
from sameday.spec.words import in_one_line, tell, visible

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
SEEN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e"


@given(st.text(st.characters(categories=None) | st.sampled_from(ESCAPE)))
def test_what_is_told_has_no_command_in_it_and_can_be_written(text: str) -> None:
    told = visible(text)
    told.encode("utf-8")
    assert all(char in "\n\t" or (ord(char) >= 32 and not 0x7F <= ord(char) <= 0x9F) for char in told)
    assert not set(told) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2028\u2029")
    assert visible(told) == told and (told == text) == (len(told) == len(text))


def test_usual_text_is_told_as_it_is() -> None:
    out = io.StringIO()
    tell("naïve 图像 ×2\n\tinner — …", out)
    tell(3, out)
    assert out.getvalue() == "naïve 图像 ×2\n\tinner — …\n3\n"


def test_nothing_prints_by_another_way() -> None:
    """What is printed by `print` itself could come from a file one day."""
    for path in Path(sameday.__file__).parent.rglob("*.py"):
        names = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name) and n.id == "print"]
        assert not names or path.name == "words.py", f"{path}:{names[0].lineno} prints; spec.words.tell is for that"


def test_commands_in_files_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text('"task\\e[2J": 1\nmodel: "\\e]0;x\\a"\nseed: "\\e[31m"\n')
    said = refused(tmp_path, "train", "recipe.yaml")
    assert "\x1b" not in said and "\x07" not in said
    assert "recipe.yaml:1: task\\x1b[2J is not a key here" in said and "seed is '\\x1b[31m'; must be an integer" in said
    said = refused(tmp_path, "train", f"{ESCAPE}.yaml")
    assert said == f"{SEEN}.yaml: no such file"


def test_commands_in_metrics_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: classify\nmodel: {kind: vit}\ndata: {path: p}\n")
    (tmp_path / "plan.yaml").write_text("workers: 0\n")
    (tmp_path / "environment.json").write_text('{"recipe_dir": "/"}')
    (tmp_path / "metrics.jsonl").write_text(f"{ESCAPE}\n")
    said = refused(tmp_path, "report", ".")
    assert said == f"metrics.jsonl:1: is not a JSON object: {SEEN}\nreport.html is written without such lines"


def test_a_damaged_pickle_is_told_in_plain_letters(tmp_path: Path) -> None:
    file = tmp_path / "batch"
    for content in (b"\x00\x1b[2J\xff", pickle.dumps({})[:-1] + b"\xfe", b"c\xc3\xa9\x1b]0;x\x07\nname\x9b\n."):
        file.write_bytes(content)
        with pytest.raises(BadBatch) as error:
            load(file)
        assert str(error.value).isascii() and str(error.value).isprintable(), str(error.value)
    file.write_bytes(b"c" + b"m" * 100_000 + b"\nname\n.")
    with pytest.raises(BadBatch, match=r"^asks for m{77}\.\.\., which no batch of images needs"):
        load(file)


def test_a_demo_module_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, code in ((["--help"], 0), (["--none"], 2), ([], 2)):
        monkeypatch.setattr(sys, "argv", ["patterns", *words])
        with pytest.raises(SystemExit) as left:
            patterns.main()
        assert left.value.code == code and not list(tmp_path.iterdir()), "nothing is written"
    said = capsys.readouterr()
    assert said.out.startswith("usage: python -m sameday.demo.patterns [-h] folder\n")
    assert said.err.endswith("error: the following arguments are required: folder\n")


def test_a_name_out_of_a_file_is_one_short_line() -> None:
    assert in_one_line("a\n b\r\nc\u2028d") == "a b c d"
    assert in_one_line("x" * 60) == "x" * 60 and in_one_line("x" * 61) == "x" * 59 + "…"
