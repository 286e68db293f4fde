"""Features that stay in memory: the same model, the same bits however many there was room for, and no image computed
twice where there was."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import worlds
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sameday.commands.session import Session, Specs, _plan
from sameday.data.questions.sample import ImageRef, images_of
from sameday.hardware.machine import Machine
from sameday.hardware.ranks import Ranks
from sameday.models import features
from sameday.models.features import FeatureMemory, in_powers, share_made
from sameday.models.vlm import VisionLanguageModel
from sameday.profile.timeline import record
from sameday.record.folder import RunFolder
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.base import Say
from sameday.tasks.setup import TRAINING
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.train.loop import train
from sameday.tune.trial import FIRST, Job, run

H200 = Machine("cuda", "NVIDIA H200", 140 * 2**30, 16, True, 2**17, (9, 0))
CPU = Machine("cpu", "CPU", 2**34, 2, False)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"share_images": True, "packing": True, "max_questions": None, "label_only_logits": True},
}
KEEPING = {"keep_features": True, "deterministic": True}
KEPT = PLANS["shared"] | KEEPING


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may have most of the memory."""
    monkeypatch.setattr(features, "LEFT", 0.0)


def image(number: int) -> Tensor:
    """Of one to five tokens."""
    return torch.randn(2, number % 5 + 1, 3, generator=torch.Generator().manual_seed(number)).to(DEVICE)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=8), st.integers(0, 8))
def test_what_comes_back_is_what_was_made(batches: Sequence[Sequence[int]], opened: int) -> None:
    memory, made = FeatureMemory(DEVICE), Counter[int]()

    def make(number: int) -> Tensor:
        made[number] += 1
        return image(number)

    for time, batch in enumerate(batches):
        if time == opened:
            memory.open()
        if time <= opened:
            made.clear()
        got = memory.of_all([str(number) for number in batch], lambda new, batch=batch: [make(batch[i]) for i in new])  # type: ignore[misc]
        assert torch.equal(got, torch.cat([image(number) for number in batch], 1))
        assert len(memory) == (0 if time < opened else len({n for each in batches[opened : time + 1] for n in each}))
    assert set(made.values()) <= {1}, "once in a batch, and once at all where it is kept"
    assert all(str(number) in memory for number in made) or len(batches) <= opened


@given(st.lists(st.sets(st.integers(0, 9), max_size=6), max_size=8), st.integers(0, 12))
def test_the_share_that_is_made_is_what_a_run_makes(steps: Sequence[set[int]], most: int) -> None:
    memory, made = FeatureMemory(DEVICE), list[int]()

    def make(number: int) -> Tensor:
        made.append(number)
        return image(number)

    memory.open()
    with patch.object(FeatureMemory, "_room", lambda _: (10**9 if len(memory) < most else 0, 0)):
        for step in steps:
            if step:
                memory.of_all(sorted(map(str, step)), lambda new, step=step: [make(sorted(step)[i]) for i in new])
    needed = sum(map(len, steps))
    share = share_made([sorted(map(str, step)) for step in steps], most)
    assert share == (len(made) / needed if needed else 0.0)


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_those_of_one_kind_come_together_in_few_sizes(kinds: Sequence[str]) -> None:
    groups = list(in_powers(range(len(kinds)), lambda i: kinds[i]))
    assert sorted(number for group in groups for number in group) == list(range(len(kinds)))
    assert all(len({kinds[number] for number in group}) == 1 for group in groups)
    sizes = {kind: [len(group) for group in groups if kinds[group[0]] == kind] for kind in set(kinds)}
    assert all(size & (size - 1) == 0 for each in sizes.values() for size in each), "powers of two"
    assert all(len(each) == kinds.count(kind).bit_count() for kind, each in sizes.items()), "as few as can be"


