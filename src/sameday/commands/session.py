"""One start-up for all commands: specs from files, the environment before torch is loaded, ranks, the machine, and
automatic choices resolved once, into one object."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sameday.commands.environment import prepare_environment
from sameday.record.folder import RunFolder
from sameday.record.times import Spent
from sameday.spec.errors import EXIT_OUT_OF_MEMORY, BadInput, NothingToLearn, RunStopped, refuse
from sameday.spec.load import BadPlan, load_specs
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe
from sameday.spec.sets import split_sets
from sameday.spec.words import first_names, in_yaml, tell
from sameday.tasks.base import Say, Task
from sameday.tasks.registry import setup_of
from sameday.tasks.setup import Audited, Resolved, TaskSetup

if TYPE_CHECKING:
    import torch

    from sameday.hardware.known import KnownGpu
    from sameday.hardware.machine import Machine
    from sameday.hardware.ranks import Ranks
    from sameday.train.steps import Steps


ASKED_FOR = "asked for"
"""Why a plan field has its value, where no choice was made."""
MOST_TAKEN_BACK = 2
"""Choices that may contradict what was asked for, each another part of it."""


def silent(_text: str) -> None:
    pass


@dataclass(frozen=True)
class Specs:
    """What a command names, read and checked before torch is loaded. Where the plan is `automatic` it holds only what
    the `fixed` fields were set to, and the rest is chosen for the machine."""

    recipe: Recipe
    home: Path
    plan: Plan
    automatic: bool = False
    fixed: tuple[str, ...] = ()
    part: bool = False
    """Whether the recipe is one stage of a run, which may have fewer samples than a step."""

    @classmethod
    def from_files(cls, recipe_path: Path, plan_path: Path | None, sets: Sequence[str]) -> Specs:
        home = recipe_path.resolve().parent
        with all_of_a_plan(home):
            recipe, plan = load_specs(recipe_path, plan_path, sets)
        fixed = {text.partition("=")[0].split(".")[1].strip() for text in split_sets(sets)[1]}
        return cls(recipe, home, plan, plan_path is None, tuple(sorted(fixed)))

    def first_stage(self, say: Say) -> Specs:
        """For commands that look at a single training."""
        stages = self.recipe.stage_recipes()
        if not stages:
            return self
        say(
            f"the recipe has {len(stages)} stages: this is about the first one, {stages[0].name}; --set "
            "recipe.stages=[] and --set recipe.data.where={...} choose other questions"
        )
        return replace(self, recipe=stages[0].recipe, part=True)


@dataclass(frozen=True)
class Session:
    """`plan` is what was asked for or chosen, as a run folder records it; `resolved.plan` is the one that runs, without
    automatic fields. `reasons` has why each was chosen. `audited` is the data, where splits of it were asked for."""

    recipe: Recipe
    home: Path
    setup: TaskSetup
    ranks: Ranks
    machine: Machine
    device: torch.device
    plan: Plan
    resolved: Resolved
    reasons: Mapping[str, str]
    say: Say
    audited: Audited
    joined: bool = True
    """Whether this session joined the ranks, and so leaves them."""
    spent: Spent = field(default_factory=Spent)
    """On libraries, on the audit of the data, and on loading the model."""

    @classmethod
    def start(
        cls,
        specs: Specs,
        say: Say = silent,
        join: bool = False,
        ranks: int | None = None,
        splits: Sequence[str] = (),
        few: Mapping[str, int] | None = None,
        group: Ranks | None = None,
        instead_of: KnownGpu | None = None,
    ) -> Session:
        """`join` makes this process one of torchrun's; `ranks` is how many a plan is chosen for, where that is another
        number. `splits` are audited, `few` samples of each: bad data is found before the model is asked for. A `group`
        that this process has joined before serves several sessions, none of which leaves it. A GPU that is
        used `instead_of` another has no more than that one."""
        prepare_environment(specs.plan)
        spent = Spent()
        with spent.on("libraries"):
            from sameday.hardware.machine import detect_machine, device_kind, pick_device, set_deterministic
            from sameday.hardware.ranks import Ranks

        joined = group is None
        group = group or (Ranks.join(device_kind(specs.plan)) if join else Ranks())
        try:
            setup = setup_of(specs.recipe, specs.home)
            group.from_first(lambda: _check_best(setup))
            machine = detect_machine(device_kind(specs.plan), instead_of)
            there = [split for split in splits if setup.lacks(split) is None]
            with spent.on("audit"):
                audited = group.from_first(lambda: _audited(setup, say, there, few))
            # The first rank's plan is everyone's: ranks that cut a step differently would drop samples.
            plan, reasons = group.from_first(lambda: _plan(specs, setup, machine, ranks or group.size))
            resolved = group.from_first(lambda: resolve(plan, setup, machine))
            set_deterministic(plan.deterministic)
            device = pick_device(plan, group)
        except BaseException:
            if joined:
                group.leave()
            raise
        fixed = (specs.recipe, specs.home, setup, group, machine, device)
        return cls(*fixed, plan, resolved, reasons, say if group.first else silent, audited, joined, spent)

    def choices(self) -> Iterator[str]:
        """What was chosen for the machine, and what the plan left to it, each with its reason."""
        for name, why in self.reasons.items():
            yield f"plan.{name}: {in_yaml(getattr(self.plan, name))}, because {why}"
        for name, (value, why) in self.resolved.values.items():
            yield f"{name}: {in_yaml(value)}, because {why}"

    def load(self, plan: Plan | None = None, splits: Any = None) -> Task:
        """The task on this process's device. A `plan`, resolved too, or `splits` stand instead of the session's."""
        from sameday.hardware.memory import forget_peak, free_memory, out_of_memory

        forget_peak(self.device)
        task: Task | None = None
        try:
            with self.spent.on("load"):
                data = self.audited.splits if splits is None else splits
                task = self.setup.load(plan or self.resolved.plan, self.device, data)
        except (RuntimeError, OSError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        if not all(self.ranks.gather(task is not None)) or task is None:  # all ranks stop together
            _, there = free_memory(self.device)
            raise RunStopped(
                f"out of memory while the model was loaded: {self.machine.shown_name} has {there / 2**30:.3g} GiB, "
                f"and other programs may use some of it. What is left to try: {self.setup.loading_advice}.",
                EXIT_OUT_OF_MEMORY,
            )
        if other := other_weights(task, self.ranks):
            raise BadInput(
                f"ranks start from different weights: {first_names(other, 3)}; a task draws its weights from "
                "recipe.seed alone"
            )
        return task

    def steps(self, task: Task) -> Steps:
        """What the loop computes a step with, for whoever times steps without training."""
        from sameday.train.steps import Steps

        return Steps(self.recipe, self.resolved.plan, task, self.ranks)

    def close(self) -> None:
        if self.joined:
            self.ranks.leave()


def _check_best(setup: TaskSetup) -> None:
    lacking = None if setup.recipe.best is None else setup.lacks("val")
    if lacking is not None:
        raise BadInput(f"recipe.best chooses weights by their validation score, and {lacking}")


def _audited(setup: TaskSetup, say: Say, splits: Sequence[str], few: Mapping[str, int] | None) -> Audited:
    """The data, once the model has been looked at too: what is wrong with either is told at once."""
    audited, wrong = Audited({}, {}, []), ""
    try:
        audited = setup.audit(say, splits, few) if splits else audited
    except NothingToLearn:  # and nothing else is wrong
        raise
    except BadInput as error:
        wrong = str(error)
    try:
        setup.check_model(silent if wrong else say)
    except BadInput as error:
        if str(error) not in wrong:  # the data may have been read for a model that is not known
            wrong = "\n".join(filter(None, (wrong, str(error))))
    refuse([wrong] if wrong else [])
    return audited


def _plan(specs: Specs, setup: TaskSetup, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
    """What was asked for, or choices for this machine, of which what `--set plan.x=…` says stands."""
    if not specs.automatic:
        return specs.plan, {}
    chosen, reasons = setup.choose_plan(machine, ranks)
    asked = {name: getattr(specs.plan, name) for name in specs.fixed}
    plan = Plan.model_validate(chosen.model_dump() | asked)
    reasons = {k: v for k, v in reasons.items() if k not in asked}
    plan, instead = _beside(asked, plan, list(reasons), setup, machine)
    return plan, reasons | instead | dict.fromkeys(specs.fixed, ASKED_FOR)


def _beside(
    asked: Mapping[str, Any], plan: Plan, chosen: Sequence[str], setup: TaskSetup, machine: Machine
) -> tuple[Plan, dict[str, str]]:
    """Choices that cannot go with what was asked for are taken back, as few as will do, the last that help."""
    if not asked or _follows(setup, plan, machine):
        return plan, {}
    beside = ", ".join(f"plan.{each} {in_yaml(value)}" for each, value in asked.items())
    some = (combinations(reversed(chosen), number) for number in range(1, MOST_TAKEN_BACK + 1))
    for names in chain.from_iterable(some):
        other = plan.model_copy(update={name: getattr(Plan(), name) for name in names})
        if _follows(setup, other, machine):
            why = f"cannot go with what was asked for: {beside}"
            return other, {name: f"{in_yaml(getattr(plan, name))} {why}" for name in names}
    return plan, {}


def _follows(setup: TaskSetup, plan: Plan, machine: Machine) -> bool:
    try:
        setup.check_plan(plan, machine)
    except BadInput:
        return False
    return True


def resolve(plan: Plan, setup: TaskSetup, machine: Machine) -> Resolved:
    """The plan without automatic fields. BadInput with everything for which it cannot run on this machine."""
    from sameday.hardware.machine import most_workers

    problems, most = [], most_workers(machine)
    if plan.workers > most:
        problems.append(
            f"plan.workers {plan.workers}: each is a process with memory of its own, and this machine has "
            f"{machine.cores} cores; allowed here: 0 to {most}"
        )
    try:
        resolved = setup.resolve_auto(plan, machine)
    except BadInput as error:
        problems.append(str(error))
    refuse(problems)
    return resolved


@contextmanager
def all_of_a_plan(home: Path) -> Iterator[None]:
    """What is wrong with a plan wherever it runs is told together with what this machine cannot do of the rest."""
    try:
        yield
    except BadPlan as bad:
        here = [] if bad.recipe is None else _problems_here(bad.rest, setup_of(bad.recipe, home))
        raise BadInput("\n".join([str(bad), *here])) from None


def _problems_here(plan: Plan, setup: TaskSetup) -> list[str]:
    prepare_environment(plan)
    from sameday.hardware.machine import detect_machine, device_kind

    try:
        resolve(plan, setup, detect_machine(device_kind(plan)))
    except BadInput as error:
        return str(error).splitlines()
    return []


def other_weights(task: Task, ranks: Ranks) -> list[str]:
    """Of what is trained that which ranks do not have to the same bits. They add their gradients up, and would never
    come together again."""
    if ranks.size == 1:
        return []
    from sameday.models.digest import line_of

    mine = {name: line_of(name, parameter) for name, parameter in task.trained().items()}
    each = ranks.gather(mine)
    return [name for name in mine if any(rank.get(name) != mine[name] for rank in each)]


def left_to_first(error: BadInput, ranks: Ranks) -> None:
    """The first rank says what all of them have. The others leave here."""
    if not ranks.first and not error.alone:
        sys.exit(error.code)


def note_stop(stop: RunStopped, ranks: Ranks, opened: Sequence[RunFolder] = ()) -> None:
    """All ranks stop together and with the same words: the first one says them, after the folders it opened have them.
    The others leave here."""
    if not ranks.first:
        if stop.alone:
            tell(stop, sys.stderr)
        sys.exit(stop.code)
    for folder in opened:
        folder.stopped(str(stop), stop.code)
