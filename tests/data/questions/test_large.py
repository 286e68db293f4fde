"""Large sets: what is held in memory is questions, never images, and each image is decoded once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from sameday.data.questions import audit
from sameday.data.questions.sample import images_of

pytest.importorskip("pyarrow")
from data import trial, write_set

ROWS, IMAGES = 3000, 325


@pytest.mark.slow
def test_rows_take_little_and_images_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_set(tmp_path, ROWS, IMAGES, parts=2)
    opened: list[Path] = []
    real = audit.open_rgb

    def counted(path: Any) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(audit, "open_rgb", counted)
    tracemalloc.start()
    samples, problems = audit.check(tmp_path / "raw-*.parquet", tmp_path, None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(samples), len(problems)) == (ROWS, 0)
    assert len(images_of({"train": samples})) == IMAGES == len(opened) == len(set(opened))
    assert most < 5000 * ROWS + 5e6, "60,000 rows would take 300 MB"


@pytest.mark.soak
def test_sixty_thousand_rows_take_less_than_two_gibibytes(tmp_path: Path) -> None:
    peaks = trial(tmp_path, 60_000, 6_500, 20)
    libraries = peaks.pop("libraries alone")
    assert max(peak.pss for peak in peaks.values()) - libraries.pss < 2**31
