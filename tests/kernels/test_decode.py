"""One more token per question: over shared and own keys in two pieces, and as one plain attention over all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sameday.hardware.kernels import without_flash
from sameday.hardware.machine import detect_machine
from sameday.kernels.decode import Answering, LayerKeys, Places

HEADS, KEY_HEADS, WIDTH, NEW = 4, 2, 16, 3


class Rows:
    """A prefill's keys in one row in which everything stands somewhere, and who sees what of it."""

    def __init__(self, shared: list[int], questions: list[list[int]], dtype: torch.dtype, device: str = "cpu") -> None:
        """`shared[g]` tokens of group g, whose questions have `questions[g]` own ones."""
        self.generator = torch.Generator().manual_seed(sum(shared))
        own = [length for group in questions for length in group]
        total = sum(shared) + sum(own)
        shuffled = torch.randperm(total, generator=self.generator)
        pieces = list(shuffled.split([*shared, *own]))
        self.shared, self.own = pieces[: len(shared)], pieces[len(shared) :]
        self.group = [g for g, group in enumerate(questions) for _ in group]
        padded = torch.zeros(len(own), max(own), dtype=torch.long)
        for row, piece in zip(padded, self.own, strict=True):
            row[: len(piece)] = piece
        lengths = torch.tensor(shared)
        self.places = Places(
            shared=torch.cat(self.shared),
            shared_group=torch.arange(len(shared)).repeat_interleave(lengths),
            cu=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
            group=torch.tensor(self.group),
            own=padded,
            own_length=torch.tensor(own),
            last=torch.zeros(len(own), dtype=torch.long),
            position=torch.tensor([shared[g] + length for g, length in zip(self.group, own, strict=True)]),
            longest_shared=max(shared),
            shared_position=torch.cat([torch.arange(length) for length in shared]),
        ).to(torch.device(device))
        self.key, self.value = (self.drawn(1, KEY_HEADS, total).to(device, dtype) for _ in range(2))

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, WIDTH, generator=self.generator, dtype=torch.float64)


def plainly(
    rows: Rows, question: int, query: Tensor, more: list[tuple[Tensor, Tensor]], window: int | None = None
) -> Tensor:
    """(heads, width): softmax over all keys of the question, or the last ones, in float64."""
    places = torch.cat([rows.shared[rows.group[question]], rows.own[question]]).to(rows.key.device)
    seen = []
    for x, new in ((rows.key, [key for key, _ in more]), (rows.value, [value for _, value in more])):
        whole = torch.cat([x[0, :, places], *(each[question, :, :] for each in new)], 1)
        whole = whole if window is None else whole[:, -window:]
        seen.append(whole.double().repeat_interleave(HEADS // KEY_HEADS, 0))
    scores = query[question].double() @ seen[0].transpose(1, 2) * WIDTH**-0.5
    return (scores.softmax(-1) @ seen[1])[:, 0]


def decoded(
    rows: Rows,
    leave: set[int],
    dtype: torch.dtype,
    flash: bool,
    device: str = "cpu",
    window: int | None = None,
    hold: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of what came out and what should, of questions that are still there. Some `leave` after the first token;
    from the second on sizes `hold`."""
    answering = Answering(rows.places, NEW, flash)
    layer: LayerKeys = answering.layer(window)
    layer.record(rows.key, rows.value)
    live, more, pairs = list(range(len(rows.group))), list[tuple[Tensor, Tensor]](), []
    for step in range(NEW):
        if step == 1 and (kept := [row for row in live if row not in leave]):
            answering.keep(torch.tensor(kept, device=device))
            live = kept
        if step == 1 and hold:
            answering.hold()
        answering.advance()
        assert answering.longest == (answering.room if step and hold else rows.places.own.shape[1] + step + 1)
        query, key, value = (
            rows.drawn(len(rows.group), heads, 1).to(device, dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        more.append((key, value))
        out = layer.attend(query[live], key[live], value[live], WIDTH**-0.5)
        assert out.shape == (len(live), 1, HEADS, WIDTH) and out.dtype == dtype
        pairs += [(out[i, 0], plainly(rows, question, query, more, window)) for i, question in enumerate(live)]
    return pairs


groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)


@given(groups, st.sets(st.integers(0, 15)), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_two_pieces_are_one_attention(
    drawn: list[tuple[int, list[int]]], leave: set[int], flash: bool, hold: bool
) -> None:
    rows = Rows([length for length, _ in drawn], [own for _, own in drawn], torch.float64)
    for out, expected in decoded(rows, leave, torch.float64, flash, hold=hold):
        # What flash attention gives on a GPU, and plain PyTorch here, is taken as float32.
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-6 if flash else 1e-9)


@given(groups, st.sets(st.integers(0, 15)), st.integers(1, 12), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_with_a_window_only_the_last_keys_are_seen(
    drawn: list[tuple[int, list[int]]], leave: set[int], window: int, flash: bool, hold: bool
) -> None:
    """Whether they are shared or a question's own; also where no shared one is left."""
    rows = Rows([length for length, _ in drawn], [own for _, own in drawn], torch.float64)
    for out, expected in decoded(rows, leave, torch.float64, flash, window=window, hold=hold):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(
    not torch.cuda.is_available() or without_flash(detect_machine("cuda"), "bf16") is not None,
    reason="needs a GPU with flash attention",
)
def test_flash_attention_reads_shared_keys_on_a_gpu() -> None:
    rows = Rows([300, 7, 129], [[5, 0, 9], [3], [1, 40]], torch.bfloat16, "cuda")
    for out, expected in decoded(rows, {1, 4}, torch.bfloat16, True, "cuda"):
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
