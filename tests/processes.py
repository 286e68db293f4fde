"""Training runs started as a user starts them: real processes, real files, real signals."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import worlds
from safetensors.torch import load

from sameday.data.times import Times
from sameday.record.folder import read_metrics
from sameday.spec.document import dump_yaml

LIMIT = 600
"""Seconds after which a process that should have ended is taken for one that hangs."""


def write_run(folder: Path, model: Path, counts: tuple[int, ...] = (5, 3, 4, 4), seed: int = 3, **changes: Any) -> Path:
    """A small world and a recipe for it: four steps an epoch, dropout on. `changes` replace recipe fields."""
    worlds.write_world(folder, seed, counts, hard=False)
    fields: dict[str, Any] = {
        "order": "by_image",
        "effective_batch": 4,
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
    }
    (folder / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(model, **(fields | changes))))
    return folder


class Process:
    """`sameday train` in a session of its own, its output in files, so that no pipe outlives it."""

    def __init__(self, folder: Path, out: str, sets: tuple[str, ...], ranks: int, script: Path | None) -> None:
        self.run, self.began = folder / out, time.time_ns()
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        program = ("-m", "sameday") if script is None else (str(script),)
        alone = (sys.executable, *program)
        # Several ranks are joined by gloo: more than one GPU would be needed otherwise.
        fields = (*sets, "plan.device=cpu") if ranks > 1 else sets
        options = [part for field in fields for part in ("--set", field)]
        self._outputs = [folder / f"{out}.stdout", folder / f"{out}.stderr"]
        with self._outputs[0].open("w") as stdout, self._outputs[1].open("w") as stderr:
            self.popen = subprocess.Popen(
                [
                    *((sys.executable, *torchrun, *program) if ranks > 1 else alone),
                    *("train", "recipe.yaml", "--out", out, *options),
                ],
                cwd=folder,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text()

    def wait(self) -> int:
        return self.popen.wait(LIMIT)

    def until(self, condition: Callable[[], bool], pause: float = 0.02) -> bool:
        """Look until it is so; False where the process ended first."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if self.popen.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"waited in vain:\n{self.stdout}\n{self.stderr}"
            time.sleep(pause)
        return True

    def until_step(self, step: int) -> bool:
        return self.until(lambda: last_step(self.run) >= step)

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """The process alone, as an out-of-memory killer does it; what it forked is left to itself."""
        self.popen.kill()
        self.popen.wait(LIMIT)

    def clear(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(LIMIT)


@contextlib.contextmanager
def started(
    folder: Path, *sets: str, out: str = "run", ranks: int = 1, script: Path | None = None
) -> Iterator[Process]:
    """A run that is under way; it is ended with the block if it has not ended by itself."""
    process = Process(folder, out, sets, ranks, script)
    try:
        yield process
    finally:
        process.clear()


def finished(
    folder: Path, *sets: str, out: str = "run", ranks: int = 1, script: Path | None = None, code: int = 0
) -> Process:
    """A run to its end, which must be the one expected."""
    with started(folder, *sets, out=out, ranks=ranks, script=script) as process:
        found = process.wait()
    assert found == code, f"exit code {found}, not {code}:\n{process.stdout}\n{process.stderr}"
    return process


def last_step(run: Path) -> int:
    return max((record["step"] for record in read_metrics(run / "metrics.jsonl")), default=0)


def records(run: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    clocked = ("seconds", "wait", "phases", "gpu", *Times._fields)
    return [{k: v for k, v in r.items() if k not in clocked} for r in read_metrics(run / "metrics.jsonl")]


def training_steps(run: Path) -> list[int]:
    return [record["step"] for record in records(run) if "split" not in record]


def weights(run: Path) -> dict[str, bytes]:
    """The finished weights, file by file."""
    files = [path for result in ("adapter", "model") for path in (run / result).glob("*.safetensors")]
    found = {path.name: path.read_bytes() for path in sorted(files)}
    assert found, f"{run} has no weights"
    return found


def assert_same_run(run: Path, reference: Path) -> None:
    """The same bytes of weights, the same losses and scores, the same checkpoints, and nothing left lying about."""
    assert weights(run) == weights(reference)
    assert records(run) == records(reference)
    for name in ("eval.json", "checkpoints/best.json"):
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name
    assert listing(run) == listing(reference)


def assert_agrees(run: Path, reference: Path) -> None:
    """Losses and scores of each step to 1e-5, and each tensor of the weights to thrice that: AdamW divides rounded
    gradients by their own size, and 1.6e-5 was seen."""
    found, expected = records(run), records(reference)
    assert [(r["step"], r.get("split")) for r in found] == [(r["step"], r.get("split")) for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), one
    (content,), (wanted,) = weights(run).values(), weights(reference).values()
    tensors = load(content)
    for name, value in load(wanted).items():
        # B starts at zero, so that its norm is the norm of its whole update.
        assert (tensors[name] - value).norm() <= 3e-5 * value.norm(), name


def listing(run: Path) -> list[str]:
    """Every file and folder but the event files, whose names hold process ids."""
    found = (path.relative_to(run) for path in run.rglob("*"))
    return sorted(str(path) for path in found if path.parts[0] != "tensorboard")


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
