"""Partition is plan: (a step's samples, plan) -> each rank's micro-batches, as a pure function. However a step is
cut, every sample is in it exactly once."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from sameday.data.questions.tree import Text, agreements, grow


@dataclass(frozen=True)
class Item:
    """What the partition may know of a sample: how long it is, which prefix it could share, and which text behind it
    as far as others agree."""

    index: int
    length: int
    prefix: int = 0
    key: Hashable | None = None
    text: Text = ()


@dataclass(frozen=True)
class Unit:
    """Samples that stand in one row under one shared prefix, often just one; `tokens` counts what is shared once."""

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
    """Samples of equal prefix together, those of equal texts beside each other, else in order of appearance. A group
    above the budget is split, what is shared repeated in each part."""
    if not cut.share:
        return [Unit((item.index,), item.length) for item in items]
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        own = item.key is None or item.prefix == 0
        groups.setdefault(("alone", item.index) if own else ("shared", item.key), []).append(item)
    most = cut.max_questions or len(items)
    result: list[Unit] = []
    for group in groups.values():
        group.sort(key=lambda item: item.text)
        tokens, first = _counted(group), 0
        while first < len(group):
            count = _fitting(partial(tokens, first), min(most, len(group) - first), cut.token_budget)
            result.append(Unit(tuple(item.index for item in group[first : first + count]), tokens(first, count)))
            first += count
    return result


def _counted(group: Sequence[Item]) -> Callable[[int, int], int]:
    """How many tokens so many samples of a group have from one on, what they share counted once."""
    prefix = group[0].prefix
    own = list(accumulate((item.length - prefix for item in group), initial=0))
    agree = agreements([item.text for item in group])
    return lambda first, n: prefix + own[first + n] - own[first] - grow(agree[first : first + n - 1]).saved


def _fitting(tokens: Callable[[int], int], most: int, budget: int) -> int:
    """How many samples there is room for, at least one. Groups may be large, and units small."""
    bound = 1
    while bound < most and tokens(bound) <= budget:
        bound = min(2 * bound, most)
    return max(1, bisect_right(range(1, bound + 1), budget, key=tokens))


def micro_batches(items: Sequence[Item], cut: Cut, ranks: int = 1) -> list[list[MicroBatch]]:
    """One list of micro-batches per rank. Ranks get about the same number of tokens, and with at least as many samples
    as ranks each gets some: where that evens them out, units are split further, their prefix repeated."""
    pool = units(items, cut)
    shares = [pool] if ranks == 1 else _shares(pool, {item.index: item for item in items}, ranks)
    return [_fill(share, cut) for share in shares]


def whole_micro_batches(bundles: Sequence[Sequence[Item]], cut: Cut, ranks: int = 1) -> list[list[MicroBatch]]:
    """The same where a bundle's samples must stand in one micro-batch: however small the budget or the number of
    questions, a bundle is never split, and a larger one runs alone."""
    unbounded = replace(cut, token_budget=sys.maxsize, max_questions=None)
    pool = [tuple(units(bundle, unbounded)) for bundle in bundles]
    if ranks == 1:
        return [_fill_whole(pool, cut)]
    whole = [Unit((number,), sum(unit.tokens for unit in bundle)) for number, bundle in enumerate(pool)]
    shares = [sorted(unit.members[0] for unit in share) for share in _spread(whole, ranks)]
    return [_fill_whole([pool[number] for number in share], cut) for share in shares]


def image_batches(items: Sequence[Item], images: Sequence[Hashable], cut: Cut, whole: bool) -> list[MicroBatch]:
    """Micro-batches in which all samples of one image stand together; `images[i]` is the one of the item of index i. An
    image that alone is above the budget is split, unless it must stay `whole`."""
    of_image: dict[Hashable, list[Item]] = {}
    for item in items:
        of_image.setdefault(images[item.index], []).append(item)
    if whole:
        return whole_micro_batches(list(of_image.values()), cut)[0]
    pieces: list[MicroBatch] = []
    for group in of_image.values():
        pool = tuple(units(group, cut))
        pieces += [pool] if size(pool, cut.packing, cut.pad_to_multiple) <= cut.token_budget else _fill(pool, cut)
    return _fill_whole(pieces, cut)


def _shares(pool: Sequence[Unit], items: Mapping[int, Item], ranks: int) -> list[list[Unit]]:
    """The units of each rank, in the step's order."""
    spread = _spread(pool, ranks)
    while (better := _split_further(spread, items)) is not None:
        spread = better
    rank_of = {index: rank for rank, share in enumerate(spread) for unit in share for index in unit.members}
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    for unit in pool:
        # Pieces of a unit that came to one rank after all are one unit there.
        pieces: dict[int, list[int]] = {}
        for index in unit.members:
            pieces.setdefault(rank_of[index], []).append(index)
        for rank, members in pieces.items():
            shares[rank].append(_unit(members, items))
    return shares


