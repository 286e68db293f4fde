"""What a disk delivers, with a checksum where one is taken of what is read, and without where not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from sameday.hardware import disk
from sameday.hardware.disk import rate_of, read_rate
from sameday.hardware.peaks import measure


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of each piece went through a checksum."""
    pieces: list[int] = []

    class Counting:
        def __init__(self) -> None:
            self.checksum = hashlib.sha256()

        def update(self, piece: bytes) -> None:
            pieces.append(len(piece))
            self.checksum.update(piece)

    class Hashes:
        sha256 = Counting

    hashes: Any = Hashes
    monkeypatch.setattr(disk, "hashlib", hashes)
    monkeypatch.setattr(disk, "SAMPLE", 2 * disk.PIECE)
    return pieces


def test_a_cache_is_read_with_its_checksum(tmp_path: Path, hashed: list[int]) -> None:
    assert (read_rate(tmp_path) or 0) > 0 and hashed == [disk.PIECE] * 2
    (tmp_path / "entry").write_bytes(bytes(1000))
    assert (rate_of([tmp_path / "entry"]) or 0) > 0 and hashed[2:] == [1000]
    assert rate_of([tmp_path / "none"]) is None


def test_the_floor_is_read_without(tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sameday.hardware import peaks

    monkeypatch.setattr(peaks, "SECONDS", 0.01)
    monkeypatch.setattr(peaks, "CPU_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr(peaks, "CPU_BYTES", 2**20)
    assert (read_rate(tmp_path, checked=False) or 0) > 0
    assert (measure(torch.device("cpu"), "float32", tmp_path).disk_bytes_per_second or 0) > 0
    assert not hashed and not list(tmp_path.iterdir())
