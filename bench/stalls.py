"""A whole run of `sameday train` from the command line, as `bench/real.py --run` starts it twice: what was compiled or
recorded before its first step, and which later steps took far longer than the others."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image
from rows import ROWS, WARM, data_of, recipe_of, samples_of

from sameday.profile.timeline import FAR
from sameday.record.folder import read_metrics
from sameday.record.times import read_times
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_STOPPED
from sameday.spec.load import recipe_from
from sameday.tasks.vqa.plain import conversation

SAID = ("compiled what", "recorded ", "went through what", "out of memory in the warm-up", "cuda_graphs: ")
"""How a run's lines about its warm-up, and about what is recorded in it, begin."""
EPOCHS = 3
"""Of a whole run."""


def whole_run(out: Path, args: Namespace) -> None:
    """First where nothing was compiled yet, then again."""
    tiny = args.size == "tiny"
    name = args.only[0] if len(args.only) == 1 else "mixture"
    row = ROWS[name]
    fields = recipe_of(out, data_of(out, name, row, tiny), row, tiny) | {"num_epochs": EPOCHS}
    (out / "recipe.yaml").write_text(dump_yaml(recipe_from(fields)))
    sets = [f"--set=plan.{each}" for each in args.plan] + (["--set=plan.device=cpu"] if tiny else [])
    compiled = out / f"compiled-{time.time():.0f}"
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"), "TRITON_CACHE_DIR": str(compiled / "triton")}
    for number in range(1, 3):
        run, began = out / f"run-{time.time():.0f}", time.perf_counter()
        command = [sys.executable, "-m", "sameday", "train", str(out / "recipe.yaml"), "--out", str(run), *sets]
        first = args.steps is not None and number == 1
        command += [f"--stop-after={args.steps}"] if first else []
        with (out / f"run-{number}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **caches}).returncode
        if code not in ((0, EXIT_STOPPED) if first else (0,)):
            raise SystemExit((out / f"run-{number}.log").read_text()[-3000:])
        steps = [each["seconds"] for each in read_metrics(run / "metrics.jsonl") if "split" not in each]
        took = time.perf_counter() - began
        pixels = pixels_of(out, fields)[: len(steps)]
        print(stalls(steps, pixels, read_times(run), f"{name}, run {number}: {took:.0f} s"), flush=True)
        if code == 0:
            print(f"    {by_epoch(steps, EPOCHS)}", flush=True)
        for line in (out / f"run-{number}.log").read_text().splitlines():
            if line.startswith(SAID) or " stalled: " in line:
                print(f"    {line}", flush=True)


def pixels_of(out: Path, fields: Mapping[str, Any]) -> list[int]:
    """Of the images of each step as the tower sees them, each counted once."""
    most = recipe_from(fields).max_pixels

    @cache
    def size(path: Path) -> int:
        with Image.open(path) as picture:
            return min(picture.width * picture.height, most)

    def paths(step: Sequence[Any]) -> set[Path]:
        return {Path(image) for sample in step for image in conversation(sample)["images"]}

    return [sum(map(size, paths(step))) for step in samples_of(out, fields)]


def by_epoch(steps: Sequence[float], epochs: int) -> str:
    """Images of an epoch may be there from the one before."""
    each = len(steps) // epochs
    sums = ", ".join(f"{sum(steps[epoch * each : (epoch + 1) * each]):.1f}" for epoch in range(epochs))
    return f"seconds of the {each} steps of each epoch: {sums}"


def stalls(steps: Sequence[float], pixels: Sequence[int], times: Sequence[dict[str, Any]], name: str) -> str:
    """A step with many large images may take long without having stalled: its pixels stand beside it, and it is said
    how many took long for their pixels."""
    usual, much = statistics.median(steps), statistics.median(pixels)
    late = [
        (number, each, seen / much)
        for number, (each, seen) in enumerate(zip(steps, pixels, strict=True), 1)
        if number > WARM and each > FAR * usual
    ]
    odd = sum(each > FAR * usual * max(1.0, more) for _, each, more in late)
    named = [f"{number} ({each:.1f} s, for {more:.1f} times the median's pixels)" for number, each, more in late]
    judged = f"{', '.join(named)}; {odd or 'none'} of them took more than {FAR:.0f} times the median for their pixels"
    first = max(0.0, sum(steps[:WARM]) - len(steps[:WARM]) * usual)
    looks = [each["seconds"] for each in times if each["what"] == "validate"]
    beyond = looks[0] - min(looks) if looks else 0.0
    before = sum(each.get("parts", {}).get("compile", 0.0) for each in times if each["what"] == "start")
    return (
        f"{name}, {before:.1f} s of warm-up, {len(steps)} steps of {usual:.3f} s; beyond that the first {WARM} took "
        f"{first:.1f} s and the first validation {beyond:.1f} s; later steps of more than {FAR:.0f} times the median: "
        f"{judged if late else 'none'}"
    )
