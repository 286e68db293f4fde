"""A job as the command that a user would type."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from sameday.spec.suite import Suite
from sameday.suite.state import SuiteFolder


def plan_path(suite: Suite, home: Path, folder: SuiteFolder, name: str) -> Path | None:
    """The plan of a job: its own, that of a tune job, the suite's, or none."""
    asked = suite.jobs[name].plan or suite.plan
    if asked is None:
        return None
    return folder.job(asked) / "plan.yaml" if asked in suite.jobs else home / asked


def command(suite: Suite, home: Path, folder: SuiteFolder, name: str) -> list[str]:
    """Words behind `sameday`. `home` is the suite's own folder, where paths start."""
    job = suite.jobs[name]
    plan = plan_path(suite, home, folder, name)
    sets = [part for each in (*suite.set, *job.set) for part in ("--set", each)]
    planned = [] if plan is None else ["--plan", str(plan)]
    if job.do == "train":
        return ["train", str(home / str(job.recipe)), *planned, "--out", str(folder.run(name)), *sets]
    if job.do == "cache":
        return ["cache", str(home / str(job.recipe)), "--kind", str(job.kind), *planned, *sets]
    if job.do == "tune":
        found = str(folder.job(name) / "plan.yaml")
        return ["tune", str(home / str(job.recipe)), "--minutes", f"{job.minutes:g}", "-o", found, *sets]
    split = [] if job.split is None else ["--split", job.split]
    if job.of is not None:
        return ["eval", str(folder.run(job.of)), *split, *planned, "--out", str(folder.run(name))]
    whose = ["--base"] if job.base else ["--adapter", str(home / str(job.adapter))]
    return ["eval", str(home / str(job.recipe)), *whose, *split, *planned, "--out", str(folder.run(name))]


def asked(suite: Suite, home: Path, folder: SuiteFolder, name: str) -> str:
    """A fingerprint of the command and of the files that it names: a job that is done is done for these alone."""
    job = suite.jobs[name]
    words = command(suite, home, folder, name)
    digest = hashlib.sha256(json.dumps([words, job.gpus, job.nodes]).encode())
    plan = job.plan or suite.plan
    for each in (job.recipe, None if plan in suite.jobs else plan):
        if each is not None:
            digest.update((home / each).read_bytes())
    return digest.hexdigest()[:16]


def process(suite: Suite, home: Path, folder: SuiteFolder, name: str) -> list[str]:
    """What is started on one machine: a Python process, or one for each of several GPUs."""
    job, words = suite.jobs[name], command(suite, home, folder, name)
    if job.gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
        return [sys.executable, *launcher, "-m", "sameday", *words]
    return [sys.executable, "-m", "sameday", *words]
