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
from torch.utils.checkpoint import checkpoint

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
    looked = Stalls(ahead=False)
    for _ in range(FEWEST):
        assert looked.found(0.001, 0.0) is None
    linger(0.4)
    said = looked.found(0.4, 0.0)
    assert said is not None and f"; the host was in {__name__}.linger (" in said, said
    linger(0.4)
    time.sleep(0.6)
    said = looked.found(0.3, 0.0)
    assert said is not None and "linger" not in said, "that was before"
    linger(0.4)
    looked.restart()
    assert "the host was" not in (looked.found(0.4, 0.0) or ""), "what was looked at belongs to no step"


def test_nothing_is_looked_at_in_time() -> None:
    watched = Lookout()
    watched.expect(60.0)
    linger(0.1)
    assert watched.seen(0.0) is None
    watched.expect(0.0)
    linger(0.2)
    assert (watched.seen(0.0) or "").startswith(f"{__name__}.linger (")
    assert watched.seen(time.perf_counter()) is None
    watched.expect(60.0)
    time.sleep(0.05)  # a look that was under way
    before = len(watched._seen)
    linger(0.1)
    assert len(watched._seen) == before
    watched.forget()
    linger(0.1)
    assert watched.seen(0.0) is None


def test_the_place_that_was_seen_most_often_is_told() -> None:
    watched = Lookout()
    watched._seen.extend([(1.0, "a"), (2.0, "b"), (3.0, "b"), (4.0, "c"), (5.0, "a"), (6.0, "b")])
    assert watched.seen(0.0) == "b (3 of 6 looks)"
    assert watched.seen(3.5) == "c (1 of 3 looks)" and watched.seen(6.0) == "b (1 of 1 look)"
    watched._seen.extend([(7.0, "c")] * 5000)
    assert len(watched._seen) == 1000


def test_one_thread_looks() -> None:
    watched, before = Lookout(), {*threading.enumerate()}
    for _ in range(3):
        watched.expect(60.0)
    assert {*threading.enumerate()} - before == {watched._thread}


def test_it_ends_with_whoever_had_it() -> None:
    watched = Lookout()
    watched.expect(60.0)
    thread = watched._thread
    assert thread is not None and thread.is_alive() and thread.daemon
    linger(0.1)  # it looks at it, and lets go of it
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


def test_so_is_a_layer_that_is_computed_again_there() -> None:
    x, places = torch.ones(2, requires_grad=True), list[str]()

    def layer(x: torch.Tensor) -> torch.Tensor:
        frame = sys._current_frames()[threading.get_ident()]
        waits: FrameType | None = frame
        while waits is not None and waits.f_code.co_name != BACKWARD[1]:
            waits = waits.f_back
        if waits is not None:
            places.append(place_of({1: waits, 2: frame}, 1))
        return x.sin()

    out = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert places == [f"{__name__}.layer"]


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
