"""What became of a Trainer-style config: its recipe and plan as files, and every key with where it went."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sameday.spec.convert.keys import PATHS
from sameday.spec.convert.trainers.trainer import PLAIN, Trainer
from sameday.spec.dataset import QuestionSet
from sameday.spec.document import dump_yaml
from sameday.spec.errors import BadInput
from sameday.spec.load import resolve_path
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe
from sameday.spec.writing import folder_on_trial, write_text

Questions = TypeVar("Questions", bound=QuestionSet)
UNSAID = (
    "No config says what the old program does in its own code: look there for a prompt around the question, labels "
    "that are masked otherwise, and a base model loaded in 4 bits (BitsAndBytesConfig)."
)


@dataclass(frozen=True)
class Note:
    """What became of one key. `went_to` is the new field, or None where the key was dropped."""

    key: str
    went_to: str | None
    value: Any
    why: str
    became: Any = None


@dataclass(frozen=True)
class Conversion:
    """The recipe and the plan, with paths as the old file had them, relative to `config_dir`."""

    recipe: VqaRecipe
    plan: Plan
    notes: list[Note]
    config_dir: Path
    trainer: Trainer = PLAIN
    told_by: str = ""

    @property
    def recognised(self) -> str:
        lines = [f"read as a config of {self.trainer.name}, by {self.told_by} (--from says otherwise)"]
        return "\n".join([*lines, *self.trainer.remarks])


def write(conversion: Conversion, out_dir: Path) -> tuple[Path, Path]:
    """Write recipe.yaml and plan.yaml. Relative paths are rewritten to name the same files from there."""
    base, target = os.path.realpath(conversion.config_dir), os.path.realpath(out_dir)

    def moved(value: str) -> str:
        if Path(value).expanduser().is_absolute():
            return value
        return Path(os.path.relpath(os.path.join(base, value), target)).as_posix()

    def with_paths(data: Questions) -> Questions:
        paths = {name: moved(value) for name, value in data if f"data.{name}" in PATHS and value}
        return data.model_copy(update=paths)

    recipe = conversion.recipe
    if base != target:
        data = with_paths(recipe.data)
        data = data.model_copy(update={"mix": tuple(map(with_paths, data.mix))})
        changed: dict[str, Any] = {"data": data}
        if recipe.start_adapter:
            changed["start_adapter"] = moved(recipe.start_adapter)
        if resolve_path(conversion.config_dir, recipe.model).is_dir():
            changed["model"] = moved(recipe.model)
        recipe = recipe.model_copy(update=changed)
    specs = {out_dir / "recipe.yaml": dump_yaml(recipe), out_dir / "plan.yaml": dump_yaml(conversion.plan)}
    for path, text in specs.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise BadInput(f"{path}: already there, with other contents; choose another -o")
    new = [path for path in specs if not path.exists()]
    with folder_on_trial(out_dir):  # a folder that is made stays only with both of them
        try:
            for path, text in specs.items():
                write_text(path, text)
        except OSError:
            for path in new:
                path.unlink(missing_ok=True)
            raise
    return out_dir / "recipe.yaml", out_dir / "plan.yaml"


def render(notes: Sequence[Note]) -> str:
    """One line per key: what it was and what it became; then, with their count, those that were dropped, and why."""
    rows = []
    for note in sorted(notes, key=lambda note: note.went_to is None):
        left = note.key if note.key.startswith("(") else f"{note.key} = {show(note.value)}"
        if note.went_to is None:
            rows.append((left, f"dropped: {note.why}"))
        else:
            rows.append((left, f"{note.went_to} = {show(note.became)}" + (f"  ({note.why})" if note.why else "")))
    width = max((len(left) for left, _ in rows), default=0)
    lines = [f"{left:<{width}}  ->  {right}" for left, right in rows]
    dropped = sum(note.went_to is None for note in notes)
    if dropped:
        lines.insert(len(lines) - dropped, f"\n{dropped} {'key' if dropped == 1 else 'keys'} dropped:")
    return "\n".join([*lines, "", UNSAID])


def show(value: Any) -> str:
    """On one line, cut where it is long; an empty text in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
    text = repr(text) if not text.isprintable() or not text else text
    return text if len(text) <= 80 else f"{text[:77]}..."
