"""What a launcher says beside the trainer's own settings: processes, precision, accumulation, a file of DeepSpeed's.

Flags of `accelerate launch`, `torchrun` and `deepspeed` stand under `launch`. What accelerate's own config file says is
put beside them, as if it had been given as flags.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sameday.spec.convert.settings import Settings
from sameday.spec.document import Document, parsed
from sameday.spec.errors import BadInput
from sameday.spec.reading import read_spec

_FLAGS = ("num_processes", "num_machines", "mixed_precision", "gradient_accumulation_steps", "gradient_clipping")
_OF_DEEPSPEED = ("gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file")
READ = (
    *(*_FLAGS, *_OF_DEEPSPEED, "nproc_per_node", "num_gpus", "nnodes", "num_nodes", "include", "exclude"),
    "config_file",
)
"""Flags of a launcher that the model depends on."""
CONFIG = "launch.config_file"
_FOR_EACH, _DEVICES = ("llamafactory-cli", "lmf", "deepspeed"), "CUDA_VISIBLE_DEVICES"
_HOSTS = r"[^:@,]+:\d+(?:,\d+)*(?:@[^:@,]+:\d+(?:,\d+)*)*"


def add_launchers_file(document: Document, folder: Path) -> None:
    """As accelerate does it: a flag stands before the file. A file that is not found adds nothing (`told_by_file`)."""
    launch = document.values.get("launch")
    file = found(launch.get("config_file"), folder) if isinstance(launch, dict) else None
    if not isinstance(launch, dict) or file is None:
        return
    there = read_mapping(file)
    inner = there.get("deepspeed_config")
    more = {name: inner.get(name) for name in _OF_DEEPSPEED} if isinstance(inner, dict) else {}
    for name, value in {**{name: there.get(name) for name in _FLAGS}, **more}.items():
        if value is not None and name not in launch:
            launch[name] = value
            document.places["launch", name] = str(file)


def count_devices(work: Settings) -> None:
    """Makes a number of processes of the devices that are named: by `deepspeed --include host1:0,1@host2:0,1`, or by
    CUDA_VISIBLE_DEVICES where the command starts a process for each of them. Other commands may use them all too."""
    command = starts_for_each(work.command)
    key, value = work.old.get(_DEVICES, ("", None))
    count = devices(value)
    if count > 1 and "num_processes" not in work.old:
        if command:
            work.why["num_processes"] = f"{command} starts a process for each of the {count} devices in {key}"
            work.old["num_processes"] = (key, count)
            del work.old[_DEVICES]
        else:
            work.several = f"on several devices ({key} names {count})"
    key, value = work.old.get("num_processes", ("", None))
    if key == "launch.include" and re.fullmatch(_HOSTS, str(value)):
        work.old["num_processes"] = (key, len(re.findall(r"[:,]", str(value))))
    elif key in ("launch.include", "launch.exclude"):
        work.why["num_processes"] = f"how many devices --{key.removeprefix('launch.')} {value} leaves is not known"


def starts_for_each(command: str) -> str:
    """The command's program, where it starts a process for each visible device; empty for others."""
    program = Path((command or "-").split()[0]).name
    return program if program in _FOR_EACH else ""


def devices(visible: Any) -> int:
    """How many CUDA_VISIBLE_DEVICES names."""
    return len([each for each in str(visible).split(",") if re.fullmatch(r"\s*(?:\d+|(?:GPU|MIG)-\S+)\s*", each)])


def found(named: Any, folder: Path) -> Path | None:
    """A file beside the config, or where the command was typed."""
    if not isinstance(named, str):
        return None
    try:
        places = (folder / Path(named).expanduser(), Path(named).expanduser())
        return next((each for each in places if each.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or ~ of a user that there is not
        return None


def read_mapping(file: Path) -> dict[Any, Any]:
    """YAML or JSON whose top is a mapping."""
    try:
        _, values = parsed(read_spec(file).decode("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file}: must be a mapping of keys to values")
    return values


def told_by_file(work: Settings) -> None:
    """What became of accelerate's own config file."""
    named = work.leaves.get(CONFIG)
    if not isinstance(named, str):
        return
    if found(named, work.folder) is None:
        why = f"not found at {work.folder / named}: it may say how many processes there were, and their precision"
    else:
        why = "its number of processes, precision, accumulation and clipping are read"
    work.explain(CONFIG, why)
