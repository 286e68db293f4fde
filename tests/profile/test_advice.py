"""Advice from figures that are given: the bottleneck comes first, and no promise is smaller than what it takes away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.profile.advice import COMPUTE, DATA, Facts, advise, bound_by
from sameday.spec.plan import Plan, fields_of

BEST = Plan(
    share_images=True,
    packing=True,
    max_questions=None,
    token_budget=8192,
    label_only_logits=True,
    compile="layers",
    optimizer_impl="fused",
    workers=8,
    pin_memory=True,
    cache="pixels",
)
GPU = Facts(
    task="vqa",
    device="cuda",
    plan=BEST,
    parts={
        "wait": 0.002,
        "copy": 0.001,
        "tower": 0.03,
        "forward": 0.08,
        "loss": 0.005,
        "backward": 0.15,
        "optimizer": 0.003,
    },
    cores=16,
    workers={"read": 0.001, "decode": 0.04, "resize": 0.006},
    floor=0.155,
    executed=0.17,
    alone=1.02,
    busy=0.95,
    free_memory=0.7,
    triton=True,
)
CPU = replace(GPU, device="cpu", busy=None, triton=False, plan=BEST.model_copy(update={"compile": "none"}))
BDH = Facts(
    task="classify",
    device="cuda",
    plan=Plan(level_kernel="plain", optimizer_impl="fused", pin_memory=True, images_on="device", workers=15),
    parts={"forward": 0.007, "backward": 0.014, "optimizer": 0.0005, "prepare": 0.0002},
    cores=16,
    floor=0.0008,
    executed=0.0008,
    alone=0.0008,
    busy=0.9,
    triton=True,
)


def changed(
    facts: Facts, parts: dict[str, float] | None = None, plan: dict[str, Any] | None = None, **more: Any
) -> Facts:
    return replace(facts, parts=facts.parts | (parts or {}), plan=facts.plan.model_copy(update=plan or {}), **more)


PLANTED: dict[str, tuple[Facts, str, str]] = {
    "a slow disk": (
        changed(GPU, {"wait": 0.9}, workers={"read": 7.0, "decode": 0.04, "resize": 0.006}, cores=9),
        "a faster disk",
        "data",
    ),
    "a slow decode": (
        changed(GPU, {"wait": 0.9}, {"cache": "none"}, workers={"read": 0.01, "decode": 9.0, "resize": 0.006}, cores=9),
        "plan.cache pixels",
        "data",
    ),
    "one worker": (
        changed(
            GPU, {"wait": 0.4}, {"workers": 1, "cache": "none"}, workers={"read": 0.01, "decode": 0.6, "resize": 0.05}
        ),
        "plan.workers 15",
        "data",
    ),
    "no worker": (
        changed(GPU, {"decode": 0.6, "resize": 0.05}, {"workers": 0, "cache": "none"}, workers={}),
        "plan.workers 15",
        "data",
    ),
    "tiny batches": (
        changed(GPU, {"forward": 0.3, "backward": 0.5}, busy=0.3, micro_batches=16.0),
        "a larger plan.token_budget",
        "launches",
    ),
    "tiny batches on a CPU": (
        changed(CPU, {"forward": 0.6, "backward": 0.9}, micro_batches=16.0),
        "a larger plan.token_budget",
        "launches",
    ),
    "a needless synchronise": (
        changed(GPU, {"forward": 0.2, "backward": 0.3}, busy=0.5, waits=(("model.py:7", 36),), micro_batches=2.0),
        "no synchronisation at model.py:7",
        "launches",
    ),
    "checkpointing": (
        changed(GPU, {"backward": 0.23}, {"checkpointing": "full"}),
        "plan.checkpointing none",
        "arithmetic",
    ),
    "each image for each question": (
        changed(GPU, {"tower": 0.24, "forward": 0.6, "backward": 1.1}, {"share_images": False}),
        "plan.share_images true",
        "arithmetic",
    ),
    "launches of small kernels": (
        changed(BDH, plan={"level_kernel": "fused"}, busy=0.4),
        "plan.cuda_graphs true",
        "launches",
    ),
    "plain levels": (BDH, "plan.level_kernel fused", "arithmetic"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_holds_a_step_up_is_named_first(name: str) -> None:
    facts, remedy, bound = PLANTED[name]
    found = advise(facts)
    assert remedy in found[0].remedy, [each.remedy for each in found]
    assert bound_by(facts) == bound


def test_a_good_plan_is_left_alone() -> None:
    assert [each.remedy for each in advise(GPU)] == ["plan.cache features"]
    (only,) = advise(GPU)
    assert only.at_most == pytest.approx(0.271 / (0.271 - 0.033), rel=1e-3) and "11% of the step" in only.why


def test_no_room_no_tower_no_advice() -> None:
    full = changed(GPU, {"backward": 0.23}, {"checkpointing": "full"}, free_memory=0.1, frozen_tower=False)
    assert not advise(full)


FACTS = st.builds(
    lambda facts, parts, workers, numbers, fields: replace(
        facts,
        parts=parts,
        workers=workers,
        plan=facts.plan.model_copy(update=fields | ({"workers": 0} if not workers else {})),
        floor=numbers[0] * sum(parts.values()),
        alone=numbers[0] * sum(parts.values()) * (1 + 9 * numbers[1]),
        executed=min(1.0, numbers[0] * (1 + numbers[1])) * sum(parts.values()),
        busy=None if facts.device == "cpu" else numbers[2],
        free_memory=numbers[1],
        micro_batches=1 + round(40 * numbers[3]),
        waits=(("x.py:1", 3),) if numbers[3] > 0.5 and facts.device == "cuda" else (),
    ),
    st.sampled_from([GPU, CPU, BDH]),
    st.dictionaries(st.sampled_from([*DATA, *COMPUTE, "optimizer", "other"]), st.floats(1e-6, 10), min_size=1),
    st.one_of(st.just({}), st.fixed_dictionaries({name: st.floats(0, 10) for name in ("read", "decode", "resize")})),
    st.tuples(*[st.floats(0.001, 1)] * 4),
    st.fixed_dictionaries(
        {
            "workers": st.integers(1, 20),
            "cache": st.sampled_from(["none", "pixels", "features"]),
            "share_images": st.booleans(),
            "checkpointing": st.sampled_from(["none", "full"]),
            "label_only_logits": st.booleans(),
            "optimizer_impl": st.sampled_from(["loop", "fused"]),
            "cuda_graphs": st.booleans(),
            "pin_memory": st.booleans(),
        }
    ),
)


@given(FACTS)
def test_promises_are_bounds(facts: Facts) -> None:
    """Never below 1, never above what the floor allows, never without a reason; and what it says to set can be set."""
    found = advise(facts)
    highest = facts.total / max(facts.floor, facts.total / 1000)
    for each in found:
        assert 1.02 <= each.at_most <= max(1.0, highest) * 1.000001 and each.why and "nan" not in each.why
        assert set(each.change) <= set(fields_of(facts.task))
        Plan.model_validate(facts.plan.model_dump() | each.change)
    assert [each.likely for each in found] == sorted((each.likely for each in found), reverse=True)
    assert len({each.remedy for each in found}) == len(found)
    assert bound_by(facts) in ("data", "launches", facts.bound)
