"""`sameday verify` finds every planted fault, and says in which step and where. A comparison that has never been seen
to fail proves nothing."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import arms
import planted
import pytest
import recordings
import sets
import torch
import worlds
from arms import Stage
from catalogue import SHARED, SPLIT, TEXT, UNEVEN, Fault
from faults import FAULTS
from faults_in_recording import PACKED, padded
from torch import Tensor

from sameday.hardware.ranks import Ranks
from sameday.spec.plan import Plan
from sameday.tasks.vqa import task as vqa
from sameday.train.optim import Gradients
from sameday.verify.arm import Plant
from sameday.verify.compare import Comparison, compare

RECIPE = recordings.RECIPE | {"loss_weight": "sample", "weight_decay": 0.1, "max_grad_norm": 5.0, "seed": 4}
COT: dict[str, Any] = {
    "effective_batch": 5,
    "max_pixels": 48 * 48,
    "heads": {"rank": 3, "weights": {2: 0.5}},
    "seed": 4,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, two_layers: Path) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("faults")
    home = worlds.write_world(root / "world", 4, (4, 2, 3, 2))
    recipe = worlds.tiny_recipe(two_layers, **RECIPE)
    # All arms start from the same files: read once, they cost a fifth less.
    base = vqa.load_base(recipe.model, recipe, torch.device("cpu"))
    with patch.object(vqa, "load_base", lambda *_: deepcopy(base)):
        yield Stage(root, home, recipe)


Stages = dict[str, Stage]


@pytest.fixture(scope="module")
def stages(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    root = tmp_path_factory.mktemp("faults-images")
    staged = worlds.cot_recipe(Path(stage.recipe.model), **COT)
    return {
        "vqa": stage,
        "templates": templated(root / "templates", 4, stage.recipe),
        "cot": Stage(root / "cot", stage.home, staged, steps=4),
        "classify": Stage(root, sets.write_set(root / "set"), sets.tiny_recipe()),
    }


def templated(root: Path, seed: int, recipe: Any) -> Stage:
    """Six questions to an image, so that each step has several of one template and several templates of one image."""
    home = worlds.write_world(root / "world", seed, (6, 6), hard=False, sizes=((48, 32),))
    return Stage(root, home, recipe.model_validate(recipe.model_dump() | {"prompt": recordings.TEMPLATES}), steps=4)


def compared(stages: Stages, fault: Fault, plant: Plant | None) -> Comparison:
    plan = Plan(**fault.plan)
    plain = stages[fault.task].plain(plan)
    _ = plain.arm, plain.reference  # before the other arm, whose plant must not reach them
    job = plain.job("plan", plan)
    trace = arms.run(job, plant) if fault.ranks == 1 else planted.run(job, fault.name if plant else None, fault.ranks)
    return plain.judged(trace)


def keeping(stages: Stages) -> Callable[[Fault], Comparison]:
    """The comparison of a fault's plan without the fault, made once for all faults of the plan."""
    known: dict[str, Comparison] = {}

    def without(fault: Fault) -> Comparison:
        key = json.dumps([fault.task, fault.ranks, fault.plan], sort_keys=True)
        if key not in known:
            known[key] = compared(stages, fault, None)
        return known[key]

    return without


@pytest.fixture(scope="module")
def unplanted(stages: Stages) -> Callable[[Fault], Comparison]:
    return keeping(stages)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(stages: Stages, unplanted: Callable[[Fault], Comparison], name: str) -> None:
    fault = FAULTS[name]
    assert unplanted(fault).same, listed(unplanted(fault))
    found = compared(stages, fault, fault.plant)
    assert not found.same, f"{fault.sentence} And nothing is different: {found.worst}"
    first = found.differences[0]
    assert first.step is not None and fault.place in f"{first.what}: {first.name}", listed(found)
    print(f"{name}: {first}")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PACKED, SPLIT], ids=["packed", "shared"])
def test_what_would_be_recorded_is_no_fault(stages: Stages, plan: dict[str, Any]) -> None:
    """The way on which faults are planted in recordings, without one."""
    plain = stages["vqa"].plain(Plan(**plan))
    _ = plain.arm, plain.reference
    found = plain.judged(arms.run(plain.job("plan", Plan(**plan)), lambda task, _ranks: padded(task)))
    assert found.same, listed(found)


def listed(found: Comparison) -> str:
    return "\n".join(map(str, found.differences))


def test_the_catalogue() -> None:
    """All that people are known to get wrong, each told apart, with what it does and where."""
    assert len(FAULTS) >= 24
    assert all(name == fault.name for name, fault in FAULTS.items())
    assert len({fault.sentence for fault in FAULTS.values()}) == len(FAULTS)
    assert all(not FAULTS[name].structural for name in TOO_SMALL), "what is compared exactly is always found"
    for fault in FAULTS.values():
        assert fault.sentence.endswith(".")
        assert importlib.util.find_spec(f"sameday.{fault.where}"), fault


