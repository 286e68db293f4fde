"""Why a plan for questions about images cannot run on a machine or follow a model, each with what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sameday.hardware.kernels import without_flash, without_fused
from sameday.hardware.machine import Machine
from sameday.kernels.bdh import interpreted
from sameday.kernels.fused_attention import WIDTHS
from sameday.kernels.lora_launch import MOST
from sameday.spec.plan import OF_PIECES, Plan
from sameday.spec.vlm import VlmRecipe
from sameday.tasks.vqa.trials import SHARING
from sameday.tasks.vqa.words import image_parts_words

NO_PIECES = "attention cannot follow this model's layers, of which some see a window or images in both directions"

FLEX_WIDTH = 16
"""The narrowest heads for which torch compiles flex attention."""


class Decoder(NamedTuple):
    """What plans depend on of a model: whether kernels of pieces can follow what its layers see, how wide its heads
    are, and whether embeddings and logits have weights of their own."""

    splits: bool = True
    width: int = WIDTHS[-1]
    own_head: bool = True


def attention_problems(
    plan: Plan, machine: Machine, precision: str, decoder: Callable[[], Decoder] = Decoder
) -> Iterator[str]:
    """Everything for which a plan's attention cannot run on this machine or follow the model."""
    asked, no_flash = f"plan.attention {plan.attention}", without_flash(machine, precision)
    if plan.attention == "flex" and machine.device == "cpu":
        yield "plan.attention flex has no backward pass on a CPU; allowed there: auto, sdpa, split"
    elif plan.attention == "flex" and not machine.triton:
        yield "plan.attention flex needs Triton, which is not installed; allowed: auto, sdpa, split"
    elif plan.attention == "flex" and (width := decoder().width) < FLEX_WIDTH:
        yield f"{asked} needs heads of width {FLEX_WIDTH} or more, and this model's have {width}; allowed: auto, sdpa"
    if plan.attention in OF_PIECES and not plan.packing:
        yield f"{asked} is for packed rows: set plan.packing true, or attention sdpa or flex"
    if plan.attention == "split" and machine.device == "cuda" and no_flash:
        yield f"{asked} is flash attention on a GPU, and {no_flash}; allowed: sdpa, flex"
    if plan.attention == "fused":
        yield from fused_problems(machine, precision, decoder)
    if plan.attention in OF_PIECES and not decoder().splits:
        yield f"{asked}: {plan.attention} {NO_PIECES}; allowed: auto, sdpa, flex"


def fused_problems(machine: Machine, precision: str, decoder: Callable[[], Decoder]) -> Iterator[str]:
    asked = "plan.attention fused"
    if machine.device == "cpu" and not interpreted():
        yield f"{asked} needs Triton, which there is not on a CPU; allowed there: auto, sdpa, split"
    elif machine.device == "cpu" and precision == "bf16":
        yield f"{asked} has no bf16 in Triton's interpreter; allowed there: float32, or auto, sdpa, split"
    elif machine.device == "cuda" and not machine.triton:
        yield f"{asked} needs Triton, which is not installed; allowed: auto, sdpa, split"
    elif machine.device == "cuda" and (why := without_fused(machine)):
        yield f"{asked} is Triton kernels that copy tiles by tensor maps, and {why}; allowed: auto, sdpa, flex, split"
    elif (width := decoder().width) not in WIDTHS:
        there = ", ".join(map(str, WIDTHS))
        yield f"{asked} has tiles for heads of width {there}, and this model's have {width}; allowed: auto, sdpa, split"


def lora_problems(plan: Plan, recipe: VlmRecipe, machine: Machine) -> Iterator[str]:
    """Why the kernels that a plan asks for cannot run."""
    if plan.lora_kernel == "plain":
        return
    asked, allowed = f"plan.lora_kernel {plan.lora_kernel}", "allowed: plain"
    yield from (f"{asked} {why}; {allowed}" for why in lora_limits(recipe))
    if not (machine.triton or interpreted()):
        where = "on a CPU" if machine.device == "cpu" else "here"
        yield f"{asked} needs Triton, which there is not {where}; {allowed}"
    elif machine.device == "cpu" and recipe.precision == "bf16":
        yield f"{asked} has no bf16 in Triton's interpreter; allowed there: float32, or plain"


def lora_limits(recipe: VlmRecipe) -> Iterator[str]:
    if recipe.train != "lora":
        yield f"is for adapters, and recipe.train is {recipe.train}"
    elif recipe.lora.dora:
        yield "does not compute DoRA, and recipe.lora.dora is true"
    elif recipe.lora.r > MOST:
        yield f"has tiles for ranks up to {MOST}, and recipe.lora.r is {recipe.lora.r}"


