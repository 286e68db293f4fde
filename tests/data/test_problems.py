"""Thousands of problems are told in a screen, by kind; the whole list is in a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.data.problems import KEPT, KINDS, Problem, grouped, in_lines, report


def test_few_problems_are_told_one_by_one() -> None:
    problems = [
        Problem("train.jsonl:17", "image 'a.jpg' not found under /data"),
        Problem("train.jsonl:17", "no answer"),
    ]
    assert report(problems, in_lines(problems), Path("train.jsonl")).splitlines() == [
        "2 problems in 1 line:",
        "train.jsonl:17: image 'a.jpg' not found under /data",
        "train.jsonl:17: no answer",
    ]


def test_many_of_a_kind_are_counted_and_listed_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEDAY_CACHE_HOME", str(tmp_path))
    problems = [Problem(f"t:{n}", f"image 'img{n}.jpg' not found under /data") for n in range(5000)]
    problems.insert(7, Problem("t:7", "answer is \ud800 empty"))
    heading, first, places, other, where = report(problems, in_lines(problems), Path("t")).splitlines()
    assert heading == "5001 problems in 5000 lines:"
    assert first == "t:0: image 'img0.jpg' not found under /data"
    assert places == "    5000 of this kind: t:0, t:1, t:2 and 4997 more"
    assert other == "t:7: answer is \ud800 empty"
    path = Path(where.removeprefix("all 5001 are listed in "))
    assert path.parent == tmp_path / "problems"
    assert path.read_text().splitlines()[6:8] == [
        "t:6: image 'img6.jpg' not found under /data",
        r"t:7: answer is \ud800 empty",
    ]


def test_each_report_has_a_list_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command may report several times about one file: for each stage, each split, each of several sets."""
    monkeypatch.setenv("SAMEDAY_CACHE_HOME", str(tmp_path))
    problems = [Problem(f"t:{n}", "bad") for n in range(50)]
    said = [report(problems[:size], "", Path("t")).splitlines()[-1] for size in (50, 40, 50)]
    listed = [Path(line.partition(" are listed in ")[2]) for line in said]
    assert said[:2] == [f"all {size} are listed in {path}" for size, path in zip((50, 40), listed, strict=False)]
    assert [len(path.read_text().splitlines()) for path in listed] == [50, 40, 50] and listed[0] == listed[2]


def test_old_lists_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEDAY_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "problems"
    folder.mkdir()
    for age in range(KEPT + 5):
        (folder / f"{age}.txt").touch()
        os.utime(folder / f"{age}.txt", (1e9 - age, 1e9 - age))
    where = report([Problem(f"t:{n}", "bad") for n in range(9)], "", Path("t")).splitlines()[-1]
    left = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)
    assert where == f"all 9 are listed in {left[0]}" and len(left) == KEPT
    assert [path.name for path in left[1:]] == [f"{age}.txt" for age in range(KEPT - 1)]


def test_a_list_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file, where a folder is needed")
    monkeypatch.setenv("SAMEDAY_CACHE_HOME", str(tmp_path / "home"))
    said = report([Problem(f"t:{n}", "bad") for n in range(9)], "9 problems", Path("t")).splitlines()
    assert said[:3] == ["9 problems", "t:0: bad", "    9 of this kind: t:0, t:1, t:2 and 6 more"]
    assert said[3].startswith(f"the whole list could not be written to {tmp_path / 'home'}{os.sep}problems")
    assert said[3].endswith(("File exists", "Not a directory"))


WHATS = st.sampled_from(["empty", "image 'a' gone", "image 'b' gone", "column 3", "column 44", "'stage' is 'x', no"])


@given(st.lists(st.builds(Problem, st.integers(1, 99).map("t:{}".format), WHATS | st.text(max_size=3))))
def test_every_kind_is_told_and_the_counts_add_up(problems: list[Problem]) -> None:
    lines, whole = grouped(problems)
    assert len(lines) <= KINDS * 3 + 1
    if whole:
        assert sorted(lines) == sorted(f"{problem.where}: {problem.what}" for problem in problems)
    counts = [int(line.split()[0]) for line in lines if line.startswith("    ")]
    alone = sum(not line.startswith("    ") for line in lines) - len(counts)
    if not any("more kinds" in line for line in lines):
        assert sum(counts) + alone == len(problems)


def test_items_of_an_array_are_counted_as_such() -> None:
    assert in_lines([Problem("t.json:1 (item 1)", "a"), Problem("t.json:1 (item 2)", "a")]) == "2 problems in 2 items:"
    assert in_lines([Problem("t.json:1 (item 1)", "a"), Problem("v.jsonl:2", "a")]) == "2 problems in 2 lines:"
