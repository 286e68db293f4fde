"""One job from its start to its end, whoever asks for it: the local runner, or a batch script.

python -m sameday.suite.running.execute SUITE.yaml OUT NAME [--gpus 0,1]

It leaves with 0 (done), 75 (asked to stop: the same command goes on), 2 (refused, or what it needs is not done), or
with the code of the job, which failed. The job's process keeps the lock: where this one is killed, the job goes on
alone, and nobody starts it a second time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sameday.evaluate.predictions import METRICS
from sameday.hardware.signals import taken
from sameday.record.folder import as_begun, begun
from sameday.record.stopped import STOPPED
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_STOPPED, BadInput
from sameday.spec.load import load_recorded_recipe
from sameday.spec.recipe import differences
from sameday.spec.words import tell
from sameday.spec.writing import write_text
from sameday.suite.jobs import OpenSuite, asked, changes, node_of, open_suite, process, request, result_of
from sameday.suite.state import GOES_ON, begin, code_told, take
from sameday.suite.times.work import work_of
from sameday.tasks.registry import setup_of

PATIENCE = 15.0
"""Seconds in which whoever held the job before may end."""
LAST_LINES, LAST_CHARACTERS = 20, 4000
"""Of a failed job's output, as its state tells them."""
AGAIN = "asked to stop; the search begins again"
REQUEST = "request.json"
"""What the job was asked for when it began last."""


def execute(opened: OpenSuite, name: str, gpus: Sequence[int] | None = None) -> int:
    """`gpus` are numbers among those that this process sees; None leaves them to the environment."""
    suite, _, folder, _ = opened
    with _Signals() as signals, contextlib.ExitStack() as locks:
        lock = _wait_for(folder.lock(name), signals, PATIENCE)
        if lock is None:
            owner = folder.read(name)
            tell(f"{name} is run already, by process {owner.pid} on {owner.host}", sys.stderr)
            return EXIT_BAD_INPUT
        locks.callback(os.close, lock)
        before = folder.read(name)
        if before.state == "done":
            refusal = changed(opened, name)
            tell(refusal or f"{name} is done already", sys.stderr if refusal else sys.stdout)
            return EXIT_BAD_INPUT if refusal else EXIT_OK
        if before.state == "cancelled":
            tell(f"{name} was cancelled; `sameday suite run` takes it up again", sys.stderr)
            return EXIT_STOPPED
        lacking = [f"{each} is {state}" for each in suite.needs(name) if (state := folder.seen(each).state) != "done"]
        if lacking:
            folder.change(name, state="blocked", why=lacking[0])
            tell(f"{name} waits: {', '.join(lacking)}", sys.stderr)
            return EXIT_BAD_INPUT
        if before.state == "running" and _ended_alone(opened, name):
            tell(f"{name}: whoever ran it was killed, and it ended well by itself")
            end = _last_file(opened, name).stat().st_mtime
            spent = before.spent + max(0.0, end - (before.started or end))
            folder.change(name, state="done", why="", code=EXIT_OK, ended=end, spent=spent, made=True)
            return EXIT_OK
        kept = [lock]
        for gpu in gpus or ():
            one = _wait_for(folder.gpu_lock(gpu), signals)
            if one is None:
                return EXIT_STOPPED  # asked to stop before it began
            locks.callback(os.close, one)
            kept.append(one)
        return _run(opened, name, gpus, kept, signals)


def _run(opened: OpenSuite, name: str, gpus: Sequence[int] | None, kept: list[int], signals: _Signals) -> int:
    suite, home, folder, _ = opened
    words = process(suite, home, folder, name)
    write_text(folder.job(name) / REQUEST, json.dumps(request(suite, home, name), indent=1) + "\n")
    (folder.run(name) / STOPPED).unlink(missing_ok=True)  # of the attempt before; this one may write none
    before = folder.read(name)
    if before.state == "running" and before.started is not None and folder.log(name).exists():
        # Whoever ran it was killed: what it spent is known by its last words.
        folder.change(name, spent=before.spent + max(0.0, folder.log(name).stat().st_mtime - before.started))
    state = begin(folder, name, asked(suite, home, name), list(gpus or ()))
    with folder.log(name).open("ab") as log:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"--- {now} on {socket.gethostname()}, attempt {state.attempt}: {shlex.join(words)}\n".encode())
        log.flush()
        began = log.tell()
        code = signals.run(words, _environment(suite.jobs[name].gpus, gpus), log, kept)
    several = suite.jobs[name].gpus > 1 or node_of(suite, name) is not None
    told = code_told(folder.run(name)) if several else None
    if code and told is not None:
        code = told  # torchrun leaves with 1, whatever its processes left with
    elif signals.asked and (code in (-signal.SIGTERM, 128 + signal.SIGTERM) or (code and several)):
        code = EXIT_STOPPED  # before it could listen, or while it evaluated on several GPUs
    ended: dict[str, Any] = {"ended": time.time(), "code": code, "spent": state.spent + time.time() - state.started}  # type: ignore[operator]
    if code == EXIT_OK:
        folder.change(name, state="done", why="", made=result_of(suite, folder, name).exists(), **ended)
    elif code == EXIT_STOPPED:
        why = AGAIN if suite.jobs[name].do == "tune" else GOES_ON
        folder.change(name, state="stopped", why=why, **ended)
    else:
        folder.change(name, state="failed", why=_why(code, last_lines(folder.log(name), began)), **ended)
    return code if code >= 0 else 128 - code


