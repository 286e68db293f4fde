"""What is wrong with a run is said before anything of it is written; what only weights can show takes it back."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from typed import refused, sameday, write_recipe
from worlds import write_world

from sameday.tasks.vqa.task import VqaTask

OUT = ("--out", "run", "--set", "plan.device=cpu")


@pytest.fixture
def world(tmp_path: Path, tiny_qwen3: Path) -> Path:
    """Two images, five questions, and a recipe for them."""
    return write_recipe(write_world(tmp_path, 3, counts=(3, 2), hard=False), tiny_qwen3)


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused_unwritten(world: Path, *sets: str) -> str:
    before = listing(world)
    said = refused(world, "train", "recipe.yaml", *OUT, *(part for each in sets for part in ("--set", each)))
    assert listing(world) == before, "something is left behind"
    return said


def test_a_smallest_size_above_the_models_largest(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VqaTask, "load", lambda *_: pytest.fail("the model is loaded"))
    said = refused_unwritten(world, "recipe.min_pixels=60000000")
    assert said.startswith("min_pixels 60000000 is larger than max_pixels ") and said.endswith("leaves out: set both")


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_a_backend_that_is_not_installed(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VqaTask, "load", lambda *_: pytest.fail("the model is loaded"))
    said = refused_unwritten(world, "recipe.image_backend=torchvision")
    assert said == "image_backend torchvision needs torchvision, which is not installed; pil is allowed"


def test_a_torchvision_for_another_torch(
    world: Path, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and transformers would have no class of a model with it, whatever the recipe's backend is."""
    site = tmp_path_factory.mktemp("site")
    for folder, file, text in (
        ("torchvision", "__init__.py", "raise RuntimeError('operator torchvision::nms does not exist')\n"),
        ("torchvision-0.99.0.dist-info", "METADATA", "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99.0\n"),
    ):
        (site / folder).mkdir(parents=True)
        (site / folder / file).write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    said = refused_unwritten(world)
    assert said == (
        f"torchvision 0.99.0 does not fit torch {torch.__version__}: operator torchvision::nms does not exist; install "
        "the build that fits, or remove torchvision, which recipe.image_backend pil does not need"
    )
    asked = refused(world, "data", "train.jsonl", "--model", str(tiny_qwen3), "--image-root", "images")
    assert asked.splitlines()[-1] == said


def test_questions_that_have_no_room(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VqaTask, "load", lambda *_: pytest.fail("the model is loaded"))
    said = refused_unwritten(world, "recipe.max_length=8")
    assert "train.jsonl:1: max_length 8 has no room" in said
    (listed,) = re.findall(r"all \d+ are listed in (.*)", said)
    assert "val.jsonl:1: max_length 8" in Path(listed).read_text()


def test_adapters_that_only_the_model_refuses(world: Path) -> None:
    """The folder is made, and taken back; one that was there stays, without what was written into it."""
    sets = ("recipe.lora.target_modules=[no_such_layer]",)
    assert "no_such_layer" in refused_unwritten(world, *sets)
    (world / "run").mkdir()
    assert "no_such_layer" in refused_unwritten(world, *sets)
    (world / "run" / "notes.txt").write_text("mine")
    refused(world, "train", "recipe.yaml", *OUT, "--set", *sets)
    assert (world / "run" / "notes.txt").read_text() == "mine"


def test_an_empty_file(world: Path) -> None:
    """Of validation there may be none; of training there must be some."""
    (world / "val.jsonl").write_text("")
    said = refused_unwritten(world)
    assert said.endswith("val.jsonl is empty: it holds no question; where there are none, leave recipe.data.val out")
    (world / "train.jsonl").write_text("")
    assert refused_unwritten(world, "recipe.data.val=null").endswith("train.jsonl is empty: it holds no question")


