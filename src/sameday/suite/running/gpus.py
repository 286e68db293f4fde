"""The GPUs of this machine, as far as CUDA_VISIBLE_DEVICES lets them be seen. Asked of the driver, without torch."""

from __future__ import annotations

import os


def count_gpus() -> int:
    there = len(_all())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([each for each in visible.split(",") if each.strip()]))


def gpu_names() -> set[str]:
    """As torch calls them; empty where no GPU is seen."""
    return set(_all()) if count_gpus() else set()


def _all() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    except Exception:  # no library, no driver, no GPU
        return []
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]
