"""When a step is called a stall, and what is said to be its cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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
    stalls = Stalls(ahead=False)
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
    unknown = "stalled: 5.0 s, usual before it 0.200 s; not for compiling, input or short memory"
    assert (stalls.found(5.0, 1.0) or "").startswith(unknown)
    assert stalls.found(0.9, 0.0) is None, "less than a second more"


Use = Callable[[int, int, int], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Says what the process has used by now."""
    used = [Used(5, 0, 0)]
    monkeypatch.setattr(Used, "now", lambda: used[-1])
    return lambda *numbers: used.append(Used(*numbers))


def after_usual_steps(ahead: bool) -> Stalls:
    stalls = Stalls(ahead)
    assert all(stalls.found(0.1, 0.0) is None for _ in range(FEWEST))
    return stalls


def test_a_cause_that_came_ahead_of_its_step_is_told(use: Use) -> None:
    """A step is launched before the last one is known; what was told is not told again."""
    stalls = after_usual_steps(ahead=True)
    use(6, 0, 0)
    assert stalls.found(0.1, 0.0) is None, "the step after it has waited for a graph"
    assert "compiled" in (stalls.found(9.0, 0.0) or "")
    assert "not for compiling" in (stalls.found(9.0, 0.0) or "")
    use(6, 1, 0)
    assert stalls.found(0.1, 0.0) is None and stalls.found(0.1, 0.0) is None
    assert "short memory" in (stalls.found(9.0, 0.0) or ""), "too long ago"
    use(6, 2, 0)
    assert "memory ran short" in (stalls.found(9.0, 0.0) or "")
    use(7, 2, 0)
    assert "compiled" in (stalls.found(9.0, 0.0) or "") and stalls.found(0.1, 0.0) is None
    assert "not for compiling" in (stalls.found(9.0, 0.0) or "")
    use(8, 2, 0)
    stalls.restart()
    assert "not for compiling" in (stalls.found(9.0, 0.0) or ""), "a validation's"


def test_where_nothing_is_launched_ahead_a_cause_is_of_its_step(use: Use) -> None:
    stalls = after_usual_steps(ahead=False)
    use(6, 0, 0)
    assert stalls.found(0.1, 0.0) is None
    assert "not for compiling" in (stalls.found(9.0, 0.0) or "")
    use(7, 0, 0)
    assert "compiled" in (stalls.found(9.0, 0.0) or "")


def test_what_it_took_is_told_in_the_order_of_what_can_be_changed() -> None:
    calm = Used(0, 0, 0)
    memory = "the GPU's memory ran short, and what was kept of it was given back: smaller micro-batches help"
    assert calm._replace(retries=2).why(10.0, 1.0) == memory
    assert calm._replace(retries=2, graphs=1).why(10.0, 1.0).startswith("layers were compiled")
    assert calm._replace(graphs=1).why(10.0, 9.0) == "9.0 s of it waiting for input", "which is of this step itself"
    assert calm._replace(retries=2).why(10.0, 9.0) == "9.0 s of it waiting for input"
    assert calm._replace(pages=7).why(10.0, 1.0).endswith("; 7 of this process's pages were read from a disk")
    assert Used(3, 2, 9).since(Used(1, 2, 4)) == Used(2, 0, 5)


def test_short_memory_is_counted_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pretended GPU; one that runs short of memory takes minutes to bring about."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 4, "num_ooms": 1})
    assert Used.now().retries == 4


def test_a_gpu_that_is_hidden_since_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: pytest.fail("which torch answers with an error"))
    assert Used.now().retries == 0
