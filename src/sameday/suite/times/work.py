"""What a job computes: its trainings and its evaluation, how many steps and samples these have, and whose steps take as
long. Nothing is loaded for it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sameday.commands.session import Specs, silent
from sameday.spec.errors import BadInput, NothingToLearn, in_short
from sameday.spec.evaluation import Evaluation
from sameday.spec.identity import as_text, identity_of, paths_of
from sameday.spec.load import load_plan, resolve_path
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.sets import split_sets
from sameday.spec.suite import Suite, SuiteJob
from sameday.spec.writing import write_text
from sameday.suite.jobs import plan_path, sets_of
from sameday.suite.state import SuiteFolder
from sameday.tasks.base import Say
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import TaskSetup

OF_NO_COST = frozenset(
    {
        *("name", "seed", "num_epochs", "max_steps", "learning_rate", "weight_decay", "betas", "eps", "max_grad_norm"),
        *("schedule", "warmup_ratio", "warmup_steps", "best", "evaluate", "stages", "start_adapter", "stage_before"),
    }
)
"""Recipe fields that change how many steps there are, or their numbers, and not what a step takes."""
OF_TRAINING = frozenset({"order", "effective_batch", "loss_weight"})
"""Those that change no evaluation either."""
LOOKING = frozenset(("log_steps", "eval_steps", "save_steps", "save_total_limit", "track"))
"""Plan fields that say how often to look, which is counted by itself."""
COUNTS = "counts.json"
CPU = "CPU"
"""In place of a GPU's name, as machines are called."""


def step_cost(recipe: Recipe) -> str:
    """Equal where a step of two recipes takes the same, under one plan on one machine."""
    return _digest(identity_of(recipe, recipe.ignored() | OF_NO_COST))


def step_kind(recipe: Recipe) -> str:
    """Equal where steps of two recipes are of one kind, of other samples: they take about the same."""
    return _digest(identity_of(recipe, recipe.ignored() | OF_NO_COST | {"data"}))


def plan_cost(plan: Plan) -> str:
    return _digest({name: value for name, value in plan.model_dump(mode="json").items() if name not in LOOKING})


def cache_cost(asked: Mapping[str, Any]) -> str:
    """Equal where two cache jobs, by what they were asked for, prepare the same images alike."""
    return _digest([asked.get("kind"), *_asked(asked, OF_NO_COST | OF_TRAINING)])


def search_cost(asked: Mapping[str, Any]) -> str:
    """Equal where two tune jobs search for a plan of the same steps, for however long."""
    return _digest(_asked(asked, OF_NO_COST))


def _asked(asked: Mapping[str, Any], apart: Set[str]) -> list[Any]:
    """Recipe and settings without some fields. It was read from a file, which may say anything."""
    recipe, sets = asked.get("recipe"), asked.get("set")
    fields = {name: each for name, each in recipe.items() if name not in apart} if isinstance(recipe, dict) else recipe
    listed = sets if isinstance(sets, list) else []
    return [fields, [each for each in listed if not {*re.split(r"[.=]", str(each).strip())[1:2]} & apart]]


