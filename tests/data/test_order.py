"""Order is a pure function of (seed, epoch) that shows each sample once per epoch, whatever its kind."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.data.order import Place, _capped, epoch_steps, whole_image_steps
from sameday.spec.order import Order

KINDS: list[dict[str, Any]] = [
    {"kind": "shuffle"},
    {"kind": "listed"},
    {"kind": "by_image"},
    {"kind": "by_image", "within_image": "stage"},
    {"kind": "by_image", "max_per_image": 2},
    {"kind": "by_image", "max_per_image": 3, "within_image": "stage"},
    {"kind": "curriculum"},
    {"kind": "curriculum", "within_stage": "by_image"},
]
RANDOM = [kind for kind in KINDS if kind["kind"] != "listed"]
seeds = st.integers(0, 2**31)
epochs = st.integers(0, 50)


@st.composite
def questions(draw: st.DrawFn, most: int = 40) -> list[Place]:
    """Ids with gaps, as bad lines leave them; images of one and of many questions; stages or none."""
    count = draw(st.integers(1, most))
    ids = sorted(draw(st.sets(st.integers(1, 500), min_size=count, max_size=count)))
    images = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    stages = draw(st.lists(st.none() | st.integers(0, 3), min_size=count, max_size=count))
    return [Place(id, f"image {image}", stage) for id, image, stage in zip(ids, images, stages, strict=True)]


def name(kind: dict[str, Any]) -> str:
    return "-".join(map(str, kind.values()))


def stage(place: Place) -> int:
    return place.stage or 0


def flat(steps: list[list[int]]) -> list[int]:
    return [i for step in steps for i in step]


def appearances(places: list[Place], sequence: list[int]) -> list[object]:
    """The image of each run of questions about one image."""
    return [image for image, _ in groupby(places[i].image for i in sequence)]


@pytest.mark.parametrize("kind", KINDS, ids=name)
@given(places=questions(), batch=st.integers(1, 20), seed=seeds, epoch=epochs)
def test_each_sample_once_in_full_steps(
    kind: dict[str, Any], places: list[Place], batch: int, seed: int, epoch: int
) -> None:
    steps = epoch_steps(places, Order(**kind), batch, seed, epoch)
    assert sorted(flat(steps)) == list(range(len(places)))
    assert len(steps) == -(-len(places) // batch)
    assert all(len(step) == batch for step in steps[:-1])


@pytest.mark.parametrize("kind", KINDS, ids=name)
@given(places=questions(), batch=st.integers(1, 20), seed=seeds, epoch=epochs)
def test_the_same_arguments_give_the_same_steps(
    kind: dict[str, Any], places: list[Place], batch: int, seed: int, epoch: int
) -> None:
    before = list(places)
    first = epoch_steps(places, Order(**kind), batch, seed, epoch)
    other = epoch_steps(places, Order(**kind), batch, seed + 1, epoch + 1)  # nothing carries over to the next call
    assert sorted(flat(other)) == sorted(flat(first))
    assert epoch_steps(list(places), Order(**kind), batch, seed, epoch) == first
    assert places == before


@pytest.mark.parametrize("kind", RANDOM, ids=name)
@given(seed=seeds, epoch=epochs, other=st.integers(1, 1000))
def test_seeds_and_epochs_differ(kind: dict[str, Any], seed: int, epoch: int, other: int) -> None:
    places = [Place(i, i // 3, i % 4) for i in range(120)]
    here = epoch_steps(places, Order(**kind), 16, seed, epoch)
    assert epoch_steps(places, Order(**kind), 16, seed + other, epoch) != here
    assert epoch_steps(places, Order(**kind), 16, seed, epoch + other) != here


def test_shuffle_moves_every_sample_about_evenly() -> None:
    """Over many epochs each sample stands in each quarter of the epoch about as often."""
    places = [Place(i, i, None) for i in range(40)]
    seen = Counter()
    rounds = 400
    for epoch in range(rounds):
        for at, i in enumerate(flat(epoch_steps(places, Order(), 8, 0, epoch))):
            seen[i, at // 10] += 1
    expected = rounds / 4
    # Six standard deviations of a binomial with p = 1/4.
    assert max(abs(seen[i, q] - expected) for i in range(40) for q in range(4)) < 6 * (expected * 0.75) ** 0.5


@given(places=questions(), batch=st.integers(1, 20))
def test_listed_is_the_files_own_order(places: list[Place], batch: int) -> None:
    assert flat(epoch_steps(places, Order(kind="listed"), batch, 5, 7)) == list(range(len(places)))


@pytest.mark.parametrize("within", ["listed", "stage"])
@given(places=questions(), batch=st.integers(1, 20), seed=seeds, epoch=epochs)
def test_by_image_keeps_an_images_questions_together(
    within: Any, places: list[Place], batch: int, seed: int, epoch: int
) -> None:
    sequence = flat(epoch_steps(places, Order(kind="by_image", within_image=within), batch, seed, epoch))
    runs = appearances(places, sequence)
    assert len(runs) == len(set(runs))
    for a, b in pairwise(sequence):
        if places[a].image == places[b].image:
            first, second = (stage(places[a]), a), (stage(places[b]), b)
            assert first < second if within == "stage" else a < b


@pytest.mark.parametrize("within", ["listed", "stage"])
@given(places=questions(), batch=st.integers(1, 20), cap=st.integers(1, 6), seed=seeds, epoch=epochs)
def test_max_per_image_is_passed_only_where_no_other_image_is_left(
    within: Any, places: list[Place], batch: int, cap: int, seed: int, epoch: int
) -> None:
    order = Order(kind="by_image", within_image=within, max_per_image=cap)
    left = Counter(place.image for place in places)
    shown: dict[object, list[int]] = {}
    for step in epoch_steps(places, order, batch, seed, epoch):
        here = Counter(places[i].image for i in step)
        if max(here.values()) > cap:
            assert all(here[image] >= min(cap, count) for image, count in left.items())
        left = +(left - here)
        for i in step:
            shown.setdefault(places[i].image, []).append(i)
    # However an image's questions are spread over steps, they come in their own order.
    for group in shown.values():
        assert group == sorted(group, key=lambda i: (stage(places[i]), i) if within == "stage" else i)


def taken_in_order(images: list[list[int]], batch: int, cap: int) -> list[list[int]]:
    """Images in their order, each up to the cap; a step that is not full then is filled above it."""
    left, steps = [list(image) for image in images], []
    while any(left):
        step: list[int] = []
        for most in (cap, batch):
            for image in left:
                take = min(most, batch - len(step), len(image))
                step += image[:take]
                del image[:take]
        steps.append(step)
    return steps


def above(steps: list[list[int]], image_of: dict[int, int], cap: int) -> int:
    return sum(max(0, n - cap) for step in steps for n in Counter(image_of[i] for i in step).values())


def fewest_above(counts: list[int], batch: int, cap: int) -> int:
    """By the largest flow from images into steps: what does not flow stands above the cap."""
    sizes = [batch] * (sum(counts) // batch) + [sum(counts) % batch]
    graph = nx.DiGraph()
    for number, count in enumerate(counts):
        graph.add_edge("all", ("image", number), capacity=count)
        for step in range(len(sizes)):
            graph.add_edge(("image", number), ("step", step), capacity=cap)
    for step, size in enumerate(sizes):
        graph.add_edge(("step", step), "end", capacity=size)
    return sum(counts) - int(nx.maximum_flow_value(graph, "all", "end"))


@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=9), batch=st.integers(1, 9), cap=st.integers(1, 5))
def test_a_cap_is_kept_where_any_order_keeps_it(counts: list[int], batch: int, cap: int) -> None:
    """Steps in which it is kept are as they were before other orders were tried."""
    starts = [sum(counts[:n]) for n in range(len(counts))]
    images = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    image_of = {i: number for number, image in enumerate(images) for i in image}
    plain, steps = taken_in_order(images, batch, cap), _capped(images, batch, cap)
    assert sorted(flat(steps)) == flat(images) and [len(step) for step in steps] == [len(step) for step in plain]
    assert above(steps, image_of, cap) == fewest_above(counts, batch, cap)
    if above(plain, image_of, cap) == above(steps, image_of, cap):
        assert steps == plain
        return
    # Where they part, one step more in the images' order would have cost something.
    kept = 1 + next(n for n, (one, other) in enumerate(zip(steps, plain, strict=True)) if one != other)
    done = Counter(image_of[i] for step in plain[:kept] for i in step)
    left = [count - done[number] for number, count in enumerate(counts)]
    assert above(plain[:kept], image_of, cap) + fewest_above(left, batch, cap) > above(steps, image_of, cap)


def test_an_image_of_many_questions_does_not_wait_for_the_end() -> None:
    """Three images of one question come first, and one of six last: alone it would fill steps above the cap."""
    images = [[0], [1], [2], [3, 4, 5, 6, 7, 8]]
    assert taken_in_order(images, 3, 2) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert _capped(images, 3, 2) == [[0, 3, 4], [1, 5, 6], [2, 7, 8]]


def test_a_cap_brings_more_images_into_a_step() -> None:
    places = [Place(i, i // 8, None) for i in range(64)]
    steps = epoch_steps(places, Order(kind="by_image", max_per_image=2), 8, 0, 0)
    assert [len({places[i].image for i in step}) for step in steps[:4]] == [4] * 4


@pytest.mark.parametrize("within", ["shuffle", "by_image"])
@given(places=questions(), batch=st.integers(1, 20), seed=seeds, epoch=epochs)
def test_curriculum_goes_up_through_the_stages(
    within: Any, places: list[Place], batch: int, seed: int, epoch: int
) -> None:
    sequence = flat(epoch_steps(places, Order(kind="curriculum", within_stage=within), batch, seed, epoch))
    stages = [stage(places[i]) for i in sequence]
    assert stages == sorted(stages)
    if within == "by_image":
        for one in set(stages):
            runs = appearances(places, [i for i in sequence if stage(places[i]) == one])
            assert len(runs) == len(set(runs))


# Steps of whole images


@pytest.mark.parametrize("kind", ["by_image", "listed"])
@given(places=questions(), batch=st.integers(1, 20), seed=seeds, epoch=epochs)
def test_a_step_takes_whole_images_until_the_batch_is_reached(
    kind: Any, places: list[Place], batch: int, seed: int, epoch: int
) -> None:
    order = Order(kind=kind)
    steps = whole_image_steps(places, order, batch, seed, epoch)
    assert sorted(flat(steps)) == list(range(len(places)))
    images = appearances(places, flat(steps))
    assert len(images) == len({place.image for place in places}), "the questions of an image stand together"
    for step in steps:
        last = places[step[-1]].image
        assert sum(places[i].image != last for i in step) < batch, "without its last image a step is not full"
        assert len(step) >= batch or step is steps[-1]
    assert steps == whole_image_steps(places, order, batch, seed, epoch)
    if kind == "listed":
        assert images == list(dict.fromkeys(place.image for place in places))
    else:
        whole = epoch_steps(places, order, batch, seed, epoch)
        assert flat(whole) == flat(steps), "images in the order of by_image"
