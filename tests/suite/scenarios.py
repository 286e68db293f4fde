"""What happens to suites, whoever runs their jobs. Each scenario takes a folder and a back end."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import sets
import yaml
from processes import last_step, records, training_steps, weights
from stub import write_stub

from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from sameday.spec.suite import load_suite
from sameday.suite.state import JobState, SuiteFolder

LIMIT = 300
"""Seconds after which something that should have come is taken for something that never does."""
STEPS = 48


class BackEnd(Protocol):
    """Whoever runs the jobs of a suite."""

    def run(self, suite: Path, out: Path) -> int:
        """As `sameday suite run`, until nothing more can be done; its exit code."""

    def begin(self, suite: Path, out: Path) -> Any:
        """The same, without waiting."""

    def stop(self, begun: Any, suite: Path, out: Path) -> int:
        """Running jobs are asked to stop as this back end does it; the exit code when they have."""


class Home:
    """A folder with recipes and suites of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.site = write_stub(path)
        sets.write_set(path)
        (path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(num_epochs=STEPS // 4)))

    @property
    def environment(self) -> dict[str, str]:
        """Of whoever runs suites from here. No GPU is there but those that are pretended."""
        folders = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": ""}

    def suite(self, jobs: dict[str, Any], name: str = "night", **more: Any) -> Path:
        path = self.path / f"{name}.yaml"
        more = {"gpus": 4, "at_once": 4, "set": ["plan.device=cpu"]} | more
        path.write_text(yaml.safe_dump(more | {"jobs": jobs}, sort_keys=False))
        return path

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """What stubs noted, by their names."""
        found: dict[str, list[dict[str, Any]]] = {}
        path = self.path / "records.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            found.setdefault(record["name"], []).append(record)
        return found


def stub(name: str, *after: str, seconds: float = 0.0, file: str | None = None, **more: Any) -> dict[str, Any]:
    wanted = [f"recipe.name={name}", f"recipe.seconds={seconds}", *([f"recipe.file={file}"] if file else [])]
    return {"do": "train", "recipe": "stub.yaml", "after": list(after), "set": wanted, **more}


def training(*after: str, seed: int = 3, **more: Any) -> dict[str, Any]:
    """Saved so often that whoever ends it loses little."""
    wanted = [f"recipe.seed={seed}", "plan.save_steps=4", "plan.log_steps=1"]
    return {"do": "train", "recipe": "recipe.yaml", "after": list(after), "set": wanted, **more}


def states(suite: Path, out: Path) -> dict[str, JobState]:
    return SuiteFolder(out).states(load_suite(suite))


def kinds(suite: Path, out: Path) -> dict[str, str]:
    return {name: state.state for name, state in states(suite, out).items()}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def assert_same_results(out: Path, reference: Path, *names: str) -> None:
    for name in names:
        run, other = (SuiteFolder(each).run(name) for each in (out, reference))
        assert weights(run) == weights(other)
        assert records(run) == records(other)
        assert training_steps(run) == list(range(1, STEPS + 1))


# The scenarios


def dependencies(home: Home, back_end: BackEnd) -> None:
    """Every job begins when those are done that it waits for; a second run repeats nothing."""
    needs: dict[str, list[str]] = {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []}
    suite = home.suite({name: stub(name, *after, seconds=0.1) for name, after in needs.items()})
    out = home.path / "out"
    assert back_end.run(suite, out) == EXIT_OK
    for _ in range(2):
        noted = home.records()
        assert {name: len(each) for name, each in noted.items()} == dict.fromkeys(needs, 1)
        for name, after in needs.items():
            assert all(noted[each][0]["ended"] <= noted[name][0]["began"] for each in after)
        assert back_end.run(suite, out) == EXIT_OK


def failure_and_mending(home: Home, back_end: BackEnd) -> None:
    """A failed job blocks what depends on it and nothing else; mended, the same command does what is missing."""
    suite = home.suite(
        {
            "bad": stub("bad", file="lacking.txt"),
            "next": stub("next", "bad"),
            "last": stub("last", "next", "good"),
            "good": stub("good", seconds=0.3),
            "fine": stub("fine", "good"),
        }
    )
    out = home.path / "out"
    assert back_end.run(suite, out) == EXIT_FAILED
    assert kinds(suite, out) == {
        "bad": "failed",
        "next": "blocked",
        "last": "blocked",
        "good": "done",
        "fine": "done",
    }
    seen = states(suite, out)
    assert seen["bad"].code == 7 and seen["bad"].why.endswith("\nthe file lacking.txt is not there")
    assert (seen["next"].why, seen["last"].why) == ("bad is failed", "next is blocked")
    (home.path / "lacking.txt").touch()
    assert back_end.run(suite, out) == EXIT_OK
    counts = {name: len(each) for name, each in home.records().items()}
    assert counts == {"bad": 2, "next": 1, "last": 1, "good": 1, "fine": 1}


def one_gpu_one_job(home: Home, back_end: BackEnd) -> None:
    """Four GPUs, more jobs than those, no GPU with two jobs at once; one without a GPU sees none."""
    jobs = {name: stub(name, seconds=0.3) for name in "abcdef"} | {"cpu": stub("cpu", gpus=0)}
    suite, out = home.suite(jobs), home.path / "out"
    assert back_end.run(suite, out) == EXIT_OK
    noted = {name: each[0] for name, each in home.records().items()}
    assert noted.keys() == jobs.keys() and not noted.pop("cpu")["gpus"]
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for record in noted.values():
        by_gpu.setdefault(record["gpus"], []).append(record)
    assert by_gpu.keys() <= set("0123") and len(by_gpu) > 1
    for computed in by_gpu.values():
        computed.sort(key=lambda record: record["began"])
        for one, next_ in itertools.pairwise(computed):
            assert one["ended"] <= next_["began"], f"two jobs at once on one GPU: {one}, {next_}"


def stopped_and_continued(home: Home, back_end: BackEnd) -> None:
    """Asked to stop in the middle, a suite goes on to the same bits."""
    suite = home.suite({"one": training(), "test": {"do": "eval", "of": "one", "split": "test"}})
    out, whole = home.path / "out", home.path / "whole"
    assert back_end.run(suite, whole) == EXIT_OK
    begun = back_end.begin(suite, out)
    until(lambda: last_step(SuiteFolder(out).run("one")) >= 5)
    assert back_end.stop(begun, suite, out) == EXIT_STOPPED
    assert kinds(suite, out)["one"] == "stopped"
    before = last_step(SuiteFolder(out).run("one"))
    assert 5 <= before < STEPS
    assert back_end.run(suite, out) == EXIT_OK
    assert f"resumed from step-{before:06d}" in SuiteFolder(out).log("one").read_text()
    assert_same_results(out, whole, "one")


ALL = (dependencies, failure_and_mending, one_gpu_one_job, stopped_and_continued)
