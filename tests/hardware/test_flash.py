"""Flash attention is called by operators of torch that have no public name: only where they are what is called, and in
the range of versions that is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from sameday.hardware import kernels
from sameday.hardware.kernels import flash_operators, without_flash
from sameday.hardware.machine import Machine
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.vqa.automatic import attention_kernel
from sameday.tasks.vqa.problems import Decoder

ROOT = Path(__file__).parents[2]
BOUNDED = ("torch", "transformers", "peft")
PACKED = {"packing": True, "max_questions": None}
FORWARD = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, "
    "float? scale=None) -> Tensor"
)
BACKWARD = (
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None) -> Tensor"
)


def gpu(capability: tuple[int, int] = (9, 0), triton: bool = True) -> Machine:
    return Machine("cuda", "a GPU", 80 * 2**30, 16, triton, 2**17, capability)


CPU = Machine("cpu", "CPU", 2**34, 2, False)


def with_operators(monkeypatch: pytest.MonkeyPatch, **schemas: str | None) -> None:
    """A torch whose operators are these; None is one that it does not have."""
    operators = {
        name: SimpleNamespace(default=SimpleNamespace(_schema=torch._C.parse_schema(text)))
        for name, text in schemas.items()
        if text is not None
    }
    fake = SimpleNamespace(ops=SimpleNamespace(aten=SimpleNamespace(**operators)), __version__="9.9")
    monkeypatch.setattr(kernels, "torch", fake)


# Versions


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {each.name: each for each in map(Requirement, project["dependencies"])}


def pins() -> dict[str, Version]:
    text = (ROOT / "constraints.txt").read_text()
    return {name: Version(version) for name, version in re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE)}


def test_what_is_installed_lies_in_the_ranges() -> None:
    ranges = requirements()
    assert set(BOUNDED) <= pins().keys()
    for name, version in pins().items():
        assert name not in ranges or ranges[name].specifier.contains(version), f"{name} {version}: {ranges[name]}"


@pytest.mark.parametrize("name", BOUNDED)
def test_ranges_end_where_nothing_was_tested(name: str) -> None:
    operators = {each.operator for each in requirements()[name].specifier}
    assert operators == {">=", "<"}, f"{requirements()[name]} needs a least and an upper version"


# Operators


def test_this_torch_has_the_operators() -> None:
    assert flash_operators()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", None),
        ("forward", FORWARD.replace("Tensor key, Tensor value", "Tensor value, Tensor key")),
        ("forward", FORWARD.replace(", bool return_debug_mask", "")),
        ("forward", FORWARD.replace("max_k, ", "max_k, SymInt page, ")),
        ("forward", FORWARD.replace("bool return_debug_mask, ", "bool return_debug_mask, Tensor sink, ")),
        ("forward", FORWARD.replace("float? scale=None", "float? softmax_scale=None")),
        ("forward", FORWARD.replace("float? scale=None", "float? scale=None, bool window")),
        ("backward", BACKWARD.replace(", Tensor unused", "")),
        ("backward", BACKWARD.replace("Tensor rng_state, Tensor unused", "Tensor unused, Tensor rng_state")),
        ("backward", BACKWARD.replace("Tensor logsumexp, ", "")),
    ],
)
def test_operators_with_other_arguments_are_not_called(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str | None
) -> None:
    right: dict[str, str | None] = {"_flash_attention_forward": FORWARD, "_flash_attention_backward": BACKWARD}
    with_operators(monkeypatch, **right)
    assert flash_operators() and without_flash(gpu(), "bf16") is None
    wrong = "_flash_attention_forward" if text is None else f"_flash_attention_{name}"
    with_operators(monkeypatch, **right | {wrong: text})
    assert not flash_operators()
    why = "torch 9.9 has no such operators as are called"
    assert attention_kernel(Plan(**PACKED), gpu(), "bf16") == ("flex", f"there is a GPU with Triton, and {why}")
    with pytest.raises(BadInput) as error:
        attention_kernel(Plan(**PACKED, attention="split"), gpu(), "bf16")
    assert str(error.value) == f"plan.attention split is flash attention on a GPU, and {why}; allowed: sdpa, flex"


# The choice

OLD = "a GPU has compute capability 7.5, and it needs 8.0"


@pytest.mark.parametrize(
    ("machine", "precision", "fields", "kernel", "why"),
    [
        (gpu(), "bf16", PACKED, "split", "rows are packed and there is flash attention"),
        (gpu((8, 0)), "bf16", PACKED, "split", "rows are packed and there is flash attention"),
        (gpu(triton=False), "bf16", PACKED, "split", "rows are packed and there is flash attention"),
        (gpu((7, 5)), "bf16", PACKED, "flex", f"there is a GPU with Triton, and {OLD}"),
        (gpu((7, 5), triton=False), "bf16", PACKED, "sdpa", f"without Triton only the dense mask is there, and {OLD}"),
        (gpu(), "float32", PACKED, "flex", "there is a GPU with Triton, and it has no float32"),
        (gpu(), "tf32", PACKED, "flex", "there is a GPU with Triton, and it has no tf32"),
        (
            gpu(),
            "bf16",
            {"share_images": True},
            "flex",
            "there is a GPU with Triton, and rows are not packed, which flash attention needs",
        ),
        (gpu((7, 5)), "bf16", {}, "sdpa", "each row is one question, which plain causal attention serves"),
        (CPU, "bf16", PACKED, "sdpa", "on a CPU a dense mask is the fastest"),
    ],
)
def test_what_auto_takes(machine: Machine, precision: str, fields: dict[str, Any], kernel: str, why: str) -> None:
    assert attention_kernel(Plan(**fields), machine, precision) == (kernel, why)


@pytest.mark.parametrize(
    ("machine", "precision", "fields", "said"),
    [
        (
            gpu((7, 5)),
            "bf16",
            PACKED | {"attention": "split"},
            f"plan.attention split is flash attention on a GPU, and {OLD}; allowed: sdpa, flex",
        ),
        (
            gpu(),
            "float32",
            PACKED | {"attention": "split"},
            "plan.attention split is flash attention on a GPU, and it has no float32; allowed: sdpa, flex",
        ),
        (
            gpu(),
            "bf16",
            {"attention": "split"},
            "plan.attention split is for packed rows: set plan.packing true, or attention sdpa or flex",
        ),
        (
            gpu(triton=False),
            "bf16",
            PACKED | {"attention": "flex"},
            "plan.attention flex needs Triton, which is not installed; allowed: auto, sdpa, split",
        ),
        (
            CPU,
            "bf16",
            PACKED | {"attention": "flex"},
            "plan.attention flex has no backward pass on a CPU; allowed there: auto, sdpa, split",
        ),
    ],
)
def test_what_is_asked_for_and_cannot_run(machine: Machine, precision: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        attention_kernel(Plan(**fields), machine, precision)
    assert str(error.value) == said


@pytest.mark.parametrize("kernel", ["sdpa", "flex", "split"])
def test_what_is_asked_for_and_can_run(kernel: str) -> None:
    machine = gpu((7, 5)) if kernel != "split" else gpu()
    assert attention_kernel(Plan(**PACKED, attention=kernel), machine, "bf16") == (kernel, "asked for")


def test_flex_has_no_narrow_heads() -> None:
    """As in a small model of one's own: torch compiles flex attention for heads of 16 or more."""

    def chosen(width: int, **fields: Any) -> tuple[str, str]:
        return attention_kernel(Plan(**PACKED, **fields), gpu(), "float32", lambda: Decoder(width=width))

    assert chosen(16)[0] == chosen(64)[0] == "flex"
    assert chosen(8) == ("sdpa", "flex attention needs heads of width 16 or more, not 8, and it has no float32")
    with pytest.raises(BadInput) as error:
        chosen(8, attention="flex")
    why = "plan.attention flex needs heads of width 16 or more, and this model's have 8"
    assert str(error.value) == f"{why}; allowed: auto, sdpa"
