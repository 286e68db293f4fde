"""One process at a time in a folder: who has it is named, and who is dead does not have it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from sameday.record.lock import LOCK, Lock
from sameday.spec.errors import BadInput


def in_use(folder: Path, pid: int) -> str:
    return f"{folder}: in use by process {pid} on {socket.gethostname()}; wait for it, stop it, or choose another --out"


def refusal(folder: Path) -> str:
    with pytest.raises(BadInput) as caught:
        Lock(folder)
    return str(caught.value)


def test_a_lock_is_held_until_it_is_released_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "answers/adapter-test"
    lock = Lock(folder)
    assert refusal(folder) == in_use(folder, os.getpid())
    lock.release()
    lock.release()
    assert not list(tmp_path.iterdir()), "it was made for the lock alone"
    lock = Lock(folder)
    (folder / "predictions.jsonl").touch()
    lock.release()
    assert [path.name for path in folder.iterdir()] == ["predictions.jsonl"]


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    Lock(tmp_path).release()
    assert tmp_path.is_dir() and not list(tmp_path.iterdir())


def test_another_process_has_it_until_it_dies(tmp_path: Path) -> None:
    said, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Lock(tmp_path)
            os.write(told, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    try:
        assert os.read(said, 1) == b"x"
        assert refusal(tmp_path) == in_use(tmp_path, child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(said)
    assert (tmp_path / LOCK).exists(), "what a kill leaves"
    Lock(tmp_path).release()


def test_a_file_that_its_owner_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who opened it before, and got it after, would be alone with a file that nobody else sees."""
    flock, removed = fcntl.flock, iter([True, False])

    def late(descriptor: int, how: int) -> Any:
        if next(removed):
            (tmp_path / LOCK).unlink()
        return flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = Lock(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / LOCK).exists() and refusal(tmp_path) == in_use(tmp_path, os.getpid())
    lock.release()


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file/answers") == (
        f"{tmp_path}/file/answers: cannot be written: Not a directory; choose another --out"
    )


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.warns(
        UserWarning, match=r"cannot be locked \(Function not implemented\): start no second process here"
    ):
        Lock(tmp_path).release()
