"""What bounds a step, and what each remedy could give at most. Pure arithmetic over what was measured: a remedy can win
no more than the time it takes away, and no remedy computes faster than the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sameday.hardware.phases import PHASES
from sameday.spec.plan import OF_PIECES, Plan
from sameday.spec.words import in_yaml

WORTH_NAMING = 1.02
"""What could give less than this is not told from noise."""

SURELY = 1.15
"""By how much a few steps that were timed must be faster than others: two processes differ by some hundredths."""

NEAR = 0.4
"""The share of a step that a resource takes at its best rate where it bounds the step."""

PACE = 3.0
"""How much longer than at their best rate a CPU's small matmuls and dense attention take, about."""

ROOM = 0.4
"""The share of the memory that must be free where a remedy takes more of it."""

EXPOSED = ("wait", "read", "decode", "resize")
DATA = (*EXPOSED, "copy")
COMPUTE = ("prepare", "tower", "forward", "loss", "backward")
ONCE = ("exchange", "optimizer", "check", "log")
"""Done once a step, however it is cut."""

OTHER = "work other than large matmuls"


@dataclass(frozen=True)
class Cut:
    """A step in other micro-batches: the plan's fields that would cut it so, how many there would be, and what their
    matmuls would take at the machine's rate."""

    change: dict[str, Any]
    micro_batches: float
    executed: float


@dataclass(frozen=True)
class Facts:
    """Of a step on the average, in seconds. `floor` is what the mathematics of the step takes at the machine's measured
    rates, all at once and nothing twice, whatever the disk does; `executed` what the plan's own matmuls take at those
    rates, `moved` its weights; `alone` what one sample at a time takes."""

    device: str
    plan: Plan
    fields: frozenset[str]
    """Plan fields that the task can follow."""
    phases: dict[str, float]
    cores: int
    samples: float = 1.0
    micro_batches: float = 1.0
    workers: dict[str, float] = field(default_factory=dict)
    floor: float = 0.0
    executed: float = 0.0
    moved: float = 0.0
    alone: float = 0.0
    busy: float | None = None
    memory: float = 1.0
    """Bytes that the device has."""
    used: float = 0.0
    """Bytes that this process had of them at most."""
    triton: bool = False
    cannot: frozenset[tuple[str, Any]] = frozenset()
    """Fields with values that the recipe cannot use here."""
    waits: tuple[tuple[str, int], ...] = ()
    threads: int = 1
    """That a CPU's operations are divided between."""
    fewer: tuple[tuple[int, float], ...] = ()
    """Seconds that a step took with fewer of them, where that was timed."""
    cuts: tuple[Cut, ...] = ()

    def offers(self, name: str, value: Any) -> bool:
        """Whether this field can be given this value, and has another one."""
        return name in self.fields and (name, value) not in self.cannot and getattr(self.plan, name) != value

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    def time(self, *names: str) -> float:
        return sum(self.phases.get(name, 0.0) for name in names)

    @property
    def preparing(self) -> float:
        """Of images, whoever does it."""
        return sum(self.workers.values()) + self.time("read", "decode", "resize")

    @property
    def crowding(self) -> float:
        """The most that workers on a CPU take from the step, which computes on the same cores: each process has its
        share of them."""
        share = self.plan.workers / (self.plan.workers + 1)
        return min(sum(self.workers.values()), share * self.time(*COMPUTE)) if self.device == "cpu" else 0.0

    @property
    def room(self) -> bool:
        return 1 - self.used / self.memory > ROOM

    @property
    def gaps(self) -> float:
        """While a GPU has nothing to do, for whatever reason."""
        return 0.0 if self.busy is None else (1 - self.busy) * self.total

    @property
    def idle(self) -> float:
        """While a GPU has nothing to do, and not for want of data. A CPU is never told to be idle: what it spends
        on the calls of many small micro-batches is counted instead."""
        if self.busy is not None:
            return max(0.0, self.gaps - self.time(*DATA))
        return self.calls * (1 - 1 / self.micro_batches) if self.device == "cpu" else 0.0

    @property
    def pace(self) -> float:
        """Seconds that the plan takes for a second of matmuls at their best rate, about."""
        compute = self.time(*COMPUTE)
        spent = compute - self.idle if self.busy is not None else 0.75 * compute
        return min(PACE, max(0.0, spent) / self.executed) if self.executed else PACE

    @property
    def calls(self) -> float:
        """Seconds that are a matter of how many micro-batches there are, about: on a CPU what is not spent on matmuls.
        A GPU's kernels are only a little faster where they are larger."""
        compute = self.time(*COMPUTE)
        if self.busy is not None:
            return self.idle + 0.1 * max(0.0, compute - self.idle - self.executed)
        return max(0.0, compute - self.pace * self.executed)