def test_it_takes_no_more_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    taken = 0

    def free(_: torch.device) -> tuple[int, int]:
        return 1000 - taken, 1000

    monkeypatch.setattr(features, "free_memory", free)
    monkeypatch.setattr(features, "LEFT", 0.25)
    memory, each = FeatureMemory(DEVICE), torch.zeros(1, 25, 1, device=DEVICE)
    said = memory.open()
    assert said == "keep_features: up to 0.0 GiB for features of images; 0.0 GiB more than needed so far stay free"
    assert memory.most() == 0, "it is not known how large they are"
    for number in range(20):
        memory.of_all([str(number)], lambda _: [each + number])  # noqa: B023
        taken = len(memory) * each.nbytes
        assert memory.most() == 7, number
    assert len(memory) == memory.most() == 7, "750 bytes of 1,000, 100 for each"
    for number in range(20):
        got = memory.of_all([str(number)], lambda _: [each + number])  # noqa: B023
        assert torch.equal(got, each + number)
    assert len(memory) == 7 and [str(n) in memory for n in range(20)] == [True] * 7 + [False] * 13
    said = capfd.readouterr().err
    assert said == (
        "keep_features: there is room for features of 7 images (0.0 GiB); others are computed when they come\n"
    )
    assert memory.let_go() == "features of 7 images (0.0 GiB)" and memory.let_go() is None and not len(memory)
    assert memory.open() is None, "it says so once"
    taken = 0
    memory.of_all(["1"], lambda _: [each])
    assert not len(memory), "what ran out once would run out again"


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU has no allocator of torch's own")
def test_on_a_gpu_they_lie_apart_from_what_steps_take_and_are_given_back() -> None:
    memory = FeatureMemory(DEVICE)
    memory.open()
    steps = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    del steps  # a free segment, which a tensor that stays must not be cut from
    reserved = torch.cuda.memory_reserved()
    for number in range(4):
        memory.of_all([str(number)], lambda _: [torch.ones(1, 2**22, 1, device=DEVICE)])
    assert len(memory) == 4 and torch.cuda.memory_reserved() >= reserved + 4 * 2**24
    again = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    del again
    with_all = torch.cuda.memory_reserved()
    assert with_all < reserved + 2**28, "the segment was still whole"
    memory.let_go()
    assert torch.cuda.memory_reserved() <= with_all - 4 * 2**24


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU has no allocator of torch's own")
def test_they_are_kept_where_segments_grow() -> None:
    lines = """
        import torch
        from sameday.models import features
        features.LEFT = 0.0
        memory = features.FeatureMemory(torch.device("cuda"))
        memory.open()
        for number in range(4):
            memory.of_all([str(number)], lambda _: [torch.ones(1, 2**22, 1, device="cuda")])
        taken = torch.cuda.memory_allocated()
        memory.let_go()
        print(len(memory), taken - torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    """
    own = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", textwrap.dedent(lines)]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    kept, given_back, held = map(int, done.stdout.split())
    assert (kept, given_back) == (0, 4 * 2**24) and held < 2**24


# A run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    worlds.write_world(folder, 5, (5, 3, 2), sizes=((48, 32), (32, 64)))
    worlds.write_tiny(folder / "model", text={"num_hidden_layers": 2})
    return folder


@contextmanager
def counting(task: VqaTask) -> Iterator[list[int]]:
    """Images that the tower computes, call by call; first the number of all."""
    calls, computed = list[int](), task.model.image_features

    def image_features(patches: Tensor, grids: Any) -> list[Tensor]:
        if task.model.module.training:
            calls.append(len(grids))
        return computed(patches, grids)

    task.model.image_features = image_features  # type: ignore[method-assign]
    yield calls


