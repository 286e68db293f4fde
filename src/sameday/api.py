"""The commands for Python: the same checks, records and errors as on the command line. `BadInput` is what the command
says and leaves with exit code 2; `RunStopped` has the other codes. Importing this loads no torch."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sameday.commands.environment import READ_LATER, environment_given_back
from sameday.spec import limits
from sameday.spec.errors import BadInput, RunStopped, refuse
from sameday.spec.words import in_yaml

if TYPE_CHECKING:
    from torch import nn

    from sameday.spec.plan import Plan
    from sameday.spec.recipe import Recipe
    from sameday.tasks.base import Task

__all__ = ["BadInput", "Loaded", "Run", "RunStopped", "Verdict", "evaluate", "load", "train", "verify"]

File = str | Path
Settings = Mapping[str, Any]
"""What --set takes: {"recipe.learning_rate": 1e-4, "plan.workers": 2}."""
BOUNDS = {
    "stop_after": limits.RUN_STEPS,
    "max_steps": limits.RUN_STEPS,
    "limit": limits.SAMPLES,
    "max_new_tokens": limits.NEW_TOKENS,
    "steps": limits.VERIFIED_STEPS,
    "ranks": limits.RANKS,
}
"""Of arguments that are whole numbers, as on the command line."""
SUCH = '{"image": "a.png", "question": "What is there?"}'


@dataclass(frozen=True)
class Run:
    """A run folder. `scores` are those of validation at its end; empty where the recipe has no validation data."""

    path: Path
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return self._folder().recipe

    @property
    def plan(self) -> Plan:
        return self._folder().plan

    @property
    def result(self) -> Path:
        """The folder of the finished weights: an adapter for PEFT, or a whole model."""
        return Path(self._folder().result)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl, one per step and one per validation."""
        return list(self._folder().metrics)

    def _folder(self) -> Any:
        from sameday.record.folder import RunFolder

        return RunFolder.read(self.path)


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `code` is its exit code (0 the same, 1 different, 2 could not be compared, or not decided),
    `lines` is what it prints, `details` what --json writes."""

    code: int
    lines: tuple[str, ...]
    details: dict[str, Any]

    @property
    def same(self) -> bool:
        return self.code == 0


@dataclass(frozen=True)
class Loaded:
    """A run's weights, ready on the device, as `sameday eval` has them."""

    run: Run
    task: Task

    @property
    def model(self) -> nn.Module:
        """Everything that computes, in evaluation mode."""
        return self.task.module()

    def answers(
        self, questions: Sequence[Mapping[str, Any]], images: File = ".", max_new_tokens: int = 64
    ) -> list[str]:
        """Greedy answers to questions as data files have them (`{"image": "a.png", "question": "..."}`, or under the
        names that the recipe's `data.fields` has), in the recipe's own prompt; a right answer need not be given.
        `images` is the folder of their images, which are named as text or as paths."""
        from sameday.hardware.ranks import Ranks
        from sameday.tasks.registry import setup_of

        recipe: Any = self.run.recipe
        if not setup_of(recipe, self.run.path).generates:
            raise BadInput(f"task {recipe.task} generates no answers")
        refuse(_no_counts(max_new_tokens=max_new_tokens))
        (folder_of_images,) = _files(images=images)
        rows = _rows(questions, recipe.data.fields)
        if not rows:
            return []
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "questions.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            # These questions and nothing else of the recipe's data: no part of a split, no other set.
            asked: dict[str, Any] = {
                "train": str(file),
                "val": None,
                "test": str(file),
                "image_root": str(folder_of_images.resolve()),
            }
            asked |= {"where": {}, "skip": {}, "fields": {}, "split": None, "mix": (), "limit": None, "on_bad": "stop"}
            setup = setup_of(recipe.model_copy(update={"data": recipe.data.model_copy(update=asked)}), self._home)
            try:
                samples = setup.audit(lambda _text: None, ("test",)).splits["test"]
            except BadInput as error:
                raise BadInput(_about_questions(str(error), file)) from None
            found: dict[int, str] = {}
            for batch in self.task.answers(samples, max_new_tokens, Ranks()):
                found |= {number: answer.text for number, answer in batch.items()}
        return [found[number] for number in range(len(rows))]

    @property
    def _home(self) -> Path:
        """The folder that paths of the recipe are relative to."""
        return Path(self.run._folder().recipe_dir)


