"""What would train another model unseen is refused: another base, other stages, a tower that nothing trains, ..."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from typed import refused, sameday, write_recipe
from worlds import write_tiny, write_world

from sameday.models.start import ORIGIN
from sameday.record.folder import read_metrics
from sameday.record.manifest import MANIFEST, write_manifest
from sameday.spec.errors import EXIT_STOPPED

STAGES = ("--set", "recipe.order={kind: by_image, within_image: stage}")


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Path:
    """Two images, five questions, and a recipe for them."""
    return write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)


def change_stages(world: Path, name: str) -> None:
    """The order depends on stages, though no text or image does."""
    path = world / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"stage": 9}) + "\n" for row in lines))


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def another_merge_first(tokenizer: Any) -> None:
    merges = tokenizer["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def another_template(world: Path) -> None:
    path = world / "base" / "chat_template.jinja"
    path.write_text(path.read_text() + " ")


def another_mean(world: Path) -> None:
    change_json(world / "base" / "preprocessor_config.json", lambda c: c.update(image_mean=[0.5, 0.5, 0.4]))


def another_adapter(world: Path) -> None:
    path = world / "begun" / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[3] += 1e-6
    save_file(tensors, path)


OTHERS: dict[str, Callable[[Path], None]] = {
    "base model": lambda world: write_tiny(world / "base", sharpen=1.5) and None,
    "training data": lambda world: change_stages(world, "train"),
    "validation data": lambda world: change_stages(world, "val"),
    "tokenizer": lambda world: change_json(world / "base" / "tokenizer.json", another_merge_first),
    "chat template": another_template,
    "image processor": another_mean,
    "start adapter": another_adapter,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, from an adapter."""
    world = tmp_path_factory.mktemp("begun")
    write_recipe(write_world(world, 3, counts=(3, 2), hard=False), "base")
    write_tiny(world / "base")
    first = ("train", "recipe.yaml", "--out", "first", "--max-steps", "1")
    assert sameday(world, *first).code == 0
    shutil.move(world / "first" / "adapter", world / "begun")
    for name in (MANIFEST, ORIGIN):  # as somebody else's adapter has none
        (world / "begun" / name).unlink()
    assert sameday(world, *GO_ON, "--stop-after", "1").code == EXIT_STOPPED
    return world


GO_ON = ("train", "recipe.yaml", "--out", "run", "--set", "recipe.start_adapter=begun", *STAGES)


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_is_not_resumed_on_something_else(begun: Path, tmp_path: Path, what: str) -> None:
    world = tmp_path / "world"
    shutil.copytree(begun, world)
    OTHERS[what](world)
    said = refused(world, *GO_ON)
    files = {"training data": "train.jsonl", "validation data": "val.jsonl"}
    if what in files:  # known before a model is loaded
        told = f"the {what} (newer: {world / files[what]}) changed since step-000001 was saved"
        assert said == f"run: {told}; put it back as it was, or choose another --out"
    else:
        assert said.endswith(f"the {what} changed since this checkpoint; choose another --out")


def test_a_run_is_resumed_on_the_same(begun: Path, tmp_path: Path) -> None:
    """Also where an earlier release recorded less of it."""
    for name, kept in (("same", OTHERS), ("fewer", ("base model", "training data"))):
        world = tmp_path / name
        shutil.copytree(begun, world)
        (state,) = world.glob("run/checkpoints/*/state.json")
        recorded = json.loads(state.read_text())
        assert recorded["digests"].keys() == OTHERS.keys()
        recorded["digests"] = {what: recorded["digests"][what] for what in kept}
        state.write_text(json.dumps(recorded))
        write_manifest(state.parent, [path for path in state.parent.iterdir() if path.name != MANIFEST])
        said = sameday(world, *GO_ON)
        assert said.code == 0 and "resumed from step-000001" in said.out


