"""What a person sees of a run: plain lines, a live line on a real terminal, the same numbers on disk."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import tiny_recipe, write_world

from sameday.record.folder import RunFolder
from sameday.record.times import read_times
from sameday.spec.plan import Plan
from sameday.spec.words import clock
from sameday.train.steps import Good
from sameday.train.watch import Watch

LINE = re.compile(
    r"step (\d+)/(\d+)  loss (\d+\.\d{4})  lr (\d\.\d\de-\d\d)  (\d+\.\d{3}) s/step  (\d+\.\d) samples/s"
    r"(?:  gpu \d+%)?(?:  wait (\d+)%)?  left (\d+:\d\d(?::\d\d)?)"
)
CPU = torch.device("cpu")


def good(step: int, loss: float, seconds: float = 0.5, **input: float) -> Good:
    """The end of the step after which so many are done."""
    made: dict[str, Any] = {"norm": 1.5, "rate": 1e-4, "samples": 8, "micro_batches": 1, "stop": False, "phases": None}
    return Good(step=step - 1, loss=loss, seconds=seconds, input=input, **made)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.open(tmp_path / "run", tiny_recipe(tmp_path), Plan(), tmp_path)


def losses(run: RunFolder, tag: str = "train/loss") -> dict[int, float]:
    """What TensorBoard would draw."""
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    points = {event.step: event.value for event in events.Scalars(tag)}
    assert len(points) == len(events.Scalars(tag)), "a step is drawn twice"
    return points


def walk(run: RunFolder, steps: range, total: int, log_steps: int) -> None:
    with Watch(run, total, log_steps, CPU) as watch:
        for step in steps:
            watch.step(good(step, 4 / step))


def test_each_interval_is_one_line(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    walk(run, range(1, 8), total=7, log_steps=3)
    found = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    assert all(found)
    assert [match.groups() for match in found if match] == [
        ("3", "7", "1.3333", "1.00e-04", "0.500", "16.0", None, "0:02"),
        ("6", "7", "0.6667", "1.00e-04", "0.500", "16.0", None, "0:00"),
        ("7", "7", "0.5714", "1.00e-04", "0.500", "16.0", None, "0:00"),
    ]


def test_charts_are_open_before_the_first_step_and_no_step_waits_for_their_file(run: RunFolder) -> None:
    with Watch(run, 10, 1, CPU) as watch:
        watch.starts(0, 1)
        board, writer = watch.board, watch.board._writer.file_writer.event_writer._async_writer._writer
        with writer_held(writer):
            for step in range(1, 5):
                watch.step(good(step, 1.0, 1.0))
        assert watch.board is board


@contextmanager
def writer_held(writer: Any) -> Iterator[None]:
    """Whatever is charted meanwhile is written afterwards."""
    go, write = threading.Event(), writer.write

    def later(data: bytes) -> None:
        assert go.wait(60), "a step waits"
        write(data)

    with patch.object(writer, "write", later):
        try:
            yield
        finally:
            go.set()


def test_waiting_for_input_is_told_where_it_matters(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """As a share of the time of the steps that the line is about: 1%, then 2%, then 26%."""
    with Watch(run, 10, 1, CPU) as watch:
        for step, wait in enumerate((0.01, 0.03, 0.74), 1):
            watch.step(good(step, 1.0, 1.0, wait=wait, decode=2 * wait))
    found = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    assert [match and match[7] for match in found] == [None, "2", "26"]
    assert [(record["wait"], record["decode"]) for record in run.metrics] == [(0.01, 0.02), (0.03, 0.06), (0.74, 1.48)]
    assert losses(run, "train/wait") == {1: pytest.approx(0.01), 2: pytest.approx(0.03), 3: pytest.approx(0.74)}


def test_a_step_that_stalls_is_told_and_recorded(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(run, 40, 100, CPU) as watch:
        for step in range(1, 31):
            watch.step(good(step, 1.0, 7.5 if step in (2, 25) else 0.5, wait=7.0))
    assert capsys.readouterr().out == (
        "step 25/40  stalled: 7.5 s, usual before it 0.500 s; 7.0 s of it waiting for input\n"
    )
    assert [(each["step"], each["seconds"]) for each in read_times(run.path) if each["what"] == "stall"] == [(25, 7.5)]


def test_the_gpus_use_is_told_and_recorded(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(run, 10, 1, CPU) as watch:
        watch.step(good(1, 1.0))
        watch.gpu = lambda: 93
        watch.step(good(2, 1.0))
        watch.step(good(3, 1.0, wait=0.75))
    lines = capsys.readouterr().out.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    ends = [line.partition(" samples/s")[2].partition("  left ")[0] for line in lines]
    assert ends == ["", "  gpu 93%", "  gpu 93%  wait 50%"]
    assert [record.get("gpu") for record in run.metrics] == [None, 93, 93]


def test_every_step_is_recorded_and_every_interval_charted(run: RunFolder) -> None:
    walk(run, range(1, 8), total=7, log_steps=3)
    assert [record["step"] for record in run.metrics] == list(range(1, 8))
    assert run.metrics[2] == {
        "step": 3,
        "loss": 4 / 3,
        "seconds": 0.5,
        "samples": 8,
        "lr": 1e-4,
        "grad_norm": 1.5,
    }
    charted = losses(run)
    assert sorted(charted) == [3, 6, 7]
    assert all(value == pytest.approx(4 / step) for step, value in charted.items())
    assert losses(run, "train/lr")[3] == pytest.approx(1e-4)
    assert losses(run, "train/samples_per_second")[3] == pytest.approx(16)


def test_scores_are_a_line_a_record_and_a_chart(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(run, 10, 5, CPU) as watch:
        watch.step(good(4, 1.0))
        watch.evaluation(4, "val", {"loss": 1.23456, "exact_match": 2 / 3, "samples": 9})
    assert capsys.readouterr().out == "step 4/10  val loss 1.2346  exact_match 0.6667\n"
    assert run.metrics[-1] == {
        "step": 4,
        "split": "val",
        "loss": 1.23456,
        "exact_match": 2 / 3,
        "samples": 9,
    }
    assert losses(run, "val/exact_match") == {4: pytest.approx(2 / 3)}


def test_steps_done_again_are_charted_once(run: RunFolder) -> None:
    """A killed run has charted steps beyond its last checkpoint; the resumed one replaces them."""
    walk(run, range(1, 6), total=8, log_steps=1)
    time.sleep(1.1)  # TensorBoard tells event files apart by the second they were opened in
    with Watch(run, 8, 1, CPU) as watch:
        for step in range(3, 9):
            watch.step(good(step, 100.0 + step))
    assert losses(run) == {1: 4, 2: 2, 3: 103, 4: 104, 5: 105, 6: 106, 7: 107, 8: 108}


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(None, 10, 1, CPU) as watch:
        watch.step(good(1, 1.0))
        watch.evaluation(1, "val", {"loss": 1.0})
        watch.say("hello")
    assert capsys.readouterr().out == ""


def test_time_left_is_short_or_has_hours() -> None:
    assert [clock(s) for s in (0, 9.4, 59.6, 61, 3599, 3600, 90061)] == [
        *("0:00", "0:09", "1:00", "1:01", "59:59", "1:00:00", "25:01:01")
    ]


def read_all(terminal: int) -> bytes:
    """Everything, up to where the other end was closed; closes this one."""
    written = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # so Linux says that a terminal's other end is gone
            break
        if not piece:
            break
        written += piece
    os.close(terminal)
    return written


def on_terminal(command: list[str], folder: Path, columns: int = 120) -> tuple[int, str]:
    """Exit code and raw output of a process whose standard output is a terminal."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    with subprocess.Popen(command, cwd=folder, env=env, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        written = read_all(ours)
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    return process.returncode, written.decode() if not process.returncode else errors


