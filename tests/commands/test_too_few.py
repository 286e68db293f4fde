"""Steps of fewer samples than the recipe says are another recipe's: whatever computes steps refuses them as training
does."""

from __future__ import annotations

from pathlib import Path

import pytest
import sets
from typed import refused, sameday, write_recipe
from worlds import write_world

from sameday.commands.session import Session
from sameday.spec.document import dump_yaml
from sameday.verify.processes import Arms

COMMANDS = {
    "train": ("train", "recipe.yaml"),
    "profile": ("profile", "recipe.yaml"),
    "tune": ("tune", "recipe.yaml", "--minutes", "1"),
    "verify": ("verify", "recipe.yaml"),
    "verify beside transformers": ("verify", "recipe.yaml", "--against", "transformers"),
    "cache of pixels": ("cache", "recipe.yaml", "--kind", "pixels", "--measure"),
    "cache of features": ("cache", "recipe.yaml", "--kind", "features"),
}
ON_CPU = ("--set", "plan.device=cpu")


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "load", lambda *_, **__: pytest.fail("the model is loaded"))
    for name in ("run", "peer"):
        monkeypatch.setattr(Arms, name, lambda *_: pytest.fail("an arm is started"))


@pytest.fixture
def questions(tmp_path: Path, tiny_qwen3: Path) -> Path:
    return write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)


@pytest.mark.usefixtures("nothing_loaded", "own_signals")
@pytest.mark.parametrize("command", COMMANDS)
def test_of_questions(questions: Path, command: str) -> None:
    words = (*COMMANDS[command], *ON_CPU, "--set")
    sentence = "recipe.effective_batch is 6, and there are 5 questions to train on, so that no step could have as many"
    assert refused(questions, *words, "recipe.effective_batch=6") == f"{sentence}; allowed: 1 to 5"
    limited = ("recipe.effective_batch=6", "--set", "recipe.data.limit=3")
    said = refused(questions, *words, *limited)
    assert said.endswith("allowed: 1 to 3; recipe.data.limit (--limit) 3 leaves no more")


@pytest.mark.usefixtures("nothing_loaded", "own_signals")
@pytest.mark.parametrize("command", ["train", "profile", "tune", "verify"])
def test_of_images(tmp_path: Path, command: str) -> None:
    sets.write_set(tmp_path, train=20)
    recipe = sets.tiny_recipe(data={"path": "set", "val": 4}, effective_batch=5000)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    assert refused(tmp_path, *COMMANDS[command], *ON_CPU) == (
        "recipe.effective_batch is 5000, and there are 16 images to train on, so that no step could have as many; "
        "allowed: 1 to 16"
    )


@pytest.mark.usefixtures("nothing_loaded")
def test_several_sets_are_counted_whole(questions: Path) -> None:
    """Of each set only its part of a trial is read, and one may have less than that."""
    one = (questions / "train.jsonl").read_text().splitlines()[0]
    (questions / "one.jsonl").write_text(f"{one}\n")
    mix = "{train: train.jsonl, image_root: images, mix: [{train: one.jsonl, image_root: images}]}"
    words = ("verify", "recipe.yaml", "--steps", "4", *ON_CPU, "--set", f"recipe.data={mix}")
    said = refused(questions, *words, "--set", "recipe.effective_batch=7")
    assert "recipe.effective_batch is 7, and there are 6 questions to train on" in said


@pytest.mark.usefixtures("own_signals")
def test_a_stage_may_have_few(questions: Path) -> None:
    """As in training, where it is told of."""
    stages = ("--set", "recipe.stages=[{name: first}]", "--set", "recipe.effective_batch=6")
    said = sameday(questions, "profile", "recipe.yaml", *ON_CPU, *stages, "--steps", "1", "--warmup", "1")
    assert said.code == 0, said.err
    assert "few questions: each step has 5, fewer than recipe.effective_batch 6" in said.out + said.err
