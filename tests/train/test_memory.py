"""Memory running out: smaller micro-batches, the same step, the same model, in a resumed run too; and a clear end where
nothing can be cut.

The shortage is planted: micro-batches above a limit raise what CUDA's allocator raises."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor

from sameday.data import loader
from sameday.data.feed import Feed
from sameday.hardware.ranks import Ranks
from sameday.record import checkpoint
from sameday.record.folder import RunFolder, read_metrics
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, EXIT_STOPPED, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask
from sameday.train.loop import train

pytestmark = pytest.mark.usefixtures("own_signals")

PLANS = {
    "shared and packed": Plan(share_images=True, packing=True, max_questions=None, token_budget=2048),
    "shared": Plan(share_images=True, max_questions=None, token_budget=2048, optimizer_impl="fused"),
    "padded": Plan(max_questions=None, token_budget=2048, workers=1),
}


@dataclass
class Shortage:
    """What was computed, step by step: the sizes of micro-batches and whose questions they held."""

    limit: float
    sizes: dict[int, list[int]] = field(default_factory=dict)
    questions: dict[int, list[int]] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)

    def plant(self, task: VqaTask) -> None:
        plain = task.loss_sum

        def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
            if batch.tokens.numel() > self.limit:
                self.refused.append(step)
                for seen in (self.sizes, self.questions):  # the step is begun again
                    seen.pop(step, None)
                raise torch.OutOfMemoryError("planted")
            self.sizes.setdefault(step, []).append(batch.tokens.numel())
            self.questions.setdefault(step, []).extend(batch.sample_ids)
            return plain(batch, step)

        task.loss_sum = loss_sum  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("memory"), 5, (9, 1, 5, 3), hard=True)


ROUNDING = 3e-5
"""Of weights after AdamW has divided rounded gradients by their own size some times: 1e-5 to 1.2e-5 were seen, by the
matmuls of different CPUs. A question more or less in a step is a hundred times that."""


class Killed(BaseException):
    """Ends a run as a signal that cannot be caught does: nothing after it is saved."""


def run_with(
    world: Path,
    model: Path,
    out: Path,
    plan: Plan,
    limit: float,
    stop_after: int | None = None,
    kill_at: int | None = None,
) -> tuple[Shortage, dict[str, Tensor], VqaTask]:
    """`kill_at` is the step (from 0) that is left in the middle of things."""
    recipe = worlds.tiny_recipe(model, num_epochs=2, order="by_image", effective_batch=8, eps=1e-4)
    task = worlds.make_task(world, recipe, plan)
    shortage = Shortage(limit)
    shortage.plant(task)
    run = RunFolder.open(out, recipe, plan, world)
    try:
        if kill_at is not None:
            plain = task.loss_sum

            def loss_sum(batch: Any, step: int) -> tuple[Tensor, Tensor]:
                if step == kill_at:
                    raise Killed
                return plain(batch, step)

            task.loss_sum = loss_sum  # type: ignore[method-assign]
        train(recipe, plan, task, run, Ranks(), stop_after)
    finally:
        run.close()
    return shortage, {name: p.detach().clone() for name, p in task.trained().items()}, task


class LooksAhead(Feed):
    """As on a GPU: a step's end finds the next step's first micro-batch fetched."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._looks_ahead = True


