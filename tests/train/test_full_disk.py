"""A disk that is full while a run saves or logs: a sentence with the bytes that are missing, a code of its own, the old
checkpoints as they were, and nothing half written. A limit on the size of files stands for the disk: the system
refuses a write under it as on a full disk, on every machine."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sets
from processes import assert_same_run, largest_file
from safetensors import SafetensorError
from typed import Said, sameday

from sameday.commands import launch
from sameday.record import checkpoint
from sameday.record.room import no_room, on_disk, room_for
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_DISK_FULL, RunStopped
from sameday.train import state
from sameday.train.watch import Watch

pytestmark = pytest.mark.usefixtures("own_signals")

RUN = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--set", "plan.save_steps=1", "--out")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = sets.write_set(tmp_path_factory.mktemp("full"), train=20)
    (folder / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(data={"path": "set", "val": 4})))
    assert sameday(folder, *RUN, "reference").code == 0
    return folder


def full_after(home: Path, run: str, step: int, size: int, monkeypatch: pytest.MonkeyPatch) -> Said:
    """A run whose disk is full from the record of this step on."""
    plain, limits = Watch.step, []

    def logged(self: Watch, good: Any) -> None:
        if good.step + 1 == step:
            limits.append(largest_file(size))
            limits[0].__enter__()
        plain(self, good)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "step", logged)
            return sameday(home, *RUN, run)
    finally:
        for limit in limits:
            limit.__exit__(None, None, None)


def hidden(run: Path) -> list[str]:
    return [path.name for path in run.rglob(".*") if path.name != ".lock"]


def test_while_a_checkpoint_is_saved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = home / "saving"
    said = full_after(home, run.name, 3, 8192, monkeypatch)
    assert said.code == EXIT_DISK_FULL and "Traceback" not in said.err
    sentence = re.fullmatch(
        r"no room for checkpoint step-000003 in saving: File too large\. It takes about ([\d,]+) bytes and ([\d,]+) "
        r"are free: a quota or a limit on files is in the way\. Make room and run again: it goes on from step 2\.\n",
        said.err,
    )
    assert sentence, said.err
    assert int(sentence[1].replace(",", "")) == checkpoint.size_on_disk(run / "checkpoints" / "step-000002")
    noted = json.loads((run / "stopped.json").read_text())
    assert (noted["code"], noted["why"]) == (EXIT_DISK_FULL, said.err.rstrip("\n"))
    kept = checkpoint.steps(run / "checkpoints")
    assert [step for step, _ in kept] == [1, 2] and not hidden(run)
    assert [checkpoint.fault(path) for _, path in kept] == [None, None]
    assert sameday(home, *RUN, run.name).code == 0
    assert_same_run(run, home / "reference")


def test_while_the_best_step_is_noted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before it is whole, and is what the run goes on from."""
    run, plain = home / "noting", state._tidy

    def tidy(plan: Any, folder: Any, now: Any) -> None:
        with largest_file(8) if now.best is not None else nullcontext():
            plain(plan, folder, now)

    with monkeypatch.context() as patch:
        patch.setattr(state, "_tidy", tidy)
        said = sameday(home, *RUN, run.name)
    step, newest = checkpoint.steps(run / "checkpoints")[-1]
    assert said.code == EXIT_DISK_FULL and checkpoint.fault(newest) is None
    assert re.fullmatch(
        r"no room for checkpoints/best\.json in noting: File too large\. It takes about \d+ bytes and [\d,]+ are free: "
        rf"a quota or a limit on files is in the way\. Make room and run again: it goes on from step {step}\.\n",
        said.err,
    ), said.err
    assert json.loads((run / "stopped.json").read_text())["why"] == said.err.rstrip("\n")
    again = sameday(home, *RUN, run.name)
    assert again.code == 0 and f"resumed from {newest.name}" in again.out
    assert_same_run(run, home / "reference")


