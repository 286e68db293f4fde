"""Finished runs side by side: two of one recipe step by step, those of several recipes by their metrics over seeds."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sameday.record import checkpoint
from sameday.record.folder import RunFolder, plain, stage_folders
from sameday.record.inputs import Inputs, other_inputs, same_scored
from sameday.record.metrics import sound_metrics, told
from sameday.spec.errors import EXIT_BAD_INPUT, BadInput
from sameday.spec.plan import changed
from sameday.spec.reading import JSON, read_file
from sameday.spec.recipe import Recipe, differences
from sameday.verify.report import HEIGHT, WIDTH

LIMIT = 1e-5  # of a loss, relative; of a tensor, norm of the difference over norm: the check people do by hand
APART = 1e-2  # of a tensor: so far rounding alone drives weights apart, as AdamW makes whole updates of small gradients
Verdict = Literal["bitwise", "rounding", "undecided", "different"]
WORDS: dict[Verdict, str] = {
    "bitwise": "the same to the bit: all that was compared is equal",
    "rounding": "the same to rounding: no difference is beyond its limit",
    "undecided": "not decided: losses agree, weights are further apart than the limit, as rounding can drive them too",
    "different": "different: these runs are further apart than the limits allow",
}
ADVICE = (
    "Runs of equivalent plans part too, in bf16 and after many steps above all, since rounding grows from step to "
    "step, and AdamW makes whole updates of small gradients, from the first step on: `sameday verify RECIPE --plan A "
    "--against B` tells the two apart."
)

GAPS = "different: what was compared agrees, and not all steps could be"
"""In place of the words for `different` where steps are missing."""
DRAWN = (
    "not decided: a plan draws dropout otherwise, and runs of one seed cannot tell that from a difference; what does "
    "not depend on the draw agrees"
)
"""In place of the words for `undecided` where a field in which the plans differ claims no more than statistical."""
DRAWN_ADVICE = (
    "Another draw of dropout drives losses, scores and weights apart from the first steps on, as another seed does: "
    "`sameday verify RECIPE --plan A --against B` compares the two plans with dropout off, and tells."
)


@dataclass(frozen=True)
class RunsReport:
    """Whether two runs of one recipe trained the same model."""

    verdict: Verdict | None
    text: list[str]
    data: dict[str, Any]

    @property
    def exit_code(self) -> int:
        return {"different": 1, "undecided": EXIT_BAD_INPUT}.get(self.verdict or "", 0)

    def lines(self) -> list[str]:
        """At most 40 lines of at most 100 columns, whatever paths and values there are."""
        wrap = textwrap.TextWrapper(WIDTH, subsequent_indent="    ", break_on_hyphens=False).wrap
        cut = [part for line in self.text for part in wrap(line)]
        shown = cut[: HEIGHT - 1]
        return (
            cut if len(cut) <= HEIGHT else [*shown, f"... and {len(cut) - len(shown)} more lines; --json has all of it"]
        )

    def as_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "exit_code": self.exit_code, **plain(self.data)}


class RecipesReport(RunsReport):
    """Recipes that are known to differ, by their metrics: there is no verdict, and nothing that fails."""


@dataclass
class Kind:
    """One kind of value, compared at each step, or at each tensor of a step, that both runs have."""

    name: str
    limit: float = LIMIT
    count: int = 0
    equal: bool = True  # to the bit
    beyond: int = 0
    largest: float = 0.0
    largest_at: tuple[int, str] | None = None  # step and tensor
    first_beyond: tuple[int, str, str] | None = None  # and what stands there
    first_unlike: tuple[int, str, str] | None = None  # where there is no distance: another shape, no number, not finite

    def add(self, at: tuple[int, str], apart: float, equal: bool, values: str) -> None:
        apart = math.inf if math.isnan(apart) else apart
        self.count, self.equal = self.count + 1, self.equal and equal
        if apart > self.largest:
            self.largest, self.largest_at = apart, at
        if apart > self.limit:
            self.beyond += 1
            self.first_beyond = self.first_beyond or (*at, values)
        if math.isinf(apart):
            self.first_unlike = self.first_unlike or (*at, values)

    @property
    def first_undrawn(self) -> tuple[int, str, str] | None:
        """The first difference that no other draw of dropout makes."""
        return self.first_unlike if self.limit else self.first_beyond

    def add_numbers(self, step: int, a: Any, b: Any, relative: bool = True) -> None:
        apart = math.inf  # what is no number is not there, or was not finite: it proves nothing
        if isinstance(a, int | float) and isinstance(b, int | float):
            apart = abs(a - b) / ((relative and max(abs(a), abs(b))) or 1.0)
        self.add((step, ""), apart, a == b, f"{a!r} in A, {b!r} in B")


def compare_runs(a: Path, b: Path) -> RunsReport:
    """Two finished runs of one recipe. BadInput where they are not, or began with different models or data."""
    runs = one, two = RunFolder.read(a), RunFolder.read(b)
    for run in runs:
        if stages := stage_folders(run.path):
            raise BadInput(f"{run.path}: is a run in stages; compare them one by one, such as {stages[0]}")
        if not run.result.is_dir():
            raise BadInput(f"{run.path}: the run is not finished: it has no {run.result.name}/ yet")
    if a.resolve() == b.resolve():
        raise BadInput(f"{b}: is given twice; two runs are needed")
    if one.recipe.fingerprint != two.recipe.fingerprint:
        listed = "\n".join(f"  {line}" for line in differences(one.recipe, two.recipe))
        raise BadInput(
            f"{b}: is a run of another recipe ({two.recipe.fingerprint} here) than {a} ({one.recipe.fingerprint} "
            f"there):\n{listed}\nDifferent recipes can only be compared by their metrics: add --recipes."
        )
    sound, damaged = zip(*(sound_metrics(run.metrics_path) for run in runs), strict=True)
    notes = [*_same_inputs(one, two), *_other_results(one, two), *_left_out(runs, damaged)]
    records = [{(r["step"], r.get("split") or ""): r for r in each} for each in sound]
    steps = [{step: r for (step, split), r in each.items() if not split} for each in records]
    saved = [dict(checkpoint.steps(run.checkpoints)) for run in runs]
    ends = [max([0, *there, *kept]) for there, kept in zip(steps, saved, strict=True)]
    last = max(ends)
    if not last:
        raise BadInput(f"{a} and {b}: neither metrics.jsonl nor checkpoints/ holds a step to compare")
    gaps = [gap for run, there, end in zip(runs, steps, ends, strict=True) if (gap := _gap(run, there, end))]
    if ends[0] != ends[1]:
        gaps.append(f"{a} ends at step {ends[0]}, {b} at step {ends[1]}")
    numbers = {"loss": Kind("training loss"), "lr": Kind("learning rate", 0.0), "samples": Kind("samples", 0.0)}
    for step in sorted(steps[0].keys() & steps[1].keys()):
        for key, kind in numbers.items():
            kind.add_numbers(step, steps[0][step].get(key), steps[1][step].get(key))
    kept, final = Kind("weights at checkpoints"), Kind("final weights")
    for step in sorted(saved[0].keys() & saved[1].keys()):
        _compare_weights(kept, step, saved[0][step], saved[1][step])
    _compare_weights(final, last, one.result, two.result)
    kinds = [*numbers.values(), *_compare_scores(*records), kept, final]

    plans, recipe = _plan_differences(one, two), one.recipe
    drawn = any(plan["claim"] == "statistical" for plan in plans)
    verdict = "different" if gaps else _verdict(kinds, (kept, final), plans, drawn)
    words = DRAWN if drawn and verdict == "undecided" else WORDS[verdict]
    advice = {"undecided": DRAWN_ADVICE if drawn else ADVICE, "different": "" if drawn else ADVICE}.get(verdict)
    if not any(kind.beyond for kind in kinds):
        words, advice = GAPS if gaps else words, None
    notes += [advice] if advice else []
    about = f"recipe {recipe.name} {recipe.fingerprint}: {recipe.precision}, seed {recipe.seed}, {last} steps"
    text = [words, f"A: {a}", f"B: {b}", about, *_plan_lines(plans), *_table(kinds)]
    text += [*gaps, *_first_lines(kinds, drawn and verdict == "different"), *notes]
    data = {"runs": [a, b], "recipe": recipe.fingerprint, "precision": recipe.precision, "steps": last, "plans": plans}
    data |= {"limit": LIMIT, "compared": [asdict(kind) for kind in kinds], "gaps": gaps, "notes": notes}
    data |= {"damaged": [line for lines in damaged for line in lines]}
    return RunsReport(verdict, text, data)


def _gap(run: RunFolder, there: Collection[int], end: int) -> str | None:
    """What is told of a run's record that has not all steps up to its end, however far that is."""
    missing = end - sum(0 < step <= end for step in there)
    if not missing:
        return None
    first = next(step for step in itertools.count(1) if step not in there)
    return f"{run.metrics_path}: {missing} of {end} steps are missing, the first is step {first}"


