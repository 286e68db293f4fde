"""The best weights as the result, where the recipe asks for them: found again after a stop, kept from pruning, and
whatever the plan validates besides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typed import Said, refused, sameday, write_recipe
from worlds import write_world

from sameday.record.folder import read_metrics
from sameday.spec.errors import EXIT_STOPPED
from sameday.spec.recipe import Best
from sameday.train.cadence import Cadence
from sameday.train.state import LoopState

pytestmark = pytest.mark.usefixtures("own_signals")

STEPS = 5
WORDS = ("train", "recipe.yaml", "--set", "plan.save_total_limit=1", "--set", "plan.device=cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A seed and a learning rate, too high, under which the model is not at its best in the end. Which one that is
    depends on how a processor rounds."""
    folder = write_world(tmp_path_factory.mktemp("best"), 3, counts=(3, 2), hard=False)
    for seed in range(20):
        changes: dict[str, Any] = {"learning_rate": 0.5, "schedule": "constant", "max_steps": STEPS, "seed": seed}
        write_recipe(folder, tiny_qwen3, best={"metric": "loss", "every": 1}, **changes)
        assert run(folder, "tried").code == 0
        best = json.loads((folder / "tried" / "eval.json").read_text())["best"]["step"]
        shutil.rmtree(folder / "tried")
        if best < STEPS:
            return folder
    raise AssertionError("the last step is the best one under every seed")


def run(world: Path, out: str, *more: str) -> Said:
    return sameday(world, *WORDS, "--out", out, *more)


@pytest.fixture(scope="module")
def whole(world: Path) -> Path:
    said = run(world, "whole")
    assert said.code == 0, said.err
    recorded = json.loads((world / "whole" / "eval.json").read_text())["result"]
    line = f"adapter/ has the best weights: step {recorded['step']}, loss {recorded['value']:.4g}\n"
    assert said.out.endswith(line)
    return world / "whole"


