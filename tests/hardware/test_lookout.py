"""Where a thread was while something took too long."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch

from sameday.hardware import lookout, stalls
from sameday.hardware.lookout import BACKWARD, Lookout, place_of
from sameday.hardware.stalls import FEWEST, Stalls
from sameday.spec import words


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "EVERY", 0.01)


def linger(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_stall_says_where_the_host_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "WORTH", 0.05)
    looked = Stalls()
    for _ in range(FEWEST):
        assert looked.found(0.001, 0.0) is None
    linger(0.4)
    said = looked.found(0.4, 0.0)
    assert said is not None and said.endswith(f"; the host was in {__name__}.linger"), said
    time.sleep(0.4)
    assert "linger" not in (looked.found(0.4, 0.0) or ""), "that was before"


def test_nothing_is_looked_at_in_time() -> None:
    watched = Lookout()
    watched.expect(60.0)
    linger(0.1)
    assert watched.seen(0.0) is None
    watched.expect(0.0)
    linger(0.2)
    assert watched.seen(0.0) == f"{__name__}.linger"
    assert watched.seen(time.perf_counter()) is None


def test_it_ends_with_whoever_had_it() -> None:
    watched = Lookout()
    watched.expect(60.0)
    thread = watched._thread
    assert thread is not None and thread.is_alive() and thread.daemon
    del watched
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


class Slow(torch.autograd.Function):
    """A backward pass that waits to be looked at."""

    reached, seen = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Slow.reached.set()
        Slow.seen.wait(60)
        return 2 * grads[0]


def test_a_backward_pass_in_another_thread_is_found() -> None:
    """As a GPU has it. On a CPU it is the thread itself, here a second one, and what waits for it is in its stack."""
    x = torch.ones(2, requires_grad=True)
    other = threading.Thread(target=lambda: Slow.apply(x).sum().backward())
    other.start()
    assert Slow.reached.wait(60) and other.ident is not None
    frame: FrameType | None = sys._current_frames()[other.ident]
    waits = frame
    while waits is not None and waits.f_code.co_name != BACKWARD[1]:
        waits = waits.f_back
    assert frame is not None and waits is not None
    inner = "threading.wait"
    assert place_of({1: waits, 2: frame}, 1) == inner
    assert place_of({1: waits}, 1) == ".".join(BACKWARD), "it waits for kernels alone"
    Slow.seen.set()
    other.join(60)


def test_the_package_is_named_that_called_it() -> None:
    """A library's function is of no use to a reader who does not know what for."""
    frames: list[str] = []

    class Loud(str):
        def __format__(self, spec: str) -> str:
            frames.append(place_of(sys._current_frames(), threading.get_ident()))
            return str(self)

    words.count(2, Loud("size"))
    assert frames and frames[0] == f"{__name__}.__format__, called by sameday.spec.words.count"
    assert place_of({}, 1) == "nowhere"
