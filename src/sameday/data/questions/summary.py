"""What a set of questions is like, in numbers: images, sizes, answers, duplicates, and what its images cost in each
order. Pure; nothing is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median

from sameday.data.order import Place, epoch_steps
from sameday.data.questions.sample import Sample
from sameday.spec.errors import in_short
from sameday.spec.order import Order
from sameday.spec.words import count, in_one_line

ORDERS = ("by_image", "shuffle")
"""What sharing gives is said of these."""


@dataclass(frozen=True)
class Spread:
    least: int
    middle: float
    most: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        return cls(min(values), median(values), max(values))


@dataclass(frozen=True)
class Summary:
    """Of one split, which has at least one question. `repeated` questions stand there again to the letter, with the
    same image and answer; `disagreeing` ones with another answer. `renamed` are images under more than one name."""

    questions: int
    images: int
    per_image: Spread | None
    sizes: Counter[tuple[int, int]]
    words: Spread
    answers: Counter[str]
    repeated: int
    disagreeing: int
    renamed: int
    stages: Counter[int]
    types: Counter[str]


def summary_of(samples: Sequence[Sample]) -> Summary:
    sizes, names = dict[str, tuple[int, int]](), dict[str, set[str]]()
    asked: dict[tuple[str, str], Counter[str]] = {}
    about: Counter[str] = Counter()
    for sample in samples:
        for image in sample.images:
            sizes[image.digest] = (image.width, image.height)
            names.setdefault(image.digest, set()).add(str(image.path))
        key = sample.image_key if sample.images else ""
        asked.setdefault((key, sample.prompt), Counter())[sample.answer] += 1
        about.update([key] if key else [])
    answers = Counter(sample.answer for sample in samples)
    return Summary(
        questions=len(samples),
        images=len(sizes),
        per_image=Spread.of(list(about.values())) if about else None,
        sizes=Counter(sizes.values()),
        words=Spread.of([len(sample.answer.split()) for sample in samples]),
        answers=answers,
        repeated=sum(times - 1 for given in asked.values() for times in given.values()),
        disagreeing=sum(len(given) - 1 for given in asked.values()),
        renamed=sum(len(each) > 1 for each in names.values()),
        stages=Counter(sample.stage for sample in samples if sample.stage is not None),
        types=Counter(sample.type for sample in samples if sample.type is not None),
    )


def contents(splits: Mapping[str, Sequence[Sample]]) -> dict[str, set[str]]:
    """The images of each split, by content."""
    return {name: {image.digest for each in side for image in each.images} for name, side in splits.items()}


def on_several_sides(there: Mapping[str, Set[Hashable]]) -> dict[tuple[str, str], int]:
    """How many images two splits have in common, whose contents these are; only pairs that have some."""
    names = list(there)
    pairs = [(one, other) for n, one in enumerate(names) for other in names[n + 1 :]]
    return {(one, other): both for one, other in pairs if (both := len(there[one] & there[other]))}


def common_images(one: str, other: str, images: int) -> str:
    return f"{one} and {other} have {count(images, 'image')} in common: scores of {other} will be too good"


def common_with(split: str, there: Mapping[str, Set[Hashable]]) -> list[str]:
    """A sentence for each other split that has images in common with this one."""
    others = [name for name in there if name != split]
    common = on_several_sides({name: there.get(name, frozenset()) for name in (*others, split)})
    return [common_images(one, split, images) for (one, other), images in common.items() if other == split]


def refused_later(split: str, samples: str, error: Exception) -> str:
    """What is wrong with a split that is not needed yet, with the first of the problems."""
    return f"`sameday eval --split {split}` will refuse the {split} {samples}: {in_short(error)}"


def spaces_around(splits: Mapping[str, Sequence[Sample]]) -> list[str]:
    """A line for each split with answers that begin or end with white space, as in a CSV file with a space behind each
    comma. Most chat templates leave it there."""
    lines = []
    for name, samples in splits.items():
        odd = [sample for sample in samples if sample.answer != sample.answer.strip()]
        if odd:
            such = f"{in_one_line(repr(odd[0].answer))} ({odd[0].where})"
            lines.append(
                f"{name}: {len(odd):,} of {len(samples):,} answers begin or end with spaces or line breaks, such as "
                f"{such}; they are part of the answer unless the chat template removes them"
            )
    return lines


def steps_in(kind: str, samples: Sequence[Sample], batch: int, seed: int = 0) -> list[list[int]]:
    """The steps of a first epoch in this order."""
    places = [Place(sample.id, sample.image_key, sample.stage) for sample in samples]
    return epoch_steps(places, Order.model_validate({"kind": kind}), batch, seed, 0)


def images_a_step(steps: Sequence[Sequence[int]], samples: Sequence[Sample]) -> float:
    """On average; what is computed once where images are shared."""
    return sum(len({samples[i].image_key for i in step}) for step in steps) / len(steps)