def test_stopping_after_steps_that_are_done(world: Path) -> None:
    words = ("train", "recipe.yaml", "--out", "run", "--stop-after", "1")
    assert [sameday(world, *words).code for _ in range(2)] == [EXIT_STOPPED, EXIT_STOPPED]
    trained = [r for r in read_metrics(world / "run" / "metrics.jsonl") if "split" not in r]
    assert [r["step"] for r in trained] == [1]


def test_a_tower_to_be_trained_needs_a_target(world: Path) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", "recipe.train_vision=true")
    assert said.startswith("train_vision is true, and none of lora.target_modules (")


def test_a_start_adapter_of_another_scale_is_refused(world: Path) -> None:
    assert sameday(world, "train", "recipe.yaml", "--out", "run", "--max-steps", "1").code == 0
    shutil.copytree(world / "run" / "adapter", world / "scaled")
    config = json.loads((world / "scaled" / "adapter_config.json").read_text())
    (world / "scaled" / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    lora = {"r": config["r"], "alpha": config["lora_alpha"], "target_modules": sorted(config["target_modules"])}
    said = refused(
        world, "train", "recipe.yaml", "--set", "recipe.start_adapter=scaled", "--set", f"recipe.lora={lora}"
    )
    assert said.endswith("rslora is true there, false in the recipe")


def test_what_cannot_be_encoded_is_left_out_when_asked(world: Path) -> None:
    rows = (world / "train.jsonl").read_text().splitlines()
    long = json.loads(rows[0]) | {"question": "is there a red polyp", "answer": "no"}
    picture = Image.new("RGB", (128, 128), "red")
    picture.save(world / "images" / "large.png")
    (world / "train.jsonl").write_text("\n".join([*rows, json.dumps(long | {"image": "large.png"})]) + "\n")
    words = ("train", "recipe.yaml", "--out", "run", "--max-steps", "1", "--set", "recipe.max_length=60")
    assert f"train.jsonl:{len(rows) + 1}: max_length 60 has no room" in refused(world, *words)
    assert sameday(world, *words, "--on-bad", "skip").code == 0
    skipped = json.loads((world / "run" / "skipped.json").read_text())
    assert [entry["where"] for entry in skipped] == [f"train.jsonl:{len(rows) + 1}"]


def test_special_tokens_in_the_system_prompt_are_refused(world: Path) -> None:
    said = refused(world, "train", "recipe.yaml", "--set", 'recipe.system_prompt="see <|image_pad|>"')
    assert said == "recipe.system_prompt holds <|image_pad|>, which would become a real token"


def test_a_plan_for_another_task_is_refused_wherever_it_meets_the_recipe(world: Path) -> None:
    (world / "plan.yaml").write_text("workers: 0\nmicro_batch: 4\n")
    why = "micro_batch is 4; it is for samples that are all of one size, which task vqa does not have: leave it out"
    for words in (("train", "recipe.yaml"), ("verify", "recipe.yaml")):
        assert refused(world, *words, "--plan", "plan.yaml") == f"plan.yaml:2: {why}"
        assert refused(world, *words, "--set", "plan.micro_batch=4") == f"--set plan.micro_batch=4: {why}"
    (world / "good.yaml").write_text("workers: 0\n")
    words = ("verify", "recipe.yaml", "--plan", "good.yaml", "--against", "plan.yaml")
    assert refused(world, *words) == f"plan.yaml:2: {why}"
    assert sameday(world, "train", "recipe.yaml", "--out", "run", "--max-steps", "1").code == 0
    shutil.copy(world / "plan.yaml", world / "run" / "plan.yaml")
    assert refused(world, "eval", "run", "--split", "val") == f"run/plan.yaml:2: {why}"


def test_betas_have_limits(world: Path) -> None:
    assert "each must be at least 0 and less than 1" in refused(
        world, "train", "recipe.yaml", "--set", "recipe.betas=[0.9,1.5]"
    )