def table_problems(
    plan: Plan, recipe: VlmRecipe, machine: Machine, decoder: Callable[[], Decoder] = Decoder
) -> Iterator[str]:
    """Why the table of embeddings cannot lie where the plan asks for."""
    if plan.embeddings_on == "device":
        return
    asked, allowed = "plan.embeddings_on host", "allowed: device"
    if machine.device == "cpu" and not interpreted():
        yield f"{asked} spares a GPU's memory, and there is no GPU; {allowed}"
    elif machine.device == "cuda" and not machine.triton:
        yield f"{asked} needs Triton, which is not installed; {allowed}"
    if recipe.train != "lora":
        yield f"{asked} is for a table that is not trained, and recipe.train is {recipe.train}; {allowed}"
    elif not decoder().own_head:
        yield f"{asked} is for models whose head has weights of its own, and this one's are the table; {allowed}"


def graph_problems(
    plan: Plan, recipe: VlmRecipe, machine: Machine, decoder: Callable[[], Decoder] = Decoder
) -> Iterator[str]:
    """Why micro-batches cannot be recorded, where the plan asks for it."""
    if not plan.cuda_graphs:
        return
    needs = "plan.cuda_graphs true needs"
    if machine.device == "cpu":
        yield f"{needs} a GPU; allowed here: false"
        return
    no_flash = without_flash(machine, recipe.precision)
    if not plan.packing:
        yield f"{needs} packed rows: set plan.packing true; allowed here: false"
    elif plan.attention not in ("auto", *OF_PIECES):
        yield f"{needs} plan.attention {' or '.join(OF_PIECES)}, and it is {plan.attention}; allowed here: false"
    elif plan.attention != "fused" and no_flash:
        yield f"{needs} split attention, which is flash attention on a GPU, and {no_flash}; allowed here: false"
    elif not decoder().splits:
        yield f"{needs} split attention, and split {NO_PIECES}; allowed here: false"
    if recipe.base_format == "nf4":
        yield f"{needs} kernels that can be recorded, and those of recipe.base_format nf4 cannot; allowed here: false"
    if recipe.trains_image_parts:
        words = image_parts_words(recipe)
        yield f"{needs} a frozen vision tower and projector, and {words}; allowed here: false"


def problems_beside_attention(
    plan: Plan, recipe: VlmRecipe, machine: Machine, decoder: Callable[[], Decoder] = Decoder
) -> Iterator[str]:
    yield from lora_problems(plan, recipe, machine)
    yield from table_problems(plan, recipe, machine, decoder)
    yield from graph_problems(plan, recipe, machine, decoder)
    yield from feature_problems(plan, recipe)
    if plan.activation_budget < 1 and plan.compile == "none":
        yield f"plan.activation_budget {plan.activation_budget:g} is for compiled layers: set plan.compile layers"


def feature_problems(plan: Plan, recipe: VlmRecipe) -> Iterator[str]:
    """Why what a vision tower makes of images cannot be kept as the plan asks for."""
    on_disk = "plan.cache features"
    asked = [(on_disk, "none, pixels, auto")] if plan.cache == "features" else []
    asked += [("plan.keep_features true", "false")] if plan.keep_features else []
    if recipe.trains_image_parts:
        for field, allowed in asked:
            trained = image_parts_words(recipe)
            yield f"{field} keeps what vision tower and projector make of an image, and {trained}; allowed: {allowed}"
    elif len(asked) == 2:
        yield f"plan.keep_features true keeps what the tower computes, and {on_disk} is read instead; allowed: false"


def cannot(recipe: VlmRecipe, machine: Machine, decoder: Callable[[], Decoder] = Decoder) -> frozenset[tuple[str, Any]]:
    """Plan fields with values that a recipe cannot use on this machine, however the others are set."""
    fused = Plan(**SHARING, attention="fused")
    problems: dict[tuple[str, Any], Iterator[str]] = {
        ("cuda_graphs", True): graph_problems(Plan(**SHARING, cuda_graphs=True), recipe, machine, decoder),
        ("lora_kernel", "triton"): lora_problems(Plan(lora_kernel="triton"), recipe, machine),
        ("attention", "fused"): attention_problems(fused, machine, recipe.precision, decoder),
        ("embeddings_on", "host"): table_problems(Plan(embeddings_on="host"), recipe, machine, decoder),
    }
    images = [("cache", "features"), ("keep_features", True)] if recipe.trains_image_parts else []
    return frozenset([*images, *(value for value, why in problems.items() if any(why))])
