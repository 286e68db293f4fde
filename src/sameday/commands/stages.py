"""A run in stages: trainings one after another, each an ordinary run in a folder of its own below the run's, and one
record of what became of them. Each starts from the base model, or from what the stage before it made."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from sameday.commands.changed import Files, refuse_changed
from sameday.commands.environment import prepare_environment
from sameday.commands.final import check_evaluation_of_stages, separate_models, splits_of
from sameday.commands.session import Session, Specs, note_stop, silent
from sameday.evaluate.predictions import write_json
from sameday.hardware.signals import AskedToStop, nothing_left_to_stop, stopped_early
from sameday.record.folder import STAGES, RunFolder, begun, default_path, refuse_other_recipe
from sameday.record.manifest import MANIFEST, fault, weights_digest
from sameday.record.times import note
from sameday.spec.errors import EXIT_STOPPED, BadInput, NothingToLearn, RunStopped
from sameday.spec.evaluation import Evaluation
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe, StageRecipe
from sameday.spec.words import tell
from sameday.tasks.registry import setup_of

if TYPE_CHECKING:
    from sameday.hardware.ranks import Ranks

NO_SAMPLES, WAITING, TRAINING_NOW, FINISHED = "nothing to train on", "waiting", "training", "finished"


@dataclass
class Entry:
    """What became of a stage, as stages.json has it. `start` names the stage whose result it starts from; `data` has
    digests of what it learns from, and the others are of the weights' bytes at its start and its end."""

    name: str
    folder: str
    start: str | None
    fingerprint: str
    samples: dict[str, int]
    data: dict[str, str]
    status: str
    steps: int = 0
    scores: dict[str, float] | None = None
    start_digest: str | None = None
    result_digest: str | None = None


@dataclass(frozen=True)
class Staged:
    """A stage that can be trained, or why it cannot: then it has no samples."""

    stage: StageRecipe
    folder: str
    samples: dict[str, int]
    data: dict[str, str]
    files: Files
    without: str | None = None
    steps: int = 0
    flop: float = 0.0
    """Of each step on a CPU; 0 on a GPU."""


def train_stages(specs: Specs, out: Path | None, stop_after: int | None) -> dict[str, float]:
    """All stages, or what is left of them, and the evaluation that the recipe asks for. Returns the scores of the last
    stage."""
    prepare_environment(specs.plan)
    from sameday.hardware.machine import device_kind
    from sameday.hardware.ranks import Ranks

    ranks = Ranks.join(device_kind(specs.plan))
    try:
        staged, plan = ranks.from_first(lambda: _checked(specs))
        path = out or ranks.from_first(lambda: default_path(specs.recipe))
        scores = _Run(specs, path, plan, staged, ranks).train(stop_after)
        if getattr(specs.recipe, "evaluate", None) is not None:
            from sameday.commands.evaluate import Request, evaluate

            began = time.perf_counter()
            evaluate(Request(path), ranks, trained=True)
            if ranks.first:
                note(path, "evaluate", time.perf_counter() - began)
        nothing_left_to_stop()
        return scores
    finally:
        ranks.leave()


def _checked(specs: Specs) -> tuple[list[Staged], Plan]:
    """Every stage as far as it can be without training the one before: all that is wrong with any of them is found
    before the first begins."""
    from sameday.commands.batch import check_batch
    from sameday.commands.outlook import work_of

    evaluation: Evaluation | None = getattr(specs.recipe, "evaluate", None)
    needed = splits_of(specs, evaluation)
    staged: list[Staged] = []
    wrong: dict[str, list[str]] = {}
    plan = specs.plan
    for number, stage in enumerate(specs.recipe.stage_recipes(), start=1):
        folder = f"stages/{number}-{stage.name}"
        try:
            with closing(Session.start(replace(specs, recipe=stage.recipe), silent, splits=needed)) as session:
                check_batch(session, whole=False)
                splits = session.setup.drop_too_long(session.audited.splits)
                steps, flop = work_of(session, splits) if session.device.type == "cpu" else (0, 0.0)
                plan = session.plan if not any(each.samples for each in staged) else plan
                digests = session.setup.data_digests(splits)
                files = session.setup.data_files(splits)
                staged.append(Staged(stage, folder, session.audited.sizes, digests, files, steps=steps, flop=flop))
        except NothingToLearn as error:
            staged.append(Staged(stage, folder, {}, {}, {}, str(error)))
        except BadInput as error:
            wrong.setdefault(str(error), []).append(stage.name)
    if wrong:
        raise BadInput("\n".join(f"stage {' and '.join(names)}: {error}" for error, names in wrong.items()))
    if not any(each.samples for each in staged):
        raise BadInput("\n".join(["no stage has anything to train on:", *(f"{each.without}" for each in staged)]))
    if evaluation is not None:
        check_evaluation_of_stages(specs, evaluation, [each.samples for each in staged])
    return staged, plan


