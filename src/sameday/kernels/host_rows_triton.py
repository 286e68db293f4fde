"""The kernel of `host_rows`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_rows(table, at, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A row that the table does not have comes out as all ones in every bit, which is no number in any format: a loss
    that is not finite ends the run."""
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(at + number).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = columns < WIDTH
    there = (row >= 0) & (row < rows)
    values = tl.load(table + row * WIDTH + columns, mask=ok & there, other=-1)
    tl.store(out + number * WIDTH + columns, values, mask=ok)
