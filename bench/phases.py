"""What `sameday profile` is worth: delays of 20 ms planted in each part of a step, what timing costs, and whether its
advice keeps its promise.

    python bench/phases.py delays vqa|bdh      # where each delay shows up
    python bench/phases.py overhead vqa|bdh    # steps with the clock and without, in turns
    python bench/phases.py advice vqa          # bottlenecks planted, the first advice, and what its remedy gave

On a GPU questions are asked of Qwen3-VL-8B's shapes; --small takes tiny models, as a CPU must.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tune import prepare

from sameday.commands.session import Session, Specs
from sameday.data.labelled import augment
from sameday.data.labelled.batch import ImageBatch
from sameday.data.questions import source
from sameday.data.questions.batch import Batch
from sameday.data.questions.processor import ImageProcessor
from sameday.hardware.machine import detect_machine, device_kind
from sameday.hardware.peaks import measure
from sameday.hardware.phases import Clock
from sameday.hardware.ranks import Ranks
from sameday.models.vision_bdh import VisionBDH
from sameday.models.vlm import VisionLanguageModel
from sameday.profile.summary import summed_up
from sameday.profile.timeline import Timeline, record
from sameday.spec.load import load_recipe
from sameday.spec.plan import Plan
from sameday.tasks.classify.task import ClassifyTask
from sameday.tasks.registry import setup_of
from sameday.tasks.vqa.task import VqaTask
from sameday.train.commit import PendingScalars
from sameday.train.watch import Watch

DELAY = 0.02
TURNS = 12
BOTH: dict[str, tuple[Any, str]] = {
    "loss": (F, "cross_entropy"),
    "backward": (torch.Tensor, "backward"),
    "exchange": (Ranks, "sum_"),
    "optimizer": (torch.optim.AdamW, "step"),
    "check": (PendingScalars, "read"),
    "log": (Watch, "step"),
}
WHERE: dict[str, dict[str, tuple[Any, str]]] = {
    "vqa": {
        "wait": (VqaTask, "_build"),
        "read": (Path, "read_bytes"),
        "decode": (source, "open_rgb"),
        "resize": (ImageProcessor, "resized"),
        "copy": (Batch, "to"),
        "tower": (VisionLanguageModel, "image_features"),
        "forward": (VisionLanguageModel, "_rotary"),
        **BOTH,
        "other": (VqaTask, "count"),
    },
    "bdh": {
        "wait": (ClassifyTask, "_build"),
        "copy": (ImageBatch, "to"),
        "prepare": (augment, "normalise"),
        "forward": (VisionBDH, "levels"),
        **BOTH,
        "other": (ClassifyTask, "count"),
    },
}
ON_DEVICE = {"prepare", "tower", "forward", "loss", "backward", "exchange", "optimizer"}
"""There a GPU is kept busy; elsewhere the host sleeps, and the GPU waits for it."""
SHARED: dict[str, Any] = {
    "share_images": True,
    "packing": True,
    "max_questions": None,
    "label_only_logits": True,
}
PLAN = {"vqa": SHARED, "bdh": {}}


class Bench:
    """A recipe with its data and model, ready to be loaded under any plan."""

    def __init__(self, what: str, folder: Path, small: bool, size: str = "8b") -> None:
        prepare(what, folder, small, size)
        self.what, self.home, self.recipe = what, folder, load_recipe(folder / "recipe.yaml")
        if small and what == "bdh":
            tiny = self.recipe.model.model_copy(update={"latents": 4, "levels": 2, "width": 48})
            changes = {"precision": "float32", "model": tiny, "effective_batch": 32}
            self.recipe = self.recipe.model_copy(update=changes)
        self.splits = setup_of(self.recipe, folder).audit(lambda _: None).splits
        self.machine = detect_machine(device_kind(Plan()))
        self.peaks: Any = None

    def load(self, plan: Plan) -> tuple[Session, Any]:
        session = Session.start(Specs(self.recipe, self.home, plan))
        return session, session.load(splits=self.splits)

    def record(self, session: Session, task: Any, steps: int = 8, watched: bool = True) -> Timeline:
        return record(session, task, steps, 3, watched=watched)

    def profile(self, plan: Plan) -> dict[str, Any]:
        session, task = self.load(plan)
        self.peaks = self.peaks or measure(task.device, self.recipe.precision, self.home)
        return summed_up(session, task, self.record(session, task), self.peaks, range(3, 7))


def delay(on_device: bool) -> None:
    """Where the host sleeps, a GPU is through with its work first: it would go on, and nothing would be late."""
    if on_device and torch.cuda.is_available():
        torch.cuda._sleep(int(DELAY * 1000 * torch.cuda.clock_rate() * 1000))
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    time.sleep(DELAY)


@contextmanager
def slowed(owner: Any, name: str, wait: Callable[[], None]) -> Iterator[list[int]]:
    """Every call of it waits first. Gives how often it was called."""
    plain, calls = getattr(owner, name), [0]

    def slow(*args: Any, **named: Any) -> Any:
        wait()
        calls[0] += 1
        return plain(*args, **named)

    setattr(owner, name, slow)
    try:
        yield calls
    finally:
        setattr(owner, name, plain)


def delays(bench: Bench) -> None:
    session, task = bench.load(Plan(**PLAN[bench.what]))
    bench.record(session, task, watched=False)
    base = bench.record(session, task, watched=False).phases
    total = sum(base.values())
    print(
        f"{bench.what} on {bench.machine.name}: {1000 * total:.2f} ms a step, "
        f"everything else {base['other'] / total:.2%}"
    )
    print(f"{'delay in':12s} {'calls a step':>12s} {'planted ms':>11s} {'shows there':>12s} {'elsewhere':>10s}")
    for part, (owner, name) in WHERE[bench.what].items():
        with slowed(owner, name, lambda part=part: delay(part in ON_DEVICE)) as calls:
            found = bench.record(session, task, watched=False).phases
        each = calls[0] / (3 + 8 + 2)
        there = found.get(part, 0.0) - base.get(part, 0.0)
        rest = sum(found.values()) - total - there
        print(
            f"{part:12s} {each:12.1f} {1000 * DELAY * each:11.1f} {1000 * there:12.1f} {1000 * rest:10.1f}", flush=True
        )


def overhead(bench: Bench) -> None:
    """In turns, so that what else the machine does meets both."""
    session, task = bench.load(Plan(**PLAN[bench.what]))
    seconds_of(session, task, range(4), None)
    each = seconds_of(session, task, range(4, 8), None) / 4
    steps = range(4, 4 + min(100, max(4, round(1.5 / each))))
    ratios = []
    for turn in range(TURNS):
        found = {
            timed: seconds_of(session, task, steps, Clock(task.device) if timed else None)
            for timed in ((True, False) if turn % 2 else (False, True))
        }
        ratios.append(found[True] / found[False] - 1)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(
        f"{bench.what} on {bench.machine.name}: timing costs {statistics.mean(ratios):+.2%} of a step, standard error "
        f"{error:.2%} ({min(ratios):+.2%} to {max(ratios):+.2%} in {TURNS} turns of {len(steps)} steps)"
    )


def seconds_of(session: Session, task: Any, steps: range, clock: Clock | None) -> float:
    began = time.perf_counter()
    with closing(session.steps(task)) as stepped:
        for _ in stepped.run(steps, clock):
            pass
    if clock is not None:
        clock.stop()
        clock.steps()
    elif task.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


Planted = tuple[dict[str, Any], tuple[Any, str] | None, Callable[[], None]]


def planted_in(cores: int, cuda: bool) -> dict[str, Planted]:
    """Fields of the plan, what is slowed down, and how."""
    rest, decode, read = (lambda: time.sleep(0.3)), (source, "open_rgb"), (Path, "read_bytes")
    apart = {"share_images": False, "packing": False, "max_questions": 1}
    found: dict[str, Planted] = {}
    if cuda:
        found["a needless synchronise"] = (
            {},
            (VisionLanguageModel, "_run"),
            lambda: float(torch.ones(1, device="cuda")) and None,
        )
    return found | {
        "nothing shared, one at a time": (apart, None, rest),
        "tiny batches": ({"token_budget": 1}, None, rest),
        "full checkpointing": ({"checkpointing": "full"}, None, rest),
        "logits of every place": ({"label_only_logits": False}, None, rest),
        "slow disk": ({}, read, rest),
        "slow decode, no worker": ({}, decode, rest),
        "slow decode, one worker": ({"workers": 1}, decode, rest),
        "slow decode, all workers": ({"workers": max(1, cores - 1)}, decode, rest),
    }


def advice(bench: Bench) -> None:
    """What is planted, what is advised first, what that may give at most, and what it gave. Where the remedy is not in
    the plan, what was planted is taken away."""
    cuda = bench.machine.device == "cuda"
    fast = {"optimizer_impl": "fused", "pin_memory": True, "workers": 4} if cuda else {}
    print(f"{'planted':30s} {'first advice':58s} {'at most':>8s} {'gave':>7s}")
    for name, (fields, slow, wait) in planted_in(bench.machine.cores, cuda).items():
        # Data is slow where the step waits for it itself.
        plan = Plan(
            **(SHARED | fast | ({"workers": 0} if slow and slow[0] is not VisionLanguageModel else {}) | fields)
        )
        with slowed(*slow, wait) if slow else nullcontext():
            before = bench.profile(plan)
            if not before["advice"]:
                print(f"{name:30s} none")
                continue
            first = before["advice"][0]
            after = plan.model_copy(update=first["change"])
            if first["change"].get("cache"):
                bench.profile(after)  # fills it
            seconds = bench.profile(after)["seconds"]["median"] if first["change"] else None
        seconds = seconds or bench.profile(plan)["seconds"]["median"]
        gave = before["seconds"]["median"] / seconds
        print(f"{name:30s} {first['remedy'][:58]:58s} {first['at_most']:7.2f}× {gave:6.2f}×", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("delays", "overhead", "advice"))
    parser.add_argument("what", choices=tuple(WHERE))
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--size", default="8b", choices=("8b", "1b"), help="of the model that is asked on a GPU")
    parser.add_argument("--work", type=Path, help="keep model and data here, for the next time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.what, args.work or Path(folder), args.small, args.size)
        {"delays": delays, "overhead": overhead, "advice": advice}[args.command](bench)


if __name__ == "__main__":
    main()
