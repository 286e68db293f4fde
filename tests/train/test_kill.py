"""A run killed at any moment, in a save or out of it, and started again ends as if nothing had happened."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import Process, assert_same_run, finished, last_step, started, training_steps, write_run

SETS = ("plan.save_steps=3", "plan.device=cpu")
"""A GPU gives the same bits only under plan.deterministic."""
START = 5.0 if torch.cuda.is_available() else 0.5
"""About how many seconds a process takes until it trains: without a GPU its libraries are loaded before it is there."""
KINDS = ("steps", "save", "delay", "save", "steps")


@dataclass
class Tally:
    kills: int = 0
    in_save: int = 0
    starts: int = 0


def saving(process: Process) -> bool:
    """Whether this process, not one before it, is in the middle of a save."""
    for path in (process.run / "checkpoints").glob(".writing-step-*"):
        try:
            if path.stat().st_mtime_ns > process.began:
                return True
        except FileNotFoundError:  # the save is done
            continue
    return False


def wait_for_moment(process: Process, kind: str, rng: random.Random) -> bool:
    """True when the moment to kill has come, False where the run ended first."""
    if kind == "delay":
        end = time.monotonic() + rng.uniform(0, START)
        return process.until(lambda: time.monotonic() > end)
    resumed = process.until(lambda: "resumed from" in process.stdout or "step 1/" in process.stdout)
    ready = resumed and process.until_step(last_step(process.run) + rng.randint(1, 6))
    return ready and (kind == "steps" or process.until(lambda: saving(process), pause=0.0005))


def kill_until_done(folder: Path, out: str, kills: int, tally: Tally, rng: random.Random, *sets: str) -> None:
    """Start, kill, start again with the same command; after so many kills the run may end."""
    for number in range(kills):
        with started(folder, *sets, out=out) as process:
            tally.starts += 1
            if not wait_for_moment(process, KINDS[number % len(KINDS)], rng):
                assert process.wait() == 0, process.stderr
                return
            process.kill()
        tally.kills += 1
        tally.in_save += saving(process)
    tally.starts += 1
    finished(folder, *sets, out=out)


def test_kills(tmp_path: Path, tiny_qwen3: Path) -> None:
    folder = write_run(tmp_path, tiny_qwen3, num_epochs=10)
    finished(folder, *SETS, out="reference")
    assert training_steps(folder / "reference") == list(range(1, 41))
    tally = Tally()
    kill_until_done(folder, "killed", 5, tally, random.Random(11), *SETS, "plan.log_steps=1")
    assert tally.kills == 5 and tally.in_save >= 1, tally
    assert_same_run(folder / "killed", folder / "reference")


@pytest.mark.soak
def test_kills_with_all_weights_trained_and_a_worker(tmp_path: Path, tiny_qwen3: Path) -> None:
    folder = write_run(tmp_path, tiny_qwen3, num_epochs=4, train="all", train_vision=True)
    finished(folder, *SETS, out="reference")
    tally = Tally()
    sets = (*SETS, "plan.workers=1", "plan.log_steps=1")
    kill_until_done(folder, "killed", 2, tally, random.Random(5), *sets)
    assert tally.kills == 2, tally
    assert_same_run(folder / "killed", folder / "reference")


@pytest.mark.soak
@pytest.mark.parametrize("workers", [0, 1])
def test_fifty_kills(tmp_path: Path, tiny_qwen3: Path, workers: int) -> None:
    folder = write_run(tmp_path, tiny_qwen3, num_epochs=15)
    finished(folder, *SETS, out="reference")
    tally, rng, seed = Tally(), random.Random(), random.randrange(2**32)
    rng.seed(seed)
    runs = 0
    while tally.kills < 50:
        out = f"killed-{runs}"
        sets = (*SETS, f"plan.workers={workers}", "plan.log_steps=1")
        kill_until_done(folder, out, 50 - tally.kills, tally, rng, *sets)
        assert_same_run(folder / out, folder / "reference")
        runs += 1
    print(
        f"\nworkers {workers}, seed {seed}: {tally.kills} kills, {tally.in_save} during a save; {tally.starts} starts "
        f"of {runs} runs, each equal to the uninterrupted one in weights, losses and files"
    )
