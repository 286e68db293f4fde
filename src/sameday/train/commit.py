"""The end of a step: loss and gradient norm come from the device, and the weights change or do not."""

from __future__ import annotations

import math
import time

import torch

from sameday.hardware.phases import during
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, RunStopped
from sameday.train.optim import Gradients

AHEAD = {"cuda": 1}
"""Steps that are launched before the end of the one before is known; useless on a CPU, which runs synchronously."""


class DeviceTime:
    """A point in the device's stream of work, and when the device reached it."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._here = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: DeviceTime) -> float:
        """Seconds; both must be past."""
        if self._event is None or earlier._event is None:
            return self._here - earlier._here
        return float(earlier._event.elapsed_time(self._event)) / 1000


class PendingScalars:
    """Numbers on their way from the device. Reading them waits for nothing that was launched later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        if numbers.device.type == "cuda":
            here = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers = here.copy_(numbers, non_blocking=True)
        else:
            self._numbers = numbers
        self.time = DeviceTime(numbers.device)

    def read(self) -> list[float]:
        self.time.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


class StepCommit:
    """Clips the gradient and steps the optimizer, or leaves the weights alone: where a rank ran out of memory, gave the
    step up or failed in it, or loss or norm are not finite.

    A fused optimizer is told so on the device, without a synchronisation. `ahead` is how many more steps may be
    launched before the end of one is known: a GPU that has the next step before it is through with this one is never
    idle. After a bad step the weights stay as they were until `reset`, whatever has been launched."""

    def __init__(self, optimizer: torch.optim.Optimizer, gradients: Gradients, limit: float | None) -> None:
        self._optimizer, self._gradients, self._limit = optimizer, gradients, limit
        self._fused = bool(optimizer.defaults["fused"])
        self.ahead = AHEAD.get(gradients.buffer.device.type, 0) if self._fused else 0
        self.reset()

    def reset(self) -> None:
        """After a bad step: steps change the weights again from here on."""
        self._bad = torch.zeros((), device=self._gradients.buffer.device)

    def begin(self, rate: float) -> PendingScalars:
        """With the step's whole gradient in place. What it returns is for `finish`, in the order of steps."""
        gradients, optimizer = self._gradients, self._optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        with during("optimizer"):
            norm = gradients.norm()
            outcome = torch.cat([gradients.tail, norm[None]])
            scalars = PendingScalars(outcome)
            if self._fused:
                good = torch.isfinite(outcome).all() & (outcome[1] + outcome[3] + outcome[4] == 0)
                self._bad = torch.maximum(self._bad, (~good).float())
                optimizer.found_inf = self._bad  # type: ignore[attr-defined]
                gradients.clip(norm, self._limit)
                self._step()
        return scalars

    def finish(self, scalars: PendingScalars) -> list[float]:
        """Over all ranks: the step's loss, whether memory ran out, whether to stop, whether the step was given up,
        whether a rank failed, the sums of parts of the loss; and the norm of its gradient."""
        with during("check"):
            numbers = loss, out_of_memory, _, given_up, failed, *_parts, norm = scalars.read()
        whole = not (out_of_memory or given_up or failed) and math.isfinite(loss) and math.isfinite(norm)
        if not self._fused and whole:
            with during("optimizer"):
                self._gradients.clip(norm, self._limit)
                self._step()
        return numbers

    def _step(self) -> None:
        """The only call of an optimizer's step. Memory that runs out here leaves some weights changed and others not,
        so that nothing can be done again from what is in memory."""
        try:
            self._optimizer.step()
        except torch.OutOfMemoryError:
            raise RunStopped(
                "out of memory in the optimizer's update; run again to go on from the newest checkpoint, with plan."
                "optimizer_impl loop or fused, which need the least, or a smaller plan budget",
                EXIT_OUT_OF_MEMORY,
                alone=True,
            ) from None