class _Run:
    """One run in stages, in its folder."""

    def __init__(self, specs: Specs, path: Path, plan: Plan, staged: Sequence[Staged], ranks: Ranks) -> None:
        self.specs, self.path, self.plan, self.staged, self.ranks = specs, path, plan, staged, ranks
        self.recipe: Recipe = specs.recipe
        self.say = tell if ranks.first else silent
        self.record: list[Entry] = []

    def train(self, stop_after: int | None) -> dict[str, float]:
        asked = (self.path, self.recipe, self.plan, self.specs.home)
        opened: list[RunFolder] = []
        self.record = self.ranks.from_first(self._compared)
        ended = all(entry.status in (FINISHED, NO_SAMPLES) for entry in self.record)
        if ended and self.ranks.from_first(self._has_result):
            self.say(f"finished already: all {len(self.record)} stages are done, in {self.path}")
            return self._last.scores or {}
        self.ranks.from_first(lambda: self._check_cpu(stop_after))
        try:
            self.ranks.from_first(lambda: opened.append(RunFolder.open(*asked)))
            self.ranks.from_first(self._write)
            self._train_each(stop_after)
            if self.ranks.first:
                self._finish()
            self.ranks.wait()
            return self._last.scores or {}
        except RunStopped as stop:
            note_stop(stop, self.ranks, opened)
            raise
        except AskedToStop:
            note_stop(early := stopped_early(), self.ranks, opened)
            raise early from None
        except BadInput:
            for folder in opened:
                if not begun(self.path):
                    with suppress(OSError):
                        (self.path / "stages").rmdir()
                    folder.discard()
            raise
        finally:
            for folder in opened:
                folder.close()

    # What is known before a step is trained

    def _compared(self) -> list[Entry]:
        """A record of all stages: what an earlier process noted of them, compared with what lies there now."""
        if begun(self.path):
            refuse_other_recipe(self.path, self.recipe)
        noted = {entry.folder: entry for entry in _recorded(self.path)}
        record: list[Entry] = []
        for each in self.staged:
            before = self._before(each, record)
            recipe = each.stage.recipe if before is None else self._started(each, before)
            now = Entry(
                name=each.stage.name,
                folder=each.folder,
                start=None if before is None else before.name,
                fingerprint=recipe.fingerprint,
                samples=each.samples,
                data=each.data,
                status=WAITING if each.samples else NO_SAMPLES,
            )
            old = noted.get(each.folder) if begun(self.path / each.folder) else None
            record.append(now if old is None else self._unchanged(old, now, record, each.files))
        return record

    def _unchanged(self, old: Entry, now: Entry, record: Sequence[Entry], files: Files) -> Entry:
        """What was noted, where everything is as it was; BadInput otherwise."""
        place, ways = self.path / old.folder, "put it back as it was, or choose another --out"
        if (old.fingerprint, old.start) != (now.fingerprint, now.start) or now.status == NO_SAMPLES:
            raise BadInput(
                f"{place}: stage {old.name} was begun with another recipe, another stage before it or other samples "
                f"({old.fingerprint} there, {now.fingerprint} here); choose another --out"
            )
        since, began = place / "environment.json", f"stage {old.name} was begun"
        refuse_changed(place, old.data, now.data, files, since, began)
        before = next((each for each in record if each.name == old.start), None)
        if before is not None and old.start_digest != before.result_digest:
            raise BadInput(
                f"{place}: stage {old.name} started from other weights of stage {before.name} than those in "
                f"{self._result(before)} now; {ways}"
            )
        if old.status == FINISHED:
            result = self._result(old)
            why = fault(result) or (weights_digest(result) != old.result_digest and "its weights are others")
            if why:
                raise BadInput(f"{result}: is not what stage {old.name} trained: {why}; {ways}")
        return old

    def _before(self, staged: Staged, record: Sequence[Entry]) -> Entry | None:
        """The last stage before this one that trains, where this one starts from it."""
        trained = [entry for entry in record if entry.status != NO_SAMPLES]
        return trained[-1] if staged.stage.follows and trained else None

    def _started(self, staged: Staged, before: Entry) -> Recipe:
        return staged.stage.recipe.started_from(str(self._result(before).absolute()), before.fingerprint)

    def _result(self, entry: Entry) -> Path:
        return self.path / entry.folder / self.recipe.result

    @property
    def _last(self) -> Entry:
        return [entry for entry in self.record if entry.status == FINISHED][-1]

    def _check_cpu(self, stop_after: int | None) -> None:
        """Of all stages that are left, before the first of them begins: together they may take days."""
        from sameday.commands.outlook import check_together

        flop, done = 0.0, 0
        for entry, each in zip(self.record, self.staged, strict=True):
            left = each.steps if stop_after is None else min(each.steps, max(0, stop_after - done))
            flop += 0.0 if entry.status == FINISHED else left * each.flop
            done += entry.steps if entry.status == FINISHED else each.steps
        check_together(self.plan, self.recipe.precision, flop, self.say)

    # Training

    def _train_each(self, stop_after: int | None) -> None:
        from sameday.commands.launch import train_from_specs

        done, count = 0, len(self.record)
        for number, (entry, each) in enumerate(zip(self.record, self.staged, strict=True), start=1):
            whose = f"stage {number} of {count}, {entry.name}"
            before = self._before(each, self.record[: number - 1])
            if entry.status == NO_SAMPLES:
                self.say(f"{whose}: left out, because it has nothing to train on: {each.without}")
                continue
            if entry.status == FINISHED:
                self.say(f"{whose}: finished already, {_count(entry.steps, 'step')}")
                done += entry.steps
                continue
            if stop_after is not None and done >= stop_after:
                raise RunStopped(
                    f"asked to stop: {done} steps are done, before {whose}; run again to go on", EXIT_STOPPED
                )
            recipe = each.stage.recipe if before is None else self._started(each, before)
            sizes = ", ".join(f"{_count(size, recipe.sample)} in {split}" for split, size in entry.samples.items())
            self.say(f"{whose}: {sizes}; starts from {before.name if before else 'the base model'}")
            entry.status, entry.start_digest = TRAINING_NOW, before.result_digest if before else None
            self.ranks.from_first(self._write)
            left = None if stop_after is None else stop_after - done
            try:
                place = self.path / entry.folder
                entry.scores = train_from_specs(replace(self.specs, recipe=recipe), place, left, self.ranks)
            except RunStopped as stop:
                raise RunStopped(f"{whose}: {stop}", stop.code, stop.alone) from None
            clear_memory()
            entry.steps, entry.result_digest = self.ranks.from_first(lambda: self._made(entry))  # noqa: B023
            entry.status, done = FINISHED, done + entry.steps
            self.ranks.from_first(self._write)

    def _made(self, entry: Entry) -> tuple[int, str | None]:
        run = RunFolder.read(self.path / entry.folder)
        return max((int(each.get("step", 0)) for each in run.metrics), default=0), weights_digest(run.result)

    def _write(self) -> None:
        text = {"stages": [asdict(entry) for entry in self.record]}
        RunFolder(self.path, self.recipe, self.plan, self.specs.home).write_json(STAGES, text)

    # The result

    @property
    def _one_model(self) -> bool:
        """Whether each stage goes on with the model of the one before."""
        return not separate_models([each.stage for each in self.staged])

    def _has_result(self) -> bool:
        folder = self.path / self.recipe.result
        return not self._one_model or (fault(folder) is None and weights_digest(folder) == self._last.result_digest)

    def _finish(self) -> None:
        """The last stage's weights are the run's, where all stages train one model."""
        from sameday.record import checkpoint

        last = self._last
        if self._one_model:
            source = self._result(last)

            def fill(folder: Path) -> None:
                shutil.copytree(source, folder, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)

            checkpoint.write(self.path, self.recipe.result, fill, None)
            about = {"val": {}, "best": None, "result": {"stage": last.name, "step": last.steps}}
            RunFolder(self.path, self.recipe, self.plan, self.specs.home).write_json("eval.json", about)
        for entry in self.record:
            self.say(f"{entry.name}: {entry.status}{_told(entry.scores or {}, self.recipe.sample)}")
        where = f"{self.path / self.recipe.result} has the weights of stage {last.name}"
        own = f"each stage has its own model: {self.path / 'stages'}/*/{self.recipe.result}"
        self.say(where if self._one_model else own)


