"""What is compiled ahead is what a step launches: the same kernels, for the same constants and kinds of arguments."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import recordings
import torch
import worlds
from torch import Tensor

from sameday.hardware.ranks import Ranks
from sameday.kernels import ahead
from sameday.kernels.ahead import AttentionLaunch, compile_together
from sameday.kernels.grid import on_grid
from sameday.spec.plan import Plan
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.vqa.warm import _trained, _validated, chosen, launches, warm_up_batches

pytest.importorskip("triton")
from compiled_ahead import KERNELS

from sameday.kernels import fused_attention_triton, lora_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OPEN = {*fused_attention_triton.COUNTS, *lora_triton.ANY_SIZE}
"""Numbers that nothing is compiled for."""


class Watched:
    """A kernel whose launches are noted as Triton tells them apart. What a kernel computes does not matter here, and
    the interpreter would take minutes for it."""

    def __init__(self, name: str, kernel: Any, seen: set[Any]) -> None:
        self.name, self.kernel, self.seen = name, kernel, seen
        self.arguments = list(inspect.signature(kernel.fn).parameters)

    def run(self, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kinds = [kind(value) for name, value in zip(self.arguments, given, strict=False) if name not in OPEN]
        self.seen.add((self.name, tuple(kinds), tuple(sorted(named.items()))))
        return self.kernel.run(*given, grid=grid, warmup=warmup, **named) if CUDA else None


def kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int | float):
        return type(value), isinstance(value, int) and (value == 1, value % 16 == 0)
    return value.base.dtype, tuple(value.block_shape)


@contextmanager
def noted() -> Iterator[set[Any]]:
    seen: set[Any] = set()
    with ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                there = getattr(module, name)
                stack.enter_context(patch.object(module, name, Watched(name, there, seen)))
        yield seen


@pytest.fixture(scope="module")
def task(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> VqaTask:
    """Whose rows have forks, branches of images and questions alone, and adapters of two groups."""
    home = worlds.write_world(tmp_path_factory.mktemp("ahead"), 4, (6, 1, 4, 6), hard=False, sizes=recordings.SIZES)
    plan = recordings.PLAN | {"attention": "fused", "lora_kernel": "triton", "pad_to_multiple": 32, "token_budget": 80}
    kind = {"precision": "bf16"} if CUDA else {}
    return worlds.make_task(home, worlds.tiny_recipe(tiny_qwen3, **recordings.LONG | kind), Plan(**plan), DEVICE)


@pytest.mark.slow
def test_steps_launch_nothing_else(task: VqaTask) -> None:
    steps = range(4)
    met = chosen(task, [*_trained(task, steps, None, Ranks()), *_validated(task, None, Ranks())])
    assert len({each.kind(task).calls for each in met}) > 1 and {each.training for each in met} == {True, False}
    given = dict.fromkeys(launch for each in met for launch in launches(task, each.kind(task)))
    with noted() as there:
        for launch in given:
            launch(task.device)
    with noted() as launched:
        for _ in recordings.computed(task, steps):
            pass
        for each in met:
            if not each.training:
                with torch.no_grad():
                    task.score(each.batch(task).make().to(task.device))
    assert {name for name, *_ in launched} == {name for names in KERNELS.values() for name in names}
    assert not launched - there
    missing = {launch for launch in given if not isinstance(launch, AttentionLaunch)}
    with noted() as fewer:
        for launch in missing:
            launch(task.device)
    assert launched - fewer, "what is not asked for is missed"


@pytest.mark.skipif(not CUDA, reason="needs a GPU: a CPU compiles no kernel")
def test_a_step_compiles_none_of_them(task: VqaTask) -> None:
    """By Triton's own count, and none of them twice."""
    device = torch.cuda.current_device()

    def compiled() -> int:
        kernels = [getattr(module, name) for module, names in KERNELS.items() for name in names]
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels)

    launched = [launch for each in warm_up_batches(task, range(4), None, Ranks()) for launch in each.launches]
    for threads in (4, 1):
        compile_together(launched, task.device, threads)
        before = compiled()
        assert before > 9
    for _ in recordings.computed(task, range(4)):
        pass
    assert compiled() == before


@pytest.mark.slow
def test_kernels_are_compiled_once_by_several_threads() -> None:
    """By Triton's own compiler, which needs no GPU. In a process that has no interpreter."""
    script = Path(__file__).with_name("compiled_ahead.py")
    free = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script), "90"], env=free, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    first, again = json.loads(done.stdout)
    assert first == again and set(first) == {name for names in KERNELS.values() for name in names}
    assert all(first.values()) and first["up"] == 3, "one for each adapter of the group"


def test_on_a_cpu_nothing_is_asked_for(task: VqaTask) -> None:
    if CUDA:
        pytest.skip("is about a CPU")
    assert not any(each.launches for each in warm_up_batches(task, range(4), None, Ranks()))


class Kernel:
    """As Triton has them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def run(self, *given: Any, **named: Any) -> None:
        self.asked.append({"given": given, **named})


def test_nothing_is_launched_and_what_fails_is_left_for_whoever_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "interpreted", lambda: False)
    kernel, done = Kernel(), list[str]()

    def broken(_device: torch.device) -> None:
        done.append("broken")
        raise RuntimeError("no such kernel")

    def good(_device: torch.device) -> None:
        assert not torch.is_grad_enabled()
        done.append("good")
        on_grid(kernel, 2, 3)(5, SIZE=7)

    compile_together([broken, good, good], torch.device(DEVICE), 2)
    on_grid(kernel, 4)(6)
    assert done == ["broken", "good"], "equal ones once"
    assert kernel.asked == [
        {"given": (5,), "grid": (2, 3), "warmup": True, "SIZE": 7},
        {"given": (6,), "grid": (4,), "warmup": False},
    ]
