"""Automatic choices for classification, each with the sentence that explains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sameday.hardware.machine import Machine
from sameday.kernels.bdh import SHARED_MEMORY, interpreted, refusal, too_many, untried
from sameday.spec.classify import ClassifyRecipe
from sameday.spec.errors import refuse
from sameday.spec.plan import Plan
from sameday.spec.vision import BdhModel

SHARE_FOR_IMAGES = 0.2
"""Of a GPU's memory: a set that takes more is prepared on the host."""


def problems_of(plan: Plan, machine: Machine, precision: str) -> Iterator[str]:
    """Everything for which a plan cannot run on this machine, whatever the model is."""
    device = machine.device
    if plan.level_kernel == "fused" and not (machine.triton or interpreted()):
        where = "on a CPU" if device == "cpu" else "here, since it is not installed"
        yield f"plan.level_kernel fused needs Triton, which there is not {where}; allowed: auto, plain"
    elif plan.level_kernel == "fused" and precision == "bf16" and device == "cpu":
        yield "plan.level_kernel fused has no bf16 in Triton's interpreter; allowed there: float32, or plain"
    if plan.cuda_graphs and device == "cpu":
        yield "plan.cuda_graphs true needs a GPU; allowed here: false"
    if plan.cuda_graphs and plan.workers and plan.pin_memory:
        yield (
            "plan.cuda_graphs cannot record while a thread pins what the workers send: set plan.workers 0 "
            "(with images_on device they have nothing to do), or pin_memory false"
        )
    if plan.level_kernel == "fused" and plan.compile == "layers":
        yield "plan.compile layers is for plain levels, plan.level_kernel fused replaces them; allowed: one"
    if plan.cuda_graphs and plan.compile != "none" and plan.compile_mode == "reduce-overhead":
        yield "plan.compile_mode reduce-overhead records graphs as plan.cuda_graphs does; allowed: one of them"


def no_fused_levels(recipe: ClassifyRecipe, machine: Machine) -> str | None:
    """Why the fused kernels cannot compute this model on this machine, or None."""
    shape = recipe.model
    if not isinstance(shape, BdhModel):
        return f"a {shape.kind} has no levels"
    if shape.attention == "softmax":
        return "the kernels have no softmax"
    if machine.device == "cuda" and machine.shared_memory < SHARED_MEMORY:
        have, need = machine.shared_memory // 1024, SHARED_MEMORY // 1024
        return f"their tiles take {need} KiB of a multiprocessor's shared memory, and {have} are there"
    tokens = shape.tokens(recipe.data.image_size)
    if refusal(shape.width) or interpreted():
        return refusal(shape.width)
    if recipe.precision == "bf16":
        return too_many(shape.width, tokens, 2) or untried(shape.width, tokens, shape.units)
    return too_many(shape.width, tokens, 4)


def level_kernel(plan: Plan, recipe: ClassifyRecipe, machine: Machine) -> tuple[str, str]:
    """How Vision-BDH's levels are computed, and why."""
    refused = no_fused_levels(recipe, machine)
    problems = list(problems_of(plan, machine, recipe.precision))
    if plan.level_kernel == "fused" and refused:
        problems.append(f"plan.level_kernel fused: {refused}; allowed: auto, plain")
    refuse(problems)
    if plan.level_kernel != "auto":
        return plan.level_kernel, "asked for"
    if plan.compile == "layers":
        return "plain", "plan.compile layers compiles the plain ones"
    if machine.device == "cpu" or not machine.triton:
        return "plain", "there is no GPU with Triton"
    if refused:
        return "plain", refused
    return "fused", "there is a GPU with Triton, and latents pass through memory a few times instead of dozens"


def images_place(plan: Plan, device: str, memory: int, images: int) -> tuple[str, str]:
    """Where images are prepared, and why. `images` is how many bytes all of them take."""
    if plan.images_on != "auto":
        return plan.images_on, "asked for"
    if device == "cpu":
        return "host", "the device is the host"
    if images > SHARE_FOR_IMAGES * memory:
        return "host", f"{images / 2**30:.1f} GiB of images are more than a fifth of the device's memory"
    return "device", f"{images / 2**20:.0f} MiB of images fit there, and nothing has to be sent"


def choose_plan(recipe: ClassifyRecipe, machine: Machine) -> tuple[Plan, dict[str, str]]:
    """A safe plan for this machine, field by field with its reason."""
    why: dict[str, str] = {}
    fields: dict[str, Any] = {}

    def pick(name: str, value: Any, reason: str) -> None:
        fields[name], why[name] = value, reason

    pick("level_kernel", "auto", "the kernels are taken where they can run")
    pick("images_on", "auto", "the device prepares images where they fit")
    if machine.device == "cpu":
        pick("optimizer_impl", "foreach", "fewer calls than one tensor at a time")
        return Plan(**fields), why
    pick("optimizer_impl", "fused", f"one kernel on {machine.shown_name}")
    pick("cuda_graphs", True, "small steps are bound by the launches of their kernels")
    pick("pin_memory", True, "copies to the GPU do not block")
    pick("eval_batch", 1000, "without gradients more images fit")
    return Plan(**fields), why