def _rows(questions: Any, fields: Mapping[str, str]) -> list[dict[str, Any]]:
    """With our keys, as JSON can have them; BadInput with all that is wrong."""
    if isinstance(questions, str | bytes | Mapping) or not isinstance(questions, Iterable):
        raise BadInput(f"questions is {questions!r}; needed is a list of mappings such as {SUCH}")
    rows, problems = [], []
    for number, question in enumerate(questions, 1):
        if not isinstance(question, Mapping):
            problems.append(f"question {number} is {question!r}; needed is a mapping such as {SUCH}")
            continue
        named = {ours: question[theirs] for ours, theirs in fields.items() if theirs in question}
        row = {key: _with_texts(value) for key, value in {**question, **named}.items()}
        problems += [f"question {number}: {why}" for why in _no_json(row)]
        if row.keys() & {"image", "image_filename"} and row.keys() & {"question", "instruction"}:
            row.setdefault("answer", "?")
        rows.append(row)
    refuse(problems)
    return rows


def _with_texts(value: Any) -> Any:
    """Paths as text, also in a list of them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_with_texts(each) for each in value] if isinstance(value, list | tuple) else value


def _no_json(row: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in row.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError, RecursionError):
            held = value if isinstance(value, list) else [value]
            kinds = dict.fromkeys(f"{type(each).__module__}.{type(each).__qualname__}" for each in held)
            image = key in ("image", "image_filename", "images")
            allowed = "the path of an image file, or a list of paths" if image else "what JSON has, such as a text"
            yield f"{key!r} is of type {', '.join(kinds).replace('builtins.', '')}; allowed: {allowed}"


def _about_questions(said: str, file: Path) -> str:
    """What is wrong with a file of questions, in words for questions that were asked from Python: there is no file, no
    recipe that could leave them out, and `images` is the folder of images."""
    from sameday.data.questions.audit import SKIP

    lines = [line for line in said.splitlines() if line != SKIP]
    said = re.sub(r"^(\d+ problems? in \d+) line(s?:)$", r"\1 question\2", "\n".join(lines), flags=re.MULTILINE)
    for theirs, ours in (
        (f"no line of {file}", "no question"),
        (f"that {file} names ", ""),
        (f"{file}:", "question "),
        (str(file), "questions"),
        ("every line has", "every question has"),
        ("recipe.data.image_root may be another folder", "images may be another folder"),
        ("image_root ", "images "),
    ):
        said = said.replace(theirs, ours)
    return said


@environment_given_back()
def train(
    recipe: File,
    plan: File | None = None,
    out: File | None = None,
    *,
    set: Settings | None = None,
    max_steps: int | None = None,
    limit: int | None = None,
    stop_after: int | None = None,
) -> Run:
    """`sameday train`: start a run, or go on with it where its folder is there."""
    from sameday.commands.launch import train_from_files
    from sameday.commands.session import Specs
    from sameday.record.folder import as_begun, default_path

    refuse(_no_counts(stop_after=stop_after, max_steps=max_steps, limit=limit))
    short = {"recipe.max_steps": max_steps, "recipe.data.limit": limit}
    sets = _sets(set) + _sets({name: value for name, value in short.items() if value is not None})
    recipe_file, plan_file, folder = _files(recipe=recipe, plan=plan, out=out)
    scores = train_from_files(recipe_file, plan_file, folder, sets, stop_after)
    asked = Specs.from_files(recipe_file, plan_file, sets).recipe
    return Run(folder or default_path(as_begun(asked, folder)), scores)


@environment_given_back()
def evaluate(
    what: Run | File,
    split: Literal["train", "val", "test"] | None = None,
    *,
    checkpoint: str | None = None,
    adapter: File | None = None,
    base: bool = False,
    plan: File | None = None,
    out: File | None = None,
    cascade: bool | None = None,
    max_new_tokens: int | None = None,
    scores_only: bool = False,
    set: Settings | None = None,
) -> dict[str, float]:
    """`sameday eval`: the scores of a run's weights or of others; answers lie in the folder that it writes."""
    from sameday.commands.evaluate import Request
    from sameday.commands.evaluate import evaluate as run

    refuse(
        [
            *_no_counts(max_new_tokens=max_new_tokens),
            *_no_choices(cascade=(cascade, (True, False, None)), base=(base, (True, False))),
            *_no_choices(scores_only=(scores_only, (True, False))),
            *_no_checkpoint(checkpoint),
        ]
    )
    where, adapter_folder, plan_file, folder = _files(what=what, adapter=adapter, plan=plan, out=out)
    files = (adapter_folder, base, plan_file, folder)
    return run(Request(where, split, checkpoint, *files, cascade, max_new_tokens, scores_only, _sets(set)))