@pytest.mark.slow
def test_the_trial_holds_what_the_faults_are_about(stage: Stage) -> None:
    """Else a fault would change nothing, and its test would say nothing."""
    records = stage.plain(Plan(**SHARED)).arm.records
    norms = [record.norm for record in records]
    assert min(norms) < RECIPE["max_grad_norm"] < max(norms), "clipping is at work in some steps, not in all"
    assert [len(record.facts["order"]) for record in records] == [6, 6, 3, 6, 6, 6, 3], "a partial batch"
    branches, sizes = [], []
    for plan in (SHARED, UNEVEN):
        task = worlds.make_task(stage.home, stage.recipe, Plan(**plan))
        for step in range(task.steps_per_epoch()):
            batches = list(task.batches(step, None, Ranks()))
            branches += [branches_of(batch.group, batch.branch) for batch in batches]
            sizes.append({len(batch.sample_ids) for batch in batches})
    assert any(len([n for n in each if n > 1]) > 1 for each in branches), "two groups of several questions in a row"
    assert any(len(each) > 1 for each in sizes), "micro-batches of different sizes in a step"


@pytest.mark.slow
def test_the_trial_with_templates_has_forks(stages: Stages) -> None:
    stage = stages["templates"]
    task = worlds.make_task(stage.home, stage.recipe, Plan(**TEXT))
    batches = [batch for step in range(task.steps_per_epoch()) for batch in task.batches(step, None, Ranks())]
    assert all(int(batch.fork.max()) > 1 for batch in batches), "two templates in each group, one of them shared"


def branches_of(group: Tensor, branch: Tensor) -> list[int]:
    """The number of branches of each group."""
    return [int(branch[group == g].max()) for g in range(int(group.max()) + 1)]


# How much of it is left in bf16

SEEDS = (0, 1, 2)
TOO_SMALL = {
    "angles in half precision": "positions are below 128 here, and bf16 rounds everything else as much",
    "gradients sent in half precision": "one more rounding to bf16 after many",
    "validation averages averages": "moves the validation loss less than rounding may",
}
"""Faults that are seen in float32 and not in bf16, and why."""


def half_stages(root: Path, seed: int) -> Stages:
    """Small enough for a CPU that has no bf16. All images are of one size, and all norms are clipped."""
    home = worlds.write_world(root / "world", seed, (4, 2, 3), hard=False, sizes=((48, 32),))
    model = worlds.write_tiny(root / "model", seed=seed, text={"num_hidden_layers": 2})
    changes = RECIPE | {"precision": "bf16", "max_grad_norm": 1.0, "seed": seed}
    staged = COT | {"precision": "bf16", "seed": seed}
    images = sets.tiny_recipe(precision="bf16", seed=seed)
    recipe = worlds.tiny_recipe(model, **changes)
    return {
        "vqa": Stage(root, home, recipe, steps=4),
        "templates": templated(root / "templates", seed, recipe),
        "cot": Stage(root / "cot", home, worlds.cot_recipe(model, **staged), steps=4),
        "classify": Stage(root / "images", sets.write_set(root / "set"), images, steps=4),
    }


def catch_rates(root: Path, names: Iterable[str]) -> tuple[dict[str, list[bool]], list[str]]:
    """For each fault whether it was found, seed by seed, and what went wrong besides. Prints a table."""
    names = [name for name in names if not FAULTS[name].only_float32]
    caught: dict[str, list[bool]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    problems: list[str] = []
    for seed in SEEDS:
        stages = half_stages(root / str(seed), seed)
        without = keeping(stages)
        for name in names:
            fault = FAULTS[name]
            found = compared(stages, fault, fault.plant)
            caught[name].append(not found.same)
            ratios[name].append(max(found.worst[f"ratio_{what}"] for what in ("all", "group", "tensor")))
            if not without(fault).same:
                problems.append(f"seed {seed}, {fault.plan} without a fault:\n{listed(without(fault))}")
            first = f"{found.differences[0].what}: {found.differences[0].name}" if found.differences else "nothing"
            if fault.structural and fault.place not in first:
                problems.append(f"seed {seed}, {name}: {first}, where {fault.place} is expected")
            print(f"seed {seed}, {name}: {found.differences[0] if found.differences else 'nothing'}", flush=True)
    print(f"\n{'bf16, fault':40}{'shows in':>12}{'caught':>10}{'largest R':>11}")
    for name in names:
        count = f"{sum(caught[name])} of {len(SEEDS)}"
        kind = "structure" if FAULTS[name].structural else "numbers"
        small = "" if any(caught[name]) else f"  too small for bf16: {TOO_SMALL.get(name, 'why?')}"
        print(f"{name:40}{kind:>12}{count:>10}{max(ratios[name]):11.2f}{small}")
    return caught, problems


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_catch_rates_in_bf16(tmp_path: Path) -> None:
    caught, problems = catch_rates(tmp_path, FAULTS)
    assert not problems, "\n".join(problems)
    missed = {name for name, each in caught.items() if not any(each)}
    assert missed <= TOO_SMALL.keys(), sorted(missed - TOO_SMALL.keys())


def test_a_gradient_clipped_by_another_norm_is_found_in_both_arms(stages: Stages) -> None:
    """What both arms do wrong is no difference between them: each is held against what it told itself."""
    half = patch.object(Gradients, "norm", lambda gradients: torch.linalg.vector_norm(gradients.all[::2]))
    job = stages["classify"].plain(Plan()).job("half", Plan())
    trace = arms.run(job, lambda _task, _ranks: half)
    found = compare(trace, trace, None).differences
    assert [each.name for each in found] == ["its norm", "its norm"] and found[0].step == 1
    told = r"\d\.\de[+-]\d\d away from what the plan told, clipped as the recipe says \(limit 2e-03\)"
    assert re.fullmatch(told, found[0].text)
