"""What the scheduler is given: options of sbatch, and a batch script. Pure: nothing is asked and nothing is written.

Options are words of a command line, never text that is parsed again; in the script every value is quoted."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import signal
import sys
from pathlib import Path

from sameday.spec.errors import EXIT_STOPPED
from sameday.spec.staged import STAGE
from sameday.spec.suite import Slurm, Suite
from sameday.suite.jobs import RENDEZVOUS, OpenSuite
from sameday.suite.state import SuiteFolder

WHOLE = "whole suite"
"""In place of a job's name, which has no space: one allocation in which all of them run."""
MOST_REQUEUES = 200
"""A job that gets nowhere in its time limit must not go on for ever."""

CACHES = """\
# Compilers' caches are this job's own and on the node's own disk: jobs that share one wait for and damage each other's.
# What was downloaded, and what is known about images, stays where it is.
export HF_HOME="${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}"
export TORCH_HOME="${TORCH_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/torch}"
export SAMEDAY_CACHE_HOME="${SAMEDAY_CACHE_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/sameday}"
own="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/sameday-$SLURM_JOB_ID"
export XDG_CACHE_HOME="$own/cache" TRITON_CACHE_DIR="$own/triton" TORCHINDUCTOR_CACHE_DIR="$own/inductor"
export CUDA_CACHE_PATH="$own/cuda" TORCH_EXTENSIONS_DIR="$own/extensions"
"""
STAGING = (
    'mkdir -p -- "$(dirname -- "$SAMEDAY_STAGE$1")" && cp -RL -- "$1" "$SAMEDAY_STAGE$1" '
    '&& printf "%s\\n" "$1" >>"$SAMEDAY_STAGE/list" || { rm -rf -- "$SAMEDAY_STAGE$1"; exit 1; }'
)
ENDING = """\
code=$?
# Asked to stop, by preemption or the coming limit: the same job goes back into the queue, and those that depend on it
# keep waiting. It saved itself, or did not yet listen to the signal. One that was cancelled is not running any more.
if {{ {{ [ "$code" = {stopped} ] && grep -qs '"state": "stopped"' {states}; }} || [ "$code" = {killed} ]; }} &&
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ] &&
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    clear_up  # while all of its nodes are still its own
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def job_name(folder: SuiteFolder, name: str) -> str:
    """What the scheduler calls a job: the same for the same OUT and job, so that none is submitted twice."""
    known = hashlib.sha256(f"{os.path.realpath(folder.path)}\0{name}".encode(errors="surrogateescape"))
    return f"{name.replace(' ', '-')}-{known.hexdigest()[:12]}"


def log_path(folder: SuiteFolder, name: str) -> Path:
    return folder.path / "slurm.txt" if name == WHOLE else folder.log(name)


def asked_for(suite: Suite, name: str) -> tuple[Slurm, int, int, int]:
    """Of one job, or of the whole suite: what is asked for, nodes, GPUs on each, and how many times its CPUs and
    memory."""
    if name == WHOLE:
        gpus = suite.gpus if suite.gpus is not None else max(job.gpus for job in suite.jobs.values())
        return suite.slurm, 1, gpus, max(gpus, suite.at_once)
    job = suite.jobs[name]
    return suite.slurm_of(name), job.nodes, job.gpus, max(job.gpus, 1)


def options(suite: Suite, folder: SuiteFolder, name: str, after: tuple[str, ...] = ()) -> list[str]:
    """Of sbatch. `after` has the scheduler's numbers of jobs that must be done before."""
    asked, nodes, gpus, parts = asked_for(suite, name)
    warning = asked.warning if asked.time is None else min(asked.warning, asked.time / 2)
    gres = asked.gres.replace("{gpus}", str(gpus)) if asked.gres else f"gpu:{gpus}"
    words = {
        "job-name": job_name(folder, name),
        "output": _as_it_is(str(log_path(folder, name))),
        "open-mode": "append",
        "requeue": "",
        "dependency": "afterok:" + ":".join(after) if after else None,
        "kill-on-invalid-dep": "yes",
        # To the job's steps, not to the script, which must outlive them.
        "signal": f"TERM@{math.ceil(warning)}",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "partition": asked.partition,
        "qos": asked.qos,
        "account": asked.account,
        "gres": gres if gpus else None,
        "constraint": asked.constraint,
        "time": None if asked.time is None else _minutes(asked.time),
        "mem": asked.memory_times(parts),
        "cpus-per-task": None if asked.cpus is None else str(asked.cpus * parts),
    }
    given = [f"--{key}={value}" if value else f"--{key}" for key, value in words.items() if value is not None]
    return ["--parsable", *given, *asked.options]


