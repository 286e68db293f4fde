"""Training from the cache: the same bits from pixels, the same model from features, and nothing that is not ours."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from arms import Stage
from PIL import Image
from torch import Tensor
from typed import sameday

from sameday.cache import store as store_module
from sameday.cache.key import differences
from sameday.cache.store import Store
from sameday.cache.worth import Measured
from sameday.commands.launch import cache_from_files
from sameday.commands.session import Session, Specs
from sameday.data.questions.images import stamp
from sameday.data.questions.sample import images_of
from sameday.hardware.machine import Machine
from sameday.hardware.ranks import Ranks
from sameday.kernels.bdh import interpreted
from sameday.models import vlm
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_DISK_FULL, EXIT_STOPPED, BadInput
from sameday.spec.plan import Plan
from sameday.tasks.setup import Caching
from sameday.tasks.vqa import cache, fill
from sameday.tasks.vqa.cache import settings_of, write_measured
from sameday.tasks.vqa.fill import Filling
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.steps import Steps

pytestmark = pytest.mark.slow

CPU = ["plan.device=cpu"]
"""What is made by hand below is made there, and a cache is keyed by where its features were computed."""
SHARED: dict[str, Any] = {"share_images": True, "packing": True, "max_questions": None, "label_only_logits": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    worlds.write_world(folder, 5, (5, 3, 2), sizes=((48, 32), (32, 64)))
    worlds.write_tiny(folder / "model", text={"num_hidden_layers": 2})
    return folder


@pytest.fixture
def home(world: Path, tmp_path: Path) -> Path:
    """The same files, and a cache of its own."""
    for part in world.iterdir():
        (tmp_path / part.name).symlink_to(part)
    return tmp_path


def make(home: Path, **plan: Any) -> VqaTask:
    task = worlds.make_task(home, worlds.tiny_recipe(home / "model", order="by_image"), Plan(**plan))
    worlds.stir(task)
    return task


def learned(task: VqaTask) -> dict[str, Tensor]:
    """Gradients of an epoch, and what evaluation says."""
    steps = Steps(task.recipe, task.plan, task, Ranks())
    for step in range(task.steps_per_epoch()):
        steps.accumulate(task.batches(step, None, Ranks()), step)
    found = {name: p.grad.clone() for name, p in task.trained().items() if p.grad is not None}
    return found | {name: torch.tensor(float(value)) for name, value in task.evaluate("val", Ranks()).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    apart = max(float((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-9)) for name in b)
    return a.keys() == b.keys() and apart < 1e-5


def contents(task: VqaTask) -> set[str]:
    return {image.digest for image in images_of(task.splits)}


def settled(task: VqaTask) -> None:
    """What is written behind the training's back has arrived."""
    assert task.model.keep is not None
    task.model.keep.__self__.pool.shutdown(wait=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", [{}, SHARED], ids=["plain", "shared"])
def test_pixels_give_the_same_bits(home: Path, plan: dict[str, Any]) -> None:
    without = learned(make(home, **plan))
    filling = make(home, cache="pixels", **plan)
    assert filling.notes[0].startswith(f"cache: pixels of 0 of {len(contents(filling))} images in")
    assert equal(learned(filling), without)
    reading = make(home, cache="pixels", workers=1, **plan)
    assert f"pixels of {len(contents(reading))} of {len(contents(reading))} images" in reading.notes[0]
    shutil.move(home / "images", home / "elsewhere")
    assert equal(learned(reading), without), "nothing is decoded any more"


@pytest.mark.parametrize("plan", [{}, SHARED], ids=["plain", "shared"])
def test_features_give_the_same_model(home: Path, plan: dict[str, Any]) -> None:
    without = learned(make(home, **plan))
    filling = make(home, cache="features", **plan)
    found = learned(filling)
    assert close(found, without)
    settled(filling)
    store = Store(home / "sameday-cache", settings_of("features", filling.processor, filling.model))
    assert store.contents() == contents(filling), "all of it in the first epoch"
    for content in sorted(contents(filling))[::2]:
        store.path(content).unlink()
    mixed = make(home, cache="features", **plan)
    assert equal(learned(mixed), found), "some computed, some read"
    settled(mixed)
    reading = make(home, cache="features", workers=1, **plan)
    batches = list(reading.batches(0, None, Ranks()))
    assert all(all(batch.ready) and not len(batch.pixels) for batch in batches)
    assert equal(learned(reading), found)


@pytest.mark.parametrize(
    ("plan", "bitwise"),
    [
        ({"cache": "pixels"}, True),
        ({"cache": "features"}, False),
        ({"keep_features": True}, False),
        ({"cache": "pixels", "keep_features": True}, False),
    ],
)
def test_verify_agrees(world: Path, tmp_path: Path, plan: dict[str, Any], bitwise: bool) -> None:
    recipe = worlds.tiny_recipe(world / "model", order="by_image", effective_batch=4)
    stage = Stage(tmp_path, world, recipe, steps=4)
    for _ in ("cold", "warm"):
        found = stage.compare(Plan(**plan, cache_dir=str(tmp_path / "cache")))
        assert not found.differences, found.differences
        assert found.bitwise or not bitwise


def test_another_tower_and_another_size_are_named(home: Path) -> None:
    task = make(home, cache="features")
    learned(task)
    settled(task)
    with torch.no_grad():
        next(task.model.tower.parameters()).view(-1)[3] += 1
    known = settings_of("features", task.processor, task.model)
    assert Store(home / "sameday-cache", known).contents() == set()
    # The same weights, computed with otherwise.
    task.model.tower.config.num_heads *= 2
    heads = settings_of("features", task.processor, task.model)
    assert [text.split(":")[0] for text in differences(known, heads)] == ["tower"]
    task.model.recipe = task.recipe.model_copy(update={"precision": "tf32"})
    assert any("precision" in text for text in differences(heads, settings_of("features", task.processor, task.model)))
    weight = task.model.tower.blocks[0].mlp.linear_fc1.weight
    with torch.no_grad():
        weight.copy_(weight.flip(0, 1))  # the same numbers in other places
    assert len(differences(heads, settings_of("features", task.processor, task.model))) == 2
    recipe = worlds.tiny_recipe(home / "model", max_pixels=32 * 32)
    small = worlds.make_task(home, recipe, Plan(cache="features"))
    assert "max_pixels: 1024 here" in small.notes[0] and "tower:" not in small.notes[0]
    assert contents(small) and all(not any(batch.ready) for batch in small.batches(0, None, Ranks()))


@pytest.mark.parametrize("what", ["device", "compile"])
def test_features_of_another_device_or_of_compiled_layers_are_not_read(
    home: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rounded otherwise: a run would depend on who filled its cache."""
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "eager")
    task = make(home, cache="features")
    learned(task)
    settled(task)
    pixels = settings_of("pixels", task.processor, task.model)
    known = settings_of("features", task.processor, task.model)
    assert Store(home / "sameday-cache", known).contents() == contents(task)
    if what == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        assert cache.device_name(torch.device("cuda", 1)) == "a GPU" != cache.device_name(torch.device("cpu"))
        monkeypatch.setattr(cache, "device_name", lambda _: "a GPU")
    other = make(home, cache="features", compile="layers" if what == "compile" else "none")
    theirs = settings_of("features", other.processor, other.model)
    assert [text.split(":")[0] for text in differences(known, theirs)] == [what]
    assert other.notes[0].startswith("cache: features of 0 of ") and f"others there have {what}: " in other.notes[0]
    assert all(not any(batch.ready) for batch in other.batches(0, None, Ranks()))
    assert settings_of("pixels", other.processor, other.model) == pixels, "which the model has no part in"
    monkeypatch.undo()
    assert all(all(batch.ready) for batch in make(home, cache="features").batches(0, None, Ranks()))


def test_features_of_a_trained_tower_are_refused(home: Path) -> None:
    recipe = worlds.tiny_recipe(home / "model", train_vision=True, train="all")
    with pytest.raises(BadInput) as error:
        plan = Plan(cache="features", attention="flex")
        VqaSetup(recipe, home).resolve_auto(plan, Machine("cpu", "CPU", 2**34, 2, False))
    first, second = str(error.value).splitlines()
    assert first.startswith("plan.cache features ") and "recipe.train_vision trains the tower; allowed: none" in first
    assert second == "plan.attention flex has no backward pass on a CPU; allowed there: auto, sdpa, split"
    (home / "recipe.yaml").write_text(dump_yaml(recipe))
    with pytest.raises(BadInput, match="train_vision"):
        cache_from_files(home / "recipe.yaml", None, CPU, Caching("features", "fill", False))


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (["tower.qkv"], "the tower"),
        (["q_proj", "projector.all-linear"], "the projector"),
        (["projector.all-linear", "tower.all-linear"], "the tower and the projector"),
    ],
)
def test_features_of_a_tower_or_projector_with_adapters_are_refused(home: Path, targets: list[str], parts: str) -> None:
    recipe = worlds.tiny_recipe(home / "model", lora={"target_modules": targets})
    setup, machine = VqaSetup(recipe, home), Machine("cpu", "CPU", 2**34, 2, False)
    with pytest.raises(BadInput) as error:
        setup.resolve_auto(Plan(cache="features"), machine)
    assert str(error.value) == (
        "plan.cache features keeps what vision tower and projector make of an image, and recipe.lora.target_modules "
        f"trains {parts}; allowed: none, pixels, auto"
    )
    with pytest.raises(BadInput, match=f"plan.keep_features true keeps what .* trains {parts}; allowed: false"):
        setup.resolve_auto(Plan(keep_features=True), machine)
    setup.resolve_auto(Plan(cache="pixels"), machine)
    cannot = {("cache", "features"), ("keep_features", True), ("cuda_graphs", True)}
    triton = {("lora_kernel", "triton"), ("attention", "fused"), ("embeddings_on", "host")}
    assert setup.cannot(machine) == cannot | (set() if interpreted() else triton)
    (home / "recipe.yaml").write_text(dump_yaml(recipe))
    with pytest.raises(BadInput) as error:
        cache_from_files(home / "recipe.yaml", None, CPU, Caching("features", "fill", False))
    assert str(error.value) == (
        "features are what vision tower and projector make of an image, and recipe.lora.target_modules trains "
        f"{parts}: they would be others after every step"
    )
    alone = worlds.tiny_recipe(home / "model", lora={"target_modules": ["all-linear"]})
    VqaSetup(alone, home).resolve_auto(Plan(cache="features"), machine)


# The command


@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_a_cache_is_filled_checked_and_pruned(home: Path, kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = worlds.tiny_recipe(home / "model", order="by_image")
    (home / "recipe.yaml").write_text(dump_yaml(recipe))

    def ask(what: Any, measure: bool = False) -> tuple[bool, str]:
        well = cache_from_files(home / "recipe.yaml", None, CPU, Caching(kind, what, measure))
        return well, capsys.readouterr().out

    well, said = ask("check")
    assert not well and "0 entries intact, 4 missing, 0 damaged" in said
    well, said = ask("fill")
    assert well and f"{kind}: 4 images made" in said, said
    assert ("one process decodes" in said) == (kind == "pixels") and ("GB/s here" in said) == (kind == "features")
    well, said = ask("check")
    assert well and "4 entries intact, 0 missing, 0 damaged" in said
    task = make(home, cache=kind)
    assert f"cache: {kind} of 4 of 4 images" in task.notes[0]
    assert close(learned(task), learned(make(home)))
    entry = next((home / "sameday-cache").glob(f"{kind}-*/*.safetensors"))
    damaged = bytearray(entry.read_bytes())
    damaged[-1] ^= 1
    entry.write_bytes(damaged)
    well, said = ask("check")
    assert (
        not well and f"{entry.name}: its data is damaged" in said and "3 entries intact, 0 missing, 1 damaged" in said
    )
    (line,) = (each for each in said.splitlines() if entry.name in each)
    assert line.endswith("); removed") and not entry.exists()
    assert said.splitlines()[-1] == (
        f"1 damaged entry is removed, and is made again by `sameday cache --kind {kind}` or by a run with this cache"
    )
    assert ask("fill")[0] and ask("check")[0], "a damaged entry is removed, and made again"
    stale = entry.with_name("0123456789abcdef.safetensors")
    shutil.copy(entry, stale)
    (entry.parent.parent / "features-afile").write_text("not ours")
    small = worlds.tiny_recipe(home / "model", max_pixels=32 * 32)
    (home / "small.yaml").write_text(dump_yaml(small))
    assert cache_from_files(home / "small.yaml", None, CPU, Caching(kind))
    well, said = ask("prune")
    assert well and "1 files that this recipe does not use are gone" in said and not stale.exists()
    assert "4 entries with max_pixels" in said and "stay; --prune --all removes them" in said
    assert ask("check")[0] and cache_from_files(home / "small.yaml", None, CPU, Caching(kind, "check"))
    capsys.readouterr()
    well, said = ask("prune all")
    assert well and "4 files that this recipe does not use are gone" in said, said
    assert ask("check")[0] and not cache_from_files(home / "small.yaml", None, CPU, Caching(kind, "check"))


def test_measured_steps_decide_what_auto_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(home / "model", order="by_image")))
    plan = Session.start(Specs.from_files(home / "recipe.yaml", None, CPU)).plan
    auto = plan.model_dump() | {"cache": "auto"}
    assert "cache: none, because no steps of this recipe and plan were timed" in make(home, **auto).notes[0]
    cache_from_files(home / "recipe.yaml", None, CPU, Caching("pixels", "fill", True))
    said = capsys.readouterr().out
    assert "pixels: " in said and "features: " in said and "GB/s here" in said
    (file,) = (home / "sameday-cache").glob("measured-*.json")
    measured = json.loads(file.read_text())
    assert 0 < measured["tower"] < measured["step"] and measured["images"] > 1 and measured["disk"] > 0
    task = make(home, **auto)

    def now(**figures: Any) -> VqaTask:
        made = Measured(**(measured | figures))
        write_measured(home / "sameday-cache", task.recipe, task.plan, task.model, made)
        return make(home, **auto)

    found = now(decode=10.0, workers=0, feature_bytes=1e15)
    assert found.notes[0].startswith("cache: pixels, because pixels: the training process decodes")
    assert found.source.pixels is not None and found.digests()["choice of plan.cache auto"] == "pixels"
    fast = {"step": 1.0, "tower": 0.5, "disk": 1e12, "decode": 1e-9}
    found = now(**fast)
    assert found.notes[0].startswith("cache: none, because features: ") and found.source.features is None
    assert "frees 500 of 1000 ms: 2.00×, but 4 images are missing: `sameday cache --kind features`" in found.notes[0]
    cache_from_files(home / "recipe.yaml", None, CPU, Caching("features"))
    found = now(**fast)
    assert found.notes[0].startswith("cache: features, because features:")
    right = learned(found)
    next((home / "sameday-cache").glob("features-*/*.safetensors")).write_bytes(b"")
    assert equal(learned(make(home, **auto)), right), "one is computed, the others are read"
    # A file that nobody measured is none.
    for text in ("{}", "[", json.dumps(measured | {"disk": 0}), json.dumps(measured | {"step": "fast"})):
        file.write_text(text)
        assert "no steps of this recipe" in make(home, **auto).notes[0]


@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_the_verdict_is_told_once_unless_the_entries_tell_another(
    home: Path, kind: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk of this machine may be of any speed: two that are given."""
    (home / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(home / "model", order="by_image")))
    monkeypatch.setattr(fill, "read_rate", lambda folder: 1e12)

    def verdicts(entries: float) -> list[str]:
        monkeypatch.setattr(fill, "rate_of", lambda paths: entries)
        assert cache_from_files(home / "recipe.yaml", None, [*CPU, "plan.workers=0"], Caching(kind, measure=True))
        return [line for line in capsys.readouterr().out.splitlines() if "GB/s here" in line]

    once = verdicts(1e12)
    assert [line.split(":")[0] for line in once] == ["pixels", "features"]
    twice = verdicts(1.0)
    assert [line.split(":")[0] for line in twice[2:]] == [
        "read from the entries themselves, pixels",
        "read from the entries themselves, features",
    ]


def test_questions_without_images(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}] for i in range(20)]
    rows = [{"messages": each, "images": []} for each in said]
    for name in ("train", "val"):
        (home / f"{name}-blind.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"train": "train-blind.jsonl", "val": "val-blind.jsonl"}
    (home / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(home / "model", data=data)))
    for asked in (Caching("pixels"), Caching("pixels", measure=True), Caching("features")):
        assert cache_from_files(home / "recipe.yaml", None, CPU, asked)
    assert "features: no images, no gain" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pixels", "features"])
