"""The last leg of the input: the same micro-batches in the same order, nothing left behind, and every second counted.

A device that is no CPU looks ahead. Where there is no GPU, torch's `meta` stands for one: nothing is computed here."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sameday.data import feed as module
from sameday.data.feed import Feed
from sameday.data.loader import stream
from sameday.data.times import Times
from sameday.kernels.split import Segments

CPU, OTHER = torch.device("cpu"), torch.device("meta")
SIZES = (2, 1, 0, 3, 1)
"""How many micro-batches each step has. A rank may have none of a step."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@dataclass(frozen=True, eq=False)
class Made:
    """Named by its step and its number in it."""

    name: tuple[int, int]
    times: Times = field(default_factory=Times)
    on: str = "host"

    def to(self, device: torch.device, non_blocking: bool = False) -> Made:
        return replace(self, on=device.type)


def build(step: int) -> Iterator[Made]:
    """Seconds that are sums of powers of two, so that they add up exactly."""
    for number in range(SIZES[step]):
        yield Made((step, number), Times(0.5 + step, 0.25 * number, 2.0**-step))


def feed_of(device: torch.device, workers: int = 0, build: Any = build, steps: Sequence[int] = range(5)) -> Feed:
    return Feed(stream(steps, build, workers=workers, prefetch=2, pin_memory=False), device, pinned=False)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("device", [CPU, OTHER])
@pytest.mark.parametrize("looks", [0, 1, 2])
def test_order_is_kept_and_stages_add_up(device: torch.device, workers: int, looks: int) -> None:
    with closing(feed_of(device, workers)) as feed:
        for step, batches in enumerate(feed):
            found = list(batches)
            for _ in range(looks):
                feed.look_ahead()
            assert [batch.name for batch in found] == [(step, number) for number in range(SIZES[step])]
            assert all(batch.on == device.type for batch in found)
            sums = [sum(batch.times[stage] for batch in found) for stage in range(3)]
            taken = feed.taken()
            assert taken.pop("wait") > 0
            assert taken == {name: value for name, value in zip(Times._fields, sums, strict=True) if value}
        assert step == len(SIZES) - 1
        assert feed.taken().keys() == {"wait"}
        feed.look_ahead()
        assert next(feed, None) is None


class Clock:
    """Stands still unless something is planted that takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def build(self, step: int) -> Iterator[Made]:
        self.now += 8  # before any micro-batch is made, and for a step that has none too
        return self._slowly(step)

    def _slowly(self, step: int) -> Iterator[Made]:
        for batch in build(step):
            self.now += 1
            yield batch


def test_waiting_is_what_building_takes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    waits = []
    for batches in (feed := feed_of(CPU, build=clock.build)):
        for _ in batches:
            clock.now += 100  # what is computed is not waited for
        clock.now += 1000
        feed.look_ahead()
        waits.append(feed.taken()["wait"])
    assert waits == [8 + size for size in SIZES]
    assert feed.taken() == {"wait": 0.0}


def test_what_is_built_ahead_is_waited_for_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are told with the step that it is for."""
    clock = Clock(monkeypatch)
    waits, reads = [], []
    for batches in (feed := feed_of(OTHER, build=clock.build)):
        list(batches)
        feed.look_ahead()
        taken = feed.taken()
        waits.append(taken["wait"])
        reads.append(taken.get("read", 0.0))
    assert waits == [8 + 2 + (8 + 1), 0 + (8 + 0), 0 + (8 + 1), 2 + (8 + 1), 0]
    assert reads == [size * (0.5 + step) for step, size in enumerate(SIZES)]


def test_looking_ahead_builds_one_micro_batch_once_a_step_is_given_out() -> None:
    built: list[tuple[int, int]] = []

    def noted(step: int) -> Iterator[Made]:
        for batch in build(step):
            built.append(batch.name)
            yield batch

    feed = feed_of(OTHER, build=noted, steps=(3, 0, 1))
    feed.look_ahead()  # before the first step nothing is computed that would hide it
    batches = next(feed)
    next(batches)
    feed.look_ahead()  # a step that is given up here must not find more in its way
    assert built == [(3, 0)]
    assert len(list(batches)) == 2
    for _ in range(3):
        feed.look_ahead()
    assert built == [(3, 0), (3, 1), (3, 2), (0, 0)]
    batches = next(feed)
    feed.look_ahead()
    assert next(batches).name == built[-1] == (0, 0)


