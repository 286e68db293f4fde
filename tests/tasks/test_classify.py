"""Classification as a task: what a micro-batch holds, whatever the plan; evaluation; files; compile that is checked."""

from __future__ import annotations

import operator
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sets
import torch
from PIL import Image
from torch import Tensor
from worlds import lines_of

from sameday.commands.session import Specs, _plan, resolve
from sameday.data.labelled import augment
from sameday.data.labelled.batch import ImageBatch
from sameday.data.labelled.pictures import fitted
from sameday.data.seen import Seen
from sameday.demo.patterns import write_patterns
from sameday.hardware.machine import Machine, detect_machine
from sameday.hardware.ranks import Ranks
from sameday.models import compiled
from sameday.models.build import load_model
from sameday.models.compiled import Compiled
from sameday.models.vision_bdh import VisionBDH
from sameday.record.manifest import write_manifest
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, BadInput, RunStopped
from sameday.spec.plan import Plan
from sameday.tasks.classify.setup import ClassifySetup
from sameday.tasks.classify.task import ClassifyTask
from sameday.train.steps import Steps

PLANS = {
    "device": Plan(images_on="device"),
    "pieces": Plan(micro_batch=3),
    "pieces on the device": Plan(micro_batch=1, images_on="device"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write_set(tmp_path_factory.mktemp("set"))


def seen(task: ClassifyTask, step: int, ranks: Ranks | None = None) -> dict[int, Seen]:
    found = [each for batch in task.batches(step, None, ranks or Ranks()) for each in task.seen(batch)]
    assert len({each.id for each in found}) == len(found)
    return {each.id: each for each in found}


@pytest.mark.parametrize("name", PLANS)
def test_an_image_looks_the_same_under_every_plan(home: Path, name: str) -> None:
    plain, other = (sets.make_task(home, sets.tiny_recipe(), plan) for plan in (Plan(), PLANS[name]))
    for step in (0, 3, plain.steps_per_epoch()):
        assert seen(plain, step) == seen(other, step)
        assert sorted(seen(plain, step)) == sorted(plain.step_ids(step))


def test_an_epoch_holds_every_image_once_and_none_of_the_held_out(home: Path) -> None:
    task = sets.make_task(home, sets.tiny_recipe())
    assert len(task.splits["train"]) == 30 and len(task.splits["val"]) == 10 and task.steps_per_epoch() == 4
    assert not set(task.splits["train"].names) & set(task.splits["val"].names)
    orders = [[i for step in range(4 * epoch, 4 * epoch + 4) for i in task.step_ids(step)] for epoch in range(2)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert orders[0] != orders[1] and orders[0] != list(range(30))
    assert [len(task.step_ids(step)) for step in range(4)] == [8, 8, 8, 6]
    listed = sets.make_task(home, sets.tiny_recipe(order="listed"))
    assert listed.step_ids(0) == listed.step_ids(4) == list(range(8))
    other = sets.make_task(home, sets.tiny_recipe(seed=4))
    assert other.step_ids(0) != task.step_ids(0) and other.splits["val"].names == task.splits["val"].names


def test_an_image_is_another_crop_in_each_epoch(home: Path) -> None:
    task = sets.make_task(home, sets.tiny_recipe(order="listed"))
    first, second = (seen(task, step)[0].digests["pixels"] for step in (0, 4))
    assert first != second
    still = sets.make_task(home, sets.tiny_recipe(order="listed", augment=None))
    assert seen(still, 0)[0].digests["pixels"] == seen(still, 4)[0].digests["pixels"]


class Rank(Ranks):
    """One of several ranks, as far as a task asks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_share_a_step(home: Path, size: int) -> None:
    task = sets.make_task(home, sets.tiny_recipe(), Plan(micro_batch=2))
    whole = seen(task, 3)
    parts = [seen(task, 3, Rank(rank, size)) for rank in range(size)]
    assert sum(len(part) for part in parts) == len(whole)
    assert {key: value for part in parts for key, value in part.items()} == whole


def test_budgets_are_halved_to_one(home: Path) -> None:
    task = sets.make_task(home, sets.tiny_recipe())
    ranks = Ranks()
    assert task.budget(0, None, ranks) == 8 and task.budget(3, None, ranks) == 6
    found: list[int | None] = [None]
    while (smaller := task.smaller_budget(0, found[-1], ranks)) is not None:
        found.append(smaller)
    assert found == [None, 4, 2, 1]
    assert sets.make_task(home, sets.tiny_recipe(), Plan(micro_batch=3)).smaller_budget(0, None, ranks) == 1
    assert [len(batch) for batch in task.batches(0, 3, ranks)] == [3, 3, 2]


@pytest.mark.parametrize("plan", [Plan(), Plan(eval_batch=3, images_on="device"), Plan(workers=1)])
def test_evaluation_is_the_mean_over_images(home: Path, plan: Plan) -> None:
    task = sets.make_task(home, sets.tiny_recipe(label_smoothing=0.1), plan)
    task.training(True)
    twice = [task.evaluate("val", Ranks()) for _ in range(2)]
    assert twice[0] == twice[1] and task.model.training
    pictures = task.splits["val"]
    pixels = torch.from_numpy(pictures.pixels).permute(0, 3, 1, 2).double() / 255
    with torch.no_grad():
        logits = task.model.eval().double()((pixels - 0.5) / 0.5, torch.zeros(10, dtype=torch.int32))
    logs = logits.log_softmax(-1)
    right = torch.from_numpy(pictures.labels)
    losses = -0.9 * logs[torch.arange(10), right] - 0.1 * logs.mean(-1)
    assert twice[0]["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert twice[0]["accuracy"] == pytest.approx(float((logits.argmax(-1) == right).double().mean()))
    assert twice[0]["samples"] == 10
    assert task.evaluate("nothing", Ranks()) == {}


def test_a_saved_model_is_loaded_without_its_recipe(home: Path, tmp_path: Path) -> None:
    task = sets.make_task(home, sets.tiny_recipe(seed=5))
    task.save(tmp_path)
    model, about = load_model(tmp_path)
    assert about["classes"] == list(task.splits["train"].classes) and about["normalize_mean"] == 0.5
    assert not model.training
    pixels, keys = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.int32)
    assert torch.equal(model(pixels, keys), task.model.eval()(pixels, keys))
    other = sets.make_task(home, sets.tiny_recipe(seed=6))
    other.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(other.trained().values(), task.trained().values(), strict=True))


def test_a_saved_model_that_is_not_what_was_written_is_not_loaded(home: Path, tmp_path: Path) -> None:
    sets.make_task(home, sets.tiny_recipe(seed=5)).save(tmp_path)
    write_manifest(tmp_path, sorted(tmp_path.iterdir()))
    load_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 0x7F
    weights.write_bytes(damaged)
    with pytest.raises(BadInput, match=f"^{tmp_path}: model.safetensors is not what was written$"):
        load_model(tmp_path)


def test_the_readme_of_a_saved_model_asks_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image larger than the model's, as the data's own are read."""
    task = sets.make_task(home, sets.tiny_recipe(seed=5, normalize_mean=(0.4, 0.5, 0.6)))
    task.save(tmp_path)
    noise = np.random.default_rng(3).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image.save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    held: dict[str, Any] = {}
    exec(lines_of(tmp_path / "README.md"), held)
    pixels = torch.from_numpy(np.array(fitted(image, 32)))[None].permute(0, 3, 1, 2)
    normal = augment.normalise(pixels, (0.4, 0.5, 0.6), (0.5, 0.5, 0.5))
    with torch.no_grad():
        torch.testing.assert_close(held["logits"], task.model.eval()(normal))
    classes = task.splits["train"].classes
    assert capsys.readouterr().out == classes[held["logits"].argmax()] + "\n"


def test_a_loss_that_is_not_finite_is_named(home: Path) -> None:
    task = sets.make_task(home, sets.tiny_recipe())
    batch = next(iter(task.batches(0, None, Ranks())))
    losses = torch.ones(8)
    losses[2] = torch.nan
    assert task.culprits(batch, losses) == [task.splits["train"].names[task.step_ids(0)[2]]]
    assert task.culprits(batch, losses)[0].startswith("data_batch_")


def test_ready_batches_travel(home: Path) -> None:
    batch = next(iter(sets.make_task(home, sets.tiny_recipe()).batches(0, None, Ranks())))
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert isinstance(moved, ImageBatch) and all(map(torch.equal, moved.tensors(), batch.tensors()))
    assert len(batch.tensors()) == 4


# Compile


@pytest.fixture
def backends() -> Iterator[dict[str, Callable[..., Any]]]:
    """Backends that fail, or compute something else."""

    def broken(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("this backend has no kernels")

    def wrong(graph: Any, _inputs: Any) -> Any:
        def run(*inputs: Tensor) -> Any:
            return tuple(
                x.roll(1, -1) if isinstance(x, Tensor) and x.is_floating_point() else x for x in graph(*inputs)
            )

        return run

    graphs: list[Any] = []

    def later(graph: Any, inputs: Any) -> Any:
        """Right for what is compiled first."""
        graphs.append(graph)
        return graph if len(graphs) == 1 else wrong(graph, inputs)

    found = {"broken": broken, "wrong": wrong, "later": later}
    torch.compiler.reset()
    for name, backend in found.items():
        torch._dynamo.register_backend(backend, name=name)
    yield found
    torch.compiler.reset()
    for name in found:
        torch._dynamo.backends.registry._COMPILER_FNS.pop(name)


WHY = {"broken": "failed: BackendCompilerFailed", "wrong": "disagrees with eager for 8 images: logits are"}


@pytest.mark.parametrize("name", WHY)
def test_a_compile_that_fails_falls_back_or_stops(
    home: Path, backends: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = sets.tiny_recipe()
    monkeypatch.setattr(compiled, "BACKEND", name)
    task = sets.make_task(home, recipe, Plan(compile="auto"))
    assert len(task.notes) == 1 and task.notes[0].startswith("compile: none, because torch.compile in mode default, ")
    assert WHY[name] in task.notes[0]
    plain = sets.make_task(home, recipe)
    batch = next(iter(plain.batches(0, None, Ranks())))
    for each in (task, plain):
        each.training(True)
    assert torch.equal(task.loss_sum(batch, 0)[1], plain.loss_sum(batch, 0)[1])
    with pytest.raises(BadInput, match=r"plan\.compile layers: torch\.compile in mode default, .*allowed: none"):
        sets.make_task(home, recipe, Plan(compile="layers"))


def test_a_compile_that_works_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    task = sets.make_task(home, sets.tiny_recipe(), Plan(compile="auto"))
    run = task._losses["train"].run
    assert not task.notes and isinstance(run, Compiled) and run.made is not None
    torch.compiler.reset()


@pytest.mark.slow
def test_each_size_of_batch_is_tried_before_it_is_trusted(
    home: Path, backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = sets.tiny_recipe()
    plain = sets.make_task(home, recipe)
    pair = plain._build("train", [0, 1], (0, 0))
    plain.training(True)
    wanted = plain.loss_sum(pair, 0)[1]
    monkeypatch.setattr(compiled, "BACKEND", "later")
    task = sets.make_task(home, recipe, Plan(compile="auto"))
    assert not task.notes
    with pytest.warns(UserWarning, match="compile: none from here on, because .*disagrees with eager for 2 images"):
        found = task.loss_sum(pair, 0)[1]
    assert torch.equal(found, wanted)
    assert task.evaluate("val", Ranks()) == plain.evaluate("val", Ranks())


def test_what_was_asked_for_stops_where_another_size_is_wrong(
    home: Path, backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "later")
    task = sets.make_task(home, sets.tiny_recipe(), Plan(compile="layers"))
    with pytest.raises(BadInput, match=r"plan\.compile layers: .*disagrees with eager for 2 images: logits are"):
        task.loss_sum(task._build("train", [0, 1], (0, 0)), 0)


def test_fused_levels_are_not_compiled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    task = sets.make_task(home, sets.tiny_recipe(), Plan(compile="auto", level_kernel="fused"), device=where)
    assert task.notes == ("compile: none, because the levels are fused kernels already",)
    with pytest.raises(BadInput, match=r"plan\.compile layers is for plain levels"):
        sets.make_task(home, sets.tiny_recipe(), Plan(compile="layers", level_kernel="fused"), device=where)
    either = sets.make_task(home, sets.tiny_recipe(), Plan(compile="layers"))
    assert either.model.kernel == "plain"


# Recorded graphs


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["none", "layers"])
def test_recorded_micro_batches_learn_what_eager_ones_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, layers: Any
) -> None:
    """Micro-batches of two sizes over three steps, each size first run, then recorded, then replayed. Without a GPU
    nothing is recorded, but what would be is run with the weights it would be run with."""
    gpu = torch.cuda.is_available()
    if not gpu:

        def once(run: Any, inputs: Any) -> Any:
            before = list(task.model.parameters())
            run(*inputs)
            assert all(map(operator.is_, task.model.parameters(), before)), "the recording's leaves stay in the model"
            return run

        monkeypatch.setattr(torch.cuda, "make_graphed_callables", once)
    torch.compiler.reset()
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    found: list[dict[str, Tensor]] = []
    for graphs in (False, True):
        plan = Plan(micro_batch=3, images_on="device", compile=layers)
        task = sets.make_task(home, sets.tiny_recipe(), plan, "cuda" if gpu else "cpu")
        task.plan = plan.model_copy(update={"cuda_graphs": graphs})  # here, since loading refuses it on a CPU
        steps = Steps(task.recipe, task.plan, task, Ranks())
        for step in range(3):
            steps.accumulate([batch.to(task.device) for batch in task.batches(step, None, Ranks())], step)
        assert (None not in task._recorded.values() and len(task._recorded) == 2) if graphs else not task._recorded
        assert {task.is_recorded(batch) for batch in task.batches(0, None, Ranks())} == {graphs}
        found.append({name: p.grad.clone() for name, p in task.trained().items() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) == len(task.trained())
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-7)


# Choices


def test_what_cannot_run_here_is_refused_or_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    setup, machine = ClassifySetup(sets.tiny_recipe(), home), detect_machine("cpu")
    with pytest.raises(BadInput, match=r"plan.level_kernel fused needs Triton.*on a CPU; allowed: auto, plain"):
        setup.resolve_auto(Plan(level_kernel="fused"), machine)
    with pytest.raises(BadInput, match=r"plan.cuda_graphs true needs a GPU; allowed here: false"):
        setup.resolve_auto(Plan(cuda_graphs=True), machine)
    assert setup.resolve_auto(Plan(level_kernel="auto"), machine).values == {
        "level_kernel": ("plain", "there is no GPU with Triton")
    }
    task = sets.make_task(home, sets.tiny_recipe(), Plan(level_kernel="auto"))
    assert isinstance(task.model, VisionBDH) and task.model.kernel == "plain"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (sets.TINY | {"attention": "softmax"}, "the kernels have no softmax"),
        (sets.TINY | {"width": 56, "heads": 2}, "width 56 is not the sum of two powers of two"),
        ({"kind": "vit", "width": 32, "heads": 2, "depth": 1, "patch": 8}, "a vit has no levels"),
    ],
)
def test_a_model_without_fused_kernels(home: Path, model: dict[str, Any], why: str) -> None:
    setup = ClassifySetup(sets.tiny_recipe(model=model), home)
    gpu = Machine("cuda", "a GPU", 2**36, 8, True, 227 * 1024)
    kernel, reason = setup.resolve_auto(Plan(level_kernel="auto"), gpu).values["level_kernel"]
    assert kernel == "plain" and why in reason
    with pytest.raises(BadInput, match=r"plan.level_kernel fused: .*allowed: auto, plain"):
        setup.resolve_auto(Plan(level_kernel="fused"), gpu)


def test_a_gpu_with_less_shared_memory_than_the_tiles_take(home: Path) -> None:
    setup = ClassifySetup(sets.tiny_recipe(), home)
    small, large = (Machine("cuda", "a GPU", 2**36, 8, True, kib * 1024) for kib in (163, 227))
    kernel, reason = setup.resolve_auto(Plan(level_kernel="auto"), small).values["level_kernel"]
    assert kernel == "plain" and "227 KiB" in reason and "163 are there" in reason
    assert setup.resolve_auto(Plan(level_kernel="auto"), large).plan.level_kernel == "fused"
    with pytest.raises(BadInput, match=r"plan.level_kernel fused: their tiles take 227 KiB.*allowed: auto, plain"):
        setup.resolve_auto(Plan(level_kernel="fused"), small)


def test_fused_levels_in_bf16_are_for_shapes_that_a_gpu_did_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu = Machine("cuda", "GPU", 2**36, 1, triton=True, shared_memory=2**18, capability=(9, 0))
    published = {"kind": "vision_bdh", "levels": 6, "heads": 6, "width": 192, "latents": 32, "patch": 4}
    for model, precision, kernel in (
        (published, "bf16", "fused"),
        (published | {"width": 48}, "bf16", "plain"),
        (published | {"width": 48}, "float32", "fused"),
        (published | {"patch": 2}, "bf16", "plain"),
    ):
        setup = ClassifySetup(sets.tiny_recipe(model=model, precision=precision), Path())
        found, reason = setup.resolve_auto(Plan(level_kernel="auto"), gpu).values["level_kernel"]
        assert found == kernel, (model, precision, reason)
    assert "257 tokens of width 192" in reason


def test_everything_that_a_plan_cannot_have_here_is_said_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    setup, machine = ClassifySetup(sets.tiny_recipe(), home), Machine("cpu", "CPU", 2**34, 2, False)
    with pytest.raises(BadInput) as error:
        resolve(Plan(level_kernel="fused", cuda_graphs=True, compile="layers", workers=99), setup, machine)
    assert str(error.value).splitlines() == [
        "plan.workers 99: each is a process with memory of its own, and this machine has 2 cores; allowed here: "
        "0 to 16",
        "plan.level_kernel fused needs Triton, which there is not on a CPU; allowed: auto, plain",
        "plan.cuda_graphs true needs a GPU; allowed here: false",
        "plan.compile layers is for plain levels, plan.level_kernel fused replaces them; allowed: one",
    ]
    resolve(Plan(workers=99), setup, replace(machine, cores=64))


def test_graphs_are_not_recorded_beside_a_pinning_thread(home: Path) -> None:
    setup = ClassifySetup(sets.tiny_recipe(), home)
    gpu = Machine("cuda", "a GPU", 2**36, 8, True, 227 * 1024)
    setup.resolve_auto(Plan(cuda_graphs=True, pin_memory=True), gpu)
    with pytest.raises(BadInput, match="cannot record while a thread pins"):
        setup.resolve_auto(Plan(cuda_graphs=True, pin_memory=True, workers=2), gpu)


def test_the_automatic_plan_says_why(home: Path) -> None:
    setup = ClassifySetup(sets.tiny_recipe(), home)
    plan, reasons = setup.choose_plan(Machine("cuda", "a GPU", 2**36, 8, True), 1)
    assert plan.cuda_graphs and plan.images_on == "auto" and plan.optimizer_impl == "fused"
    assert all(reasons[name] for name, value in plan.model_dump().items() if value != getattr(Plan(), name))
    assert not setup.choose_plan(Machine("cpu", "CPU", 2**34, 2, False), 1)[0].cuda_graphs


def test_a_recipe_without_held_out_images_has_no_validation(home: Path) -> None:
    recipe = sets.tiny_recipe(data={"path": "set"})
    setup = ClassifySetup(recipe, home)
    assert "data.val is 0" in (setup.lacks("val") or "")
    assert set(setup.audit(print).splits) == {"train"} and setup.audit(print).sizes == {"train": 40}
    assert sets.make_task(home, recipe).evaluate("val", Ranks()) == {}


def test_weights_for_other_classes_are_refused(home: Path, tmp_path: Path) -> None:
    task = sets.make_task(home, sets.tiny_recipe())
    task.save(tmp_path)
    splits = {name: replace(split, classes=split.classes[::-1]) for name, split in task.splits.items()}
    other = ClassifyTask(task.recipe, task.plan, task.model, splits, task.device)
    with pytest.raises(BadInput, match="trained for the classes stripes, checks, rings, blobs; the data has blobs"):
        other.restore(tmp_path)


@pytest.mark.parametrize("plan", [Plan(), Plan(images_on="device", eval_batch=10)])
def test_evaluation_without_room_goes_on_in_halves(home: Path, plan: Plan) -> None:
    task = sets.make_task(home, sets.tiny_recipe(), plan)
    expected = task.evaluate("val", Ranks())
    run, sizes = task.model.forward, list[int]()

    def short(pixels: Tensor, keys: Tensor) -> Tensor:
        sizes.append(len(pixels))
        if len(pixels) > 3:
            raise torch.OutOfMemoryError("planted")
        return run(pixels, keys)

    task.model.forward = short  # type: ignore[method-assign]
    found = task.evaluate("val", Ranks())
    assert max(sizes) > 3 and found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["accuracy"] == expected["accuracy"] and found["samples"] == 10


@pytest.mark.parametrize("plan", [Plan(), Plan(images_on="device", eval_batch=10)])
def test_one_image_that_is_too_large_stops_the_run(home: Path, plan: Plan) -> None:
    task = sets.make_task(home, sets.tiny_recipe(), plan)

    def short(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("planted")

    task.model.forward = short  # type: ignore[method-assign]
    with pytest.raises(RunStopped) as stopped:
        task.evaluate("val", Ranks())
    assert stopped.value.code == EXIT_OUT_OF_MEMORY and task.model.training
    assert str(stopped.value) == (
        f"out of memory in evaluation with a single image, {task.splits['val'].names[0]}. What is left to try: "
        f"{task.memory_advice}."
    )


def test_a_recorded_gpu_plan_is_evaluated_anywhere(home: Path) -> None:
    setup = ClassifySetup(sets.tiny_recipe(), home)
    plan = Plan(
        level_kernel="fused", cuda_graphs=True, images_on="device", compile="auto", device="cuda", micro_batch=5
    )
    found = setup.for_evaluation(plan)
    assert found.micro_batch == 5 and setup.resolve_auto(found, detect_machine("cpu")).plan.level_kernel == "plain"
    assert sets.make_task(home, sets.tiny_recipe(), found).evaluate("test", Ranks())["samples"] == 16


def test_one_class_and_all_problems_at_once(tmp_path: Path) -> None:
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    (tmp_path / "set/train/rings/dead.png").symlink_to("/nonexistent.png")
    (tmp_path / "set/test/blobs/broken.png").write_bytes(b"no image")
    setup = ClassifySetup(sets.tiny_recipe(data={"path": "set", "val": 2}), tmp_path)
    with pytest.raises(BadInput) as error:
        setup.audit(print, ("train", "test"))
    assert "dead.png" in str(error.value) and "broken.png" in str(error.value)
    for split in ("train", "test"):
        for name in ("checks", "rings", "blobs"):
            shutil.rmtree(tmp_path / "set" / split / name)
    with pytest.raises(BadInput, match="has one class, stripes: there is nothing to tell apart"):
        setup.audit(print)


def test_images_on_both_sides_and_files_that_are_not_read_are_told(tmp_path: Path) -> None:
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    rings = tmp_path / "set/train/rings"
    (tmp_path / "set/val/rings").mkdir(parents=True)
    images = sorted(rings.glob("*.png"))
    shutil.copy(images[0], tmp_path / "set/val/rings/other name.png")
    shutil.copy(images[1], rings / "a.jfif")
    shutil.copy(images[1], rings / "b.JFIF")
    (rings / "c.heic").write_bytes(b"nothing that is read")
    said: list[str] = []
    setup = ClassifySetup(sets.tiny_recipe(data={"path": "set"}), tmp_path)
    assert setup.audit(said.append, ("train", "val", "test")).sizes == {"train": 12, "val": 1, "test": 4}
    assert said == [
        f"{tmp_path / 'set/train'}: 3 files are passed over because of the suffix: .jfif (2), .heic (1); read are "
        ".bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp",
        "train and val have 1 image in common: scores of val will be too good",
    ]
    for image in images:
        image.unlink()
    with pytest.raises(BadInput) as error:
        setup.audit(said.append)
    assert "rings: this class has no image (.bmp, " in str(error.value)
    assert "; passed over because of the suffix: .jfif (2), .heic (1)" in str(error.value)


def test_held_out_images_that_training_has_too_are_told(tmp_path: Path) -> None:
    """Files are held out one by one, and one of two equal ones may stay."""
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    for image in sorted((tmp_path / "set/train").rglob("*.png")):
        shutil.copy(image, image.with_name(f"again {image.name}"))
    said: list[str] = []
    setup = ClassifySetup(sets.tiny_recipe(data={"path": "set", "val": 4}), tmp_path)
    val = setup.audit(said.append).splits["val"]
    assert len(val.contents) == 4
    assert said == ["train and val have 4 images in common: scores of val will be too good"]


def test_test_images_that_training_has_too_are_told_before_the_training(tmp_path: Path) -> None:
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    first = min((tmp_path / "set/train").rglob("*.png"))
    for name in ("a", "b"):  # one image, twice
        shutil.copy(first, tmp_path / "set/test" / first.parent.name / f"{name}.png")
    setup = ClassifySetup(sets.tiny_recipe(data={"path": "set", "val": 0}), tmp_path)
    assert setup.hints(setup.audit(print, ("train",)).splits) == [
        "train and test have 1 image in common: scores of test will be too good"
    ]
    (tmp_path / "set/test/bird").mkdir()
    shutil.copy(first, tmp_path / "set/test/bird/c.png")
    (hint,) = setup.hints(setup.audit(print, ("train",)).splits)
    assert hint.startswith("`sameday eval --split test` will refuse the test images: 1 problem in ")
    assert "this class is not among the training classes" in hint
    shutil.rmtree(tmp_path / "set/test")
    assert setup.hints(setup.audit(print, ("train",)).splits) == []


def test_what_is_in_common_is_told_beside_what_is_wrong_with_another_split(tmp_path: Path) -> None:
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    first = min((tmp_path / "set/train").rglob("*.png"))
    for place in ("val", "test"):
        (tmp_path / "set" / place / first.parent.name).mkdir(parents=True, exist_ok=True)
    shutil.copy(first, tmp_path / "set/val" / first.parent.name / "again.png")
    (tmp_path / "set/test/bird").mkdir()
    shutil.copy(first, tmp_path / "set/test/bird/c.png")
    setup = ClassifySetup(sets.tiny_recipe(data={"path": "set", "val": 0}), tmp_path)
    said: list[str] = []
    with pytest.raises(BadInput, match="bird: this class is not among the training classes"):
        setup.audit(said.append, ("train", "val", "test"))
    assert said == ["train and val have 1 image in common: scores of val will be too good"]


def test_the_bad_images_of_each_split_have_a_list(tmp_path: Path) -> None:
    write_patterns(tmp_path / "set", train=12, test=4, layout="folders")
    for split, bad in (("train", 9), ("test", 5)):
        for number in range(bad):
            (tmp_path / "set" / split / "rings" / f"broken{number}.png").write_bytes(b"no image")
    setup = ClassifySetup(sets.tiny_recipe(data={"path": "set", "val": 0}), tmp_path)
    with pytest.raises(BadInput) as error:
        setup.audit(print, ("train", "test"))
    listed = re.findall(r"^all (\d+) are listed in (.+)$", str(error.value), re.MULTILINE)
    assert {int(count) for count, _ in listed} == {9, 5}
    for count, path in listed:
        assert len(Path(path).read_text().splitlines()) == int(count)


def test_a_choice_gives_way_to_what_was_asked_for(home: Path) -> None:
    """Workers are asked for, and a thread that pins what they send would disturb the recording that was chosen."""
    gpu = Machine("cuda", "a GPU", 2**36, 8, True, 227 * 1024)
    recipe = sets.tiny_recipe()
    setup = ClassifySetup(recipe, home)
    plan, reasons = _plan(Specs(recipe, home, Plan(), True), setup, gpu, 1)
    assert plan.pin_memory and plan.cuda_graphs and not plan.workers
    plan, reasons = _plan(Specs(recipe, home, Plan(workers=1), True, ("workers",)), setup, gpu, 1)
    assert (plan.workers, plan.pin_memory, plan.cuda_graphs) == (1, False, True)
    assert reasons["pin_memory"] == "true cannot go with what was asked for: plan.workers 1"
    asked = Plan(workers=1, pin_memory=True, cuda_graphs=True)
    plan, reasons = _plan(Specs(recipe, home, asked, True, ("cuda_graphs", "pin_memory", "workers")), setup, gpu, 1)
    with pytest.raises(BadInput, match="cannot record while a thread pins what the workers send"):
        resolve(plan, setup, gpu)
