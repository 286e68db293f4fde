"""Multi-head chain of thought: batched over an image's questions and one question at a time are the same mathematics,
and no image's context reaches another's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import worlds
from cots import SHARED, Make, choose
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sameday.data.questions import tree
from sameday.data.questions.batch import make_batch
from sameday.data.questions.layout import lay_out
from sameday.data.questions.sample import Sample
from sameday.hardware.ranks import Ranks
from sameday.models.heads import Stages
from sameday.spec.plan import Plan
from sameday.tasks.cot.batch import CotBatch
from sameday.tasks.cot.task import CotTask
from sameday.train.steps import Steps

NEAR = 1e-5
"""The largest relative difference of a loss, or of the gradient of one kind of tensor."""
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared, packed": SHARED,
    "shared, split attention, padded": SHARED | {"attention": "split", "pad_to_multiple": 16},
    "shared rows, checkpointing": {"share_images": True, "max_questions": None, "checkpointing": "full"},
    "packed, small budget": {"packing": True, "max_questions": None, "token_budget": 90},
    "shared, a budget of one": SHARED | {"token_budget": 1},
}


# One question at a time, written out


def reference(task: CotTask, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    """The step's loss and gradients: a loop over images and their questions, each through the backbone by itself."""
    heads, recipe = dict(task.heads.named_parameters()), task.recipe
    images: dict[Any, list[Sample]] = {}
    for sample in samples:
        pixels = tuple(np.asarray(task.source.read_image(image).tensor).tobytes() for image in sample.images)
        images.setdefault(pixels or ("no image", sample.id), []).append(sample)
    total, divisor = torch.zeros(()), 0.0
    for members in images.values():
        states, answers = [], []
        for sample in members:
            encoded = task.encoder.encode(sample)
            layout = lay_out(
                [[encoded]],
                packing=False,
                family=task.encoder.family,
                merge_size=task.encoder.merge_size,
                loss_weight="token",
                pad_token=0,
            )
            states.append(task.model.hidden(make_batch(layout, task.source.read_image)))
            answers.append((np.flatnonzero(encoded.targets), encoded.tokens))

        def prompt_end(at: np.ndarray) -> int:
            """The place before the first token of the last answer."""
            return next(int(t) for t in reversed(at) if t - 1 not in at) - 1

        def mean(stage: int) -> Tensor:
            of = [
                state[prompt_end(at)]
                for state, (at, _), sample in zip(states, answers, members, strict=True)  # noqa: B023
                if sample.stage == stage
            ]
            return sum(of) / len(of) if of else torch.zeros(task.heads.width)  # type: ignore[return-value]

        first, second = mean(1), mean(2)
        for state, (at, tokens), sample in zip(states, answers, members, strict=True):
            h = state[torch.from_numpy(at - 1)]
            if sample.stage == 2:
                h = h + heads["P.21"] @ first
            if sample.stage == 3:
                h = h + heads["P.31"] @ first + heads["P.32"] @ second
            a, b = heads[f"A.{sample.stage}"], heads[f"B.{sample.stage}"]
            logits = task.model.head(h) + (h @ a.T) @ b.T
            each = F.cross_entropy(logits, torch.from_numpy(tokens[at]), reduction="none")
            by_sample = recipe.loss_weight == "sample"
            total = total + recipe.heads.weights[sample.stage or 0] * (each.mean() if by_sample else each.sum())
            divisor += 1 if by_sample else len(at)
    loss = total / divisor
    trained = task.trained()
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return loss.detach(), {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), gradients, strict=True)
    }


def batched(task: CotTask, ranks: int = 1) -> tuple[float, dict[str, Tensor]]:
    """The first step as training computes it. Ranks run one after another and add to the same buffer."""
    steps = Steps(task.recipe, task.plan, task, Ranks())
    task.training(True)
    steps.accumulate((batch for rank in range(ranks) for batch in task.batches(0, None, Ranks(rank, ranks))), 0)
    gradients = {name: p.grad.clone() for name, p in task.trained().items() if p.grad is not None}
    return float(steps.gradients.tail[0]), gradients