def test_a_cpu_builds_what_is_asked_for_and_no_more() -> None:
    built: list[tuple[int, int]] = []

    def noted(step: int) -> Iterator[Made]:
        for batch in build(step):
            built.append(batch.name)
            yield batch

    feed = feed_of(CPU, build=noted, steps=(0, 1))
    batches = next(feed)
    assert built == []
    for number, _ in enumerate(batches):
        assert built == [(0, i) for i in range(number + 1)]
    feed.look_ahead()
    assert built == [(0, 0), (0, 1)]


def test_the_rest_of_a_step_can_be_passed_over() -> None:
    feed = feed_of(OTHER)
    assert next(next(feed)).name == (0, 0)
    assert [batch.name for batch in next(feed)] == [(1, 0)]


def test_a_failure_met_ahead_waits_for_its_step() -> None:
    """The step before it is good, and may be due for saving."""

    def broken(step: int) -> Iterator[Made]:
        if step == 1:
            raise ValueError("image 7 has changed")
        yield from build(step)

    feed = feed_of(OTHER, build=broken)
    assert len(list(next(feed))) == 2
    feed.look_ahead()
    with pytest.raises(ValueError, match="image 7 has changed"):
        list(next(feed))


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_early_ends_workers_and_lets_go_of_what_was_fetched(workers: int) -> None:
    before = set(multiprocessing.active_children())
    feed = feed_of(OTHER, workers)
    list(next(feed))
    feed.look_ahead()
    assert len(set(multiprocessing.active_children()) - before) == workers
    held = weakref.ref(ahead_of(feed))
    feed.close()
    gc.collect()
    assert held() is None
    assert set(multiprocessing.active_children()) <= before
    feed.look_ahead()
    assert next(feed, None) is None


def ahead_of(feed: Feed) -> Made:
    assert isinstance(feed._ahead, module._Step) and feed._ahead.first is not None
    made: Made = feed._ahead.first.batch
    return made


def test_the_first_micro_batch_is_not_held_to_the_end_of_its_step() -> None:
    feed = feed_of(OTHER, steps=(0, 3))
    list(next(feed))
    feed.look_ahead()
    held = weakref.ref(ahead_of(feed))
    batches = next(feed)
    assert [next(batches).name, next(batches).name] == [(3, 0), (3, 1)]
    gc.collect()
    assert held() is None


# The side stream


class Noted(Tensor):
    """As if it were on a GPU: keeps the streams that its memory is held for."""

    is_cuda = True

    def record_stream(self, stream: Any) -> None:
        self.held_for = [*getattr(self, "held_for", []), str(stream)]


@dataclass(frozen=True, eq=False)
class Logged:
    """Says where it is copied. One that is `short` finds no room on the side stream."""

    number: int
    log: list[str]
    streams: list[str]
    short: bool = False
    whole: Tensor = field(default_factory=lambda: torch.zeros(1).as_subclass(Noted))
    pieces: Segments = field(default_factory=lambda: Segments(*(torch.zeros(1).as_subclass(Noted) for _ in range(4))))

    def to(self, device: torch.device, non_blocking: bool = False) -> Logged:
        assert device.type == "cuda" and non_blocking
        if self.short and self.streams[-1] == "side":
            self.log.append(f"no room for {self.number}")
            raise torch.OutOfMemoryError("planted")
        self.log.append(f"copy {self.number} on {self.streams[-1]}")
        return self


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[str]]]:
    """Streams that only write down what is asked of them, and the stack of those that are current."""
    log, current = list[str](), ["compute"]

    class Stream:
        def __str__(self) -> str:
            return current[-1]

        def record_event(self) -> str:
            return log[-1]

        def wait_event(self, event: str) -> None:
            log.append(f"compute waits for: {event}")

    @contextmanager
    def on_side(_stream: Stream) -> Iterator[None]:
        current.append("side")
        try:
            yield
        finally:
            current.pop()

    module._side_stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", on_side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    yield log, current
    module._side_stream.cache_clear()


