"""What somebody did to a run's files between two starts: it is named, and the run goes on from what can be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import weights
from safetensors.torch import load_file, save_file
from typed import refused, sameday, write_recipe
from worlds import write_world

from sameday.record.checkpoint import OPTIMIZER, STATE
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.errors import EXIT_STOPPED

pytestmark = pytest.mark.usefixtures("own_signals")

WORDS = ("train", "recipe.yaml", "--out", "run", "--set", "plan.save_steps=1", "--set", "plan.device=cpu")
NEWEST = Path("run/checkpoints/step-000002")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Path:
    """A run stopped at step 2 of 3, and in `whole` the one that was not."""
    world = write_recipe(
        write_world(tmp_path_factory.mktemp("damaged"), 3, counts=(3, 2), hard=False), tiny_qwen3, max_steps=3
    )
    assert sameday(world, *WORDS).code == 0
    (world / "run").rename(world / "whole")
    assert sameday(world, *WORDS, "--stop-after", "2").code == EXIT_STOPPED
    return world


@pytest.fixture
def world(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "world"))


def list_anew(folder: Path) -> None:
    write_manifest(folder, [path for path in folder.iterdir() if path.name != MANIFEST])


def without_a_tensor(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(dict(list(load_file(folder / name).items())[1:]), folder / name)

    return change


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (
            without_a_tensor("adapter_model.safetensors"),
            f"{NEWEST}: adapter_model.safetensors does not have the tensors of this recipe's adapters",
        ),
        (without_a_tensor(OPTIMIZER), "the optimizer's state does not have the tensors of what is trained"),
        (lambda folder: (folder / STATE).write_text("{}"), "state.json is not what a run wrote"),
        (lambda folder: (folder / OPTIMIZER).unlink(), f"{OPTIMIZER} is needed, and its manifest does not list it"),
    ],
    ids=["weights", "optimizer", "state", "no optimizer"],
)
def test_a_checkpoint_whose_manifest_holds(world: Path, damage: Callable[[Path], None], why: str) -> None:
    damage(world / NEWEST)
    list_anew(world / NEWEST)
    said = sameday(world, *WORDS)
    assert said.code == 0, said.err
    assert f"checkpoint step-000002 is left aside: {why}\nresumed from step-000001\n" in said.out
    assert weights(world / "run") == weights(world / "whole")


def test_where_no_checkpoint_is_left(world: Path) -> None:
    """Weights may have been taken from it, so that this is no start any more."""
    for folder in (world / "run/checkpoints").glob("step-*"):
        without_a_tensor(OPTIMIZER)(folder)
        list_anew(folder)
    said = refused(world, *WORDS)
    why = "the optimizer's state does not have the tensors of what is trained"
    assert said == f"run: no checkpoint can be gone on from: {why}; choose another --out"


def test_a_run_without_a_whole_checkpoint_says_that_it_begins_again(world: Path) -> None:
    folders = sorted((world / "run/checkpoints").glob("step-*"))
    for folder in folders:
        with (folder / STATE).open("a") as file:
            file.write(" ")
    said = sameday(world, *WORDS)
    assert said.code == 0, said.err
    lines = [line for line in said.out.splitlines() if "gone on from" in line]
    assert lines == [f"none of {len(folders)} checkpoints can be gone on from: the run begins again at its first step"]
    assert weights(world / "run") == weights(world / "whole")


def test_a_checkpoint_of_a_newer_release(world: Path) -> None:
    state = json.loads((world / NEWEST / STATE).read_text())
    (world / NEWEST / STATE).write_text(json.dumps(state | {"momentum": 1}))
    list_anew(world / NEWEST)
    assert refused(world, *WORDS) == (
        f"{NEWEST}: was written by a newer release, which has fields that this one does not know: momentum; go on with "
        "that release, or choose another --out"
    )


def test_a_line_of_metrics(world: Path) -> None:
    path = world / "run/metrics.jsonl"
    path.write_text('{"step": "ten"}\n' + path.read_text())
    said = sameday(world, *WORDS)
    assert said.code == 0, said.err
    assert (
        "run/metrics.jsonl:1: step is 'ten'; must be the number of a step; left out, the file as it was is " in said.out
    )
    assert weights(world / "run") == weights(world / "whole")


def test_finished_weights_that_were_damaged_are_written_again(world: Path) -> None:
    damaged = world / "whole/adapter/adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    said = sameday(world, *WORDS[:3], "whole", *WORDS[4:])
    assert said.code == 0, said.err
    assert (
        "whole/adapter: adapter_model.safetensors is not what was written; it is written again from step 3, which is "
        "whole\n"
    ) in said.out
    assert "written again" not in sameday(world, *WORDS[:3], "whole", *WORDS[4:]).out