def _verdict(kinds: Sequence[Kind], weights: Sequence[Kind], plans: list[dict[str, Any]], drawn: bool) -> Verdict:
    """Between plans that round otherwise weights alone may part without a verdict. Where dropout was drawn otherwise
    losses and scores may too, however far: nobody has measured how far another draw drives a recipe."""
    beyond = [kind for kind in kinds if kind.beyond]
    if not beyond:
        return "bitwise" if all(kind.equal for kind in kinds) else "rounding"
    if drawn:
        return "different" if any(kind.first_undrawn for kind in kinds) else "undecided"
    rounds = any(plan["claim"] == "rounding" for plan in plans)
    near = all(any(kind is one for one in weights) and kind.largest <= APART for kind in beyond)
    return "undecided" if rounds and near else "different"


def _same_inputs(one: RunFolder, two: RunFolder) -> list[str]:
    """A recipe names its model and data; what they held stands in the checkpoints. A note where it cannot be read."""
    a, b = (_inputs(run) for run in (one, two))
    for run, known in ((one, a), (two, b)):
        if known.digests is None:
            return [f"base model and training data are not compared: {run.path} has no checkpoint that names them"]
    if names := a.unlike(b):
        raise BadInput(f"{two.path}: has the recipe of {one.path}, but another {' and another '.join(names)}")
    return []


