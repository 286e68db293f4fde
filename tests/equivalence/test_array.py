"""Every claim is put to the test: each pair of values that two plan fields can take, against the plain plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import worlds
from arms import Stage
from covering import trial_plans, uncovered

from sameday.models import vlm
from sameday.spec.plan import OF_PIECES, Plan, claims
from sameday.tasks.vqa import task as vqa
from sameday.tasks.vqa.setup import VqaSetup
from sameday.verify.registry import trial_values

QUESTION = 30
"""About how many tokens a question of these worlds has."""
PRECISION = {"cpu": "float32"} | ({"cuda": "bf16"} if torch.cuda.is_available() else {})
"""A CPU is compared in float32 on every machine; a GPU, where there is one, in what its flash kernels have."""
SETUPS = {
    device: VqaSetup(worlds.tiny_recipe(Path("/no/such/model"), precision=kind), Path())
    for device, kind in PRECISION.items()
}
VALUES = {device: trial_values(setup, device, QUESTION) for device, setup in SETUPS.items()}
PLANS = {device: trial_plans(setup, device, QUESTION) for device, setup in SETUPS.items()}
NO_SPLIT, NO_FUSED = ((("packing", False), ("attention", kernel)) for kernel in OF_PIECES)
NO_BUDGET = (("activation_budget", 0.5), ("compile", "none"))
NOTHING_TO_KEEP = (("keep_features", True), ("cache", "features"))
GRAPHS = ("cuda_graphs", True)
IMPOSSIBLE = {
    "cpu": [NO_SPLIT, NO_BUDGET, NOTHING_TO_KEEP],
    "cuda": [
        NO_SPLIT,
        NO_FUSED,
        (("packing", False), GRAPHS),
        NO_BUDGET,
        *((("attention", kernel), GRAPHS) for kernel in ("sdpa", "flex")),
        NOTHING_TO_KEEP,
    ],
}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[dict[str, Stage]]:
    root = tmp_path_factory.mktemp("array")
    home = worlds.write_world(root / "world", 0, (5, 1, 4), sizes=((48, 32), (32, 64)))
    lora = {"r": 4, "alpha": 8, "dropout": 0.1}
    asked = {"order": "by_image", "effective_batch": 4, "lora": lora, "weight_decay": 0.1}
    recipes = {device: worlds.tiny_recipe(tiny_qwen3, precision=kind, **asked) for device, kind in PRECISION.items()}
    with pytest.MonkeyPatch.context() as patch:
        # Compiling is tried with the graphs alone: which backend turns them into kernels depends on the machine.
        patch.setattr(vlm, "COMPILE_BACKEND", "eager")
        patch.setattr(vqa, "load_base", worlds.once(vqa.load_base))  # all arms start from the same files
        yield {device: Stage(root / device, home, recipe, steps=4, device=device) for device, recipe in recipes.items()}
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", PRECISION)
def test_every_pair_is_there(device: str) -> None:
    assert uncovered([plan.model_dump() for plan in PLANS[device]], VALUES[device]) == IMPOSSIBLE[device]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "number"), [(device, i) for device in PRECISION for i in range(len(PLANS[device]))])
def test_a_plan_of_the_array_trains_the_same_model(stages: dict[str, Stage], device: str, number: int) -> None:
    torch._dynamo.reset()
    found = stages[device].compare(PLANS[device][number])
    assert found.same, "\n".join(map(str, found.differences))


@pytest.mark.slow
@pytest.mark.parametrize("which", [1, -1])
def test_fields_that_claim_the_same_bits_keep_them(stages: dict[str, Stage], which: int) -> None:
    """All of them changed at once, to their second values and to their last ones; those that need a GPU have one."""
    bitwise = [name for name, values in VALUES["cpu"].items() if claims()[name] == "bitwise" and len(values) > 1]
    assert len(bitwise) > 5
    found = stages["cpu"].compare(Plan(**{name: VALUES["cpu"][name][which] for name in bitwise}))
    assert found.same and found.bitwise, "\n".join(map(str, found.differences))


@pytest.mark.slow
def test_a_table_in_the_hosts_memory_is_the_parameter_that_it_was(stages: dict[str, Stage]) -> None:
    """Runs have it on a GPU, or in Triton's interpreter where there is none."""
    device = list(PRECISION)[-1]
    found = stages[device].compare(Plan(embeddings_on="host"))
    assert found.same and (found.bitwise or device == "cuda"), "\n".join(map(str, found.differences))
