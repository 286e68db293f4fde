"""Heads of the stages of a chain of thought: what each stage adds to the model's own logits, and the context that later
stages take from the questions of earlier ones.

c(q) is the last hidden state at the end of question q's prompt. For each image C1 and C2 are the means of c over its
questions of stage 1 and stage 2, zero where there are none. With h the last hidden state at a place of an answer:

    stage 1:  z = h                      logits = lm_head(z) + B1·A1·z
    stage 2:  z = h + P21·C1             logits = lm_head(z) + B2·A2·z
    stage 3:  z = h + P31·C1 + P32·C2    logits = lm_head(z) + B3·A3·z

P and B start at zero, so that training starts from the base model. With rank `full` a matrix W stands for B·A."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sameday.models.adapters import uniform
from sameday.models.flops import Flops
from sameday.spec.errors import BadInput
from sameday.spec.heads import STAGES
from sameday.spec.words import first_names

WEIGHTS, ABOUT = "heads.safetensors", "heads.json"
Rank = int | Literal["full"]


@dataclass(frozen=True, eq=False)
class Stages:
    """Of questions, in order: each one's stage, the number of its image, and by how much its state counts in its
    image's C1 and C2, (questions, 2). All of an image's questions are among them."""

    stage: Tensor
    image: Tensor
    share: Tensor
    images: int

    @classmethod
    def of(cls, stages: Sequence[int], images: Sequence[Hashable]) -> Stages:
        """`images` are keys: equal for questions about the same image."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(images))}
        counts = Counter(zip(stages, images, strict=True))
        share = [
            [1 / counts[stage, image] if stage == of else 0.0 for of in STAGES[:-1]]
            for stage, image in zip(stages, images, strict=True)
        ]
        where = [numbers[key] for key in images]
        return cls(torch.tensor(stages), torch.tensor(where), torch.tensor(share), len(numbers))

    def to(self, device: torch.device) -> Stages:
        return Stages(self.stage.to(device), self.image.to(device), self.share.to(device), self.images)


def shapes(width: int, vocabulary: int, rank: Rank) -> dict[str, tuple[int, int]]:
    """Every tensor of the heads by name: A.s and B.s, or W.s, of stage s; P.st from stage t into stage s."""
    of_stage: dict[str, tuple[int, int]] = {}
    for stage in STAGES:
        if rank == "full":
            of_stage[f"W.{stage}"] = (vocabulary, width)
        else:
            of_stage |= {f"A.{stage}": (rank, width), f"B.{stage}": (vocabulary, rank)}
    return of_stage | {f"P.{stage}{earlier}": (width, width) for stage in STAGES for earlier in range(1, stage)}


class StageHeads(nn.Module):
    """Float32 in every plan; matmuls are in the recipe's format, as those of adapters are."""

    def __init__(self, width: int, vocabulary: int, rank: Rank, seed: int, device: torch.device) -> None:
        super().__init__()
        self.width, self.vocabulary, self.rank = width, vocabulary, rank
        self.A, self.B, self.W, self.P = (nn.ParameterDict() for _ in range(4))
        for name, shape in shapes(width, vocabulary, rank).items():
            kind, which = name.split(".")
            start = torch.zeros(shape, device=device)
            if kind == "A":
                start.copy_(uniform(start, 1 / math.sqrt(width), seed, f"heads.{name}"))
            getattr(self, kind)[which] = nn.Parameter(start)

    def contexts(self, states: Tensor, of: Stages) -> tuple[Tensor, Tensor]:
        """C1 and C2 of every image, (images, width), of the states at the ends of the questions' prompts."""
        wide = torch.promote_types(states.dtype, torch.float32)
        first, second = (
            torch.zeros(of.images, self.width, dtype=wide, device=states.device).index_add(
                0, of.image, states.to(wide) * share[:, None].to(wide)
            )
            for share in of.share.unbind(1)
        )
        return first, second

    def shifts(self, states: Tensor, of: Stages) -> Tensor:
        """What is added to the hidden states of each question's answer, (questions, width)."""
        first, second = self.contexts(states, of)
        into_2 = F.linear(first, self.P["21"])
        into_3 = F.linear(first, self.P["31"]) + F.linear(second, self.P["32"])
        return torch.cat([torch.zeros_like(into_2), into_2, into_3])[(of.stage - 1) * of.images + of.image]

    def added(self, z: Tensor, stage: Tensor) -> Tensor:
        """What the heads add to the logits of each of these states, of which `stage` has the stage each; float32."""
        mine = stage[:, None] == torch.arange(1, len(STAGES) + 1, device=stage.device)
        if self.rank == "full":
            full = zip(self.W.values(), mine.unbind(1), strict=True)
            return sum(F.linear(z * own[:, None], weight).float() for weight, own in full)  # type: ignore[return-value]
        # One matmul for all stages: what A made for another stage than the state's own is zero before B.
        low = F.linear(z, torch.cat([*self.A.values()])).view(len(z), len(STAGES), -1) * mine[:, :, None]
        return F.linear(low.flatten(1), torch.cat([*self.B.values()], 1)).float()

    def flops(self, targets: int, images: int) -> tuple[Flops, Flops]:
        """Executed and needed, for so many targets and images: each matmul has one forward, and two backward for the
        gradients of its weights and of its input. Needed are the matmuls of a target's own stage alone."""
        each = self.width * self.vocabulary if self.rank == "full" else self.rank * (self.width + self.vocabulary)
        contexts = 3 * images * self.width**2
        executed, needed = (2 * (contexts + times * targets * each) for times in (len(STAGES), 1))
        return Flops(executed, 2 * executed), Flops(needed, 2 * needed)

    def save(self, folder: Path) -> None:
        save_file({name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}, folder / WEIGHTS)
        about = {"rank": self.rank, "stages": list(STAGES), "width": self.width, "vocabulary": self.vocabulary}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")

    def restore(self, folder: Path) -> None:
        """Take back what `save` wrote, to the bit."""
        wrong = list(problems(folder, self.width, self.vocabulary, self.rank))
        if wrong:
            raise BadInput(f"{folder}: " + "; ".join(wrong))
        self.load_state_dict(load_file(folder / WEIGHTS))


def has_heads(folder: Path) -> bool:
    """Whether heads lie there, or what is left of them."""
    return (folder / WEIGHTS).exists() or (folder / ABOUT).exists()


def problems(folder: Path, width: int, vocabulary: int, rank: Rank) -> Iterator[str]:
    """Why the heads that lie in a folder cannot be taken for heads of this form."""
    try:
        about: Any = json.loads((folder / ABOUT).read_text())
        there = about["rank"]
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        yield f"its heads cannot be read: {error}"
        return
    found, needed = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes(width, vocabulary, rank)
    if there != rank:
        yield f"heads.rank is {there} there, {rank} in the recipe"
    elif found != needed:
        odd = sorted(name for name in found.keys() | needed.keys() if found.get(name) != needed.get(name))
        yield f"{WEIGHTS} does not have the tensors of this recipe's heads: {first_names(odd)}"
    infinite = sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())
    if infinite:
        yield f"{WEIGHTS} has tensors that are not finite ({len(infinite)}): {first_names(infinite)}"