def _inputs(run: RunFolder) -> Inputs:
    return Inputs.of(str(run.path), run.recipe, run.checkpoints)


def _other_results(one: RunFolder, two: RunFolder) -> Iterator[str]:
    """Where the best weights are the result, rounding may decide between two steps that are nearly as good."""
    steps = []
    for run in (one, two):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # an earlier release recorded none
            steps.append(json.loads((run.path / "eval.json").read_text())["result"]["step"])
    if len(steps) == 2 and steps[0] != steps[1]:
        yield f"the final weights are those of step {steps[0]} in A, of step {steps[1]} in B: the best of each run"


def _left_out(runs: Sequence[RunFolder], damaged: Sequence[list[str]]) -> Iterator[str]:
    for run, lines in zip(runs, damaged, strict=True):
        yield from (f"{line}; left out" for line in told(run.metrics_path, lines))


def _compare_scores(*metrics: dict[tuple[int, str], dict[str, Any]]) -> list[Kind]:
    kinds: dict[str, Kind] = {}
    for step, split in sorted(at for at in metrics[0].keys() & metrics[1].keys() if at[1]):
        a, b = (records[step, split] for records in metrics)
        # Rounding moves a share of right answers by whole samples or not at all: one may change sides.
        limits = {"loss": LIMIT, "samples": 0.0}
        share = (1 + 1e-9) / (a.get("samples") or math.inf)
        for name in sorted((a.keys() | b.keys()) - {"step", "split"}):
            kind = kinds.setdefault(f"{split} {name}", Kind(f"{split} {name}", limits.get(name, share)))
            kind.add_numbers(step, a.get(name), b.get(name), relative=name in limits)
    return list(kinds.values())


