"""Where the images of a step come from: their files, decoded and resized, or a cache of what comes out of that."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sameday.cache.store import BadEntry, CacheFull, Store, free_bytes, reserved
from sameday.data.questions.images import BadImage, digest, open_rgb, stamp
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef
from sameday.data.times import Times
from sameday.hardware.phases import during
from sameday.spec.errors import BadInput
from sameday.spec.words import tell
from sameday.spec.writing import check_folder

PIXELS, FEATURES = "pixels", "features"
"""Names of the tensors in an entry."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An image on its way to the model. `tensor` holds its bytes, (height, width, 3), or where it is `ready` the frozen
    tower's output, (1 + DeepStack's, tokens, width)."""

    content: str
    tensor: Tensor
    ready: bool
    times: Times


ReadImage = Callable[[ImageRef], Picture]


class Source:
    """Images by name. What a cache lacks is made from the file and, where it can be written, kept there. Used by many
    processes at once, each with a copy of its own."""

    def __init__(self, processor: ImageProcessor, pixels: Store | None = None, features: Store | None = None) -> None:
        self.processor, self.pixels, self.features = processor, pixels, features
        self.told: set[str] = set()
        self.full = False

    def read_image(self, image: ImageRef) -> Picture:
        began = time.perf_counter()
        for store, ready in ((self.features, True), (self.pixels, False)):
            with during("read"):
                kept = None if store is None else self._kept(store, image.digest)
            if kept is not None:
                return Picture(image.digest, kept, ready, Times(read=time.perf_counter() - began))
        picture = decode(image, self.processor, check=self.pixels is not None or self.features is not None)
        if self.pixels is not None:
            self.keep(self.pixels, image.digest, {PIXELS: picture.tensor})
        return picture

    def once(self) -> ReadImage:
        """The same, each image once however often it is asked for: for one step."""
        known: dict[str, Picture] = {}

        def read_image(image: ImageRef) -> Picture:
            if image.digest in known:
                return replace(known[image.digest], times=Times())
            return known.setdefault(image.digest, self.read_image(image))

        return read_image

    def _kept(self, store: Store, content: str) -> Tensor | None:
        try:
            entry = store.read(content)
        except BadEntry as error:
            self._tell(f"cache: {error}; made again")
            return None
        return None if entry is None else next(iter(entry.values()))

    def keep(self, store: Store, content: str, tensors: dict[str, Tensor]) -> None:
        """Without room or rights, or on a bad disk, the run goes on, decodes, and tries no more."""
        if self.full:
            return
        try:
            free, reserve = free_bytes(store.folder), reserved(store.folder)
            if free < reserve + store.size_of(content, tensors):
                check_folder(store.root, "plan.cache_dir")  # where none can be, as in /proc, nothing is free either
                raise CacheFull(store.folder, reserve, free, " and are left for checkpoints")
            store.write(content, tensors)
        except (BadInput, OSError) as error:
            self.full = True
            self._tell(f"cache: {error}; the run goes on, and keeps no more images")

    def _tell(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            tell(text, sys.stderr)


def decode(image: ImageRef, processor: ImageProcessor, check: bool = False) -> Picture:
    """From its file. An image that is not the one that was audited stops the run; its bytes are compared where its
    file's stamp is another, or always with `check`."""
    began = time.perf_counter()
    try:
        with during("read"):
            now = stamp(image.path)
            file = io.BytesIO(image.path.read_bytes())
            read = time.perf_counter()
        with during("decode"):
            opened = open_rgb(file)
    except OSError as error:
        raise BadInput(f"{image.path}: was there when the data was checked, and now {error.strerror}") from None
    except BadImage as error:
        raise BadInput(f"{image.path}: was good when the data was checked, and now {error}") from None
    if opened.size != (image.width, image.height) or ((check or now != image.stamp) and digest(opened) != image.digest):
        raise BadInput(f"{image.path}: has changed since the data was checked")
    decoded = time.perf_counter()
    with during("resize"):
        tensor = torch.from_numpy(processor.resized(opened))
    times = Times(read - began, decoded - read, time.perf_counter() - decoded)
    return Picture(image.digest, tensor, False, times)