@environment_given_back()
def verify(
    what: Run | File,
    other: Run | File | None = None,
    *,
    plan: File | None = None,
    against: File | None = None,
    steps: int | None = None,
    precision: Literal["float32", "bf16"] | None = None,
    ranks: int | None = None,
    set: Settings | None = None,
) -> Verdict:
    """`sameday verify`: a plan under a recipe against another, or with `other` two finished runs of one recipe."""
    from sameday.verify.command import compared

    refuse(
        [
            *_no_counts(steps=steps, ranks=ranks),
            *_no_choices(precision=(precision, ("float32", "bf16", None))),
        ]
    )
    *runs, plan_file, against_file = _files(what=what, other=other, plan=plan, against=against)
    named = [each for each in runs if each is not None]
    asked = {"plan": plan_file, "against": against_file, "steps": steps, "precision": precision, "ranks": ranks}
    report = compared(named, {**asked, "sets": _sets(set)}, recipes=False)
    return Verdict(int(report.exit_code), tuple(report.lines()), report.as_json())


@environment_given_back(but=READ_LATER)  # the model computes later
def load(run: Run | File, checkpoint: str | None = None, *, set: Settings | None = None) -> Loaded:
    """A run's finished weights, or those of a checkpoint (last, best, step-N). `set` takes plan fields, such as
    {"plan.device": "cpu"}."""
    from contextlib import closing
    from dataclasses import replace

    from sameday.commands.evaluate import Request, read_request, weights_of
    from sameday.commands.session import Session
    from sameday.commands.stages import own_models
    from sameday.tasks.registry import setup_of
    from sameday.tasks.setup import DATA

    refuse(_no_checkpoint(checkpoint))
    (path,) = _files(run=run)
    if own := own_models(path):
        raise BadInput(
            f"{path}: each of its stages has a model of its own: load one of {', '.join(map(str, own.values()))}"
        )
    folder, specs = read_request(Request(path, checkpoint=checkpoint, sets=_sets(set)))
    assert folder is not None
    weights = weights_of(folder, checkpoint, "loaded")
    setup = setup_of(specs.recipe, specs.home)
    specs = replace(specs, recipe=setup.recipe_for_evaluation())
    there = [split for split in DATA if setup.needs_data and setup.lacks(split) is None]
    with closing(Session.start(specs, splits=there[:1])) as session:
        task = session.load()
    task.restore(weights)
    task.training(False)
    # Questions may be asked from another folder later.
    return Loaded(Run(folder.path.absolute(), folder.finished_scores() or {}), task)


def _files(**named: File | Run | None) -> list[Any]:
    """What was given as paths, None where an optional one was not; BadInput with all that are no paths."""
    paths, problems = list[Path | None](), list[str]()
    for name, value in named.items():
        if isinstance(value, Run):
            paths.append(value.path)
        elif isinstance(value, str | os.PathLike) or (
            value is None and name not in ("recipe", "what", "run", "images")
        ):
            paths.append(None if value is None else Path(value))
        else:
            file = " of a YAML file; single fields are given by set" if name in ("recipe", "plan") else ""
            problems.append(f"{name} is {value!r}; must be a path{file}")
    refuse(problems)
    return paths


def _sets(values: Settings | None) -> list[str]:
    """As the command line writes them."""
    if not isinstance(values, Mapping | None):
        such = '{"recipe.learning_rate": 1e-4, "plan.device": "cpu"}'
        raise BadInput(f"set is {values!r}; must be a mapping of fields to values, such as {such}")
    sets, problems = [], []
    for name, value in (values or {}).items():
        if not isinstance(name, str):
            problems.append(f'set: {name!r} is no field; must be a text such as "recipe.learning_rate"')
            continue
        value = _with_texts(value)
        problems += [f"set: {why}" for why in _no_json({name: value})]
        sets += [] if problems else [f"{name}={in_yaml(value)}"]
    refuse(problems)
    return sets


def _no_counts(**named: Any) -> Iterator[str]:
    """What is wrong with them, where they are given. True is 1 to Python, and nobody's number."""
    for name, value in named.items():
        if value is None:
            continue
        most, why = BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{name} is {value!r}; a whole number of at least 1 is needed"
        elif value > most:
            yield f"{name} is {value}: {why}; at most {most}"


def _no_choices(**named: tuple[Any, tuple[Any, ...]]) -> Iterator[str]:
    for name, (value, allowed) in named.items():
        if not any(type(value) is type(each) and value == each for each in allowed):
            yield f"{name} is {value!r}; must be {' or '.join(map(repr, allowed))}"


def _no_checkpoint(value: Any) -> Iterator[str]:
    if not isinstance(value, str | None):
        yield f"checkpoint is {value!r}; must be 'last', 'best', a text such as 'step-250', or None for the result"
