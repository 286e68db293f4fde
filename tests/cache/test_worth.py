"""What a cache gives, told from what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.cache.worth import Judgement, Measured, judge

USUAL = Measured(
    step=0.230, tower=0.031, images=2.0, decode=0.015, workers=8, disk=2.9e9, pixel_bytes=7.8e6, feature_bytes=8.4e7
)
"""Two images of 1280 × 1024 in an image-shared step on a large GPU."""


def test_the_sentences() -> None:
    said = {kind: judgement.sentence for kind, judgement in judge(USUAL).items()}
    assert said["features"] == "features: 0.42 GB/s needed, 2.9 GB/s here, frees 31 of 230 ms: 1.16×"
    assert said["pixels"] == "pixels: decoding keeps up (8 workers decode 533 images/s, 8.7 needed), no gain"
    slow = judge(replace(USUAL, disk=0.3e9))["features"]
    assert slow == Judgement(0.0, "features: 0.42 GB/s needed, 0.3 GB/s here, too little: no gain")
    alone = judge(replace(USUAL, workers=0, tower=0.0))["pixels"]
    assert alone.sentence == (
        "pixels: the training process decodes 67 images/s, 8.7 needed; 0.03 GB/s needed, 2.9 GB/s here: 1.12×"
    )
    assert {each.gain for each in judge(replace(USUAL, images=0)).values()} == {1.0}


@pytest.mark.parametrize("field", Measured.__dataclass_fields__)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "fast", None])
def test_what_cannot_have_been_measured(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} {value!r} is no number that can have been measured"):
        replace(USUAL, **{field: value})


seconds = st.floats(1e-4, 10)


@given(
    step=seconds,
    share=st.floats(0, 1.2),
    images=st.floats(0, 100),
    decode=st.floats(0, 10),
    workers=st.integers(0, 64),
    disk=st.floats(1e6, 1e11),
    pixel_bytes=st.floats(0, 1e9),
    feature_bytes=st.floats(0, 1e10),
)
def test_a_gain_is_what_a_step_gains(share: float, step: float, **rest: Any) -> None:
    """Workers prepare beside the step; without them preparing comes on top."""
    m = Measured(step=step, tower=share * step, **rest)
    found = judge(m)
    assert found.keys() == {"pixels", "features"} and all(each.sentence for each in found.values())
    if not m.images:
        return
    decoding, reading = m.images * m.decode, m.pixel_bytes / m.disk
    if m.workers:
        before, after = max(step, decoding / m.workers), max(step, reading)
    else:
        before, after = step + decoding, step + reading
    assert math.isclose(found["pixels"].gain, before / after)
    if found["features"].gain and m.workers:
        assert m.disk * m.rest >= m.feature_bytes, "the disk delivers in the background"
        assert found["features"].gain * m.rest <= before * (1 + 1e-9)
