"""Greedy answers. `generate` prefills prompts that share their images and answers all of them together, one token per
question and forward pass, which on a GPU is recorded as a graph; `generate_alone` is what it must equal: one question,
everything computed anew per token."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from sameday.data.questions.batch import Batch
from sameday.data.questions.prompts import Prompts
from sameday.hardware.graphs import recording, shared_memory
from sameday.kernels.decode import Answering
from sameday.models.vlm import VisionLanguageModel

Logits = Callable[[Tensor, Tensor], Tensor]
"""Of last hidden states (m, width) of the questions `rows` (m,): (m, vocabulary), float32."""
HeadOf = Callable[[Tensor], Logits]
"""For the last hidden states (n, width) at the ends of n prompts, how their answers are read out."""


class Interrupted(Exception):
    """Asked to stop before the answers were there."""


@torch.no_grad()
def generate(
    model: VisionLanguageModel,
    prompts: Prompts,
    head: HeadOf,
    ends: Collection[int],
    max_new_tokens: int,
    stop: Callable[[], bool] = lambda: False,
    eager: bool = True,
    record: bool = True,
) -> list[list[int]]:
    """The tokens of each answer, the one of `ends` that ended it included. Prompts go through compiled layers where the
    plan has them and not `eager`: graphs that write keys are others than those of training. Of the device the host asks
    once per token which questions have ended. They stay in the batch, unheard, until half of it has ended; on a GPU
    three quarters, because a smaller batch is recorded anew, unless it shall not `record`."""
    places = prompts.places
    keys = Answering(places, max_new_tokens, model.flash)
    finish = torch.tensor(sorted(ends), dtype=torch.long, device=model.device)
    tokens = torch.zeros(len(places.last), max_new_tokens, dtype=torch.long, device=model.device)
    ended = torch.zeros(len(places.last), dtype=torch.bool, device=model.device)
    rows, position = torch.arange(len(places.last), device=model.device), places.position
    lengths: dict[int, int] = {}
    live = list(range(len(places.last)))
    record = record and model.device.type == "cuda"
    recorded: RecordedStep | None = None
    with model.numeric_format():
        if stop():
            raise Interrupted
        states = model.hidden(prompts.batch, keys=keys, eager=eager)[places.last]
        logits = head(states)
        for step in range(max_new_tokens):
            if step:
                if stop():
                    raise Interrupted
                last = tokens[rows, step - 1]
                if record:
                    recorded = recorded or RecordedStep(model, position, keys)
                    states = recorded(last)
                else:
                    states = model.next_hidden(last, position, keys)
                    position = position + 1
            tokens[rows, step] = logits(states, rows).argmax(-1)
            ended |= (tokens[:, step, None] == finish).any(-1)
            for row, done in enumerate(ended.tolist()):
                if done:
                    lengths.setdefault(row, step + 1)
            left = [row for row in live if row not in lengths]
            if not left:
                break
            if (4 if record else 2) * len(left) <= len(live):
                kept = torch.tensor([live.index(row) for row in left], device=model.device)
                keys.keep(kept)
                position = (position if recorded is None else recorded.position)[kept]
                rows, live, recorded = rows[kept], left, None
    return [row[: lengths.get(n, max_new_tokens)] for n, row in enumerate(tokens.tolist())]


class RecordedStep:
    """The forward pass of one more token of each question as a CUDA graph: launching its thousands of kernels one by
    one takes the host longer than they run. What changes from token to token is changed in place, on the device.
    Recording takes as long as launching once."""

    def __init__(self, model: VisionLanguageModel, position: Tensor, keys: Answering) -> None:
        self.tokens, self.position = torch.zeros_like(position), position.clone()
        keys.hold()
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, shared_memory(torch.cuda.current_device())):
            self.states = model.next_hidden(self.tokens, self.position, keys)
            self.position += 1

    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.states


@torch.no_grad()
def generate_alone(
    model: VisionLanguageModel,
    batch_of: Callable[[list[int]], Batch],
    head: Logits,
    ends: Collection[int],
    max_new_tokens: int,
) -> list[int]:
    """`batch_of` makes the batch of one question whose prompt goes on with these tokens."""
    answer: list[int] = []
    with model.numeric_format():
        while len(answer) < max_new_tokens and not (answer and answer[-1] in ends):
            hidden = model.hidden(batch_of(answer).to(model.device))
            answer.append(int(head(hidden[-1:], torch.zeros(1, dtype=torch.long)).argmax()))
    return answer
