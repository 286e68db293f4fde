"""Metrics for a tracker of experiments (wandb, MLflow, trackio), beside a run's own records. Nothing of it can stop or
delay a run: a thread of its own talks to the library, and what it raises ends the tracking alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from sameday.record.folder import RunFolder
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan

WAIT = 15.0
"""Seconds that a run waits for the tracker at its end."""
KEPT = "track.json"
"""Of a run folder: under which name the tracker knows the run, so that it goes on there."""
PROJECT = "sameday"
_PARAM = 250
"""Characters of a value that MLflow keeps in any version."""


def check_tracker(plan: Plan) -> None:
    """BadInput where the plan names a library that is not installed."""
    if plan.track != "none" and importlib.util.find_spec(plan.track) is None:
        raise BadInput(
            f"plan.track is {plan.track}, and that library is not installed here: pip install 'sameday[{plan.track}]', "
            "or plan.track none"
        )


class Tracker:
    """Started with the first values: workers have been forked by then."""

    def __init__(self, kind: str, run: RunFolder, say: Callable[[str], None]) -> None:
        self.kind, self.run, self.say = kind, run, say
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._told = False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"track-{self.kind}", daemon=True)
            self._thread.start()
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self._queue.put(({name: value for name, value in numbers.items() if math.isfinite(value)}, step))
        self._tell()

    def close(self) -> None:
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(WAIT)
        if self._thread.is_alive():
            self._failed = TimeoutError(f"it has not taken all values {WAIT:g} s after the end")
        self._tell()

    def _tell(self) -> None:
        """Once, from the thread that trains."""
        if self._failed is not None and not self._told:
            self._told = True
            said = str(self._failed).splitlines() or [""]
            why = f"{type(self._failed).__name__}: {said[0]}"
            self.say(
                f"plan.track: {self.kind} is given up ({why}); the run goes on, and metrics.jsonl has every record"
            )

    def _work(self) -> None:
        try:
            log, finish = STARTS[self.kind](self.run)
            while (values := self._queue.get()) is not None:
                log(*values)
            finish()
        except BaseException as error:  # some libraries leave the process by SystemExit
            self._failed = error


Started = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]


def _name(run: RunFolder) -> str:
    """The same whenever this run goes on in this folder."""
    return hashlib.sha256(f"{run.path.resolve()} {run.recipe.fingerprint}".encode()).hexdigest()[:16]


def _config(run: RunFolder) -> dict[str, Any]:
    return {
        "fingerprint": run.recipe.fingerprint,
        "recipe": run.recipe.model_dump(mode="json"),
        "plan": run.plan.model_dump(mode="json"),
        "folder": str(run.path.resolve()),
    }


def _wandb(run: RunFolder) -> Started:
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    about = {"project": project, "name": run.recipe.name, "dir": str(run.path), "config": _config(run)}
    wandb.init(id=_name(run), resume="allow", **about)
    return (lambda values, step: wandb.log(values, step=step)), wandb.finish


def _mlflow(run: RunFolder) -> Started:
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    known = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = str(json.loads((run.path / KEPT).read_text())["mlflow"])
    started = mlflow.start_run(run_id=known, run_name=None if known else run.recipe.name)
    if known is None:
        run.write_json(KEPT, {"mlflow": started.info.run_id})
        params = {"fingerprint": run.recipe.fingerprint, **run.recipe.identity()}
        mlflow.log_params({name: str(value)[:_PARAM] for name, value in params.items()})
    return (lambda values, step: mlflow.log_metrics(values, step=step)), mlflow.end_run


def _trackio(run: RunFolder) -> Started:
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    trackio.init(project=project, name=f"{run.recipe.name}-{_name(run)}", config=_config(run), resume="allow")
    return (lambda values, step: trackio.log(values, step=step)), trackio.finish


STARTS: dict[str, Callable[[RunFolder], Started]] = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
