"""A step of real data as the training loop does it: JPEGs read, decoded and copied meanwhile, the automatic plan.

    python bench/real.py OUT                                  one GPU, Qwen3-VL-8B's shapes; 16 GB of disk
    python bench/real.py OUT --only mixture --plan cuda_graphs=false     with a field of its own
    python bench/real.py OUT --size tiny                      tries the script on a CPU
    python bench/real.py OUT --peers                          other trainers too, as `bench/peers.py` runs them
    python bench/real.py OUT --run [--only ROW]               `sameday train` of the mixture for three epochs, twice:
                                                              what is compiled before the first step, what that takes
                                                              the first time and again, whether a later step takes
                                                              far longer than the median, also for its pixels;
                                                              with --steps N the first run ends after that many

Weights are random. Mixtures are timed in the first epoch. Of the other rows those of kept features are timed from the
second one on, when what the tower made of all images is there, and the others without `plan.keep_features`, as in a
first epoch: the line below the row has the first epoch of the plan that keeps them.
Of each row: seconds of a step, median (least to most) of those after the first twenty, or that epoch; its floor,
the mean over its steps; the share of the floor that is reached, of all steps together; how much of the time kernels
fill; GiB that tensors took and that the allocator held; what the warm-up before the first step took and the first
twenty steps beyond the median, compiling above all; how many graphs were compiled after the warm-up, which should be
none; how many times the median the slowest of the later ones took; and which share of all micro-batches was replayed
from CUDA graphs, in how many shapes; below it, what the kernels are for. The model is loaded once
for all rows, and what an earlier row compiled is there for the next: `--only` one row has all of its first costs. What
OUT has already is kept: a peers.json there stands beside our rows. All that is in OUT is of one --size.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from beside import OURS, PEERS, read, table
from loaded import Loaded, floors, start, warmed
from mixture import LARGE, QUESTIONS, USUAL, write_mixture, write_split
from PIL import Image
from verify import SHAPES

from sameday.commands.session import silent
from sameday.data.order import Place, epoch_steps
from sameday.demo.tiny import write_model
from sameday.hardware.compiling import graphs
from sameday.profile.kinds import kind_words
from sameday.profile.timeline import FAR, record
from sameday.record.folder import read_metrics
from sameday.record.times import read_times
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_STOPPED
from sameday.spec.load import recipe_from
from sameday.tasks.registry import setup_of
from sameday.tasks.vqa.plain import conversation

WARM = 20
"""First steps, in which things are compiled or recorded."""


@dataclass(frozen=True)
class Row:
    """Of which pictures, each with so many questions; None is the mixture. `template`: words of an instruction."""

    order: str
    pictures: tuple[tuple[tuple[int, int], int], ...] | None = None
    template: int = 0
    steps: int = 40
    least_memory: bool = False
    kept: bool = False

    @property
    def warm(self) -> int:
        """First steps, in which things are compiled, recorded or kept."""
        questions = sum(count for _, count in self.pictures or ()) if self.kept else 0
        return max(WARM, questions // BATCH)


BATCH = 16
"""Questions of a step."""
KEPT = ", features kept"
ROWS = {
    "768×576, by_image": Row("by_image", ((USUAL[0], 8),) * 60),
    "mixture": Row("by_image", steps=200),
    "mixture, templates": Row("by_image", template=120, steps=200),
    "768×576, shuffle": Row("shuffle", ((USUAL[0], 8),) * 60),
    "2 of 1280×1024": Row("by_image", ((LARGE, 8),) * 60, template=45),
    "16 of 1280×1024": Row("shuffle", ((LARGE, 1),) * 320, template=45, steps=25),
    "least memory": Row("by_image", ((LARGE, 8),) * 60, template=45, least_memory=True),
}
ROWS |= {
    f"{name}{KEPT}": replace(ROWS[name], kept=True)
    for name in ("768×576, by_image", "2 of 1280×1024", "768×576, shuffle", "16 of 1280×1024")
}
"""Those of the same name have the same data."""
SAID = ("compiled what", "recorded ", "went through what", "out of memory in the warm-up", "cuda_graphs: ")
"""How a run's lines about its warm-up, and about what is recorded in it, begin."""
EPOCHS = 3
"""Of a whole run."""
MIXTURE = (400, 40, 0)
"""Pictures to train and validate on."""


def row_name(typed: str) -> str:
    """Also where somebody has no × on the keyboard."""
    return next((name for name in ROWS if name.replace("×", "x") == typed.replace("×", "x")), typed)


