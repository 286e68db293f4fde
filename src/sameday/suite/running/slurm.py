"""`sameday suite run --slurm`: one sbatch for each job that is missing. The scheduler holds the graph, so that nothing
here has to stay alive; what became of a job is in its files, and what waits is in squeue. No accounting is needed.

A job's name in the queue is made of OUT and the job: one that is there is not submitted again."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameday.spec.errors import EXIT_STOPPED, BadInput
from sameday.spec.words import tell
from sameday.spec.writing import write_text
from sameday.suite.jobs import OpenSuite
from sameday.suite.running.execute import last_lines
from sameday.suite.running.local import after, check, only_runner, put_aside, take_up
from sameday.suite.running.script import WHOLE, job_name, log_path, options, script
from sameday.suite.state import ENDED, GOES_ON, SCRIPT, JobState, code_told

OWN = "SLURM_JOB_ID"
NEVER = "DependencyNeverSatisfied"
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING", "SUSPENDED", "STOPPED")
ENDING = "COMPLETING"
PATIENCE = 60
"""Seconds for the scheduler's answer."""
FRESH = 5.0
"""Seconds for which the queue is taken to be as it was: a scheduler is not asked every second."""


class NoAnswer(BadInput):
    """The scheduler could not be asked."""


@dataclass(frozen=True)
class Entry:
    """A job in the queue."""

    number: str
    state: str
    name: str
    reason: str


def parse(text: str) -> list[Entry]:
    """What squeue prints. Others of the user's jobs may have any name."""
    lines = (line.split("|", 3) for line in text.splitlines())
    return [Entry(*parts) for parts in lines if len(parts) == 4 and parts[0].isdecimal()]


def queue() -> list[Entry]:
    user = f"--user={os.getuid()}"
    return parse(_ask("squeue", "--noheader", user, "--format=%i|%T|%j|%r"))


