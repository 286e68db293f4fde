"""When a run saves, validates and stops: a pure function of the step. And the signal that asks it to."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.hardware.signals import ASKING, StopRequest, orderly_end
from sameday.spec.errors import EXIT_STOPPED, RunStopped
from sameday.train.cadence import Cadence, Due, Every

EVERY = st.one_of(st.none(), st.just("epoch"), st.integers(1, 40))


@st.composite
def cadences(
    draw: st.DrawFn, save: st.SearchStrategy[Every] = EVERY, validate: st.SearchStrategy[Every] = EVERY
) -> Cadence:
    """A run may end within an epoch, and be told to stop after its end."""
    total = draw(st.integers(1, 120))
    stop_after = draw(st.none() | st.integers(1, 140))
    return Cadence(total, draw(st.integers(1, 50)), draw(save), draw(validate), stop_after)


def steps(cadence: Cadence) -> range:
    return range(1, cadence.total + 1)


def saved(cadence: Cadence) -> set[int]:
    return {done for done in steps(cadence) if cadence.due(done).save}


def validated(cadence: Cadence) -> set[int]:
    return {done for done in steps(cadence) if cadence.due(done).validate}


@given(cadences())
def test_the_last_step_is_saved_and_validated(cadence: Cadence) -> None:
    last = cadence.due(cadence.total)
    assert last.save and last.validate and any(last)


@given(cadences(save=st.just("epoch"), validate=st.just("epoch")))
def test_the_end_of_each_epoch(cadence: Cadence) -> None:
    ends = set(range(cadence.per_epoch, cadence.total + 1, cadence.per_epoch))
    assert saved(cadence) == validated(cadence) == ends | {cadence.total}


@given(st.integers(1, 120), st.sets(st.integers(1, 150)))
def test_epochs_of_different_lengths(total: int, ends: set[int]) -> None:
    cadence = Cadence(total, ends, "epoch", "epoch")
    assert saved(cadence) == validated(cadence) == {end for end in ends if end <= total} | {total}


@given(cadences(save=st.just("epoch"), validate=st.just("epoch")))
def test_a_number_of_steps_or_the_ends_of_epochs(cadence: Cadence) -> None:
    assert isinstance(cadence.per_epoch, int)
    ends = range(0, cadence.total + 1, cadence.per_epoch)
    assert saved(Cadence(cadence.total, ends, "epoch", "epoch")) == saved(cadence)


@given(st.data(), st.integers(1, 40), st.integers(1, 40))
def test_every_so_many_steps_whatever_the_epochs_are(data: st.DataObject, save: int, validate: int) -> None:
    cadence = data.draw(cadences(save=st.just(save), validate=st.just(validate)))
    assert saved(cadence) == {done for done in steps(cadence) if done % save == 0} | {cadence.total}
    assert validated(cadence) == {done for done in steps(cadence) if done % validate == 0} | {cadence.total}


@given(cadences(save=st.none(), validate=st.none()))
def test_none_is_never_but_at_the_end(cadence: Cadence) -> None:
    assert saved(cadence) == validated(cadence) == {cadence.total}


@given(cadences(), EVERY)
def test_one_does_not_depend_on_the_other(cadence: Cadence, other: Every) -> None:
    beside = Cadence(cadence.total, cadence.per_epoch, cadence.save, other, None)
    assert saved(beside) == saved(cadence)
    beside = Cadence(cadence.total, cadence.per_epoch, other, cadence.validate, None)
    assert validated(beside) == validated(cadence)


@given(cadences())
def test_a_run_stops_from_the_step_on_that_was_named(cadence: Cadence) -> None:
    """A step that was passed while nothing could be saved is no reason to go on for ever."""
    stops = {done for done in steps(cadence) if cadence.due(done).stop}
    if cadence.stop_after is None:
        assert not stops
    else:
        assert stops == set(range(cadence.stop_after, cadence.total + 1))


@given(cadences(), st.integers(1, 120))
def test_it_is_a_function_of_the_step_alone(cadence: Cadence, done: int) -> None:
    """A resumed run does what the uninterrupted one does: nothing is remembered of the steps before."""
    before = cadence.due(done)
    for other in steps(cadence):
        cadence.due(other)
    assert cadence.due(done) == before == Cadence(**vars(cadence)).due(done)


@given(st.booleans(), st.booleans(), st.booleans())
def test_whatever_is_due_is_waited_for(save: bool, validate: bool, stop: bool) -> None:
    assert any(Due(save, validate, stop)) == (save or validate or stop)


# The signal


@pytest.mark.parametrize("number", ASKING)
@pytest.mark.usefixtures("own_signals")
def test_a_signal_is_a_wish(number: signal.Signals) -> None:
    """Also in what listens inside of another."""
    with StopRequest(), StopRequest() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked


NEW = [number for number in ASKING if number.name in ("SIGHUP", "SIGUSR2", "SIGXCPU")]


@pytest.mark.parametrize("number", NEW)
@pytest.mark.usefixtures("own_signals")
def test_what_would_end_nothing_is_left_alone(number: signal.Signals) -> None:
    """What was ignored at the start, as SIGHUP under `nohup`, and what the program that calls has a use for."""
    heard = list[int]()
    for handler in (signal.SIG_IGN, lambda *_: heard.append(1)):
        signal.signal(number, handler)
        with StopRequest() as stop, orderly_end():
            os.kill(os.getpid(), number)
            assert not stop.asked and signal.getsignal(number) is handler
    assert heard == [1]


@pytest.mark.usefixtures("own_signals")
def test_a_rank_of_torchrun_hears_of_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under `nohup`: torchrun passes the signal on, and kills ranks that do not leave."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.asked
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [number for number in ASKING if number != signal.SIGINT])
@pytest.mark.usefixtures("own_signals")
def test_an_orderly_end_has_the_code_of_its_signal(number: signal.Signals) -> None:
    """And clears up undisturbed."""
    with pytest.raises(SystemExit) as left, orderly_end():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
    assert left.value.code == 128 + number


@pytest.mark.usefixtures("own_signals")
def test_a_second_interrupt_is_at_once_and_no_other_signal_is() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("own_signals")
def test_handlers_are_given_back_unless_the_run_was_stopped() -> None:
    """A run on its way out must not be met by a second signal, which would change the code that it leaves with."""
    before = [signal.getsignal(number) for number in ASKING]
    with StopRequest():
        assert [signal.getsignal(number) for number in ASKING] != before
    assert [signal.getsignal(number) for number in ASKING] == before
    with pytest.raises(ValueError, match="planted"), StopRequest():
        raise ValueError("planted")
    assert [signal.getsignal(number) for number in ASKING] == before
    with pytest.raises(RunStopped), StopRequest() as stop:
        raise RunStopped("asked to", EXIT_STOPPED)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.asked
