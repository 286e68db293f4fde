"""Attention of questions that are answered token by token. What the questions of an image share is kept once: a new
token sees its group's shared keys and its question's own ones, two pieces merged by log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sameday.kernels.split import variable_length


@dataclass(frozen=True, eq=False)
class Places:
    """Where n prompts stand in the rows of a prefill, as flat places. A question that stands alone is a group with
    nothing of its own: all of its prompt is shared with nobody.

    shared: the groups' shared tokens, one group after the other, group g from cu[g] to cu[g + 1]; shared_group: whose
    each is. group (n,): of each question, in ascending order. own (n, longest): the question's own tokens, of which
    the first own_length[i] count. last (n,): where the prompt ends; position (n,): of the first token after it.
    shared_position: of each shared token along the first axis, for layers with a window."""

    shared: Tensor
    shared_group: Tensor
    cu: Tensor
    group: Tensor
    own: Tensor
    own_length: Tensor
    last: Tensor
    position: Tensor
    longest_shared: int
    shared_position: Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Places:
        return self._mapped(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Places:
        return self._mapped(lambda x: x.pin_memory())

    def _mapped(self, change: Any) -> Places:
        each = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(x) for name, x in each.items() if isinstance(x, Tensor)})


class Answering:
    """Which questions of a generation batch are still answered, and how many own keys each has. Shared by the layers;
    `longest` and `most` are known to the host, so that nothing waits for the device."""

    def __init__(self, places: Places, room: int, flash: bool) -> None:
        """With `room` for so many tokens of each answer. `flash`: there is flash attention for the keys' format."""
        self.places, self.room, self.flash = places, places.own.shape[1] + room, flash
        self.group, self.length = places.group, places.own_length.clone()
        self.first = places.position - places.own_length
        """Position of each question's first own token."""
        self.longest = places.own.shape[1]
        self.growing = True
        self.layers: list[LayerKeys] = []
        self._count(places.group)

    def layer(self, window: int | None = None) -> LayerKeys:
        """The next layer's keys, to be recorded in the prefill. With a window new tokens see only so many back."""
        self.layers.append(LayerKeys(self, window))
        return self.layers[-1]

    def keep(self, rows: Tensor) -> None:
        """The others have ended and leave the batch; what they shared stays."""
        self.group, self.length, self.first = self.group[rows], self.length[rows], self.first[rows]
        for layer in self.layers:
            layer.key, layer.value = layer.key[rows], layer.value[rows]
        self._count(self.group)

    def advance(self) -> None:
        """Before each forward pass of one token per question: there is one more own key. What all layers need to know
        of it is computed once."""
        self.at = (torch.arange(len(self.length), device=self.length.device), slice(None), self.length.clone())
        self.length += 1
        self.longest += self.growing
        self.unused = torch.arange(self.longest, device=self.length.device) >= self.length[:, None]
        self._hidden: dict[int | None, tuple[Tensor, Tensor]] = {None: (self.unused, self.others)}

    def hold(self) -> None:
        """From now on all room counts as own keys, most of it unused: every token takes tensors of the same sizes, at
        the same places, as a recorded forward pass needs them."""
        self.longest, self.growing = self.room, False

    def hidden(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Which own keys (questions, longest) and which shared ones (questions, tokens) a new token does not see."""
        if window not in self._hidden:
            assert window is not None and self.places.shared_position is not None
            place = self.length[:, None] - 1
            own = self.unused | (place - torch.arange(self.longest, device=place.device) >= window)
            far = self.first[:, None] + place - self.places.shared_position >= window
            self._hidden[window] = own, self.others | far
        return self._hidden[window]

    def _count(self, group: Tensor) -> None:
        counts = torch.bincount(group, minlength=len(self.places.cu) - 1)
        self.cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        self.most = int(counts.max())
        self.others = self.places.shared_group != group[:, None]


class LayerKeys:
    """Keys and values of one layer. Shared: (tokens, key heads, width). Own: (questions, key heads, room, width)."""

    def __init__(self, answering: Answering, window: int | None = None) -> None:
        self.answering, self.window = answering, window
        self.shared_key = self.shared_value = self.key = self.value = torch.empty(0)

    def record(self, key: Tensor, value: Tensor) -> None:
        """Of a prefill: (rows, key heads, length, width)."""
        self.shared_key, self.key = self._taken(key)
        self.shared_value, self.value = self._taken(value)

    def _taken(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places, room = self.answering.places, self.answering.room
        flat = x.transpose(1, 2).flatten(0, 1)
        questions, longest = places.own.shape
        own = x.new_zeros(questions, x.shape[1], room, x.shape[3])
        own[:, :, :longest] = flat[places.own].transpose(1, 2)
        return flat[places.shared], own

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(questions, heads, 1, width) in, (questions, 1, heads, width) out. The new keys are kept."""
        now = self.answering
        self.key[now.at], self.value[now.at] = key[:, :, 0], value[:, :, 0]
        unused, others = now.hidden(self.window)
        asked, keys = query[:, :, 0], (self.key[:, :, : now.longest], self.value[:, :, : now.longest])
        if now.flash and self.window is None:
            shared = flash_attention(asked, self.shared_key, self.shared_value, now, scale)
        else:
            shared = shared_attention(asked, self.shared_key, self.shared_value, others, scale)
        return merged(shared, own_attention(asked, *keys, unused, scale), query)


Piece = tuple[Tensor, Tensor]
"""Output (questions, heads, width) and log-sum-exp (questions, heads) over some of the keys, at least float32."""


def merged(a: Piece, b: Piece, query: Tensor) -> Tensor:
    (one, one_lse), (other, other_lse) = a, b
    both = torch.logaddexp(one_lse, other_lse)
    out = one * (one_lse - both).exp()[..., None] + other * (other_lse - both).exp()[..., None]
    return out.to(query.dtype)[:, None]


def own_attention(query: Tensor, key: Tensor, value: Tensor, unused: Tensor, scale: float) -> Piece:
    """Over a question's own keys: (questions, heads, width) × (questions, key heads, keys, width)."""
    with torch.autocast(query.device.type, enabled=False):  # it would take the scores to half precision
        scores = _product(query.unflatten(1, (key.shape[1], -1)), key.transpose(2, 3)) * scale
        scores = scores.masked_fill(unused[:, None, None], float("-inf"))
        return _product(scores.softmax(-1), value).flatten(1, 2), scores.logsumexp(-1).flatten(1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(..., n, k) × (..., k, m), not rounded to half precision: on a GPU half precision is multiplied as it is, where
    there are two batch axes."""
    if not (b.is_cuda and b.dtype in (torch.bfloat16, torch.float16)):
        return _wide(a) @ _wide(b)
    made = torch.bmm(a.to(b.dtype).flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return made.unflatten(0, a.shape[:2])


def flash_attention(query: Tensor, key: Tensor, value: Tensor, now: Answering, scale: float) -> Piece:
    """Over the shared keys of a question's group: (questions, heads, width) × (tokens, key heads, width). Each key is
    read once for all questions of its group."""
    out, lse = variable_length(
        query.contiguous(), key, value, now.cu, now.places.cu, now.most, now.places.longest_shared, False, scale
    )
    return out.float(), lse.T


def shared_attention(query: Tensor, key: Tensor, value: Tensor, others: Tensor, scale: float) -> Piece:
    """The same where there is no flash attention: `others` (questions, tokens) says which keys are not seen. Where that
    are all of them, because a window ends before, the log-sum-exp says that nothing is to be added."""
    with torch.autocast(query.device.type, enabled=False):
        asked = _wide(query).unflatten(1, (key.shape[1], -1)).transpose(0, 1)  # key heads, questions, sharing heads
        scores = asked.flatten(1, 2) @ _wide(key).permute(1, 2, 0) * scale
        scores = scores.unflatten(1, (len(query), -1))
        scores = scores.masked_fill(others[:, None], float("-inf"))
        weights = scores.softmax(-1).nan_to_num(0.0)
        out = (weights.flatten(1, 2) @ _wide(value).transpose(0, 1)).unflatten(1, (len(query), -1))
        return out.transpose(0, 1).flatten(1, 2), scores.logsumexp(-1).transpose(0, 1).flatten(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
