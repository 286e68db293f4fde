"""Up to which size micro-batches are recorded, and where an automatic plan has them recorded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import recordings
import worlds
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from vlm_step import SIZES

from sameday.commands.session import Specs, _plan
from sameday.hardware.known import KNOWN, REACHED, peak_of
from sameday.hardware.machine import Machine, detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models.vlm_flops import executed
from sameday.spec.plan import OF_PIECES, Plan
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.vqa.automatic import BYTES_PER_ACTIVATION, FEWEST_TOKENS, choose_plan, language_bytes
from sameday.tasks.vqa.launches import HOST_SECONDS, SHARE, layer_flop, most_recorded
from sameday.tasks.vqa.problems import Decoder, graph_problems
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.registry import trial_values

BF16: dict[str, Any] = recordings.LONG | {"precision": "bf16"}
EIGHT = SIZES["8b"]["text"]
"""Sizes of Qwen3-VL-8B's decoder."""


def gpu(name: str, gigabytes: int, capability: tuple[int, int] = (9, 0)) -> Machine:
    return Machine("cuda", f"NVIDIA {name}", gigabytes * 2**30, 16, True, 2**17, capability)


H200 = gpu("H200", 140)


def config_of(folder: Path, **sizes: int) -> Any:
    config = AutoConfig.from_pretrained(folder)
    for name, value in (EIGHT | sizes).items():
        setattr(config.text_config, name, value)
    return config


# The limit


def test_what_was_measured_is_what_the_limit_says() -> None:
    """On an H200: recording halves a step of 1,408 tokens (`bench/recorded.py`), kernels fill 89% of one of 3,680 in
    the loop (`bench/real.py`), and 97% of one of 14 images, whose tokens alone are 14 × 432."""
    most = most_recorded(SimpleNamespace(**EIGHT), "lora", "NVIDIA H200")
    assert most is not None and 3680 < most < 14 * 432
    assert 36 * layer_flop(SimpleNamespace(**EIGHT), "lora") == pytest.approx(27.8e9, rel=0.01)


sizes = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(8, 16384),
        "intermediate_size": st.integers(8, 65536),
        "num_attention_heads": st.integers(1, 128),
        "num_key_value_heads": st.integers(1, 16),
        "head_dim": st.integers(8, 256),
        "num_hidden_layers": st.integers(1, 128),
    }
)


@given(sizes, st.sampled_from(["lora", "all"]), st.sampled_from(list(KNOWN.values())))
def test_up_to_the_limit_kernels_end_before_their_launches(sizes: dict[str, int], train: str, known: Any) -> None:
    text = SimpleNamespace(**sizes)
    most = most_recorded(text, train, f"NVIDIA {known.name}")
    assert most is not None

    def kernels(tokens: int) -> float:
        flop = sizes["num_hidden_layers"] * layer_flop(text, train)
        return tokens * flop / (SHARE * REACHED * known.flop_per_second)

    host = sizes["num_hidden_layers"] * HOST_SECONDS
    assert kernels(most) <= host * (1 + 1e-9) and kernels(most + 1) >= host * (1 - 1e-9)
    wider = SimpleNamespace(**sizes | {"intermediate_size": 2 * sizes["intermediate_size"]})
    assert (most_recorded(wider, train, f"NVIDIA {known.name}") or 0) <= most
    assert most_recorded(text, train, "NVIDIA Something New") is None and most_recorded(text, train, "") is None


@pytest.mark.parametrize(("train", "within"), [("lora", 0.15), ("all", 0.01)])
def test_flop_of_a_layer_are_those_that_are_counted(
    two_layers: Path, tmp_path: Path, train: str, within: float
) -> None:
    """But for adapters, and for what the first layer's input does not need."""
    world = worlds.write_world(tmp_path, 4, (3, 2), hard=False)
    task = worlds.make_task(world, worlds.tiny_recipe(two_layers, train=train), Plan(**recordings.PLAN))
    (batch, *_) = task.batches(0, None, Ranks())
    counted = executed(task.model, batch, None).layers.total / batch.tokens.numel()
    text = task.model.text.config
    assert text.num_hidden_layers * layer_flop(text, train) == pytest.approx(counted, rel=within)


