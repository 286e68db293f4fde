"""What a cache gives, told from what was measured."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sameday.cache.worth import WORTH_IT, Measured, choose, judge

USUAL = Measured(
    step=0.230, tower=0.031, images=2.0, decode=0.015, workers=8, disk=2.9e9, pixel_bytes=7.8e6, feature_bytes=8.4e7
)
"""Two images of 1280 × 1024 in an image-shared step on a large GPU."""


def test_the_sentences() -> None:
    assert judge(USUAL)["features"].sentence == ("features: 0.42 GB/s needed, 2.9 GB/s here, frees 31 of 230 ms: 1.16×")
    keeps_up = "pixels: decoding keeps up (8 workers decode 533 images/s, 8.7 needed), no gain"
    assert judge(USUAL)["pixels"].sentence == keeps_up
    assert choose(USUAL)[0] == "features"
    slow = replace(USUAL, disk=0.3e9)
    assert judge(slow)["features"].sentence == "features: 0.42 GB/s needed, 0.3 GB/s here, too little: no gain"
    assert choose(slow) == ("none", f"{keeps_up}; {judge(slow)['features'].sentence}")
    alone = replace(USUAL, workers=0, tower=0.0)
    assert judge(alone)["pixels"].sentence == (
        "pixels: the training process decodes 67 images/s, 8.7 needed; 0.03 GB/s needed, 2.9 GB/s here: 1.13×"
    )


seconds = st.floats(1e-4, 10)


@given(
    step=seconds,
    share=st.floats(0, 0.9),
    images=st.floats(0.1, 100),
    decode=seconds,
    workers=st.integers(0, 64),
    disk=st.floats(1e6, 1e11),
    pixel_bytes=st.floats(1e3, 1e9),
    feature_bytes=st.floats(1e3, 1e10),
)
def test_no_choice_makes_a_step_slower(share: float, step: float, **rest: float) -> None:
    m = Measured(step=step, tower=share * step, **rest)  # type: ignore[arg-type]
    kind, sentence = choose(m)
    assert sentence
    after = {
        "none": m.without,
        "pixels": max(m.step, m.pixel_bytes / m.disk),
        "features": max(m.step - m.tower, m.feature_bytes / m.disk),
    }
    assert after[kind] <= m.without
    if kind == "none":
        assert m.without / after["pixels"] < WORTH_IT
    else:
        assert m.without / after[kind] >= WORTH_IT
    if kind == "features":
        assert m.disk >= m.feature_bytes / (m.step - m.tower), "the disk delivers in the background"
