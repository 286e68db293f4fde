"""`sameday` as a user types it, in this process: what it printed and the code it left with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from sameday.cli import run
from sameday.hardware.signals import ASKING

FIELDS: dict[str, Any] = {
    "name": "small",
    "precision": "float32",
    "data": {"train": "train.jsonl", "val": "val.jsonl", "image_root": "images"},
    "lora": {"r": 2, "alpha": 4},
    "effective_batch": 2,
    "learning_rate": 0.01,
    "max_steps": 2,
}


COMMANDS = cache(typer.main.get_command)
"""A process makes them once, and here a thousand commands are typed in one."""


@dataclass
class Said:
    code: int
    out: str
    err: str


def sameday(folder: Path, *words: str) -> Said:
    """`sameday WORDS`, typed in this folder, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["sameday", *words])
        patch.setattr(typer.main, "get_command", COMMANDS)
        before, handlers = dict(os.environ), {number: signal.getsignal(number) for number in ASKING}
        try:
            run()
            code = 0
        except SystemExit as leave:
            code = int(leave.code or 0)
        finally:
            os.environ.clear()
            os.environ.update(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Said(code, out.getvalue(), err.getvalue())


def refused(folder: Path, *words: str) -> str:
    """The one message of a command that must fail: code 2 and no traceback."""
    said = sameday(folder, *words)
    assert said.code == 2, said.out + said.err
    assert "Traceback" not in said.err and said.err.startswith("error: "), said.err
    return said.err.removeprefix("error: ").rstrip("\n")


def write_recipe(folder: Path, model: Path | str, **changes: Any) -> Path:
    whole = {"lora": {}} if changes.get("train") == "all" else {}
    fields = {"model": str(model)} | FIELDS | changes | whole
    (folder / "recipe.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    return folder


def scores_in(path: Path) -> dict[str, float]:
    """The scores that an evaluation wrote, without how many of its images were trained on."""
    return {name: score for name, score in json.loads(path.read_text()).items() if name != "trained_on"}