def kind(name: str) -> str:
    return name.split(".")[1] if name.startswith("heads") else "lora_A" if ".lora_A." in name else "lora_B"


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of the gradients of each kind of tensor."""
    found = {}
    for which in sorted({kind(name) for name in b}):
        x, y = (torch.cat([g[name].flatten() for name in b if kind(name) == which]) for g in (a, b))
        found[which] = float((x - y).norm() / y.norm().clamp_min(1e-12)) if y.any() else float(x.abs().max())
    return found


@pytest.fixture(scope="module")
def tasks(make_cot: Make) -> dict[str, CotTask]:
    weights = {"rank": 3, "weights": {1: 0.5, 3: 2.0}}
    some: dict[str, Any] = {"plain": {"loss_weight": "sample"}, "shared, packed": {"heads": weights}}
    return {name: make_cot(plan, effective_batch=10**6, **some.get(name, {})) for name, plan in PLANS.items()}


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), plan=st.sampled_from(sorted(PLANS)))
def test_batched_is_one_question_at_a_time(
    tasks: dict[str, CotTask], cot_questions: list[Sample], data: st.DataObject, plan: str
) -> None:
    """Over random mixtures of stages, images without a stage, and numbers of images."""
    chosen = data.draw(
        st.lists(st.sampled_from(cot_questions), min_size=1, max_size=8, unique_by=lambda sample: sample.id)
    )
    stages = data.draw(st.lists(st.sampled_from((1, 2, 3)), min_size=len(chosen), max_size=len(chosen)))
    samples = [replace(sample, stage=stage) for sample, stage in zip(chosen, stages, strict=True)]
    task = tasks[plan]
    choose(task, samples)
    loss, gradients = batched(task)
    expected, theirs = reference(task, samples)
    assert loss == pytest.approx(float(expected), rel=NEAR)
    off = apart(gradients, theirs)
    assert max(off.values()) < NEAR, off


def test_forks_leave_stages_and_contexts_as_they_are(
    make_cot: Make, cot_questions: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few words in these questions a fork must be worth one token to be there at all."""
    monkeypatch.setattr(tree, "LEAST", 1)
    task = make_cot(SHARED | {"share_text": True, "attention": "split"}, effective_batch=10**6)
    assert any(batch.fork.any() for batch in task.batches(0, None, Ranks()))
    loss, gradients = batched(task)
    expected, theirs = reference(task, cot_questions)
    assert loss == pytest.approx(float(expected), rel=NEAR)
    assert max(apart(gradients, theirs).values()) < NEAR


def test_full_heads_are_the_same_mathematics(make_cot: Make, cot_questions: list[Sample]) -> None:
    """B·A as one matrix gives the same logits, and the loss the same gradient of everything else."""
    low, full = make_cot(SHARED, effective_batch=10**6), make_cot(SHARED, effective_batch=10**6, heads={"rank": "full"})
    with torch.no_grad():
        for name, parameter in full.trained().items():
            if not name.startswith("heads.W"):
                parameter.copy_(low.trained()[name])
        for stage in "123":
            full.heads.W[stage].copy_(low.heads.B[stage] @ low.heads.A[stage])
    (loss, ours), (same, theirs) = batched(low), batched(full)
    assert loss == pytest.approx(same, rel=NEAR)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 8 and not {f"heads.A.{stage}" for stage in "123"} & shared
    off = apart({name: ours[name] for name in shared}, {name: theirs[name] for name in shared})
    assert max(off.values()) < NEAR, off


def test_training_starts_from_the_base_model(make_cot: Make, cot_world: Path, cot_model: Path) -> None:
    task = make_cot(SHARED, stirred=False, effective_batch=10**6)
    plain = worlds.make_task(
        cot_world, worlds.tiny_recipe(cot_model, effective_batch=10**6, order="listed"), Plan(**SHARED)
    )
    (ours,), (theirs,) = (list(each.batches(0, None, Ranks())) for each in (task, plain))
    assert set(ours.sample_ids) == set(theirs.sample_ids)
    (loss, _), (same, _) = task.loss_sum(ours, 0), plain.loss_sum(theirs, 0)
    assert loss.item() == pytest.approx(same.item(), rel=1e-6)
    zero = {name for name, p in task.trained().items() if name.startswith("heads") and not p.any()}
    assert zero == {f"heads.{name}" for name in ("B.1", "B.2", "B.3", "P.21", "P.31", "P.32")}
    again = make_cot(SHARED, stirred=False)
    assert all(torch.equal(p, again.trained()[name]) for name, p in task.trained().items()), "keyed by seed and name"
    assert not torch.equal(task.heads.A["1"], task.heads.A["2"])
    assert not torch.equal(task.heads.A["1"], make_cot(stirred=False, seed=1).heads.A["1"])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("rank", [3, "full"])
