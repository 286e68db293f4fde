"""A base model that is read once for several trainings of one process. Each gets modules of its own, which it may
change as it likes, around the same weights, which nobody may change."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn


class KeptBase:
    """The last one that was read, as it was read. `spared` is how many seconds longer its last use would have taken if
    it had been read for it."""

    def __init__(self) -> None:
        self._name: Hashable = None
        self._base: Any = None
        self._seconds = self.spared = 0.0

    def __call__(self, name: Hashable, read: Callable[[], Any]) -> Any:
        """A model for one training. `name` is equal where the same would be read."""
        self.spared = self._seconds
        if self._base is None or self._name != name:
            self._base, self.spared = None, 0.0  # two need not fit beside each other
            began = time.perf_counter()
            self._base, self._name = read(), name
            self._seconds = time.perf_counter() - began
        return around_same_weights(self._base)

    @property
    def device_bytes(self) -> int:
        """Of its weights on a GPU."""
        tensors = () if self._base is None else (*self._base.parameters(), *self._base.buffers())
        return sum(each.nbytes for each in tensors if each.is_cuda)


def around_same_weights(model: nn.Module) -> Any:
    """A copy of all modules, whose frozen parameters are others in the same memory. Buffers are copied."""
    known = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in model.parameters()}
    return copy.deepcopy(model, known)
