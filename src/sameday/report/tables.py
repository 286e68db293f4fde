"""The tables of a report: rows of text, ready to be laid out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sameday.record.inputs import other_inputs
from sameday.record.judged import of_other_runs
from sameday.report.beside import Ablated, Found, Timed, Tune, Verdict
from sameday.report.curves import points_of, window
from sameday.report.gather import Run, amount_of
from sameday.report.words import PHASES, VERDICTS, between, count, in_order, percent, plain_name, score, seconds, value
from sameday.spec.plan import Plan, changed, claims, description, fields_of
from sameday.spec.recipe import differences
from sameday.spec.words import number


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Row:
    label: str
    cells: list[Cell]
    note: str = ""

    @property
    def alike(self) -> bool:
        return all(cell == self.cells[0] for cell in self.cells)


NONE = Cell("–")


@dataclass(frozen=True)
class Section:
    """A part of the page that the runs themselves do not tell: sentences and a table."""

    name: str
    title: str
    said: list[str]
    heads: list[str]
    rows: list[Row]


# At a glance


def glance(runs: Sequence[Run]) -> list[Row]:
    """What one asks of a run first. A row that no run has is left out."""
    rows = [Row("State", [Cell(*_state(run)) for run in runs])] if len(runs) > 1 else []
    for name in dict.fromkeys(name for run in runs for name in run.scores.get("val", {}) if name != "samples"):
        cells = [_final(run, name) for run in runs]
        rows.append(Row(f"Validation {plain_name(name)}", cells))
    rows.append(Row("Training loss at the end", [_last_loss(run) for run in runs]))
    rows.append(Row("Speed", [_speed(runs, run) for run in runs]))
    rows.append(Row("A step", [_step_time(run) for run in runs]))
    rows.append(Row("Time in steps", [_whole(run) for run in runs]))
    rows.append(Row("Memory, at most", [memory(run) for run in runs]))
    rows.append(Row("Model kept?", [_kept(run) for run in runs]))
    return [row for row in rows if any(cell != NONE for cell in row.cells)]


def _state(run: Run) -> tuple[str, str]:
    word, _, rest = run.state.partition(", " if run.finished else ": ")
    return word, rest


def _final(run: Run, name: str) -> Cell:
    scores = run.scores.get("val", {})
    if name not in scores:
        return NONE
    samples = scores.get("samples")
    return Cell(score(name, scores[name]), f"of {samples:,} {run.recipe.sample}s" if samples else "")


def _last_loss(run: Run) -> Cell:
    losses = [y for _, y in points_of(run.steps, "loss")]
    last = losses[-window(len(losses)) :]
    if not last:
        return NONE
    return Cell(score("loss", statistics.fmean(last)), f"mean of {len(last)} steps" if len(last) > 1 else "last step")


def _speed(runs: Sequence[Run], run: Run) -> Cell:
    if not run.rates:
        return NONE
    first = next(other for other in runs if other.fingerprint == run.fingerprint)
    said = f"{number(statistics.median(run.rates))} / s"
    if first is run or not first.rates:
        return Cell(said, f"{run.recipe.sample}s, {_quartiles(run.rates)}")
    ratio = statistics.median(run.rates) / statistics.median(first.rates)
    return Cell(said, f"{run.recipe.sample}s, {ratio:.3g}× those of {first.label}")


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 4:
        return "median"
    low, _, high = statistics.quantiles(values, n=4)
    return f"median; quartiles {number(low)} to {number(high)}"


def _step_time(run: Run) -> Cell:
    times = run.step_seconds
    if not times:
        return NONE
    waited = sum(amount_of(r, "wait") or 0.0 for r in run.steps)
    whole = sum(amount_of(r, "seconds") or 0.0 for r in run.steps)
    return Cell(
        seconds(statistics.median(times)), f"{percent(waited / whole)} of it waiting for data" if waited else "median"
    )


def _whole(run: Run) -> Cell:
    times = [s for r in run.steps if (s := amount_of(r, "seconds")) is not None]
    if not times:
        return NONE
    seen = sum(amount_of(r, "samples") or 0 for r in run.steps)
    return Cell(seconds(sum(times)), f"{seen:,.0f} {run.recipe.sample}s seen" if seen else "")


def memory(run: Run) -> Cell:
    profile = run.own_profile
    if profile is None or profile.memory_gib is None:
        return NONE
    busy = f"GPU busy {percent(profile.busy)} of the time" if profile.busy is not None else ""
    return Cell(f"{number(profile.memory_gib)} GiB", busy)


def _kept(run: Run) -> Cell:
    if run.verdict is None or run.verdict.verdict is None:
        return NONE
    for whose, _ in _not_of(run, run.verdict):  # the first of them says enough
        return Cell("unknown", f"the verdict below is of {whose}")
    return Cell(run.verdict.verdict, VERDICTS.get(run.verdict.verdict, ""))


def same_losses(runs: Sequence[Run]) -> Iterator[str]:
    """Of runs of one recipe: how far their losses are apart over the steps that both have."""
    for i, run in enumerate(runs):
        first = next(other for other in runs if other.fingerprint == run.fingerprint)
        if first is run:
            continue
        there, here = dict(points_of(first.steps, "loss")), dict(points_of(runs[i].steps, "loss"))
        both = sorted(there.keys() & here.keys())
        if both:
            apart = max(abs(there[s] - here[s]) / (max(abs(there[s]), abs(here[s])) or 1.0) for s in both)
            said = f"differ by at most {apart:.1e}, relative" if apart else "are equal to the bit"
            shared = count(len(both), "step")
            yield f"Over the {shared} that both have, the losses of {first.label} and {run.label} {said}."


def other_inputs_of(runs: Sequence[Run]) -> list[str]:
    """Where a recipe's files had another content for one run than for another."""
    # A suite calls its runs otherwise than their folders.
    return other_inputs([replace(run.inputs, label=run.label) for run in runs if run.inputs is not None])