def data_of(out: Path, name: str, row: Row, tiny: bool) -> Path:
    folder = out / "data" / name.removesuffix(KEPT).replace(",", "").replace(" ", "_").replace("×", "x")
    if not folder.is_dir():
        part, shrink = folder.with_suffix(".part"), 8 if tiny else 1
        if row.pictures is None:
            write_mixture(part, (40, 4, 0) if tiny else MIXTURE, template=row.template, shrink=shrink)
        else:
            rng = random.Random(0)
            write_split(part, "train", row.pictures, rng, row.template, shrink)
            write_split(part, "val", row.pictures[:2], rng, row.template, shrink)
        part.rename(folder)
    return folder


def recipe_of(out: Path, data: Path, row: Row, tiny: bool) -> dict[str, Any]:
    return {
        "name": "real",
        "model": str(out / "model"),
        "lora": {"r": 4, "alpha": 8, "dropout": 0.05, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "precision": "float32" if tiny else "bf16",
        "data": {name: str(data / f"{name}.jsonl") for name in ("train", "val")} | {"image_root": str(data / "images")},
        "max_pixels": 1310720,
        "order": row.order,
        "effective_batch": BATCH,
        "loss_weight": "sample",
        "learning_rate": 5e-5,
        "num_epochs": 1000,
    }


def timed(out: Path, name: str, row: Row, args: argparse.Namespace, loaded: Loaded) -> dict[str, Any]:
    """One row."""
    tiny = args.size == "tiny"
    fields = recipe_of(out, data_of(out, name, row, tiny), row, tiny)
    keeps = [] if row.pictures is None else [f"keep_features={str(row.kept).lower()}"]
    with closing(start(out, fields, [*keeps, *args.plan], tiny)) as session:
        plan = session.setup.low_memory(session.resolved.plan) if row.least_memory else session.resolved.plan
        task = loaded.task(session, plan)
        count, warm = args.steps or row.steps, row.warm
        with closing(session.steps(task)) as steps, counting(task) as counts:
            before, compiled = warmed(session, task, steps), graphs().made
            counts.clear()
            seconds = [good.seconds for good in steps.run(range(warm + count))]
            recorded, shapes = dict(counts), task.recorded_sizes()
            compiled = graphs().made - compiled
            memory = most_memory(task.device)
            line = record(session, task, 8, 4, by=steps)
        least = floors(session, task, range(warm, warm + count), loaded.peaks(session))
    usual = statistics.median(seconds[warm:])
    return {
        "name": name,
        "size": args.size,
        "device": session.machine.name,
        "plan": args.plan,
        "steps": count,
        "seconds": seconds,
        "warm": warm,
        "median": usual,
        "first_epoch": statistics.median(seconds[warm // 2 : warm]) if row.kept else None,
        "floor": statistics.fmean(least),
        "share": sum(least) / sum(seconds[warm:]),
        "busy": line.busy,
        "launches": line.launches,
        "kernels": line.kernels,
        "longest": line.longest,
        "gpu": line.gpu,
        "GiB": memory[0],
        "held": memory[1],
        "compiled": compiled,
        "first": max(0.0, before + sum(seconds[:warm]) - warm * usual),
        "slowest": max(seconds[warm:]) / usual,
        "micro_batches": sum(recorded.values()),
        "recorded": recorded.get(True, 0),
        "shapes": shapes,
    }


def most_memory(device: torch.device) -> tuple[float, float]:
    """GiB that tensors took at once, and that the allocator held for them."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30


@contextmanager
def counting(task: Any) -> Iterator[Counter[bool]]:
    """Micro-batches of training, by whether their kernels are recorded."""
    counts, loss_sum = Counter[bool](), task.loss_sum

    def counted(batch: Any, step: int) -> Any:
        given = loss_sum(batch, step)
        counts[task.is_recorded(batch)] += 1
        return given

    with patch.object(task, "loss_sum", counted):
        yield counts


def words(one: dict[str, Any]) -> str:
    later = one["seconds"][one["warm"] :]
    busy = "-" if one["busy"] is None else f"{one['busy']:.0%}"
    return (
        f"{one['name']:34s} {one['median']:7.3f} {f'({min(later):.3f}-{max(later):.3f})':>16s} {one['floor']:7.3f} "
        f"{one['share']:6.0%} {busy:>6s} {one['GiB']:6.1f} {one['held']:6.1f} {one['first']:8.1f} "
        f"{one['compiled']:6d} {one['slowest']:8.2f} {one['recorded'] / one['micro_batches']:8.0%} {one['shapes']:6d}"
    )


def below(one: dict[str, Any]) -> Iterator[str]:
    """What is told of a row besides."""
    if one["first_epoch"] is not None:
        yield f"{one['first_epoch']:.3f} s in the first epoch"
    if one["kernels"]:
        yield f"kernels, ms of a step: {kind_words(one['kernels'])}"
        yield clock_words(one["gpu"])


def clock_words(gpu: Mapping[str, float]) -> str:
    """A GPU that is at its limit of power is slower than while its peak was measured."""
    if "power_watts" not in gpu:
        return "its clock is not known"
    return f"{gpu['clock_mhz']:.0f} of {gpu['highest_clock_mhz']:.0f} MHz, {gpu['power_watts']:.0f} W"


def whole_run(out: Path, args: argparse.Namespace) -> None:
    """From the command line, first where nothing was compiled yet, then again."""
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


def samples_of(out: Path, fields: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Of each step of a run, in its order."""
    recipe = recipe_from(fields)
    samples = setup_of(recipe, out).audit(silent, ("train",)).splits["train"]
    places = [Place(each.id, each.image_key, each.stage) for each in samples]
    for epoch in range(recipe.num_epochs):
        for step in epoch_steps(places, recipe.order, recipe.effective_batch, recipe.seed, epoch):
            yield [samples[i] for i in step]


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


def claim(out: Path, size: str) -> None:
    """A folder has a model and data of one size, which are written once and used by every bench that is given it."""
    file, there = out / "size", (out / "model").is_dir()
    known = file.read_text().strip() if file.is_file() else None
    if known is None and there:
        raise SystemExit(f"{out}: does not say of which size its model is; name another folder")
    if known not in (None, size):
        raise SystemExit(f"{out}: is of size {known}, and --size {size} was asked for; name another folder")
    file.write_text(f"{size}\n")


def model_of(out: Path, tiny: bool) -> None:
    """Written once."""
    claim(out, "tiny" if tiny else "8b")
    if (out / "model").is_dir():
        return
    texts = [f"{question} {' '.join(answers)}" for _, question, answers in QUESTIONS]
    shapes: dict[str, Any] = {} if tiny else {"device": "cuda", "dtype": torch.bfloat16, **SHAPES["8b"]}
    write_model(out / "model.part", texts, 0, **shapes)
    (out / "model.part").rename(out / "model")
    gc.collect()


def beside(out: Path, found: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """The same rows of other trainers, which are run first where they are asked for."""
    there = [each for each in read(out / OURS) if each["name"] not in args.only]
    (out / OURS).write_text(json.dumps([*there, *found]) + "\n")
    if args.peers:
        command = [sys.executable, str(Path(__file__).with_name("peers.py")), str(out), "--size", args.size]
        subprocess.run(command, check=True)  # which prints the table
    elif (out / PEERS).is_file():
        print(table([*there, *found], read(out / PEERS)))


def asked(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--only", nargs="+", type=row_name, choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--steps", type=int, help="that are timed, instead of each row's own number")
    parser.add_argument("--plan", action="append", default=[], help="FIELD=VALUE, instead of the automatic one")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--peers", action="store_true", help="run bench/peers.py afterwards")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.run and len(args.only) not in (1, len(ROWS)):
        parser.error("--run is of one row: name one with --only, or none for the mixture")
    of_plans = [name for name in args.only if ROWS[name].kept or ROWS[name].least_memory]
    if args.run and args.only == of_plans:
        parser.error(f"--run takes a row's data under the automatic plan, and {of_plans[0]!r} is about another plan")
    return args


def main() -> None:
    args = asked()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    model_of(out, args.size == "tiny")
    if args.run:
        whole_run(out, args)
        return
    print(f"{'':34s} {'s/step':>7s} {'(least-most)':>16s} {'floor':>7s} {'share':>6s} {'busy':>6s}", end="")
    print(f" {'GiB':>6s} {'held':>6s} {'first s':>8s} {'graphs':>6s} {'slowest':>8s} {'recorded':>8s}", end="")
    print(f" {'shapes':>6s}   {' '.join(args.plan)}", flush=True)
    found, loaded = [], Loaded()
    for name in args.only:
        found.append(timed(out, name, ROWS[name], args, loaded))
        print(words(found[-1]), flush=True)
        if row_words := list(below(found[-1])):
            print(f"{'':34s} {'; '.join(row_words)}", flush=True)
    print(loaded.peak_words(), flush=True)
    loaded.drop()  # other trainers need the memory
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")
    beside(out, found, args)


if __name__ == "__main__":
    main()
