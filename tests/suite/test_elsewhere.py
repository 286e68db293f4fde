"""An estimate for another kind of GPU: its range, its words, and what it does not look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sets
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sameday.cli import app
from sameday.hardware.known import KNOWN, REACHED, KnownGpu
from sameday.spec.document import dump_yaml
from sameday.suite.jobs import OpenSuite, open_suite
from sameday.suite.times.elsewhere import Elsewhere
from sameday.suite.times.forecast import make_forecast
from sameday.suite.times.measured import Measured, keep_measured, planned, read_measured
from sameday.suite.times.predict import Predictor
from sameday.suite.times.work import Work

RATE, BYTES = 750e12, 4e12
numbers = st.floats(0.1, 10.0)


def measured(step: float = 0.5, share: float = 0.5, **more: Any) -> Measured:
    """Steps that reach this share of their floor."""
    values: dict[str, Any] = {
        "score_each": 0.01,
        "answer_each": 0.02,
        "save": 1.0,
        "memory": 40 * 2**30,
        "stands_for": "A100 40 GB",
    }
    floor = {"flop": share * step * RATE, "flop_per_second": RATE, "memory_bytes_per_second": BYTES}
    return Measured("cost", "plan", "NVIDIA H200", [30.0, *[step] * 20], 40.0, **(values | floor | more))


def gpu(slower: float, memory: float) -> Elsewhere:
    return Elsewhere(KnownGpu("Other", 40 * 2**30, RATE / slower / REACHED, BYTES / memory / REACHED, (8, 0)))


@given(numbers, numbers, st.floats(0.05, 1.0))
def test_the_range_has_both_ends(slower: float, memory: float, share: float) -> None:
    found = gpu(slower, memory).factors(measured(share=share))
    assert found is not None and found.low <= found.middle <= found.high
    ends = sorted((1 - share + share * slower, max(slower, memory)))
    assert (found.low, found.high) == pytest.approx(ends)


def test_a_gpu_alike_takes_as_long() -> None:
    alike = gpu(1.0, 1.0)
    pace, here = alike.pace(measured(), {"val": 10}), measured().pace({"val": 10}, "")
    assert pace is not None and here is not None
    assert pace.step == pytest.approx(here.step) and pace.validate == pytest.approx(0.1) and pace.start == 40.0
    cold = alike.pace(measured(compiling=20.0), {"val": 10})
    assert cold is not None and pace is not None and cold.warm == pace.warm + 20, "nothing is compiled there yet"
    seconds = alike.evaluation(measured(), 100)
    assert seconds is not None and seconds.low == pytest.approx(seconds.high) == pytest.approx(3.0)


@given(numbers, numbers)
def test_slower_is_never_faster(slower: float, memory: float) -> None:
    one, more = gpu(slower, memory).factors(measured()), gpu(2 * slower, 2 * memory).factors(measured())
    assert one is not None and more is not None and one.low <= more.low and one.high <= more.high


def test_without_a_floor_there_is_no_estimate() -> None:
    old = measured(flop=None)
    assert gpu(2, 2).pace(old, {}) is None and gpu(2, 2).evaluation(old, 5) is None


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenSuite]:
    monkeypatch.chdir(tmp_path)
    sets.write_set(tmp_path)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(num_epochs=100)))
    jobs = {name: {"do": "train", "recipe": "recipe.yaml", "set": [f"recipe.seed={name[-1]}"]} for name in ("a1", "a2")}
    text = {"gpus": 1, "deadline": "1h", "set": ["plan.device=cpu"], "jobs": jobs}
    (tmp_path / "night.yaml").write_text(yaml.safe_dump(text, sort_keys=False))
    yield open_suite(tmp_path / "night.yaml")


def keep(opened: OpenSuite, **more: Any) -> Measured:
    work = Predictor(opened.suite, opened.home, opened.folder).work("a1")
    assert isinstance(work, Work)
    (training,) = work.trainings
    values = {k: v for k, v in vars(measured(**more)).items() if k not in ("cost", "plan", "files")}
    one = Measured(cost=training.cost, plan=planned(training), files=training.files, **values)
    opened.folder.path.mkdir(parents=True, exist_ok=True)
    keep_measured(opened.folder, one)
    return one


def test_a_plan_for_another_gpu(suite: OpenSuite) -> None:
    """Of steps with as much memory as it has, and of nothing that ran here."""
    keep(suite, memory=None, stands_for=None, step=0.1)
    keep(suite, stands_for="Other", step=0.2)  # which may have kernels that an A100 has not
    one = keep(suite)
    assert len(read_measured(suite.folder)) == 3, "one does not replace the other"
    suite.folder.change("a1", state="done", attempt=1, started=1.0, spent=5.0)
    said = CliRunner().invoke(app, ["suite", "plan", "night.yaml", "--gpu", "a100-40gb", "--gpus", "2"]).output
    assert "night: 2 jobs on 2 GPUs A100 40 GB, which is AN ESTIMATE from another GPU" in said
    told = " ".join(said.split())
    assert (
        "a1, a2: an estimate for A100 40 GB, nothing was measured there: steps on NVIDIA H200 with 40 GB of its memory "
        "take 2.0 times their floor" in told
    )
    elsewhere = Elsewhere(KNOWN["a100-40gb"])
    here = Predictor(suite.suite, suite.home, suite.folder, audit=True)
    there = Predictor(suite.suite, suite.home, suite.folder, audit=True, elsewhere=elsewhere)
    counted = here.counts.of(sets.tiny_recipe(num_epochs=100), suite.home)
    total = counted.total(sets.tiny_recipe(num_epochs=100))
    factors = elsewhere.factors(one)
    assert total and factors is not None
    found = make_forecast(suite, 2, there)
    looks = 100 * (1.0 + 0.01 * factors.middle * counted.sizes["val"])
    besides = 29.5 + 40.0 + looks + 1.0
    assert found.estimates["a1"].seconds == pytest.approx(total * 0.5 * factors.middle + besides, rel=0.02)
    assert found.low < total * 0.5 * factors.low + 170 and found.high > total * 0.5 * factors.high
    assert found.left == 3600.0 and "a1" not in (each for each, state in found.states.items() if state.attempt)


def test_what_is_asked_wrongly(suite: OpenSuite) -> None:
    run = CliRunner().invoke
    found = run(app, ["suite", "plan", "night.yaml", "--gpu", "tpu"]).exception
    assert str(found).startswith("--gpu tpu: no figures of it are known; allowed: a100-40gb, a100-80gb, h100, ")
    said = run(app, ["suite", "plan", "night.yaml", "--gpu", "a100-40gb", "--measure"]).output
    why = "what a step would take on another GPU is estimated from one, and here it runs on the CPU"
    assert f"a1: could not be measured: exit code 1: {why}" in said
    assert "finish        not known" in said
