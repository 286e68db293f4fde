"""The cache of a question set's images: what its entries depend on, and which of them a plan reads."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Literal

import torch
import transformers
from torch import Tensor

from sameday.cache.key import Settings, differences
from sameday.cache.store import Store, others
from sameday.cache.worth import Measured, choose
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.source import FEATURES, Source
from sameday.models.qwen_vl import QwenVL
from sameday.spec.plan import Plan
from sameday.spec.vqa import VqaRecipe

Kind = Literal["pixels", "features"]


def settings_of(kind: Kind, processor: ImageProcessor, model: QwenVL | None) -> Settings:
    """Everything that entries depend on besides the image."""
    fields = processor.settings()
    if kind == "features":
        assert model is not None, "features depend on the tower"
        fields |= {
            "levels": hashlib.sha256(processor.levels.tobytes()).hexdigest()[:16],
            "precision": str(model.levels.dtype).removeprefix("torch."),
            "tower": model.tower_digest(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    return Settings(kind, fields)


def open_cache(
    recipe: VqaRecipe, plan: Plan, folder: Path, processor: ImageProcessor, model: QwenVL, contents: Collection[str]
) -> tuple[Source, list[str]]:
    """Where the plan's images come from, and what a user should know about it."""
    kind, notes = plan.cache, []
    if kind == "auto":
        kind, why = automatic(recipe, folder, processor, model, contents)
        notes.append(f"cache: {kind}, because {why}")
    if kind == "none":
        return Source(processor), notes
    store = Store(folder, settings_of(kind, processor, model))
    notes.append(found(store, contents))
    if kind == "pixels":
        return Source(processor, pixels=store), notes
    source = Source(processor, features=store)
    model.keep = Behind(source, store).keep
    return source, notes


def automatic(
    recipe: VqaRecipe, folder: Path, processor: ImageProcessor, model: QwenVL, contents: Collection[str]
) -> tuple[Literal["none", "pixels", "features"], str]:
    """What was measured to be faster on this machine, where all of it is there already: a run that fills a cache on its
    way, or does not, by its own choice, could not be repeated."""
    measured = read_measured(folder, recipe, model)
    if measured is None:
        return "none", f"nothing was measured for this recipe on this machine in {folder}: `sameday cache` does that"
    kind, why = choose(measured)
    if kind == "features" and model.tower_trained:
        kind, why = "none", "the tower is trained"
    if kind != "none":
        store = Store(folder, settings_of(kind, processor, model))
        missing = len(set(contents) - store.contents())
        if missing:
            return "none", f"{kind} of {missing} images are missing: `sameday cache --kind {kind}` makes them ({why})"
    return kind, why


def measured_path(folder: Path, recipe: VqaRecipe, model: QwenVL) -> Path:
    machine = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor() or "cpu"
    key = f"{recipe.fingerprint} {platform.node()} {machine}"
    return folder / f"measured-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def write_measured(folder: Path, recipe: VqaRecipe, model: QwenVL, measured: Measured) -> None:
    path = measured_path(folder, recipe, model)
    aside = path.with_suffix(f".{os.getpid()}.part")
    aside.write_text(json.dumps(asdict(measured)))
    aside.replace(path)


def read_measured(folder: Path, recipe: VqaRecipe, model: QwenVL) -> Measured | None:
    try:
        return Measured(**json.loads(measured_path(folder, recipe, model).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def found(store: Store, contents: Collection[str]) -> str:
    """How many of the images are there, and where none are, in what other entries differ."""
    kind, there = store.settings.kind, len(store.contents() & set(contents))
    text = f"cache: {kind} of {there} of {len(contents)} images in {store.folder}"
    if there:
        return text
    for other, count in others(store.root, store.settings):
        text += f"; {count} others there have {'; '.join(differences(store.settings, other))}"
    return text


class Behind:
    """Features are written behind the training's back. What cannot be written soon is left for the next epoch."""

    MOST = 4

    def __init__(self, source: Source, store: Store) -> None:
        self.source, self.store = source, store
        self.pool = ThreadPoolExecutor(2)
        self.waiting: set[str] = set()
        self.lock = Lock()

    def keep(self, content: str, features: Tensor) -> None:
        with self.lock:
            if content in self.waiting or len(self.waiting) >= self.MOST:
                return
            self.waiting.add(content)
        self.pool.submit(self._write, content, features)

    def _write(self, content: str, features: Tensor) -> None:
        try:
            self.source.keep(self.store, content, {FEATURES: features.detach().cpu()})
        finally:
            with self.lock:
                self.waiting.discard(content)
