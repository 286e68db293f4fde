"""The world and the tiny model of tests of chain of thought."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from cots import Make

from sameday.data.questions.sample import Sample
from sameday.hardware.machine import detect_machine
from sameday.models.load import load_base
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.plan import Plan
from sameday.tasks.cot.setup import CotSetup
from sameday.tasks.cot.task import CotTask


@pytest.fixture(scope="session")
def cot_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_tiny(tmp_path_factory.mktemp("cot-model"), text={"num_hidden_layers": 2})


@pytest.fixture(scope="session")
def cot_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about one and about two images and about none, other system prompts, conversations of two turns."""
    folder = tmp_path_factory.mktemp("cot-world")
    return worlds.write_world(folder, 3, (5, 4, 3, 2), chats=True, sizes=((48, 32), (32, 64)))


@pytest.fixture(scope="session")
def make_cot(cot_world: Path, cot_model: Path) -> Make:
    """A task of this world, its weights away from their start. Files are read once."""
    first, cpu = worlds.make_cot(cot_world, worlds.cot_recipe(cot_model), Plan()), torch.device("cpu")
    base = load_base(str(cot_model), first.recipe, cpu)

    def made(plan: dict[str, Any] | None = None, stirred: bool = True, **changes: Any) -> CotTask:
        recipe = worlds.cot_recipe(cot_model, **changes)
        asked = CotSetup(recipe, cot_world).resolve_auto(Plan(**(plan or {})), detect_machine("cpu")).plan
        table = first.processor.byte_table
        computing = VisionLanguageModel(deepcopy(base), first.model.family, recipe, asked, cpu, table)
        task = CotTask(recipe, asked, computing, first.encoder, first.processor, dict(first.splits))
        if stirred:
            worlds.stir(task)
        return task

    return made


@pytest.fixture(scope="session")
def cot_questions(make_cot: Make) -> list[Sample]:
    return list(make_cot().splits["train"])
