"""What the tools ask of a task before anything of it is loaded. They know no task by name: a new one is a folder with
a class of this kind, and one of `sameday.tasks.base.Task`. Importing this loads no torch, since a plan may set
variables that torch reads at its start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.spec.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from sameday.hardware.machine import Machine
    from sameday.models.kept import KeptBase
    from sameday.spec.evaluation import Evaluation
    from sameday.tasks.base import LeftOut, Say, Task

TRAINING = ("train", "val")
"""Splits that training reads."""

LOADED = ("torch", "torch._inductor.config", "sameday.train.steps")
"""Modules that every training loads, besides those of its task: whoever times several loads them before. None touches a
GPU. torch loads its compiler, which takes seconds, for an optimizer's first step and whenever it is told to be
deterministic."""

DATA = {"train": "training data", "val": "validation data"}
"""How they are called where their digests are compared."""


@dataclass(frozen=True)
class Audited:
    """Data that was checked. `splits` goes from the first rank to the others, and into `load`; only the task knows what
    it is. `sizes` counts the samples of each split, of training those that an epoch sees; `counts` says where they come
    from, where that is not one file; `empty` has a sentence for each split that was asked for and has none."""

    splits: Any
    sizes: dict[str, int]
    left_out: list[LeftOut]
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    empty: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Caching:
    """What `sameday cache` was asked for: to make entries, or to read all of them, or to remove those of no use to the
    recipe; and with `measure` to time some steps, so as to say what a cache gives."""

    kind: Literal["pixels", "features"]
    what: Literal["fill", "check", "prune", "prune all"] = "fill"
    measure: bool = False

    @property
    def loads_model(self) -> bool:
        return self.measure or self.kind == "features"

    @property
    def times_steps(self) -> bool:
        """Features come from a model, whose steps are timed in passing."""
        return self.measure or (self.kind == "features" and self.what == "fill")


@dataclass(frozen=True)
class Needed:
    """Bytes of memory, none where nobody knows, and of what, with what is left to try."""

    bytes: int = 0
    what: str = ""
    mapped: int = 0
    """Besides, of files that are used where they lie. The system reads them again where it has no room for them."""


@dataclass(frozen=True)
class Resolved:
    """A plan whose automatic fields have the value that they come to on this machine, and why."""

    plan: Plan
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, tuple[Any, str]]:
        """Each field that was automatic: what it came to, and why."""
        return {name: (getattr(self.plan, name), why) for name, why in self.why.items()}


@dataclass(frozen=True)
class Choice:
    """Values of plan fields that the tuner tries one after another. With `climb` they are in order, and only neighbours
    of the best are tried; one that `cuts` the step into micro-batches need not go on once the step is in one piece."""

    name: str
    values: tuple[dict[str, Any], ...]
    climb: bool = False
    cuts: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for value in self.values for name in value))


class TaskSetup(ABC):
    """A task before it is loaded, made of a recipe and the folder that its paths start at. Data, model and plan are
    checked here, so that bad input is found before weights are loaded; and here the tuner, the profiler, the verifier
    and the report ask what is the task's own. Methods that need torch import it themselves."""

    recipe_type: ClassVar[type[Recipe]]
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that every process of the task loads: whoever times several trainings loads them once for all."""
    alone: ClassVar[Mapping[str, Any]] = {}
    """Plan fields under which each sample is computed by itself, at a budget of one."""
    together: ClassVar[Mapping[str, Any]] = {}
    """Plan fields under which a step is one micro-batch, nothing computed twice: what no plan does with less."""
    together_words: ClassVar[str] = "all at once"
    """How people call that."""
    has_base: ClassVar[bool] = False
    """Whether training starts from a pretrained model, which can be evaluated too."""
    needs_data: ClassVar[bool] = True
    """Whether a model is made of what the data has, such as the number of its classes, also where it is only used."""
    generates: ClassVar[bool] = False
    """Whether its tasks generate answers."""
    false_alarms: ClassVar[str] = ""
    """How rarely equivalent plans of this task were called different, in a sentence; empty where not measured."""
    kept: KeptBase | None = None
    """Set by whoever loads one task after another, all with the same `frozen` weights."""

    def __init__(self, recipe: Any, home: Path) -> None:
        self.recipe, self.home = recipe, home

    # Data and model

    def lacks(self, split: str) -> str | None:
        """Why the recipe has no such split of the data (train, val or test); None where it has one."""
        there = getattr(getattr(self.recipe, "data", None), split, None) is not None
        return None if there else f"the recipe has no data.{split}"

    @abstractmethod
    def audit(self, say: Say, splits: Sequence[str] = TRAINING, few: Mapping[str, int] | None = None) -> Audited:
        """Those of the splits that there are, checked to the last sample; all problems in one BadInput. `few` takes
        only so many samples of a split."""

    def check_model(self, say: Say) -> None:  # noqa: B027 (a task may have nothing to check)
        """Refuses a model that cannot be trained, and says what will be downloaded."""

    def merge(self, weights: Path, out: Path, say: Say) -> None:
        """Fills the folder `out` with a whole model of saved weights, for use without adapters."""
        raise BadInput(f"task {self.recipe.task} trains no adapters, so that there is nothing to merge")

    def merged_bytes(self) -> int:
        """About how many it fills it with."""
        return 0

    @property
    def loading_advice(self) -> str:
        """What is left to try where the model does not fit in memory."""
        return "a smaller model, a device with more memory"

    def no_cascade(self) -> str | None:
        """Why a model of this recipe cannot answer stage by stage, as far as that is known without data."""
        alone = [each.name for each in self.recipe.stage_recipes()[1:] if not each.follows]
        if not alone:
            return None
        return (
            f"stage {alone[0]} starts from the base model, so that each stage has a model of its own: a cascade is of "
            "one model's answers; allowed: false, or start: previous in each stage"
        )

    def check_evaluation(self, asked: Evaluation, splits: Any) -> None:  # noqa: B027 (a task may generate nothing)
        """BadInput where audited data does not have what generation was asked to use."""

    def drop_too_long(self, splits: Any) -> Any:
        """Audited data as `load` would make it ready: whoever loads it several times saves that, and what is wrong with
        it is known before weights are loaded."""
        return splits

    def image_contents(self, splits: Any) -> dict[str, set[str]]:
        """The images of each split by their content, for data that was audited."""
        return {}

    def hints(self, splits: Any) -> list[str]:
        """What is odd about data that is ready to be loaded, each in a line; it can be trained all the same."""
        return []

    def data_digests(self, splits: Any) -> dict[str, str]:
        """What a training learns from and is validated on, by name, for data that is ready to be loaded: changes when
        its content does."""
        return {}

    def data_files(self, splits: Any) -> dict[str, dict[Path, str]]:
        """The files of each of these, by the same names: the one that lists the others first. Of an image its content,
        of any other file an empty text."""
        return {}

    def sample_ids(self, splits: Any, split: str) -> frozenset[Hashable]:
        """What tells the samples of a split apart, the same whichever of them a recipe takes; a task whose recipes have
        stages says it."""
        return frozenset()

    def epoch_steps(self, audited: Audited) -> list[int]:
        """How many steps each epoch has, for data that was audited: nothing is loaded for it. Samples that turn out too
        long are counted too."""
        recipe: Recipe = self.recipe
        return [-(-audited.sizes["train"] // recipe.effective_batch)] * recipe.num_epochs

    def epoch_flop(self, plan: Plan, splits: Any) -> float:
        """About how many FLOP the matmuls of an epoch of training take at least, for data that is ready to be loaded; 0
        where nobody can say."""
        return 0.0

    def parameters(self) -> int:
        """About how many numbers the model has; 0 where nobody can say."""
        return 0

    def frozen(self) -> Hashable | None:
        """What names the weights that are loaded and that no training changes: where two recipes have the same, `kept`
        reads them once. None where there are none, or all are trained."""
        return None

    @abstractmethod
    def load(self, plan: Plan, device: torch.device, splits: Any) -> Task:
        """The task, its model ready on the device, for data that was audited and a plan without automatic fields."""

    # Plans

    def choose_plan(self, machine: Machine, ranks: int) -> tuple[Plan, dict[str, str]]:
        """A safe plan for this machine, each of its fields with the reason."""
        return Plan(), {}

    def check_plan(self, plan: Plan, machine: Machine) -> None:  # noqa: B027 (a task may follow every plan)
        """BadInput where the plan cannot run on this machine, whatever the model and the data are."""

    def resolve_auto(self, plan: Plan, machine: Machine) -> Resolved:
        """What the plan leaves to the machine. BadInput where it cannot run here."""
        self.check_plan(plan, machine)
        return Resolved(plan)

    def least_memory(self, plan: Plan, ranks: int, trains: bool) -> Needed:
        """What a process of a training, or one that only uses the model, takes at least. Asked where a process that
        takes more than there is would be killed, which is on a CPU."""
        return Needed()

    def low_memory(self, plan: Plan) -> Plan:
        """The same numbers with less memory, however slow."""
        return plan

    def fits_two_arms(self, memory: int) -> bool:
        """Whether two arms of a comparison and a float32 reference's activations fit in so many bytes of a GPU."""
        return False

    def recipe_for_evaluation(self) -> Recipe:
        """The recipe without what only the start of training needs, and what may be gone by now."""
        recipe: Recipe = self.recipe
        return recipe

    def starts_from(self) -> Path | None:
        """The folder of saved weights that training starts from; None where it starts from a base model or anew."""
        return None

    def recipe_with_adapter(self, folder: Path) -> Recipe:
        """The recipe whose model has somebody's adapter, of whatever form fits it."""
        raise BadInput(f"--adapter {folder}: task {self.recipe.task} has no adapters")

    def for_evaluation(self, plan: Plan) -> Plan:
        """A recorded plan without what only its training's machine may have."""
        return plan

    # Beside a plain loop of transformers and PEFT

    def not_plain(self) -> list[str]:
        """What such a loop cannot do of this recipe, each in a few words; empty where it can do all of it."""
        return [f"task {self.recipe.task}"]

    def plain_settings(self) -> dict[str, Any]:
        """Of a recipe that such a loop can follow: what it is told besides optimizer and schedule, as plain data by the
        names of a recipe."""
        raise NotImplementedError

    # Tools

    def fill_cache(self, session: Any, asked: Caching) -> bool:
        """What `sameday cache` was asked for; whether all is well."""
        raise BadInput(f"task {self.recipe.task} has no use for a cache")

    def images_folder(self, plan: Plan) -> Path | None:
        """A folder on the disk that a step's images are read from; None where a step reads none."""
        return None

    def choices(self, machine: Machine) -> list[Choice]:
        """What the tuner may try of the fields that are this task's own, what gave most elsewhere first."""
        return []

    def cuts(self, device: str, plan: Plan) -> list[dict[str, Any]]:
        """Changes of a plan that cut its steps into other micro-batches and could be faster."""
        return []

    def cannot(self, machine: Machine) -> frozenset[tuple[str, Any]]:
        """Plan fields with values that this recipe cannot use on this machine, so that nobody is advised to."""
        return frozenset()

    def trial_values(self, device: str, size: int) -> dict[str, tuple[Any, ...]]:
        """For each plan field that is this task's own the values under which its claim is tested, the plain one first.
        `size` is about how large a sample is, in what the task's budgets count."""
        return {}

    def words(self) -> tuple[str, str]:
        """What is trained, and on what: a paragraph each, for the report."""
        return f"Task {self.recipe.task}.", "The recipe below has all of its fields."
