"""Standard output or standard error that is lost while a command runs, and signals that come while it leaves: neither
changes what a run keeps or the code that it ends with. Real processes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sets
from processes import LIMIT, last_step, records, weights
from worlds import write_world

from sameday.record import checkpoint
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_BAD_INPUT, EXIT_DISK_FULL, EXIT_STOPPED

WHOLE = "from sameday.cli import main; main()"
"""A process that is started from nothing, and taken apart at its end."""
Process = subprocess.Popen[str]
SETS = ("plan.device=cpu", "plan.log_steps=1", "plan.workers=1")
RUN = ("train", "recipe.yaml", *(word for each in SETS for word in ("--set", each)), "--out")
LOST = "{} can no longer be written: {}; the command goes on without it\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, and a run of them that wrote all it had to say."""
    folder = sets.write_set(tmp_path_factory.mktemp("lost"), train=20)
    (folder / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(data={"path": "set", "val": 4})))
    assert ended(folder, *RUN, "reference") == (0, "")
    return folder


def begun(home: Path, *words: str, code: str = "", out: int = subprocess.PIPE, err: int = subprocess.PIPE) -> Process:
    program = ("-c", code) if code else ("-m", "sameday")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, *words]
    return subprocess.Popen(command, cwd=home, stdout=out, stderr=err, text=True, env=environment)


def ended(
    home: Path, *words: str, code: str = "", out: int = subprocess.DEVNULL, err: int = subprocess.PIPE
) -> tuple[int, str]:
    """The exit code, and what was written to the stream that is a pipe."""
    process = begun(home, *words, code=code, out=out, err=err)
    said = "".join(text or "" for text in process.communicate(timeout=LIMIT))
    return process.returncode, said


