"""A checkpoint is whole or left aside, whatever was done to its files; and pruning keeps what can be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sameday.record import checkpoint
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.errors import BadInput
from sameday.spec.vqa import VqaRecipe

RECIPE = VqaRecipe.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}})


def fill(aside: Path) -> None:
    (aside / "weights").write_bytes(bytes(range(60)))
    save_file({"m": torch.zeros(3)}, aside / checkpoint.OPTIMIZER)
    (aside / "more").mkdir()
    (aside / "more" / "weights").write_bytes(b"inner")


def write(folder: Path, step: int, recipe: VqaRecipe = RECIPE) -> Path:
    state = {"step": step, "recipe": recipe.model_dump(mode="json"), "digests": {}}
    return checkpoint.write(folder, f"step-{step:06d}", fill, state)


def newest(folder: Path, recipe: VqaRecipe = RECIPE) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = next(checkpoint.candidates(folder, recipe, said.append), None)
    return found and found.step, said


@pytest.mark.slow
def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, "step-000003", fill, {"step": 3})
    assert checkpoint.fault(path) is None
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert checkpoint.fault(path) is not None, f"byte {at} of {file.name}"
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert checkpoint.fault(path) is not None, f"{file.name} cut to {length} bytes"
        file.unlink()
        assert checkpoint.fault(path) is not None, f"without {file.name}"
        file.write_bytes(whole)
    assert checkpoint.fault(path) is None


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"weights": 3}', '{"weights": {"bytes": 60}}'])
def test_manifest_of_another_shape(tmp_path: Path, text: str) -> None:
    (write(tmp_path, 3) / MANIFEST).write_text(text)
    write(tmp_path, 2)
    step, said = newest(tmp_path)
    assert step == 2
    assert said == ["checkpoint step-000003 is left aside: its manifest is missing or unreadable"]


def listed(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file() and each.name != MANIFEST]


def test_a_manifest_that_omits_a_file(tmp_path: Path) -> None:
    """What is needed, and what somebody put beside it; a picture or a note harms nothing."""
    path = write(tmp_path, 3)
    for name in (checkpoint.STATE, checkpoint.OPTIMIZER):
        write_manifest(path, [file for file in listed(path) if file.name != name])
        left_aside = f"checkpoint step-000003 is left aside: {name} is needed, and its manifest does not list it"
        assert newest(tmp_path) == (None, [left_aside])
    write_manifest(path, listed(path))
    for name in ("image.png", "notes.md"):
        (path / name).touch()
    assert newest(tmp_path) == (3, [])
    (path / "more/config.json").touch()
    assert checkpoint.fault(path) == "more/config.json is there, and its manifest does not list it"


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", '{"recipe": 3, "digests": {}}', '{"recipe": {}}'])
def test_a_state_of_another_shape(tmp_path: Path, text: str) -> None:
    """Though its hash holds: an older checkpoint is gone on from."""
    path = write(tmp_path, 3)
    write(tmp_path, 2)
    (path / checkpoint.STATE).write_text(text)
    write_manifest(path, listed(path))
    assert newest(tmp_path) == (2, ["checkpoint step-000003 is left aside: state.json is not what a run wrote"])


def test_a_newer_release_is_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    state = json.loads((path / checkpoint.STATE).read_text())
    state["recipe"] |= {"hyper": 1, "lora": state["recipe"]["lora"] | {"twist": 2}}
    (path / checkpoint.STATE).write_text(json.dumps(state))
    write_manifest(path, listed(path))
    with pytest.raises(BadInput) as error:
        newest(tmp_path)
    assert str(error.value) == (
        f"{path}: was written by a newer release, which has fields that this one does not know: recipe.hyper, "
        "recipe.lora.twist; go on with that release, or choose another --out"
    )


def test_what_can_be_gone_back_to(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert checkpoint.usable(tmp_path) == (tmp_path / "step-000003", [])
    (tmp_path / "step-000003" / "weights").write_bytes(b"")
    bad = tmp_path / "step-000002"
    save_file({"a": torch.zeros(2), "w": torch.tensor([1, torch.nan])}, bad / "weights.safetensors")
    write_manifest(bad, listed(bad))
    broken = [
        "step-000003 cannot be used: weights is not what was written",
        "step-000002 cannot be used: w is not finite",
    ]
    assert checkpoint.usable(tmp_path) == (tmp_path / "step-000001", broken)
    assert checkpoint.usable(tmp_path / "absent") == (None, [])


def test_newest_is_by_number_and_passes_over_remains(tmp_path: Path) -> None:
    for step in (999998, 1000000, 8):
        write(tmp_path, step)
    (tmp_path / ".writing-step-2000000").mkdir()
    (tmp_path / "step-abc").mkdir()
    assert newest(tmp_path) == (1000000, [])


def test_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") == (None, [])


def test_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 3)
    other = RECIPE.model_copy(update={"seed": 4})
    with pytest.raises(BadInput, match="step-000003 is a checkpoint of another recipe:\n  seed: 0 there, 4 here"):
        newest(tmp_path, other)


def test_writing_over_a_broken_one(tmp_path: Path) -> None:
    (write(tmp_path, 3) / "weights").unlink()
    (tmp_path / ".writing-step-000003").mkdir()
    (tmp_path / ".writing-step-000003" / "half").write_text("half")
    assert newest(tmp_path)[0] is None
    assert not (write(tmp_path, 3) / "half").exists()
    assert newest(tmp_path) == (3, [])


def test_a_failed_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    def fail(aside: Path) -> None:
        (aside / "weights").write_bytes(b"half")
        raise OSError("no space left on device")

    write(tmp_path, 3)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.write(tmp_path, "step-000004", fail, {})
    assert newest(tmp_path) == (3, [])


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(2, None, [4, 5]), (2, 1, [1, 4, 5]), (1, 5, [5]), (9, 2, [1, 2, 3, 4, 5]), (None, 1, [1, 2, 3, 4, 5])],
)
def test_prune(tmp_path: Path, keep: int | None, best: int | None, left: list[int]) -> None:
    for step in range(1, 6):
        write(tmp_path, step)
    (tmp_path / ".writing-step-000004").mkdir()
    checkpoint.prune(tmp_path, keep, 5, best)
    assert [step for step, _ in checkpoint.steps(tmp_path)] == left
    assert not list(tmp_path.glob(".writing-*"))


def test_a_broken_later_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    shutil.rmtree(write(tmp_path, 9) / "more")
    write(tmp_path, 1)
    write(tmp_path, 2)
    checkpoint.prune(tmp_path, 1, 2, None)
    assert [step for step, _ in checkpoint.steps(tmp_path)] == [2, 9]
    assert newest(tmp_path)[0] == 2
