"""What a person sees while a run goes on: one live line on a terminal, one plain line per log interval elsewhere,
the same numbers in metrics.jsonl, TensorBoard and where the plan says so a tracker."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sameday.hardware.machine import detect_machine
from sameday.hardware.nvml import gpu_use
from sameday.hardware.phases import silence
from sameday.hardware.stalls import Stalls
from sameday.record.board import Board
from sameday.record.folder import RunFolder
from sameday.record.times import What, note, process_age
from sameday.record.track import Tracker
from sameday.spec.words import clock, first_names, tell, visible
from sameday.train.spikes import WINDOW, usual_before_spike
from sameday.train.steps import Good

WORTH_SAYING = 0.02
"""The share of the time spent waiting for input from which on the line tells it."""


class Watch:
    """Only the first rank has a run folder to write to and a line to show."""

    _before = 0.0
    """How old the process was when a run in it ended: one process trains several stages."""

    def __init__(
        self,
        run: RunFolder | None,
        total: int,
        log_steps: int,
        device: torch.device,
        names: Callable[[int], Sequence[str]] = lambda _step: (),
        track: str = "none",
    ) -> None:
        """`names` are the samples of a step, as a user can find them; `track` is a tracker that gets the numbers."""
        self.run, self.total, self.log_steps, self._names = run, total, log_steps, names
        self._losses: list[float] | None = None  # of the latest steps
        self._stalls = Stalls(ahead=device.type == "cuda")
        self.live: Any = None
        self.board: Board | None = None
        self.tracker = Tracker(track, run, self.say) if run is not None and track != "none" else None
        self.gpu = gpu_use(device)
        self.device_name = detect_machine(device.type).name
        self._recent: list[tuple[float, int, float]] = []  # (seconds, samples, wait) of the latest steps
        if run is not None and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(transient=True, refresh_per_second=4)
            self.live.start()

    def step(self, good: Good) -> None:
        if self.run is None:
            return
        step = good.step + 1  # done
        self._recent = [*self._recent, (good.seconds, good.samples, good.input.get("wait", 0.0))][-50:]
        spent, seen, waited = (sum(column) for column in zip(*self._recent, strict=True))
        pace = spent / len(self._recent)
        use = self.gpu()
        gpu = "" if use is None else f"  gpu {use}%"
        wait = f"  wait {waited / spent:.0%}" if waited >= WORTH_SAYING * spent else ""
        own = ", ".join(f"{part} {rate:.2e}" for part, rate in good.own_rates.items())
        rate = f"lr {good.rate:.2e} ({own})" if own else f"lr {good.rate:.2e}"
        line = (
            f"step {step}/{self.total}  loss {good.loss:.4f}  {rate}  {pace:.3f} s/step  "
            f"{seen / spent:.1f} samples/s{gpu}{wait}  left {clock(pace * (self.total - step))}"
        )
        if self.live is not None:
            self.live.update(line)
        due = step % self.log_steps == 0 or step == self.total
        if self.live is None and due:
            tell(line)
        rates = {"lr": good.rate, **{f"lr_{part}": rate for part, rate in good.own_rates.items()}}
        numbers = {**good.parts, **rates, "grad_norm": good.norm, **good.input}
        timed: dict[str, Any] = {} if good.phases is None else {"phases": good.phases}
        if use is not None:
            timed["gpu"] = use
        record = {"step": step, "loss": good.loss, "seconds": good.seconds, "samples": good.samples, **numbers}
        self.run.append({**record, **timed, **self._spike(good)})
        if (how := self._stalls.found(good.seconds, good.input.get("wait", 0.0))) is not None:
            self.say(f"step {step}/{self.total}  {how}")
            note(self.run.path, "stall", good.seconds, step=step)
        if due:
            self._open_board(step)
            phases = {f"phases/{name}": seconds for name, seconds in (good.phases or {}).items()}
            self._chart("train", {"loss": good.loss, "samples_per_second": seen / spent, **numbers, **phases}, step)

    def _spike(self, good: Good) -> dict[str, Any]:
        """Says and records a loss far above those before it, with the samples of its step."""
        assert self.run is not None
        if self._losses is None:  # a resumed run goes on as if it had not been stopped
            found = [record.get("loss") for record in self.run.metrics if "split" not in record]
            self._losses = [loss for loss in found if isinstance(loss, float)]
        usual = usual_before_spike(self._losses, good.loss)
        self._losses = [*self._losses, good.loss][-WINDOW:]
        if usual is None:
            return {}
        names = list(self._names(good.step))
        at = f", in the step of {first_names(names)}" if names else ""
        self.say(f"step {good.step + 1}/{self.total}  loss spike: {good.loss:.4f}, usual before it {usual:.4f}{at}")
        return {"spike": {"usual": usual, "samples": names}}

    def evaluation(self, step: int, split: str, scores: dict[str, float]) -> None:
        if self.run is None or not scores:
            return
        self.say(
            f"step {step}/{self.total}  {split} loss {scores['loss']:.4f}  "
            + "  ".join(f"{k} {v:.4g}" for k, v in scores.items() if k not in ("loss", "samples"))
        )
        self.run.append({"step": step, "split": split, **scores})
        self._open_board(step + 1)
        self._chart(split, scores, step)

    def starts(self, step: int, ranks: int) -> None:
        """The first step of this process is next. The charts' library may take its time to load, and does it before."""
        if self.run is not None:
            self._open_board(step + 1)
            about = {"step": step, "total": self.total, "ranks": ranks, "device": self.device_name}
            note(self.run.path, "start", process_age() - Watch._before, **about, parts=dict(self.run.spent))

    @contextmanager
    def timed(self, what: What, step: int, done: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Notes what took so long, where it was `done`."""
        began = time.perf_counter()
        yield
        self._stalls.restart()
        if self.run is not None and done():
            note(self.run.path, what, time.perf_counter() - began, step=step)

    def _open_board(self, step: int) -> None:
        if self.board is None and self.run is not None:
            self.board = Board(self.run.path, step)

    def _chart(self, group: str, values: dict[str, Any], step: int) -> None:
        assert self.board is not None
        self.board.add(group, values, step)
        if self.tracker is not None:
            self.tracker.log({f"{group}/{name}": value for name, value in values.items()}, step)

    def say(self, text: str) -> None:
        if self.run is None:
            return
        if self.live is not None:
            self.live.console.print(visible(text), highlight=False, markup=False)
        else:
            tell(text)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_exception: object) -> None:
        Watch._before = process_age()
        silence()  # a step that failed is timed no further
        if self.tracker is not None:
            self.tracker.close()
        if self.live is not None:
            self.live.stop()
        if self.board is not None:
            self.board.close()
