"""What became of each job, in files that survive whoever wrote them. OUT/jobs/NAME has state.json, replaced whole;
log.txt, to which every attempt appends; and lock, held by the process that runs the job for as long as it lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sameday.record.stopped import STOPPED
from sameday.spec.errors import EXIT_STOPPED
from sameday.spec.suite import NAME, Suite
from sameday.spec.writing import write_text

State = Literal["waiting", "queued", "running", "interrupted", "stopped", "done", "failed", "blocked", "cancelled"]
"""waiting: for other jobs or a GPU. queued: the scheduler has it. interrupted: it was running, and nobody holds it any
more. stopped: it saved itself and will go on. blocked: a job that it needs failed or was cancelled."""
ENDED: tuple[State, ...] = ("done", "failed", "blocked", "cancelled")
GOES_ON = "asked to stop; it goes on from there"
SCRIPT = "job.sh"
"""What the scheduler was given, in a job's folder or in OUT."""
QUIET = 600.0
"""Seconds without a line after which a job that nobody holds is not taken to run on another machine any more."""


@dataclass(frozen=True)
class JobState:
    """`asked` is the command's fingerprint: a job that is asked for otherwise is another one. Times are seconds since
    1970; `spent` adds up all attempts, `why` is a sentence."""

    state: State = "waiting"
    asked: str = ""
    attempt: int = 0
    started: float | None = None
    ended: float | None = None
    spent: float = 0.0
    code: int | None = None
    why: str = ""
    pid: int | None = None
    host: str | None = None
    gpus: list[int] = field(default_factory=list)
    slurm: str | None = None
    """The scheduler's number."""
    made: bool = False
    """Whether it left a result when it was done: one that is not there any more was removed since."""

    def __post_init__(self) -> None:
        """A file may say anything; what reads it counts on numbers being numbers."""
        texts = [self.asked, self.why, *(each for each in (self.host, self.slurm) if each is not None)]
        times = [self.spent, *(each for each in (self.started, self.ended) if each is not None)]
        whole = [self.attempt, *self.gpus, *(each for each in (self.code, self.pid) if each is not None)]
        sound = (
            isinstance(self.made, bool)
            and all(isinstance(each, str) for each in texts)
            and all(type(each) is int for each in whole)
        )
        if not sound or not all(type(each) in (int, float) and abs(each) < 1e12 for each in times):
            raise TypeError("is no state of a job")


