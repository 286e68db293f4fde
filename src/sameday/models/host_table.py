"""A decoder's table of token embeddings in the host's memory: a GPU would hold all of its rows, and a micro-batch
needs those of its tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sameday.kernels.host_rows import host_rows
from sameday.spec.errors import BadInput


class HostTable(nn.Module):
    """In place of an `nn.Embedding` that is not trained. Its table is neither parameter nor buffer: it stays where it
    is when the model is moved."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = table

    def forward(self, tokens: Tensor) -> Tensor:
        return host_rows(self.weight, tokens)


def tables(model: nn.Module) -> dict[str, Tensor]:
    """By the names that they have as parameters where the device holds them."""
    return {f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, HostTable)}


def embeddings_to_host(text: nn.Module, head: nn.Module, device: torch.device) -> None:
    """In place. What the table holds is not changed."""
    embeddings = text.embed_tokens
    if type(embeddings) is not nn.Embedding or embeddings.weight is getattr(head, "weight", None):
        raise BadInput("plan.embeddings_on host: this model computes with its table of embeddings; allowed: device")
    table = embeddings.weight.detach()
    try:
        there = torch.empty(table.shape, dtype=table.dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise BadInput(
            f"plan.embeddings_on host: {table.nbytes / 2**30:.1f} GiB of page-locked memory cannot be had: {why}; "
            "allowed: device"
        ) from None
    text.embed_tokens = HostTable(there.copy_(table))
