"""Environment variables that people copy from one another, and whether anything that is installed knows their names."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sameday.spec.plan import NUMERIC_VARIABLES

PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "FLASH_",
    "XFORMERS_",
    "TOKENIZERS_",
    "TRANSFORMERS_",
    "HF_",
    "OMP_",
    "MKL_",
    "KMP_",
    "ACCELERATE_",
    "DNNL_",
    "ONEDNN_",
)
"""What the variables of libraries that a training run loads begin with."""
LONGEST = 40
"""Characters of a value that are shown."""
PACKAGES = (
    "torch",
    "triton",
    "nvidia",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "peft",
    "accelerate",
    "safetensors",
    "flash_attn",
    "xformers",
    "numpy",
)
DRIVERS = ("/usr/lib", "/usr/lib64", "/usr/local/cuda/lib64", "/usr/local/nvidia/lib64")


def of_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that look like a library's."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(PREFIXES)}


def judged(variables: Mapping[str, str], files: Iterable[Path]) -> list[str]:
    """A line for each: who knows it, or that nobody does. That a name is known does not say that it helps: `sameday
    tune` times those that may."""
    known = knowers(list(variables), files)
    found = []
    for name, value in variables.items():
        if name in NUMERIC_VARIABLES:
            said = "changes the numeric format, which is the recipe's: set recipe.precision instead"
        elif known[name]:
            more = f" and {len(known[name]) - 2} more" if len(known[name]) > 2 else ""
            said = f"known to {', '.join(known[name][:2])}{more}"
        else:
            said = "read by nothing: its name stands in no library that is installed here"
        shown = value if len(value) <= LONGEST else value[: LONGEST - 1] + "…"
        found.append(f"{name}={shown}: {said}")
    return found


def knowers(names: list[str], files: Iterable[Path]) -> dict[str, list[str]]:
    """By variable: files in which its name stands by itself."""
    found: dict[str, list[str]] = {name: [] for name in names}
    patterns = {name: re.compile(rb"(?<![A-Za-z0-9_])" + name.encode() + rb"(?![A-Za-z0-9_])") for name in names}
    for path in files if names else ():
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                for name, pattern in patterns.items():
                    # The plain search is many times faster, and mostly the last.
                    if text.find(name.encode()) >= 0 and pattern.search(text):
                        found[name].append(path.name)
        except (OSError, ValueError):  # empty, or not for us
            continue
    return {name: sorted(set(where), key=lambda each: (each.endswith(".py"), each)) for name, where in found.items()}


def installed_files() -> Iterator[Path]:
    """Libraries and sources of what a training run loads, and the driver's."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in map(Path, (spec.submodule_search_locations or []) if spec else []):
            for folder, _, names in os.walk(root):
                for name in names:
                    if name.endswith(".py") or ".so" in name:
                        yield Path(folder) / name
    for place in DRIVERS:
        for folder, _, names in os.walk(place):
            yield from (
                Path(folder) / name for name in names if re.match(r"lib(cuda|nccl|gomp|iomp5|cudnn)\b.*\.so", name)
            )
    yield Path(sys.executable).resolve()