def test_a_batch_that_is_larger_than_the_data(world: Path) -> None:
    allowed = "so that no step could have as many; allowed: 1 to 5"
    said = refused_unwritten(world, "recipe.effective_batch=6")
    assert said == f"recipe.effective_batch is 6, and there are 5 questions to train on, {allowed}"
    said = refused_unwritten(world, "recipe.effective_batch=5", "recipe.data.limit=3")
    assert said.endswith("allowed: 1 to 3; recipe.data.limit (--limit) 3 leaves no more")
    said = refused_unwritten(world, "recipe.effective_batch=5", "recipe.data.limit=1")
    assert "and there is 1 question to train on, " in said
    assert said.endswith("allowed: 1; recipe.data.limit (--limit) 1 leaves no more")
    assert sameday(world, "train", "recipe.yaml", *OUT, "--set", "recipe.effective_batch=5").code == 0


def test_a_run_that_has_begun_stays(world: Path) -> None:
    assert sameday(world, "train", "recipe.yaml", *OUT).code == 0
    rows = (world / "train.jsonl").read_text().replace("is", "was")
    (world / "train.jsonl").write_text(rows)
    assert "the training data" in refused_unwritten(world)


def test_data_model_and_adapter_are_refused_together(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VqaTask, "load", lambda *_: pytest.fail("the model is loaded"))
    (world / "train.jsonl").write_text('{"image": "0.png", "question": "?"}\n' + (world / "train.jsonl").read_text())
    data, adapter = refused_unwritten(world, "recipe.start_adapter=nowhere").split("recipe.data.on_bad=skip")
    assert "train.jsonl:1: " in data
    assert adapter.splitlines()[1:] == [
        f"start_adapter: {world / 'nowhere'} is not a PEFT adapter (it has no adapter_config.json)"
    ]
    said = refused_unwritten(world, "recipe.model=./nothing")
    assert "train.jsonl:1: " in said and said.count("model './nothing'") == 1, (
        "the model is refused once, beside the data"
    )


FOREIGN = "which task cot does not have"


@pytest.mark.parametrize("command", [("train", "recipe.yaml"), ("eval", "recipe.yaml", "--base")])
def test_fields_of_other_tasks_do_not_hide_what_the_machine_cannot_do(
    world: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(VqaTask, "load", lambda *_: pytest.fail("the model is loaded"))
    write_recipe(world, "model", task="cot")
    (world / "plan.yaml").write_text(
        "device: cpu\ncuda_graphs: true\nmicro_batch: 3\nprefetc: 2\nworkers: 255\nlora_kernel: triton\n"
        "embeddings_on: host\n"
    )
    said = refused(world, *command, "--plan", "plan.yaml").splitlines()
    assert said[0].startswith("plan.yaml:4: prefetc is not a key here; nearest: prefetch")
    assert sorted(line.split(" is ")[0] for line in said[1:3]) == [
        "plan.yaml:2: cuda_graphs",
        "plan.yaml:3: micro_batch",
    ]
    assert all(FOREIGN in line for line in said[1:3])
    assert said[3].startswith("plan.workers 255: each is a process with memory of its own, and this machine has ")
    assert said[4].startswith("plan.lora_kernel triton needs ")
    assert said[5].startswith("plan.embeddings_on host spares ")
    assert len(said) == 6


@pytest.mark.parametrize("names", [["recipe.yaml"], ["plan.yaml"], ["recipe.yaml", "plan.yaml"]])
def test_a_recipe_that_lies_where_the_run_would_be(world: Path, names: list[str]) -> None:
    """A run writes a recipe of its own, without comments and with what --set says."""
    kept = {name: (world / name).read_text() if name == "recipe.yaml" else "{}  # mine\n" for name in names}
    (world / "kept").mkdir()
    for name, text in kept.items():
        (world / "kept" / name).write_text(text)
    before = listing(world)
    said = refused(world, "train", "recipe.yaml", "--out", "kept", "--set", "plan.device=cpu", "--limit", "4")
    its, it = " and its ".join(names), "it" if len(names) == 1 else "them"
    assert said == (f"kept: its {its} would be written over: no run wrote {it}; choose another --out, such as kept/run")
    assert listing(world) == before
    assert {name: (world / "kept" / name).read_text() for name in names} == kept
    here = refused(world, "train", "recipe.yaml", "--out", ".", "--set", "plan.device=cpu")
    assert here.startswith(
        ".: its recipe.yaml would be written over: no run wrote it; choose another --out, such as run"
    )