def _as_it_is(path: str) -> str:
    """Without what sbatch puts in place of %j and the like; a backslash switches that off, and is an escape itself."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def _minutes(seconds: float) -> str:
    """Days-hours:minutes: SLURM counts whole minutes."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours // 24}-{hours % 24:02d}:{minutes:02d}:00"


def script(opened: OpenSuite, name: str) -> str:
    """The batch script of a job, or of the whole suite."""
    suite, folder = opened.suite, opened.folder
    asked, nodes, _, parts = asked_for(suite, name)
    quoted = shlex.quote
    each_node = f"srun --ntasks={nodes} --ntasks-per-node=1 " if nodes > 1 else ""
    # An environment that is activated has its own Python; otherwise it is the one that `sameday suite` runs in.
    python = "python" if asked.setup else quoted(sys.executable)
    lines = [
        f"#!/bin/bash{' -l' if asked.modules else ''}",  # a login shell knows `module`
        f"# {name} of {opened.path.name!a}, by `sameday suite run --slurm`",
        "trap : TERM  # the job's step gets it too, and this script waits for it to save itself",
        "export SLURM_EXPORT_ENV=ALL  # steps see what is set here, also after sbatch --export",
        *(f"module load {quoted(each)} || exit 1" for each in asked.modules),
        *CACHES.splitlines(),
        f'clear_up() {{ {each_node}rm -rf -- "$own" || rm -rf -- "$own"; }}',
        "trap clear_up EXIT",
        f'{each_node}mkdir -p -- "$own" || exit 1',
        *(f"export {key}={quoted(value)}" for key, value in asked.environment.items()),
        *asked.setup,
    ]
    if asked.stage:
        lines.append(f'export {STAGE}="$own/stage"')
    for each in asked.stage:
        path = quoted(os.path.abspath(opened.home / Path(each).expanduser()))
        lines.append(f"{each_node}bash -c {quoted(STAGING)} stage {path} ||")
        lines.append(f"    printf '%s is not on the disk of every node, and is read from where it is\\n' {path} >&2")
    if nodes > 1:
        free = "import socket; one = socket.socket(); one.bind(('', 0)); print(one.getsockname()[1])"
        lines.append(f'export {RENDEZVOUS}="$(hostname):$({python} -c {quoted(free)})"')
    cpus = "" if asked.cpus is None else f" --cpus-per-task={asked.cpus * parts}"  # steps do not inherit it
    step = f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1{cpus} --wait=60 {python} -m"
    out = quoted(str(folder.path))
    if name == WHOLE:
        lines.append(f"{step} sameday suite run {quoted(str(opened.path))} --out {out}")
    else:
        lines.append(f"{step} sameday.suite.running.execute {quoted(str(opened.path))} {out} {quoted(name)}")
    states = f"{out}/jobs/{'*' if name == WHOLE else quoted(name)}/state.json"
    killed = 128 + signal.SIGTERM
    ending = ENDING.format(stopped=EXIT_STOPPED, killed=killed, states=states, most=MOST_REQUEUES)
    return "\n".join(lines) + "\n" + ending