# Recipes and plans


@dataclass(frozen=True)
class Kind:
    """Runs of one recipe."""

    fingerprint: str
    name: str
    runs: list[Run]
    unlike: list[str]
    """Where it differs from the first recipe."""


def kinds(runs: Sequence[Run]) -> list[Kind]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.fingerprint, []).append(run)
    first = runs[0].recipe
    return [
        Kind(
            name,
            group[0].recipe.name,
            group,
            differences(first, group[0].recipe) if name != runs[0].fingerprint else [],
        )
        for name, group in groups.items()
    ]


SET = "set in the plan"


@dataclass(frozen=True)
class PlanRow:
    name: str
    values: list[str]
    claim: str
    why: list[str]
    about: str
    told: bool
    """Chosen, or not as in the plain plan: what a reader wants to see."""


def plan_rows(runs: Sequence[Run]) -> list[PlanRow]:
    rows = []
    tasks = [fields_of(run.recipe) for run in runs]
    plain = Plan()
    moved = [changed(plain, run.plan, run.recipe.dropout > 0) for run in runs]
    usual = [claims(run.recipe.dropout > 0) for run in runs]
    for name in Plan.model_fields:
        if not any(name in fields for fields in tasks):
            continue
        cells: list[str] = []
        whys: list[tuple[str, str]] = []
        known: dict[str, None] = {}
        for run, fields, off, claim in zip(runs, tasks, moved, usual, strict=True):
            if name not in fields:
                cells.append("–")
                continue
            cells.append(value(getattr(run.plan, name)))
            known[off[name][2] if name in off else claim[name]] = None
            if name in run.choices or name in off:
                whys.append((run.label, run.choices.get(name, SET)))
        about = " ".join(dict.fromkeys(description(name, run.recipe) for run in runs if name in fields_of(run.recipe)))
        told = any(name in off or name in run.choices for run, off in zip(runs, moved, strict=True))
        rows.append(PlanRow(name, cells, " or ".join(known), _merged(whys, len(runs)), about, told))
    for name in dict.fromkeys(name for run in runs for name in run.choices if name not in Plan.model_fields):
        whys = [(run.label, run.choices[name]) for run in runs if name in run.choices]
        rows.append(PlanRow(name, ["–"] * len(runs), "", _merged(whys, len(runs)), "", True))
    return rows