def _digest(value: Any) -> str:
    return hashlib.sha256(as_text(value).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Training:
    """One training of a job, a stage or the whole of it. Of an `automatic` plan only the `fixed` fields are known
    before it runs; `planned` is false where the plan is still to be found by a tune job."""

    recipe: Recipe
    home: Path
    plan: Plan
    folder: Path
    automatic: bool = False
    fixed: tuple[str, ...] = ()
    planned: bool = True
    ranks: int = 1
    on_cpu: bool = False
    filled: bool = False
    """Whether it is about steps with all images in a cache, which need not be there."""
    evaluated: str = ""
    """Where nothing of it is trained here: what its evaluation is, as `Work.answered` has it."""

    @property
    def cost(self) -> str:
        return step_cost(self.recipe)

    @property
    def files(self) -> str:
        return files_of(self.recipe, self.home)


@dataclass(frozen=True)
class Work:
    """`evaluation` is at the end of a training, or all of an eval job."""

    trainings: list[Training] = field(default_factory=list)
    evaluation: Evaluation | None = None
    recipe: Recipe | None = None
    home: Path = Path()
    on_cpu: bool = False
    evaluated_by: Specs | None = None
    """The plan of an evaluation, as far as it is known."""

    @property
    def answered(self) -> str:
        """Equal where a sample takes about the same in two evaluations, whatever its model was trained in."""
        assert self.recipe is not None and self.evaluation is not None
        apart = self.recipe.ignored() | OF_NO_COST | OF_TRAINING
        return _digest([identity_of(self.recipe, apart), self.evaluation.max_new_tokens])

    @property
    def only_evaluated(self) -> Training:
        """Its model for whoever times the evaluation and no step."""
        assert self.recipe is not None and self.evaluated_by is not None
        recipe, by = setup_of(self.recipe, self.home).recipe_for_evaluation(), self.evaluated_by
        plan = by.plan.model_copy(update={"device": "cpu"}) if self.on_cpu else by.plan
        fixed = (*by.fixed, "device") if self.on_cpu else by.fixed
        how = Training(recipe, self.home, plan, Path(), by.automatic, fixed, on_cpu=self.on_cpu)
        return replace(how, evaluated=self.answered)

    def answers_like(self, training: Training) -> bool:
        """Whether its evaluation takes what one of the model of this training does."""
        return replace(self, recipe=training.recipe).answered == self.answered


def work_of(suite: Suite, home: Path, folder: SuiteFolder, name: str) -> Work:
    """Empty for jobs that neither train nor evaluate. BadInput where the recipe is wrong."""
    job = suite.jobs[name]
    if job.do == "eval":
        if job.of is not None:
            whose = work_of(suite, home, folder, job.of)
            recipe, where, by = whose.recipe, whose.home, whose.evaluated_by
        else:
            by = _specs(home / str(job.recipe), None, tuple(sets_of(suite, name)))
            recipe, where = by.recipe, by.home
        given = getattr(recipe, "evaluate", None) or Evaluation()
        typed = {"split": job.split, "cascade": job.cascade}
        asked = given.model_copy(update={key: value for key, value in typed.items() if value is not None})
        return Work([], asked, recipe, where, job.gpus == 0 or "plan.device=cpu" in sets_of(suite, name), by)
    if job.do != "train":
        return Work()
    planned = plan_path(suite, home, folder, name)
    there = planned is None or planned.exists()
    specs = _specs(home / str(job.recipe), planned if there else None, tuple(sets_of(suite, name)))
    run = folder.run(name)
    stages = [(each.recipe, run / f"stages/{n}-{each.name}") for n, each in enumerate(specs.recipe.stage_recipes(), 1)]
    on_cpu = job.gpus == 0 or specs.plan.device == "cpu"
    how = (specs.automatic, specs.fixed, there, max(1, job.gpus * job.nodes), on_cpu)
    trainings = [
        Training(recipe, specs.home, specs.plan, place, *how) for recipe, place in stages or [(specs.recipe, run)]
    ]
    return Work(trainings, getattr(specs.recipe, "evaluate", None), specs.recipe, specs.home, on_cpu, specs)


def wrong(suite: Suite, home: Path, folder: SuiteFolder, name: str, data: bool = True) -> list[str]:
    """What a job would refuse when it starts, as far as that is known without reading data or a model: its recipe, plan
    and settings, what its task cannot do, and, where `data` is on this machine, files and models that are not there."""
    job = suite.jobs[name]
    whose = suite.jobs[job.of] if job.of is not None else job
    planned = plan_path(suite, home, folder, name)
    planned = planned if planned is not None and planned.exists() else None
    trained = job.of if job.of is not None else name
    try:
        specs = _specs(home / str(whose.recipe), None if job.of else planned, tuple(sets_of(suite, trained)))
    except BadInput as error:
        return [] if job.of is not None else str(error).splitlines()  # it is told of the job that trains
    setup = setup_of(specs.recipe, specs.home)
    problems: list[str] = []
    named = getattr(specs.recipe, "data", None)
    if data and job.of is None:
        problems += _no_model(specs, folder)
    if data and job.of is None and named is not None:
        files = sorted({resolve_path(specs.home, each) for each in paths_of(named) if not each.startswith("hf:")})
        missing = [path for path in files if not path.exists() and not any(path.parent.glob(path.name))]
        problems += [f"{path} of its recipe's data is not there" for path in missing]
        empty = [path for path in files if path.is_file() and not path.stat().st_size]
        problems += [f"{path} of its recipe's data is empty" for path in empty]
    try:
        if job.of is not None:
            load_plan(planned, split_sets(sets_of(suite, name))[1], specs.recipe)
        if job.adapter is not None:
            setup.recipe_with_adapter(home / job.adapter)
    except BadInput as error:
        problems += str(error).splitlines()
    return [*problems, *_cannot(job, setup)]


def _no_model(specs: Specs, folder: SuiteFolder) -> Iterator[str]:
    """A model that can only be a folder, which no job of the suite could still make."""
    model = getattr(specs.recipe, "model", None)
    if isinstance(model, str) and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        path = Path(os.path.abspath(resolve_path(specs.home, model)))
        if not path.exists() and not path.is_relative_to(folder.path):
            yield f"{path} of its recipe's model is not there"


def _cannot(job: SuiteJob, setup: TaskSetup) -> Iterator[str]:
    task = setup.recipe.task
    if job.do == "cache" and type(setup).fill_cache is TaskSetup.fill_cache:
        yield f"task {task} has no use for a cache"
    if job.do == "train" and (own := getattr(setup.recipe, "evaluate", None)) is not None:
        if (lacking := setup.lacks(own.split)) is not None:
            yield f"recipe.evaluate.split is {own.split}, and {lacking}"
        if own.cascade and (why := setup.no_cascade()) is not None:
            yield f"recipe.evaluate.cascade is true, and {why}"
    if job.do != "eval":
        return
    given = getattr(setup.recipe, "evaluate", None) or Evaluation()
    if (lacking := setup.lacks(job.split or given.split)) is not None:
        yield lacking
    if job.base and not setup.has_base:
        yield f"base: task {task} starts from random weights, and has no base model to evaluate"
    if job.cascade is not None and not setup.generates:
        yield f"cascade: task {task} generates no answers"
    elif given.cascade if job.cascade is None else job.cascade:
        stages = job.of is not None or not setup.recipe.stage_recipes()  # a base model is one, whatever is trained
        if stages and (why := setup.no_cascade()) is not None:
            yield f"cascade is true, and {why}"


def _specs(recipe: Path, plan: Path | None, sets: tuple[str, ...]) -> Specs:
    return _read(recipe, plan, sets, tuple(stamp(path) for path in (recipe, plan) if path is not None))


@lru_cache(maxsize=4096)  # one for each job: whoever watches looks again every few seconds
def _read(recipe: Path, plan: Path | None, sets: tuple[str, ...], _stamps: tuple[Any, ...]) -> Specs:
    return Specs.from_files(recipe, plan, sets)


def stamp(path: Path) -> tuple[int, int]:
    """Another one means that a file may have been changed."""
    try:
        about = os.stat(path)
        return about.st_size, about.st_mtime_ns
    except OSError:
        return 0, 0


def files_of(recipe: Recipe, home: Path) -> str:
    """Another one means that data may have been changed, or the model, where that is a folder."""
    model = getattr(recipe, "model", None)
    weights = sorted(resolve_path(home, model).glob("*")) if isinstance(model, str) else []
    return _digest([str(home), _stamped(recipe, home), [[path.name, *stamp(path)] for path in weights]])


def _stamped(recipe: Recipe, home: Path) -> list[list[Any]]:
    return [[path, *stamp(resolve_path(home, path))] for path in sorted(recipe.paths())]


def _last_changed(recipe: Recipe, home: Path) -> list[int]:
    """Of any kind: a file of the same size may be put there with the old time of its contents, by `cp -p` say."""
    files = (resolve_path(home, path) for path in sorted(recipe.paths()))
    return [os.stat(file).st_ctime_ns if file.exists() else 0 for file in files]


@dataclass(frozen=True)
class Count:
    """Steps of an epoch, and samples of each split; or why they are not known."""

    per_epoch: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    why: str = ""

    def total(self, recipe: Recipe) -> int | None:
        if recipe.max_steps is not None and self.per_epoch != 0:
            return recipe.max_steps
        return None if self.per_epoch is None else round(self.per_epoch * recipe.num_epochs)


@dataclass
class Counts:
    """Kept in OUT, so that data is read once, by whoever may take the time for it: `audit` says whether that is now."""

    folder: SuiteFolder
    audit: bool = False
    say: Say = silent

    def __post_init__(self) -> None:
        try:
            kept = (self.folder.path / COUNTS).read_bytes()
            self._known = TypeAdapter(dict[str, Count]).validate_json(kept, strict=True)
        except (OSError, ValueError):  # one that anyone may have written
            self._known = {}

    def of(self, recipe: Recipe, home: Path) -> Count:
        key = _digest([step_cost(recipe), str(home), _stamped(recipe, home), _last_changed(recipe, home)])
        if key not in self._known and self.audit:
            self.say(f"reading the data of {recipe.name}, to count its steps")
            self._known[key] = _counted(recipe, home)
            if not self._known[key].why:
                self._keep()
        return self._known.get(key, Count(why="its data was not counted yet: `sameday suite plan` does"))

    def _keep(self) -> None:
        good = {key: each for key, each in self._known.items() if not each.why}
        text = json.dumps({key: {"per_epoch": each.per_epoch, "sizes": dict(each.sizes)} for key, each in good.items()})
        write_text(self.folder.path / COUNTS, text + "\n")


def _counted(recipe: Recipe, home: Path) -> Count:
    """Through the task's own setup, which checks the data and loads no weights."""
    setup = setup_of(recipe, home)
    splits = [split for split in ("train", "val", "test") if setup.lacks(split) is None]
    try:
        audited = setup.audit(silent, splits)
    except NothingToLearn:  # a stage that has no questions is passed over
        return Count(0.0)
    except BadInput as error:
        return Count(why=in_short(error))
    each = setup.epoch_steps(audited)
    return Count(sum(each) / len(each), audited.sizes)