def test_copies_are_made_on_the_side_and_waited_for(streams: tuple[list[str], list[str]]) -> None:
    log, current = streams
    steps = ([Logged(n, log, current, short=n == 1) for n in numbers] for numbers in ([0, 1], [2]))
    feed = Feed(steps, torch.device("cuda"), pinned=True)
    for batches in feed:
        for batch in batches:
            log.append(f"compute {batch.number}")
            # What the side stream had no part in needs no holding.
            held_for = None if batch.short else ["compute"]
            assert all(getattr(x, "held_for", None) == held_for for x in (batch.whole, *batch.pieces))
        feed.look_ahead()
        log.append("the step's end")
    assert log == [
        *("copy 0 on side", "compute waits for: copy 0 on side", "compute 0"),
        *("no room for 1", "copy 1 on compute", "compute 1"),
        "copy 2 on side",  # ahead: before the host waits for the device
        "the step's end",
        *("compute waits for: copy 2 on side", "compute 2"),
        "the step's end",
    ]


@dataclass(frozen=True, eq=False)
class Slow:
    """A micro-batch whose copy is late: the stream that it is made on sleeps first."""

    values: Tensor
    parts: Segments
    cycles: int = 0

    def to(self, device: torch.device, non_blocking: bool = False) -> Slow:
        torch.cuda._sleep(self.cycles)
        return Slow(self.values.to(device, non_blocking=non_blocking), self.parts.to(device, non_blocking))

    def pin_memory(self) -> Slow:
        return Slow(self.values.pin_memory(), self.parts.pin_memory(), self.cycles)


def slow(number: int, cycles: int) -> Slow:
    """A few MiB that are all `number`."""
    each = torch.full((2**20,), number)
    return Slow(each, Segments(each, each + 1, each + 2, each[:6]), cycles)


@needs_gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_late_copy_is_waited_for_on_the_gpu(workers: int) -> None:
    device, found = torch.device("cuda"), list[Tensor]()
    made = stream(range(6), lambda n: [slow(n, 20_000_000)], workers=workers, prefetch=2, pin_memory=True)
    with closing(Feed(made, device, pinned=True)) as feed:
        for batches in feed:
            for batch in batches:
                parts = [batch.values, *batch.parts[:3]]
                assert all(part.is_cuda for part in parts) and not batch.parts.at.is_cuda
                found.append(torch.stack([part.float().mean() for part in parts]))
            feed.look_ahead()
    assert torch.stack(found).tolist() == [[n, n, n + 1, n + 2] for n in range(6)]


@needs_gpu
def test_memory_is_not_written_before_it_was_read_on_the_gpu() -> None:
    """Each micro-batch is let go of while the GPU has yet to read it, and the next one is of the same size."""
    device, found = torch.device("cuda"), list[Tensor]()
    made = stream(range(6), lambda n: [slow(n, 0)], workers=0, prefetch=2, pin_memory=True)
    with closing(Feed(made, device, pinned=True)) as feed:
        for batches in feed:
            for batch in batches:
                torch.cuda._sleep(200_000_000)
                found.append(torch.stack([batch.values.float().mean(), batch.parts.cu_keys.float().mean()]))
                del batch
            feed.look_ahead()
    assert torch.stack(found).tolist() == [[n, n + 2] for n in range(6)]


@needs_gpu
def test_a_copy_is_made_while_the_gpu_computes() -> None:
    """The compute stream sleeps; what was fetched ahead has arrived before it wakes."""
    device = torch.device("cuda")
    made = stream(range(2), lambda n: [slow(n, 0)], workers=0, prefetch=2, pin_memory=True)
    with closing(Feed(made, device, pinned=True)) as feed:
        list(next(feed))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        asleep = torch.cuda.current_stream(device).record_event()
        feed.look_ahead()
        assert isinstance(feed._ahead, module._Step) and feed._ahead.first is not None
        arrives = feed._ahead.first.arrives
        assert arrives is not None
        arrives.synchronize()
        assert not asleep.query(), "the copy waited for what was being computed"
