"""A set of the size of Kvasir-VQA as the hub stores it, read, checked and trained from: seconds and peak memory.

    python bench/data.py [--rows 60000] [--images 6500] [--steps 20] [--keep DIR]

Rows are parquet with the image's bytes in each; images are drawn, 64×48, so that they are made in seconds. Reading and
checking is done twice, in a process each: as a first command does it, which unpacks and decodes, and as all later ones.
Then a tiny model is trained for some steps by `sameday train`. Peak memory is the largest sum over a process and all
that it started, every 50 ms: PSS, in which what processes share counts once, and RSS, in which it counts in each.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ASKED = ("is there a polyp", "how many polyps are there", "what colour is the polyp", "where is the instrument")
IMPORTS = "import torch, transformers, peft, sameday.tasks.vqa.task"
CHECK = """
import sys, time
from pathlib import Path
from sameday.data.questions.audit import check
from sameday.data.questions.sample import images_of
began = time.perf_counter()
samples, problems = check(Path(sys.argv[1]), Path(sys.argv[2]), None, say=lambda text: None)
seconds = time.perf_counter() - began
images = len(images_of({"": samples}))
print(f"{len(samples):,} questions about {images:,} images, {len(problems)} problems, {seconds:.1f} s")
"""


@dataclass
class Peak:
    """The largest sum over a process and its descendants, in bytes."""

    pss: int = 0
    rss: int = 0


def rows(count: int, images: int) -> Iterator[dict[str, Any]]:
    """Each image about as often as the others, its questions together."""
    import numpy as np
    from PIL import Image

    content, drawn = b"", -1
    for number in range(count):
        image = number * images // count
        if image != drawn:
            pixels = np.random.default_rng(image).integers(0, 256, (6, 8, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).resize((64, 48)).save(file, format="JPEG")
            content, drawn = file.getvalue(), image
        asked = f"{ASKED[number % len(ASKED)]} in picture {number % 97}?"
        answer = "yes" if number % 3 else f"{number % 7}"
        yield {"image": {"bytes": content, "path": None}, "question": asked, "answer": answer, "source": "made"}


def write_set(folder: Path, count: int, images: int, parts: int = 6) -> None:
    """In parts, as the hub has them; never all rows in memory."""
    import pyarrow
    from pyarrow import parquet

    made, each = rows(count, images), -(-count // parts)
    for part in range(parts):
        batch = [row for _, row in zip(range(each), made, strict=False)]
        parquet.write_table(pyarrow.Table.from_pylist(batch), folder / f"raw-{part:05d}-of-{parts:05d}.parquet")


def tree(pid: int) -> list[int]:
    """A process and all that it started, as far as they are there."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, new = list[int](), [pid]
    while new:
        found += new
        new = [child for each in new for child in children.get(each, [])]
    return found


def memory(pid: int) -> Peak:
    sums = Peak()
    for each in tree(pid):
        try:
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
        sums.pss, sums.rss = sums.pss + sizes["Pss"], sums.rss + sizes["Rss"]
    return sums


def watched(command: list[str], **more: Any) -> tuple[str, float, Peak]:
    """What a command printed, how long it took, and its peak memory."""
    began, peak = time.perf_counter(), Peak()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more) as process:
        while process.poll() is None:
            now = memory(process.pid)
            peak = Peak(max(peak.pss, now.pss), max(peak.rss, now.rss))
            time.sleep(0.05)
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        sys.exit(said)
    return said, time.perf_counter() - began, peak


def trial(folder: Path, count: int, images: int, steps: int) -> dict[str, Peak]:
    """All of it in a folder; prints a line each, and gives the peaks by name."""
    from sameday.demo.tiny import write_model

    began = time.perf_counter()
    write_set(folder, count, images)
    size = sum(each.stat().st_size for each in folder.glob("*.parquet"))
    print(f"made: {count:,} rows, {images:,} images, {size / 1e6:,.0f} MB in {time.perf_counter() - began:.1f} s")
    write_model(folder / "tiny", [*ASKED, "yes no 0 1 2 3 4 5 6 in picture"], seed=1)
    data = {"train": "raw-*.parquet", "image_root": ".", "split": {"val": 0.01, "seed": 0}}
    recipe = {"model": "tiny", "data": data, "order": "by_image", "precision": "float32", "max_steps": steps}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    env = os.environ | {"SAMEDAY_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    python = [sys.executable, "-c"]
    train = [sys.executable, "-m", "sameday", "train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]
    commands = {
        "libraries alone": [*python, IMPORTS],
        "read and checked, first": [*python, CHECK, str(folder / "raw-*.parquet"), str(folder)],
        "read and checked, again": [*python, CHECK, str(folder / "raw-*.parquet"), str(folder)],
        f"trained, {steps} steps": [*train, "--set", "plan.device=cpu", "--set", "plan.workers=2"],
    }
    peaks: dict[str, Peak] = {}
    for name, command in commands.items():
        said, seconds, peaks[name] = watched(command, env=env)
        told = said.strip() if command[-2:-1] != ["--set"] and said.strip() else f"{seconds:.1f} s, process included"
        print(f"{name:24} peak {peaks[name].pss / 2**20:6,.0f} MiB (RSS {peaks[name].rss / 2**20:6,.0f}); {told}")
    return peaks


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rows", type=int, default=60_000)
    asked.add_argument("--images", type=int, default=6_500)
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--keep", type=Path, help="folder to make it in, which must not be there")
    args = asked.parse_args()
    if args.keep is not None:
        args.keep.mkdir(parents=True)
        trial(args.keep, args.rows, args.images, args.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        trial(Path(folder), args.rows, args.images, args.steps)


if __name__ == "__main__":
    main()