def trained(world: Path, out: Path, plan: dict[str, Any], stop_after: int | None = None) -> tuple[Any, list[int]]:
    """Weights after two epochs, losses of every step and validation, and what the tower computed."""
    recipe = worlds.tiny_recipe(world / "model", num_epochs=2, order="by_image", effective_batch=4, eps=1e-4)
    task = worlds.make_task(world, recipe, Plan(**plan))
    run = RunFolder.open(out, recipe, task.plan, world)
    scores = {}
    try:
        with counting(task) as calls:
            scores = train(recipe, task.plan, task, run, Ranks(), stop_after)
    except RunStopped:
        assert stop_after is not None
    finally:
        run.close()
    weights = {name: p.detach().clone() for name, p in task.trained().items()}
    return weights | {name: torch.tensor(float(each)) for name, each in scores.items()}, calls


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def images(world: Path) -> int:
    task = worlds.make_task(world, worlds.tiny_recipe(world / "model"), Plan())
    return len({image.digest for image in images_of({"train": task.splits["train"]})})


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_the_same_model_is_trained(
    world: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, seen = trained(world, tmp_path / "plain", PLANS[name])
    kept, once = trained(world, tmp_path / "kept", PLANS[name] | KEEPING)
    assert "keep_features: up to " in capsys.readouterr().out
    assert once == [1] * images(world) and sum(seen) > len(once), "each once, by itself, in two epochs"
    worst = max(float((kept[n] - plain[n]).norm() / plain[n].norm().clamp(min=1e-9)) for n in plain)
    assert kept.keys() == plain.keys() and worst < 3e-5
    monkeypatch.setattr(features, "LEFT", 2.0)
    without, often = trained(world, tmp_path / "full", PLANS[name] | KEEPING)
    assert equal(without, kept), "for none there is room: the same bits"
    assert len(often) > len(once) and set(often) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_images_of_one_size_may_be_computed_together(
    world: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = trained(world, tmp_path / "alone", PLANS[name] | KEEPING)
    monkeypatch.setattr(VisionLanguageModel, "joins_images", True)
    joined, calls = trained(world, tmp_path / "joined", PLANS[name] | {"keep_features": True})
    assert sum(calls) == images(world) and max(calls) > 1
    assert plain.keys() == joined.keys()
    assert max(float((joined[n] - plain[n]).norm() / plain[n].norm().clamp(min=1e-9)) for n in plain) < 3e-5


@pytest.mark.parametrize(
    ("device", "deterministic", "joins"), [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)]
)
def test_images_are_computed_one_by_one_where_bits_are_promised(
    world: Path, monkeypatch: pytest.MonkeyPatch, device: str, deterministic: bool, joins: bool
) -> None:
    model = worlds.make_task(world, worlds.tiny_recipe(world / "model"), Plan(**PLANS["shared"])).model
    monkeypatch.setattr(model, "device", torch.device(device))
    monkeypatch.setattr(model, "plan", model.plan.model_copy(update={"deterministic": deterministic}))
    assert model.joins_images == joins


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_in_the_same_bits(world: Path, tmp_path: Path) -> None:
    plan = KEPT | {"save_steps": 1}
    whole, _ = trained(world, tmp_path / "whole", plan)
    trained(world, tmp_path / "parts", plan, stop_after=3)
    parts, calls = trained(world, tmp_path / "parts", plan)
    assert equal(parts, whole) and 0 < len(calls) <= images(world)


def short_in_the_third_step(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As long as features are kept: how many there were each time."""
    computed, short = VqaTask.loss_sum, list[int]()

    def loss_sum(self: VqaTask, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        if step == 2 and self.model.memory is not None and len(self.model.memory):
            short.append(len(self.model.memory))
            raise torch.OutOfMemoryError("planted")
        return computed(self, batch, step)

    monkeypatch.setattr(VqaTask, "loss_sum", loss_sum)
    return short


@pytest.mark.slow
def test_features_go_before_micro_batches_are_cut(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = KEPT
    whole, once = trained(world, tmp_path / "whole", plan)
    short = short_in_the_third_step(monkeypatch)
    capsys.readouterr()
    found, calls = trained(world, tmp_path / "short", plan)
    assert equal(found, whole) and len(short) == 1 and len(calls) > len(once)
    said = capsys.readouterr().out
    gone = f"features of {short[0]} images (0.0 GiB) are let go of"
    assert f"step 3: out of memory; {gone}, the step is done again" in said and "token budget" not in said


@pytest.mark.slow
def test_a_cpu_that_gives_no_more_memory_is_no_error(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its allocator raises what many errors are."""
    whole, _ = trained(world, tmp_path / "whole", KEPT)
    words = ["[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to"]

    def short(self: FeatureMemory) -> Any:
        raise RuntimeError(words[0])

    monkeypatch.setattr(FeatureMemory, "_aside", short)
    found, _ = trained(world, tmp_path / "short", KEPT)
    assert equal(found, whole)
    said = capsys.readouterr().err
    assert said.count("keep_features: there is room for features of 0 images (0.0 GiB); others are computed") == 1
    words[0] = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        trained(world, tmp_path / "wrong", KEPT)


@pytest.mark.slow
def test_features_go_before_a_validation_is_cut(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = KEPT
    whole, _ = trained(world, tmp_path / "whole", plan)
    scored, sizes = VqaTask.score, []

    def score(self: VqaTask, batch: Any) -> Tensor:
        sizes.append(len(batch.sample_ids))
        if self.model.memory is not None and len(self.model.memory):
            raise torch.OutOfMemoryError("planted")
        return scored(self, batch)

    monkeypatch.setattr(VqaTask, "score", score)
    found, _ = trained(world, tmp_path / "short", plan)
    assert equal(found, whole) and sizes[0] == sizes[1] == max(sizes), "the same one again"
    said = capsys.readouterr().err
    assert said.count("out of memory in validation: features of ") == 1 and "(0.0 GiB) are let go of\n" in said


@pytest.mark.slow
def test_a_run_whose_features_went_says_of_no_lower_budget(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short_in_the_third_step(monkeypatch)
    plan = KEPT | {"save_steps": 1}
    trained(world, tmp_path / "run", plan, stop_after=4)
    trained(world, tmp_path / "run", plan)
    said = capsys.readouterr().out
    assert "are let go of" in said and "resumed from step-000004" in said and "lowered" not in said


def opened(world: Path, folder: Path, say: Say) -> tuple[Session, VqaTask]:
    recipe = worlds.tiny_recipe(world / "model", num_epochs=9, order="shuffle", effective_batch=4)
    (folder / "recipe.yaml").write_text(dump_yaml(recipe))
    for name in ("train.jsonl", "val.jsonl", "images"):
        (folder / name).symlink_to(world / name)
    asked = [f"plan.{each}" for each in ("device=cpu", "keep_features=true", "share_images=true")]
    session = Session.start(Specs.from_files(folder / "recipe.yaml", None, asked), say, splits=TRAINING)
    return session, session.load()


@pytest.mark.slow
def test_a_profile_times_steps_whose_images_are_there(world: Path, tmp_path: Path) -> None:
    said: list[str] = []
    session, task = opened(world, tmp_path, said.append)
    with closing(session), counting(task) as calls:
        record(session, task, 3, 1)
        there = {image.digest for step in range(6) for i in task.step_ids(step) for image in images_at(task, i)}
    assert len(calls) == len(there), "each once, in steps that are not timed"
    assert len([line for line in said if line.startswith("keep_features: up to ")]) == 1


@pytest.mark.slow
def test_a_trial_times_steps_whose_images_are_there(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = opened(world, tmp_path, print)
    session.close()
    data, made = tmp_path / "data.pickle", []
    data.write_bytes(pickle.dumps(session.setup.drop_too_long(session.audited.splits)))
    of_all = FeatureMemory.of_all

    def noted(self: FeatureMemory, contents: Sequence[str], make: Any) -> Tensor:
        made.append(sum(content not in self for content in set(contents)))
        return of_all(self, contents, make)

    monkeypatch.setattr(FeatureMemory, "of_all", noted)
    result = run(Job(session.recipe, session.plan, tmp_path, data, 60.0, least=2, most=4))
    assert result.failed is None and list(result.seconds) == list(range(FIRST, FIRST + 4))
    assert sum(made) > 0 and not any(made[-5:]), "in the steps that are timed, and the one after them, none is computed"


def images_at(task: VqaTask, number: int) -> Sequence[ImageRef]:
    return task.splits["train"][number].images


@pytest.mark.slow
def test_the_floor_has_no_tower_for_what_is_kept(world: Path) -> None:
    recipe = worlds.tiny_recipe(world / "model", order="by_image", effective_batch=4)
    task = worlds.make_task(world, recipe, Plan(**KEPT))
    task.training(True)
    before = task.cost(0, None, Ranks())
    task.warmed_up()
    for batch in task.batches(0, None, Ranks()):
        task.loss_sum(batch.to(task.device), 0)
    after = task.cost(0, None, Ranks())
    assert after.flop < before.flop and after.memory_bytes < before.memory_bytes
    assert after.copy_bytes == before.copy_bytes and after.disk_bytes == before.disk_bytes, (
        "files are read all the same"
    )
    cached = worlds.make_task(world, recipe, Plan(**KEPT))
    assert cached.cost(0, None, Ranks()) == before


def test_an_evaluation_keeps_nothing(world: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(world / "model"), world)
    assert not setup.for_evaluation(Plan(keep_features=True)).keep_features


def test_what_a_disk_has_is_not_kept_besides(world: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(world / "model"), world)
    with pytest.raises(BadInput) as error:
        setup.resolve_auto(Plan(cache="features", keep_features=True), CPU)
    assert str(error.value) == (
        "plan.keep_features true keeps what the tower computes, and plan.cache features is read instead; allowed: false"
    )


# An automatic plan


def test_an_automatic_plan_keeps_them_on_a_gpu_where_nothing_of_the_images_is_trained(world: Path) -> None:
    reason = "an image that comes again need not go through the vision tower again"
    frozen, trained = (
        VqaSetup(worlds.tiny_recipe(world / "model", precision="bf16", train_vision=train), world)
        for train in (False, True)
    )
    plan, why = frozen.choose_plan(H200, 1)
    assert plan.keep_features and why["keep_features"] == reason and plan.cache == "none"
    assert ("keep_features", True) not in frozen.cannot(H200) and ("keep_features", True) in trained.cannot(H200)
    assert not frozen.low_memory(plan).keep_features
    tried = [choice.name for choice in frozen.choices(H200)]
    assert "keep_features" in tried and "keep_features" not in [choice.name for choice in trained.choices(H200)]
    for setup, machine in ((trained, H200), (frozen, CPU)):
        other, reasons = setup.choose_plan(machine, 1)
        assert not other.keep_features and "keep_features" not in reasons
    for cache, keeps in (("none", True), ("pixels", True), ("features", False)):
        specs = Specs(frozen.recipe, world, Plan(cache=cache), True, ("cache",))
        beside, reasons = _plan(specs, frozen, H200, 1)
        assert (beside.cache, beside.keep_features) == (cache, keeps)
    assert reasons["keep_features"] == "true cannot go with what was asked for: plan.cache features"