def _ask(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=_environment())
    except FileNotFoundError:
        raise NoAnswer(f"{words[0]} is not here: suites are submitted where SLURM's commands are") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{words[0]} did not answer in {PATIENCE} seconds") from None
    if done.returncode:
        raise NoAnswer(f"{words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Inside an allocation its variables would become options of jobs that are submitted from there."""
    if OWN not in os.environ:
        return dict(os.environ)
    return {key: value for key, value in os.environ.items() if key == "SLURM_CONF" or not key.startswith("SLURM_")}


# What is the case


def living(opened: OpenSuite, entries: Sequence[Entry]) -> dict[str, Entry]:
    """Of each job of the suite that is in the queue, its entry. One that is about to leave after its end is not, nor is
    one that waits for what can never be."""
    names = {job_name(opened.folder, name): name for name in (*_all_jobs(opened), WHOLE)}
    by_job = {}
    for entry in entries:
        name = names.get(entry.name)
        if name is None or entry.reason == NEVER:
            continue
        if entry.state == ENDING and (name == WHOLE or opened.folder.read(name).state in ENDED):
            continue
        by_job[name] = entry
    return {name: by_job[name] for name in names.values() if name in by_job}


def seen(opened: OpenSuite, name: str, entries: Sequence[Entry], in_queue: Mapping[str, Entry]) -> JobState:
    """A job as its file and the queue tell it. The queue was asked first: a job that is not there has written all that
    it will ever write."""
    state = opened.folder.read(name)
    if state.state in ("done", "failed", "cancelled"):
        return state
    entry = in_queue.get(name) or next((each for each in entries if each.number == state.slurm), None)
    if entry is not None:
        if entry.state not in (*WAITING, ENDING):
            return state if state.state == "running" else replace(state, state="queued", why="it starts or is saving")
        if name not in in_queue and state.state != "running":
            return state  # one allocation has them all
        return replace(state, state="queued", why=_reason(entry), slurm=entry.number)
    if state.state == "running" and state.slurm is not None:
        if code_told(opened.folder.run(name)) == EXIT_STOPPED:
            return replace(state, state="stopped", why=GOES_ON)  # it saved itself, and whoever ran it was killed
        return replace(state, state="interrupted", why=f"SLURM has no job {state.slurm} any more")
    if state.state != "queued":
        state = opened.folder.seen(name)
        whole = in_queue.get(WHOLE)
        if whole is not None and whole.state in WAITING and state.state != "blocked":
            return replace(state, state="queued", why=f"the whole suite: {_reason(whole)}", slurm=whole.number)
        return state
    if any(opened.folder.read(each).state != "done" for each in opened.suite.needs(name)):
        return replace(state, state="waiting", why="")  # it left the queue with a job that it needs
    lines = last_lines(opened.folder.log(name))
    return replace(state, state="failed", why="\n".join(["it left SLURM's queue before it began", *lines]))


def _reason(entry: Entry) -> str:
    """In the scheduler's own words, which its manual explains."""
    return entry.reason if entry.reason not in ("None", "(null)") else entry.state.lower()


def states(opened: OpenSuite, entries: Sequence[Entry]) -> dict[str, JobState]:
    in_queue = living(opened, entries)
    return opened.folder.states(opened.suite, lambda name: seen(opened, name, entries, in_queue))


def _given(opened: OpenSuite) -> bool:
    """Whether the scheduler may have something of this suite."""
    return any(script_path(opened, name).exists() for name in (*_all_jobs(opened), WHOLE))


def _all_jobs(opened: OpenSuite) -> list[str]:
    """Those also that were submitted and are not in the file any more."""
    return [*opened.suite.jobs, *opened.folder.gone(opened.suite)]


def script_path(opened: OpenSuite, name: str) -> Path:
    return log_path(opened.folder, name).with_name(SCRIPT)


_last: list[tuple[float, list[Entry]]] = []


def current(opened: OpenSuite, mend: bool = False) -> dict[str, JobState]:
    """The states of all jobs: from files alone, unless some were given to the scheduler and it can be asked. With
    `mend`, jobs that wait for what can never be leave the queue."""
    folder, suite = opened.folder, opened.suite
    if not _given(opened) or shutil.which("squeue") is None:
        return folder.states(suite)
    if not _last or time.monotonic() - _last[0][0] > FRESH:
        try:
            _last[:] = [(time.monotonic(), drop_hopeless(opened, queue()) if mend else queue())]
        except NoAnswer:
            return folder.states(suite)
    return states(opened, _last[0][1])


def drop_hopeless(opened: OpenSuite, entries: list[Entry]) -> list[Entry]:
    """The queue without jobs that wait for what can never be, which --kill-on-invalid-dep may leave there."""
    names = {job_name(opened.folder, name) for name in opened.suite.jobs}
    hopeless = [entry for entry in entries if entry.name in names and entry.reason == NEVER]
    if hopeless:
        _ask("scancel", *(entry.number for entry in hopeless))
    return [entry for entry in entries if entry not in hopeless]


# What is done about it


def submit(opened: OpenSuite, again: Collection[str] = (), one_job: bool = False, say: Any = tell) -> None:
    """What is missing and not in the queue. Nothing stays behind here."""
    _ask("sbatch", "--version")
    whole = living(opened, queue()).get(WHOLE)
    if whole is not None:
        say(f"job {whole.number} of SLURM runs the whole suite; nothing is submitted")
        return
    if not opened.folder.path.exists():  # what is refused leaves no folder behind
        check(opened, 0, again, here=False)
    with only_runner(opened):
        entries = drop_hopeless(opened, _settled(opened))
        check(opened, 0, again, here=False)
        in_queue = living(opened, entries)
        anew = after(opened.suite, again)
        there = [name for name in anew if name in in_queue]
        if there:
            raise BadInput(f"{', '.join(there)}: in the queue; cancel it before --again")
        if one_job and in_queue:
            raise BadInput(f"{', '.join(in_queue)}: in the queue by themselves; cancel them before --one-job")
        for name in anew:
            put_aside(opened, name, say)
        for name, state in take_up(opened).items():
            say(f"{name}: {state}")
        opened.folder.begin()
        if one_job:
            missing = [name for name in opened.suite.jobs if opened.folder.read(name).state != "done"]
            if missing:
                number = _sbatch(opened, WHOLE, ())
                say(f"submitted as job {number}, which runs {len(missing)} of {len(opened.suite.jobs)} jobs")
            else:
                say("all jobs are done")
            return
        known = _submit_missing(opened, in_queue, say)
    say("SLURM has it from here; `sameday suite status` shows how far it is" if known else "all jobs are done")


def _settled(opened: OpenSuite) -> list[Entry]:
    """The queue, once no job of the suite is on its way out of it, or back into it: which of the two is not told."""
    names = {job_name(opened.folder, name) for name in opened.suite.jobs}
    end = time.monotonic() + PATIENCE
    while True:
        entries = queue()
        leaving = [each for each in entries if each.state == ENDING and each.name in names]
        if not leaving or time.monotonic() > end:
            return entries
        time.sleep(0.5)


def refuse_queued(opened: OpenSuite) -> None:
    """Jobs that SLURM has are not run here too."""
    if not _given(opened) or _cannot_ask(opened, opened.suite.jobs):
        return
    queued = {name: entry for name, entry in living(opened, queue()).items() if entry.number != os.environ.get(OWN)}
    if queued:
        listed = ", ".join(f"{name} ({entry.number})" for name, entry in queued.items())
        raise BadInput(f"in SLURM's queue: {listed}; `sameday suite run --slurm` goes on there, `suite cancel` ends it")


def _cannot_ask(opened: OpenSuite, names: Iterable[str]) -> bool:
    """Whether there is no squeue here. BadInput where the scheduler may have one of these jobs: what happened to it
    would be undone there. Inside its own allocation a suite knows what it has."""
    if shutil.which("squeue") is not None:
        return False
    states = {name: opened.folder.read(name) for name in names}
    theirs = [n for n, s in states.items() if s.state == "queued" or (s.state == "running" and s.slurm is not None)]
    if theirs and OWN not in os.environ:
        raise BadInput(f"{', '.join(theirs)}: given to SLURM, and squeue is not here to ask about it; go where it is")
    return True


def _submit_missing(opened: OpenSuite, in_queue: dict[str, Entry], say: Any) -> dict[str, str]:
    """The numbers of all jobs that are not done."""
    suite, folder = opened.suite, opened.folder
    numbers: dict[str, str] = {}
    for name in suite.order():
        if folder.read(name).state == "done":
            continue
        needed = [each for each in suite.needs(name) if folder.read(each).state != "done"]
        entry = in_queue.get(name)
        # One that waits for a job which is submitted only now waits for an earlier number, which will never be done.
        stale = entry is not None and entry.state in WAITING and any(each not in in_queue for each in needed)
        if entry is not None and not stale:
            numbers[name] = entry.number
            say(f"{name}: in the queue already, job {entry.number}")
            continue
        if entry is not None:
            _ask("scancel", entry.number)
            del in_queue[name]
        before = folder.read(name)
        folder.change(name, state="queued", why="", slurm=None)  # never after sbatch: it may run by then
        try:
            numbers[name] = _sbatch_after(opened, name, {each: numbers[each] for each in needed if each in numbers})
        except NoAnswer:
            folder.write(name, before)
            raise
        waits = f", after {', '.join(needed)}" if needed else ""
        say(f"{name}: submitted as job {numbers[name]}{waits}")
    return numbers


def _sbatch_after(opened: OpenSuite, name: str, needed: Mapping[str, str]) -> str:
    """A job that was needed may have ended since the queue was read, and SLURM may refuse to wait for it: whoever is
    still there is waited for, and the job itself looks at what is done when it starts."""
    try:
        return _sbatch(opened, name, tuple(needed.values()))
    except NoAnswer:
        there = {entry.number for entry in queue()}
        left = tuple(number for number in needed.values() if number in there)
        if len(left) == len(needed):
            raise
        return _sbatch(opened, name, left)


def _sbatch(opened: OpenSuite, name: str, numbers: tuple[str, ...]) -> str:
    words = ["sbatch", *options(opened.suite, opened.folder, name, numbers)]
    path = script_path(opened, name)
    write_text(path, script(opened, name))
    # With several clusters it is NUMBER;CLUSTER.
    return _ask(*words, str(path)).strip().split(";")[0]


def cancel_queued(opened: OpenSuite, names: Collection[str] = (), say: Any = tell) -> set[str]:
    """Those of these jobs, or of all, that the queue has. A job that runs saves itself, in the time that SLURM's
    KillWait gives it."""
    if not _given(opened) or _cannot_ask(opened, names or opened.suite.jobs):
        return set()
    queued = living(opened, queue())
    if names and WHOLE in queued:
        raise BadInput(f"job {queued[WHOLE].number} of SLURM runs the whole suite: cancel all of it")
    chosen = {name: entry for name, entry in queued.items() if not names or name in names}
    if chosen:
        _ask("scancel", *(entry.number for entry in chosen.values()))
    for name, entry in chosen.items():
        waits = entry.state in WAITING
        if waits and name != WHOLE:
            opened.folder.change(name, state="cancelled", why="")
        say(f"{name}: {'cancelled' if waits else 'asked to stop'}, job {entry.number} of SLURM")
    if WHOLE in chosen:  # all that runs is in it
        return {WHOLE, *(name for name in opened.suite.jobs if opened.folder.read(name).state == "running")}
    return set(chosen)


def dry_run(opened: OpenSuite, one_job: bool = False, again: Collection[str] = ()) -> Iterator[str]:
    """The commands and scripts of all jobs that are not done, as one shell script that would submit them. What would be
    refused is refused here too."""
    suite = opened.suite
    check(opened, 0, again, here=False)
    anew = after(suite, again)
    missing = {name for name in suite.jobs if name in anew or opened.folder.read(name).state != "done"}
    option = "--one-job" if one_job else "--slurm"
    yield f"#!/bin/bash\n# What `sameday suite run {option}` would do; nothing was submitted or written.\n"
    if not missing:
        yield "# all jobs are done\n"
    elif one_job:
        yield _written(opened, WHOLE, (), "whole")
    else:
        variables = {name: f"job_{number}" for number, name in enumerate(suite.order(), start=1)}
        for name in filter(missing.__contains__, variables):
            waits = tuple(f"${variables[each]}" for each in suite.needs(name) if each in missing)
            yield _written(opened, name, waits, variables[name])


def _written(opened: OpenSuite, name: str, numbers: tuple[str, ...], variable: str) -> str:
    words = options(opened.suite, opened.folder, name, numbers)
    # A dependency has other jobs' numbers, which are variables here; all else is quoted.
    quoted = [f'"{word}"' if word.startswith("--dependency=") else shlex.quote(word) for word in words]
    folder = shlex.quote(str(log_path(opened.folder, name).parent))
    text = script(opened, name)
    mark = "END_OF_SCRIPT"
    while mark in text:
        mark += "_"
    return f"mkdir -p {folder}\n{variable}=$(sbatch {' '.join(quoted)} <<'{mark}'\n{text}{mark}\n)\n"
