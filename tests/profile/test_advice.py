"""Advice from figures that are given: the bottleneck comes first, and no promise is smaller than what it takes away."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sets
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.machine import Machine
from sameday.hardware.phases import PHASES
from sameday.profile.advice import COMPUTE, DATA, ONCE, OTHER, Cut, Facts, Remedy, advise, bound_by, differing
from sameday.spec.plan import Plan, fields_of
from sameday.spec.plan import changed as changed_fields
from sameday.spec.recipe import Recipe
from sameday.spec.vqa import VqaRecipe
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.setup import TaskSetup
from sameday.tasks.vqa.automatic import choose_plan
from sameday.tasks.vqa.setup import VqaSetup

RECIPE = VqaRecipe(model="m", data={"train": "t.jsonl"}, effective_batch=4, learning_rate=1e-4, num_epochs=1)
QUESTIONS, PICTURES = VqaSetup(RECIPE, Path()), ClassifySetup(sets.tiny_recipe(precision="bf16"), Path())
VQA, CLASSIFY = (frozenset(fields_of(setup.recipe)) for setup in (QUESTIONS, PICTURES))
COMMON = frozenset(fields_of(Recipe))
"""What every task follows."""
BEST = Plan(
    share_images=True,
    share_text=True,
    packing=True,
    max_questions=None,
    token_budget=8192,
    label_only_logits=True,
    compile="layers",
    optimizer_impl="fused",
    workers=8,
    pin_memory=True,
    cache="pixels",
    cuda_graphs=True,
)
GPU = Facts(
    device="cuda",
    plan=BEST,
    fields=VQA,
    phases={
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
    memory=100 * 2**30,
    used=30 * 2**30,
    triton=True,
)
CPU = replace(
    GPU, device="cpu", busy=None, triton=False, plan=BEST.model_copy(update={"compile": "none", "cuda_graphs": False})
)
BDH = Facts(
    device="cuda",
    plan=Plan(level_kernel="plain", optimizer_impl="fused", pin_memory=True, images_on="device", workers=15),
    fields=CLASSIFY,
    phases={"forward": 0.007, "backward": 0.014, "optimizer": 0.0005, "prepare": 0.0002},
    cores=16,
    floor=0.0008,
    executed=0.0008,
    alone=0.0008,
    busy=0.9,
    triton=True,
)


def changed(
    facts: Facts, phases: dict[str, float] | None = None, plan: dict[str, Any] | None = None, **more: Any
) -> Facts:
    return replace(facts, phases=facts.phases | (phases or {}), plan=facts.plan.model_copy(update=plan or {}), **more)


def setup_for(facts: Facts) -> TaskSetup:
    return QUESTIONS if facts.fields == VQA else PICTURES


def cuts_to_try(facts: Facts, plan: Plan) -> list[dict[str, Any]]:
    """Only the fields that differ, as `sameday profile` counts them."""
    changes = setup_for(facts).cuts(facts.device, plan)
    return [change for change in (differing(plan, each) for each in changes) if change]


TRAINED_TOWER = frozenset({("cache", "features"), ("keep_features", True), ("cuda_graphs", True)})
LARGER = Cut({"token_budget": 32768}, 1.0, 0.17)
WHOLE = Cut({"micro_batch": None}, 1.0, 0.0008)
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
        changed(GPU, {"forward": 0.3, "backward": 0.5}, busy=0.3, micro_batches=16.0, cuts=(LARGER,)),
        "plan.token_budget 32768",
        "launches",
    ),
    "tiny batches on a CPU": (
        changed(
            CPU,
            {"forward": 0.6, "backward": 0.9},
            {"token_budget": 64},
            micro_batches=16.0,
            cuts=(Cut({"token_budget": 512}, 2.0, 0.18), Cut({"token_budget": 2048}, 1.0, 0.3)),
        ),
        "plan.token_budget 512",
        "small operations",
    ),
    "long rows on a CPU": (
        changed(CPU, {"forward": 0.6, "backward": 0.9}, executed=0.5, cuts=(Cut({"token_budget": 1024}, 2.0, 0.2),)),
        "plan.token_budget 1024",
        OTHER,
    ),
    "a needless synchronise": (
        changed(
            GPU,
            {"forward": 0.2, "backward": 0.3},
            busy=0.5,
            waits=(("model.py:7", 36),),
            micro_batches=2.0,
            cuts=(LARGER,),
        ),
        "no synchronisation at model.py:7",
        "launches",
    ),
    "checkpointing": (
        changed(GPU, {"backward": 0.23}, {"checkpointing": "full"}),
        "plan.checkpointing none",
        "arithmetic",
    ),
    "each image for each question": (
        changed(
            GPU,
            {"tower": 0.24, "forward": 0.6, "backward": 1.1},
            {"share_images": False, "max_questions": 1, "packing": False},
            executed=1.05,
            samples=64.0,
            micro_batches=64.0,
            cuts=(
                Cut({"share_images": True, "packing": True, "max_questions": None}, 2.0, 0.17),
                Cut({"max_questions": None}, 8.0, 1.05),
            ),
        ),
        "plan.share_images true, plan.packing true, plan.max_questions null",
        "arithmetic",
    ),
    "templates for each question": (
        changed(
            GPU,
            {"forward": 0.12, "backward": 0.23},
            {"share_text": False},
            executed=0.26,
            cuts=(Cut({"share_text": True}, 1.0, 0.17),),
        ),
        "plan.share_text true",
        "arithmetic",
    ),
    "launches of small kernels": (
        changed(BDH, plan={"level_kernel": "fused"}, busy=0.4),
        "plan.cuda_graphs true",
        "launches",
    ),
    "launches of a decoder's kernels": (
        changed(GPU, plan={"cuda_graphs": False}, busy=0.5),
        "plan.cuda_graphs true",
        "launches",
    ),
    "rows that cannot be recorded yet": (
        changed(GPU, plan={"cuda_graphs": False, "packing": False, "attention": "flex"}, busy=0.5),
        "plan.cuda_graphs true, plan.packing true, plan.attention auto",
        "launches",
    ),
    "plain levels": (BDH, "plan.level_kernel fused", OTHER),
    "weights that are read for every sample": (
        changed(BDH, plan={"level_kernel": "fused", "micro_batch": 1}, moved=0.012, micro_batches=8.0, cuts=(WHOLE,)),
        "plan.micro_batch null",
        "memory",
    ),
}


def test_the_words_of_a_cut_are_those_of_the_task() -> None:
    slow = changed(CPU, {"forward": 0.6, "backward": 0.9}, executed=0.5)
    rows = ({"token_budget": 1024}, "a dense mask grows with the square of a row, and shorter rows")
    for change, words in (rows, ({"micro_batch": 64}, "smaller micro-batches")):
        (cut,) = (each for each in advise(replace(slow, cuts=(Cut(change, 2.0, 0.2),))) if each.change == change)
        assert cut.why == f"{words} have 60% fewer matmuls"


def test_threads_that_stand_in_each_others_way_are_a_remedy() -> None:
    crowded = changed(CPU, {"forward": 0.3, "backward": 0.3}, threads=2, fewer=((1, 0.069),))
    first = advise(crowded)[0]
    assert first.remedy == 'plan.environment {"OMP_NUM_THREADS": "1"}'
    assert first.why == "timed here: 0.069 s a step with 1 thread, 0.641 with 2 threads"
    assert 0.641 / 0.069 < first.at_most < 1.2 * 0.641 / 0.069
    assert first.change == {"environment": {"OMP_NUM_THREADS": "1"}}
    kept = advise(changed(crowded, plan={"environment": {"MALLOC_ARENA_MAX": "2"}}))[0]
    assert kept.change == {"environment": {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}}
    for fewer in ((), ((1, 0.9), (4, 0.6)), ((1, 0.639),)):
        assert not [each for each in advise(replace(crowded, fewer=fewer)) if "environment" in each.change]


@pytest.mark.parametrize("name", PLANTED)
def test_what_holds_a_step_up_is_named_first(name: str) -> None:
    facts, remedy, bound = PLANTED[name]
    found = advise(facts)
    assert remedy in found[0].remedy, [each.remedy for each in found]
    assert bound_by(facts) == bound


def test_a_good_plan_is_left_alone() -> None:
    assert [each.remedy for each in advise(GPU)] == ["plan.keep_features true", "plan.cache features"]
    (only,) = named(GPU, "cache")
    assert only.at_most == pytest.approx(0.271 / (0.271 - 0.033), rel=1e-3)
    assert only.bound == "if 12.2% of the step went away"
    assert only.why == (
        "the frozen tower is 11.1% of the step, and its images go with it: waiting for data 0.7% + copy to the device "
        "0.4% = 1.1% of the step; `sameday cache` says whether the disk keeps up"
    )
    slow = changed(GPU, {"wait": 0.02, "decode": 0.01}, {"workers": 1})
    (workers,) = named(slow, "workers")
    assert workers.why == (
        "data is prepared by 1 worker: waiting for data 6.7% + decode 3.3% = 10.0% of the step; there are 16 cores"
    )
    assert workers.bound == "if 10.0% of the step went away" and workers.at_most == pytest.approx(1 / 0.9, rel=2e-3)


def test_no_room_no_tower_no_advice() -> None:
    full = changed(GPU, {"backward": 0.23}, {"checkpointing": "full"}, used=90 * 2**30, cannot=TRAINED_TOWER)
    assert not advise(full) and not advise(changed(full, busy=0.3, micro_batches=16.0, cuts=(LARGER,)))


def named(facts: Facts, *fields: str) -> list[Remedy]:
    """Remedies that set at least these."""
    return [each for each in advise(facts) if set(fields) <= set(each.change)]


def test_memory_is_told_as_it_was_measured() -> None:
    slow = changed(CPU, {"backward": 0.23}, {"checkpointing": "full"}, used=0.6 * 2**30, memory=31.3 * 2**30)
    (found,) = named(slow, "checkpointing")
    assert found.why == "layers are computed twice, and this process used 0.6 of 31.3 GiB at most"
    (partly,) = named(changed(slow, {}, {"checkpointing": "selective"}), "checkpointing")
    assert partly.why == "most of each layer is computed twice, and this process used 0.6 of 31.3 GiB at most"


# Micro-batches


def test_all_that_shrinks_with_fewer_micro_batches_is_promised() -> None:
    """Measured with examples/patterns_bdh.yaml on two cores: 318 ms a step with micro_batch 1, and 63 with 32."""
    phases = {"wait": 65.2, "copy": 1.0, "prepare": 3.6, "forward": 110.3, "loss": 5.0, "backward": 128.0}
    phases |= {"optimizer": 1.4, "log": 0.1, "other": 3.6}
    facts = Facts("cpu", Plan(micro_batch=1), CLASSIFY, phases, 2, 32.0, 32.0, executed=3.1, floor=2.2, alone=2.2)
    first = advise(replace(facts, cuts=(Cut({"micro_batch": None}, 1.0, 3.1),)))[0]
    assert first.remedy == "plan.micro_batch null" and first.at_most > 318 / 63
    assert bound_by(facts) == "small operations"


COSTS = st.fixed_dictionaries({name: st.floats(0, 1) for name in (*DATA, *COMPUTE, "other")})


@given(COSTS, COSTS, st.floats(0.01, 1), st.integers(2, 64), st.sampled_from(["cpu", "cuda"]), st.floats(0, 1))
def test_no_larger_micro_batch_beats_its_promise(
    calls: dict[str, float], work: dict[str, float], matmuls: float, pieces: int, device: str, busy: float
) -> None:
    """Where each part takes so much for every micro-batch, and so much for a step."""
    once = {name: 0.01 for name in ONCE}
    executed = matmuls * sum(work[name] for name in COMPUTE)
    before, after = (once | {name: count * calls[name] + work[name] for name in calls} for count in (pieces, 1))
    facts = Facts(device, Plan(micro_batch=1, workers=64), CLASSIFY, before, 4, pieces, pieces)
    facts = replace(facts, floor=executed, executed=executed, cuts=(Cut({"micro_batch": None}, 1.0, executed),))
    facts = replace(facts, busy=None if device == "cpu" else busy, memory=2.0)
    for found in named(facts, "micro_batch"):
        assert found.at_most * 1.000001 >= sum(before.values()) / sum(after.values())


def demo(budget: int) -> Facts:
    """`runs/demo` on a core, as it was measured with each budget: seconds of computing, of all, and micro-batches."""
    measured = {
        256: (0.325, 0.053, 8.0),
        512: (0.291, 0.070, 4.0),
        1024: (0.365, 0.103, 2.0),
        2048: (0.544, 0.170, 1.0),
        8192: (0.544, 0.170, 1.0),
    }
    compute, executed, pieces = measured[budget]
    sharing = {"share_images": True, "share_text": True, "packing": True, "max_questions": None}
    plan = Plan(**sharing, token_budget=budget, label_only_logits=True)
    phases = {"wait": 0.03, "decode": 0.002, "forward": compute / 3, "backward": compute / 1.5, "optimizer": 0.005}
    facts = Facts("cpu", plan, VQA, phases, 2, 64.0, pieces, floor=0.028, executed=executed, alone=0.13)
    cuts = [Cut(each, *measured[each["token_budget"]][:0:-1]) for each in cuts_to_try(facts, plan)]
    return replace(facts, cuts=tuple(cuts))


@pytest.mark.parametrize(("budget", "better"), [(256, 512), (512, None), (1024, None), (2048, 1024), (8192, 1024)])
def test_a_cpu_is_told_no_budget_that_makes_it_slower(budget: int, better: int | None) -> None:
    facts = demo(budget)
    assert [each.change["token_budget"] for each in named(facts, "token_budget")] == ([better] if better else [])
    if better:
        (found,) = named(facts, "token_budget")
        assert found.at_most > facts.total / demo(better).total > 1


@given(
    st.sampled_from(["cpu", "cuda"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 10**5),
    st.none() | st.integers(1, 9),
)
def test_cuts_are_whole_changes(device: str, share: bool, pack: bool, budget: int, most: int | None) -> None:
    """No budget is beyond what would be chosen for a CPU; no field is named that is so already; none is forgotten
    without which nothing would change."""
    plan = Plan(share_images=share, packing=pack, token_budget=budget, max_questions=most)
    chosen, _ = choose_plan(
        RECIPE, Machine("cpu", "CPU", 2**34, 4, False), SimpleNamespace(get_text_config=lambda: None), 1
    )
    for change in cuts_to_try(replace(GPU, device=device), plan):
        after = plan.model_copy(update=change)
        assert all(getattr(plan, name) != value for name, value in change.items()) and after.max_questions is None
        assert device == "cuda" or after.token_budget <= chosen.token_budget
        assert after.share_images == share or (after.share_images and after.packing)
    assert cuts_to_try(replace(BDH, device=device), Plan()) == []


def test_text_that_is_computed_for_each_question_is_named() -> None:
    slow = changed(GPU, {"forward": 0.12, "backward": 0.23}, {"share_text": False}, executed=0.26)
    cuts = [Cut(change, 1.0, 0.17) for change in cuts_to_try(slow, slow.plan) if "share_text" in change]
    (found,) = named(replace(slow, cuts=tuple(cuts)), "share_text")
    assert found.change == {"share_text": True}
    assert found.why == "what an image's questions have in common after it is computed for each, 35% of the matmuls"
    assert not named(replace(slow, cuts=(Cut({"share_text": True}, 1.0, 0.26),)), "share_text"), "nothing in common"


# Data


def test_features_are_kept_in_memory_that_is_free() -> None:
    plain = changed(GPU, {}, {"cache": "none"})
    (memory,) = named(plain, "keep_features")
    assert memory.change == {"keep_features": True}
    assert memory.at_most == pytest.approx(0.271 / (0.271 - 0.030), rel=1e-2) and memory.why == (
        "the frozen tower is 11.1% of the step, and an image that comes again need not be computed again, as far as "
        "there is memory that steps leave free"
    )
    for other in (replace(plain, used=0.7 * plain.memory), replace(plain, cannot=TRAINED_TOWER)):
        assert not named(other, "keep_features")
    assert named(changed(GPU, {}, {"cache": "pixels"}), "keep_features"), "decoded images may be on a disk besides"
    for kept in ({"cache": "features"}, {"keep_features": True}):
        found = [name for each in advise(changed(GPU, {}, {"cache": "none"} | kept)) for name in each.change]
        assert "keep_features" not in found and "cache" not in found


def test_a_worker_needs_a_core() -> None:
    alone = changed(CPU, {"decode": 0.6}, {"workers": 0, "cache": "none"}, workers={}, cores=1)
    assert not named(alone, "workers") and named(alone, "cache") and "cores" not in str(advise(alone))
    assert named(replace(alone, cores=2), "workers")[0].change == {"workers": 1}


def test_what_takes_no_time_is_not_kept() -> None:
    """A tenth of the step is waited for, and next to nothing of it is decoding."""
    waiting = changed(CPU, {"wait": 0.03}, {"workers": 15, "cache": "none"}, workers={"read": 0.001, "decode": 0.001})
    assert {"cache": "pixels"} not in [each.change for each in named(waiting, "cache")]
    assert not any("disk" in each.remedy for each in advise(waiting))
    assert named(replace(waiting, workers={"decode": 0.03}), "cache")


def test_a_disk_that_is_the_floor_may_be_replaced() -> None:
    """The floor that bounds promises knows no disk: a faster one is promised all that is waited for."""
    facts, _, _ = PLANTED["a slow disk"]
    assert advise(facts)[0].at_most == pytest.approx(facts.total / (facts.total - 0.9))


def as_written(value: Any) -> str:
    """In YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{name}": "{text}"' for name, text in value.items()) + "}"
    return {"True": "true", "None": "null", "False": "false"}.get(str(value), str(value))