@dataclass(frozen=True)
class Remedy:
    """`likely` seconds are what puts remedies in order; `at_most` is what is promised."""

    remedy: str
    at_most: float
    why: str
    likely: float
    change: dict[str, Any] = field(default_factory=dict)
    """The plan's fields with the values that try it, where it is in the plan."""
    to_the_floor: bool = False
    """Whether more would go away, if a step could be faster than its floor."""

    @property
    def away(self) -> float:
        """The share of the step that is gone where it is `at_most` times as fast."""
        return 1 - 1 / self.at_most

    @property
    def bound(self) -> str:
        """What `at_most` is reckoned from, in words."""
        floor = ", down to the floor" if self.to_the_floor else ""
        return f"if {self.away:.1%} of the step went away{floor}"


def bound_by(facts: Facts) -> str:
    """data, launches, the resource that takes much of the step even at its best rate, or what is none of these. Where
    workers prepare data beside the step, waiting at all means that they are too slow."""
    data, idle, total = facts.time(*DATA), facts.idle, facts.total
    if data >= (0.1 if facts.plan.workers else 0.3) * total and data >= idle:
        return "data"
    if facts.busy is not None and idle >= 0.2 * total:
        return "launches"
    resource, seconds = max({"arithmetic": facts.executed, "memory": facts.moved}.items(), key=lambda each: each[1])
    if seconds >= NEAR * total:
        return resource
    return "small operations" if facts.busy is None and idle >= 0.2 * total else OTHER


def advise(facts: Facts) -> list[Remedy]:
    """Those that could give something, the likeliest gain first."""
    remedies = [*_data(facts), *_model(facts), *_cuts(facts), *_launches(facts), *_threads(facts)]
    return sorted((each for each in remedies if each.at_most >= WORTH_NAMING), key=lambda each: -each.likely)


def differing(plan: Plan, change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if getattr(plan, name) != value}


def _remedy(
    facts: Facts, what: str | dict[str, Any], saved: float, why: str, likely: float | None = None, floor: bool = True
) -> Remedy:
    """`what` is the plan's fields that are to be set, all of which are named, or words where it is not in the plan.
    `saved` is the most that it takes away; never so much that a step would be faster than its floor, unless that is
    another one with the remedy."""
    change = {} if isinstance(what, str) else differing(facts.plan, what)
    words = what if isinstance(what, str) else ", ".join(f"plan.{name} {in_yaml(new)}" for name, new in change.items())
    left, lowest = max(facts.total - saved, facts.total / 1000), facts.floor if floor else 0.0
    at_most = facts.total / min(max(left, lowest), facts.total)
    return Remedy(words, at_most, why, saved if likely is None else likely, change, to_the_floor=lowest > left)


def _worth(facts: Facts, seconds: float) -> bool:
    return facts.total >= WORTH_NAMING * (facts.total - seconds)


def _share(facts: Facts, seconds: float) -> str:
    return f"{seconds / facts.total:.1%} of the step"


def _rows(facts: Facts, *names: str) -> str:
    """The shares of these phases, each under its name in the table."""
    spent = {name: facts.time(name) for name in names if facts.time(name)}
    listed = " + ".join(f"{PHASES[name]} {seconds / facts.total:.1%}" for name, seconds in spent.items())
    whole = sum(spent.values())
    return f"{listed} = {_share(facts, whole)}" if len(spent) > 1 else f"{listed or 'nothing'} of the step"


