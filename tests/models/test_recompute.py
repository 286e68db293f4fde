"""Layers that are recomputed keep what they are said to keep, and give the same bits; automatic plans count it."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
import worlds
from torch.autograd.profiler import profile
from transformers import AutoConfig

from sameday.data.questions.batch import Batch
from sameday.hardware.machine import Machine
from sameday.hardware.ranks import Ranks
from sameday.kernels import fused_attention
from sameday.models import vlm
from sameday.spec.plan import Plan
from sameday.tasks.vqa.automatic import FEWEST_SELECTIVE, FEWEST_TOKENS, choose_plan, language_bytes
from sameday.tasks.vqa.task import VqaTask

LAYERS = 3
ROWS = {"share_images": True, "packing": True, "max_questions": None, "token_budget": 300, "device": "cpu"}
WAYS = ("none", "selective", "full")


def tasks_of(home: Path, family: str, attention: str, compile: str) -> dict[str, VqaTask]:
    worlds.write_world(home, 3, (9, 1, 5))
    square = family in worlds.SQUARE
    text, vision = {"num_hidden_layers": LAYERS}, {} if square else {"depth": 1}
    model = worlds.write_tiny(home / "model", family, text=text, vision=vision)
    lora = {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": worlds.OF_THE_DECODER}
    recipe = worlds.tiny_recipe(model, order="by_image", effective_batch=8, lora=lora)
    tasks = {}
    for way in WAYS:
        plan = Plan(**ROWS, attention=attention, compile=compile, checkpointing=way)
        tasks[way] = worlds.make_task(home, recipe, plan)
        worlds.stir(tasks[way])
        tasks[way].training(True)
    return tasks


def learned(task: VqaTask, batch: Batch) -> tuple[int, torch.Tensor]:
    """Bytes that are there behind the forward pass and were not before it, and the gradient."""
    for parameter in task.trained().values():
        parameter.grad = None
    # What an earlier pass has left in a cycle would be freed in this one, now and then.
    gc.collect()
    gc.disable()
    try:
        with profile(profile_memory=True) as seen:
            # Its clock is another one: what is noted just after its start may count as before it, and is left out.
            time.sleep(0.02)
            loss = task.loss_sum(batch, 0)[0]
            time.sleep(0.02)
    finally:
        gc.enable()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in task.trained().values() if p.grad is not None])
    return allocated(seen), gradient


def allocated(seen: profile) -> int:
    """Bytes of the blocks that were allocated while the profiler ran and not freed. By address, since the profiler
    never forgets one: where a block from before is freed, it notes the size of another that it once saw there."""
    assert seen.kineto_results is not None
    blocks: dict[int, int] = {}
    left, noted = list(seen.kineto_results.experimental_event_tree()), []
    while left:
        event = left.pop()
        left += event.children
        noted += [event] if event.name == "[memory]" else []
    for event in sorted(noted, key=lambda each: each.start_time_ns):
        block = event.extra_fields
        if block.alloc_size > 0:
            blocks[block.ptr] = block.alloc_size
        else:
            blocks.pop(block.ptr, None)
    return sum(blocks.values())


def selective_bytes(task: VqaTask, batch: Batch) -> int:
    """Beyond what full checkpointing keeps: what goes into o_proj and comes out of it, the log-sum-exp, and what goes
    into a norm behind the MLP."""
    text, family = task.model.text, task.model.family
    heads, _, width = family.heads(text)
    behind = family.norms(text.layers[0])[3] is not None
    numbers = heads * width + heads + (1 + behind) * text.config.hidden_size
    return LAYERS * batch.tokens.numel() * 4 * numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "compile"),
    [
        *(
            pytest.param(family, "sdpa", "none", marks=[pytest.mark.soak] if family in ("qwen2_vl", "llava") else [])
            for family in (*worlds.FAMILIES, *worlds.SQUARE)
        ),
        ("qwen3_vl", "split", "none"),
        pytest.param(
            "qwen3_vl",
            "fused",
            "none",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="counts a CPU's bytes, where kernels run in the interpreter alone"
            ),
        ),
        pytest.param("qwen3_vl", "split", "layers", marks=pytest.mark.soak),
        pytest.param("gemma3", "sdpa", "layers", marks=pytest.mark.soak),
    ],
)
def test_layers_keep_what_is_counted_and_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, attention: str, compile: str
) -> None:
    # A backend that divides graphs into forward and backward as on a GPU, and computes them as eager does.
    monkeypatch.setattr(vlm, "COMPILE_BACKEND", "aot_eager")
    monkeypatch.setattr(fused_attention, "interpreted", lambda: False)  # computes the same, and is slow
    torch._dynamo.reset()
    tasks = tasks_of(tmp_path, family, attention, compile)
    batch = next(iter(tasks["none"].batches(0, None, Ranks())))
    for task in tasks.values():
        task.loss_sum(batch, 0)[0].backward()  # what is made once and kept, such as graphs
    kept, gradients = zip(*(learned(task, batch) for task in tasks.values()), strict=True)
    assert gradients[0].norm() > 1e-3
    for each in gradients[1:]:
        assert (each - gradients[0]).norm() <= 1e-6 * gradients[0].norm()
    # A kernel that torch.compile computes again might draw random numbers, for all that it knows.
    states = LAYERS * len(torch.get_rng_state()) if (attention, compile) == ("sdpa", "layers") else 0
    assert kept[1] - kept[2] == selective_bytes(tasks["selective"], batch) - states
    assert kept[2] < kept[1] < 0.4 * kept[0], kept
    # Each pass frees the dropout keys of the pass before it, whose addresses the profiler knows by now.
    assert [learned(task, batch)[0] for task in tasks.values()] == list(kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective", "full"])
def test_layers_that_are_recomputed_give_the_same_bits(tmp_path: Path, name: str) -> None:
    """Uncompiled, each piece is what the library computes, in its order."""
    tasks = tasks_of(tmp_path, "gemma3", "sdpa", "none")
    batch = next(iter(tasks["none"].batches(0, None, Ranks())))
    plain, again = (learned(tasks[way], batch)[1] for way in ("none", name))
    assert torch.equal(plain, again)


# Automatic plans


def chosen(tiny: Path, gib: float) -> tuple[Plan, dict[str, str], float]:
    """For an 8B, and what its weights leave of nine tenths of the memory."""
    config = AutoConfig.from_pretrained(tiny)
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    for name, value in (sizes | {"vocab_size": 151936, "head_dim": 128}).items():
        setattr(config.text_config, name, value)
    recipe, memory = worlds.tiny_recipe(tiny, precision="bf16"), int(gib * 2**30)
    plan, why = choose_plan(recipe, Machine("cuda", "a GPU", memory, 8, True), config, 1)
    return plan, why, 0.9 * memory - language_bytes(recipe, config.get_text_config())


@pytest.mark.parametrize(
    ("gib", "way"),
    [(80, "none"), (48, "none"), (40, "selective"), (24, "selective"), (23.5, "selective"), (20, "full")],
)
def test_what_memory_ways_are_chosen_for(tiny_qwen3: Path, gib: float, way: str) -> None:
    plan, why, spare = chosen(tiny_qwen3, gib)
    assert plan.checkpointing == way
    layer = 2 * (3 * 4096 + 4096) + 4 * 32  # input, before and behind o_proj, behind the MLP, log-sum-exp
    each = 36 * layer + 60 * 4096
    if way == "selective":
        assert FEWEST_SELECTIVE <= plan.token_budget == min(8192, int(spare / each))
        assert why["checkpointing"] == (
            f"only {int(spare / (36 * 60 * 4096))} tokens would fit without it, and {int(spare / each)} where layers "
            "keep attention and not the matmuls"
        )
    elif way == "full":
        assert spare / each < FEWEST_SELECTIVE and f"and {int(spare / each)} with selective" in why["checkpointing"]
    else:
        assert plan.token_budget >= FEWEST_TOKENS
