"""Attention over shared prefixes in one pass, against the calls that are split and merged; a model that is trained with
it, against a dense mask; and where it is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recordings
import torch
import worlds
from hypothesis import given, settings
from packed_rows import ALONE, GROUPS, row
from torch import Tensor

from sameday.data.questions.batch import make_batch
from sameday.data.questions.shapes import Shape
from sameday.hardware.kernels import kernels
from sameday.hardware.machine import Machine, detect_machine
from sameday.hardware.ranks import Ranks
from sameday.kernels import fused_attention, split
from sameday.kernels.attention import Fused, attend, make_mask
from sameday.kernels.fused_attention import BEST, WIDTHS, Tile, Tiles, needed, tiles
from sameday.kernels.split import Dense, Segments
from sameday.models import vlm_flops
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.automatic import attention_kernel
from sameday.tasks.vqa.problems import Decoder, graph_problems
from sameday.tasks.vqa.recorded import shape_of_part
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.vqa.warm import Met
from sameday.train.steps import Steps

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))
"""Several tiles even of few tokens, and not all of them square."""
FEW = Tiles(*[Tile(256, 256, 4, 1)] * 3)
"""Few programs: it is their number that takes the interpreter long. No GPU has room for such tiles."""
NEAR = 2e-6 if DEVICE == "cpu" else 5e-6
"""Float32 against float64; powers of two are approximate on a GPU."""
LIKE_DENSE = 1e-5 if DEVICE == "cpu" else 5e-5
"""A model in float32 against itself with a dense mask."""
FORKED: list[Any] = [(20, [5, 9]), (18, [(17, [9, 3]), (6, [4])])]
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter has no bf16")


def far(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative distance; one token alone has gradients of zero."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.detach().double().cpu() - b).norm() / b.norm().clamp_min(1.0)) for a, b in pairs)


class Drawn:
    """Inputs of a row, queries and keys as the layers give them: heads before tokens."""

    def __init__(self, pieces: Segments, all_heads: tuple[int, int], kind: torch.dtype, width: int = 16) -> None:
        torch.manual_seed(len(pieces.cu))
        tokens, (heads, shared) = int(pieces.cu[-1]), all_heads
        q, k, v = (torch.randn(n, tokens, width).to(DEVICE, kind).transpose(0, 1) for n in (heads, shared, shared))
        self.qkv, self.grad = (q, k, v.contiguous()), torch.randn(tokens, heads, width).to(DEVICE, kind)
        self.pieces, self.there = pieces, pieces.to(torch.device(DEVICE))

    def wanted(self) -> list[Tensor]:
        """Output, log-sum-exp and gradients, by split calls in float64."""
        q, k, v, grad = (x.double().cpu() for x in (*self.qkv, self.grad))
        both = split._forward(q, k, v, *self.pieces, 0.3)
        return [*both, *split._backward(grad, q, k, v, *both, *self.pieces, 0.3)]

    def split(self) -> list[Tensor]:
        both = split._forward(*self.qkv, *self.there, 0.3)
        return [*both, *split._backward(self.grad, *self.qkv, *both, *self.there, 0.3)]

    def fused(self, how: Tiles | None, pieces: Segments | None = None) -> list[Tensor]:
        pieces = pieces or self.there
        both = fused_attention.forward(*self.qkv, pieces, 0.3, how)
        return [*both, *fused_attention.backward(self.grad, *self.qkv, *both, pieces, 0.3, how)]


def sees_its_neighbour(pieces: Segments) -> Segments:
    """The last piece begins where the one before it does."""
    cu = pieces.cu.clone()
    cu[-2] = cu[-3]
    return pieces._replace(cu=cu)


# The operators


@pytest.mark.slow
@settings(max_examples=4)
@given(groups=GROUPS, alone=ALONE)
def test_any_row_is_what_split_calls_give(groups: list[Any], alone: list[int]) -> None:
    """Prefixes, forks, branches and questions alone; tiles that hold several of them."""
    if groups or alone:
        drawn = Drawn(row(groups, alone)[0], (2, 1), torch.float32)
        assert far(drawn.fused(SMALL), drawn.wanted()) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "turned"),
    [([(50, [5, 20]), (34, [1])], True), ([(40, [(20, [9, 3]), (17, [4])])], False)],
    ids=["two images", "forks"],
)
def test_tiles_without_a_mask_and_with_one(groups: list[Any], turned: bool) -> None:
    """Prefixes of several tiles, so that some are seen by all rows of another."""
    how = SMALL._replace(of_keys=SMALL.of_keys._replace(turned=turned))
    drawn = Drawn(row(groups, [17, 2])[0], (2, 1), torch.float32)
    assert far(drawn.fused(how), drawn.wanted()) < NEAR


def test_keys_that_no_query_asks_for() -> None:
    """A dense call may have runs of keys without queries: padding of a shape has."""
    ends = torch.tensor([0, 64, 64], dtype=torch.int32), torch.tensor([0, 16, 32], dtype=torch.int32)
    pieces = Segments.of(torch.tensor([0, 16, 32, 96], dtype=torch.int32), [Dense(32, 0, *ends)])
    drawn = Drawn(pieces, (2, 1), torch.float32)
    assert far(drawn.fused(SMALL), drawn.wanted()) < NEAR


def test_more_pieces_than_are_compared_at_once() -> None:
    drawn = Drawn(row([(5, [2, 1] * 40)], [1] * 3)[0], (1, 1), torch.float32)
    assert len(drawn.pieces.cu) > 64 and far(drawn.fused(FEW if DEVICE == "cpu" else None), drawn.wanted()) < NEAR


def test_a_branch_that_sees_its_neighbour_is_found() -> None:
    drawn = Drawn(row(FORKED, [])[0], (2, 1), torch.float32)
    how = FEW if DEVICE == "cpu" else None
    assert far(drawn.fused(how), drawn.wanted()) < NEAR
    assert far(drawn.fused(how, sees_its_neighbour(drawn.there)), drawn.wanted()) > 1e-2


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fused_attention, "tiles_of", lambda _: FEW)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_come_by_autograd_and_through_torch_compile(few: None, compiled: bool) -> None:
    """As a layer calls it. The output is turned, so that its gradient is not contiguous."""
    pieces, levels = row(FORKED, [7])
    drawn = Drawn(pieces, (4, 2), torch.float32)
    mask = make_mask(*levels, False, drawn.there, "fused")
    assert isinstance(mask, Fused)

    def layer(*qkv: Tensor) -> Tensor:
        return attend(torch.nn.Identity(), *(x.transpose(0, 1)[None] for x in qkv), mask, 0.3)[0][0].transpose(0, 1)

    torch._dynamo.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    inputs = [x.detach().requires_grad_() for x in drawn.qkv]
    out = run(*inputs)
    gradients = torch.autograd.grad(out, inputs, drawn.grad.transpose(0, 1).contiguous())
    wanted, _, *of_inputs = drawn.wanted()
    assert far([out.transpose(0, 1), *gradients], [wanted, *of_inputs]) < NEAR


@pytest.mark.parametrize(("alone", "first", "stride"), [(9, 1, 32), (1, 0, 3)], ids=["begins anywhere", "one token"])
def test_a_gradient_that_no_tensor_map_is_made_of_is_copied(alone: int, first: int, stride: int) -> None:
    """Contiguous as it is."""
    drawn = Drawn(row([], [alone])[0], (2, 1), torch.float32)
    room = torch.empty(drawn.grad.numel() + first, device=DEVICE)
    grad = room.as_strided(drawn.grad.shape, (stride, 16, 1), first).copy_(drawn.grad)
    assert grad.is_contiguous() and (grad.data_ptr() % 16 or grad.stride(0) % 4)
    drawn.grad = grad
    assert far(drawn.fused(FEW if DEVICE == "cpu" else None), drawn.wanted()) < NEAR


def test_float64_and_what_runs_without_triton_are_split_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.float64, torch.float32):
        drawn = Drawn(row(FORKED, [])[0], (2, 1), kind)
        found = fused_attention._forward(*drawn.qkv, *drawn.there, 0.3)
        found += fused_attention._backward(drawn.grad, *drawn.qkv, *found, *drawn.there, 0.3)
        q, k, v = drawn.qkv
        drawn.qkv = q.contiguous(), k.contiguous(), v
        assert all(map(torch.equal, found, drawn.split()))
        if DEVICE == "cuda":
            break
        monkeypatch.setattr(fused_attention, "interpreted", lambda: False)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_results_are_of_the_strides_that_a_compiled_layer_is_told(few: None, kind: torch.dtype) -> None:
    drawn = Drawn(row([(3, [2])], [])[0], (2, 1), kind)
    assert not drawn.qkv[0].is_contiguous()
    both = fused_attention._forward(*drawn.qkv, *drawn.there, 0.3)
    torch.library.opcheck(fused_attention._forward, (*drawn.qkv, *drawn.there, 0.3))
    torch.library.opcheck(fused_attention._backward, (drawn.grad, *drawn.qkv, *both, *drawn.there, 0.3))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has bf16")
def test_the_interpreter_does_not_take_half_precision_for_whole_numbers() -> None:
    drawn = Drawn(row([(3, [2])], [])[0], (1, 1), torch.bfloat16)
    with pytest.raises(ValueError, match=r"Triton's interpreter has no torch\.bfloat16"):
        fused_attention._forward(*drawn.qkv, *drawn.there, 0.3)


@on_a_gpu
@pytest.mark.parametrize("groups", [[(1300, [64] * 8)] * 2, [(450, [32, 20, 44])] * 3, [(700, [(90, [20, 9])] * 2)]])
def test_it_rounds_as_flash_attention_does(groups: list[Any]) -> None:
    drawn = Drawn(row(groups, [300])[0], (8, 2), torch.bfloat16, width=128)
    ours, flash = far(drawn.fused(None), drawn.wanted()), far(drawn.split(), drawn.wanted())
    assert 0 < ours < 1.2 * flash < 2e-2


@on_a_gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_has_tiles_that_run(width: int, kind: torch.dtype) -> None:
    """The same bits each time."""
    drawn = Drawn(row(FORKED, [70])[0], (4, 2), kind, width)
    first, second = drawn.fused(None), drawn.fused(None)
    assert all(map(torch.equal, first, second))
    assert far(first, drawn.wanted()) < (NEAR if kind == torch.float32 else 2e-2)


# Tiles

KB = 1024
HOPPER, CONSUMER = 227 * KB, 99 * KB


def test_the_best_tiles_are_taken_where_they_were_timed() -> None:
    assert tiles(HOPPER, 128, 2) == BEST


@pytest.mark.parametrize("memory", [HOPPER, CONSUMER, 70 * KB])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_fit_into_shared_memory(memory: int, width: int, size: int) -> None:
    for name, tile in tiles(memory, width, size)._asdict().items():
        assert needed(name, tile, width, size) <= memory
        assert min(tile.queries, tile.keys) >= 16 and tile.stages >= 1, "the least that a matmul takes"


def test_less_memory_has_fewer_stages_and_then_smaller_tiles() -> None:
    found = [tiles(memory * KB, 128, 2).forward for memory in (99, 70, 50, 20)]
    assert [tile[:2] for tile in found] == [(64, 64), (64, 64), (64, 32), (16, 16)]
    assert found[1].stages < found[0].stages
    assert [tiles(memory * KB, 128, 2).of_keys[:3] for memory in (227, 99, 70)] == [
        BEST.of_keys[:3], (64, 64, 4), (64, 32, 4),
    ], "four warps have no more than 64 rows"  # fmt: skip
    assert [tile[:3] for tile in tiles(HOPPER, 256, 2)] == [(32, 32, 4), (32, 32, 4), (16, 16, 4)]
    assert [tile[:3] for tile in tiles(HOPPER, 256, 4)] == [(16, 16, 8)] * 3


def test_float32_and_wide_heads_have_smaller_tiles() -> None:
    for memory in (HOPPER, CONSUMER):
        usual, wide, float32, both = (tiles(memory, *each) for each in ((128, 2), (256, 2), (128, 4), (256, 4)))
        for kernel in range(3):
            sides = [each[kernel].keys for each in (usual, wide, float32, both)]
            assert sides == sorted(sides, reverse=True) and sides[0] > sides[1] and sides[0] > sides[2]


@pytest.mark.soak
def test_kernels_compile_for_a_gpu_into_the_bytes_that_are_counted() -> None:
    """By Triton's own compiler, which needs no GPU. In a process that has no interpreter."""
    chosen = {name: [*tile] for name, tile in tiles(HOPPER, 128, 2)._asdict().items()}
    said = subprocess.run(
        [sys.executable, Path(__file__).parent / "compiled_attention.py", "90", json.dumps(chosen)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    for name, taken in json.loads(said.stdout).items():
        counted = needed(name, Tile(*chosen[name]), 128, 2)
        assert 0.9 * counted <= taken <= counted, (name, taken, counted)


# A model that is trained with it

PLAN = recordings.PLAN | {"attention": "sdpa"}
QUESTIONS = {"order": "by_image", "effective_batch": 8, "max_pixels": 48 * 48, "lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with so many questions that some of a template fork, and one with a question alone."""
    folder = tmp_path_factory.mktemp("fused")
    return worlds.write_world(folder, 4, (7, 1), hard=False, sizes=((48, 32),))


def make(home: Path, model: Path, attention: str, **plan: Any) -> VqaTask:
    recipe = worlds.tiny_recipe(model, **QUESTIONS, prompt=recordings.TEMPLATES)
    task = worlds.make_task(home, recipe, Plan(**PLAN | {"attention": attention} | plan), DEVICE)
    worlds.stir(task)
    task.training(True)
    return task


def learned(task: VqaTask) -> Tensor:
    """Of a step the gradients of all adapters and the loss."""
    (stepped,) = recordings.computed(task, [0], Steps(task.recipe, task.plan, task, Ranks()))
    return stepped.gradients.buffer.clone()


def apart(found: Tensor, wanted: Tensor) -> float:
    assert wanted.norm() > 1e-3
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def dense(home: Path, two_layers: Path) -> Tensor:
    task = make(home, two_layers, "sdpa")
    (batch,) = task.batches(0, None, Ranks())
    kinds = {(bool(branch), bool(fork)) for branch, fork in zip(batch.branch[0], batch.fork[0], strict=True)}
    assert len(kinds) == 4 and len(batch.group.unique()) == 2, "prefixes, forks, branches of both, a question alone"
    return learned(task)


def test_a_model_has_the_loss_and_the_gradients_of_a_dense_mask(
    home: Path, two_layers: Path, dense: Tensor, few: None
) -> None:
    """Padding among the rest."""
    assert apart(learned(make(home, two_layers, "fused", pad_to_multiple=32)), dense) < LIKE_DENSE


def test_a_branch_that_sees_its_neighbour_gives_other_gradients(
    home: Path, two_layers: Path, dense: Tensor, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, back = fused_attention.forward, fused_attention.backward
    monkeypatch.setattr(
        fused_attention, "forward", lambda q, k, v, pieces, scale: run(q, k, v, sees_its_neighbour(pieces), scale)
    )
    monkeypatch.setattr(
        fused_attention, "backward", lambda *args: back(*args[:6], sees_its_neighbour(args[6]), *args[7:])
    )
    assert apart(learned(make(home, two_layers, "fused")), dense) > 1e-3


def test_validation_and_answers_are_those_of_a_dense_mask(home: Path, two_layers: Path, few: None) -> None:
    found = []
    for attention in ("fused", "sdpa"):
        task = make(home, two_layers, attention)
        given = task.answers(task.questions("val"), 3, Ranks())
        answers = {number: answer for batch in given for number, answer in batch.items()}
        found.append((task.evaluate("val", Ranks()), answers))
    (scores, answers), (wanted, those) = found
    assert answers == those and answers
    assert scores == pytest.approx(wanted, rel=LIKE_DENSE)


def test_a_row_that_is_padded_to_be_recorded_is_what_split_calls_give(home: Path, two_layers: Path) -> None:
    """Each section has padding in pieces of its own, and empty pieces come last."""
    task = make(home, two_layers, "fused")
    encoded, [[part]] = task._step(0, None, Ranks())
    own = shape_of_part(encoded, part, True)
    tokens, counts = (9 if section else 0 for section in own.sections), (3, 2, 2, 2, 0, 0, 0)
    shape = Shape(*(size + more for size, more in zip(own, (*tokens, *counts), strict=True)))
    batch = make_batch(task.lay_out(encoded, part, None, shape), task.source.read_image)
    assert batch.segments is not None and not batch.segments.cu.diff().all() and shape.fork and shape.branch
    drawn = Drawn(batch.segments, (1, 1), torch.float32)
    assert far(drawn.fused(FEW if DEVICE == "cpu" else None), drawn.wanted()) < NEAR


def test_what_kernels_are_compiled_for_is_known_before_a_batch_is_built(home: Path, two_layers: Path) -> None:
    """So that the warm-up meets all of it."""
    numbers = set()
    for share_text, questions in ((True, 8), (False, 8), (False, 1)):
        task = make(home, two_layers, "fused", share_text=share_text, max_questions=questions)
        encoded, parts = task._step(0, None, Ranks())
        for part in parts[0]:
            batch = task._build(encoded, part)
            assert batch.segments is not None
            wanted = fused_attention._sizes(torch.empty(1, 4, 16), torch.empty(1, 2, 16), batch.segments)["CALLS"]
            assert Met(encoded, part, 0, True).kind(task).calls == wanted
            numbers.add(wanted)
    assert numbers == {0, 1, 3}


def test_flops_are_counted(home: Path, two_layers: Path) -> None:
    """The backward pass computes scores twice: seven matmuls for two."""
    fused, dense = (make(home, two_layers, attention) for attention in ("fused", "sdpa"))
    (batch,) = fused.batches(0, None, Ranks())
    counted, usual = (vlm_flops.count(task.model, batch, None) for task in (fused, dense))
    assert counted.needed == usual.needed
    work = counted.executed.attention
    assert 2 * work.backward == 7 * work.forward and work.forward >= counted.needed.attention.forward
    assert counted.executed.layers == usual.executed.layers


# Where it is refused

PACKED = {"packing": True, "max_questions": None, "attention": "fused"}
GPU = Machine("cuda", "a GPU", 80 * 2**30, 16, True, HOPPER, (9, 0))
CPU = Machine("cpu", "CPU", 2**34, 2, False)
ASKED = "plan.attention fused"
REFUSED: dict[str, tuple[Machine, str, dict[str, Any], Decoder, str]] = {
    "rows": (GPU, "bf16", {"packing": False}, Decoder(), f"{ASKED} is for packed rows: set plan.packing true, or "
             "attention sdpa or flex"),
    "capability": (replace(GPU, capability=(8, 0)), "bf16", {}, Decoder(), f"{ASKED} is Triton kernels that copy "
                   "tiles by tensor maps, and a GPU has compute capability 8.0, and it needs 9.0; allowed: auto, sdpa, "
                   "flex, split"),
    "triton": (replace(GPU, triton=False), "bf16", {}, Decoder(), f"{ASKED} needs Triton, which is not installed; "
               "allowed: auto, sdpa, split"),
    "half precision": (CPU, "bf16", {}, Decoder(), f"{ASKED} has no bf16 in Triton's interpreter; allowed there: "
                       "float32, or auto, sdpa, split"),
    "windows": (GPU, "bf16", {}, Decoder(splits=False), f"{ASKED}: fused attention cannot follow this model's layers, "
                "of which some see a window or images in both directions; allowed: auto, sdpa, flex"),
    "width": (GPU, "bf16", {}, Decoder(width=80), f"{ASKED} has tiles for heads of width 16, 32, 64, 128, 256, and "
              "this model's have 80; allowed: auto, sdpa, split"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    machine, precision, plan, decoder, said = REFUSED[name]
    with pytest.raises(BadInput) as error:
        attention_kernel(Plan(**PACKED | plan), machine, precision, lambda: decoder)
    assert str(error.value) == said


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert attention_kernel(Plan(**PACKED), CPU, "float32") == ("fused", "asked for")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BadInput) as error:
        attention_kernel(Plan(**PACKED), CPU, "float32")
    assert str(error.value) == f"{ASKED} needs Triton, which there is not on a CPU; allowed there: auto, sdpa, split"


@pytest.mark.parametrize("precision", ["bf16", "float32", "tf32"])
def test_a_gpu_runs_every_precision(precision: str) -> None:
    assert attention_kernel(Plan(**PACKED), GPU, precision) == ("fused", "asked for")


def test_it_is_automatic_where_it_was_timed() -> None:
    def chosen(machine: Machine = GPU, precision: str = "bf16", width: int = 128, splits: bool = True) -> str:
        plan = Plan(**PACKED | {"attention": "auto"})
        return attention_kernel(plan, machine, precision, lambda: Decoder(splits, width))[0]

    assert chosen() == "fused"
    others = {
        chosen(replace(GPU, capability=(8, 0))),
        chosen(replace(GPU, capability=(10, 0))),
        chosen(replace(GPU, triton=False)),
        chosen(width=64),
    }
    assert others == {"split"} and chosen(precision="float32") == chosen(splits=False) == "flex"


def test_it_can_be_recorded_and_the_tuner_tries_it(two_layers: Path, tmp_path: Path) -> None:
    setup = VqaSetup(worlds.tiny_recipe(two_layers, precision="bf16"), tmp_path)
    plan = Plan(**recordings.PLAN | {"attention": "fused", "cuda_graphs": True})
    assert list(graph_problems(plan, setup.recipe, GPU)) == []
    setup.check_plan(plan, GPU)
    assert setup.resolve_auto(plan, GPU).plan == plan

    def tried(machine: Machine) -> set[str]:
        return {value["attention"] for c in setup.choices(machine) for value in c.values if "attention" in value}

    assert "fused" in tried(GPU) and ("attention", "fused") not in setup.cannot(GPU)
    for machine in (replace(GPU, capability=(8, 0)), replace(GPU, triton=False), detect_machine("cpu")):
        assert "fused" not in tried(machine) and ("attention", "fused") in setup.cannot(machine)


def test_the_list_of_kernels_says_where_it_is() -> None:
    def listed(machine: Machine) -> tuple[bool, str]:
        (found,) = (kernel for kernel in kernels(machine, "bf16") if kernel.name == "attention fused")
        return found.there, found.why

    assert listed(GPU)[0] and listed(GPU)[1].startswith("Triton ")
    assert listed(replace(GPU, capability=(8, 9))) == (False, "a GPU has compute capability 8.9, and it needs 9.0")
    assert listed(replace(GPU, triton=False)) == (False, "Triton is not installed")
    assert listed(CPU) == (False, "no GPU")