def _crowded(facts: Facts) -> str:
    return f", and workers on the same cores may take {_share(facts, facts.crowding)}" if facts.crowding else ""


def _data(facts: Facts) -> Iterator[Remedy]:
    plan, exposed = facts.plan, facts.time(*EXPOSED)
    preparing = facts.preparing
    # Without workers what is not read, decoded or resized is made from it, whatever keeps the images.
    images = exposed if plan.workers else facts.time("read", "decode", "resize")
    rest = facts.total - exposed
    most = facts.cores - 1
    read = facts.workers.get("read", 0.0) + facts.time("read")
    who = f"{plan.workers} worker{'s' if plan.workers > 1 else ''}" if plan.workers else "the training process"
    waited = _rows(facts, *EXPOSED)
    if plan.workers < most:
        why = f"data is prepared by {who}: {waited}; there are {facts.cores} cores"
        left = max(0.0, preparing / most - rest)
        # A CPU's workers take the cores that the step computes on.
        spare = most / facts.cores if facts.device == "cpu" else 1.0
        change = {"workers": most} | ({"pin_memory": False} if _pins_nothing(facts) else {})
        yield _remedy(facts, change, exposed, why, spare * max(0.0, exposed - left))
    saved, waited = exposed + facts.crowding, f"{waited}{_crowded(facts)}"
    if facts.offers("cache", "pixels") and plan.cache == "none" and _worth(facts, min(images, preparing)):
        why = f"decoding and resizing take {preparing - read:.3f} s of {who} a step: {waited}"
        # Where more workers would hide it, the disk's space is better kept.
        hidden = plan.workers < most and preparing / most <= rest
        likely = (0.5 if hidden else 0.95) * images * (preparing - read) / preparing
        yield _remedy(facts, {"cache": "pixels"}, saved, why, likely)
    if read > 0.5 * preparing and _worth(facts, min(images, read)):
        why = f"reading takes {read:.3f} s a step, decoding and resizing {preparing - read:.3f}: {waited}"
        yield _remedy(facts, "the data on a faster disk", saved, why, images * read / preparing)
    copy = facts.time("copy")
    recording = _pins_nothing(facts) and plan.workers
    if facts.device == "cuda" and not plan.pin_memory and not recording and _worth(facts, copy):
        # Copies that the host waits for keep it from running ahead.
        yield _remedy(facts, {"pin_memory": True}, copy + facts.gaps, f"copies take {_share(facts, copy)}", copy)


def _model(facts: Facts) -> Iterator[Remedy]:
    plan, compute = facts.plan, facts.time(*COMPUTE)
    yield from _decoder(facts)
    fusable = facts.offers("level_kernel", "fused") and plan.level_kernel == "plain"
    if facts.device == "cuda" and facts.triton and fusable:
        why = "latents pass through memory dozens of times"
        saved = compute - facts.floor + facts.gaps
        yield _remedy(facts, {"level_kernel": "fused", "compile": "none"}, saved, why, 0.7 * compute)
    if facts.device == "cuda" and plan.optimizer_impl != "fused":
        # It alone needs no word from the host: steps follow on one another.
        optimizer, late = facts.time("optimizer"), max(facts.gaps, facts.time("check", "log", "other"))
        why = f"the optimizer is {_share(facts, optimizer)}, and each step waits until the host has seen the last"
        yield _remedy(facts, {"optimizer_impl": "fused"}, optimizer + late, why, 0.8 * optimizer)