def _ended_alone(opened: OpenSuite, name: str) -> bool:
    """Whether a job that was left without its executor wrote the last of its files since it began, and was asked for
    the same. A training says so itself when it is started again; a search or an evaluation would be done twice."""
    suite, home, folder, _ = opened
    before = folder.read(name)
    if suite.jobs[name].do not in ("tune", "eval") or before.asked != asked(suite, home, name):
        return False
    last = _last_file(opened, name)
    return before.started is not None and last.exists() and last.stat().st_mtime >= before.started


def _last_file(opened: OpenSuite, name: str) -> Path:
    """What a tune or eval job writes last."""
    suite, home, folder, _ = opened
    work = work_of(suite, home, folder, name)
    generates = work.recipe is not None and setup_of(work.recipe, work.home).generates
    return folder.run(name) / METRICS if generates else result_of(suite, folder, name)


def follow(opened: OpenSuite, name: str) -> int:
    """On another of a job's nodes, the processes alone: the first node has the job's lock and state, and says how it
    ended. When processes there fail, these do. Two nodes that append to one file would lose lines of each other."""
    suite, home, folder, _ = opened
    path = folder.log(name).with_name(f"log-{node_of(suite, name)}.txt")
    with _Signals() as signals, path.open("ab") as log:
        signals.run(process(suite, home, folder, name), _environment(suite.jobs[name].gpus, None), log, [])
    return EXIT_OK


class _Signals:
    """Each that asks to stop reaches the job as SIGTERM, upon which it saves itself and leaves."""

    def __init__(self) -> None:
        self.asked = False
        self._job: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._ask) for number in taken()}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        self._forward()

    def _forward(self) -> None:
        if self._job is None or self._job.returncode is not None:
            return
        try:
            os.killpg(self._job.pid, signal.SIGTERM)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                self._job.send_signal(signal.SIGTERM)

    def run(self, words: list[str], environment: dict[str, str], log: Any, kept: list[int]) -> int:
        """The job's code; it has a session of its own, and keeps these descriptors."""
        if self.asked:
            return EXIT_STOPPED
        self._job = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=kept,
            start_new_session=True,
        )
        if self.asked:
            self._forward()
        return self._job.wait()


def _wait_for(path: Path, signals: _Signals, patience: float = float("inf")) -> int | None:
    """The lock, once nobody else has it; None where that takes too long, or a signal comes first."""
    end = time.monotonic() + patience
    while (lock := take(path)) is None:
        if signals.asked or time.monotonic() > end:
            return None
        time.sleep(0.1)
    return lock


def _environment(wanted: int, gpus: Sequence[int] | None) -> dict[str, str]:
    """A job of no GPU sees none. Numbers count among those that this process sees. Output comes when it is written, so
    that errors stand behind what was said before them."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if gpus is None and wanted:
        return environment
    seen = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    names = [seen[gpu] if gpu < len(seen) else str(gpu) for gpu in gpus or ()]
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def changed(opened: OpenSuite, name: str) -> str | None:
    """Why a job that is done is not done for what the suite asks now; None where it is."""
    suite, home, folder, _ = opened
    if folder.read(name).asked == asked(suite, home, name):
        return None
    try:
        before = json.loads((folder.job(name) / REQUEST).read_text(encoding="utf-8"))
        lines = changes(before, request(suite, home, name))
    except (OSError, ValueError, RecursionError):
        lines = []
    what = "; ".join(lines) or "it was asked for otherwise"
    return (
        f"{name} is done, and since then {what}. Put it back, choose another --out, or do it anew with "
        f"`sameday suite run --again {name}`"
    )


def begun_otherwise(opened: OpenSuite, name: str) -> str | None:
    """Why a training that has begun, and is not done, cannot go on as the suite asks now; None where it can."""
    suite, home, folder, _ = opened
    run = folder.run(name)
    if suite.jobs[name].do != "train" or not begun(run):
        return None
    asked_for = work_of(suite, home, folder, name).recipe
    assert asked_for is not None
    lines = differences(load_recorded_recipe(run / "recipe.yaml"), as_begun(asked_for, run))
    if not lines:
        return None
    return (
        f"{name} has begun with another recipe: {'; '.join(lines)}. Put it back, choose another --out, or do it anew "
        f"with `sameday suite run --again {name}`"
    )


def _why(code: int, lines: list[str]) -> str:
    return "\n".join([ending(code), *lines])


def ending(code: int) -> str:
    """An exit code, or the signal in its place."""
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def last_lines(log: Path, begin: int = 0, most: int = LAST_LINES) -> list[str]:
    """The end of what a job wrote since `begin`, where its errors stand, without what torchrun adds about itself."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - 2**16))
        lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        own = next((i for i, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
        text = "\n".join((lines[:own] or lines)[-most:])
        return text[-LAST_CHARACTERS:].splitlines()
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sameday.suite.running.execute", description="One job of a suite.")
    parser.add_argument("suite", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("--gpus", help="numbers, with commas; empty: none. Without it: those of the environment")
    given = parser.parse_args(arguments)
    try:
        opened = open_suite(given.suite, given.out)
        if given.name not in opened.suite.jobs:
            raise BadInput(f"{given.name!r} is no job of {given.suite}; there are {', '.join(opened.suite.jobs)}")
        gpus = None if given.gpus is None else [int(each) for each in given.gpus.split(",") if each]
        return follow(opened, given.name) if node_of(opened.suite, given.name) else execute(opened, given.name, gpus)
    except BadInput as error:
        tell(f"error: {error}", sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