def test_between_announcement_and_first_step(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = launch._announce

    def announce(*given: Any) -> None:
        with largest_file(1):
            plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_announce", announce)
        said = sameday(home, *RUN, "announced")
    assert said.code == EXIT_DISK_FULL and re.fullmatch(
        r"no room for skipped\.json in announced: File too large\. It takes about 3 bytes and [\d,]+ are free: "
        r"a quota or a limit on files is in the way\. Make room and run again\.\n",
        said.err,
    ), said.err
    noted = json.loads((home / "announced" / "stopped.json").read_text())
    assert (noted["code"], noted["why"]) == (EXIT_DISK_FULL, said.err.rstrip("\n")) and not hidden(home / "announced")


def test_while_a_step_is_logged(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a record, of which nothing stays."""
    run = home / "logging"
    lines = (home / "reference" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    size = len(b"".join(lines[:3])) + 40  # two steps and a validation; clocks may take a few digits more
    said = full_after(home, run.name, 3, size, monkeypatch)
    assert said.code == EXIT_DISK_FULL and "Traceback" not in said.err
    assert said.err.startswith("no room for the record of a step in logging: File too large. It takes about ")
    assert json.loads((run / "stopped.json").read_text())["code"] == EXIT_DISK_FULL
    written = (run / "metrics.jsonl").read_bytes()
    assert written.endswith(b"\n") and len(written.splitlines()) == 3 and not hidden(run)
    assert sameday(home, *RUN, run.name).code == 0
    assert_same_run(run, home / "reference")


CHARTS = """
import sys, threading, time
from pathlib import Path
from processes import largest_file
from sameday.record.board import Board
from sameday.spec.errors import RunStopped
board = Board(Path(sys.argv[1]), 1)
try:
    with largest_file(4096):
        for step in range(1, 1000):
            board.add("train", {"loss": 1.0}, step)
            time.sleep(0.001)
        board._writer.flush()
except RunStopped as stop:
    print(stop)
board.close()
def other():
    raise OSError(28, "of another thread")
thread = threading.Thread(target=other)
thread.start()
thread.join()
"""


def test_while_the_charts_thread_writes(tmp_path: Path) -> None:
    """The library's own traceback of it, which says nothing more, is not shown; that of any other thread is."""
    done = subprocess.run(
        [sys.executable, "-c", CHARTS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert re.fullmatch(
        rf"no room for a chart in {re.escape(str(tmp_path))}: File too large\. It takes about 100 bytes and [\d,]+ are "
        r"free: a quota or a limit on files is in the way\. Make room and run again\.\n",
        done.stdout,
    ), done.stdout + done.stderr
    assert done.stderr.count("Traceback") == 1 and "of another thread" in done.stderr, done.stderr


def test_before_a_run_has_begun(home: Path) -> None:
    with largest_file(64):
        said = sameday(home, *RUN, "unbegun")
    assert said.code == EXIT_DISK_FULL, said.err
    assert said.err.startswith("no room for a run's files in unbegun: File too large.")
    assert not (home / "unbegun").exists()


def test_where_no_run_stops(home: Path, tmp_path: Path) -> None:
    """Whatever command meets it has the code and a sentence."""
    with largest_file(1000):
        said = sameday(home, "report", "reference", "-o", str(tmp_path / "report.html"))
    assert said.code == EXIT_DISK_FULL and re.fullmatch(
        rf"no room for report\.html in {re.escape(str(tmp_path))}: File too large\. It takes about [\d,]+ bytes and "
        r"[\d,]+ are free: a quota or a limit on files is in the way\. Make room and run again\.\n",
        said.err,
    ), said.err
    assert not list(tmp_path.iterdir())


def test_which_errors_are_a_full_disk() -> None:
    assert no_room(OSError(28, "x")) == no_room(SafetensorError("I/O error: x (os error 28)")) == os.strerror(28)
    assert no_room(OSError(122, "quota")) and no_room(OSError(27, "large"))
    assert (
        no_room(OSError(13, "denied")) is no_room(SafetensorError("x (os error 13)")) is no_room(ValueError()) is None
    )


@pytest.mark.parametrize(
    ("code", "free", "said"),
    [
        (errno.ENOSPC, 999, "1 bytes are missing"),
        (
            errno.ENOSPC,
            1000,
            "the disk gave no more, although so many count as free; a quota or its number of files may be used up",
        ),
        (errno.EDQUOT, 1000, "a quota or a limit on files is in the way"),
        (errno.EFBIG, 1000, "a quota or a limit on files is in the way"),
    ],
)
def test_what_is_missing_is_said(
    code: int, free: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: there)
    about = rf"1,000 bytes and {free:,} are free: {said}\.$"
    with pytest.raises(RunStopped, match=about), room_for("x", tmp_path, 1000):
        raise OSError(code, os.strerror(code))


def test_files_take_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    for name, size in (("one", 1), ("inner/two", 4096), ("three", 4097), ("none", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    status = os.statvfs(tmp_path)
    for block, taken in ((4096, (1 + 1 + 2) + 2), (2**20, 3 + 2)):
        fields = SimpleNamespace(f_frsize=block, f_bavail=status.f_bavail)
        monkeypatch.setattr(os, "statvfs", lambda _, given=fields: given)
        # A network's file system, whose blocks are those of its transfers, takes less for a small file.
        assert checkpoint.size_on_disk(tmp_path) == taken * min(block, 2**16)
    assert on_disk(tmp_path, [2**20]) == 2**20 + 2**16


FULL_DISK = """
import os, sys
from pathlib import Path
from sameday.record.folder import RunFolder
from sameday.spec.errors import RunStopped
from sameday.spec.load import load_plan, load_recipe
disk = Path(sys.argv[1])
def fill():
    with open(disk / "filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
def stop(act):
    try:
        act()
    except RunStopped as stop:
        print(stop)
        return stop
def show():
    print((disk / "run" / "stopped.json").read_text().replace(chr(10), ""))
asked = (disk / "run", load_recipe(Path(sys.argv[2])), load_plan(None), disk)
run = RunFolder.open(*asked)
fill()
stopped = stop(lambda: run.write_json("choices.json", {"device": "x" * 4000}))
run.stopped(str(stopped), stopped.code)
show()
run.close()
fill()
(disk / "run" / "metrics.jsonl").write_text("")
stop(lambda: RunFolder.open(*asked))
show()
print(sorted(path.name for path in (disk / "run").iterdir()))
(disk / "filler").unlink()
RunFolder.open(*asked).close()
print(sorted(path.name for path in (disk / "run").iterdir()))
"""


def test_a_disk_without_a_free_byte(home: Path, tmp_path: Path) -> None:
    """What ended a run is noted there all the same, and when it cannot go on there; nothing else is left."""
    there = ["environment.json", "metrics.jsonl", "plan.yaml", "recipe.yaml"]
    lines = on_a_small_disk(tmp_path, FULL_DISK, str(home / "recipe.yaml"))
    disk = re.escape(f"{tmp_path}/run")
    first = (
        rf"no room for choices\.json in {disk}: No space left on device\. It takes about (4,\d+) bytes and 0 are free: "
        r"\1 bytes are missing\. Make room and run again\."
    )
    again = (
        rf"no room for a run's files in {disk}: No space left on device\. It takes about 16,384 bytes and 0 are free: "
        r"16,384 bytes are missing\. Make room and run again\."
    )
    for expected, sentence, noted in ((first, *lines[:2]), (again, *lines[2:4])):
        assert re.fullmatch(expected, sentence), lines
        assert (json.loads(noted)["why"], json.loads(noted)["code"]) == (sentence, EXIT_DISK_FULL)
    assert lines[4:] == [str(sorted([*there, "stopped.json"])), str(there)]


SMALL_DISK = """
import sys
from pathlib import Path
from sameday.spec.errors import RunStopped
from sameday.record.room import room_for
from sameday.record import checkpoint
disk = Path(sys.argv[1])
checkpoint.write(disk, "step-1", lambda folder: folder.joinpath("weights").write_bytes(bytes(40000)), {})
try:
    with room_for("checkpoint step-2", disk, 90000):
        checkpoint.write(disk, "step-2", lambda folder: folder.joinpath("weights").write_bytes(bytes(90000)), {})
except RunStopped as stop:
    print(stop)
print(checkpoint.fault(disk / "step-1"), sorted(path.name for path in disk.iterdir()))
"""


SMALL_FILES = """
import sys
from pathlib import Path
from types import SimpleNamespace
from sameday.record import checkpoint
from sameday.record.folder import RunFolder
from sameday.spec.errors import RunStopped
from sameday.spec.load import load_plan, load_recipe
from sameday.train import state
disk = Path(sys.argv[1])
def save(folder):
    for i in range(10):
        folder.joinpath(f"small-{i}").write_bytes(bytes(100))
run = RunFolder.open(disk / "run", load_recipe(Path(sys.argv[2])), load_plan(None), disk)
task = SimpleNamespace(save=save, digests=dict, bytes_beside=lambda: 1000)
steps = SimpleNamespace(optimizer=None, trained={})
state.optimizer_tensors = lambda *_: {}
now = state.LoopState(step=1)
try:
    for now.step in (1, 2, 3):
        state.save(run.recipe, run.plan, run, task, steps, now)
except RunStopped as stop:
    print(stop)
print([checkpoint.size(path) for _, path in checkpoint.steps(run.checkpoints)])
"""


def test_small_files_fill_a_disk_too(home: Path, tmp_path: Path) -> None:
    """What is missing is named where the bytes in the files alone would fit; of a first checkpoint too."""
    for size, kept in ((104, 1), (48, 0)):
        (disk := tmp_path / str(size)).mkdir()
        sentence, left = on_a_small_disk(disk, SMALL_FILES, str(home / "recipe.yaml"), size=size)
        then = f"Make room and run again: it goes on from step {kept}." if kept else "Make room and run again."
        found = re.fullmatch(
            rf"no room for checkpoint step-00000{kept + 1} in {re.escape(str(disk))}/run: No space left on device\. It "
            rf"takes about ([\d,]+) bytes and ([\d,]+) are free: ([\d,]+) bytes are missing\. {re.escape(then)}",
            sentence,
        )
        assert found, sentence
        takes, free, missing = (int(text.replace(",", "")) for text in found.groups())
        assert takes - free == missing and takes % 4096 == free % 4096 == 0
        assert len(held := json.loads(left)) == kept and all(each < free for each in held), "the bytes would fit"


def on_a_small_disk(tmp_path: Path, script: str, *given: str, size: int = 128) -> list[str]:
    """What a script prints with a real disk in this folder, in memory, where this user may mount one."""
    unshare = shutil.which("unshare")
    mount = ["sh", "-c", f'mount -t tmpfs -o size={size}k none "$0" && exec "$@"', str(tmp_path)]
    if unshare is None or subprocess.run([unshare, "-rm", *mount, "true"], capture_output=True).returncode:
        pytest.skip("no disk can be mounted without being root here")
    command = [unshare, "-rm", *mount, sys.executable, "-c", script, str(tmp_path), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_small_disk(tmp_path: Path) -> None:
    sentence, left = on_a_small_disk(tmp_path, SMALL_DISK)
    assert left == "None ['step-1']", "the old checkpoint is whole, and nothing is left of the new one"
    found = re.fullmatch(
        rf"no room for checkpoint step-2 in {re.escape(str(tmp_path))}: No space left on device\. It takes about "
        r"90,000 bytes and ([\d,]+) are free: ([\d,]+) bytes are missing\.",
        sentence,
    )
    assert found, sentence
    free, missing = (int(text.replace(",", "")) for text in found.groups())
    assert free + missing == 90000 and 0 < free < 128 * 1024 - 40000
