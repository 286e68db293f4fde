"""Which questions are held out, where a recipe gives shares instead of files: by the pixels of their images and a seed,
so that no image stands on two sides, and neither conditions, limits nor the order of rows move one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from sameday.data.questions.sample import Sample
from sameday.spec.dataset import Split
from sameday.spec.words import count

FAR = 0.05
"""How far the share that came out may be from the one asked for, with nothing said about it."""
LUCK = "of few images shares are a matter of luck, and another split.seed gives others"


def divided(samples: Sequence[Sample], split: Split) -> dict[str, list[Sample]]:
    """Each sample on one side, in the order given; sides may be empty. Images that some question shows together are
    on one side, which the least of their digests decides; questions without an image go by their text."""
    linked = _linked(samples)
    sides: dict[str, list[Sample]] = {"train": [], **{name: [] for name in split.shares}}
    for sample in samples:
        content = linked[sample.images[0].digest] if sample.images else f"text {sample.prompt}"
        sides[_side(content, split)].append(sample)
    return sides


def _side(content: str, split: Split) -> str:
    place = hashlib.blake2b(f"split/{split.seed}/{content}".encode(errors="surrogatepass"), digest_size=8)
    at = int.from_bytes(place.digest(), "little") / 2**64
    return "test" if at < split.test else "val" if at < split.test + split.val else "train"


def _linked(samples: Iterable[Sample]) -> dict[str, str]:
    """Of each image the least digest among all that it is linked with, over any number of questions."""
    least: dict[str, str] = {}

    def root(digest: str) -> str:
        while (above := least.setdefault(digest, digest)) != digest:
            least[digest] = least[above]
            digest = above
        return digest

    for sample in samples:
        roots = {root(image.digest) for image in sample.images}
        for each in roots:
            least[each] = min(roots)
    return {digest: root(digest) for digest in least}


def images_in(samples: Iterable[Sample]) -> int:
    return len({image.digest for sample in samples for image in sample.images})


def told(label: str, sides: dict[str, list[Sample]], split: Split) -> str:
    """What is held out, and how far that is from what was asked for, where it is far."""
    images = {name: images_in(side) for name, side in sides.items()}
    parts = [f"{name} {count(images[name], 'image')} with {count(len(sides[name]), 'question')}" for name in sides]
    sentence = f"{label} is divided by its images' content, seed {split.seed}: {'; '.join(parts)}"
    came = {name: images[name] / max(1, sum(images.values())) for name in split.shares}
    far = [
        f"{name} is {came[name]:.0%} of the images, not the {share:.0%} asked for"
        for name, share in split.shares.items()
        if abs(came[name] - share) > FAR and any(images.values())
    ]
    return "; ".join([sentence, *far, *([LUCK] if far else [])])


def image_by_image(samples: Sequence[Sample], most: int | None) -> list[Sample]:
    """So many samples and no more: all about the first image, then all about the next. Without a number as they are."""
    if most is None:
        return list(samples)
    images: dict[str, list[Sample]] = {}
    for sample in samples:
        images.setdefault(sample.image_key, []).append(sample)
    return [sample for image in images.values() for sample in image][:most]
