"""A run folder becomes plain data for a page. What a run lacks is no error: it is listed, with what would make it."""

from __future__ import annotations

import contextlib
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sameday.record.folder import RunFolder, stage_folders
from sameday.record.inputs import Inputs
from sameday.record.judged import unlike
from sameday.record.metrics import is_number, is_step, sound_metrics, told
from sameday.record.stopped import STOPPED
from sameday.report.answers import Answers, read_answers
from sameday.report.beside import OLD_PHASES, Profile, Tune, Verdict, read_beside, read_json
from sameday.report.words import count, in_order
from sameday.spec.document import dump_yaml
from sameday.spec.errors import EXIT_DISK_FULL, EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, BadInput, refuse
from sameday.spec.plan import Plan
from sameday.spec.reading import METRICS
from sameday.spec.recipe import Recipe
from sameday.spec.removed import without_removed

Record = dict[str, Any]

ENDS = {
    EXIT_DIVERGED: "diverged",
    EXIT_OUT_OF_MEMORY: "out of memory",
    EXIT_DISK_FULL: "disk full",
    EXIT_STOPPED: "asked to stop",
}


@dataclass(frozen=True)
class Missing:
    """What a page about this run cannot show, and what would give it."""

    what: str
    remedy: str = ""
    command: str = ""


@dataclass(frozen=True)
class Timeline:
    """Mean seconds of the phases of a step."""

    phases: dict[str, float]
    workers: dict[str, float]
    source: str

    @property
    def total(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class Stopped:
    """What ended a run before its last step, in a word and in the run's own."""

    word: str
    why: str


@dataclass
class Run:
    """Everything that files say about one run."""

    label: str
    path: Path
    recipe: Recipe
    plan: Plan
    recipe_text: str
    plan_text: str
    environment: dict[str, Any]
    steps: list[Record]
    evaluations: list[Record]
    choices: dict[str, str]
    skipped: list[dict[str, str]] | None
    scores: dict[str, dict[str, float]]
    best_step: int | None
    finished: bool
    stopped: Stopped | None = None
    profile: Profile | None = None
    tune: Tune | None = None
    verdict: Verdict | None = None
    answers: list[Answers] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    trained: bool = True
    """Otherwise its weights came from elsewhere, and were evaluated."""
    inputs: Inputs | None = None
    named_before: frozenset[str] = frozenset()
    """Fingerprints that earlier releases gave this recipe."""
    damaged: list[str] = field(default_factory=list)
    """What is wrong with lines of its metrics, which are left out; a sentence for each."""

    @property
    def fingerprint(self) -> str:
        return self.recipe.fingerprint

    def has_fingerprint(self, recorded: str | None) -> bool:
        """Whether what another command recorded is of this run's recipe, or does not say of which it is."""
        return recorded in (None, self.fingerprint, *self.named_before)

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.steps), default=0)

    @property
    def state(self) -> str:
        if not self.trained:
            return "evaluated, not trained"
        of = f" of {self.recipe.max_steps:,}" if self.recipe.max_steps else ""
        if self.finished and not self.steps and (stages := self.recipe.stage_recipes()):
            return f"finished, {count(len(stages), 'stage')}"
        if self.finished:
            return f"finished, {count(self.last_step, 'step')}"
        why = f", {self.stopped.word}" if self.stopped else ""
        return f"unfinished: step {self.last_step:,}{of}{why}" if self.steps else f"unfinished: no step yet{why}"

    @property
    def damaged_told(self) -> list[str]:
        return told(self.path / "metrics.jsonl", self.damaged)

    @property
    def rates(self) -> list[float]:
        """Samples per second of each step but the first, which pays for the start."""
        timed = [r for r in self.steps if amount_of(r, "seconds") and amount_of(r, "samples")]
        return [rate for r in timed[1:] or timed if is_number(rate := r["samples"] / r["seconds"])]

    @property
    def step_seconds(self) -> list[float]:
        timed = [s for r in self.steps if (s := amount_of(r, "seconds"))]
        return timed[1:] or timed

    def unlike(self, plan: dict[str, Any]) -> list[str]:
        """Fields of this plan that say how a step is computed, and say it otherwise than the run's."""
        return unlike(self.plan, plan)

    @property
    def own_profile(self) -> Profile | None:
        """The profile, where it is of this recipe and this plan."""
        profile = self.profile
        if profile is None or not self.has_fingerprint(profile.fingerprint) or self.unlike(profile.plan):
            return None
        return profile

    @property
    def floor(self) -> float | None:
        """Seconds of the least step under this plan."""
        return self.own_profile.floor.seconds if self.own_profile and self.own_profile.floor else None

    @property
    def timeline(self) -> Timeline | None:
        profile = self.own_profile
        if profile is not None and (phases := _amounts(profile.phases)):
            steps = count(profile.steps, "step") if profile.steps else "steps"
            return Timeline(_ordered(phases), _amounts(profile.workers), f"profile.json: the mean of {steps}")
        timed = [r.get("phases", r.get(OLD_PHASES)) for r in self.steps]
        watched = [amounts for each in timed if isinstance(each, dict) and (amounts := _amounts(each))]
        if not watched:
            return None
        names = dict.fromkeys(name for each in watched for name in each)
        phases = {name: statistics.fmean(each.get(name, 0.0) for each in watched) for name in names}
        stages = {
            name: statistics.fmean(known)
            for name in ("read", "decode", "resize")
            if name not in phases
            and (known := [value for r in self.steps if (value := amount_of(r, name)) is not None])
        }
        return Timeline(_ordered(phases), stages, f"metrics.jsonl: the mean of {count(len(watched), 'step')}")