def _decoder(facts: Facts) -> Iterator[Remedy]:
    tower, loss, forward, backward = (facts.time(name) for name in ("tower", "loss", "forward", "backward"))
    if facts.offers("checkpointing", "none") and facts.room:
        again = "most of each layer is" if facts.plan.checkpointing == "selective" else "layers are"
        why = (
            f"{again} computed twice, and this process used {facts.used / 2**30:.1f} of {facts.memory / 2**30:.1f} "
            "GiB at most"
        )
        yield _remedy(facts, {"checkpointing": "none"}, min(1.25 * forward, backward), why, forward)
    if facts.offers("label_only_logits", True):
        why = f"logits of every place, {_share(facts, loss)} forward and more backward, and the last layer's MLP too"
        yield _remedy(facts, {"label_only_logits": True}, min(4 * loss, loss + backward), why, 1.5 * loss)
    if facts.plan.cache != "features" and not facts.plan.keep_features:
        yield from _features(facts, tower)


def _features(facts: Facts, tower: float) -> Iterator[Remedy]:
    """Of a frozen tower, kept. The floor has the tower in it."""
    if facts.room and facts.offers("keep_features", True) and _worth(facts, tower):
        why = (
            f"the frozen tower is {_share(facts, tower)}, and an image that comes again need not be computed again, as "
            "far as there is memory that steps leave free"
        )
        yield _remedy(facts, {"keep_features": True}, tower, why, 0.9 * tower, floor=False)
    prepared = min(facts.time(*EXPOSED), facts.preparing) + facts.time("copy")
    if facts.offers("cache", "features") and tower and _worth(facts, tower + prepared):
        data = f", and its images go with it: {_rows(facts, *DATA)}" if facts.time(*DATA) else ""
        why = (
            f"the frozen tower is {_share(facts, tower)}{data}{_crowded(facts)}; `sameday cache` says whether the disk "
            "keeps up"
        )
        saved = tower + facts.time(*DATA) + facts.crowding
        yield _remedy(facts, {"cache": "features"}, saved, why, 0.9 * tower, floor=False)


def _cuts(facts: Facts) -> Iterator[Remedy]:
    """The likeliest of those that share images, of those that share text besides, and of the others."""
    if facts.floor and facts.alone > 1.02 * facts.floor:
        best = _best(facts, [each for each in facts.cuts if "share_images" in each.change])
        if best is not None:
            repeated = facts.alone / facts.floor
            why = f"an image is computed for each question about it, {repeated:.1f} times the matmuls that are needed"
            yield _remedy(facts, best.change, _fewer(facts, facts.samples, best), why, _gain(facts, best))
    rest = [each for each in facts.cuts if "share_images" not in each.change]
    best = _best(facts, [each for each in rest if "share_text" in each.change])
    if best is not None:
        spared = 1 - best.executed / facts.executed
        why = f"what an image's questions have in common after it is computed for each, {spared:.0%} of the matmuls"
        saved = max(0.0, facts.time(*COMPUTE) - best.executed)
        yield _remedy(facts, best.change, saved, why, _gain(facts, best))
    others = [each for each in rest if "share_text" not in each.change]
    best = _best(facts, [each for each in others if facts.room or each.micro_batches > facts.micro_batches])
    if best is None:
        return
    if best.micro_batches < facts.micro_batches:
        cost = "each costs its calls" if facts.busy is None else f"the GPU waits {_share(facts, facts.idle)}"
        why = f"{facts.micro_batches:.0f} micro-batches a step instead of {best.micro_batches:.0f}, and {cost}"
        saved = _fewer(facts, facts.micro_batches, best)
    else:
        spared = 1 - best.executed / facts.executed
        rows = "a dense mask grows with the square of a row, and shorter rows"
        what = rows if "token_budget" in best.change else "smaller micro-batches"
        why = f"{what} have {spared:.0%} fewer matmuls"
        saved = max(0.0, facts.time(*COMPUTE) - best.executed)
    yield _remedy(facts, best.change, saved, why, _gain(facts, best))


def _best(facts: Facts, cuts: list[Cut]) -> Cut | None:
    """None where a step is likely to be no faster with any."""
    best = max(cuts, key=lambda cut: _gain(facts, cut), default=None)
    return best if best is not None and _worth(facts, _gain(facts, best)) else None