def scores(folder: Path) -> dict[int, dict[str, float]]:
    return {r["step"]: r for r in read_metrics(folder / "metrics.jsonl") if r.get("split") == "val"}


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def test_the_result_is_the_best_and_says_so(world: Path, whole: Path) -> None:
    losses = {step: each["loss"] for step, each in scores(whole).items()}
    best = min(losses, key=lambda step: losses[step])
    assert sorted(losses) == [*range(1, STEPS + 1)] and best < STEPS, losses
    recorded = json.loads((whole / "eval.json").read_text())
    assert recorded["result"] == {"weights": "best", "step": best, "metric": "loss", "value": losses[best]}
    assert recorded["best"]["step"] == best and recorded["val"]["loss"] == losses[best]
    kept = sorted(path.name for path in (whole / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:06d}" for step in (best, STEPS)], "one newest, and the best besides"
    assert weights(whole / "adapter") == weights(whole / "checkpoints" / f"step-{best:06d}")
    assert weights(whole / "adapter") != weights(whole / "checkpoints" / f"step-{STEPS:06d}")
    said = sameday(world, "eval", "whole", "--split", "val", "--scores-only")
    assert said.code == 0 and f"loss {losses[best]:.4g} " in said.out


@pytest.mark.parametrize("at", [1, STEPS - 1])
def test_a_stop_and_a_resume_change_nothing(world: Path, whole: Path, at: int) -> None:
    out = f"stopped-{at}"
    assert run(world, out, "--stop-after", str(at)).code == EXIT_STOPPED
    assert run(world, out).code == 0
    assert weights(world / out / "adapter") == weights(whole / "adapter")
    assert (world / out / "eval.json").read_text() == (whole / "eval.json").read_text()


def test_the_plan_decides_nothing(world: Path) -> None:
    """It may validate more often: what is compared stands in the recipe."""
    every = ("--set", "recipe.best.every=4")
    for out, steps in (("often", "1"), ("seldom", "null")):
        assert run(world, out, *every, "--set", f"plan.eval_steps={steps}").code == 0
    often, seldom = (json.loads((world / out / "eval.json").read_text()) for out in ("often", "seldom"))
    assert often == seldom and often["result"]["step"] in (4, STEPS)
    assert len(scores(world / "often")) == STEPS and sorted(scores(world / "seldom")) == [4, STEPS]
    assert weights(world / "often" / "adapter") == weights(world / "seldom" / "adapter")


def test_without_it_the_result_is_the_last(world: Path, whole: Path) -> None:
    said = run(world, "last", "--set", "recipe.best=null")
    assert said.code == 0 and "adapter/ has" not in said.out
    assert json.loads((world / "last" / "eval.json").read_text())["result"] == {"weights": "last", "step": STEPS}
    assert weights(world / "last" / "adapter") == weights(whole / "checkpoints" / f"step-{STEPS:06d}")


def test_a_best_checkpoint_that_was_damaged(world: Path, whole: Path) -> None:
    """The last one is whole, and the run is at its end: it goes back to before them, and finds them again."""
    shutil.copytree(whole, world / "damaged")
    shutil.rmtree(world / "damaged" / "adapter")
    best = json.loads((whole / "eval.json").read_text())["result"]["step"]
    path = Path("damaged") / "checkpoints" / f"step-{best:06d}"
    (world / path / "adapter_model.safetensors").unlink()
    said = run(world, "damaged")
    why = f"the best weights so far, of {path.name}, cannot be used: adapter_model.safetensors is missing"
    assert said.code == 0 and f"checkpoint step-{STEPS:06d} is left aside: {why}" in said.out
    assert weights(world / "damaged" / "adapter") == weights(whole / "adapter")


def test_what_cannot_be_known_is_refused(world: Path) -> None:
    said = refused(world, *WORDS, "--out", "none", "--set", "recipe.data.val=null")
    assert said == "recipe.best chooses weights by their validation score, and the recipe has no data.val"
    said = refused(world, *WORDS, "--out", "none", "--set", "recipe.best=accuracy")
    assert "best.metric 'accuracy': must be one of loss, exact_match" in said
    said = refused(world, *WORDS, "--out", "none", "--set", "recipe.best={every: 0}")
    assert "must be at least 1 or 'epoch', not 0" in said
    assert not (world / "none").exists()


SCORES = st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 3), min_size=1, max_size=12)


@given(SCORES, st.sampled_from(["loss", "exact_match"]))
def test_the_best_is_the_first_of_the_best(values: list[float], metric: str) -> None:
    state, by = LoopState(), Best(metric=metric)
    for step, value in enumerate(values):
        state.step = step
        state.compare({"loss": 0.0, metric: value}, by)
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        assert state.best is None
        return
    best = min(finite) if metric == "loss" else max(finite)
    assert state.best is not None and state.best["step"] == values.index(best)


def test_equal_scores_are_told_apart_by_the_loss() -> None:
    """Else a metric that stays at zero would hand over the first weights."""
    state = LoopState()
    for step, loss in enumerate((3.0, 1.0, 2.0)):
        state.step = step
        state.compare({"loss": loss, "exact_match": 0.0}, Best(metric="exact_match"))
    assert state.best == {"step": 1, "loss": 1.0, "exact_match": 0.0}


@given(st.integers(1, 60), st.integers(1, 20), st.none() | st.integers(1, 9) | st.just("epoch"), st.integers(1, 9))
def test_what_is_compared_does_not_depend_on_the_plan(total: int, epoch: int, plan: Any, every: int) -> None:
    cadence = Cadence(total, epoch, None, plan, None, every)
    due = {done: cadence.due(done) for done in range(1, total + 1)}
    assert {done for done, each in due.items() if each.compare} == {*range(every, total + 1, every), total}
    assert all(each.validate for each in due.values() if each.compare)
    always = Cadence(total, epoch, None, plan)
    assert all(each.compare == each.validate for each in map(always.due, due))