def test_gpus_are_known_by_the_names_of_their_driver() -> None:
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100 80GB PCIe": "a100-80gb",
        "NVIDIA L40S": "l40s",
        "NVIDIA RTX A6000": "a6000",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA GeForce RTX 3090 Ti": "rtx-3090",
    }
    assert {name: peak_of(name) for name in names} == {
        name: KNOWN[known].flop_per_second for name, known in names.items()
    }
    unknown = ("", "NVIDIA L40", "NVIDIA RTX 6000 Ada Generation", "NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert [peak_of(name) for name in (*unknown, "NVIDIA GeForce RTX 4090 Laptop GPU")] == [None] * 5


# The automatic plan


@pytest.mark.parametrize(
    ("machine", "records"),
    [
        (H200, True),
        (gpu("H100 80GB HBM3", 79), True),
        (gpu("A100-SXM4-80GB", 79, (8, 0)), True),
        (gpu("A100-SXM4-40GB", 40, (8, 0)), False),
        (gpu("GeForce RTX 4090", 24, (8, 9)), False),
        (gpu("Something New", 140), False),
    ],
    ids=lambda value: value.name if isinstance(value, Machine) else "",
)
def test_an_automatic_plan_records_where_it_pays_and_fits(two_layers: Path, machine: Machine, records: bool) -> None:
    recipe, config = worlds.tiny_recipe(two_layers, **BF16), config_of(two_layers)
    plan, why = choose_plan(recipe, machine, config, 1)
    assert plan.cuda_graphs is records and list(graph_problems(plan, recipe, machine)) == []
    text = config.get_text_config()
    most = most_recorded(text, "lora", machine.name)
    if most is None:
        assert why["cuda_graphs"] == (
            "it is not known up to which size recording pays on NVIDIA Something New; true records all sizes"
        )
    elif records:
        assert why["cuda_graphs"] == (
            f"up to {most} tokens a micro-batch's kernels end before the host has launched them"
        )
        assert plan.checkpointing == "none" and "beside the weights and what is recorded" in why["checkpointing"]
        taken = (plan.token_budget + min(most, plan.token_budget)) * 36 * 4096 * BYTES_PER_ACTIVATION
        assert taken + language_bytes(recipe, text) <= 0.9 * machine.memory
    else:
        assert why["cuda_graphs"] == (
            f"recordings of {most} tokens, up to which they pay, would take memory that activations need"
        )


def test_recordings_take_no_more_memory_than_micro_batches_may(two_layers: Path) -> None:
    """Of a small model's kernels the host is behind at any size that fits."""
    recipe, machine = worlds.tiny_recipe(two_layers, **BF16), gpu("H200", 24)
    small = config_of(two_layers, hidden_size=1024, intermediate_size=3072, num_attention_heads=16)
    plan, _ = choose_plan(recipe, machine, small, 1)
    most = most_recorded(small.get_text_config(), "lora", machine.name)
    assert most is not None and plan.cuda_graphs and FEWEST_TOKENS <= plan.token_budget < most
    taken = 2 * plan.token_budget * 36 * 1024 * BYTES_PER_ACTIVATION
    assert taken + language_bytes(recipe, small.get_text_config()) <= 0.9 * machine.memory


def test_what_an_automatic_plan_cannot_record_is_launched_without_a_word(two_layers: Path, tmp_path: Path) -> None:
    """And no tool offers it."""
    setups: dict[str, tuple[VqaSetup, Machine, bool]] = {
        name: (VqaSetup(worlds.tiny_recipe(two_layers, **fields), tmp_path), H200, True)
        for name, fields in {
            "nf4": BF16 | {"base_format": "nf4"},
            "a trained tower": BF16 | {"train_vision": True},
            "float32": recordings.LONG,
        }.items()
    }
    usual = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)
    setups |= {"a CPU": (usual, detect_machine("cpu"), True), "windows": (usual, H200, False)}
    setups["stages"] = (CotSetup(worlds.cot_recipe(two_layers, precision="bf16"), tmp_path), H200, True)
    for name, (setup, machine, splits) in setups.items():
        with patch.object(VqaSetup, "_decoder", lambda _, splits=splits: Decoder(splits)):
            plan, why = setup.choose_plan(machine, 1)
            setup.check_plan(plan, machine)
            assert not plan.cuda_graphs and "cuda_graphs" not in why, name
            assert all(choice.name != "cuda_graphs" for choice in setup.choices(machine)), name
            assert name == "stages" or ("cuda_graphs", True) in setup.cannot(machine), name


def test_tools_know_that_questions_can_be_recorded(two_layers: Path, tmp_path: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)
    plan, _ = setup.choose_plan(H200, 2)
    setup.check_plan(plan, H200)
    assert plan.cuda_graphs and not setup.for_evaluation(plan).cuda_graphs and not setup.low_memory(plan).cuda_graphs
    assert ("cuda_graphs", True) not in setup.cannot(H200)
    (choice,) = (choice for choice in setup.choices(H200) if choice.name == "cuda_graphs")
    assert choice.values == tuple({"cuda_graphs": True, "attention": kernel} for kernel in OF_PIECES)
    assert trial_values(setup, "cuda", 40)["cuda_graphs"] == (False, True)
    assert trial_values(setup, "cpu", 40)["cuda_graphs"] == (False,)


def test_what_was_asked_for_stands_beside_an_automatic_plan(two_layers: Path, tmp_path: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(two_layers, **BF16), tmp_path)

    def planned(machine: Machine = H200, **asked: Any) -> tuple[Plan, dict[str, str]]:
        return _plan(Specs(setup.recipe, tmp_path, Plan(**asked), True, tuple(sorted(asked))), setup, machine, 1)

    assert planned()[0].cuda_graphs
    off, why = planned(cuda_graphs=False)
    assert not off.cuda_graphs and why["cuda_graphs"] == "asked for"
    on, why = planned(gpu("Something New", 140), cuda_graphs=True)
    assert on.cuda_graphs and why["cuda_graphs"] == "asked for"
    rows, why = planned(packing=False)
    assert not rows.cuda_graphs and "cannot go with what was asked for: plan.packing false" in why["cuda_graphs"]
    assert not planned(attention="flex")[0].cuda_graphs
    both, why = planned(packing=False, cache="features")
    assert not both.cuda_graphs and not both.keep_features and both.compile == "layers"
    words = "true cannot go with what was asked for: plan.cache features, plan.packing false"
    assert (why["cuda_graphs"], why["keep_features"]) == (words, words)
