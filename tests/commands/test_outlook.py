"""Before a run on a CPU begins: that it is on a CPU, how long it takes at least, and a format that the CPU is slow at.
What would take days must be asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sets
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from typed import refused, sameday

from sameday.commands import outlook
from sameday.commands.outlook import Outlook, matmul_rate
from sameday.hardware.ranks import Ranks
from sameday.spec.document import dump_yaml
from sameday.spec.plan import Plan
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.vqa.setup import VqaSetup

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small set and a recipe for it, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sets.write_set(tmp_path, train=20)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe(data={"path": "set", "val": 4}, max_steps=2)))
    return tmp_path


TRAIN = ("train", "recipe.yaml", "--out", "run")
LONG = ("--set", "recipe.max_steps=2000000000")


def test_what_would_take_days_must_be_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "matmul_rate", lambda _precision: 1e9)
    said = refused(home, *TRAIN, *LONG)
    assert re.fullmatch(
        r"plan\.device auto: torch finds no GPU here, and a CPU would take at least about [\d,]+ days \(\S+ FLOP of "
        r"matmuls at \S+ GFLOP/s, as measured in float32 on \d+ cores\); --set plan\.device=cpu begins it all the same",
        said,
    )
    assert not (home / "run").exists()
    begun = sameday(home, *TRAIN, *LONG, "--set", "plan.device=cpu", "--stop-after", "1")
    assert begun.code == 75 and "finds no GPU" not in begun.out


def test_a_short_run_is_said_to_be_on_a_cpu(home: Path) -> None:
    said = sameday(home, *TRAIN)
    assert said.code == 0 and said.out.splitlines()[0] == "device: cpu, because torch finds no GPU here"
    assert "the run takes" not in said.out


def test_a_long_one_says_how_long(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "WORTH_TIMING", 1.0)
    monkeypatch.setattr(outlook, "matmul_rate", lambda _precision: 1e6)
    assert "\non this CPU the run takes at least about " in sameday(home, *TRAIN).out


@pytest.mark.parametrize("asked", [(), ("--set", "plan.device=cpu")])
def test_a_format_that_the_cpu_is_slow_at(home: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]) -> None:
    rates = {"bf16": 1e9, "float32": 2.4e11}
    monkeypatch.setattr(outlook, "matmul_rate", rates.__getitem__)
    sentence = "bf16 matmuls are about 240 times slower than float32 ones on this CPU: recipe.precision float32 is "
    sentence += "another recipe, and the faster one here"
    assert f"{sentence}\n" in sameday(home, *TRAIN, "--set", "recipe.precision=bf16", *asked).out
    if not asked:
        long = (*TRAIN[:-1], "long", "--set", "recipe.precision=bf16", *LONG)
        assert refused(home, *long).endswith(f"all the same. {sentence}")
    rates["bf16"] = 1e11
    assert "slower" not in sameday(home, *TRAIN, "--set", "recipe.precision=bf16", "--set", "recipe.seed=8", *asked).out


@given(st.floats(1e6, 1e20), st.floats(1e6, 1e13), st.floats(1e6, 1e13))
def test_outlook(flop: float, rate: float, float32: float) -> None:
    ahead = Outlook(flop, "bf16", rate, float32)
    assert ahead.seconds * rate == pytest.approx(flop)
    assert (ahead.slow_format() is not None) == (float32 / rate >= 4)
    number, unit = re.match(r"at least about ([\d,]+) (days|hours|minutes|seconds) \(", ahead.estimate()).groups()  # type: ignore[union-attr]
    size = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}[unit]
    assert abs(int(number.replace(",", "")) * size - ahead.seconds) <= 0.5001 * size


@pytest.mark.slow
def test_a_cpu_is_timed() -> None:
    assert 1e7 < matmul_rate("float32") < 1e15 and 1e5 < matmul_rate("bf16") < 1e15


def test_an_epoch_of_images_is_counted_as_its_steps_are(tmp_path: Path) -> None:
    sets.write_set(tmp_path, train=20)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4})
    task, setup = sets.make_task(tmp_path, recipe), ClassifySetup(recipe, tmp_path)
    counted = sum(task.cost(step, None, Ranks()).flop for step in range(task.steps_per_epoch()))
    assert setup.epoch_flop(Plan(), setup.audit(print).splits) == counted


@pytest.mark.parametrize("shared", [False, True])
def test_an_epoch_of_questions_is_about_what_its_steps_are(tmp_path: Path, tiny_qwen3: Path, shared: bool) -> None:
    """Within a factor of three: in so small a model the tower and the embeddings are much of it."""
    worlds.write_world(tmp_path, 5, (9, 7, 8), hard=False)
    recipe = worlds.tiny_recipe(tiny_qwen3, order="by_image", effective_batch=24)
    plan = Plan(share_images=shared, packing=shared, max_questions=None if shared else 1)
    task, setup = worlds.make_task(tmp_path, recipe, plan), VqaSetup(recipe, tmp_path)
    counted = sum(task.cost(step, None, Ranks()).flop for step in range(task.steps_per_epoch()))
    told = setup.epoch_flop(plan, setup.drop_too_long(setup.audit(print).splits))
    assert counted / 3 < told < 3 * counted
