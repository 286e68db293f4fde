"""Which micro-batches are bound by the launches of their kernels: those whose kernels are expected to end before the
host has launched them. A pure function of what is known before a run, so that a run that goes on comes to the same."""

from __future__ import annotations

from typing import Any

from sameday.hardware.known import REACHED, peak_of

HOST_SECONDS = 0.008
"""That the host may take for each decoder layer, to launch the forward and the backward pass of a micro-batch, whatever
its tokens, where it has to prepare others meanwhile: `bench/real.py` on an H200's machine, 36 compiled layers, 0.29 to
0.37 s for a step whose kernels take 0.27. By itself it took 0.16 to 0.24 (`bench/recorded.py`)."""
SHARE = 0.48
"""Of the rate of large matmuls: what those of the decoder's layers reach over the time of all kernels, tower, attention
and the rest included. By the same run: 0.050 s of matmuls in 0.104, and 0.131 in 0.27."""


def layer_flop(text: Any, train: str) -> int:
    """Of a token in the linear layers of a decoder layer, forward and backward. Frozen weights have no gradient."""
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = 2 * (text.num_attention_heads + text.num_key_value_heads) * width
    weights = text.hidden_size * (3 * text.intermediate_size + attention)
    return int(2 * (2 if train == "lora" else 3) * weights)


def most_recorded(text: Any, train: str, gpu: str) -> int | None:
    """Tokens up to which a micro-batch is worth recording on a GPU of this name, None where its rate is not known. The
    number of layers does not matter, since both times go with it; nor does full checkpointing, which launches and
    computes half as much again."""
    peak = peak_of(gpu)
    return None if peak is None else int(HOST_SECONDS * SHARE * REACHED * peak / layer_flop(text, train))