def can_run(facts: Facts, fields: dict[str, Any]) -> Plan:
    """A plan with these fields, those of the task, that is not refused to begin with."""
    own = {name: value for name, value in fields.items() if name in facts.fields}
    own |= {"keep_features": False} if own.get("cache") == "features" else {}
    plan = facts.plan.model_copy(update=own | ({"cuda_graphs": False} if facts.device == "cpu" else {}))
    of_one_size = plan.cuda_graphs and facts.fields == CLASSIFY
    return plan.model_copy(update={"pin_memory": False}) if of_one_size and plan.workers else plan


FACTS = st.builds(
    lambda facts, phases, workers, numbers, fields: replace(
        facts,
        phases=phases,
        workers=workers,
        plan=can_run(facts, fields | ({"workers": 0} if not workers else {})),
        floor=numbers[0] * sum(phases.values()),
        alone=numbers[0] * sum(phases.values()) * (1 + 9 * numbers[1]),
        executed=min(1.0, numbers[0] * (1 + numbers[1])) * sum(phases.values()),
        busy=None if facts.device == "cpu" else numbers[2],
        memory=1.0,
        used=1 - numbers[1],
        samples=64.0,
        moved=numbers[2] * sum(phases.values()),
        micro_batches=1 + round(40 * numbers[3]),
        cuts=tuple(
            Cut(change, 1 + round(9 * numbers[1]), numbers[0] * sum(phases.values()))
            for change in cuts_to_try(facts, facts.plan.model_copy(update=fields))
        ),
        waits=(("x.py:1", 3),) if numbers[3] > 0.5 and facts.device == "cuda" else (),
        threads=8,
        fewer=((1, 2 * numbers[1] * sum(phases.values())), (4, sum(phases.values()))) if facts.device == "cpu" else (),
    ),
    st.sampled_from([GPU, CPU, BDH]),
    st.dictionaries(st.sampled_from([*DATA, *COMPUTE, "optimizer", "other"]), st.floats(1e-6, 10), min_size=1),
    st.one_of(st.just({}), st.fixed_dictionaries({name: st.floats(0, 10) for name in ("read", "decode", "resize")})),
    st.tuples(*[st.floats(0.001, 1)] * 4),
    st.fixed_dictionaries(
        {
            "workers": st.integers(1, 20),
            "cache": st.sampled_from(["none", "pixels", "features"]),
            "keep_features": st.booleans(),
            "share_images": st.booleans(),
            "checkpointing": st.sampled_from(["none", "selective", "full"]),
            "label_only_logits": st.booleans(),
            "optimizer_impl": st.sampled_from(["loop", "fused"]),
            "cuda_graphs": st.booleans(),
            "pin_memory": st.booleans(),
            "token_budget": st.integers(1, 10**5),
            "max_questions": st.none() | st.integers(1, 9),
            "images_on": st.sampled_from(["host", "device"]),
        }
    ),
)


