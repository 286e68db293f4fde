"""What is counted is what torch counts while a micro-batch runs, and the least is what the loss depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sets
import torch
import worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from worlds import FAMILIES, SQUARE

from sameday.data.questions.batch import Batch
from sameday.hardware.ranks import Ranks
from sameday.kernels import split
from sameday.kernels.attention import visible
from sameday.models import flops, vlm
from sameday.models.flops import Counted, Work, block_pairs, causal_pairs
from sameday.models.tower import image_attention
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vision_flops import count_images
from sameday.models.vit import ViT
from sameday.models.vlm_flops import count, needed_extent
from sameday.spec.plan import Plan
from sameday.spec.vision import BdhModel, VitModel
from sameday.tasks.vqa import task as vqa
from sameday.tasks.vqa.setup import VqaSetup
from sameday.tasks.vqa.task import VqaTask

AGREES, ALLOWED = 0.001, 0.02
"""They agree to the FLOP where this was written; more than 2% apart, the count would be of something else."""

# Plans
FOUR = {"max_questions": 4}
PACKED = {"packing": True, "max_questions": None, "label_only_logits": True}
SHARED = {**PACKED, "share_images": True}
SPLIT = {**SHARED, "attention": "split", "pad_to_multiple": 32}
TEXT = {"share_text": True}
FULL, SELECTIVE = {"checkpointing": "full"}, {"checkpointing": "selective"}
PLANS: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "one at a time, labels only": {"label_only_logits": True},
    "one at a time, full checkpointing": FULL,
    "4 at a time": FOUR,
    "4 at a time, padded more, full checkpointing": {**FOUR, **FULL, "pad_to_multiple": 32},
    "packed": PACKED,
    "packed, all logits": {**PACKED, "label_only_logits": False},
    "packed, split": {**PACKED, "attention": "split"},
    "packed, split, one at a time": {**PACKED, "attention": "split", "max_questions": 1},
    "shared rows": {"share_images": True, "max_questions": None},
    "shared": SHARED,
    "shared, full checkpointing": {**SHARED, **FULL},
    "shared, split": SPLIT,
    "shared, split, full checkpointing": {**SPLIT, **FULL},
    "one at a time, selective": SELECTIVE,
    "shared, selective": {**SHARED, **SELECTIVE},
    "shared, split, selective": {**SPLIT, **SELECTIVE},
    "shared, text": {**SHARED, **TEXT},
    "shared, text, split": {**SPLIT, **TEXT},
}

# Recipes
RECIPES: dict[str, dict[str, Any]] = {
    "wide adapters": {"lora": {"r": 32, "alpha": 8}},
    "adapters with dropout on some layers": {
        "lora": {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["v_proj", "language_model.down_proj"]}
    },
    "adapters on the head": {"lora": {"r": 2, "alpha": 8, "target_modules": ["k_proj", "lm_head"]}},
    "adapters in the tower": {
        "train_vision": True,
        "lora": {"r": 8, "alpha": 8, "target_modules": ["q_proj", "o_proj", "qkv"]},
    },
    "an adapter beside the tower": {
        "train_vision": True,
        "lora": {"r": 4, "alpha": 8, "target_modules": ["deepstack_merger_list.0.linear_fc1"]},
    },
    "DoRA everywhere": {
        "lora": {
            "r": 8,
            "alpha": 8,
            "dora": True,
            "target_modules": ["all-linear", "tower.qkv", "projector.linear_fc1"],
        }
    },
    "DoRA with dropout": {"lora": {"r": 8, "alpha": 8, "dora": True, "dropout": 0.1}},
    "all": {"train": "all"},
    "all, tower too": {"train": "all", "train_vision": True},
}
CASES = [("qwen3_vl", {}, name) for name in PLANS if "text" not in name]
CASES += [(family, {}, name) for family in ("qwen2_5_vl", "qwen2_vl") for name in ("4 at a time", "shared, split")]
CASES += [("qwen3_vl", recipe, "shared, full checkpointing") for recipe in RECIPES.values()]
CASES += [("qwen3_vl", recipe, "shared, selective") for recipe in RECIPES.values()]
SOME = "adapters with dropout on some layers"
CASES += [(family, RECIPES[SOME], "one at a time, selective") for family in FAMILIES]
CASES += [
    (family, RECIPES[recipe], "one at a time, full checkpointing")
    for family in FAMILIES
    for recipe in (SOME, "adapters in the tower", "all, tower too")
]
CASES += [("qwen3_vl", {"precision": "bf16"}, "one at a time, labels only")]
SQUARE_RECIPES: list[dict[str, Any]] = [
    {"train_vision": True, "lora": {"r": 8, "alpha": 8, "target_modules": ["q_proj", "out_proj", "fc1"]}},
    {"train": "all", "train_vision": True},
]
CASES += [(family, {}, plan) for family in SQUARE for plan in ("4 at a time", "shared", "shared, full checkpointing")]
CASES += [(family, {}, "shared, selective") for family in SQUARE]
CASES += [(family, recipe, "one at a time, full checkpointing") for family in SQUARE for recipe in SQUARE_RECIPES]
PROMPT = {
    "prompt": {
        "by": "stage",
        "default": "see the left wall near the red polyp, how many instruments, what size, shape, colour: {question}",
        "templates": {
            "1": "how many red instruments near the polyp, the left wall, what colour, size, shape: {question}"
        },
    }
}
"""Questions of one template have more in common than a fork needs."""
CASES += [("qwen3_vl", PROMPT, plan) for plan in ("shared, text", "shared, text, split")]


def seen_inside(operator: Any) -> Callable[..., int]:
    """An operator of ours is one opaque call to the counter: what is written in it is run once more and counted."""

    def counted(*args: Any, out_val: Any = None, **named: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            operator._init_fn(*args, **named)
        return counter.get_total_flops()

    counted._get_raw = True  # type: ignore[attr-defined]
    return counted


def for_all_heads(q: Any, shape: Any) -> Any:
    """Keys or values repeated for the queries that share them: torch 2.11's formulas know no groups of heads."""
    return (shape[0], q[1], *shape[2:])


