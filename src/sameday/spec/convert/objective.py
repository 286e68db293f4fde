"""Whether the command of a script trains by answers, as a recipe does, or by something else: preferences, rewards."""

from __future__ import annotations

import re
from pathlib import Path

from sameday.spec.document import Document
from sameday.spec.errors import BadInput

_REWARDS = "trains by preferences or rewards"
_WORDS = ("dpo", "grpo", "kto", "orpo", "simpo", "cpo", "ppo", "rloo", "bco", "xpo", "nash", "prm", "reward", "rlhf")
_DISTILLS = dict.fromkeys(("gkd", "minillm"), "learns from another model (distillation)")
_OTHERS = {**dict.fromkeys(_WORDS, _REWARDS), **_DISTILLS}
_PRETRAINS = {"pt": "learns all tokens and has no chat template"}
_STAGES = {**dict.fromkeys(("rm", "ppo", "dpo", "kto"), _REWARDS), **_PRETRAINS}
"""LLaMA-Factory's words, and what its key `stage` asks for by them."""
_PROGRAMS = {"swift": "swift", "swift.cli": "swift", "megatron": "megatron", "trl": "trl"}
"""What the subcommands belong to: `swift rlhf`, `swift/cli/rlhf.py`, `python -m swift.cli.rlhf`."""


def refuse_other_objectives(path: Path, command: str) -> None:
    """BadInput where a subcommand, or the name of a program of one's own, says it."""
    words = command.split()
    for before, word in zip(["", *words], words, strict=False):
        program, asked = _subcommand(before, word)
        why = {**_OTHERS, **_PRETRAINS}.get(asked.removesuffix("_vlm")) if program else None
        if program and (why or asked.startswith("nash")):
            said = f"{program} {asked} {why or _REWARDS}"
            raise BadInput(f"{path}: {said}; a recipe learns answers that are given (allowed: {program} sft)")
        parts = set(re.split(r"[^a-z0-9]+", Path(word).stem.lower())) if word.endswith(".py") else set()
        method = next((each for each in _OTHERS if each in parts), None)
        if method and "sft" not in parts:
            raise BadInput(
                f"{path}: {Path(word).name} by its name {_OTHERS[method]} ({method}); a recipe learns answers that are "
                "given (allowed: a program of supervised fine-tuning)"
            )


def refuse_other_stages(document: Document) -> None:
    """BadInput where a config says it."""
    asked = document.values.get("stage")
    if isinstance(asked, str) and asked in _STAGES:
        place = document.place(("stage",))
        raise BadInput(
            f"{place}: stage {asked} {_STAGES[asked]}; a recipe learns answers that are given (allowed: sft)"
        )


def _subcommand(before: str, word: str) -> tuple[str, str]:
    """The program that people know and what it is asked for; empty where it is neither."""
    if Path(before).name in _PROGRAMS:
        return _PROGRAMS[Path(before).name], word
    *folders, last = word.removesuffix(".py").replace("/", ".").split(".")
    if folders[-2:] in (["swift", "cli"], ["trl", "scripts"]):
        return folders[-2], last
    return ("megatron", last) if folders[-3:] == ["swift", "cli", "_megatron"] else ("", "")
