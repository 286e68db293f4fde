"""Faults that all plans of ours would have alike: `--against transformers` finds each in every family and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from test_peer import LAYOUTS, Bench, labels_shifted, recipe_of, write_questions
from worlds import OF_THE_DECODER, SQUARE

from sameday.models.families import known_families, llava
from sameday.verify.limits import LIMITS
from sameday.verify.trace import Trace

ONE_SIZE = {"min_pixels": None, "max_pixels": None, "lora": {"r": 4, "alpha": 8, "target_modules": OF_THE_DECODER}}


def newline_lost(task: Any, _ranks: Any) -> Any:
    """The first line break of the chat template."""
    render = task.encoder._render
    return patch.object(task.encoder, "_render", lambda *a, **k: render(*a, **k).replace("\n", "", 1))


def resized_otherwise(task: Any, _ranks: Any) -> Any:
    """By a filter that no family takes."""
    return patch.object(task.processor._processor, "resample", Image.Resampling.NEAREST)


ENCODING: dict[str, tuple[Any, str]] = {
    "newline": (newline_lost, "tokens"),
    "labels": (labels_shifted, "labels"),
    "resize": (resized_otherwise, "pixel values"),
}


@dataclass(frozen=True)
class Peer:
    """A plain loop's first step with a model of a family."""

    bench: Bench
    theirs: Trace

    def differences(self, name: str, layout: str, plant: Any) -> Any:
        return self.bench.judged(self.bench.ours(name, layout, plant, steps=1), self.theirs)


@pytest.fixture(scope="module")
def peer(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Peer]:
    home = tmp_path_factory.mktemp("peer")
    write_questions(home)

    @cache
    def made(family: str) -> Peer:
        changes: Any = ONE_SIZE if family in SQUARE else {}
        bench = Bench(tmp_path_factory.mktemp(family), home, recipe_of(tiny_models[family], **changes))
        return Peer(bench, bench.theirs(bench.ours("ours", "one at a time", steps=1)))

    return made


@pytest.fixture(autouse=True)
def dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split attention knows no windows."""
    monkeypatch.setitem(LAYOUTS, "shared", LAYOUTS["shared"] | {"attention": "sdpa"})


ALWAYS = {"gemma3": tuple(ENCODING), "llava": tuple(ENCODING), "qwen2_vl": ("newline",), "qwen2_5_vl": ("resize",)}
"""In one of the layouts, one after the other; all faults of all families in both are for `make soak`. test_peer.py has
those of the family that is left."""


def cases() -> list[Any]:
    found = []
    for at, family in enumerate(known_families()):
        for number, fault in enumerate(ENCODING):
            for turn, layout in enumerate(LAYOUTS):
                now = fault in ALWAYS.get(family, ()) and (at + number + turn) % 2
                found.append(pytest.param(family, fault, layout, marks=() if now else (pytest.mark.soak,)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fault", "layout"), cases())
def test_a_fault_in_the_encoding_is_found(peer: Callable[[str], Peer], family: str, fault: str, layout: str) -> None:
    plant, what = ENCODING[fault]
    found = peer(family).differences(f"{fault}, {layout}", layout, plant)
    assert not found.same
    first = found.differences[0]
    assert (first.what, first.exact, first.step) == (what, True, 1) and first.name.startswith("train.jsonl:")


# What LLaVA makes of the tower's states


def another_block(_task: Any, _ranks: Any) -> Any:
    """The output of the block before the one that the model's configuration names."""
    made = llava._wanted_states
    return patch.object(llava, "_wanted_states", lambda tower: [state - 1 for state in made(tower)])


def patches_shifted(task: Any, _ranks: Any) -> Any:
    """Each patch stands one place later, as if the class token were the first of them."""
    family = task.model.family
    made = family.features
    return patch.object(family, "features", lambda tower, images: made(tower, images).roll(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        (another_block, "one at a time"),
        (patches_shifted, "shared"),
        pytest.param(another_block, "shared", marks=pytest.mark.soak),
        pytest.param(patches_shifted, "one at a time", marks=pytest.mark.soak),
    ],
)
def test_a_fault_in_what_is_projected_is_found(peer: Callable[[str], Peer], fault: Any, layout: str) -> None:
    found = peer("llava").differences(f"{fault.__name__}, {layout}", layout, fault)
    assert not found.same and found.worst["gradient"] > 10 * LIMITS.gradient, fault.__doc__