def clear_memory() -> None:
    """Of a stage's model, before the next one is loaded; what was compiled for it serves no other."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _told(scores: Mapping[str, float], sample: str, split: str = "val") -> str:
    """Scores with how many samples they are of: a share of eleven says little."""
    listed = "  ".join(f"{name} {value:.4g}" for name, value in scores.items() if name != "samples")
    return f": {listed}, on {_count(int(scores['samples']), sample)} in {split}" if scores.get("samples") else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _recorded(path: Path) -> list[Entry]:
    if not (path / STAGES).is_file():
        return []
    known = {field.name for field in fields(Entry)}
    try:
        listed = json.loads((path / STAGES).read_text())["stages"]
        return [Entry(**{name: value for name, value in each.items() if name in known}) for each in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path / STAGES}: is not what a run wrote; put it back, or choose another --out") from None


# Evaluation


def own_models(path: Path) -> dict[str, Path]:
    """The folders of a run's stages by name, where each stage has a model of its own; otherwise none."""
    entries = _recorded(path)
    if not entries or not (path / "recipe.yaml").is_file():
        return {}
    if not separate_models(RunFolder.read(path).recipe.stage_recipes()):
        return {}
    return {entry.name: path / entry.folder for entry in entries if entry.status != NO_SAMPLES}


