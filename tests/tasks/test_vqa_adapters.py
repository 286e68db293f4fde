"""Where an automatic plan has adapters computed by Triton kernels, and what tools make of such a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st

from sameday.commands.session import ASKED_FOR, Specs, _plan
from sameday.hardware.machine import Machine, detect_machine
from sameday.spec.plan import Plan
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.vqa.automatic import TIMED_RANK, lora_kernel
from sameday.tasks.vqa.problems import lora_problems
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tune.search import SearchState, leave_out
from sameday.tune.space import choices
from sameday.tune.trial import Result

H200 = Machine("cuda", "NVIDIA H200", 140 * 2**30, 16, True, 2**17, (9, 0))
A100 = replace(H200, name="NVIDIA A100-SXM4-80GB", memory=79 * 2**30, capability=(8, 0))
BF16: dict[str, Any] = {"precision": "bf16"}
FASTER = "up to rank 16 its kernels take less time and memory on GPUs of compute capability 9.0"


def lora(**fields: Any) -> dict[str, Any]:
    return BF16 | {"lora": {"r": 4, "alpha": 8} | fields}


CHOSEN: dict[str, dict[str, Any]] = {
    "as people train": lora(dropout=0.05),
    "without dropout": lora(),
    "the highest rank": lora(r=TIMED_RANK),
    "rsLoRA": lora(rslora=True),
    "all layers of the decoder": lora(target_modules=["all-linear"]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_an_automatic_plan_has_them_where_they_are_faster(name: str, two_layers: Path, tmp_path: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(two_layers, **CHOSEN[name]), tmp_path)
    plan, why = setup.choose_plan(H200, 1)
    setup.check_plan(plan, H200)
    assert (plan.lora_kernel, plan.compile, why["lora_kernel"]) == ("triton", "layers", FASTER)


def test_several_ranks_and_chain_of_thought_have_them_too(two_layers: Path, tmp_path: Path) -> None:
    usual = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)
    stages = CotSetup(worlds.cot_recipe(two_layers, **BF16), tmp_path)
    for plan, why in (usual.choose_plan(H200, 4), stages.choose_plan(H200, 1)):
        assert (plan.lora_kernel, why["lora_kernel"]) == ("triton", FASTER)


NOT_CHOSEN: dict[str, tuple[dict[str, Any], Machine, str]] = {
    "another GPU": (BF16, A100, "is not known to be faster on NVIDIA A100-SXM4-80GB"),
    "a newer GPU": (BF16, replace(H200, name="B200", capability=(10, 0)), "is not known to be faster on B200"),
    "a GPU for another": (BF16, replace(A100, name="H200", stands_for="A100"), "is not known to be faster on A100"),
    "float32": ({}, H200, "is not known to be faster in float32"),
    "tf32": ({"precision": "tf32"}, H200, "is not known to be faster in tf32"),
    "rank": (lora(r=17), H200, "is not known to be faster above rank 16, and recipe.lora.r is 17"),
    "no tiles": (lora(r=65), H200, "has tiles for ranks up to 64, and recipe.lora.r is 65"),
    "DoRA": (lora(dora=True), H200, "does not compute DoRA, and recipe.lora.dora is true"),
    "nf4": (BF16 | {"base_format": "nf4"}, H200, "is not known to be faster with base weights in nf4"),
    "fp8": (BF16 | {"base_format": "fp8"}, H200, "is not known to be faster with base weights in fp8"),
    "train_vision": (
        BF16 | {"train_vision": True},
        H200,
        "is not known to be faster outside the language model, and recipe.train_vision trains the tower",
    ),
    "projector": (
        lora(target_modules=["q_proj", "projector.all-linear"]),
        H200,
        "is not known to be faster outside the language model, and recipe.lora.target_modules trains the projector",
    ),
}


@pytest.mark.parametrize("name", NOT_CHOSEN)
def test_elsewhere_it_has_plain_ones_and_says_why(name: str, two_layers: Path, tmp_path: Path) -> None:
    fields, machine, why_not = NOT_CHOSEN[name]
    plan, why = VqaSetup(worlds.tiny_recipe(two_layers, **fields), tmp_path).choose_plan(machine, 1)
    assert (plan.lora_kernel, why["lora_kernel"]) == ("plain", f"triton {why_not}")


@pytest.mark.parametrize(
    ("fields", "machine"),
    [
        pytest.param(BF16 | {"train": "all"}, H200, id="no adapters"),
        pytest.param(BF16, replace(H200, triton=False), id="no Triton, nothing compiled"),
        pytest.param({}, detect_machine("cpu"), id="a CPU"),
    ],
)
def test_where_it_cannot_be_there_is_no_word_of_it(
    fields: dict[str, Any], machine: Machine, two_layers: Path, tmp_path: Path
) -> None:
    plan, why = VqaSetup(worlds.tiny_recipe(two_layers, **fields), tmp_path).choose_plan(machine, 1)
    assert plan.lora_kernel == "plain" and "lora_kernel" not in why


recipes = st.builds(
    lambda precision, vision, **lora: worlds.tiny_recipe(
        Path("model"), precision=precision, train_vision=vision, lora={"alpha": 8} | lora
    ),
    precision=st.sampled_from(["bf16", "float32", "tf32"]),
    vision=st.booleans(),
    r=st.integers(1, 100),
    dropout=st.sampled_from([0.0, 0.05]),
    rslora=st.booleans(),
    dora=st.booleans(),
)


@given(recipes, st.tuples(st.integers(7, 12), st.sampled_from([0, 6, 9])))
def test_what_is_chosen_can_run_and_was_timed(recipe: VlmRecipe, capability: tuple[int, int]) -> None:
    machine = replace(H200, capability=capability)
    kernel, why = lora_kernel(recipe, machine)
    timed = recipe.precision == "bf16" and recipe.lora.r <= 16 and capability == (9, 0)
    assert (kernel == "triton") is (timed and not recipe.lora.dora and not recipe.train_vision)
    assert kernel == "plain" or not any(lora_problems(Plan(lora_kernel="triton"), recipe, machine))
    assert why.startswith("triton ") is (kernel == "plain")


def test_what_was_asked_for_stands(two_layers: Path, tmp_path: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)

    def planned(machine: Machine, **asked: Any) -> tuple[str, str]:
        specs = Specs(setup.recipe, tmp_path, Plan(**asked), True, tuple(sorted(asked)))
        plan, why = _plan(specs, setup, machine, 1)
        return plan.lora_kernel, why["lora_kernel"]

    assert planned(H200) == ("triton", FASTER) and planned(H200, lora_kernel="plain") == ("plain", ASKED_FOR)
    assert planned(A100)[0] == "plain" and planned(A100, lora_kernel="triton") == ("triton", ASKED_FOR)


def test_a_run_that_was_trained_with_them_is_evaluated_anywhere(two_layers: Path, tmp_path: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)
    plan, _ = setup.choose_plan(H200, 1)
    assert plan.lora_kernel == "triton"
    for machine in (detect_machine("cpu"), replace(A100, triton=False)):
        setup.check_plan(setup.for_evaluation(plan), machine)


def test_the_tuner_tries_plain_ones_too(two_layers: Path, tmp_path: Path) -> None:
    """A machine on which they are slower after all."""
    setup = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)
    guess, _ = setup.choose_plan(H200, 1)
    state = SearchState(Plan(), choices(setup, H200))
    state.best = guess

    def measure(plan: Plan) -> Result:
        seconds = (1.0 if plan.share_images else 3.0) * (1.2 if plan.lora_kernel == "triton" else 1.0)
        return Result(dict.fromkeys(range(4, 12), seconds))

    state.timed(guess, measure)
    assert leave_out(state, measure, lambda _: True)
    assert state.best.lora_kernel == "plain" and state.best.share_images
