"""A checkpoint is whole or left aside, whatever was done to its files; and pruning keeps what can be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sameday.spec.errors import BadInput
from sameday.spec.vqa import VqaRecipe
from sameday.train import checkpoint

RECIPE = VqaRecipe.model_validate({"model": "tiny", "data": {"train": "train.jsonl"}})


def fill(aside: Path) -> None:
    (aside / "weights").write_bytes(bytes(range(60)))
    (aside / "more").mkdir()
    (aside / "more" / "weights").write_bytes(b"inner")


def write(folder: Path, step: int, recipe: VqaRecipe = RECIPE) -> Path:
    state = {"step": step, "fingerprint": recipe.fingerprint, "recipe": recipe.model_dump(mode="json")}
    return checkpoint.write(folder, f"step-{step:06d}", fill, state)


def newest(folder: Path, recipe: VqaRecipe = RECIPE) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = checkpoint.newest(folder, recipe, said.append)
    return found and found.step, said


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
    (write(tmp_path, 3) / checkpoint.MANIFEST).write_text(text)
    write(tmp_path, 2)
    step, said = newest(tmp_path)
    assert step == 2
    assert said == ["checkpoint step-000003 is left aside: its manifest is missing or unreadable"]


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
