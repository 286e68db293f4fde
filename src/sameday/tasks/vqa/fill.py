"""`sameday cache` for questions about images: every content once, ahead of a run, and whether that pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sameday.cache.build import Job, build, check_room, estimate
from sameday.cache.key import Kind, differences
from sameday.cache.store import BadEntry, Store, in_bytes, others, prune
from sameday.cache.worth import Measured, judge, paying
from sameday.data.questions.audit import cores
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef, images_of
from sameday.data.questions.source import FEATURES, PIXELS, decode
from sameday.hardware.disk import rate_of, read_rate
from sameday.hardware.ranks import Ranks
from sameday.hardware.signals import StopRequest
from sameday.models.vlm import VisionLanguageModel
from sameday.spec.errors import EXIT_STOPPED, BadInput, RunStopped
from sameday.spec.load import resolve_path
from sameday.spec.writing import check_folder
from sameday.tasks.base import Say
from sameday.tasks.setup import Caching
from sameday.tasks.vqa.cache import coverage, in_folder, settings_of, write_measured
from sameday.tasks.vqa.loading import load_processor
from sameday.tasks.vqa.task import VqaTask
from sameday.tasks.vqa.words import image_parts_words

REMOVED = "removed"
STEPS = 4
"""Measured, each after it was done once."""


def fill_cache(setup: Any, session: Any, asked: Caching) -> bool:
    """What `sameday cache` was asked for; whether all is well. `setup` is the task's, in the session of the command."""
    recipe, say = setup.recipe, session.say
    if asked.kind == "features" and recipe.trains_image_parts:
        raise BadInput(
            f"features are what vision tower and projector make of an image, and {image_parts_words(recipe)}: they "
            "would be others after every step"
        )
    audited = session.audited
    plan = session.resolved.plan
    folder = resolve_path(setup.home, plan.cache_dir)
    task = None
    if asked.kind == "features" or asked.measure:
        task = session.load(plan.model_copy(update={"cache": "none", "keep_features": False}))
    processor = load_processor(setup.family, recipe, setup.home)
    with in_folder(folder):
        model = None if task is None else task.model
        filling = Filling(asked.kind, processor, images_of(audited.splits), folder, say, model)
        if asked.what == "check":
            return filling.check()
        if asked.what != "fill":
            filling.prune(everything=asked.what == "prune all")
            return True
        check_folder(folder, "plan.cache_dir")
        say(coverage(filling.store, [image.digest for image in filling.images]))
        check_room(filling.store, estimate(filling.store, filling.jobs))
        measured = None if task is None else filling.measure(task, session.steps(task))
        filling.fill(workers=plan.workers or cores())
        if task is None:
            filling.compare_reading()
        elif measured is not None:
            filling.measure_again(task, measured)
    return True


