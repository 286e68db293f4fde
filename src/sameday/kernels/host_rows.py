"""Rows of a table in the host's memory, read by the GPU that needs them: it takes no memory there but for these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sameday.kernels.bdh import interpreted
from sameday.kernels.grid import on_grid

WIDEST = 4096
"""Numbers of a row that a program copies at most."""
BITS: dict[int, Any] = {2: torch.int16, 4: torch.int32}
"""By the bytes of a number: rows are copied, whatever their bits mean."""


def host_rows(table: Tensor, at: Tensor) -> Tensor:
    """The rows `at` of a table (rows, width): (*at.shape, width), on the device of `at`. For a GPU the table lies in
    page-locked memory."""
    if not (at.is_cuda or interpreted()):
        return table[at]
    from sameday.kernels.host_rows_triton import copy_rows

    count, (rows, width) = at.numel(), table.shape
    found = torch.empty((*at.shape, width), dtype=table.dtype, device=at.device)
    block = min(WIDEST, 1 << (width - 1).bit_length())
    bits = BITS[table.element_size()]
    on_grid(copy_rows, count, -(-width // block))(
        table.view(bits), at.contiguous(), found.view(bits), rows, WIDTH=width, BLOCK=block, num_warps=4
    )
    return found
