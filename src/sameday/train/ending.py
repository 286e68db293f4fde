"""The end of a step: its loss and the norm of its gradient become known, and the weights change or do not."""

from __future__ import annotations

import math
import time

import torch

from sameday.hardware.parts import during
from sameday.train.optim import Gradients

AHEAD = {"cuda": 1}
"""Steps that a device takes on before it is through with the one before; a CPU would only know of each later."""


class Moment:
    """A place in what the device does, and when it came to it."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._here = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds; both must be past."""
        if self._event is None or earlier._event is None:
            return self._here - earlier._here
        return float(earlier._event.elapsed_time(self._event)) / 1000


class Answer:
    """Numbers on their way from the device. Whoever reads them waits for nothing that was asked of it later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        if numbers.device.type == "cuda":
            here = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers = here.copy_(numbers, non_blocking=True)
        else:
            self._numbers = numbers
        self.moment = Moment(numbers.device)

    def read(self) -> list[float]:
        self.moment.wait()
        found: list[float] = self._numbers.tolist()
        return found


class Ending:
    """Ends one step after another. Where memory ran out on a rank, or loss or norm are not finite, nothing changes.

    A fused optimizer is told so on the device and waits for nobody. `ahead` is how many more steps may be begun before
    the end of one is known: a GPU that has the next step before it is through with this one is never idle. After a step
    that was not good the weights stay as they were until `again`, whatever has been begun."""

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: Gradients, limit: float | None) -> None:
        self._optimizer, self._gradients, self._limit = optimizer, gradients, limit
        self._fused = bool(optimizer.defaults["fused"])
        self.ahead = AHEAD.get(gradients.buffer.device.type, 0) if self._fused else 0
        self.again()

    def again(self) -> None:
        """What was wrong is mended: steps change the weights from here on."""
        self._bad = torch.zeros((), device=self._gradients.buffer.device)

    def begin(self, rate: float) -> Answer:
        """With the step's whole gradient in its place. The answer is for `finish`, in the order of steps."""
        gradients, optimizer = self._gradients, self._optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        with during("optimizer"):
            norm = gradients.norm()
            outcome = torch.cat([gradients.tail, norm[None]])
            answer = Answer(outcome)
            if self._fused:
                good = torch.isfinite(outcome).all() & (outcome[1] == 0)
                self._bad = torch.maximum(self._bad, (~good).float())
                optimizer.found_inf = self._bad  # type: ignore[attr-defined]
                gradients.clip(norm, self._limit)
                optimizer.step()
        return answer

    def finish(self, answer: Answer) -> list[float]:
        """Over all ranks: the step's loss, whether memory ran out, whether to stop; and the norm of its gradient."""
        with during("check"):
            found = loss, out_of_memory, _, norm = answer.read()
        if not self._fused and not out_of_memory and math.isfinite(loss) and math.isfinite(norm):
            with during("optimizer"):
                self._gradients.clip(norm, self._limit)
                self._optimizer.step()
        return found
