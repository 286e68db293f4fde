"""What a frozen vision tower made of images, kept in memory that training leaves free: an image that comes again is not
computed again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sameday.hardware.memory import free_memory, idle_in_graphs, out_of_memory, segments_grow
from sameday.spec.words import count, tell

LEFT = 0.25
"""The share of the memory that stays free: steps differ in what they take, and allocators lose some between tensors."""


def share_made(steps: Iterable[Collection[str]], most: int) -> float:
    """Of the images of these steps the share that has to be made, if the first `most` of them are kept."""
    kept, made, needed = set[str](), 0, 0
    for contents in steps:
        new = [each for each in contents if each not in kept]
        made, needed = made + len(new), needed + len(contents)
        kept.update(new[: most - len(kept)])
    return made / needed if needed else 0.0


def in_powers(numbers: Iterable[int], kind: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """Those of one kind together, in groups of 1, 2, 4, 8, …: what is compiled for a size of group serves again."""
    alike: dict[Hashable, list[int]] = {}
    for number in numbers:
        alike.setdefault(kind(number), []).append(number)
    for group in alike.values():
        while group:
            size = 1 << (len(group).bit_length() - 1)
            yield group[:size]
            group = group[size:]


class FeatureMemory(Container[str]):
    """Features of images by the name of their content, in the order in which they come, until there is no room for
    more. None is ever replaced: of images that come again in each epoch, the one that was seen last is needed last. It
    keeps some once it is open: before that it is not known what steps need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._pool: Any = None
        self._open = self._was_opened = False
        self._of_graphs = 0

    def __contains__(self, content: object) -> bool:
        return content in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def open(self) -> str | None:
        """What there is to say about it; None where it was opened before."""
        if self._was_opened:
            return None
        self._open = self._was_opened = True
        self._of_graphs = idle_in_graphs(self._device)  # recorded by now, in the warm-up
        room, left = (max(0, each) / 2**30 for each in self._room())
        free = f"{left:.1f} GiB more than needed so far stay free"
        return f"keep_features: up to {room:.1f} GiB for features of images; {free}"

    def of_all(self, contents: Sequence[str], make: Callable[[list[int]], Iterable[Tensor]]) -> Tensor:
        """(1 + DeepStack's, tokens, width) over these images. `make` computes those of them that are not kept, by their
        numbers."""
        missing = {content: number for number, content in reversed(list(enumerate(contents)))}
        each = {content: self._kept[content] for content in missing if content in self._kept}
        new = sorted(number for content, number in missing.items() if content not in each)
        for number, features in zip(new, make(new) if new else (), strict=True):
            each[contents[number]] = self._made(contents[number], features)
        return torch.cat([each[content] for content in contents], 1)

    def most(self) -> int:
        """How many images it will keep, by those that it has: other images may be larger or smaller."""
        if not self._open or not self._kept:
            return len(self._kept)
        each = sum(features.nbytes for features in self._kept.values()) / len(self._kept)
        return len(self._kept) + max(0, int(self._room()[0] / each))

    def let_go(self) -> str | None:
        """Of all features, and keep no more. What that was, if there was any."""
        if not self._kept:
            return None
        words = self._words()
        self._kept, self._pool, self._open = {}, None, False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return words

    def _made(self, content: str, features: Tensor) -> Tensor:
        if self._open:
            self._keep(content, features)
        return features

    def _keep(self, content: str, features: Tensor) -> None:
        """A copy of them, if there is room."""
        try:
            if features.nbytes <= self._room()[0]:
                with self._aside():
                    self._kept[content] = features.detach().clone(memory_format=torch.contiguous_format)
                return
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        self._open = False
        tell(f"keep_features: there is room for {self._words()}; others are computed when they come", sys.stderr)

    def _room(self) -> tuple[int, int]:
        """Bytes that features may still take, and that are left free."""
        free, total = free_memory(self._device)
        left = round(LEFT * total)
        return free - self._of_graphs - left, left

    def _words(self) -> str:
        taken = sum(features.nbytes for features in self._kept.values())
        return f"features of {count(len(self._kept), 'image')} ({taken / 2**30:.1f} GiB)"

    def _aside(self) -> AbstractContextManager[None]:
        """Apart from what steps take and give back: a tensor that stays would cut their memory into pieces."""
        if self._device.type != "cuda" or segments_grow():  # with which not every torch has pools
            return nullcontext()
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pool, self._device.index)