def gather(
    paths: Sequence[Path],
    profiles: Sequence[Path] = (),
    tunes: Sequence[Path] = (),
    verdicts: Sequence[Path] = (),
) -> list[Run]:
    """The runs in these folders. Files that are named go with the runs in their order; others are looked for beside
    each run."""
    if not paths:
        raise BadInput("no run folder is given")
    paths = with_stages(paths)
    for option, given in (("--profile", profiles), ("--tune", tunes), ("--verify", verdicts)):
        if len(given) > len(paths):
            raise BadInput(f"{option} is given {len(given)} times for {len(paths)} runs: at most one for each")
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise BadInput(f"{path}: is given twice")
        seen[path.resolve()] = path
    labels = _labels(paths)
    runs, problems = [], []
    for i, path in enumerate(paths):
        named = [given[i] if i < len(given) else None for given in (profiles, tunes, verdicts)]
        try:
            runs.append(_read_run(path, labels[i], *named))
        except BadInput as error:
            problems.append(str(error))
    refuse(problems)
    return runs


def only_evaluated(path: Path, label: str, recipe: Recipe, plan: Plan) -> Run:
    """What stands in for a run where weights that nobody trained here were evaluated."""
    texts = dump_yaml(recipe), dump_yaml(plan)
    return Run(label, path, recipe, plan, *texts, {}, [], [], {}, None, {}, None, finished=True, trained=False)


def with_stages(paths: Sequence[Path]) -> list[Path]:
    """A run in stages as its stages, in order, each a run; and itself, where it was evaluated as a whole."""
    listed: list[Path] = []
    for path in paths:
        stages = stage_folders(path)
        itself = [path] if not stages or any(path.glob("eval-*.json")) else []
        listed += [*stages, *itself]
    return listed


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_run(path: Path, label: str, profile: Path | None, tune: Path | None, verdict: Path | None) -> Run:
    if not path.is_dir():
        raise BadInput(f"{path}: is a file, not a run folder" if path.exists() else f"{path}: no such folder")
    environment = _environment(path / "environment.json")
    folder = RunFolder.read(path)
    metrics, damaged = _metrics(folder)
    records = {(record["step"], record.get("split")): record for record in metrics}
    scores, best = _scores(path)
    run = Run(
        label=label,
        path=path,
        recipe=folder.recipe,
        plan=folder.plan,
        recipe_text=dump_yaml(folder.recipe),
        plan_text=dump_yaml(folder.plan),
        environment=environment,
        steps=[record for (_, split), record in sorted(records.items(), key=_by_step) if split is None],
        evaluations=[record for (_, split), record in sorted(records.items(), key=_by_step) if split is not None],
        choices={str(k): str(v) for k, v in without_removed(_mapping(path / "choices.json")).items()},
        skipped=_skipped(path / "skipped.json"),
        scores=scores,
        best_step=best,
        finished=folder.result.is_dir() or _stages_finished(path),
        stopped=_stopped(path / STOPPED),
        profile=_beside(path / "profile.json", profile, Profile),
        tune=_beside(path / "tune.json", tune, Tune),
        verdict=_beside(path / "verify.json", verdict, Verdict),
        answers=read_answers(path),
        inputs=Inputs.of(label, folder.recipe, folder.checkpoints),
        named_before=_named_before(folder),
        damaged=damaged,
    )
    run.missing = [] if stage_folders(path) else _missing(run)
    return run


def _stages_finished(path: Path) -> bool:
    stages = stage_folders(path)
    return bool(stages) and all((each / RunFolder.read(each).recipe.result).is_dir() for each in stages)


def _named_before(folder: RunFolder) -> frozenset[str]:
    """As the folder is called, and as its checkpoints say: a run has one recipe."""
    names = {folder.path.resolve().name.rpartition("-")[2]}
    for file in folder.checkpoints.glob("step-*/state.json"):
        with contextlib.suppress(BadInput):
            names.add(str(_mapping(file).get("fingerprint")))
    return frozenset(names)


def _by_step(item: tuple[tuple[int, str | None], Record]) -> tuple[int, str]:
    (step, split), _ = item
    return step, split or ""


def _beside(usual: Path, named: Path | None, kind: Any) -> Any:
    """A file that was named must be there; one that is looked for need not be."""
    if named is None and not usual.is_file():
        return None
    return read_beside(named or usual, kind)


