"""Confidence intervals by drawing images again and again, each with all of its questions: questions about one image are
right or wrong together, and counting them as independent would make intervals too narrow."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95
RESAMPLES = 2000
AT_ONCE = 2**23
"""How many counts are held at a time."""


def draws(images: int, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[Floats]:
    """How often each image is drawn: a row for each resample, some rows at a time. The same for the same arguments."""
    generator = np.random.default_rng(seed)
    most = max(1, AT_ONCE // max(1, images))
    for start in range(0, resamples, most):
        rows = min(most, resamples - start)
        drawn = generator.integers(images, size=(rows, images))
        places = drawn + images * np.arange(rows)[:, None]
        yield np.bincount(places.ravel(), minlength=rows * images).reshape(rows, images).astype(np.float64)


def interval(value: float, resampled: Floats) -> tuple[float, float] | None:
    """The bias-corrected percentile interval: percentiles are moved by as much as `value` is off the resamples' median,
    which is nothing for a mean of many images. None where no resample has a value. It always holds `value`."""
    known = resampled[~np.isnan(resampled)]
    if not len(known):
        return None
    normal = NormalDist()
    below = (np.sum(known < value) + np.sum(known <= value)) / (2 * len(known))
    edge = 1 / (2 * len(known))
    shift = 2 * normal.inv_cdf(min(max(float(below), edge), 1 - edge))
    half = normal.inv_cdf((1 + LEVEL) / 2)
    low, high = np.quantile(known, [normal.cdf(shift - half), normal.cdf(shift + half)])
    return min(float(low), value), max(float(high), value)


def bound_of_agreement(images: int) -> float:
    """How far from 0 or 1 a share may be that is 0 or 1 in each of so many images, where resampling sees no spread:
    Clopper and Pearson's exact bound, an image counted as one trial."""
    return 1 - float(((1 - LEVEL) / 2) ** (1 / images))
