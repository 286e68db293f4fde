"""What is particular about the configs of one trainer: its names, its defaults, and what no table can say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sameday.spec.convert.families import TEMPLATES, ChatTemplate

if TYPE_CHECKING:
    from sameday.spec.convert.settings import Settings

Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
"""Names that only pass at values that do nothing, each with what any other value would do. Behind a colon stands what
to do instead, where a recipe can say it."""


@dataclass(frozen=True)
class Trainer:
    """Everything here stands before what `keys` knows of all configs."""

    name: str
    """As people write it."""
    short: str
    """What --from takes."""
    marks: frozenset[str] = frozenset()
    """Keys by which its configs are recognised."""
    commands: tuple[str, ...] = ()
    """Words of a command line that starts it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    neutral: Neutral = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    starts: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that are dropped."""
    handled: tuple[str, ...] = ()
    """Further names that `prepare` makes something of."""
    whole: tuple[str, ...] = ()
    """Names whose mapping is one setting, and no section with settings."""
    data: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names that say where questions come from, by the option that replaces them: --train or --val."""
    defaults: Callable[[Settings], Mapping[str, Any]] = lambda settings: {}
    """What it takes where a name is absent, as far as it is not what transformers' Trainer takes."""
    logging_steps: int | None = 500
    """How often it logs where nothing says it; None where that depends on the number of steps."""
    keeps_form: bool = False
    """Whether an adapter that training starts from keeps its own rank, alpha and dropout, whatever the config says."""
    null_is_default: bool = False
    """Whether it takes every null for absent; others hand it on, and what tests it for truth takes it for false."""
    own_nulls: Mapping[str, str] = field(default_factory=dict)
    """Where null is a value of its own, with what it does: no default stands instead of it."""
    no_nulls: tuple[str, ...] = ()
    """Of its defaults, those where it stops at a null, or takes it for something that is not the default."""
    prepare: Callable[[Settings], None] = lambda settings: None
    """Done before all else; names that it is done with are gone from `settings.old`."""
    bare_names: Literal["decoder", "all"] = "all"
    """Whether names of layers that get adapters are the language model's alone, or as in PEFT any part's."""
    loads_as_computed: bool = False
    """Whether a model has the precision that training computes in where nothing else says what it is loaded in."""
    loads_as_stored: bool = False
    """Whether, where nothing says what a model is loaded in, transformers chooses it, which depends on its version."""
    templates: Mapping[str, ChatTemplate] = field(default_factory=lambda: TEMPLATES)
    """Prompts that it has by name, and in configs of it `template` asks for."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By model type, in what its prompts always differ from the model's own."""
    loss_weight: tuple[str, str] | None = None
    answer_end: tuple[str, str] | None = None
    end_tokens: tuple[str, ...] = ()
    """Names that say which token ends an answer; `handled` has them too."""
    image_backend: tuple[str, str] | None = None
    """Of the recipe: the value, and why; None where the config or transformers' Trainer says it."""
    shrinks_first: bool = False
    """Whether it resizes images itself to at most `max_pixels`, before the model's processor does."""
    micro_batch_loss: str = ""
    """Why each micro-batch's loss is divided by its own answer tokens, whatever the model; empty where the model says
    it."""
    answer_ends: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By model type, where it is not answer_end."""
    remarks: tuple[str, ...] = ()
    """What may differ between versions of it, and what to look at then."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def each(names: str, why: str) -> dict[str, str]:
    """These names, with spaces between them, for the same reason."""
    return dict.fromkeys(names.split(), why)


def only(names: str, why: str, *values: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Of these names, with spaces between them, only such values pass."""
    return dict.fromkeys(names.split(), (values, why))


PLAIN = Trainer("transformers' Trainer, or a script around it", "trainer", loads_as_stored=True)
