"""A step of real data as the training loop does it: JPEGs read, decoded and copied meanwhile, the automatic plan.

    python bench/real.py OUT                                  one GPU, Qwen3-VL-8B's shapes; 18 GB of disk
    python bench/real.py OUT --only mixture --plan cuda_graphs=false     with a field of its own
    python bench/real.py OUT --size tiny                      tries the script on a CPU
    python bench/real.py OUT --peers                          other trainers too, as `bench/peers.py` runs them; words
                                                              behind it are arguments of that script
    python bench/real.py OUT --run [--only ROW]               `sameday train` of the mixture for three epochs, twice:
                                                              what is compiled before the first step, what that takes
                                                              the first time and again, whether a later step takes
                                                              far longer than the median, also for its pixels;
                                                              with --steps N the first run ends after that many

Weights are random. A row is one run. Where its plan keeps what the tower made of images (`keep_features`, which the
automatic plan has on a GPU), it is timed twice: in the first epoch after the first twenty steps, and from the second
epoch on, when all of it is there.
Of each: seconds of a step, median (least to most); its floor, the mean over its steps; the share of the floor that is
reached, of all steps together; how much of the time kernels fill; GiB that tensors took and that the allocator held;
what the warm-up before the first step took and the first twenty steps beyond the median, compiling above all; how many
graphs were compiled after the warm-up, which should be none; how many times the median the slowest of the timed ones
took; and which share of all micro-batches was replayed from CUDA graphs, in how many shapes; below it, what the kernels
are for. Where a row is timed twice, its first epoch's kernels, and how much of the time they fill, are of steps whose
images are all computed. The model is loaded once for all rows, and what an earlier row compiled is there for the next:
`--only` one row has all of its first costs. What OUT has already is kept: a peers.json there stands beside our rows.
All that is in OUT is of one --size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from beside import OURS, PEERS, read, table
from loaded import Loaded, floors, start, warmed
from rows import ROWS, WARM, Row, data_of, model_of, recipe_of, row_name
from stalls import whole_run

from sameday.hardware.compiling import graphs
from sameday.models.features import FeatureMemory
from sameday.profile.kinds import kind_words
from sameday.profile.timeline import PROFILED, record
from sameday.tasks.base import total_steps

LATER = ", later epochs"


@dataclass(frozen=True)
class Part:
    """Steps of a run that are timed: `count` of them from `begin` on. What was not computed before is, `since`."""

    name: str
    since: int
    begin: int
    count: int

    @property
    def timed(self) -> range:
        return range(self.begin, self.begin + self.count)


def parts_of(name: str, row: Row, epoch: int, keeps: bool, asked: int | None) -> list[Part]:
    """`epoch`: how many steps one has. With a plan that keeps nothing, one epoch is as another. The first step of a
    later part waits for its data, and is not timed."""
    if not keeps:
        return [Part(name, 0, WARM, asked or row.steps)]
    first = Part(name, 0, WARM, min(asked or row.steps, epoch - WARM))
    if first.count < 1:
        raise SystemExit(f"{name}: an epoch of {epoch} steps has none behind the first {WARM}")
    return [first, Part(name + LATER, first.timed.stop, max(epoch, first.timed.stop) + 1, asked or row.later)]


class Forgetful(FeatureMemory):
    """Keeps nothing: every image is computed as in the epoch in which it comes first."""

    def open(self) -> None:
        return None


def timed(out: Path, name: str, row: Row, args: argparse.Namespace, loaded: Loaded) -> list[dict[str, Any]]:
    """One row: a result for each of its parts."""
    tiny = args.size == "tiny"
    fields = recipe_of(out, data_of(out, name, row, tiny), row, tiny)
    results = []
    with closing(start(out, fields, args.plan, tiny)) as session:
        plan = session.setup.low_memory(session.resolved.plan) if row.least_memory else session.resolved.plan
        task = loaded.task(session, plan)
        memory, total = task.model.memory, total_steps(session.recipe, task)
        parts = parts_of(name, row, total // fields["num_epochs"], memory is not None, args.steps)
        with closing(session.steps(task)) as steps, counting(task) as counts:
            before = warmed(session, task, steps)
            for part in parts:
                counts.clear()
                compiled = graphs().made
                seconds = [good.seconds for good in steps.run(range(part.since, part.timed.stop))]
                ahead, seconds = seconds[: -part.count], seconds[-part.count :]
                usual = statistics.median(seconds)
                first = max(0.0, before + sum(ahead) - len(ahead) * usual)
                results.append(
                    {
                        "name": part.name,
                        "size": args.size,
                        "device": session.machine.name,
                        "plan": args.plan,
                        "steps": part.count,
                        "seconds": seconds,
                        "median": usual,
                        "first": first if part is parts[0] else None,
                        "slowest": max(seconds) / usual,
                        "compiled": graphs().made - compiled,
                        "micro_batches": sum(counts.values()),
                        "recorded": counts.get(True, 0),
                        "shapes": task.recorded_sizes(),
                        **most_memory(task.device),
                    }
                )
                made = memory if memory is None or part is parts[-1] else Forgetful(task.device)
                with patch.object(task.model, "memory", made):
                    line = record(session, task, PROFILED + 1, 2, by=steps)
                results[-1] |= {
                    "busy": line.busy,
                    "launches": line.launches,
                    "kernels": line.kernels,
                    "longest": line.longest,
                    "gpu": line.gpu,
                }
        for part, result in zip(parts, results, strict=True):
            least = floors(session, task, part.timed, loaded.peaks(session))
            result |= {"floor": statistics.fmean(least), "share": sum(least) / sum(result["seconds"])}
    return results


def most_memory(device: torch.device) -> dict[str, float]:
    """GiB that tensors took at once since they were last recorded, and that the allocator held for them."""
    if device.type != "cuda":
        return {"GiB": 0.0, "held": 0.0}
    return {"GiB": torch.cuda.max_memory_allocated() / 2**30, "held": torch.cuda.max_memory_reserved() / 2**30}


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
    busy = "-" if one["busy"] is None else f"{one['busy']:.0%}"
    first = "-" if one["first"] is None else f"{one['first']:.1f}"
    spread = f"({min(one['seconds']):.3f}-{max(one['seconds']):.3f})"
    return (
        f"{one['name']:34s} {one['median']:7.3f} {spread:>16s} {one['steps']:5d} {one['floor']:7.3f} "
        f"{one['share']:6.0%} {busy:>6s} {one['GiB']:6.1f} {one['held']:6.1f} {first:>8s} "
        f"{one['compiled']:6d} {one['slowest']:8.2f} {one['recorded'] / one['micro_batches']:8.0%} {one['shapes']:6d}"
    )


def below(one: dict[str, Any]) -> str:
    """What is told of a row besides, of a GPU."""
    if not one["kernels"]:
        return ""
    return f"{'':34s} kernels, ms of a step: {kind_words(one['kernels'])}; {clock_words(one['gpu'])}"


def clock_words(gpu: Mapping[str, float]) -> str:
    """A GPU that is at its limit of power is slower than while its peak was measured."""
    if "power_watts" not in gpu:
        return "its clock is not known"
    return f"{gpu['clock_mhz']:.0f} of {gpu['highest_clock_mhz']:.0f} MHz, {gpu['power_watts']:.0f} W"


def beside(out: Path, found: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """The same rows of other trainers, which are run first where they are asked for."""
    there = [each for each in read(out / OURS) if each["name"].removesuffix(LATER) not in args.only]
    (out / OURS).write_text(json.dumps([*there, *found]) + "\n")
    if args.peers is not None:
        command = [sys.executable, str(Path(__file__).with_name("peers.py")), str(out), "--size", args.size]
        subprocess.run([*command, *args.peers], check=True)  # which prints the table
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
    parser.add_argument(
        "--peers", nargs=argparse.REMAINDER, help="last: run bench/peers.py afterwards, with what follows"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.run and len(args.only) not in (1, len(ROWS)):
        parser.error("--run is of one row: name one with --only, or none for the mixture")
    of_plans = [name for name in args.only if ROWS[name].least_memory]
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
    print(
        f"{'':34s} {'s/step':>7s} {'(least-most)':>16s} {'steps':>5s} {'floor':>7s} {'share':>6s} {'busy':>6s}", end=""
    )
    print(f" {'GiB':>6s} {'held':>6s} {'first s':>8s} {'graphs':>6s} {'slowest':>8s} {'recorded':>8s}", end="")
    print(f" {'shapes':>6s}   {' '.join(args.plan)}", flush=True)
    found, loaded = [], Loaded()
    for name in args.only:
        for result in timed(out, name, ROWS[name], args, loaded):
            found.append(result)
            print(words(result), *filter(None, [below(result)]), sep="\n", flush=True)
    print(loaded.peak_words(), flush=True)
    loaded.drop()  # other trainers need the memory
    if args.json is not None:
        args.json.write_text(json.dumps(found) + "\n")
    beside(out, found, args)


if __name__ == "__main__":
    main()
