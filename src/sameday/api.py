"""The commands for Python: the same checks, records and errors as on the command line. `BadInput` is what the command
says and leaves with exit code 2; `RunStopped` has the other codes. Importing this loads no torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sameday.spec.errors import BadInput, RunStopped
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
    """What `verify` found. `code` is its exit code (0 the same, 1 different, 2 could not be compared), `lines` is what
    it prints, `details` what --json writes."""

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
        `images` is the folder of their images."""
        from sameday.hardware.ranks import Ranks
        from sameday.tasks.registry import setup_of

        recipe: Any = self.run.recipe
        if not setup_of(recipe, self.run.path).generates:
            raise BadInput(f"task {recipe.task} generates no answers")
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise BadInput(f"max_new_tokens is {max_new_tokens!r}; a whole number of at least 1 is needed")
        rows = [_row(number, question, recipe.data.fields) for number, question in enumerate(questions, 1)]
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
                "image_root": str(Path(images).resolve()),
            }
            asked |= {"where": {}, "skip": {}, "fields": {}, "split": None, "mix": (), "limit": None, "on_bad": "stop"}
            setup = setup_of(recipe.model_copy(update={"data": recipe.data.model_copy(update=asked)}), self._home)
            try:
                samples = setup.audit(lambda _text: None, ("test",)).splits["test"]
            except BadInput as error:
                raise BadInput(str(error).replace(f"{file}:", "question ").replace(str(file), "questions")) from None
            found: dict[int, str] = {}
            for batch in self.task.answers(samples, max_new_tokens, Ranks()):
                found |= {number: answer.text for number, answer in batch.items()}
        return [found[number] for number in range(len(questions))]

    @property
    def _home(self) -> Path:
        """The folder that paths of the recipe are relative to."""
        return Path(self.run._folder().recipe_dir)


def _row(number: int, question: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """With our keys."""
    if not isinstance(question, Mapping):
        raise BadInput(
            f"question {number} is {question!r}; needed is a mapping such as "
            '{"image": "a.png", "question": "What is there?"}'
        )
    named = {ours: question[theirs] for ours, theirs in fields.items() if theirs in question}
    return {"answer": "?", **question, **named}


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

    short = {"recipe.max_steps": max_steps, "recipe.data.limit": limit}
    sets = _sets({**(set or {}), **{name: value for name, value in short.items() if value is not None}})
    recipe, folder = Path(recipe), _path(out)
    scores = train_from_files(recipe, _path(plan), folder, sets, stop_after)
    asked = Specs.from_files(recipe, _path(plan), sets).recipe
    return Run(folder or default_path(as_begun(asked, folder)), scores)


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

    where = what.path if isinstance(what, Run) else Path(what)
    files = (_path(adapter), base, _path(plan), _path(out))
    return run(Request(where, split, checkpoint, *files, cascade, max_new_tokens, scores_only, _sets(set)))


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

    named = [each.path if isinstance(each, Run) else Path(each) for each in (what, other) if each is not None]
    asked = {"plan": _path(plan), "against": _path(against), "steps": steps, "precision": precision, "ranks": ranks}
    report = compared(named, {**asked, "sets": _sets(set)}, recipes=False)
    return Verdict(int(report.exit_code), tuple(report.lines()), report.as_json())


def load(run: Run | File, checkpoint: str | None = None, *, set: Settings | None = None) -> Loaded:
    """A run's finished weights, or those of a checkpoint (last, best, step-N). `set` takes plan fields, such as
    {"plan.device": "cpu"}."""
    from contextlib import closing
    from dataclasses import replace

    from sameday.commands.evaluate import Request, read_request, weights_of
    from sameday.commands.session import Session
    from sameday.commands.stages import own_models
    from sameday.tasks.registry import setup_of

    path = run.path if isinstance(run, Run) else Path(run)
    if own := own_models(path):
        raise BadInput(
            f"{path}: each of its stages has a model of its own: load one of {', '.join(map(str, own.values()))}"
        )
    folder, specs = read_request(Request(path, checkpoint=checkpoint, sets=_sets(set)))
    assert folder is not None
    weights = weights_of(folder, checkpoint, "loaded")
    specs = replace(specs, recipe=setup_of(specs.recipe, specs.home).recipe_for_evaluation())
    with closing(Session.start(specs)) as session:
        task = session.load()
    task.restore(weights)
    task.training(False)
    return Loaded(Run(folder.path, folder.finished_scores() or {}), task)


def _path(file: File | None) -> Path | None:
    return None if file is None else Path(file)


def _sets(values: Settings | None) -> list[str]:
    """As the command line writes them."""
    return [f"{name}={in_yaml(value)}" for name, value in (values or {}).items()]
