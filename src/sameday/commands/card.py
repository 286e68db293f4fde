"""A model card written from a run's record: what was trained, how it scored, on what it ran, and how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sameday.evaluate.predictions import METRICS
from sameday.record.folder import RunFolder
from sameday.record.images import scored_on_trained, validated_on_trained
from sameday.record.judged import judged_plan, of_other_runs, unlike
from sameday.record.times import read_times
from sameday.spec.document import dump_yaml
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import clock
from sameday.tasks.registry import setup_of

SAME = ("bitwise", "rounding", "statistical")
"""Verdicts of `sameday verify` that say the same model."""
UNCHECKED = "that its weights are those of the training was not checked."
_HEADER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)


def split_readme(text: str) -> tuple[dict[str, Any], str]:
    """The header of a README as the Hub has it, and the rest."""
    match = _HEADER.match(text)
    if match is None:
        return {}, text
    header = yaml.safe_load(match[1])
    return (header if isinstance(header, dict) else {}), text[match.end() :].lstrip("\n")


def card(run: RunFolder, weights: Path, base: str | None, license: str | None, by_hand: bool = False) -> str:
    """In place of the README beside the weights, whose lines that load them it keeps. `base` is the base model's name
    on the Hub, None where nobody knows it; `by_hand`: the record has another one."""
    readme = weights / "README.md"
    header, body = split_readme(readme.read_text(encoding="utf-8") if readme.is_file() else f"# {run.recipe.name}\n")
    header.pop("base_model", None)
    named = {"base_model": base} if base else {}
    said = {"license": license} if license else {}
    header = {**named, **said, **header, "tags": ["sameday", *([run.recipe.result] if base else [])]}
    trained, data = setup_of(run.recipe, run.recipe_dir).words()
    if base and isinstance(run.recipe, VlmRecipe):
        trained = trained.replace(f"“{run.recipe.model}”", f"“{base}”", 1)
    sections = [
        f"---\n{yaml.safe_dump(header, sort_keys=False).strip()}\n---\n\n{body.rstrip()}",
        f"## What was trained\n\n{trained}\n\n{data}",
        f"The base model's name, `{base}`, was given with `--base`; {UNCHECKED}" if by_hand else "",
        _scores(run, weights),
        _record(run),
        f"## Recipe\n\n```yaml\n{dump_yaml(run.recipe).rstrip()}\n```",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def without_folders(run: RunFolder, text: str) -> str:
    """For others: of this machine's own paths only the last name."""
    for path in sorted((path for path in run.recipe.paths() if Path(path).is_absolute()), key=len, reverse=True):
        text = text.replace(path, Path(path).name)
    return text


def _scores(run: RunFolder, weights: Path) -> str:
    """Of these weights: those at the end of the run, or of the step of a checkpoint."""
    step = re.fullmatch(r"step-(\d+)", weights.name)
    rows: dict[str, Mapping[str, Any]] = {}
    odd = {"val": validated_on_trained(run.path)}
    if step is None:
        rows = {"validation": run.finished_scores() or {}}
        for path in sorted(run.path.glob("eval-*.json")):
            rows[split := path.stem.removeprefix("eval-")] = _read(path)
            odd[split] = scored_on_trained(path)
    else:
        records = [each for each in run.metrics if each.get("step") == int(step[1]) and "split" in each]
        rows = {str(each["split"]): {k: v for k, v in each.items() if k not in ("step", "split")} for each in records}
    start = f"{run.recipe.result if step is None else weights.name}-"
    for path in sorted((run.path / "answers").glob(f"{start}*/{METRICS}")):
        metrics = _read(path).get("metrics")
        scores = {name: each.get("value") for name, each in metrics.items()} if isinstance(metrics, dict) else {}
        rows[f"{path.parent.name.removeprefix(start)}, generated answers"] = scores
        split = path.parent.name.removeprefix(start).removesuffix("-cascade")
        odd[split] = scored_on_trained(path) or odd.get(split)
    lines = [
        f"| {where} | {name} | {value:.4g} |"
        for where, scores in rows.items()
        for name, value in scores.items()
        if isinstance(value, int | float)
    ]
    if not lines:
        return ""
    notes = [f"\n{found.sentence(_called(split))}." for split, found in odd.items() if found]
    return "\n".join(["## Scores\n", "| data | score | value |", "|---|---|---|", *lines, *notes])


def _called(split: str) -> str:
    return "validation" if split == "val" else split


def _record(run: RunFolder) -> str:
    environment = _read(run.path / "environment.json")
    versions = environment.get("versions")
    steps = [each for each in run.metrics if "split" not in each and isinstance(each.get("seconds"), int | float)]
    devices = sorted({str(each["device"]) for each in read_times(run.path) if each.get("device")})
    rows = {
        "recipe": run.recipe.fingerprint,
        "steps": len({each.get("step") for each in steps}),
        "time of the steps": clock(sum(each["seconds"] for each in steps)),
        "device": ", ".join(devices),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "",
        "the same model as another plan trains": "verified" if _verified(run) else "",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["## Record\n", "| | |", "|---|---|", *lines])


def _verified(run: RunFolder) -> bool:
    """Whether a verdict in the run is of its recipe, and of its own plan or the run itself."""
    verdict = _read(run.path / "verify.json")
    if verdict.get("recipe") != run.recipe.fingerprint or verdict.get("verdict") not in SAME:
        return False
    if isinstance(names := verdict.get("runs"), list):
        return not of_other_runs([str(name) for name in names], run.path)
    fields = verdict.get("fields")
    told = (
        {name: pair.get("plan") for name, pair in fields.items() if isinstance(pair, dict)}
        if isinstance(fields, dict)
        else {}
    )
    judged = judged_plan(str(verdict.get("against")), told)
    return bool(judged) and not unlike(run.plan, judged)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
