"""Which variables that a script gives to its trainer are settings: those that the trainer or its launcher reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sameday.spec.convert.conversion import Note
from sameday.spec.convert.shell.command_line import read_value
from sameday.spec.convert.shell.script import Script
from sameday.spec.convert.trainers.trainer import Trainer

_PROCESSES = ("NPROC_PER_NODE", "NNODES")
_BY_ALL = ("ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES")
_READ = {
    "swift": (*_PROCESSES, "IMAGE_FACTOR", "SIZE_FACTOR", "MAX_RATIO", "ROOT_IMAGE_DIR", "QWENVL_BBOX_FORMAT"),
    "llamafactory": (*_PROCESSES, "FORCE_TORCHRUN", "USE_MCA", "USE_V1"),
}
"""By trainer, besides those in its own tables."""
_OF_TORCHRUN = {"PET_NPROC_PER_NODE": "nproc_per_node", "PET_NNODES": "nnodes"}
"""It takes them where the flag is not given."""
_NAMED = 12


def take_environment(script: Script, trainer: Trainer, drop: Sequence[str]) -> None:
    """Puts the settings among them into the document. All others are the script's own, or the machine's: one note
    names them, without their values. Those that --drop names are kept, so that it finds them."""
    document, kept, others = script.document, {}, []
    for name, (value, place) in script.environment.items():
        if re.search(r"\btorch(?:run|\.distributed)\b", script.command) and (flag := _OF_TORCHRUN.get(name)):
            launch = document.values.setdefault("launch", {})
            if flag not in launch:
                launch[flag] = read_value(value, f"{place}: {name}")
                document.places["launch", flag] = place
        elif name in drop or _is_read(name, trainer):
            kept[name] = read_value(value, f"{place}: {name}")
            document.places[(name,)] = place
        else:
            others.append(name)
    document.values = {**kept, **document.values}
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        why = f"the script's own or the machine's; no setting is known that {trainer.name} reads from them"
        said = f"{', '.join(others[:_NAMED])}{more}: {why}"
        script.notes.append(Note(f"({len(others)} variable{'s' * (len(others) > 1)})", None, None, said))


def _is_read(name: str, trainer: Trainer) -> bool:
    tables = (trainer.aliases, trainer.neutral, trainer.dropped, trainer.handled, _READ.get(trainer.short, ()), _BY_ALL)
    return name.isupper() and any(name in table for table in tables)