def _mapping(path: Path) -> dict[str, Any]:
    mapping = read_json(path) if path.is_file() else {}
    if not isinstance(mapping, dict):
        raise BadInput(f"{path}: is not what a run wrote: must be a mapping")
    return mapping


def _stopped(path: Path) -> Stopped | None:
    if not path.is_file():
        return None
    record = _mapping(path)
    why, code = record.get("why"), record.get("code")
    if not isinstance(why, str) or not isinstance(code, int):
        raise BadInput(f"{path}: is not what a run wrote: must say why and with which code the run ended")
    return Stopped(ENDS.get(code, f"exit code {code}"), why)


def _environment(path: Path) -> dict[str, Any]:
    """Checked before RunFolder reads it, whose advice is for a run that is to be gone on with."""
    environment = _mapping(path)
    if path.is_file() and not isinstance(environment.get("recipe_dir"), str):
        raise BadInput(
            f"{path}: is not what a run wrote: recipe_dir must name the recipe's folder; put the file back as it was, "
            "or leave this run out"
        )
    return environment


def _metrics(folder: RunFolder) -> tuple[list[Record], list[str]]:
    """The records, and what is wrong with lines that are none."""
    try:
        return sound_metrics(folder.metrics_path, most=METRICS)
    except OSError as error:
        raise BadInput(f"{folder.metrics_path}: cannot be read: {error.strerror}") from None


def _skipped(path: Path) -> list[dict[str, str]] | None:
    if not path.is_file():
        return None
    skipped = read_json(path)
    if not isinstance(skipped, list) or not all(isinstance(each, dict) for each in skipped):
        raise BadInput(f"{path}: is not what a run wrote: must be a list of what was left out")
    return [{"where": str(each.get("where", "")), "what": str(each.get("what", ""))} for each in skipped]


def _scores(path: Path) -> tuple[dict[str, dict[str, float]], int | None]:
    """Final scores by split: those of the run's end and of every `sameday eval` after it; and the best step."""
    ended = _mapping(path / "eval.json")
    scores = {"val": ended.get("val")}
    for file in sorted(path.glob("eval-*.json")):
        scores[file.stem.removeprefix("eval-")] = _mapping(file)
    best = ended.get("best")
    step = best.get("step") if isinstance(best, dict) else None
    if step is not None and not is_step(step):
        raise BadInput(f"{path / 'eval.json'}: is not what a run wrote: best.step must be the number of a step")
    return {k: _numbers(v) for k, v in scores.items() if isinstance(v, dict) and v}, step


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {str(k): v for k, v in values.items() if is_number(v)}


def _amounts(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in _numbers(values).items() if value >= 0}


def _ordered(phases: dict[str, float]) -> dict[str, float]:
    return {name: phases[name] for name in in_order(phases)}


def number_of(record: Record, key: str) -> float | None:
    value = record.get(key)
    return value if is_number(value) else None


def amount_of(record: Record, key: str) -> float | None:
    """A duration or a count: a number that is not negative."""
    value = number_of(record, key)
    return value if value is not None and value >= 0 else None


def _missing(run: Run) -> list[Missing]:
    """Commands name the recipe as the page tells to save it: its paths start at that folder."""
    with_plan = "recipe.yaml --plan plan.yaml --json"
    profile, tune, verdict = (shlex.quote(str(run.path.resolve() / f"{n}.json")) for n in ("profile", "tune", "verify"))
    profiling = f"sameday profile {with_plan} {profile}"
    missing = []
    if not run.finished:
        unknown = "it is still going on, or was stopped or killed; the command that started it goes on with it"
        missing.append(Missing("The run's end", run.stopped.why if run.stopped else unknown))
    if run.damaged:
        missing.append(Missing("A part of its curves", "; ".join(run.damaged_told)))
    if not run.steps:
        missing.append(Missing("Curves of training", "metrics.jsonl holds no step"))
    if not run.evaluations and not run.scores:
        why = "none was recorded; the plan's eval_steps says when it is made, the recipe's data on what"
        missing.append(Missing("Validation", why))
    if run.timeline is None:
        why = "neither a profile of its recipe and plan nor metrics.jsonl says it"
        missing.append(Missing("Where a step's time goes", why, profiling))
    if run.floor is None:
        why = "there is no profile.json"
        if run.profile is not None:
            why = "no floor was measured" if run.own_profile else "the profile is of another recipe or plan"
        missing.append(Missing("The least time that a step could take", why, profiling))
    if run.tune is None:
        # Not into plan.yaml, which is tune's default and the plan of this run.
        how = f"sameday tune recipe.yaml -o tuned.yaml --json {tune}"
        missing.append(Missing("What each choice of the plan gives", "there is no tune.json", how))
    if run.verdict is None:
        why = "there is no verify.json"
        missing.append(Missing("Proof that the plan keeps the model", why, f"sameday verify {with_plan} {verdict}"))
    if run.skipped is None:
        missing.append(Missing("Which data was left out", "there is no skipped.json"))
    return missing
