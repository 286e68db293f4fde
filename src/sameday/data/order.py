"""Order is recipe: (seed, epoch) -> steps of samples, as a pure function. Nothing is streamed, so any step of any
epoch can be asked for without the ones before it."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from sameday.spec.order import Order


@dataclass(frozen=True)
class Place:
    """What the order may know of a sample."""

    id: int
    image: Hashable
    stage: int | None


def epoch_steps(places: Sequence[Place], order: Order, batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Positions in `places`, each exactly once, in steps of `batch`; the last step may be smaller."""
    everything = range(len(places))
    if order.kind == "by_image":
        images = _images(places, everything, order, seed, epoch)
        if order.max_per_image is not None:
            return _capped(images, batch, order.max_per_image)
        return _cut([i for image in images for i in image], batch)
    if order.kind == "shuffle":
        return _cut(_shuffled(places, everything, seed, epoch), batch)
    if order.kind == "curriculum":
        sequence: list[int] = []
        for stage in sorted({_stage(p) for p in places}):
            members = [i for i in everything if _stage(places[i]) == stage]
            if order.within_stage == "by_image":
                sequence += [i for image in _images(places, members, order, seed, epoch) for i in image]
            else:
                sequence += _shuffled(places, members, seed, epoch)
        return _cut(sequence, batch)
    return _cut(list(everything), batch)