@given(FACTS)
def test_promises_are_bounds(facts: Facts) -> None:
    """Never below 1, never above what the floor allows, never without a reason."""
    found = advise(facts)
    highest = facts.total / max(facts.floor, facts.total / 1000)
    for each in found:
        assert each.at_most >= 1.02 and each.why and "nan" not in each.why
        # Kept features make the floor another one; with fewer threads a step was timed.
        other = each.change.get("cache") == "features" or {"keep_features", "environment"} & each.change.keys()
        assert each.at_most <= max(1.0, highest) * 1.000001 or other
    assert [each.likely for each in found] == sorted((each.likely for each in found), reverse=True)
    assert len({each.remedy for each in found}) == len(found)


@given(FACTS)
def test_a_promise_is_what_its_own_share_gives(facts: Facts) -> None:
    for each in advise(facts):
        assert each.at_most == pytest.approx(1 / (1 - each.away))
        (share,) = re.findall(r"^if ([\d.]+)% of the step went away(?:, down to the floor)?$", each.bound)
        assert float(share) / 100 == pytest.approx(1 - 1 / each.at_most, abs=0.00051)
        assert each.to_the_floor == each.bound.endswith("floor")
        assert not each.to_the_floor or each.at_most == pytest.approx(facts.total / min(facts.floor, facts.total))
        # A share under a name of the table is the table's.
        for name, words in PHASES.items():
            for told in re.findall(rf"(?<![a-z] ){words} ([\d.]+%)", each.why):
                assert told == f"{facts.phases[name] / facts.total:.1%}"