@dataclass(frozen=True)
class SuiteFolder:
    """OUT of a suite."""

    path: Path

    def job(self, name: str) -> Path:
        return self.path / "jobs" / name

    def run(self, name: str) -> Path:
        """The run folder of a training job; what an eval or tune job writes is beside it."""
        return self.job(name) / "run"

    def log(self, name: str) -> Path:
        return self.job(name) / "log.txt"

    def read(self, name: str) -> JobState:
        """As it was written; a file that is damaged or not there is a job that has not begun."""
        return read_state(self.job(name))

    def write(self, name: str, state: JobState) -> JobState:
        write_text(self.job(name) / "state.json", json.dumps(asdict(state), indent=1) + "\n")
        return state

    def change(self, name: str, **values: Any) -> JobState:
        return self.write(name, replace(self.read(name), **values))

    def lock(self, name: str) -> Path:
        return self.job(name) / "lock"

    def gpu_lock(self, gpu: int) -> Path:
        """Held by whoever computes on this GPU: two runners could give it away twice."""
        return self.path / "gpus" / f"{gpu}.lock"

    def busy_gpus(self) -> set[int]:
        return {int(path.stem) for path in (self.path / "gpus").glob("*.lock") if path.stem.isdigit() and held(path)}

    def begin(self) -> None:
        """Note when it was run first, from which its deadline counts."""
        if self.began() is None:
            write_text(self.path / "begun.json", json.dumps({"time": time.time()}) + "\n")

    def began(self) -> float | None:
        try:
            return float(json.loads((self.path / "begun.json").read_text(encoding="utf-8"))["time"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def gone(self, suite: Suite) -> list[str]:
        """Jobs that were run here and are not in the suite's file any more: removed, or called otherwise."""
        names = (path.parent.name for path in (self.path / "jobs").glob("*/state.json"))
        return sorted(name for name in names if name not in suite.jobs and NAME.fullmatch(name))

    def held(self, name: str) -> bool:
        """Whether some process on a machine that shares the folder runs this job."""
        return held(self.lock(name))

    def seen(self, name: str) -> JobState:
        """As it is now: a job whose process died without a word was interrupted, also on a machine that is gone or is
        called otherwise since. One that was left alone by whoever ran it, and saved itself, was stopped."""
        state = self.read(name)
        # An allocation that was moved to another node is the only one that could have it.
        here = state.host == socket.gethostname() or state.slurm == os.environ.get("SLURM_JOB_ID", "")
        if state.state != "running":
            return state
        asked = state.slurm is not None and self._submitted(name)  # then the queue is asked
        if (here or (not asked and self._quiet(name))) and not self.held(name):
            state = self.read(name)  # it may have ended between the two looks
            if state.state == "running" and code_told(self.run(name)) == EXIT_STOPPED:
                return replace(state, state="stopped", why=GOES_ON)
            return replace(state, state="interrupted") if state.state == "running" else state
        return state

    def _submitted(self, name: str) -> bool:
        """Whether the scheduler was given this job or the whole suite, and it was not just run in an allocation."""
        return any((each / SCRIPT).exists() for each in (self.job(name), self.path))

    def _quiet(self, name: str) -> bool:
        """Whether nobody has written about a job for a while: a lock alone does not tell, since not every file system
        shares locks between machines."""
        files = (self.job(name) / "state.json", self.log(name), self.run(name) / "metrics.jsonl")
        return time.time() - max((path.stat().st_mtime for path in files if path.exists()), default=0.0) > QUIET

    def states(self, suite: Suite, seen: Callable[[str], JobState] | None = None) -> dict[str, JobState]:
        """Of all jobs, each as it is `seen`. One that needs a job which failed, was cancelled or is blocked is blocked,
        with that name."""
        states: dict[str, JobState] = {}
        for name in suite.order():
            state = (seen or self.seen)(name)
            bad = [each for each in suite.needs(name) if states[each].state in ("failed", "blocked", "cancelled")]
            if bad and state.state in ("waiting", "queued", "blocked"):
                state = replace(state, state="blocked", why=f"{bad[0]} is {states[bad[0]].state}")
            elif state.state == "blocked":
                state = replace(state, state="waiting", why="")
            states[name] = state
        return {name: states[name] for name in suite.jobs}

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[bool]:
        """One owner per job: whether it is now this process. The lock goes with the process, and with what it starts
        where that keeps the descriptor."""
        descriptor = take(self.lock(name))
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)


def read_state(job: Path) -> JobState:
    """Of a job's folder."""
    try:
        values = json.loads((job / "state.json").read_text(encoding="utf-8"))
        known = {key: value for key, value in values.items() if key in JobState.__dataclass_fields__}
        return JobState(**known) if known.get("state") in get_args(State) else JobState()
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return JobState()


def code_told(run: Path) -> int | None:
    """What a run says itself about its end before the last step."""
    try:
        return int(json.loads((run / STOPPED).read_text(encoding="utf-8"))["code"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def take(path: Path) -> int | None:
    """The lock's descriptor; None while another has it. It is held until the last process that has the descriptor is
    gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        if _open_elsewhere(path):
            os.close(descriptor)
            return None
    return descriptor


def held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)  # who looks need not be allowed to write
    except FileNotFoundError:
        return False
    try:
        # Shared: two that only look do not hide the lock from each other, nor look as if they held it.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return _open_elsewhere(path)
    finally:
        os.close(descriptor)


def _open_elsewhere(path: Path) -> bool:
    """In place of a lock, where a network file system has none: as good as one on this machine alone."""
    return any(pid != os.getpid() for pid in holders(path))


def holders(lock: Path) -> list[int]:
    """The processes of this machine and user that have the lock's file open."""
    target, pids = os.path.realpath(lock), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            if any(_link(f"/proc/{pid}/fd/{each}") == target for each in os.listdir(f"/proc/{pid}/fd")):
                pids.append(int(pid))
    return pids


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed since
        return ""


def ask_to_stop(folder: SuiteFolder, name: str) -> bool:
    """Whether some process was there to be asked. The one that runs the job passes it on; where it was killed, the job
    itself is asked, which leads a session, and not the workers that it has."""
    here = [pid for pid in holders(folder.lock(name)) if pid != os.getpid()]
    first = folder.read(name).pid
    asked = False
    for pid in [first] if first in here else here:
        with contextlib.suppress(ProcessLookupError):
            if pid == first or os.getsid(pid) == pid:
                os.kill(pid, signal.SIGTERM)
                asked = True
    return asked


def begin(folder: SuiteFolder, name: str, asked: str, gpus: list[int]) -> JobState:
    before = folder.read(name)
    now = {"pid": os.getpid(), "host": socket.gethostname(), "gpus": gpus, "started": time.time(), "ended": None}
    now["slurm"] = os.environ.get("SLURM_JOB_ID")
    fresh = {"state": "running", "asked": asked, "attempt": before.attempt + 1, "code": None, "why": ""}
    return folder.write(name, replace(before, **now, **fresh))  # type: ignore[arg-type]
