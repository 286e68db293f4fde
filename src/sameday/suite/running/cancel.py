"""`sameday suite cancel`: jobs that run are asked to stop, those that wait are not started."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from sameday.spec.errors import BadInput
from sameday.spec.words import tell
from sameday.suite.jobs import OpenSuite
from sameday.suite.running.slurm import cancel_queued
from sameday.suite.state import ask_to_stop


def cancel(opened: OpenSuite, names: Sequence[str] = (), say: Any = tell) -> None:
    """These jobs, or all that have not ended, those included that run and are not in the file any more. `suite run`
    takes them up again."""
    suite, folder = opened.suite, opened.folder
    gone = folder.gone(suite)
    unknown = [name for name in names if name not in suite.jobs and name not in gone]
    if unknown:
        raise BadInput(f"{', '.join(unknown)}: no job of this suite; there are {', '.join(suite.jobs)}")
    if not (folder.path / "jobs").exists():
        raise BadInput(f"{folder.path}: nothing was run here; --out names another folder")
    if not os.access(folder.path / "jobs", os.W_OK):
        raise BadInput(f"{folder.path}: cannot be written by you; whoever runs the suite can cancel its jobs")
    theirs = cancel_queued(opened, names, say)
    # Those that wait first: none of them starts when a running one ends.
    every = {*suite.jobs, *filter(folder.held, gone)}
    chosen = sorted((set(names) or every) - theirs, key=lambda name: (folder.held(name), name))
    for name in chosen:
        for _ in range(5):  # whoever looks at a lock has it for a moment
            with folder.hold(name) as mine:
                if mine:
                    state, host = folder.seen(name).state, folder.read(name).host
                    if state in ("waiting", "queued", "blocked", "stopped", "interrupted"):
                        folder.change(name, state="cancelled", why="")
                        say(f"{name}: cancelled")
                    elif state == "running" and names:  # the user knows about that machine
                        folder.change(name, state="cancelled", why="")
                        say(f"{name}: cancelled; nobody holds it, and it began on {host}")
                    elif state == "running":
                        say(f"{name}: began on {host}; if that machine is gone, `suite cancel` with its name frees it")
                    elif names:
                        say(f"{name}: is {state} already")
                    break
            if ask_to_stop(folder, name):
                say(f"{name}: asked to stop")
                break
            time.sleep(0.1)
        else:
            say(f"{name}: runs on {folder.read(name).host}, and can be stopped there")