def _merged(whys: list[tuple[str, str]], runs: int) -> list[str]:
    """Each reason once, with the runs that give it where not all do."""
    said = dict.fromkeys(why for _, why in whys)
    if runs == 1 or said.keys() == {SET} or (len(said) == 1 and len(whys) == runs):
        return list(said)
    return [f"{', '.join(label for label, given in whys if given == why)}: {why}" for why in said]


# Where the time goes


def part_rows(runs: Sequence[Run]) -> list[Row]:
    names = in_order(name for run in runs if run.timeline for name in run.timeline.phases)
    rows = []
    for name in names:
        cells = []
        for run in runs:
            took = run.timeline.phases.get(name) if run.timeline else None
            total = run.timeline.total if run.timeline else 0.0
            cells.append(NONE if took is None else Cell(seconds(took), percent(took / total) if total else ""))
        rows.append(Row(PHASES.get(name, name), cells, name if name in PHASES else "other"))
    return rows


def worker_rows(runs: Sequence[Run]) -> list[Row]:
    names = in_order(name for run in runs if run.timeline for name in run.timeline.workers)
    workers = [run.timeline.workers if run.timeline else {} for run in runs]
    return [Row(name, [Cell(seconds(each.get(name))) for each in workers]) for name in names]


def profile_notes(run: Run) -> list[str]:
    """Where a profile is not of this run."""
    if run.profile is None:
        return []
    notes = []
    if not run.has_fingerprint(run.profile.fingerprint):
        notes.append(f"This profile is of another recipe ({run.profile.fingerprint}).")
    odd = run.unlike(run.profile.plan)
    if odd:
        notes.append(f"This profile is of another plan: it differs in {', '.join(odd)}.")
    return notes


# Tuning


@dataclass(frozen=True)
class Tried:
    choice: str
    claim: str
    cells: list[Cell]


def tune_notes(run: Run) -> list[str]:
    """Where a tuning is not of this run's recipe. It is of no plan: it tries many."""
    if run.tune is None or run.has_fingerprint(run.tune.fingerprint):
        return []
    return [f"This tuning is of another recipe ({run.tune.fingerprint})."]


def tried(tune: Tune) -> list[Tried]:
    base, best = (_median(part) for part in (tune.plain, tune.best))
    return [Tried(_choice(each), each.claim, [*_ablated(each, base, best)]) for each in tune.ablation]


def _choice(each: Ablated) -> str:
    fields = each.value if isinstance(each.value, dict) else {each.field: each.value}
    return ", ".join(f"{name}: {value(given)}" for name, given in fields.items()) or each.field


def _ablated(each: Ablated, base: float | None, best: float | None) -> Iterator[Cell]:
    for part, against, what in (
        (each.alone, base, "plain"),
        (each.added, base, "plain"),
        (each.left_out, best, "best"),
    ):
        took = _median(part)
        if part is None or took is None:
            yield Cell("failed", part.failed) if part is not None and part.failed else NONE
            continue
        ratio = f"{against / took:.3g}× {what}" if against and took else ""
        memory = f"{number(part.memory_gib)} GiB" if part.memory_gib is not None else ""
        yield Cell(spread(part), ", ".join(filter(None, (ratio, memory))))


def _median(part: Timed | None) -> float | None:
    return part.seconds.median if part is not None and part.seconds is not None else None


def spread(part: Timed | None) -> str:
    if part is None or part.seconds is None:
        return "–"
    low, high = part.seconds.least, part.seconds.most
    return seconds(part.seconds.median) + (f" ({seconds(low)} to {seconds(high)})" if low and high else "")


def whole_run(part: Timed) -> str:
    return between(*(3600 * hours for hours in part.finish_hours)) if part.finish_hours else "–"


def gain(tune: Tune) -> str:
    """As it was compared, step by step; of the medians where nobody did."""
    if tune.times:
        return f"{tune.times:.3g}×"
    base, best = _median(tune.plain), _median(tune.best)
    return f"{base / best:.3g}×" if base and best else ""


# The verdict