def _spread(pool: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """The longest first onto the emptiest rank."""
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for unit in sorted(pool, key=lambda u: -u.tokens):
        load, rank = loads[0]
        shares[rank].append(unit)
        heapq.heapreplace(loads, (load + unit.tokens, rank))
    return shares


def _loads(shares: Sequence[Sequence[Unit]]) -> list[int]:
    """The fullest rank first: a step lasts as long as that one."""
    return sorted((sum(unit.tokens for unit in share) for share in shares), reverse=True)


def _split_further(shares: Sequence[Sequence[Unit]], items: Mapping[int, Item]) -> list[list[Unit]] | None:
    """One unit split where that makes the loads better, compared from the fullest rank on; else None. Where a rank is
    idle each other has one unit, and halves of any of them are better: even where they share less than the whole."""
    ranks, loads, pool = len(shares), _loads(shares), [unit for share in shares for unit in share]
    fullest = max(shares, key=lambda share: sum(unit.tokens for unit in share))
    for unit in sorted(fullest if loads[-1] else pool, key=lambda u: -u.tokens):
        if len(unit.members) == 1:
            continue
        halves = _halves(unit, items)
        added = sum(half.tokens for half in halves) - unit.tokens
        if loads[-1] and sum(loads) + added > ranks * loads[0]:
            continue  # some rank would have more than the fullest has now
        spread = _spread([*(u for u in pool if u is not unit), *halves], ranks)
        if _loads(spread) < loads or not loads[-1]:
            return spread
    return None


def _halves(unit: Unit, items: Mapping[int, Item]) -> tuple[Unit, Unit]:
    """Two units of the same prefix, as equal in tokens as the order of the questions allows."""
    branches = list(accumulate(items[index].length - items[index].prefix for index in unit.members))
    at = min(range(1, len(unit.members)), key=lambda at: max(branches[at - 1], branches[-1] - branches[at - 1]))
    return _unit(unit.members[:at], items), _unit(unit.members[at:], items)


def _unit(members: Sequence[int], items: Mapping[int, Item]) -> Unit:
    return Unit(tuple(members), _counted([items[index] for index in members])(0, len(members)))


def halve(part: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
    """Of its units, or of the questions of a single one; None for a single question."""
    if len(part) > 1:
        return part[: len(part) // 2], part[len(part) // 2 :]
    (unit,) = part
    middle = len(unit.members) // 2
    if not middle:
        return None
    return (replace(unit, members=unit.members[:middle]),), (replace(unit, members=unit.members[middle:]),)


def size(batch: MicroBatch, packing: bool, multiple: int = 1) -> int:
    """Tokens that a micro-batch computes, padding counted."""
    row = sum(unit.tokens for unit in batch) if packing else max(unit.tokens for unit in batch)
    return (1 if packing else len(batch)) * -(-row // multiple) * multiple


def _fill(pool: Sequence[Unit], cut: Cut) -> list[MicroBatch]:
    return _fill_whole([(unit,) for unit in pool], cut)


def _fill_whole(pieces: Sequence[MicroBatch], cut: Cut) -> list[MicroBatch]:
    """Of pieces that are not split: single units, or all units of a bundle."""
    result: list[MicroBatch] = []
    current: MicroBatch = ()
    for piece in pieces:
        longer = (*current, *piece)
        questions = sum(len(u.members) for u in longer)
        if current and (
            size(longer, cut.packing, cut.pad_to_multiple) > cut.token_budget
            or (cut.max_questions is not None and questions > cut.max_questions)
        ):
            result.append(current)
            longer = piece
        current = longer
    return [*result, current] if current else result