@given(FACTS)
def test_what_a_remedy_says_to_set_is_all_that_it_takes(facts: Facts) -> None:
    """Each field with its value, as a plan has it, and none that is so already; the plan can run then."""
    for each in advise(facts):
        words = [f"plan.{name} {as_written(value)}" for name, value in each.change.items()]
        assert not words or each.remedy == ", ".join(words)
        assert set(each.change) <= facts.fields
        after = Plan.model_validate(facts.plan.model_dump() | each.change)
        assert set(changed_fields(facts.plan, after, dropout=False)) == set(each.change)
        machine = Machine(facts.device, "", 0, facts.cores, facts.triton, capability=(9, 0))
        setup_for(facts).check_plan(after, machine)


@given(FACTS, st.data())
def test_nothing_is_advised_that_a_task_cannot_follow(facts: Facts, data: st.DataObject) -> None:
    """Fields that it does not have, and values that its recipe cannot use here. Another task has cuts of its own."""
    for each in advise(facts):
        for name, value in each.change.items():
            if name in ("level_kernel", "cache", "keep_features", "cuda_graphs", "checkpointing", "label_only_logits"):
                cannot = replace(facts, cannot=frozenset({(name, value)}), cuts=())
                assert all(other.change.get(name) != value for other in advise(cannot))
    lacking = data.draw(st.sampled_from(sorted(facts.fields - COMMON)))
    fewer = replace(facts, fields=facts.fields - {lacking}, cuts=())
    assert all(lacking not in each.change for each in advise(fewer))


@given(FACTS)
def test_no_resource_is_named_that_takes_little(facts: Facts) -> None:
    found = bound_by(facts)
    taken = {"arithmetic": facts.executed, "memory": facts.moved, "data": facts.time(*DATA)}
    assert (found in taken and taken[found] >= 0.1 * facts.total) or found in ("launches", "small operations", OTHER)
    assert found not in ("arithmetic", "memory") or taken[found] >= 0.4 * facts.total
    assert found != "launches" or facts.device == "cuda"
    assert found != "small operations" or facts.device == "cpu"
