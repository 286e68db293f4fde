"""Parts of a model with learning rates of their own: optimizer groups, the log, a resume, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typed import refused, sameday, write_recipe
from worlds import write_world

from sameday.record.folder import read_metrics
from sameday.spec.errors import EXIT_STOPPED
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.train.commit import StepCommit
from sameday.train.optim import Gradients, learning_rate, make_optimizer

LORA = {"r": 2, "alpha": 4, "target_modules": ["q_proj", "tower.all-linear", "projector.all-linear"]}
RATES = {"tower": 1e-3, "projector": 5e-30}


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Path:
    """Two images, five questions, and a recipe for them."""
    here = write_world(tmp_path, 3, counts=(3, 2), hard=False)
    return write_recipe(
        here, tiny_qwen3, lora=LORA, learning_rates=RATES, max_steps=4, schedule="cosine", warmup_steps=1
    )


def recipe(**changes: Any) -> VqaRecipe:
    return VqaRecipe.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}, **changes})


def test_a_group_has_its_parts_rate_and_the_decay_of_its_kind() -> None:
    trained = {name: nn.Parameter(torch.ones((2, 2) if name.isupper() else 2)) for name in ("A", "a", "B", "b", "C")}
    asked, own = recipe(learning_rate=1e-2, weight_decay=0.1), {"tower": (1e-3, {"B", "b"}), "projector": (1e-2, "C")}
    for implementation in ("loop", "foreach", "fused"):
        optimizer = make_optimizer(trained, asked, Plan(optimizer_impl=implementation), own)
        gradients = Gradients(trained)
        gradients.all.fill_(1.0)
        commit = StepCommit(optimizer, gradients, None)
        commit.finish(commit.begin(learning_rate(asked, 5, 10)))
        told = {
            name: (group["lr"], group["weight_decay"])
            for group in optimizer.param_groups
            for name in trained
            if any(p is trained[name] for p in group["params"])
        }
        rates = {"A": 5e-3, "a": 5e-3, "B": 5e-4, "b": 5e-4, "C": 5e-3}
        assert told == {name: (pytest.approx(rate), 0.1 * name.isupper()) for name, rate in rates.items()}
    moved = {name: float(1 - p.detach().min()) for name, p in trained.items()}
    assert moved["a"] == pytest.approx(10 * moved["b"], rel=0.02)


def test_the_log_shows_them_and_a_resumed_run_keeps_them(world: Path) -> None:
    words = ("train", "recipe.yaml", "--set", "plan.device=cpu", "--set", "plan.log_steps=1", "--out")
    done = sameday(world, *words, "whole")
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if re.match(r"step \d/4  loss", line)]
    assert "  lr 1.00e-02 (tower 1.00e-03, projector 5.00e-30)  " in lines[1]
    records = [r for r in read_metrics(world / "whole/metrics.jsonl") if "split" not in r]
    assert [r["lr"] for r in records] == pytest.approx([0, 0.01, 0.0075, 0.0025])
    assert [r["lr_tower"] for r in records] == pytest.approx([0, 1e-3, 7.5e-4, 2.5e-4])
    assert [r["lr_projector"] for r in records] == pytest.approx([0, 5e-30, 3.75e-30, 1.25e-30])

    assert sameday(world, *words, "cut", "--stop-after", "2").code == EXIT_STOPPED
    assert sameday(world, *words, "cut").code == 0
    here, there = (load_file(world / run / "adapter/adapter_model.safetensors") for run in ("whole", "cut"))
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    assert [r["lr_tower"] for r in read_metrics(world / "cut/metrics.jsonl") if "split" not in r] == [
        r["lr_tower"] for r in records
    ]
    moved = {name: float(tensor.abs().max()) > 1e-6 for name, tensor in here.items() if ".lora_B." in name}
    assert {name for name, so in moved.items() if not so} == {name for name in moved if "merger" in name}
    report = sameday(world, "report", "whole", "-o", "report.html")
    assert report.code == 0, report.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"learning_rates": {"vision": 1e-5}},
            "learning_rates.vision is 1e-05; must be of tower or projector (trained here: decoder); all else has "
            "learning_rate",
        ),
        (
            {"learning_rates": {"tower": 1e-5}},
            "learning_rates.tower is 1e-05, and the tower is not trained; trained here: decoder",
        ),
        (
            {"learning_rates": {"tower": 1e-5}, "lora": {"target_modules": ["q_proj", "projector.all-linear"]}},
            "learning_rates.tower is 1e-05, and the tower is not trained; trained here: decoder, projector",
        ),
        (
            {"learning_rates": {"projector": 1e-5}, "train": "all"},
            "learning_rates.projector is 1e-05, and the projector is not trained; trained here: decoder",
        ),
        (
            {"learning_rates": {"projector": 0}, "train": "all", "train_vision": True},
            "learning_rates.projector is 0; must be greater than 0 and at most 1000",
        ),
        (
            {"learning_rates": {"projector": 1e-5}, "train_vision": True, "lora": {"target_modules": ["qkv"]}},
            "learning_rates.projector is 1e-05, and the projector is not trained; trained here: tower",
        ),
    ],
)
def test_rates_of_what_is_not_trained_are_refused(
    tmp_path: Path, tiny_qwen3: Path, changes: dict[str, Any], said: str
) -> None:
    world = write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3, **changes)
    assert refused(world, "train", "recipe.yaml", "--set", "plan.device=cpu").endswith(said)
    assert not (world / "runs").exists()


def test_recipes_without_them_keep_their_fingerprints() -> None:
    plain = recipe()
    assert "learning_rates" not in plain.identity() and not {"rslora", "dora"} & plain.identity().get("lora", {}).keys()
    assert recipe(learning_rates={}, lora={"rslora": False, "dora": False}).fingerprint == plain.fingerprint
    lora = {"target_modules": ["q_proj", "tower.qkv"]}
    assert len({recipe(lora=lora, learning_rates=rates).fingerprint for rates in ({}, {"tower": 1e-5})}) == 2
