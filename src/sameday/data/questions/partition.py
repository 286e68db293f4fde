"""Partition is plan: (a step's samples, plan) -> each rank's micro-batches, as a pure function. However a step is
cut, every sample is in it exactly once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """What the partition may know of a sample: how long it is, and which prefix it could share."""

    index: int
    length: int
    prefix: int = 0
    key: Hashable | None = None


@dataclass(frozen=True)
class Unit:
    """Samples that stand in one row under one shared prefix; often just one."""

    members: tuple[int, ...]
    tokens: int


MicroBatch = tuple[Unit, ...]


@dataclass(frozen=True)
class Cut:
    """The plan fields that decide the partition."""

    share: bool
    packing: bool
    token_budget: int
    max_questions: int | None = None
    pad_to_multiple: int = 1


def units(items: Sequence[Item], cut: Cut) -> list[Unit]:
    """Samples of equal prefix together, in order of appearance. A group above the budget is split, its prefix
    repeated in each part."""
    if not cut.share:
        return [Unit((item.index,), item.length) for item in items]
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        own = item.key is None or item.prefix == 0
        groups.setdefault(("alone", item.index) if own else ("shared", item.key), []).append(item)
    most = cut.max_questions or len(items)
    result: list[Unit] = []
    for group in groups.values():
        members: list[int] = []
        tokens = 0
        for item in group:
            branch = item.length - item.prefix
            if members and (tokens + branch > cut.token_budget or len(members) == most):
                result.append(Unit(tuple(members), tokens))
                members, tokens = [], 0
            tokens += branch if members else item.length
            members.append(item.index)
        result.append(Unit(tuple(members), tokens))
    return result


def micro_batches(items: Sequence[Item], cut: Cut, ranks: int = 1) -> list[list[MicroBatch]]:
    """One list of micro-batches per rank. Ranks get about the same number of tokens; one may get none."""
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    pool = units(items, cut)
    # The longest first onto the emptiest rank; within a rank the step's own order is kept.
    for unit in sorted(pool, key=lambda u: -u.tokens) if ranks > 1 else pool:
        rank = load.index(min(load))
        shares[rank].append(unit)
        load[rank] += unit.tokens
    position = {unit.members[0]: i for i, unit in enumerate(pool)}
    return [_fill(sorted(share, key=lambda u: position[u.members[0]]), cut) for share in shares]


def size(batch: MicroBatch, packing: bool, multiple: int = 1) -> int:
    """Tokens that a micro-batch computes, padding counted."""
    row = sum(unit.tokens for unit in batch) if packing else max(unit.tokens for unit in batch)
    return (1 if packing else len(batch)) * -(-row // multiple) * multiple


def _fill(pool: Sequence[Unit], cut: Cut) -> list[MicroBatch]:
    result: list[MicroBatch] = []
    current: MicroBatch = ()
    for unit in pool:
        longer = (*current, unit)
        questions = sum(len(u.members) for u in longer)
        if current and (
            size(longer, cut.packing, cut.pad_to_multiple) > cut.token_budget
            or (cut.max_questions is not None and questions > cut.max_questions)
        ):
            result.append(current)
            longer = (unit,)
        current = longer
    return [*result, current] if current else result