def fused_forward(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(q, for_all_heads(q, k), for_all_heads(q, v))


def fused_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_backward_flop_count(grad, q, for_all_heads(q, k), for_all_heads(q, v))


aten, ours = torch.ops.aten, torch.ops.sameday
OPAQUE = {
    ours.shared_prefix_attention: seen_inside(split._forward),
    ours.shared_prefix_attention_backward: seen_inside(split._backward),
    ours.image_attention: seen_inside(image_attention),
    # The CPU's fused attention is compiled code. Torch has a formula for the GPU's: whole squares, causal or not.
    aten._scaled_dot_product_flash_attention_for_cpu: fused_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
}


def run(task: Any, batch: Any) -> int:
    """Torch's count of a micro-batch, forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=OPAQUE) as counter:
        loss, _ = task.loss_sum(batch, 0)
        loss.backward()
    return counter.get_total_flops()


def counted(task: VqaTask, batch: Batch) -> Counted:
    return count(task.model, batch, task.read_at(batch))


@dataclass(frozen=True)
class Ran:
    case: str
    torch: int
    counted: Counted


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_world(tmp_path_factory.mktemp("counted"), 3, (3, 1, 2), chats=True, sizes=((48, 32), (32, 64)))


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with so many questions that several in a step are of one template."""
    return worlds.write_world(tmp_path_factory.mktemp("templates"), 3, (5,), hard=False, sizes=((48, 32),))


def make(world: Path, model: Path, plan: dict[str, Any], **recipe: Any) -> VqaTask:
    asked = worlds.tiny_recipe(model, effective_batch=5, order="by_image", **recipe)
    task = worlds.make_task(world, asked, Plan(**plan))
    task.training(True)
    return task


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root, two = tmp_path_factory.mktemp("models"), {"num_hidden_layers": 2}
    with patch.object(vqa, "load_base", worlds.once(vqa.load_base)):
        yield {family: worlds.write_tiny(root / family, family, text=two) for family in (*FAMILIES, *SQUARE)}


@pytest.fixture(scope="module")
def ran(world: Path, templated: Path, models: dict[str, Path]) -> list[Ran]:
    """The first micro-batch of each case with plain products, which the counter sees by itself; some with fused
    attention too."""
    found = []
    for family, recipe, plan in CASES:
        task = make(templated if recipe is PROMPT else world, models[family], PLANS[plan], **recipe)
        batch = next(iter(task.batches(0, None, Ranks())))
        assert bool(batch.fork.any()) == (recipe is PROMPT)
        both = [("plain", sdpa_kernel(SDPBackend.MATH)), ("fused", nullcontext())]
        for name, kernel in both[: 1 if recipe or "split" in plan else 2]:
            with kernel:
                found.append(Ran(f"{family} {recipe} {plan} {name}", run(task, batch), counted(task, batch)))
    return found


@pytest.mark.slow
def test_executed_is_what_torch_counts(ran: list[Ran]) -> None:
    off = {each.case: each.counted.executed.total / each.torch - 1 for each in ran}
    assert len(off) == len(ran) >= 35
    assert {case: share for case, share in off.items() if abs(share) > AGREES} == {}


def terms() -> Iterator[tuple[str, str]]:
    for part in Work().parts():
        for kind in ("forward", "backward", "recomputed"):
            if kind != "recomputed" or part not in ("tower", "head"):
                yield part, kind


@pytest.mark.slow
@pytest.mark.parametrize(("part", "kind"), terms())
def test_no_term_could_be_left_out(ran: list[Ran], part: str, kind: str) -> None:
    """Each is more than what the comparison lets pass, somewhere."""
    without = [each.counted.executed.total - getattr(getattr(each.counted.executed, part), kind) for each in ran]
    assert any(abs(rest / each.torch - 1) > ALLOWED for rest, each in zip(without, ran, strict=True))


@pytest.mark.slow
def test_the_least_is_less(ran: list[Ran]) -> None:
    for each in ran:
        for name, part in each.counted.needed.parts().items():
            done = getattr(each.counted.executed, name)
            assert part.forward <= done.forward and part.backward <= done.backward and part.recomputed == 0, each.case
        assert each.counted.needed.total < (1 - ALLOWED) * each.torch, each.case


def test_the_least_is_the_recipes_and_not_the_plans(world: Path, models: dict[str, Path]) -> None:
    """Without sharing, whatever is padded, packed, recomputed or masked."""
    names = ["one at a time", "4 at a time, padded more, full checkpointing", "packed", "packed, split"]
    found = []
    for name in [*names, "shared", "shared rows", "shared, split"]:
        task = make(world, models["qwen3_vl"], PLANS[name])
        found.append(sum(counted(task, batch).needed.total for batch in task.batches(0, None, Ranks())))
    assert len(set(found[:4])) == 1
    assert len(set(found[4:])) == 1
    assert found[4] < 0.9 * found[0]


def test_what_templates_have_in_common_is_needed_once(templated: Path, models: dict[str, Path]) -> None:
    """In the floor, which is of the setup's plan for all at once."""
    task = make(templated, models["qwen3_vl"], {}, **PROMPT)
    together = task.with_plan(VqaSetup.together)
    assert any(batch.fork.any() for batch in together.batches(0, None, Ranks()))
    apart = task.with_plan({**VqaSetup.together, "share_text": False})
    least, more = (each.cost(0, None, Ranks()) for each in (together, apart))
    assert least.flop < 0.95 * more.flop and least.executed_flop < more.executed_flop


def with_features(task: VqaTask, batch: Batch) -> Batch:
    """The same micro-batch as a cache of features would give it."""
    features = list(task.model.features_per_image(batch.pixels, batch.grids))
    ready = (True,) * len(features)
    return replace(batch, ready=ready, features=torch.cat(features, 1), pixels=batch.pixels[:0])


def test_images_that_are_ready_need_no_tower(world: Path, models: dict[str, Path]) -> None:
    task = make(world, models["qwen3_vl"], SHARED)
    fresh = next(batch for step in range(3) for batch in task.batches(step, None, Ranks()) if len(batch.grids) > 1)
    ready = with_features(task, fresh)
    with sdpa_kernel(SDPBackend.MATH):
        assert counted(task, fresh).executed.tower.total > ALLOWED * run(task, fresh)
        assert counted(task, ready).executed.total == run(task, ready)
    some = replace(ready, ready=(False, *ready.ready[1:]))
    towers = [counted(task, batch).needed.tower.total for batch in (ready, some, fresh)]
    assert 0 == towers[0] < towers[1] < towers[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("qwen3_vl", SPLIT | FULL),
        ("qwen3_vl", SPLIT | SELECTIVE),
        ("qwen2_5_vl", SPLIT | SELECTIVE),
        pytest.param("qwen2_5_vl", SPLIT | FULL, marks=pytest.mark.soak),
        pytest.param("qwen3_vl", SHARED | SELECTIVE, marks=pytest.mark.soak),
    ],
)
def test_compiled_layers_compute_again_what_gradients_depend_on(
    world: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], family: str
) -> None:
    """The counter cannot look into what is compiled, so the compiled graphs count for themselves."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    total = 0

    def counting(graph: Any, _inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal total
            with FlopCounterMode(display=False, custom_mapping=OPAQUE) as counter:
                out = graph(*args)
            total += counter.get_total_flops()
            return out

        return make_boxed_func(call)

    backend = aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", backend)
    torch._dynamo.reset()
    task = make(world, models[family], {**plan, "compile": "layers"})
    task.model.text.layers, task.model.kinds = task.model.text.layers[:1], task.model.kinds[:1]  # one compiles sooner
    batch = with_features(make(world, models[family], plan), next(iter(task.batches(0, None, Ranks()))))
    task.loss_sum(batch, 0)[0].backward()
    torch._dynamo.reset()
    work = counted(task, batch).executed
    layers = work.layers + work.adapters + work.attention
    assert total == layers.total
    last: Any = task.model.text.layers[0].mlp.down_proj
    out, tokens, at = task.model.text.layers[0].self_attn.o_proj, batch.tokens.numel(), task.read_at(batch)
    assert (at is not None) == (family == "qwen2_5_vl"), "behind the only layer of the other comes DeepStack"
    mlp = 2 * last.in_features * last.out_features
    again = layers.forward - mlp * (tokens if at is None else 3 * len(at))  # its MLP's results are kept there
    if plan["checkpointing"] == "selective":
        again -= work.attention.forward
    if plan["checkpointing"] == "selective" or at is not None:
        again -= 2 * tokens * (out.in_features + 4) * out.out_features  # and its adapter's second half
    assert layers.recomputed == again


# Vision models

VISION = [
    {**sets.TINY, "attention": attention, "pool": pool}
    for attention in ("linear", "softmax")
    for pool in ("class", "mean")
] + [{"kind": "vit", "width": 24, "heads": 3, "depth": 2, "patch": 8, "pool": pool} for pool in ("class", "mean")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write_set(tmp_path_factory.mktemp("pictures"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", VISION, ids=lambda shape: "-".join(map(str, shape.values())))
def test_vision_models_execute_what_torch_counts(pictures: Path, shape: dict[str, Any], fused: bool) -> None:
    task = sets.make_task(pictures, sets.tiny_recipe(model=shape), Plan(micro_batch=3))
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        for batch in task.batches(0, None, Ranks()):  # 3, 3 and 2 images
            counted = count_images(task.model, len(batch))
            assert counted.executed.total == run(task, batch)
            assert counted.needed.total <= counted.executed.total
            for part in (counted.executed.layers, counted.executed.attention):
                assert min(part.forward, part.backward) > ALLOWED * counted.executed.total


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_the_least_of_vision_bdh(attention: str) -> None:
    """A level in which scores are computed once for both halves, and the last one for the class token alone."""
    shape = BdhModel(levels=1, heads=2, width=32, latents=2, patch=8, attention=attention)
    model = VisionBDH(shape, 32, 5, 0)
    needed = count_images(model, 1).needed
    x, weights = torch.randn(17, 32, requires_grad=True), (model.encoder, model.encoder_v, model.decoder)
    with FlopCounterMode(display=False) as counter:
        s = torch.stack([x @ weight for weight in weights[0]])
        y = (s[:, :1] @ s.transpose(1, 2)) @ x
        z = s[:, :1] * (y @ weights[1])
        (z.transpose(0, 1).flatten(1) @ weights[2]).sum().backward()
    embedding = 2 * 16 * 3 * 64 * 32
    assert needed.total - needed.head.total - 2 * embedding == counter.get_total_flops()


def test_the_least_of_a_vit() -> None:
    """A layer whose last queries are the class token's alone."""
    model = ViT(VitModel(width=24, heads=3, depth=1, patch=8), 32, 5, 0)
    needed = count_images(model, 1).needed
    layer: Any = model.layers[0]
    x = torch.randn(17, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        q, k, v = layer.qkv.weight.chunk(3)
        heads = [(y @ w.T).unflatten(-1, (3, -1)).transpose(0, 1) for y, w in ((x[:1], q), (x, k), (x, v))]
        seen = (heads[0] @ heads[1].transpose(1, 2)).softmax(-1) @ heads[2]
        layer.down(layer.up(layer.out(seen.transpose(0, 1).flatten(1)))).sum().backward()
    embedding = 2 * 16 * 3 * 64 * 24
    assert needed.total - needed.head.total - 2 * embedding == counter.get_total_flops()


def test_fused_levels_save_one_product_of_scores() -> None:
    """Triton's kernels are not seen by the counter: `unattend` takes the sum of both gradients."""
    model = VisionBDH(BdhModel(levels=2, heads=2, width=32, latents=2, patch=8), 32, 5, 0)
    plain = count_images(model, 1).executed
    model.kernel = "fused"
    assert plain.total - count_images(model, 1).executed.total == 2 * 2 * 17**2 * 64


# Pure parts


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Groups of a prefix, forks and branches in rows of their own or in one, padding at the end, and labelled
    places."""
    branches = st.lists(st.tuples(st.integers(0, 2), st.integers(2, 6)), min_size=1, max_size=3)
    units = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), branches), max_size=4))
    packed = draw(st.booleans())
    pieces = []
    for g, (prefix, fork_length, asked) in enumerate([*units, (2, 1, [(0, 3)])]):
        forks = sorted({f for f, _ in asked} - {0})
        below = [(g, b + 1, f, length) for b, (f, length) in enumerate(asked)]
        pieces.append([(g, 0, 0, prefix), *((g, 0, f, fork_length) for f in forks), *below])
    if packed:
        pieces = [sorted((piece for unit in pieces for piece in unit), key=lambda piece: (piece[1] > 0, piece[2] > 0))]
    longest = max(sum(n for *_, n in row) for row in pieces) + draw(st.integers(0, 5))
    group = np.full((len(pieces), longest), -1, np.int32)
    branch, fork = np.zeros((2, len(pieces), longest), np.int32)
    labels: list[int] = []
    for r, row in enumerate(pieces):
        at = 0
        for g, b, f, length in row:
            group[r, at : at + length], branch[r, at : at + length], fork[r, at : at + length] = g, b, f
            if b:
                places = st.lists(st.integers(0, length - 1), min_size=1, max_size=3, unique=True)
                labels += [r * longest + at + place for place in draw(places)]
            at += length
    return group, branch, fork, np.array(labels)


@given(rows())
def test_the_least_is_what_labels_see(made: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    """By the mask itself: what a label sees, and what those see in turn."""
    group, _branch, _fork, labels = made
    seen = visible(*map(torch.from_numpy, made[:3]))[:, 0].numpy()
    asking = np.zeros(group.size, bool)
    asking[labels] = True
    asking = asking.reshape(group.shape)
    used = (seen & asking[:, :, None]).any(1)
    assert (used == (seen & used[:, :, None]).any(1)).all()
    extent = needed_extent(*made)
    assert extent.logits == extent.last.asking == len(labels)
    assert extent.each.asking == extent.each.seen == extent.last.seen == used.sum()
    assert extent.each.pairs.count == (seen & used[:, :, None]).sum()
    assert extent.last.pairs.count == (seen & asking[:, :, None]).sum()


@settings(max_examples=20)
@given(rows(), st.sampled_from([4, 8]))
def test_blocks_are_those_of_flex_attention(
    made: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], tile: int
) -> None:
    levels = [torch.from_numpy(x) for x in made[:3]]
    seen = visible(*levels)[:, 0]

    def rule(row: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[row, i, j]

    mask = create_block_mask(rule, *seen.shape[:1], None, *seen.shape[1:], device="cpu", BLOCK_SIZE=tile)
    blocks = int(mask.kv_num_blocks.sum()) + int(
        0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks.sum()
    )
    assert block_pairs(*levels, tile) == blocks * tile**2


@given(st.integers(1, 600), st.integers(1, 150))
def test_causal_tiles_are_between_the_triangle_and_the_square(length: int, tile: int) -> None:
    pairs = causal_pairs(length, tile)
    assert length * (length + 1) // 2 <= pairs <= length**2
    assert pairs <= length * (length + tile) // 2
    assert causal_pairs(length, 1) == length * (length + 1) // 2
    assert causal_pairs(length, length) == length**2


def test_long_rows_are_where_the_counter_counts_too_much() -> None:
    """It takes a causal row for a whole square; kernels leave out tiles above the diagonal."""
    assert causal_pairs(flops.TILE) == flops.TILE**2
    assert causal_pairs(10 * flops.TILE) == 55 * flops.TILE**2
