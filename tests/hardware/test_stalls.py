"""When a step is called a stall, and what is said to be its cause."""

from __future__ import annotations

import time

import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.compiling import graphs
from sameday.hardware.stalls import FEWEST, TIMES, WINDOW, WORTH, Stalls, Used, usual_before_stall

SECONDS = st.floats(0.001, 100)


@given(st.lists(SECONDS, max_size=FEWEST - 1), SECONDS)
def test_first_steps_are_no_stalls(recent: list[float], seconds: float) -> None:
    assert usual_before_stall(recent, seconds) is None


@given(st.lists(SECONDS, min_size=FEWEST, max_size=2 * WINDOW), SECONDS)
def test_a_stall_is_much_longer_than_half_of_the_steps_before_it(recent: list[float], seconds: float) -> None:
    usual = usual_before_stall(recent, seconds)
    shorter = [each for each in recent[-WINDOW:] if TIMES * each < seconds and each + WORTH < seconds]
    assert (usual is None) or (2 * len(shorter) >= len(recent[-WINDOW:]) and seconds > usual)
    if len(shorter) == len(recent[-WINDOW:]):
        assert usual is not None, "longer than all of them by far"


@given(st.lists(SECONDS, min_size=FEWEST, max_size=WINDOW), SECONDS, st.floats(1, 100))
def test_what_takes_longer_is_a_stall_all_the_more(recent: list[float], seconds: float, more: float) -> None:
    if usual_before_stall(recent, seconds) is not None:
        assert usual_before_stall(recent, seconds + more) is not None


@torch._dynamo.config.patch(automatic_dynamic_shapes=False)
def test_its_cause_is_told() -> None:
    """Graphs are counted by torch itself, here for a function that is really compiled."""
    torch.compiler.reset()
    twice = torch.compile(lambda x: 2 * x, backend="eager")
    twice(torch.ones(2))
    stalls = Stalls()
    for _ in range(FEWEST):
        twice(torch.ones(2))
        assert stalls.found(0.2, 0.01) is None
    before = graphs().made
    twice(torch.ones(3))
    assert graphs().made == before + 1
    assert stalls.found(18.0, 0.0) == (
        "stalled: 18.0 s, usual before it 0.200 s; layers were compiled for a shape that had not come before"
    )
    assert stalls.found(5.0, 4.7) == "stalled: 5.0 s, usual before it 0.200 s; 4.7 s of it waiting for input"
    said = stalls.found(5.0, 1.0)
    assert said is not None and said.startswith(
        "stalled: 5.0 s, usual before it 0.200 s; neither compiling nor input; this process computed for 0.0 s of it"
    )
    assert said.endswith(", else it waited for the GPU or the system")
    assert stalls.found(0.9, 0.0) is None, "less than a second more"


def test_what_this_process_computed_itself_is_told() -> None:
    stalls = Stalls(fewest=1)
    stalls.found(0.01, 0.0)
    began, before = time.perf_counter(), time.process_time()
    while time.process_time() < before + 1.5:
        sum(range(10_000))
    said = stalls.found(max(1.6, time.perf_counter() - began), 0.0)
    assert said is not None and "; neither compiling nor input; this process computed on the CPU for 1." in said


def test_what_it_took_is_told_in_the_order_of_what_can_be_changed() -> None:
    calm = Used(0, 0, 0, 0.1)
    memory = "the GPU's memory ran short, and what was kept of it was given back: smaller micro-batches help"
    assert calm._replace(retries=2).why(10.0, 1.0) == memory
    assert calm._replace(retries=2, graphs=1).why(10.0, 9.0).startswith("layers were compiled")
    assert calm._replace(retries=2).why(10.0, 9.0) == "9.0 s of it waiting for input"
    assert ", and 7 of its pages were read from a disk, else it waited" in calm._replace(pages=7).why(10.0, 1.0)
    later = Used(3, 2, 9, 4.0)
    assert later.since(Used(1, 2, 4, 1.5)) == Used(2, 0, 5, 2.5)
