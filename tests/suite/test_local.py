"""The local back end: the scenarios of all back ends, and what is its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import scenarios
from scenarios import LIMIT, BackEnd, Home, assert_same_results, training

from sameday.hardware.signals import ASKING
from sameday.suite.jobs import open_suite
from sameday.suite.running.execute import _Signals
from sameday.suite.running.local import _Asked, run
from sameday.suite.state import SuiteFolder, holders


class Local:
    def run(self, suite: Path, out: Path) -> int:
        return run(open_suite(suite, out))

    def begin(self, suite: Path, out: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "sameday", "suite", "run", str(suite), "--out", str(out)]
        with (out.parent / f"{out.name}.runner").open("ab") as said:
            return subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)

    def stop(self, begun: subprocess.Popen[bytes], suite: Path, out: Path) -> int:
        begun.send_signal(signal.SIGINT)
        return begun.wait(LIMIT)


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda each: each.__name__)
def test_scenarios(scenario: Callable[[Home, BackEnd], None], home: Home) -> None:
    scenario(home, Local())


@pytest.mark.parametrize("number", ASKING)
@pytest.mark.usefixtures("own_signals")
def test_a_warning_of_a_batch_system_asks_runner_and_executor_to_stop(number: signal.Signals) -> None:
    """A terminal that is closed ends no runner: jobs do not need it."""
    with _Asked() as asked:
        os.kill(os.getpid(), number)
    assert asked.stop == (number != signal.SIGHUP)
    with _Signals() as signals:
        os.kill(os.getpid(), number)
    assert signals.asked


# Kills

JOBS = {"one": training(), "two": training(seed=4), "three": training("one", seed=5)}


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


KINDS = ("job", "runner", "executor", "all")


def victims(kind: str, runner: int, folder: SuiteFolder, rng: random.Random) -> list[int]:
    """Of one job that runs now, or of all; none where there is no such process at the moment."""
    held = {name: pids for name in JOBS if (pids := holders(folder.lock(name)))}
    if kind in ("runner", "all"):
        return [runner, *(pid for pids in held.values() for pid in pids if kind == "all")]
    if not held:
        return []
    name = rng.choice(list(held))
    return [pid for pid in held[name] if (pid == folder.read(name).pid) == (kind == "executor")]


def kill_until_done(suite: Path, out: Path, kills: int, rng: random.Random, tally: Counter[str], pause: float) -> None:
    """Runs a suite and kills runner, executor, job, or all of them at any moment; after so many kills it may end."""
    folder = SuiteFolder(out)
    while True:
        runner = Local().begin(suite, out)
        try:
            while runner.poll() is None:
                number = sum(tally.values())
                if number >= kills:
                    runner.wait(LIMIT)
                    break
                time.sleep(rng.uniform(0.0, pause))
                kind = KINDS[number % len(KINDS)]
                while runner.poll() is None and not (found := victims(kind, runner.pid, folder, rng)):
                    time.sleep(0.05)
                if runner.poll() is None:
                    kill(found)
                    tally[kind] += 1
        finally:
            runner.kill()
            code = runner.wait(LIMIT)
        if code == 0:
            return
        assert code in (1, -signal.SIGKILL), (out.parent / f"{out.name}.runner").read_text()


def kills(home: Home, number: int, seed: int, pause: float) -> Counter[str]:
    suite, whole = home.suite(JOBS), home.path / "whole"
    assert Local().run(suite, whole) == 0
    tally: Counter[str] = Counter()
    suites = 0
    while sum(tally.values()) < number:
        out = home.path / f"out-{suites}"
        kill_until_done(suite, out, number, random.Random(seed + suites), tally, pause)
        assert_same_results(out, whole, *JOBS)
        suites += 1
    return tally


def test_kills(home: Home) -> None:
    tally = kills(home, 12, seed=1, pause=0.6)
    assert tally == dict.fromkeys(KINDS, 3)


@pytest.mark.soak
def test_two_hundred_kills(home: Home) -> None:
    seed = random.randrange(2**32)
    tally = dict(kills(home, 200, seed, pause=2.0))
    print(f"\nseed {seed}: {tally}; every suite ended with the weights of one left alone")
