"""Losses far above those before them: found where planted, nowhere else, and named with the samples of their step."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import sets
from hypothesis import given
from hypothesis import strategies as st
from processes import records
from typed import sameday

from sameday.report.gather import gather
from sameday.report.page import render
from sameday.spec.document import dump_yaml
from sameday.spec.words import first_names
from sameday.tasks.classify.task import ClassifyTask
from sameday.train.spikes import FEWEST, RISE, WINDOW, usual_before_spike

LOSSES = st.floats(1e-6, 1e6)
WINDOWS = st.lists(LOSSES, min_size=FEWEST, max_size=WINDOW)


@given(st.lists(LOSSES, max_size=FEWEST - 1), LOSSES)
def test_too_few_steps_say_nothing(recent: list[float], loss: float) -> None:
    assert usual_before_spike(recent, loss) is None


@given(WINDOWS, st.floats(0, 1))
def test_what_is_lower_than_all_is_no_spike(recent: list[float], share: float) -> None:
    """Nor anything less than RISE above the usual, however equal the losses were."""
    middle = sorted(recent)[len(recent) // 2]
    assert usual_before_spike(recent, share * min(recent)) is None
    assert usual_before_spike([middle] * FEWEST, 0.999 * RISE * middle) is None


@given(WINDOWS, LOSSES, st.floats(1e-3, 1e3))
def test_the_scale_of_losses_does_not_matter(recent: list[float], loss: float, scale: float) -> None:
    found, scaled = usual_before_spike(recent, loss), usual_before_spike([scale * x for x in recent], scale * loss)
    near = usual_before_spike(recent, loss * (1 + 1e-9)), usual_before_spike(recent, loss * (1 - 1e-9))
    if (near[0] is None) == (near[1] is None):  # rounding decides nothing
        assert scaled == (None if found is None else pytest.approx(scale * found))


@given(WINDOWS, LOSSES, st.floats(1, 1e6))
def test_what_is_higher_is_a_spike_all_the_more(recent: list[float], loss: float, more: float) -> None:
    assert usual_before_spike(recent, loss) is None or usual_before_spike(recent, more * loss) is not None


@given(st.lists(LOSSES, max_size=30), WINDOWS, LOSSES)
def test_only_the_last_steps_count(old: list[float], recent: list[float], loss: float) -> None:
    whole = [1.0] * (WINDOW - len(recent)) + recent
    assert usual_before_spike(old + whole, loss) == usual_before_spike(whole, loss)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5, 1.0])
def test_no_false_alarm_while_a_loss_falls(noise: float) -> None:
    """From the first step on, at any spread, over 20 runs of 500 steps; a planted one is found in each of them."""
    for seed in range(20):
        draw = random.Random(seed)
        losses = [(0.2 + 5 * math.exp(-step / 40)) * math.exp(noise * draw.gauss(0, 1)) for step in range(500)]
        found = [step for step, loss in enumerate(losses) if usual_before_spike(losses[:step], loss)]
        assert not found, (seed, found)
        assert usual_before_spike(losses[:300], 0.3 * math.exp(15 * noise)) == pytest.approx(0.2, rel=0.1 + noise)


def test_not_finite_or_zero_is_no_spike() -> None:
    usual = [1.0] * FEWEST
    assert usual_before_spike(usual, 0.0) is None and usual_before_spike([0.0] * WINDOW, 1.0) is None
    assert usual_before_spike(usual, 2.0) == pytest.approx(1.0)


def test_a_spike_is_said_recorded_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run was stopped between the steps that it is compared with."""
    sets.write_set(tmp_path, train=16)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 0}, effective_batch=4, max_steps=28, learning_rate=1e-9)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    plain = ClassifyTask.loss_sum

    def loss_sum(self: ClassifyTask, batch: Any, step: int) -> Any:
        total, each = plain(self, batch, step)
        return total * (20 if step == 25 else 1), each

    monkeypatch.setattr(ClassifyTask, "loss_sum", loss_sum)
    words = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--out")
    assert sameday(tmp_path, *words, "stopped", "--stop-after", "12").code == 75
    said = {run: sameday(tmp_path, *words, run) for run in ("stopped", "whole")}
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    (spike,) = [record for record in records(tmp_path / "whole") if "spike" in record]
    names = spike["spike"]["samples"]
    assert spike["step"] == 26 and len(names) == 4 and all("data_batch" in name for name in names)
    assert spike["loss"] > 5 * spike["spike"]["usual"]
    line = f"step 26/28  loss spike: {spike['loss']:.4f}, usual before it {spike['spike']['usual']:.4f}"
    for each in said.values():
        assert f"{line}, in the step of {first_names(names)}\n" in each.out
    page = render(gather([tmp_path / "whole"]))
    assert "<h4>Loss spikes</h4>" in page and f"<td>26</td><td>{spike['loss']:.4f}</td>" in page
    assert all(name in page for name in names)
