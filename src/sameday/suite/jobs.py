"""A job as the command that a user would type."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from sameday.spec.document import read_document
from sameday.spec.errors import BadInput
from sameday.spec.suite import Suite, load_suite
from sameday.spec.words import in_yaml
from sameday.spec.writing import folder_on_trial
from sameday.suite.state import SuiteFolder


class OpenSuite(NamedTuple):
    """A suite file, the folder in which its paths start, and OUT."""

    suite: Suite
    home: Path
    folder: SuiteFolder
    path: Path


def open_suite(path: Path, out: Path | None = None) -> OpenSuite:
    """OUT is runs/NAME unless it is given; where nothing was run in it, and something was in the one beside the suite's
    file, that one. Paths are whole ones: whoever runs a job may stand elsewhere."""
    suite, home = load_suite(path), path.absolute().parent
    usual = Path("runs") / str(suite.name)
    begun = [each for each in (usual, home / usual) if SuiteFolder(each).began() is not None]
    folder = (out or (begun or [usual])[0]).absolute()
    return OpenSuite(suite, home, SuiteFolder(folder), path.absolute())


def check_writable(folder: SuiteFolder) -> None:
    """Nothing of it stays: what is refused later leaves no folder behind."""
    try:
        with folder_on_trial(folder.path), tempfile.TemporaryFile(dir=folder.path):
            pass
    except OSError as error:
        raise BadInput(f"{folder.path}: cannot be written: {error.strerror}; --out names another folder") from None


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
    sets = [part for each in sets_of(suite, name) for part in ("--set", each)]
    planned = [] if plan is None else ["--plan", str(plan)]
    if job.do == "train":
        return ["train", str(home / str(job.recipe)), *planned, "--out", str(folder.run(name)), *sets]
    if job.do == "cache":
        return ["cache", str(home / str(job.recipe)), "--kind", str(job.kind), *planned, *sets]
    if job.do == "tune":
        found = str(folder.job(name) / "plan.yaml")
        return ["tune", str(home / str(job.recipe)), "--minutes", f"{job.minutes:g}", "-o", found, *sets]
    how = [] if job.split is None else ["--split", job.split]
    how += [] if job.cascade is None else ["--cascade" if job.cascade else "--no-cascade"]
    how += [*planned, "--out", str(folder.run(name)), *sets]
    if job.of is not None:
        return ["eval", str(folder.run(job.of)), *how]
    whose = ["--base"] if job.base else ["--adapter", str(home / str(job.adapter))]
    return ["eval", str(home / str(job.recipe)), *whose, *how]


def sets_of(suite: Suite, name: str) -> list[str]:
    """The suite's settings and the job's own. The recipe of an eval of a job is what that trained."""
    job = suite.jobs[name]
    return [each for each in (*suite.set, *job.set) if job.of is None or not _of_recipe(each)]


def _of_recipe(each: str) -> bool:
    return each.strip().startswith("recipe.")


def request(suite: Suite, home: Path, name: str) -> dict[str, Any]:
    """What a job is asked for, as it decides the outcome: a plan, GPUs and nodes change how it is run, and paths and
    comments change nothing."""
    job = suite.jobs[name]
    fields = job.model_dump(include={"do", "of", "kind", "split", "base", "adapter", "cascade"}, exclude_defaults=True)
    if job.do == "tune":
        fields["minutes"] = job.minutes
    # Those of a plan say how it is run; a tune job takes them for what it searches.
    sets = [each for each in sets_of(suite, name) if job.do == "tune" or not each.strip().startswith("plan.")]
    if sets:
        fields["set"] = sets
    if job.recipe is not None:
        fields["recipe"] = read_document(home / job.recipe).values
    return dict(json.loads(json.dumps(fields, default=str)))


def asked(suite: Suite, home: Path, name: str) -> str:
    """A fingerprint of it: a job that is done is done for this alone."""
    return hashlib.sha256(json.dumps(request(suite, home, name), sort_keys=True).encode()).hexdigest()[:16]


def changes(before: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two requests, field by field, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [
            line
            for name in names
            for line in changes(before.get(name), now.get(name), f"{path}.{name}" if path else str(name))
        ]
    shown = ("not there" if value is None else in_yaml(value) for value in (before, now))
    return [] if before == now else ["{} was {}, is {}".format(path, *shown)]


def result_of(suite: Suite, folder: SuiteFolder, name: str) -> Path:
    """What is there once a job is done; a cache job's own folder. Weights may be removed: they are not asked for."""
    results = {"train": folder.run(name) / "recipe.yaml", "eval": folder.run(name) / "scores.json"}
    return results.get(suite.jobs[name].do, folder.job(name) / ("plan.yaml" if suite.jobs[name].do == "tune" else ""))


RENDEZVOUS = "SAMEDAY_RENDEZVOUS"
"""host:port on the first of several nodes, where processes meet. Without it a job runs on one machine."""


def node_of(suite: Suite, name: str) -> int | None:
    """Which of its nodes this is; None where it has one."""
    across = suite.jobs[name].nodes > 1 and RENDEZVOUS in os.environ
    return int(os.environ.get("SLURM_NODEID", "0")) if across else None


def process(suite: Suite, home: Path, folder: SuiteFolder, name: str) -> list[str]:
    """What is started on one machine: a Python process, or one for each of several GPUs."""
    job, words = suite.jobs[name], command(suite, home, folder, name)
    if (node := node_of(suite, name)) is not None:
        host, _, port = os.environ[RENDEZVOUS].rpartition(":")
        launcher = ["-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--node-rank", str(node)]
        launcher += ["--master-addr", host, "--master-port", port, "--nproc-per-node", str(max(job.gpus, 1))]
        return [sys.executable, *launcher, "-m", "sameday", *words]
    if job.gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
        return [sys.executable, *launcher, "-m", "sameday", *words]
    return [sys.executable, "-m", "sameday", *words]