def test_other_formats(make_cot: Make, rank: Any) -> None:
    """bf16 as autocast computes it, and float64, which `sameday verify` asks where float32 leaves a doubt."""
    exact = make_cot({}, heads={"rank": rank})
    half = make_cot({"label_only_logits": True}, precision="bf16", heads={"rank": rank})
    batches = [next(iter(each.batches(0, None, Ranks()))) for each in (exact, half)]
    near, _ = half.loss_sum(batches[1], 0)
    loss, _ = exact.loss_sum(batches[0], 0)
    exact.module().double()
    double, losses = exact.loss_sum(batches[0], 0)
    double.backward()
    assert exact.heads.P["21"].dtype == torch.float64 and losses.dtype == torch.float32
    assert loss.item() == pytest.approx(double.item(), rel=1e-5) == pytest.approx(near.item(), rel=0.05)
    near.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in half.trained().values())


# Contexts


def two_images(task: CotTask, cot_questions: list[Sample]) -> CotBatch:
    """Both have questions of all stages, in one row."""
    images: dict[str, list[Sample]] = {}
    for sample in cot_questions:
        images.setdefault(sample.image_key, []).append(sample)
    whole = [members[:3] for members in images.values() if len(members) >= 3][:2]
    samples = [replace(sample, stage=stage) for members in whole for stage, sample in enumerate(members, 1)]
    choose(task, samples)
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch) and batch.images == 2
    return batch


def reach(task: CotTask, batch: CotBatch) -> dict[tuple[int, int], float]:
    """The largest derivative of the losses of one image's questions with respect to the states of another's."""
    found = {}
    hidden = task.model.hidden(batch).detach().requires_grad_()
    losses = F.cross_entropy(task.logits(batch, hidden), batch.target, reduction="none")
    of_target = torch.tensor([0, 0, 0, 1, 1, 1])[batch.owner]
    for image in (0, 1):
        (gradient,) = torch.autograd.grad(losses[of_target == image].sum(), hidden, retain_graph=True)
        for other in (0, 1):
            found[image, other] = float(gradient[batch.target_at[of_target == other]].abs().max())
    return found


def test_contexts_never_cross_images(tasks: dict[str, CotTask], cot_questions: list[Sample]) -> None:
    task = tasks["shared, packed"]
    found = reach(task, two_images(task, cot_questions))
    assert found[0, 1] == found[1, 0] == 0.0, "exactly nothing"
    assert min(found[0, 0], found[1, 1]) > 1e-3
    # And it shows where they do.
    of = Stages.of
    with patch.object(Stages, "of", lambda stages, images: of(stages, ["one"] * len(images))):
        (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch) and batch.images == 1
    found = reach(task, batch)
    assert min(found[0, 1], found[1, 0]) > 1e-3


def test_images_of_equal_content_are_one_whatever_their_names(tmp_path: Path, cot_model: Path) -> None:
    home = worlds.write_world(tmp_path, 0, (2,), hard=False)
    shutil.copy(home / "images/0.png", home / "images/copy.png")
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    rows = [rows[0] | {"stage": 1}, rows[1] | {"stage": 3, "image": "copy.png"}]
    chat = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "no"}]
    rows += [{"messages": chat, "images": [], "stage": 2}] * 2
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = worlds.make_cot(home, worlds.cot_recipe(cot_model, effective_batch=4, order="listed"), Plan(**SHARED))
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch)
    assert batch.sample_ids == (1, 2, 3, 4) and batch.image.tolist() == [0, 0, 1, 2]
    assert batch.share.tolist() == [[1, 0], [0, 0], [0, 1], [0, 1]]
    assert len(batch.grids) == 1, "the tower sees it once"


def test_ranks_share_whole_images(make_cot: Make) -> None:
    """More ranks than a step has images: some have nothing to do, and the sum is the same."""
    task = make_cot(SHARED, effective_batch=6)
    (loss, gradients), (alone, theirs) = batched(task, ranks=9), batched(task)
    assert loss == pytest.approx(alone, rel=NEAR) and max(apart(gradients, theirs).values()) < NEAR
    assert any(not list(task.batches(0, None, Ranks(rank, 9))) for rank in range(9))
