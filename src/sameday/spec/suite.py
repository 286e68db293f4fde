"""A suite: jobs over recipes, what each waits for and needs, and when all of it must be done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from sameday.spec.document import Document, read_document
from sameday.spec.errors import BadInput, refuse
from sameday.spec.explain import validate
from sameday.spec.limits import GPU_NUMBERS, GPUS, at_most
from sameday.spec.recipe import Strict

Kind = Literal["cache", "train", "eval", "tune"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What a job may be called: it names folders and jobs of a scheduler."""
_MEMORY = re.compile(r"([0-9]{1,9})([KMGT]?)B?", re.IGNORECASE)
_OWN_OPTIONS = re.compile(r"-[Jda]|--(job-name|dependency|array|wrap|parsable|test-only)(=|$)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(value: Any) -> Any:
    """6h, 90m, 1d12h, or a number of seconds."""
    text = value.replace(" ", "") if isinstance(value, str) else ""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        value = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10**9:
        raise ValueError("must be a time above zero, such as 90m, 6h or 1d12h, or a number of seconds")
    return value


Duration = Annotated[float, BeforeValidator(seconds_of)]
"""Seconds; in files also 90m, 6h or 1d12h."""


class Slurm(Strict):
    """What the scheduler is asked for. A job's own values go before the suite's."""

    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    gres: str | None = Field(None, description="Default: gpu:N for a job of N GPUs. {gpus} becomes their number.")
    constraint: str | None = None
    time: Duration | None = Field(None, description="Limit of one allocation; a job that needs more is requeued.")
    warning: Duration = Field(120, description="How long before the limit a job is asked to save itself.")
    memory: str | None = Field(None, description="Per GPU, or per CPU job, as --mem takes it: 60G.")
    cpus: int | None = Field(None, ge=1, **at_most(4096, "no node has more"), description="Per GPU, or per CPU job.")
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = Field({}, description="Variables of the job.")
    setup: tuple[str, ...] = Field((), description="Lines of shell before the job: activating an environment.")
    stage: tuple[str, ...] = Field((), description="Files and folders copied to the node's own disk before the job.")
    options: tuple[str, ...] = Field((), description="Further options of sbatch, as they are.")

    @model_validator(mode="after")
    def _can_be_asked_for(self) -> Slurm:
        problems = []
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            problems.append(f"memory is {self.memory!r}; must be a number and K, M, G or T, such as 60G")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                problems.append(f"environment has {name!r}, which no shell takes for a variable")
        for path in self.stage:
            if not path or not path.isprintable():
                problems.append(f"stage has {path!r}, which is no path")
        for option in self.options:
            if not option.startswith("-") or _OWN_OPTIONS.match(option):
                problems.append(
                    f"options has {option!r}; must be one option of sbatch a line (--exclusive, --nice=10), and the "
                    "suite itself gives --job-name, --dependency, --array, --wrap, --parsable and --test-only"
                )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def memory_times(self, parts: int) -> str | None:
        """What --mem is told for so many GPUs."""
        match = _MEMORY.fullmatch(self.memory or "")
        return f"{int(match[1]) * parts}{match[2].upper()}" if match else None


class SuiteJob(Strict):
    """One command, what it waits for, and what it needs."""

    do: Kind
    recipe: str | None = Field(None, description="Path, relative to the suite's file. An eval has `of` instead.")
    of: str | None = Field(None, description="eval: the training job whose result is evaluated.")
    plan: str | None = Field(None, description="Path of a plan, or the name of a tune job, whose plan is taken.")
    set: tuple[str, ...] = Field((), description="As --set takes it, after the suite's own.")
    after: tuple[str, ...] = Field((), description="Jobs that must be done before, besides `of` and `plan`.")
    gpus: int = Field(1, ge=0, **at_most(*GPUS), description="0: a CPU is enough.")
    gpu: int | None = Field(
        None,
        ge=0,
        **at_most(*GPU_NUMBERS),
        description="This GPU and no other, on this machine.",
    )
    nodes: int = Field(1, ge=1, **at_most(*GPUS), description="SLURM: `gpus` on each of them.")
    expected: Duration | None = Field(None, description="How long it takes, where the user knows better.")
    kind: Literal["pixels", "features"] | None = Field(None, description="cache: of what.")
    split: Literal["train", "val", "test"] | None = Field(None, description="eval: which part of the data.")
    base: bool = Field(False, description="eval of a recipe: the base model, as it was before training.")
    adapter: str | None = Field(None, description="eval of a recipe: somebody's PEFT adapter.")
    cascade: bool | None = Field(
        None, description="eval: answers of earlier stages in prompts of later ones. Default: the recipe's."
    )
    minutes: float = Field(10.0, gt=0, **at_most(10080, "a week"), description="tune: how long to search.")
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _belongs_together(self) -> SuiteJob:
        problems = [*self._wrong()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _wrong(self) -> Iterator[str]:
        if self.do == "eval":
            if (self.of is None) == (self.recipe is None):
                yield "an eval has `of` (a training job) or `recipe` (with base or adapter): one of them"
            if self.recipe is not None and self.base == (self.adapter is not None):
                yield "an eval of a recipe has `base` or `adapter`: one of them"
        elif self.recipe is None:
            yield f"a {self.do} job has a recipe"
        own = dict.fromkeys(("of", "split", "base", "adapter", "cascade"), "eval")
        own |= {"kind": "cache", "minutes": "tune"}
        for name, kind in own.items():
            if self.do != kind and name in self.model_fields_set:
                yield f"{name} belongs to {kind} jobs"
        if self.do == "tune" and self.plan is not None:
            yield "a tune job finds a plan, and takes none; plan.KEY of `set` is what it keeps"
        for each in self.set if self.of is not None else ():
            if each.strip().startswith("recipe."):
                yield f"set has {each!r}, and the recipe of an eval of a job is what that trained; only plan.KEY is set"
        if self.do == "cache" and self.kind is None:
            yield "a cache job has a kind: pixels or features"
        if self.gpu is not None and self.gpus != 1:
            yield "gpu pins a job of one GPU"
        if self.do not in ("train", "eval") and (self.gpus > 1 or self.nodes > 1):
            yield f"a {self.do} job has one process"


class Suite(Strict):
    """Jobs by name."""

    name: str | None = Field(None, description="Default: the file's.")
    deadline: Duration | None = Field(None, description="For all of it, from when it is run first.")
    gpus: int | None = Field(None, ge=0, **at_most(*GPUS), description="That it may use here. Default: all; 0: none.")
    at_once: int = Field(1, ge=1, **at_most(256, "a machine"), description="Jobs at once that use no GPU.")
    plan: str | None = Field(None, description="Of all jobs that name none.")
    set: tuple[str, ...] = ()
    slurm: Slurm = Slurm()
    jobs: dict[str, SuiteJob] = Field(min_length=1)

    def needs(self, name: str) -> list[str]:
        """The jobs that one waits for, each once, in the order in which they are named."""
        job = self.jobs[name]
        named = [*([job.of] if job.of else []), *([job.plan] if job.plan in self.jobs else []), *job.after]
        return list(dict.fromkeys(each for each in named if each is not None))

    @property
    def graph(self) -> dict[str, list[str]]:
        return {name: self.needs(name) for name in self.jobs}

    def order(self) -> list[str]:
        """Each job after those that it waits for."""
        return list(TopologicalSorter(self.graph).static_order())

    def slurm_of(self, name: str) -> Slurm:
        """A job's own values over the suite's."""
        own = self.jobs[name].slurm
        return self.slurm.model_copy(update={field: getattr(own, field) for field in own.model_fields_set})

    @model_validator(mode="after")
    def _hangs_together(self) -> Suite:
        problems = []
        if self.name is not None and not _names_a_folder(self.name):
            problems.append(f"name is {self.name!r}; it names a folder in runs/, and has no / in it")
        problems += [
            f"jobs has the name {name!r}; allowed are up to 64 letters, digits, _, . and -, the first a letter or digit"
            for name in self.jobs
            if not NAME.fullmatch(name)
        ]
        for name, job in self.jobs.items():
            unknown = [each for each in self.needs(name) if each not in self.jobs]
            problems += [
                f"jobs.{name} waits for {each!r}, which is no job; there are {', '.join(self.jobs)}" for each in unknown
            ]
            if job.of in self.jobs and self.jobs[job.of].do != "train":
                problems.append(f"jobs.{name} evaluates {job.of}, which trains nothing")
            if job.plan in self.jobs and self.jobs[job.plan].do != "tune":
                problems.append(f"jobs.{name} takes the plan of {job.plan}, which finds none")
        try:
            self.order()
        except CycleError as error:
            problems.append("jobs wait for each other: " + " -> ".join(reversed(error.args[1])))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_suite(path: Path) -> Suite:
    """The suite in this file. All problems come together, each with its place; files that it names are looked for."""
    document = read_document(path)
    lacking = [*_lacking(document, path)]
    try:
        suite = validate(Suite, document)
    except BadInput as error:
        raise BadInput("\n".join([str(error), *lacking])) from None
    refuse(lacking)
    return suite if suite.name else suite.model_copy(update={"name": path.stem})


def _lacking(document: Document, path: Path) -> Iterator[str]:
    """Files that are named and not there, whatever else is wrong."""
    values = document.values
    jobs = values["jobs"] if isinstance(values.get("jobs"), dict) else {}
    named = [(("jobs", name), job) for name, job in jobs.items() if isinstance(job, dict)]
    for place, holder in [((), values), *named]:
        for field in ("recipe", "adapter", "plan") if place else ("plan",):
            value = holder.get(field)
            if not isinstance(value, str) or (place and field == "plan" and value in jobs):
                continue
            there, whose = path.parent / value, f" of {place[1]}" if place else ""
            if not there.exists():
                yield f"{document.place((*place, field))}: {field} {value!r}{whose} is not there"
            elif there.is_dir() and field != "adapter":
                yield f"{document.place((*place, field))}: {field} {value!r}{whose} is a folder; must be a file"
    if values.get("name") is None and not _names_a_folder(path.stem):
        yield f"{document.source}: its own name cannot be that of a folder in runs/; give the suite a name"


def _names_a_folder(name: str) -> bool:
    return name.isprintable() and name not in ("", ".", "..") and "/" not in name