def closed_pipe() -> int:
    """What nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def gone_terminal() -> int:
    user, program = os.openpty()
    os.close(user)
    return program


WAYS = pytest.mark.parametrize(
    ("lose", "why"),
    [
        (closed_pipe, "Broken pipe"),
        (full_disk, "No space left on device"),
        (gone_terminal, "Input/output error"),
    ],
    ids=["closed pipe", "full disk", "gone terminal"],
)


@WAYS
def test_a_run_goes_on_without_standard_output(home: Path, lose: Callable[[], int], why: str) -> None:
    """Its data worker included, and says so once."""
    stream = lose()
    assert ended(home, *RUN, lose.__name__, out=stream) == (0, LOST.format("standard output", why))
    os.close(stream)
    assert weights(home / lose.__name__) == weights(home / "reference")
    assert records(home / lose.__name__) == records(home / "reference")


def test_a_run_goes_on_without_standard_error(home: Path) -> None:
    stream = full_disk()
    code, said = ended(home, *RUN, "error", "--stop-after", "2", out=subprocess.PIPE, err=stream)
    os.close(stream)
    assert code == EXIT_STOPPED, said
    assert said.endswith(LOST.format("standard error", "No space left on device")), said
    assert json.loads((home / "error" / "stopped.json").read_text())["code"] == EXIT_STOPPED


def test_a_run_goes_on_without_both(home: Path) -> None:
    stream = closed_pipe()
    words = (*RUN, "both", "--stop-after", "2")
    assert ended(home, *words, code=WHOLE, out=stream, err=stream) == (EXIT_STOPPED, "")
    assert ended(home, "train", "nowhere.yaml", out=stream, err=stream) == (EXIT_BAD_INPUT, "")
    os.close(stream)
    assert json.loads((home / "both" / "stopped.json").read_text())["code"] == EXIT_STOPPED


CLOSED = """
import os, sys
for number in (1, 2):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-c", "from sameday.cli import main; main()", *sys.argv[1:]])
"""


def test_a_run_that_was_started_without_streams(home: Path) -> None:
    """As with `>&- 2>&-`."""
    process = begun(home, *RUN, "without", code=CLOSED)
    assert process.communicate(timeout=LIMIT) == ("", "") and process.returncode == 0
    assert weights(home / "without") == weights(home / "reference")


@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "nohup"])
def test_a_terminal_that_is_closed(home: Path, ignored: bool) -> None:
    """It asks a run to stop, as a lost connection does, and under `nohup` nothing happens. Neither run can say so."""
    run = home / f"terminal-{ignored}"
    words = (*RUN, run.name, "--set", f"recipe.num_epochs={12 if ignored else 100_000}")
    user, program = os.openpty()

    def begin() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "sameday", *words],
        cwd=home,
        stdin=program,
        stdout=program,
        stderr=program,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=begin,
    )
    os.close(program)
    said = b""
    while last_step(run) < 2:
        assert process.poll() is None, said.decode()
        said += os.read(user, 1 << 16) if select.select([user], [], [], 0.02)[0] else b""
    os.close(user)
    if ignored:
        assert process.wait(LIMIT) == 0 and last_step(run) == 24
    else:
        assert process.wait(LIMIT) == EXIT_STOPPED
        ended = json.loads((run / "stopped.json").read_text())
        saved, _ = checkpoint.steps(run / "checkpoints")[-1]
        assert ended["why"] == f"asked to stop: step {saved} of 200000 is saved; run again to go on"
        assert saved == last_step(run)


def test_a_log_goes_on_once_its_disk_has_room(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    code = (
        "import resource; from sameday.hardware import screen; screen.guard_streams(); screen.go_on_without_output()\n"
        "for size, line in ((100, 'first'), (6, 'second'), (6, 'third'), (100, 'fourth')):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)); print(line, flush=True)"
    )
    with (tmp_path / "log").open("w") as log:
        process = begun(tmp_path, code=code, out=log.fileno())
        assert process.communicate(timeout=LIMIT)[1] == LOST.format("standard output", "File too large")
    assert process.returncode == 0 and (tmp_path / "log").read_text() == "first\nfourth\n"


def test_a_command_that_only_prints_ends_with_its_output(tmp_path: Path) -> None:
    """As with `sameday data train.jsonl | head -1`: quietly; on a full disk with a sentence."""
    write_world(tmp_path, 3, (2, 2), hard=False)
    words = ("data", "train.jsonl", "--image-root", "images")
    code, said = ended(tmp_path, *words, out=closed_pipe())
    assert (code, "Traceback" in said, "standard output" in said, "ignored" in said) == (1, False, False, False), said
    code, said = ended(tmp_path, *words, out=full_disk())
    assert code == EXIT_DISK_FULL, said
    sentence = "no room for standard output: No space left on device. Make room and run again."
    assert said.splitlines()[-1] == sentence


def test_help_that_nobody_reads_to_its_end(tmp_path: Path) -> None:
    assert ended(tmp_path, "train", "--help", code=WHOLE, out=closed_pipe()) == (1, "")


LEAVING = """
import os, sys, time
class Last:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"leaving\\n")
        sleep(float(os.environ.get("SECONDS_TO_LEAVE", 60)))
last = Last()
from sameday.cli import main
main()
"""
"""A process that takes long to leave: Python has given up its handlers of signals by then."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2])
def test_a_second_signal_ends_a_process_that_hangs_as_it_leaves(tmp_path: Path, number: int) -> None:
    process = begun(tmp_path, "--help", code=LEAVING)
    assert process.stdout is not None and any(line == "leaving\n" for line in process.stdout)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(number)
    assert process.wait(LIMIT) == -number
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_what_a_system_repeats_does_not_end_a_process_that_leaves(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDS_TO_LEAVE", "0.5")
    process = begun(tmp_path, "--help", code=LEAVING)
    assert process.stdout is not None and any(line == "leaving\n" for line in process.stdout)
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.05)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("stop", "code"), [((), 0), pytest.param(("--stop-after", "2"), EXIT_STOPPED, marks=pytest.mark.soak)]
)
def test_a_signal_while_a_run_leaves(
    home: Path, stop: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is finished, or stopped, and saved: the code says so."""
    monkeypatch.setenv("SECONDS_TO_LEAVE", "0.5")
    process = begun(home, *RUN, f"leaving-{code}", *stop, code=LEAVING)
    assert process.stdout is not None and any(line == "leaving\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT)
    assert process.returncode == code
