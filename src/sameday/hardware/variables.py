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
LETTER = re.compile(rb"[A-Za-z0-9_]")
SECRET = re.compile(r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD|CREDENTIAL")
"""Names whose values are shown to nobody."""
JOINED = ("ONEDNN_", "DNNL_")
"""oneDNN puts these and the rest of a name together when it runs: the name stands nowhere, and a compiler may leave the
beginning nowhere either."""
ONEDNN = b"ONEDNN_VERBOSE"
"""Stands in its messages, by which a file that has it is known."""
CONTAINER = re.compile(r"NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|DISABLE_REQUIRE|REQUIRE_\w+)")
"""What is read before anything in the container runs."""
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
    return [f"{name}={_shown(name, value)}: {_judgement(name, known[name])}" for name, value in variables.items()]


def _judgement(name: str, known: list[str]) -> str:
    if name in NUMERIC_VARIABLES:
        return "changes the numeric format, which is the recipe's: set recipe.precision instead"
    if known:
        more = f" and {len(known) - 2} more" if len(known) > 2 else ""
        return f"known to {', '.join(known[:2])}{more}"
    if CONTAINER.fullmatch(name):
        return "read by the container runtime, when the container starts"
    return "its name is in no library that is installed here, so nothing here reads it"


def _shown(name: str, value: str) -> str:
    if SECRET.search(name):
        return "(hidden)"
    return value if len(value) <= LONGEST else value[: LONGEST - 1] + "…"


def knowers(names: list[str], files: Iterable[Path]) -> dict[str, list[str]]:
    """By variable: files in which its name stands by itself, or that join it."""
    matches: dict[str, list[str]] = {name: [] for name in names}
    wanted = {name: _spellings(name) for name in names}
    for path in files if names else ():
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                for name, spellings in wanted.items():
                    if any(all(_stands(word, text) for word in words) for words in spellings):
                        matches[name].append(path.name)
        except (OSError, ValueError):  # empty, or not for us
            continue
    return {name: sorted(set(where), key=lambda each: (each.endswith(".py"), each)) for name, where in matches.items()}


def _spellings(name: str) -> list[list[bytes]]:
    """Words of which all must stand in a file: the name, or what it is joined from."""
    joined = [[ONEDNN, name.removeprefix(prefix).encode()] for prefix in JOINED if name.startswith(prefix)]
    return [[name.encode()], *joined]


def _stands(word: bytes, text: mmap.mmap) -> bool:
    """By itself, as part of no longer name. A regular expression takes many times as long."""
    at = text.find(word)
    while at >= 0:
        if not LETTER.match(text[at - 1 : at]) and not LETTER.match(text[at + len(word) : at + len(word) + 1]):
            return True
        at = text.find(word, at + 1)
    return False


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