class Filling:
    """The cache of one kind for the images of one recipe. Pixels need no model."""

    def __init__(
        self,
        kind: Kind,
        processor: ImageProcessor,
        images: Sequence[ImageRef],
        folder: Path,
        say: Say,
        model: VisionLanguageModel | None = None,
    ) -> None:
        self.kind, self.processor, self.images, self.say, self.model = kind, processor, images, say, model
        self.store = Store(folder, settings_of(kind, processor, model))

    @property
    def jobs(self) -> list[Job[ImageRef]]:
        return [Job(image.digest, self._size(image, self.kind), image) for image in self.images]

    def fill(self, workers: int) -> None:
        with StopRequest() as stop:
            built = build(
                self.store,
                self.jobs,
                prepare=lambda job: (job, decode(job.item, self.processor, check=True).tensor),
                finish=self._finish,
                workers=workers,
                say=self.say,
                stop=lambda: stop.asked,
            )
        if built.stopped:
            there = f"{built.made + built.found} of {len(self.images)} images are there"
            raise RunStopped(f"{self.kind}: {there}; the same command goes on", EXIT_STOPPED)

    def _shape(self, image: ImageRef, kind: Kind) -> tuple[int, int, int]:
        processor = self.processor
        high, wide = processor.grid(image.width, image.height)
        if kind == "pixels":
            return high * processor.patch_size, wide * processor.patch_size, 3
        assert self.model is not None, "features are a model's"
        tensors, width = self.model.feature_shape
        return tensors, processor.tokens(image.width, image.height), width

    def _size(self, image: ImageRef, kind: Kind) -> int:
        number = torch.uint8 if kind == "pixels" or self.model is None else self.model.byte_table.dtype
        empty = torch.empty(self._shape(image, kind), dtype=number, device="meta")
        return self.store.size_of(image.digest, {PIXELS if kind == "pixels" else FEATURES: empty})

    @torch.no_grad()
    def _finish(self, prepared: tuple[Job, Tensor]) -> dict[str, Tensor]:
        job, pixels = prepared
        if self.kind == "pixels":
            return {PIXELS: pixels}
        assert self.model is not None, "features are a model's"
        grid = self.processor.grid(job.item.width, job.item.height)
        with self.model.numeric_format():
            (made,) = self.model.features_per_image(pixels.flatten().to(self.model.device), [grid])
        expected = self._shape(job.item, "features")
        assert made.shape == expected, f"the tower gave {tuple(made.shape)}, not {expected}"
        return {FEATURES: made.cpu()}

    def check(self) -> bool:
        """Every entry read and compared with its own checksum; what is damaged is named and removed, since it is of no
        use to anyone."""
        good, missing, bad, removed = 0, 0, [], 0
        for image in self.images:
            try:
                entry = self.store.read(image.digest)
            except BadEntry as error:
                fate = _removed(error.path)
                bad.append(f"{error} (image {image.path}); {fate}")
                removed += fate == REMOVED
                continue
            good, missing = good + (entry is not None), missing + (entry is None)
        for line in bad:
            self.say(line)
        self.say(f"{self.kind}: {good} entries intact, {missing} missing, {len(bad)} damaged, in {self.store.folder}")
        if removed:
            what = "1 damaged entry is" if removed == 1 else f"{removed:,} damaged entries are"
            again = "is made again" if removed == 1 else "are made again"
            self.say(f"{what} removed, and {again} by `sameday cache --kind {self.kind}` or by a run with this cache")
        return not bad and not missing

    def prune(self, everything: bool) -> None:
        """What this recipe does not use of its own settings, or of all settings of its kind."""
        theirs = others(self.store.root, self.store.settings)
        keep: dict[str, set[str]] = {self.store.settings.name: {image.digest for image in self.images}}
        if everything:
            keep |= {other.name: set() for other, _ in theirs}
        for other, count in theirs:
            fate = "go" if everything else "stay; --prune --all removes them"
            self.say(f"{count} entries with {'; '.join(differences(self.store.settings, other))} {fate}")
        files, size = prune(self.store.root, keep)
        self.say(f"{self.kind}: {files} files that this recipe does not use are gone, {in_bytes(size)}")

    def measure(self, task: VqaTask, steps: Any) -> Measured | None:
        """Some steps of the plan, timed; nothing is updated. Kept beside the entries, for `cache: auto`. `steps` is
        what the loop computes them with."""
        disk = read_rate(self.store.root) or rate_of(self._some())
        if disk is None:
            self.say(f"not measured, since nothing can be written or read in {self.store.root}")
            return None
        known = {image.digest: image for image in self.images}
        count = min(STEPS, task.steps_per_epoch())
        timed = [_timed(task, steps, step) for step in range(count)]
        images = [known[content] for each in timed for content in each.contents]
        measured = Measured(
            step=statistics.median(each.step for each in timed),
            tower=statistics.median(each.tower for each in timed),
            images=len(images) / count,
            decode=sum(each.decode for each in timed) / max(1, len(images)),
            workers=task.plan.workers,
            disk=disk,
            pixel_bytes=sum(self._size(image, "pixels") for image in images) / count,
            feature_bytes=sum(self._size(image, "features") for image in images) / count,
        )
        for judgement in judge(measured).values():
            self.say(judgement.sentence)
        write_measured(self.store.root, task.recipe, task.plan, task.model, measured)
        return measured

    def measure_again(self, task: VqaTask, before: Measured) -> None:
        """With the entries themselves, now that they are there; said where that changes what pays."""
        disk = rate_of(self._some())
        if disk is None:
            return
        now = replace(before, disk=disk)
        write_measured(self.store.root, task.recipe, task.plan, task.model, now)
        if paying(now) != paying(before):
            for judgement in judge(now).values():
                self.say(f"read from the entries themselves, {judgement.sentence}")

    def _some(self) -> list[Path]:
        return [self.store.path(image.digest) for image in self.images[:: max(1, len(self.images) // 16)]]

    def compare_reading(self) -> None:
        """What can be said without a step: an image from its file, and from the cache."""
        some = self.images[:: max(1, len(self.images) // 8)]
        if not some:
            return
        began = time.perf_counter()
        for image in some:
            decode(image, self.processor)
        decoded = time.perf_counter()
        for image in some:
            self.store.read(image.digest)
        read = time.perf_counter()
        self.say(
            f"{self.kind}: one process decodes {len(some) / (decoded - began):.0f} images/s, and reads "
            f"{len(some) / (read - decoded):.0f} from the cache; --measure says whether a step needs that"
        )


class _Timed(NamedTuple):
    """Seconds of a step and of its tower, of the processes that decoded its images, and which they were."""

    step: float
    tower: float
    decode: float
    contents: set[str]


def _removed(entry: Path) -> str:
    try:
        entry.unlink()
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    return REMOVED


def _timed(task: VqaTask, steps: Any, step: int) -> _Timed:
    host = list(task.batches(step, None, Ranks()))
    batches = [batch.to(task.device) for batch in host]

    def learn() -> None:
        steps.gradients.zero()
        steps.accumulate(batches, step)

    def run_tower() -> None:
        for batch in batches:
            if batch.grids:
                task.model.image_features(task.model.patches(batch.pixels, batch.grids), batch.grids)

    task.training(True)
    step_seconds, tower_seconds = _seconds(learn, task.device), _seconds(run_tower, task.device)
    contents = {content for batch in host for content in batch.contents}
    return _Timed(step_seconds, tower_seconds, sum(sum(batch.times) for batch in host), contents)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    work()  # compiles, allocates
    _finished(device)
    began = time.perf_counter()
    work()
    _finished(device)
    return time.perf_counter() - began


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
