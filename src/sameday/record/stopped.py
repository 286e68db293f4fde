"""Why a run ended before its last step, in its folder. A full disk may be the reason: room for it is kept from the
beginning."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from sameday.spec.writing import write_text

STOPPED = "stopped.json"
"""Gone when the run goes on."""
_ROOM = ".stopped.tmp"
"""Becomes that file. What a killed run leaves of it is removed with its other remains."""
_BYTES = 2**12
"""A block of a disk; what is said is shorter."""


def keep_room(run: Path) -> None:
    write_text(run / _ROOM, " " * _BYTES)


def give_room_back(run: Path) -> None:
    with contextlib.suppress(OSError):
        (run / _ROOM).unlink()


def note_stopped(run: Path, why: str, code: int) -> None:
    now, room = datetime.now(UTC).isoformat(timespec="seconds"), run / _ROOM
    text = json.dumps({"why": why, "code": code, "time": now}, indent=2) + "\n"
    with contextlib.suppress(OSError):
        if not room.exists():
            write_text(run / STOPPED, text)
            return
        with open(room, "r+b") as file:  # over what is there: its blocks are taken already
            file.write(text.encode())
            file.truncate()
            os.fsync(file.fileno())
        os.replace(room, run / STOPPED)
