"""Letters beyond ASCII in names of files, under a locale that knows none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sets
from worlds import write_world

from sameday.spec.document import dump_yaml

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Under this Python takes all texts for ASCII."""


def sameday(folder: Path, *words: str, options: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in (*ASCII, "LANG", "LC_CTYPE")}
    command = [sys.executable, *options, "-m", "sameday", *words]
    return subprocess.run(command, cwd=folder, env=kept | variables, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sets.write_set(tmp_path, train=20)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4}, num_epochs=1)
    (tmp_path / "rezept-größe.yaml").write_text(dump_yaml(recipe), encoding="utf-8")
    return tmp_path


def test_a_run_is_trained_and_reported_under_names_of_any_letters(folder: Path) -> None:
    done = sameday(folder, "train", "rezept-größe.yaml", "--out", "läufe/é", "--set", "plan.device=cpu", **ASCII)
    assert done.returncode == 0, done.stderr.decode()
    assert "in läufe/é: 16 images" in done.stdout.decode()
    assert {file.name for file in (folder / "läufe/é").iterdir()} >= {"model", "eval.json", "recipe.yaml"}
    told = sameday(folder, "report", "läufe/é", "-o", "bericht-é.html", **ASCII)
    assert told.returncode == 0, told.stderr.decode()
    assert "läufe/é" in (folder / "bericht-é.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [(), ("-X", "utf8=0")])
def test_a_name_that_is_not_there_is_told(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Also where an option of Python keeps it at ASCII."""
    done = sameday(tmp_path, "train", "größe.yaml", options=options, **ASCII)
    assert done.returncode == 2
    shown = "gr\\udcc3\\udcb6\\udcc3\\udc9fe.yaml" if options else "größe.yaml"
    assert done.stderr.decode() == f"error: {shown}: no such file\n"


def test_a_screen_without_these_letters_shows_their_numbers(tmp_path: Path) -> None:
    write_world(tmp_path, 3, counts=(2, 2), hard=False)
    for encoding, times in (("ascii:strict", b"\\xd7"), ("latin-1:strict", "×".encode("latin-1"))):
        done = sameday(tmp_path, "data", "train.jsonl", PYTHONIOENCODING=encoding, LC_ALL="C.UTF-8")
        assert done.returncode == 0, done.stderr.decode()
        assert b"(96" + times + b"64)" in done.stdout
