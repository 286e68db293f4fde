"""What NVIDIA's management library tells of a GPU while it works: how much it is used, its clock, power and heat."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from sameday.spec.words import tell


def open_gpu(device: torch.device) -> tuple[Any, Any]:
    """The library and its handle of a GPU. Raises whatever it raises."""
    import pynvml

    pynvml.nvmlInit()
    # By its own name: NVML's numbers are not CUDA's where CUDA_VISIBLE_DEVICES is set.
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    pynvml.nvmlDeviceGetUtilizationRates(handle)
    return pynvml, handle


def gpu_use(device: torch.device) -> Callable[[], int | None]:
    """The GPU's use in percent, looked at once a second at most; None where there is none."""
    if device.type != "cuda":
        return lambda: None
    try:
        nvml, handle = open_gpu(device)
    except Exception as error:  # a missing driver library must not end a training run
        tell(f"GPU use is not shown: {error}")
        return lambda: None
    last = {"at": 0.0, "use": 0.0}

    def use() -> int:
        if time.monotonic() - last["at"] > 1:
            last.update(at=time.monotonic(), use=nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return int(last["use"])

    return use


class Watched:
    """Looks at a GPU several times a second while something runs."""

    EVERY = 0.2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seen: dict[str, list[float]] = {}
        self._most = 0.0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watched:
        if self.device.type == "cuda":
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        try:
            nvml, handle = open_gpu(self.device)
            self._most = float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
            while not self._done.wait(self.EVERY):
                for name, value in (
                    ("use_percent", nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                    ("clock_mhz", nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                    ("power_watts", nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
                    ("celsius", nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                ):
                    self._seen.setdefault(name, []).append(float(value))
        except Exception:  # not every GPU tells everything, and nothing depends on it
            return

    def medians(self) -> dict[str, float]:
        """Medians, and the highest clock that the GPU has; empty where nothing was told."""
        medians = {name: statistics.median(values) for name, values in self._seen.items()}
        return {**medians, "highest_clock_mhz": self._most} if medians else {}
