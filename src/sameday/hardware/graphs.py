"""Kernels recorded as CUDA graphs: launching thousands of them one by one takes the host longer than they run.

What is recorded reads its input from tensors that stay where they are, and depends on nothing else that changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sameday.hardware.signals import unbroken

Run = Callable[[], tuple[Tensor, ...]]
"""Computes a loss, and whatever else it gives, from tensors that stay where they are."""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, memory: GraphMemory | None) -> Iterator[None]:
    """Unlike torch's own context it leaves the memory that waits to be used again where it is. Other threads may go on
    preparing batches. It is short, and no signal breaks it off."""
    pool = None if memory is None else memory.pool
    aside = _aside(torch.cuda.current_device())
    aside.wait_stream(torch.cuda.current_stream())
    with unbroken(), torch.cuda.stream(aside):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # the first error says what went wrong
                _leave(graph, memory, pool)
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(aside)


_broken: list[torch.cuda.CUDAGraph] = []


def _leave(graph: torch.cuda.CUDAGraph, memory: GraphMemory | None, pool: Any) -> None:
    """What torch leaves out where a recording broke and cannot be ended: its random numbers would wait for it for ever,
    and so would memory. Pinned memory of the host does: nothing in Python ends that, so torch takes the pool for one
    that is being recorded to, and goes on asking the graph whether it is."""
    _broken.append(graph)
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    if memory is not None:
        memory.renew()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
        try:
            graph.pool()  # is known of one that was ended, which gives its memory back by itself
        except RuntimeError:
            torch._C._cuda_releasePool(device, pool)


@cache
def _aside(device: int) -> torch.cuda.Stream:
    """Always the same one: memory that a graph leaves is taken again on its own stream alone."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.enable_grad():
        # What cuBLAS keeps for a stream, for this thread and for autograd's, must not be of a recording's memory.
        for dtype in (torch.float32, torch.bfloat16):
            some = torch.ones(16, 16, device=f"cuda:{device}", dtype=dtype, requires_grad=True)
            torch.autograd.grad((some @ some).sum(), some)
    return stream


class GraphMemory:
    """Memory for graphs that are never under way at the same time: each takes what the ones before it left, which is
    enough for it where the largest came first."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """What is recorded from now on takes other memory; what was recorded keeps its own."""
        self._keeper: torch.cuda.CUDAGraph | None = None

    @property
    def pool(self) -> Any:
        if self._keeper is None:
            # The pool lives as long as a graph of it does.
            keeper = torch.cuda.CUDAGraph()
            with recording(keeper, None):
                torch.zeros(1, device="cuda")
            self._keeper = keeper
        return self._keeper.pool()


@cache
def shared_memory(device: int) -> GraphMemory:
    """That of a device which is kept to the end of the process."""
    return GraphMemory()


class Inputs:
    """Tensors of a fixed size and place, into which those of each turn are copied. Where `rooms` has a larger one for a
    tensor, its first rows are the place."""

    def __init__(self, given: Sequence[Tensor], rooms: Mapping[int, Tensor] | None = None) -> None:
        rooms = rooms or {}
        self.tensors = [
            rooms[number][: len(each)]
            if number in rooms
            else torch.empty(each.shape, dtype=each.dtype, device=each.device)
            for number, each in enumerate(given)
        ]
        self.fill(given)

    def fill(self, given: Sequence[Tensor]) -> None:
        for mine, new in zip(self.tensors, given, strict=True):
            assert mine.shape == new.shape, (mine.shape, new.shape)
            mine.copy_(new, non_blocking=True)


class NotRecorded(Exception):
    """Kernels that can be launched and not recorded, for another reason than memory."""


class Launched:
    """A forward and a backward pass as they are, behind the face of recorded ones."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> tuple[Tensor, ...]:
        """The loss, whose `backward` adds to the gradients, and the rest without a gradient."""
        loss, *rest = self._run()
        held = [loss]
        return deferred(loss, lambda grad: torch.autograd.backward(held.pop(), grad)), *(x.detach() for x in rest)


class Recorded:
    """The same as two graphs. Gradients are added to tensors that are there already and stay there. `known`: the same
    kernels were recorded before, for other sizes, and are not launched for nothing first, unless that is missed."""

    def __init__(self, run: Run, trained: Sequence[Tensor], memory: GraphMemory, known: bool = False) -> None:
        for warm in (False, True) if known else (True,):
            if warm:
                _warm_up(run, trained)
            try:
                self._given = self._record(run, memory, warm)
                return
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = str(error).partition("\n")[0]  # the error itself holds what was computed
        raise NotRecorded(why)

    def _record(self, run: Run, memory: GraphMemory, warm: bool) -> list[Tensor]:
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _uncollected():
            if warm:
                # What the warm-up took waits to be used again, and a recording cannot take it: it would be held twice.
                torch.cuda.empty_cache()
            return self._passes(run, memory)

    def _passes(self, run: Run, memory: GraphMemory) -> list[Tensor]:
        with recording(self._forward, memory):
            loss, *rest = run()
        self._scale = torch.ones_like(loss)
        with recording(self._backward, memory):
            torch.autograd.backward(loss, self._scale)
        return [each.detach() for each in (loss, *rest)]

    def __call__(self) -> tuple[Tensor, ...]:
        self._forward.replay()
        loss, *rest = self._given
        # Copied: the next turn's numbers come to the same place.
        return deferred(loss, self._turn_back), *(each.clone() for each in rest)

    def _turn_back(self, grad: Tensor) -> None:
        self._scale.copy_(grad)
        self._backward.replay()


@contextmanager
def _uncollected() -> Iterator[None]:
    """What nobody refers to any more goes before: of a micro-batch's autograd graph it would draw another stream into
    the recording, and an old recording that goes meanwhile would end it."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _warm_up(run: Run, trained: Sequence[Tensor]) -> None:
    """Once as it is, for nothing: what is compiled, tuned or allocated at a first use must not be in a recording."""
    loss, *_ = run()
    torch.autograd.grad(loss, list(trained), allow_unused=True)


def deferred(loss: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
    """A copy of a loss that holds no autograd graph: its backward pass calls `backward`. Whoever keeps the loss of a
    micro-batch would else keep the nodes that add to the gradients, and these draw their stream into a recording, which
    ends it."""
    trigger = torch.zeros((), device=loss.device, requires_grad=True)
    value: Tensor = _Deferred.apply(trigger, loss.detach(), backward)
    return value


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, loss: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.turn_back = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.turn_back(grad)
        return None, None, None