def whole_image_steps(places: Sequence[Place], order: Order, batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Positions in `places`, each exactly once, in steps of whole images: a step takes images, in the recipe's order of
    images, until it has at least `batch` samples; the last step may be smaller."""
    steps: list[list[int]] = []
    for image in _images(places, range(len(places)), order, seed, epoch):
        if not steps or len(steps[-1]) >= batch:
            steps.append([])
        steps[-1] += image
    return steps


def epoch_size(count: int, weight: float) -> int:
    """How many questions of a set of so many an epoch sees."""
    return max(1, round(count * weight)) if count else 0


def mixed_epoch_steps(
    places: Sequence[Place],
    sets: Sequence[int],
    weights: Sequence[float],
    order: Order,
    batch: int,
    seed: int,
    epoch: int,
) -> list[list[int]]:
    """As `epoch_steps`, with each place as often as the weight of its set says. `sets[i]` is the set of place i. Where
    that is no whole number, an epoch takes a part of the set, image by image, and the next epoch goes on behind it:
    over epochs all places of a set are seen equally often, give or take one."""
    drawn: list[int] = []
    copies: list[Place] = []
    for number, weight in enumerate(weights):
        members = [i for i, part in enumerate(sets) if part == number]
        whole, rest = divmod(epoch_size(len(members), weight), max(1, len(members)))
        together = [i for image in _images(places, members, Order(kind="by_image"), seed, 0) for i in image]
        begin = epoch * rest
        some = sorted(together[(begin + n) % len(members)] for n in range(rest))
        for copy, each in enumerate([*[members] * whole, some]):
            drawn += each
            # A second time is a place of its own, so that it comes at another moment of the epoch.
            copies += [_again(places[i], copy) for i in each]
    steps = epoch_steps(copies, order, batch, seed, epoch)
    return [[drawn[i] for i in step] for step in steps]


def _again(place: Place, copy: int) -> Place:
    return place if copy == 0 else Place(place.id + (copy << 40), (place.image, copy), place.stage)


def permutation(count: int, *what: object) -> np.ndarray:
    """The numbers below `count` in an order that `what` decides, and nothing else: no generator's stream, whose
    versions differ. By splitmix64, which is one to one, so that no two numbers tie."""
    x = np.arange(count, dtype=np.uint64) ^ np.uint64(int.from_bytes(_key(*what), "little"))
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


def _key(*what: object) -> bytes:
    # A hash is stable over library versions and machines, which no generator's stream promises.
    return hashlib.blake2b("/".join(map(str, what)).encode(), digest_size=8).digest()


def _stage(place: Place) -> int:
    return place.stage if place.stage is not None else 0


def _shuffled(places: Sequence[Place], members: Iterable[int], seed: int, epoch: int) -> list[int]:
    return sorted(members, key=lambda i: (_key("sample", seed, epoch, places[i].id), i))


def _images(places: Sequence[Place], members: Iterable[int], order: Order, seed: int, epoch: int) -> list[list[int]]:
    """The questions of each image together; images at random, or where the order is `listed` as in the file."""
    groups: dict[Hashable, list[int]] = {}
    for i in members:
        groups.setdefault(places[i].image, []).append(i)
    if order.within_image == "stage":
        groups = {image: sorted(group, key=lambda i: _stage(places[i])) for image, group in groups.items()}
    if order.kind == "listed":
        return list(groups.values())
    # An image is known by its first question's id, not by its pixels: the same question file gives the same order.
    return sorted(groups.values(), key=lambda group: (_key("image", seed, epoch, places[group[0]].id), group[0]))


def _cut(sequence: list[int], batch: int) -> list[list[int]]:
    return [sequence[i : i + batch] for i in range(0, len(sequence), batch)]


def _capped(images: list[list[int]], batch: int, cap: int) -> list[list[int]]:
    """Steps in which an image has at most `cap` questions; its other questions come in the steps that follow. Images
    are taken in their order, as far as the cap can still be kept behind them; from there on those with the most
    questions left come first. Only where no order at all could keep the cap is a step filled above it."""
    steps = _in_order(images, batch, cap)
    image_of = {i: number for number, image in enumerate(images) for i in image}
    above = [sum(max(0, n - cap) for n in Counter(image_of[i] for i in step).values()) for step in steps]
    if not any(above):
        return steps

    def left(kept: int) -> list[list[int]]:
        done = {i for step in steps[:kept] for i in step}
        return [[i for i in image if i not in done] for image in images]

    def least(kept: int) -> int:
        return sum(above[:kept]) + _least_above([len(image) for image in left(kept)], batch, cap)

    # Keeping more of them never makes the rest easier.
    kept = bisect_right(range(len(steps) + 1), least(0), key=least) - 1
    return steps[:kept] + _fullest_first(left(kept), batch, cap)


def _in_order(images: list[list[int]], batch: int, cap: int) -> list[list[int]]:
    """Where the images that are left cannot fill a step under the cap, the step is filled above it."""
    waiting = [list(reversed(image)) for image in images]
    steps: list[list[int]] = []
    while waiting:
        step: list[int] = []
        for image in waiting:
            room = min(cap, batch - len(step))
            step += [image.pop() for _ in range(min(room, len(image)))]
            if len(step) == batch:
                break
        for image in waiting:
            step += [image.pop() for _ in range(min(batch - len(step), len(image)))]
        waiting = [image for image in waiting if image]
        steps.append(step)
    return steps


def _least_above(counts: Sequence[int], batch: int, cap: int) -> int:
    """How many questions stand above the cap in the best of all orders, by the flow from images into steps: in any
    number of steps an image has no more than the cap of each. All full steps, and all steps, are the tightest."""
    full, rest = divmod(sum(counts), batch)

    def within(steps: int) -> int:
        return sum(min(count, cap * steps) for count in counts)

    return max(full * batch - within(full), full * batch + rest - within(full + (rest > 0)))


def _fullest_first(images: list[list[int]], batch: int, cap: int) -> list[list[int]]:
    """Steps that leave the images' numbers of questions as even as they can, and so the cap kept where it can be."""
    waiting = [iter(image) for image in images]
    heap = [(-len(image), number) for number, image in enumerate(images) if image]
    heapify(heap)
    steps: list[list[int]] = []
    for size in [batch] * (sum(map(len, images)) // batch) + [sum(map(len, images)) % batch]:
        taken: Counter[int] = Counter()
        full: list[tuple[int, int]] = []
        for _ in range(size):
            if not heap:
                heap, full = sorted(full), []  # above the cap
            left, number = heappop(heap)
            taken[number] += 1
            if left + 1 < 0:
                if taken[number] == cap:
                    full.append((left + 1, number))
                else:
                    heappush(heap, (left + 1, number))
        for each in full:
            heappush(heap, each)
        steps.append([next(waiting[number]) for number in sorted(taken) for _ in range(taken[number])])
    return [step for step in steps if step]