@dataclass(frozen=True)
class Together:
    """What all stages come to: scores of all their samples, none where two stages have samples in common, and sentences
    about samples that count twice or not at all."""

    scores: dict[str, float]
    shared: list[str]
    left: list[str]


def evaluate_stages(
    path: Path,
    folders: Mapping[str, Path],
    split: str,
    evaluate: Callable[[Path], dict[str, float]],
    ranks: Ranks,
    out: Path | None = None,
) -> Together:
    """Each stage's model on its own questions, and all of them together, weighted by how many there are. These scores
    go into the run, or into `out`."""
    run, say = RunFolder.read(path), tell if ranks.first else silent
    has = ranks.from_first(lambda: {name: _samples_of(folder, split) for name, folder in folders.items()})
    each: dict[str, dict[str, float]] = {}
    for name, folder in folders.items():
        say(f"stage {name}:")
        why = has[name]
        if isinstance(why, str):
            say(f"left out: {why}")
        else:
            each[name] = evaluate(folder)
    if not each:
        raise BadInput(f"{path}: no stage has a {run.recipe.sample} of {split}")
    taken = {name: ids for name, ids in has.items() if not isinstance(ids, str)}
    shared, left = _shared(taken, split, run.recipe.sample), ranks.from_first(lambda: _left(run, taken, split))
    together: dict[str, float] = {}
    if not shared:
        count = sum(scores["samples"] for scores in each.values())
        names = [name for name in next(iter(each.values())) if name != "samples"]
        together = {name: sum(s[name] * s["samples"] for s in each.values()) / count for name in names}
        together["samples"] = count
    if ranks.first:
        scores = path / f"eval-{split}.json" if out is None else out / "scores.json"
        write_json(scores, {**together, "stages": each})
    for sentence in shared or [f"all stages together{_told(together, run.recipe.sample, split)}"]:
        say(sentence)
    for sentence in left:
        say(sentence)
    return Together(together, shared, left)


def _shared(taken: Mapping[str, frozenset[Hashable]], split: str, sample: str) -> list[str]:
    """A sentence for each two stages that answer the same samples: one with two answers counts for neither."""
    return [
        f"stages {one} and {other} both answer {_count(len(both), sample)} of {split}, so that there are no scores of "
        "all stages together; those of each stage are its own"
        for (one, some), (other, others) in combinations(taken.items(), 2)
        if (both := some & others)
    ]


def _left(run: RunFolder, taken: Mapping[str, frozenset[Hashable]], split: str) -> list[str]:
    """Samples of the split that no stage takes."""
    sample = run.recipe.sample
    try:
        whole = _samples_of(run.path, split)
    except BadInput as error:  # about samples that no stage takes: theirs were checked
        whole = str(error)
    if isinstance(whole, str):
        return [f"how many {sample}s of {split} are of no stage is not known: {whole}"]
    left = len(whole.difference(*taken.values()))
    if not left:
        return []
    # A limit holds for each stage and for the whole by itself, so that this is no count of all that there are.
    limit = getattr(getattr(run.recipe, "data", None), "limit", None)
    some = f"the first {_count(len(whole), sample)}" if limit is not None else _count(len(whole), sample)
    return [f"{left:,} of {some} of {split} are of no stage that was trained: they are left out"]


def _samples_of(folder: Path, split: str) -> frozenset[Hashable] | str:
    """The samples that a run, or a stage, has of this split; why, where it has none."""
    if not (folder / "recipe.yaml").is_file():
        raise BadInput(f"{folder}: the stage has not begun yet; the command that began the run goes on with it")
    run = RunFolder.read(folder)
    setup = setup_of(run.recipe, run.recipe_dir)
    try:
        return setup.sample_ids(setup.audit(silent, [split]).splits, split)
    except NothingToLearn as error:
        return str(error)
