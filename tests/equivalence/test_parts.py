"""Adapters on the vision tower and the projector, DoRA and rsLoRA: the same loss and gradients in every layout, and as
plain PEFT gives them on the plain model of transformers, which loads what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from arms import Stage
from peft import PeftModel
from test_gradients import PLANS, Bench, Result, Scenario, assert_same, distance, scenario, work
from test_square import their_questions
from transformers import AutoModelForImageTextToText
from worlds import FAMILIES, SQUARE, tiny_recipe, write_world

from sameday.models import vlm
from sameday.models.families import family_of
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask
from sameday.verify.peer import loop

pytestmark = pytest.mark.slow

TOWER, PROJECTOR = "tower.all-linear", "projector.all-linear"
EVERY: dict[str, list[str]] = {family: ["q_proj", TOWER, PROJECTOR] for family in (*FAMILIES, *SQUARE)}
EVERY["gemma3"].remove(PROJECTOR)
"""Its projector has no linear layer."""
FORMS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rslora": True},
    "qwen2_5_vl": {"dora": True, "rslora": True},
    "qwen3_vl": {"dora": True},
    "llava": {"dora": True},
    "gemma3": {"rslora": True},
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path]) -> Bench:
    return Bench(tmp_path_factory.mktemp("worlds"), dict(tiny_models))


def scene(family: str, targets: list[str], batch: int = 8, **lora: Any) -> Scenario:
    """Conversations, and in larger batches a question about no image, are among them."""
    how = {"r": 3, "alpha": 8, "target_modules": targets, **lora}
    asked = {"order": "by_image", "loss_weight": "sample", "effective_batch": batch}
    return scenario(family, 2, (6, 2), True, lora=how, **asked)


def parts_of(task: VqaTask) -> set[str]:
    return {task.model.family.part_of(name) for name in task.trained()}


@pytest.mark.parametrize("family", EVERY)
def test_gradients_flow_into_the_tower_through_what_questions_share(bench: Bench, family: str) -> None:
    here = scene(family, EVERY[family], **FORMS[family])
    expected = bench.plain(here)
    assert all(tensor.any() for tensor in expected.tensors.values()), "an adapter that learns nothing"
    for plan in ("shared, packed", "shared, checkpointing", "shared, selective"):
        task = bench.task(here, PLANS[plan])
        assert parts_of(task) == {"decoder", "tower", *(["projector"] if PROJECTOR in EVERY[family] else [])}
        assert_same(work(task), expected)
    assert_same(work(task, size=2), expected)


@pytest.mark.parametrize("family", EVERY)
def test_a_saved_adapter_is_the_same_in_plain_peft(bench: Bench, family: str, tmp_path: Path) -> None:
    """Loss and gradients of a step, by the library's own forward and PEFT's own layers of the files that we wrote."""
    here = scene(family, EVERY[family], **FORMS[family])
    task = bench.task(here, PLANS["shared, packed"])
    task.save(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(bench.models[family], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True).train()
    ours = work(task)
    ids, total = task.step_ids(0), 0.0
    for inputs in their_questions(task, ids, task.encoder.closing):
        loss = model(**inputs).loss / len(ids)
        loss.backward()
        total += float(loss.detach())
    tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert tensors.keys() == ours.tensors.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert_same(ours, Result(total, torch.cat([tensors[name].flatten() for name in ours.tensors]), tensors))
    task.training(False)
    (inputs,) = their_questions(task, ids[:1], task.encoder.closing)
    encoded = task._encode(task.splits["train"][ids[0]])
    [[part]] = task._partition([encoded], task._cut(None), 1)
    with torch.no_grad():
        mine = task.model.logits(task.model.hidden(task._build([encoded], part)), torch.arange(encoded.length))
        theirs = model.eval()(**{name: x for name, x in inputs.items() if name != "labels"}).logits[0]
    torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-5)
    assert (inputs["labels"][0] != loop.IGNORED).tolist() == encoded.targets.tolist()


@pytest.mark.parametrize("family", SQUARE)
def test_bare_names_are_the_decoders_in_plain_peft_too(bench: Bench, family: str, tmp_path: Path) -> None:
    """Their towers have a q_proj too."""
    task = bench.task(scenario(family, 2, (6, 2), lora={"r": 2, "alpha": 4}))
    assert parts_of(task) == {"decoder"}
    task.save(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(bench.models[family], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path))
    there = {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}
    assert there.keys() == task.trained().keys()
    assert all(torch.equal(there[name], p) for name, p in task.trained().items())


# Dropout is keyed by an image's content and a place in it


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_the_same_is_dropped_of_an_image_computed_once_or_for_each_question(bench: Bench, family: str) -> None:
    here = scene(family, [TOWER, PROJECTOR], 16, dropout=0.2)
    assert any(not batch.grids for batch in bench.plain(here).batches), "a question that teaches the tower nothing"
    assert_same(work(bench.task(here, PLANS["shared, packed"]), size=2), bench.plain(here))
    assert distance(bench.plain(here).flat, bench.plain(scene(family, [TOWER, PROJECTOR], 16)).flat) > 1e-2


# Other ways to compute


def test_compiled_layers_compute_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "eager")
    torch._dynamo.reset()
    here = scene("qwen3_vl", EVERY["qwen3_vl"], dora=True, dropout=0.1)
    plan = PLANS["shared, packed"]
    assert_same(work(bench.task(here, plan | {"compile": "layers"})), work(bench.task(here, plan)))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_vl", [PROJECTOR]),
        ("gemma3", ["down_proj", "tower.out_proj"]),
    ],
)
def test_bf16_is_float32_but_for_rounding(bench: Bench, tmp_path: Path, family: str, targets: list[str]) -> None:
    results = {}
    for precision in ("bf16", "float32"):
        how = {"r": 3, "alpha": 8, "target_modules": targets, "dora": True}
        here = scenario(family, 2, (6, 2), True, lora=how, effective_batch=2, precision=precision)
        results[precision] = work(Bench(tmp_path / precision, bench.models).task(here, PLANS["shared, packed"]))
    rounded, exact = results.values()
    assert all(tensor.dtype == torch.float32 for tensor in rounded.tensors.values())
    alike = torch.nn.functional.cosine_similarity(rounded.flat, exact.flat, dim=0)
    assert alike > 0.9 and rounded.loss == pytest.approx(exact.loss, rel=0.02)


def test_verify_finds_the_same_model_in_both_layouts(tmp_path: Path, two_layers: Path) -> None:
    """Killed and resumed on the way, with rates of their own; and a gradient that does not reach the tower is found."""
    home = write_world(tmp_path / "world", 1, (3, 2), hard=False, sizes=((48, 32),))
    lora = {"r": 2, "alpha": 4, "dora": True, "dropout": 0.1, "target_modules": ["q_proj", "tower.qkv", PROJECTOR]}
    rates = {"tower": 1e-4, "projector": 3e-4}
    recipe = tiny_recipe(two_layers, effective_batch=4, order="by_image", lora=lora, learning_rates=rates)
    stage = Stage(tmp_path, home, recipe, steps=4)
    plan = Plan(share_images=True, packing=True, max_questions=None, device="cpu")
    found = stage.compare(plan)
    assert found.same, [*map(str, found.differences)]

    def detached(task: VqaTask, _ranks: Any) -> Any:
        features = task.model.image_features
        cut = lambda *what: [each.detach().requires_grad_() for each in features(*what)]  # noqa: E731
        return patch.object(task.model, "image_features", cut)

    (first, *_) = stage.compare(plan, detached).differences
    assert first.what == "gradient" and ".visual." in first.name


def test_blocks_that_no_output_depends_on_get_no_adapter(bench: Bench) -> None:
    """LLaVA takes the output of the last block but one."""
    task = bench.task(scene("llava", [TOWER]))
    blocks = {name.split(".layers.")[1].split(".")[0] for name in task.trained()}
    assert blocks == {"0", "1"}
    assert family_of("llava").idle(task.model.module.base_model.model)