@pytest.mark.parametrize(("name", "ahead"), [*((name, False) for name in PLANS), ("shared", True), ("padded", True)])
def test_the_step_is_done_again_in_smaller_pieces(
    tmp_path: Path,
    tiny_qwen3: Path,
    world: Path,
    name: str,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was fetched ahead in the larger pieces must not come again."""
    plan = PLANS[name]
    monkeypatch.setattr(loader, "Feed", LooksAhead if ahead else Feed)
    roomy, expected, _ = run_with(world, tiny_qwen3, tmp_path / "roomy", plan, limit=float("inf"))
    assert not roomy.refused
    for record in read_metrics(tmp_path / "roomy" / "metrics.jsonl"):
        assert "split" in record or 0 < record["wait"] <= record["seconds"]
    largest = max(size for sizes in roomy.sizes.values() for size in sizes)
    at = next(step for step, sizes in sorted(roomy.sizes.items()) if largest in sizes)
    capsys.readouterr()
    tight, found, task = run_with(world, tiny_qwen3, tmp_path / "tight", plan, limit=largest - 1)

    said = re.findall(r"step (\d+): out of memory; token budget (\d+) -> (\d+)", capsys.readouterr().out)
    assert said == [(str(at + 1), "2048", str(largest // 2))], "said once: the lower budget is kept"
    assert tight.refused == [at]
    steps = task.steps_per_epoch() * 2
    for step in range(steps):
        ids = [task.splits["train"][i].id for i in task.step_ids(step)]
        assert sorted(tight.questions[step]) == sorted(ids), f"step {step}: each question once"
        if step >= at:
            assert len(tight.sizes[step]) >= len(roomy.sizes[step])
    for key, value in expected.items():
        assert (found[key] - value).norm() <= ROUNDING * value.norm(), key


@pytest.mark.parametrize("name", PLANS)
def test_a_question_that_never_fits(
    tmp_path: Path, tiny_qwen3: Path, world: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunStopped) as stopped:
        run_with(world, tiny_qwen3, tmp_path / "run", PLANS[name], limit=3)
    assert stopped.value.code == EXIT_OUT_OF_MEMORY
    text = str(stopped.value)
    assert text.startswith("out of memory with a single question in a micro-batch, in the step of ")
    assert len(re.findall(r"train\.jsonl:\d+", text)) == 8
    assert "plan.checkpointing full" in text and "max_pixels" in text
    lowered = re.findall(r"token budget (\d+) -> (\d+)", capsys.readouterr().out)
    assert all(int(lower) < int(before) for before, lower in lowered)
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.parametrize("name", PLANS)
def test_a_long_question_among_short_ones_that_never_fits(tmp_path: Path, tiny_qwen3: Path, name: str) -> None:
    """It stands alone at any budget, while its neighbours can still be cut: the budget goes on falling."""
    worlds.write_world(tmp_path, 5, (8,), hard=False)
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3]["answer"] = "polyp " * 400
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunStopped) as stopped:
        run_with(tmp_path, tiny_qwen3, tmp_path / "run", PLANS[name], limit=400)
    assert stopped.value.code == EXIT_OUT_OF_MEMORY


# Resumed runs

SAVING = PLANS["shared and packed"].model_copy(update={"save_steps": 1, "eval_steps": None})


@pytest.fixture(scope="module")
def lowered(
    tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path, world: Path
) -> tuple[Path, float, Shortage, dict[str, Tensor]]:
    """A run without interruption that has too little room in its first step: its folder, the limit, and what it did."""
    folder = tmp_path_factory.mktemp("lowered")
    roomy, _, _ = run_with(world, tiny_qwen3, folder / "roomy", SAVING, limit=float("inf"))
    limit = max(roomy.sizes[0]) - 1
    whole, weights, _ = run_with(world, tiny_qwen3, folder / "whole", SAVING, limit)
    assert set(whole.refused) == {0}
    assert all(whole.sizes[step] != roomy.sizes[step] for step in range(2, 6)), "the budget matters in each step"
    return folder / "whole", limit, whole, weights


def interrupted(world: Path, model: Path, out: Path, limit: float, how: str) -> int:
    """The same run, ended after its second step; the budget that it left."""
    if how == "stopped":
        with pytest.raises(RunStopped, match="asked to stop: step 2 of") as stopped:
            run_with(world, model, out, SAVING, limit, stop_after=2)
        assert stopped.value.code == EXIT_STOPPED
    else:
        with pytest.raises(Killed):
            run_with(world, model, out, SAVING, limit, kill_at=2)
    state = json.loads((out / "checkpoints" / "step-000002" / checkpoint.STATE).read_text())
    assert state["step"] == 2 and 0 < state["budget"] < SAVING.token_budget
    budget: int = state["budget"]
    return budget


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_resumed_run_keeps_the_lower_budget(
    tmp_path: Path, tiny_qwen3: Path, world: Path, lowered: Any, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a process with room for everything: only the budget makes it cut steps as the uninterrupted run does."""
    folder, limit, whole, weights = lowered
    interrupted(world, tiny_qwen3, tmp_path / "run", limit, how)
    capsys.readouterr()
    rest, found, _ = run_with(world, tiny_qwen3, tmp_path / "run", SAVING, limit=float("inf"))
    said = capsys.readouterr().out
    assert "resumed from step-000002" in said and "out of memory" not in said
    assert rest.sizes == {step: whole.sizes[step] for step in range(2, 6)}
    assert rest.questions == {step: whole.questions[step] for step in range(2, 6)}
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    ended, expected = (
        [(r["step"], r.get("split"), r["loss"]) for r in read_metrics(path / "metrics.jsonl")]
        for path in (tmp_path / "run", folder)
    )
    assert ended == expected


def test_whoever_resumes_may_ask_for_another_budget(
    tmp_path: Path, tiny_qwen3: Path, world: Path, lowered: Any
) -> None:
    """What was saved is no reason to run out of memory again."""
    _, limit, whole, _ = lowered
    budget = interrupted(world, tiny_qwen3, tmp_path / "run", limit, "stopped")
    for asked, same in ((SAVING.token_budget, True), (2 * budget, None), (1, False)):
        plan = SAVING.model_copy(update={"token_budget": asked, "save_total_limit": None})
        shutil.copytree(tmp_path / "run", tmp_path / f"run-{asked}")
        rest, _, _ = run_with(world, tiny_qwen3, tmp_path / f"run-{asked}", plan, limit=float("inf"))
        if same:
            assert rest.sizes == {step: whole.sizes[step] for step in range(2, 6)}
        elif same is None:
            assert max(map(max, rest.sizes.values())) > budget, "another budget than before is what is asked for"
        else:
            assert all(len(rest.sizes[step]) == len(rest.questions[step]) for step in range(2, 6)), "one at a time"
