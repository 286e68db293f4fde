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

from sameday.suite.cancel import holders
from sameday.suite.jobs import open_suite
from sameday.suite.local import run
from sameday.suite.state import SuiteFolder


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


# Kills

JOBS = {"one": training(), "two": training(seed=4), "three": training("one", seed=5)}


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_until_done(suite: Path, out: Path, kills: int, rng: random.Random, tally: Counter[str]) -> None:
    """Runs a suite and kills runner, executor, job, or all of them at any moment; after so many kills it may end."""
    folder = SuiteFolder(out)
    while True:
        runner = Local().begin(suite, out)
        try:
            while runner.poll() is None:
                if sum(tally.values()) >= kills:
                    runner.wait(LIMIT)
                    break
                time.sleep(rng.uniform(0.0, 1.2))
                name = rng.choice(list(JOBS))
                running, executor = holders(folder.lock(name)), folder.read(name).pid
                victims = {
                    "runner": [runner.pid],
                    "executor": [pid for pid in running if pid == executor],
                    "job": [pid for pid in running if pid != executor],
                    "all": [runner.pid, *(pid for each in JOBS for pid in holders(folder.lock(each)))],
                }
                what = rng.choice([each for each in victims if victims[each]])
                kill(victims[what])
                tally[what] += 1
        finally:
            runner.kill()
            code = runner.wait(LIMIT)
        if code == 0:
            return
        assert code in (1, -signal.SIGKILL), (out.parent / f"{out.name}.runner").read_text()


def kills(home: Home, number: int, seed: int) -> Counter[str]:
    suite, whole = home.suite(JOBS), home.path / "whole"
    assert Local().run(suite, whole) == 0
    tally: Counter[str] = Counter()
    suites = 0
    while sum(tally.values()) < number:
        out = home.path / f"out-{suites}"
        kill_until_done(suite, out, number, random.Random(seed + suites), tally)
        assert_same_results(out, whole, *JOBS)
        suites += 1
    return tally


def test_kills(home: Home) -> None:
    tally = kills(home, 20, seed=1)
    assert sum(tally.values()) == 20 and len(tally) == 4, tally


@pytest.mark.soak
def test_two_hundred_kills(home: Home) -> None:
    seed = random.randrange(2**32)
    print(f"\nseed {seed}: {dict(kills(home, 200, seed))}; every suite ended with the weights of one left alone")
