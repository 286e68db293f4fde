"""The cache of a question set's images: what its entries depend on, and which of them a plan reads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Literal

import torch
from torch import Tensor

from sameday.cache.key import Kind, Settings, differences
from sameday.cache.store import Store, others
from sameday.cache.worth import WORTH_IT, Measured, judge
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.source import FEATURES, Source
from sameday.models.features import FeatureMemory
from sameday.models.tower import NUMBERS
from sameday.models.vlm import VisionLanguageModel
from sameday.record.room import no_room
from sameday.spec.errors import BadInput, DiskTooSmall
from sameday.spec.plan import Plan
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import tell


def settings_of(kind: Kind, processor: ImageProcessor, model: VisionLanguageModel | None) -> Settings:
    """Everything that entries depend on besides the image. Pixels do not depend on the model."""
    fields = processor.settings()
    if kind == "features":
        assert model is not None, "features depend on the tower"
        fields |= {
            "byte_table": hashlib.sha256(processor.byte_table.tobytes()).hexdigest()[:16],
            "precision": model.recipe.precision,
            "number": str(model.byte_table.dtype).removeprefix("torch."),
            "tower": model.tower_digest(),
            "torch": torch.__version__,
            "device": device_name(model.device),
            "compile": model.plan.compile,
            "numbers": NUMBERS,
        }
    return Settings(kind, fields)


def device_name(device: torch.device) -> str:
    """Of what computes there: another one rounds otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


@dataclass(frozen=True)
class Opened:
    """Where a plan's images come from, which kind that is, and what a user should know about it."""

    source: Source
    kind: Literal["none", "pixels", "features"]
    notes: list[str]


def open_cache(
    recipe: VlmRecipe,
    plan: Plan,
    folder: Path,
    processor: ImageProcessor,
    model: VisionLanguageModel,
    contents: Collection[str],
) -> Opened:
    kind, notes = plan.cache, list[str]()
    with in_folder(folder):
        if kind == "auto":
            kind, why = automatic(recipe, plan, folder, processor, model, contents)
            notes.append(f"cache: {kind}, because {why}")
        if plan.keep_features and kind != "features":
            model.memory = FeatureMemory(model.device)
        if kind == "none":
            return Opened(Source(processor), kind, notes)
        store = Store(folder, settings_of(kind, processor, model))
        notes.append(coverage(store, contents))
    if kind == "pixels":
        return Opened(Source(processor, pixels=store), kind, notes)
    source = Source(processor, features=store)
    model.keep = Behind(source, store).keep
    return Opened(source, kind, notes)


@contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    """What is wrong with a folder that cannot be used, said of the plan field that names it."""
    try:
        yield
    except OSError as error:
        kind = BadInput if no_room(error) is None else DiskTooSmall
        raise kind(f"plan.cache_dir {folder}: {error.strerror or error}: {error.filename or ''}".rstrip(": ")) from None


def automatic(
    recipe: VlmRecipe,
    plan: Plan,
    folder: Path,
    processor: ImageProcessor,
    model: VisionLanguageModel,
    contents: Collection[str],
) -> tuple[Literal["none", "pixels", "features"], str]:
    """The fastest by what was measured here, of those that can be used and are there already: a run that fills a cache
    on its way is faster only later."""
    measured = read_measured(folder, recipe, plan, model)
    if measured is None:
        return "none", "no steps of this recipe and plan were timed on this machine: `sameday cache` does that"
    why = []
    for kind, judgement in sorted(judge(measured).items(), key=lambda pair: -pair[1].gain):
        if judgement.gain < WORTH_IT:
            why.append(judgement.sentence)
        elif kind == "features" and model.tower_trained:
            why.append("features: the tower is trained")
        elif missing := len(set(contents) - Store(folder, settings_of(kind, processor, model)).contents()):
            why.append(f"{judgement.sentence}, but {missing} images are missing: `sameday cache --kind {kind}`")
        else:
            return kind, judgement.sentence
    return "none", "; ".join(why)


ASIDE = (
    *(
        "cache",
        "cache_dir",
        "keep_features",
        "log_steps",
        "eval_steps",
        "eval_token_budget",
        "save_steps",
        "save_total_limit",
    ),
    "track",
)
"""Plan fields that a step's time does not depend on."""


def measured_path(folder: Path, recipe: VlmRecipe, plan: Plan, model: VisionLanguageModel) -> Path:
    machine = device_name(model.device)
    timed = {name: value for name, value in plan.model_dump(mode="json").items() if name not in ASIDE}
    key = json.dumps([recipe.fingerprint, platform.node(), machine, timed], sort_keys=True)
    return folder / f"measured-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def write_measured(folder: Path, recipe: VlmRecipe, plan: Plan, model: VisionLanguageModel, measured: Measured) -> None:
    path = measured_path(folder, recipe, plan, model)
    aside = path.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):  # a read-only cache: then it is only said
        aside.write_text(json.dumps(asdict(measured)))
        aside.replace(path)


def read_measured(folder: Path, recipe: VlmRecipe, plan: Plan, model: VisionLanguageModel) -> Measured | None:
    try:
        return Measured(**json.loads(measured_path(folder, recipe, plan, model).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def coverage(store: Store, contents: Collection[str]) -> str:
    """How many of the images are there, and where none are, in what other entries differ."""
    kind, there = store.settings.kind, len(store.contents() & set(contents))
    text = f"cache: {kind} of {there} of {len(contents)} images in {store.folder}"
    if there:
        return text
    for other, count in others(store.root, store.settings):
        text += f"; {count} others there have {'; '.join(differences(store.settings, other))}"
    return text


class Behind:
    """Features are written behind the training's back, by threads that it waits for only where the disk is slower."""

    MOST = 8

    def __init__(self, source: Source, store: Store) -> None:
        self.source, self.store = source, store
        self.pool = ThreadPoolExecutor(2)
        self.waiting: set[str] = set()
        self.lock, self.room = Lock(), BoundedSemaphore(self.MOST)

    def keep(self, content: str, features: Tensor) -> None:
        with self.lock:
            if self.source.full or content in self.waiting:
                return
            self.waiting.add(content)
        self.room.acquire()
        self.pool.submit(self._write, content, features)

    def _write(self, content: str, features: Tensor) -> None:
        try:
            self.source.keep(self.store, content, {FEATURES: features.detach().cpu()})
        except Exception as error:  # nobody asks this thread what became of it
            tell(f"cache: {content} was not kept: {error}", sys.stderr)
        finally:
            with self.lock:
                self.waiting.discard(content)
            self.room.release()
