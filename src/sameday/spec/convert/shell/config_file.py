"""A command that reads its settings from a config file: which file is to be converted, and what has to be put into it,
because the command, its launcher or its variables say it beside the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sameday.spec.convert.launching import READ, devices, found, starts_for_each
from sameday.spec.convert.objective import refuse_other_stages
from sameday.spec.convert.shell.environment import take_environment
from sameday.spec.convert.shell.script import Script
from sameday.spec.convert.shell.variables import shown
from sameday.spec.convert.trainers.registry import recognise
from sameday.spec.convert.trainers.trainer import Trainer
from sameday.spec.document import read_document
from sameday.spec.errors import BadInput

_PROCESSES = ("NPROC_PER_NODE", "launch.nproc_per_node", "launch.num_processes", "launch.num_gpus", "launch.include")


def refuse_config_file(path: Path, script: Script, trainer: str | None) -> None:
    """BadInput for such a command, and at once where the file asks for another kind of training."""
    line = script.by_file
    if line is None:
        return
    if (file := found(line.config, path.parent)) is not None:
        refuse_other_stages(read_document(file))
    try:
        whose, _ = recognise((each.key[-1] for each in line.flags), script.command, trainer)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    changes, beside = line.changes(), _beside(script, whose)
    said = f" what stands on its command line: {', '.join(changes)}" if changes else ""
    said += " and" if changes and beside else ""
    said += f" what its launcher and its variables say: {', '.join(beside)}" if beside else ""
    put = f", after putting into it{said}" if said else ""
    at = script.written.get(Path(line.config))
    there = f", whose text stands behind line {at} of this script" if at is not None else ""
    raise BadInput(f"{path}:{line.line}: starts a training by {line.config}: convert that file{there}{put}")


def _beside(script: Script, trainer: Trainer) -> Sequence[str]:
    """As keys of the config file. A variable that changes nothing is left out."""
    assert script.by_file is not None
    take_environment(script, trainer, ())
    values = {name: str(value) for name, value in script.document.values.items() if name != "launch"}
    values |= {f"launch.{name}": str(value) for name, value in script.document.values.get("launch", {}).items()}
    for flag in script.by_file.flags:
        if flag.launching and flag.key[-1] in READ:
            values[".".join(flag.key)] = " ".join(map(shown, flag.values)) or "true"
    visible, command = values.pop("CUDA_VISIBLE_DEVICES", ""), starts_for_each(script.command)
    if (count := devices(visible)) > 1 and not values.keys() & {*_PROCESSES}:
        name = "num_processes" if command else "CUDA_VISIBLE_DEVICES"
        values[name] = f"{count} ({command} starts one for each device in CUDA_VISIBLE_DEVICES)" if command else visible
    kept = {name: value for name, value in values.items() if name not in trainer.dropped}
    launch = ", ".join(f"{name[7:]}: {value}" for name, value in kept.items() if name.startswith("launch."))
    own = [f"{name}: {value}" for name, value in kept.items() if not name.startswith("launch.")]
    return [*own, *([f"launch: {{{launch}}}"] if launch else [])]