def _compare_weights(kind: Kind, step: int, a: Path, b: Path) -> None:
    """One tensor at a time, so that models which fill the memory can be compared."""
    import torch

    with contextlib.ExitStack() as held:
        sides = [_open_weights(folder, held) for folder in (a, b)]
        for name in sorted(sides[0].keys() | sides[1].keys()):
            x, y = (side[name].get_tensor(name) if name in side else None for side in sides)
            forms = [None if t is None else (str(t.dtype), *t.shape) for t in (x, y)]
            if x is None or y is None or forms[0] != forms[1]:
                kind.add((step, name), math.inf, False, f"{forms[0]} in A, {forms[1]} in B")
                continue
            equal = torch.equal(*(t.flatten().view(torch.uint8) for t in (x, y)))
            apart = 0.0 if equal else _apart(x.flatten(), y.flatten())
            kind.add((step, name), apart, equal, f"{apart:.1e} apart" if math.isfinite(apart) else "not finite")


def _open_weights(folder: Path, held: contextlib.ExitStack) -> dict[str, Any]:
    """Each tensor's name with the open file that has it: a model may be saved in several."""
    from safetensors import SafetensorError, safe_open

    why = checkpoint.fault(folder)
    if why is not None:
        raise BadInput(f"{folder}: cannot be compared: {why}")
    files: dict[str, Any] = {}
    for path in sorted(set(folder.glob("*.safetensors")) - {folder / checkpoint.OPTIMIZER}):
        try:
            file = held.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from None
        files |= dict.fromkeys(file.keys(), file)
    if not files:
        raise BadInput(f"{folder}: holds no weights (*.safetensors)")
    return files


def _apart(x: Any, y: Any) -> float:
    """Norm of the difference over the larger norm. In float64, so a piece at a time."""
    sums = [0.0, 0.0, 0.0]
    for p, q in zip(x.split(1 << 24), y.split(1 << 24), strict=True):
        p, q = p.double(), q.double()
        sums = [s + float(v.square().sum()) for s, v in zip(sums, (p - q, p, q), strict=True)]
    return math.sqrt(sums[0] / (max(sums[1:]) or 1.0))


def _plan_differences(one: RunFolder, two: RunFolder) -> list[dict[str, Any]]:
    fields = changed(one.plan, two.plan, one.recipe.dropout > 0)
    return [{"field": field, "claim": claim, "a": a, "b": b} for field, (a, b, claim) in fields.items()]


def _plan_lines(plans: list[dict[str, Any]]) -> Iterator[str]:
    yield "plans differ (A / B); each field's claim:" if plans else "plans: equal in every field"
    for claim in ("bitwise", "rounding", "statistical"):
        said = [f"{p['field']} {_crop(p['a'], 30)} / {_crop(p['b'], 30)}" for p in plans if p["claim"] == claim]
        if said:
            why = " (another draw of dropout: only metrics over seeds can agree)" if claim == "statistical" else ""
            yield f"  {claim}{why}: {', '.join(said)}"


def _table(kinds: list[Kind]) -> Iterator[str]:
    yield f"{'difference of':24}{'compared':>8}{'beyond':>8}{'limit':>9}{'largest':>10}  at"
    for kind in kinds:
        limit, largest = f"{kind.limit:.2g}" if kind.limit else "equal", f"{kind.largest:.1e}" if kind.largest else "0"
        at = f"step {kind.largest_at[0]} {_crop(kind.largest_at[1], 26)}" if kind.largest_at else ""
        yield f"{_crop(kind.name, 23):24}{kind.count:8}{kind.beyond:8}{limit:>9}{largest:>10}  {at}"


def _first_lines(kinds: list[Kind], undrawn: bool) -> Iterator[str]:
    """The first step at which a number is beyond its limit, and the first tensor; `undrawn` as no draw of dropout makes
    them."""
    named = [(kind.first_undrawn if undrawn else kind.first_beyond, kind.name) for kind in kinds]
    firsts = sorted((*first, name) for first, name in named if first)
    for what, places in (("step", [f for f in firsts if not f[1]]), ("tensor", [f for f in firsts if f[1]])):
        for step, tensor, values, name in places[:1]:
            yield f"first {what} beyond its limit: {name}, step {step}{tensor and f', {tensor}'}: {values}"


