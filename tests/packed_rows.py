"""Packed rows of any make: prefixes, forks, questions alone and branches, with who sees whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from sameday.kernels.split import Dense, Segments

BRANCHES = st.lists(st.integers(1, 7), min_size=1, max_size=4)
FORKS = st.lists(st.tuples(st.integers(1, 6), BRANCHES), min_size=1, max_size=3)
GROUPS = st.lists(st.tuples(st.integers(1, 9), BRANCHES | FORKS), max_size=4)
"""Each a prefix with its branches, or with forks that have theirs."""
ALONE = st.lists(st.integers(1, 8), max_size=3)


def cumulative(counts: list[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def row(groups: list[Any], alone: list[int]) -> tuple[Segments, tuple[Tensor, Tensor, Tensor]]:
    """A packed row: prefixes, forks, questions alone, branches, those of groups with forks last; and each token's
    group, branch and fork."""
    plain = [(prefix, below) for prefix, below in groups if isinstance(below[0], int)]
    forked = [(prefix, below) for prefix, below in groups if not isinstance(below[0], int)]
    groups = plain + forked
    prefixes = [(g, 0, 0, prefix) for g, (prefix, _) in enumerate(groups)]
    forks = [(g, 0, f + 1, n) for g, (_, below) in enumerate(forked, len(plain)) for f, (n, _) in enumerate(below)]
    single = [(len(groups) + i, 1, 0, count) for i, count in enumerate(alone)]
    branches = [(g, b + 1, 0, n) for g, (_, below) in enumerate(plain) for b, n in enumerate(below)]
    for g, (_, below) in enumerate(forked, len(plain)):
        lengths = [(f + 1, n) for f, (_, own) in enumerate(below) for n in own]
        branches += [(g, b + 1, f, n) for b, (f, n) in enumerate(lengths)]
    pieces = [*prefixes, *forks, *single, *branches]

    def of(kind: list[Any], from_group: int = 0) -> tuple[int, list[Any]]:
        chosen = [piece for piece in kind if piece[0] >= from_group]
        return (sum(n for *_, n in pieces[: pieces.index(chosen[0])]) if chosen else 0), chosen

    def dense(queries: tuple[int, list[Any]], keys: tuple[int, list[Any]], level: int) -> Dense:
        same = [[n for g, _, f, n in queries[1] if (g, f)[:level] == (key[0], key[2])[:level]] for key in keys[1]]
        return Dense(queries[0], keys[0], cumulative([sum(each) for each in same]), cumulative([k[3] for k in keys[1]]))

    calls = [
        dense(of(branches), of(prefixes), 1),
        dense(of(forks), of(prefixes, len(plain)), 1),
        dense(of(branches, len(plain)), of(forks), 2),
    ]
    levels = (torch.tensor([piece[i] for piece in pieces for _ in range(piece[3])])[None] for i in range(3))
    group, branch, fork = levels
    return Segments.of(cumulative([n for *_, n in pieces]), calls), (group, branch, fork)