def _gain(facts: Facts, cut: Cut) -> float:
    """Seconds that are likely saved: of matmuls, at the pace that the plan's have, and of calls."""
    fewer = 1 - cut.micro_batches / facts.micro_batches
    return facts.pace * (facts.executed - cut.executed) + facts.calls * fewer


def _fewer(facts: Facts, times: float, cut: Cut) -> float:
    """The most that goes away where a step is done in so many times fewer pieces: one that is larger takes no less time
    than a smaller one did, and no less than its matmuls. What is waited for may go altogether, and what a GPU's host
    was late with."""
    pieces = facts.total - facts.time(*DATA, *ONCE)
    left = max(pieces / times, cut.executed)
    return facts.time(*DATA) + max(0.0, pieces - left) + min(facts.gaps, facts.time(*ONCE))


def _launches(facts: Facts) -> Iterator[Remedy]:
    """With fewer of them the host is ahead of the GPU, and does in time what was waited for."""
    plan, idle, compute = facts.plan, facts.idle, facts.time(*COMPUTE)
    for where, count in facts.waits[:1] if _worth(facts, idle) else ():
        why = f"the host waits for the GPU {count} times a step there, and the GPU for the host {_share(facts, idle)}"
        yield _remedy(facts, f"no synchronisation at {where}", facts.gaps, why, 1.05 * idle)
    if facts.device == "cuda" and facts.offers("cuda_graphs", True) and _worth(facts, idle):
        why = f"the GPU waits for launches {_share(facts, idle)}"
        yield _remedy(facts, {"cuda_graphs": True, **_beside_graphs(facts)}, facts.gaps, why, 0.95 * idle)
    fused = plan.level_kernel == "fused"
    if (
        facts.device == "cuda"
        and facts.triton
        and facts.offers("compile", "layers")
        and plan.compile == "none"
        and not fused
    ):
        why = f"matmuls need {_share(facts, facts.executed)}; the rest is launches and small kernels"
        saved = max(0.0, compute - facts.floor) + facts.gaps
        yield _remedy(facts, {"compile": "layers"}, saved, why, 0.5 * max(0.0, compute - facts.executed))


def _threads(facts: Facts) -> Iterator[Remedy]:
    """Threads that wait for one another, or for cores that others use, cost more than they give. Timed and not
    reckoned: the machine's rates are those of all threads, so that they are no floor for fewer."""
    count, seconds = min(facts.fewer, key=lambda each: each[1], default=(facts.threads, facts.total))
    if facts.total < SURELY * seconds:
        return
    why = f"timed here: {seconds:.3f} s a step with {_counted(count)}, {facts.total:.3f} with {_counted(facts.threads)}"
    change = {"environment": {**facts.plan.environment, "OMP_NUM_THREADS": str(count)}}
    saved = facts.total - seconds / SURELY
    yield _remedy(facts, change, saved, why, facts.total - seconds, floor=False)


def _counted(threads: int) -> str:
    return f"{threads} thread" if threads == 1 else f"{threads} threads"


def _pins_nothing(facts: Facts) -> bool:
    """Whether what is recorded forbids a thread to pin memory meanwhile, as it does for workers: where samples are all
    of one size, torch records whole steps, and looks at all threads."""
    return facts.plan.cuda_graphs and not _has_rows(facts)


def _has_rows(facts: Facts) -> bool:
    return "packing" in facts.fields


def _beside_graphs(facts: Facts) -> dict[str, Any]:
    """What must be otherwise where graphs are recorded: rows of tokens are packed, and attention takes their pieces, so
    that it can be recorded; elsewhere nobody pins memory meanwhile, and nothing else records."""
    plan, change = facts.plan, dict[str, Any]()
    if _has_rows(facts):
        change |= {} if plan.packing else {"packing": True}
        return change | ({} if plan.attention in ("auto", *OF_PIECES) else {"attention": "auto"})
    if plan.workers and plan.pin_memory:
        change |= {"workers": 0} if plan.images_on == "device" else {"pin_memory": False}
    return change | ({"compile_mode": "default"} if plan.compile != "none" else {})