def _crop(value: Any, width: int) -> str:
    return str(value) if len(str(value)) <= width else "…" + str(value)[1 - width :]


def compare_recipes(runs: Sequence[Path]) -> RecipesReport:
    """Runs of two or more recipes, one run of each seed, by the validation scores that they ended with."""
    recipes: dict[str, tuple[Recipe, list[RunFolder]]] = {}
    for run in map(RunFolder.read, runs):
        recipe = run.recipe.model_copy(update={"seed": 0})  # its fingerprint names the recipe over all seeds
        _, group = recipes.setdefault(recipe.fingerprint, (recipe, []))
        for other in group:
            if other.recipe.seed == run.recipe.seed:
                raise BadInput(f"{run.path}: has the recipe and the seed of {other.path}; give one run of each seed")
            _same_inputs(other, run)
        group.append(run)
    if len(recipes) < 2:
        named = ", ".join(map(str, runs))
        raise BadInput(f"{named}: one recipe, whatever the seed; --recipes compares two or more, without it two runs")
    tasks = {recipe.task: group[0].path for recipe, group in recipes.values()}
    if len(tasks) > 1:
        named = ", ".join(f"{task} ({path})" for task, path in tasks.items())
        raise BadInput(f"runs of several tasks have no scores to compare: {named}")
    groups = {f"{recipe.name} {recipe.fingerprint}": (recipe, group) for recipe, group in recipes.values()}
    (first, (before, _)), *others = groups.items()
    listed = {label: differences(before, recipe) for label, (recipe, _) in others}
    fields = dict.fromkeys(line.split(": ")[0] for lines in listed.values() for line in lines)
    text = [f"DIFFERENT RECIPES: they differ in {', '.join(fields)}"]
    for label, lines in listed.items():
        text += [f"{label} (here) against {first} (there):", *(f"  {line[:98]}" for line in lines[:8])]
        text += [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    scores = {label: {run.recipe.seed: _scores(run) for run in group} for label, (_, group) in groups.items()}
    every = [each for seeds in scores.values() for each in seeds.values()]
    inputs = [_inputs(run) for _, group in groups.values() for run in group]
    deciding = {*before.scored_by, *(() if same_scored(inputs) else before.scored_on)}
    if len({each.get("samples") for each in every}) > 1 or deciding & fields.keys():
        text.append("note: the validation samples, or their weights in the loss, differ: scores are not of one kind")
    text += [f"note: {line}" for line in other_inputs(inputs)]
    for name in every[0]:
        if name != "samples" and all(name in each for each in every):
            text += _score_lines(name, {k: [each[name] for each in seeds.values()] for k, seeds in scores.items()})
    return RecipesReport(None, text, {"runs": runs, "differences": listed, "val": scores})


def _scores(run: RunFolder) -> dict[str, float]:
    path = run.path / "eval.json"
    try:
        scores = {name: float(value) for name, value in json.loads(read_file(path, JSON))["val"].items()}
        scores["loss"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path}: has no validation scores; a run whose recipe has data.val ends with them") from None
    return scores


def _score_lines(name: str, groups: dict[str, list[float]]) -> Iterator[str]:
    yield f"{'validation ' + name:40}{'seeds':>6}{'mean':>12}{'least':>12}{'most':>12}{'std':>12}"
    for label, values in groups.items():
        deviation = f"{statistics.stdev(values):.2g}" if len(values) > 1 else "-"
        numbers = "".join(f"{value:12.6g}" for value in (statistics.fmean(values), min(values), max(values)))
        yield f"  {_crop(label, 37):38}{len(values):6}{numbers}{deviation:>12}"
    if len(groups) == 2:
        a, b = groups.values()
        apart, spread = statistics.fmean(b) - statistics.fmean(a), max(max(v) - min(v) for v in (a, b))
        said = f"{'larger' if abs(apart) > spread else 'not larger'} than the spread over seeds, {spread:.3g}"
        if min(len(a), len(b)) == 1:
            said = f"one seed {'each' if len(a) == len(b) else 'of one'} cannot tell it from a difference of seeds"
        yield f"  means, second - first: {apart:+.3g}, {said}"