MEASURES = {
    "gradient": ("gradient at the start", "gradient", "gradient"),
    "tensor": ("gradient of one tensor", "tensor", "tensor"),
    "ratio_tensor": ("R of one tensor", "ratio_tensor", "ratio_tensor"),
    "slope": ("slope against the reference", "slope", "slope"),
    "ratio_all": ("R of all tensors", "ratio_all", "ratio_all"),
    "ratio_group": ("R of one kind of tensors", "ratio_group", "ratio_group"),
    "starting loss": ("loss at the start", "", ""),
    "loss": ("loss of a step", "loss", "bf16_loss"),
    "norm": ("norm of the gradient", "trained_gradient", "bf16_norm"),
    "trained gradient": ("gradient in training", "trained_gradient", "bf16_trained_gradient"),
    "trained update": ("update of the weights", "update", "bf16_update"),
    "validation": ("validation loss", "loss", "bf16_loss"),
    "replay": ("update replayed in float64", "replay", "replay"),
}
"""Each measure's name, and its limit in float32 and in bf16."""


def measures(verdict: Verdict) -> list[tuple[str, str, str, str]]:
    """Name, largest, limit, and whose it is. Where limits differ, it is the largest over its own limit."""
    half = bool(verdict.groups) and verdict.precision != "float32"
    rows = []
    for key, largest in verdict.largest.items():
        name, *limits = MEASURES.get(key, (key, "", ""))
        limit = verdict.bounds.get(key, verdict.limits.get(limits[half]))
        rows.append((name, _small(largest), _small(limit), verdict.whose.get(key, "")))
    for kind in verdict.compared:
        beyond = f"{kind.beyond:,} beyond" if kind.beyond else "none beyond"
        rows.append((kind.name, _small(kind.largest), _small(kind.limit), f"{kind.count:,} compared, {beyond}"))
    return rows


def group_rows(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Kinds of tensors by R, all of them together first."""
    names = sorted(verdict.groups, key=lambda k: (k != "all", -(verdict.groups[k].get("R") or 0.0)))
    usual = {name: verdict.limits.get("ratio_all" if name == "all" else "ratio_group") for name in names}
    limit = {name: verdict.groups[name].get("limit", usual[name]) for name in names}
    return [(name, _small(verdict.groups[name].get("R")), _small(limit[name])) for name in names]


def _small(given: float | None) -> str:
    return "–" if given is None else f"{given:.1e}" if 0 < abs(given) < 1e-3 else f"{given:.3g}"


def unlike(verdict: Verdict) -> list[str]:
    if isinstance(verdict.differences, dict):
        return [f"{label}: {line}" for label, lines in verdict.differences.items() for line in lines]
    return [_found(each) for each in verdict.differences]


def _found(each: Found) -> str:
    when = "before the first step" if each.step == 0 else f"step {each.step}" if each.step else "over all steps"
    return f"{when}, {each.what}: {each.name}: {each.text}"


def verdict_notes(run: Run) -> list[str]:
    """Where a verdict is not of this run."""
    return [f"This verdict is of {whose}{more}." for whose, more in _not_of(run, run.verdict)] if run.verdict else []


def _not_of(run: Run, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What else a verdict is of than this run, and how that shows."""
    if not run.has_fingerprint(verdict.recipe):
        yield "another recipe", f" ({verdict.recipe})"
    odd = run.unlike(verdict.judged)
    if odd:
        yield "another plan", f": it differs from the run's in {', '.join(odd)}"
    if of_other_runs(verdict.runs, run.path):
        yield "other runs", f": {' and '.join(verdict.runs)}"


# The environment


def environment_rows(runs: Sequence[Run]) -> list[Row]:
    environments = []
    for run in runs:
        env = run.environment
        versions = env.get("versions") if isinstance(env.get("versions"), dict) else {}
        flat = {"Started": env.get("started"), "Machine": env.get("hostname"), "System": env.get("platform")}
        if run.profile is not None and run.profile.machine.get("name"):
            flat["Device"] = run.profile.machine["name"]
        flat |= {"Python": env.get("python"), **(versions or {}), "Recipe's folder": env.get("recipe_dir")}
        environments.append({name: str(given) for name, given in flat.items() if given is not None})
    names = dict.fromkeys(name for flat in environments for name in flat)
    return [Row(name, [Cell(flat.get(name, "–")) for flat in environments]) for name in names]