def screen(raw: str) -> list[str]:
    """What stays on the terminal: the few control sequences that a live line needs, played back."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[\d*A", piece):
            row -= int(piece[2:-1] or 1)
            assert row >= 0, "the cursor left the screen"
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece.startswith("\x1b["):
            assert piece[-1] in "mhl", f"unexpected control sequence {piece!r}"  # colours, cursor on and off
        else:
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]


def test_a_terminal_gets_a_live_line(tmp_path: Path, tiny_qwen3: Path) -> None:
    write_world(tmp_path, 5, counts=(3, 2), hard=False)
    (tmp_path / "recipe.yaml").write_text(
        f"name: live\nmodel: {tiny_qwen3}\nprecision: float32\neffective_batch: 2\nmax_steps: 4\n"
        "data: {train: train.jsonl, val: val.jsonl, image_root: images}\n"
    )
    (tmp_path / "plan.yaml").write_text("eval_steps: 2\nlog_steps: 1\n")
    command = [
        sys.executable,
        "-m",
        "sameday",
        "train",
        "recipe.yaml",
        "--plan",
        "plan.yaml",
        "--out",
        "run[1]",
    ]
    code, raw = on_terminal(command, tmp_path)
    assert code == 0, raw
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
    assert LINE.search(plain), "no live line was shown"
    assert "\x1b[?25l" in raw and raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l"), "the cursor stays hidden"
    kept = screen(raw)
    assert [line for line in kept if "step" in line] == [
        line for line in kept if re.fullmatch(r"step [24]/4  val loss \d+\.\d{4}  exact_match [\d.]+", line)
    ], kept
    assert len([line for line in kept if line.startswith("step")]) == 2
    begun = [line for line in kept if not line.startswith("images are resized by Pillow")]  # where torchvision is
    assert re.fullmatch(r"live \w{12} in run\[1\]: 5 questions", begun[-3]), kept


def test_brackets_in_a_message_stay(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would take them for markup."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        with Watch(run, 10, 1, CPU) as watch:
            watch.say("left aside: data[/bold] and [red]x")
    raw = read_all(ours).decode()
    assert screen(raw) == ["left aside: data[/bold] and [red]x"]
