"""A forked process is to whoever started it what one started from nothing is, and nothing is forked that could tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is forked where there is a GPU")

SCRIPT = """\
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["SAMEDAY_SAID"], os.getsid(0) == os.getpid(), sys.path[0], flush=True)
print("torch" in sys.modules, "unittest" in sys.argv, input(), file=sys.stderr, flush=True)
if sys.argv[1] == "wait":
    input()
raise SystemExit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, word: str, options: tuple[str, ...] = ("-u",), **more: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"SAMEDAY_SAID": "this"} | more
    command = [sys.executable, *options, str(script), word]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=script.parent, env=environment, text=True, start_new_session=True, **pipes)


def test_words_streams_folder_environment_and_code(script: Path) -> None:
    """As of the same script in a process from nothing, but for what is loaded before it."""
    for more, loaded in (({}, "True"), ({"ANOTHER": "1"}, "False")):
        process = start(script, "one", **more)
        out, error = process.communicate("typed\n", timeout=120)
        assert out == f"['one'] {script.parent} this True {script.parent}\n"
        assert (error, process.returncode) == (f"{loaded} False typed\n", 7)


def test_its_id_is_its_own_until_its_end_is_known(script: Path) -> None:
    process = start(script, "wait")
    print("typed", file=process.stdin, flush=True)
    assert process.stdout and process.stderr and "this" in process.stdout.readline() and process.stderr.readline()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.read() == ""  # it has ended
    os.killpg(process.pid, 0)
    assert process.wait(60) == process.poll() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.communicate()


def test_another_process_may_have_the_one_that_is_forked(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(script, "one").communicate("typed\n", timeout=120)
    monkeypatch.setenv(forks.SHARED, forks._server["address"])
    monkeypatch.setattr(subprocess, "Popen", subprocess.Popen)
    monkeypatch.setattr(forks, "_server", own := {})
    forks.use()
    assert start(script, "one").communicate("typed\n", timeout=120)[1] == "True False typed\n"
    assert "process" not in own, "none was started for it"


HOOK = """\
import sys, tempfile
print("hooked", *sys.orig_argv[-2:], tempfile.gettempdir(), flush=True)
"""


def test_what_python_loads_at_its_start_is_loaded(script: Path, tmp_path: Path) -> None:
    """In both kinds of process, before the script."""
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "sitecustomize.py").write_text(HOOK)
    folders = os.pathsep.join(filter(None, (str(tmp_path / "added"), os.environ.get("PYTHONPATH"))))
    for more, loaded in (({}, "True"), ({"ANOTHER": "1"}, "False")):
        process = start(script, "one", PYTHONPATH=folders, TMPDIR=str(tmp_path), **more)
        out, error = process.communicate("typed\n", timeout=120)
        assert out.splitlines()[0] == f"hooked {script} one {tmp_path}"
        assert out.splitlines()[1].startswith("['one'] ") and error == f"{loaded} False typed\n"


ENDS = """\
import atexit, sys, threading
sys.stdout = open(1, "w", closefd=False)  # buffered, whatever the environment says
atexit.register(print, "at exit")
threading.Timer(0.1, print, ["from a thread"]).start()
print("unflushed", end=" ")
END
"""
NOBODY_READS = "import os; ours, theirs = os.pipe(); os.dup2(theirs, 1); os.close(ours); os.close(theirs)"


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('told')", 1, "told"),
        ("raise ValueError(7)", 1, "ValueError: 7"),
        (NOBODY_READS, 120, "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_it_ends_as_the_interpreter_does(tmp_path: Path, end: str, code: int, error: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS.replace("END", end))
    for more in ({}, {"ANOTHER": "1"}):
        process = start(script, "one", (), **more)
        out, told = process.communicate(timeout=120)
        assert process.returncode == code
        assert out == ("" if code == 120 else "unflushed from a thread\nat exit\n")
        assert told.splitlines()[-1:] == ([error] if error else [])


@pytest.mark.parametrize(
    ("words", "more", "forked"),
    [
        (("-m", "sameday", "train"), {}, True),
        (("-u", "-m", "sameday.verify.arm", "job.json"), {"env": {"RANK": "1", "COLUMNS": "200"}}, True),
        (("-m", "sameday", "train"), {"env": {"PYTHONPATH": "added"}}, True),
        (("-m", "sameday", "train"), {"env": {"TMPDIR": "/elsewhere", "TERM": "xterm"}}, True),
        (("-m", "sameday", "train"), {"env": {"OMP_NUM_THREADS": "2"}}, False),
        (("-m", "sameday", "train"), {"preexec_fn": print}, False),
        (("-m", "sameday", "train"), {"pass_fds": (7,)}, True),
        (("-m", "pytest"), {}, False),
        (("-c", "print(1)"), {}, False),
        ((), {}, False),
    ],
)
def test_what_may_notice_is_started_from_nothing(
    tmp_path: Path, words: tuple[str, ...], more: dict[str, Any], forked: bool
) -> None:
    known = forks._server["environment"]
    environment = known | more.get("env", {})
    if "PYTHONPATH" in more.get("env", {}):
        added = str(tmp_path / environment["PYTHONPATH"])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (added, known.get("PYTHONPATH"))))
    given = {"args": (sys.executable, *words), "cwd": None, "preexec_fn": None, "pass_fds": ()}
    assert (forks._request(given | more | {"env": environment}) is not None) == forked
    assert forks._request(given | more | {"env": environment, "args": ("/bin/python", *words)}) is None
