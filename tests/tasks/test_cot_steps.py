"""Chain of thought in steps: whole images in each, losses and scores by stage, answers, cost, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import worlds
from cots import SHARED, Make, choose
from torch.utils.flop_counter import FlopCounterMode

from sameday.data.questions.sample import Sample
from sameday.hardware.machine import Machine
from sameday.hardware.ranks import Ranks
from sameday.spec.errors import BadInput
from sameday.spec.evaluation import Evaluation
from sameday.tasks.base import Answer, lower_budget
from sameday.tasks.cot.batch import CotBatch
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.cot.task import CotTask
from sameday.train.steps import Steps

# Whole images in steps and micro-batches


def test_epochs_of_whole_images(make_cot: Make) -> None:
    task = make_cot(effective_batch=5, num_epochs=4)
    images = {place.id: place.image for place in task.places}
    starts = [task.epoch_start(epoch) for epoch in range(6)]
    assert starts == sorted(set(starts)) and task.steps_per_epoch() == starts[1]
    ends = task.epoch_ends(starts[4])
    assert [step for step in range(1, starts[4] + 1) if step in ends] == starts[1:5]
    for epoch in range(4):
        steps = [task.step_ids(step) for step in range(starts[epoch], starts[epoch + 1])]
        assert sorted(i for step in steps for i in step) == list(range(len(task.places)))
        for step in steps[:-1]:
            last = images[task.places[step[-1]].id]
            without = [i for i in step if task.places[i].image != last]
            assert len(without) < 5 <= len(step), "images are taken until the batch is reached, and no further"
        of_step = [{task.places[i].image for i in step} for step in steps]
        assert sum(map(len, of_step)) == len(set(images.values())), "no image is in two steps"
    assert task.step_ids(starts[1]) != task.step_ids(0), "images are shuffled anew"
    assert make_cot(effective_batch=5).step_ids(starts[2]) == task.step_ids(starts[2]), "asked for without those before"


@pytest.mark.parametrize("plan", [{}, SHARED, SHARED | {"token_budget": 1}, {"packing": True, "max_questions": 4}])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_micro_batch_holds_whole_images(make_cot: Make, plan: dict[str, Any], ranks: int) -> None:
    task = make_cot(plan, effective_batch=9)
    for step in range(task.steps_per_epoch()):
        keys = {task.splits["train"][i].id: task.places[i].image for i in task.step_ids(step)}
        batches = [b for rank in range(ranks) for b in task.batches(step, None, Ranks(rank, ranks))]
        seen = [i for batch in batches for i in batch.sample_ids]
        assert sorted(seen) == sorted(keys)
        held = [{keys[i] for i in batch.sample_ids} for batch in batches]
        assert sum(map(len, held)) == len(set(keys.values())), "an image is in one micro-batch"
        if plan in ({}, SHARED | {"token_budget": 1}):
            assert all(len(images) == 1 for images in held)


def test_memory_that_runs_out_with_one_image(make_cot: Make) -> None:
    task = make_cot(SHARED, effective_batch=9)
    whole = task.smaller_budget(0, None, Ranks())
    assert whole is not None and len(list(task.batches(0, whole, Ranks()))) > 1
    assert task.smaller_budget(0, 1, Ranks()) is None
    with pytest.raises(Exception, match="out of memory with a single image with all of its questions in a micro-batch"):
        lower_budget("question", task, 0, 1, Ranks(), print)


# Losses and scores by stage


def test_losses_by_stage_are_parts_of_the_loss(make_cot: Make, cot_questions: list[Sample]) -> None:
    weights = {1: 0.5, 2: 0.0, 3: 2.0}
    task = make_cot(SHARED, effective_batch=6, heads={"rank": 3, "weights": weights})
    steps = Steps(task.recipe, task.plan, task, Ranks())
    for good in steps.run(range(task.steps_per_epoch())):
        ids = task.step_ids(good.step)
        counts = dict(zip((1, 2, 3), task.part_counts(ids), strict=True))
        assert sum(counts.values()) == task.count(ids)
        assert set(good.parts) == {f"loss_stage{stage}" for stage, n in counts.items() if n}
        parts = sum(weights[s] * n * good.parts[f"loss_stage{s}"] for s, n in counts.items() if n)
        assert good.loss == pytest.approx(parts / task.count(ids), rel=1e-5)
    steps.close()


def test_scores_by_stage(make_cot: Make) -> None:
    task = make_cot(SHARED)
    scores = task.evaluate("val", Ranks())
    parts = make_cot({}).evaluate("val", Ranks())
    assert scores.keys() == parts.keys() and scores["samples"] == len(task.splits["val"])
    assert scores["loss"] == pytest.approx(parts["loss"], rel=1e-5)
    asked = {stage: sum(s.stage == stage for s in task.splits["val"]) for stage in (1, 2, 3)}
    assert {name for name in scores if "stage" in name} == {f"exact_match_stage{s}" for s, n in asked.items() if n}
    with patch.object(task, "judged", lambda batch: (torch.ones(len(batch.target)), batch.stage != 2)):
        scores = task.evaluate("val", Ranks())
    assert scores["loss"] == pytest.approx(1.0) and scores["exact_match"] == 1 - asked[2] / sum(asked.values())
    assert all(scores[f"exact_match_stage{s}"] == float(s != 2) for s, n in asked.items() if n)


# Generation


def test_what_generation_asks_is_what_training_computes(make_cot: Make, cot_questions: list[Sample]) -> None:
    plan = {"share_images": True, "max_questions": None, "checkpointing": "full"}
    task = make_cot(plan, effective_batch=10**6)
    choose(task, cot_questions)
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch) and task.whole_images and batch.images > 4
    by_id = {sample.id: sample for sample in cot_questions}
    with torch.no_grad():
        hidden = task.model.hidden(batch)
        expected = task.logits(batch, hidden)
        logits = task.answer_logits(hidden[batch.prompt_at], [by_id[i] for i in batch.sample_ids])
        given = logits(hidden[batch.target_at], batch.owner)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", [{}, SHARED], ids=["plain", "shared"])
def test_answers_are_generated_with_heads_and_contexts(make_cot: Make, plan: dict[str, Any]) -> None:
    """The first token of every answer is the likeliest that training computes, which without heads is another one."""
    task = make_cot(plan)
    samples = task.splits["train"]
    with patch.object(CotTask, "answer", lambda _self, tokens: Answer("", int(tokens[0]))):
        parts = list(task.answers(samples, 1, Ranks()))
    first = {number: answer.tokens for part in parts for number, answer in part.items()}
    encoded = [task.encoder.encode(sample) for sample in samples]
    likeliest, headless = {}, {}
    for part in task._partition(encoded, task._cut(None), 1)[0]:
        batch = task._build(encoded, part)
        with torch.no_grad():
            hidden = task.model.hidden(batch)
            with_heads, base = task.logits(batch, hidden), task.model.logits(hidden, batch.target_at)
        owners = batch.owner.tolist()
        for number, index in enumerate(index for unit in part for index in unit.members):
            if sum(message.role == "assistant" for message in samples[index].messages) == 1:
                at = owners.index(number)
                likeliest[index], headless[index] = int(with_heads[at].argmax()), int(base[at].argmax())
    assert {index: first[index] for index in likeliest} == likeliest != headless
    assert len(first) == len(samples) and len(likeliest) > len(samples) // 2


def test_a_cascade_is_of_another_kind(make_cot: Make, cot_world: Path) -> None:
    task = make_cot()
    with pytest.raises(BadInput, match="cascade asks stage by stage, and here all questions of an image are asked"):
        CotSetup(task.recipe, cot_world).check_evaluation(Evaluation(split="train", cascade=True), task.splits)


# What a step costs


@pytest.mark.parametrize("rank", [3, "full"])
def test_the_heads_are_counted(make_cot: Make, rank: Any) -> None:
    task = make_cot(SHARED, effective_batch=8, heads={"rank": rank})
    (batch,) = task.batches(0, None, Ranks())
    assert isinstance(batch, CotBatch)
    hidden = task.model.hidden(batch).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        task.logits(batch, hidden).sum().backward()
    heads, targets = task.heads, len(batch.target_at)
    frozen = 4 * targets * heads.width * heads.vocabulary  # forward, and the gradient of its input
    executed, needed = heads.flops(targets, batch.images)
    assert executed.total + frozen == counter.get_total_flops()
    counted, cost = task.flops(batch), task.cost(0, None, Ranks())
    assert counted.executed.head.total == executed.total + frozen
    assert counted.needed.head.total == needed.total + frozen < counted.executed.head.total
    assert (cost.executed_flop, cost.flop) == (counted.executed.total, counted.needed.total)


def test_an_automatic_plan_leaves_room_for_the_heads(cot_world: Path, cot_model: Path) -> None:
    small, large = (CotSetup(worlds.cot_recipe(cot_model, heads={"rank": rank}), cot_world) for rank in (1, "full"))
    pairs = [
        tuple(
            setup.choose_plan(Machine("cuda", "a GPU", memory, 8, True), 1)[0].checkpointing for setup in (small, large)
        )
        for memory in range(5_000_000, 60_000_000, 500_000)
    ]
    least = ["none", "selective", "full"]
    assert {small for small, _ in pairs} == set(least)
    assert all(least.index(small) <= least.index(large) for small, large in pairs)
    assert {("none", "selective"), ("selective", "full")} <= set(pairs)


# Refusals


def refused(**recipe: Any) -> str:
    with pytest.raises(ValueError) as error:
        worlds.cot_recipe(Path("model"), **recipe)
    return str(error.value)


def test_orders_that_take_an_image_apart_are_refused() -> None:
    assert "order shuffle spreads an image's questions over the epoch" in refused(order="shuffle")
    assert "order curriculum takes stages apart" in refused(order="curriculum")
    assert "allowed: by_image (images at random), listed (images as in the file)" in refused(order="shuffle")
    assert "order.max_per_image 4 would take an image's questions apart" in refused(
        order={"kind": "by_image", "max_per_image": 4}
    )
    assert worlds.cot_recipe(Path("m")).order.kind == "by_image"
    assert worlds.cot_recipe(Path("m"), order="listed").order.kind == "listed"


def test_heads_that_make_no_sense_are_refused() -> None:
    assert "must be 1 to 8192, or 'full'" in refused(heads={"rank": 0})
    assert "there is no stage 4; allowed: 1, 2, 3" in refused(heads={"weights": {4: 1.0}})
    assert "each must be at least 0, and one of them more" in refused(heads={"weights": {1: -1.0}})
    assert "each must be at least 0, and one of them more" in refused(heads={"weights": {1: 0, 2: 0, 3: 0}})
    some = worlds.cot_recipe(Path("m"), heads={"weights": {3: 2}})
    assert some.heads.weights == {1: 1.0, 2: 1.0, 3: 2.0}
    again = type(some).model_validate(some.model_dump(mode="json"))
    assert again == some and again.fingerprint == some.fingerprint
    assert (
        worlds.cot_recipe(Path("m")).fingerprint
        == worlds.cot_recipe(Path("m"), heads={"rank": 3, "weights": {1: 1}}).fingerprint
    )


def test_a_line_without_a_stage_is_refused_with_its_place(tmp_path: Path, cot_model: Path) -> None:
    home = worlds.write_world(tmp_path, 0, (5,), hard=False)
    rows = [json.loads(line) | {"stage": 2} for line in (home / "train.jsonl").read_text().splitlines()]
    rows[1]["stage"], rows[3]["stage"] = None, 4
    rows[4]["answer"] = 7.5
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = worlds.cot_recipe(cot_model)
    with pytest.raises(BadInput) as error:
        CotSetup(recipe, home).audit(print, ("train",))
    assert str(error.value).splitlines() == [
        "2 problems in 2 lines:",
        "train.jsonl:2: has no 'stage'; needed: 1, 2, 3",
        "train.jsonl:4: 'stage' is 4; allowed: 1, 2, 3",
        "recipe.data.on_bad=skip leaves them out",
    ]
    skip = recipe.model_copy(update={"data": recipe.data.model_copy(update={"on_bad": "skip"})})
    said: list[str] = []
    audited = CotSetup(skip, home).audit(said.append, ("train",))
    assert audited.sizes == {"train": 3} and "has no 'stage'; needed: 1, 2, 3" in said[-1]


def test_the_best_weights_of_a_stage_need_questions_of_it(tmp_path: Path, cot_model: Path) -> None:
    home = worlds.write_world(tmp_path, 0, (4,), hard=False)
    rows = [json.loads(line) | {"stage": 1} for line in (home / "val.jsonl").read_text().splitlines()]
    (home / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stage in (1, 3):
        setup = CotSetup(worlds.cot_recipe(cot_model, best=f"exact_match_stage{stage}"), home)
        if stage == 1:
            assert setup.audit(print).sizes == {"train": 4, "val": 4}
        else:
            with pytest.raises(BadInput) as error:
                setup.audit(print)
            said = "recipe.best.metric exact_match_stage3: data.val has no question of stage 3"
            assert str(error.value) == said