def test_folders_that_cannot_be_used(home: Path, kind: Any) -> None:
    (home / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(home / "model")))
    (home / "file").write_text("")
    for folder in ("file", "file/below", "/proc/nowhere", "x" * 300, "~nobody-of-this-name/x"):
        with pytest.raises(BadInput) as caught:
            cache_from_files(home / "recipe.yaml", None, [f"plan.cache_dir={folder}"], Caching(kind))
        assert folder in str(caught.value) and "free" not in str(caught.value), "its room is another matter"


def test_a_disk_is_not_filled_to_its_end(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run's checkpoints may need it."""
    monkeypatch.setattr(store_module, "RESERVE", 10**18)
    assert equal(learned(make(home, cache="pixels")), learned(make(home)))
    assert not list(home.glob("sameday-cache/*/*.safetensors"))
    said = capfd.readouterr().err
    assert said.count("are left for checkpoints; the run goes on, and keeps no more images") == 1


def test_a_run_goes_on_without_a_folder_that_cannot_be(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of which no room is said, though nothing is free there either."""
    assert equal(learned(make(home, cache="pixels", cache_dir="/proc/nowhere")), learned(make(home)))
    assert capfd.readouterr().err == (
        "cache: plan.cache_dir /proc/nowhere: cannot be a folder: No such file or directory; choose another one; the "
        "run goes on, and keeps no more images\n"
    )


def test_features_of_a_changed_image_are_not_kept(home: Path) -> None:
    """Even where its file has the same size and time."""
    task = make(home, cache="features")
    images = {image.path: image for split in task.splits.values() for s in split for image in s.images}
    path = next(iter(images))
    own = home / "own.png"
    own.write_bytes(path.read_bytes())
    before = replace(images[path], path=own)
    with Image.open(path) as opened:
        Image.fromarray(255 - np.asarray(opened.convert("RGB"))).save(own)
    same = replace(before, stamp=stamp(own))  # as if nothing could be told from the outside
    with pytest.raises(BadInput, match="has changed since the data was checked"):
        task.source.read_image(same)


def test_classification_has_no_use_for_it(tmp_path: Path) -> None:
    import sets

    (sets.write_set(tmp_path) / "recipe.yaml").write_text(dump_yaml(sets.tiny_recipe()))
    with pytest.raises(BadInput, match="task classify has no use for a cache"):
        cache_from_files(tmp_path / "recipe.yaml", None, [], Caching("pixels", "fill", False))


def test_one_image_under_many_names_is_one_entry(home: Path) -> None:
    rows = [json.loads(line) for line in (home / "train.jsonl").read_text().splitlines()]
    images = home / "copies"
    images.mkdir()
    for i, row in enumerate(rows):
        if isinstance(row.get("image"), str):
            shutil.copy(home / "images" / row["image"], images / f"{i}.png")
            row["image"] = f"{i}.png"
    kept = [row for row in rows if isinstance(row.get("image"), str)]
    (home / "many.jsonl").write_text("\n".join(map(json.dumps, kept)))
    recipe = worlds.tiny_recipe(home / "model", data={"train": "many.jsonl", "image_root": "copies"})
    splits = VqaSetup(recipe, home).audit(print).splits
    filling = Filling("pixels", make(home).processor, images_of(splits), home / "cache", print)
    filling.fill(workers=2)
    assert len(list(images.iterdir())) == len(kept) > len(filling.store.contents()) == 4


def test_a_cache_without_room_leaves_with_the_code_of_a_full_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "recipe.yaml").write_text(dump_yaml(worlds.tiny_recipe(home / "model")))
    monkeypatch.setattr("sameday.cache.build.free_bytes", lambda _: 1_000)
    said = sameday(home, "cache", "recipe.yaml", "--kind", "pixels", "--set", "plan.device=cpu")
    assert said.code == EXIT_DISK_FULL
    assert re.fullmatch(
        r"error: .*sameday-cache/\S+: pixels of \d+ images need .* of disk, and 1\.0 kB are free; make room, or choose "
        r"another folder\n",
        said.err,
    ), said.err


def test_a_build_that_is_asked_to_stop_goes_on_later(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    (home / "large").mkdir()
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (500, 500, 3), dtype=np.uint8)).save(home / f"large/{i}.png")
    rows = [{"image": f"{i}.png", "question": "what?", "answer": "noise"} for i in range(20)]
    (home / "large.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = worlds.tiny_recipe(home / "model", data={"train": "large.jsonl", "image_root": "large"}, max_pixels=500**2)
    (home / "recipe.yaml").write_text(dump_yaml(recipe))
    words = [sys.executable, "-m", "sameday", "cache", "recipe.yaml", "--kind", "pixels", "--set", "plan.workers=1"]
    process = subprocess.Popen(words, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(home.glob("sameday-cache/pixels-*/*.safetensors")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    there = len(list(home.glob("sameday-cache/pixels-*/*.safetensors")))
    assert process.returncode == EXIT_STOPPED, f"{out}\n{error}"
    assert f"pixels: {there} of 20 images are there; the same command goes on" in error and 0 < there < 20
    assert cache_from_files(home / "recipe.yaml", None, CPU, Caching("pixels"))
    assert f"pixels: {20 - there} images made" in capsys.readouterr().out
    assert cache_from_files(home / "recipe.yaml", None, CPU, Caching("pixels", "check"))
