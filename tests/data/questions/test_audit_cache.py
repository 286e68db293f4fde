"""An image that was found good is not decoded again, unless its file may be another one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sameday.data.questions import audit as audited
from sameday.data.questions import audit_cache
from sameday.data.questions.audit import Audit, audit
from sameday.data.questions.audit_cache import cache_home
from sameday.data.questions.images import Stamp

COUNT = 6


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMEDAY_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the images that were decoded, in order."""
    names: list[str] = []
    plain = audited.open_rgb

    def noted(path: Path) -> Image.Image:
        names.append(path.name)
        return plain(path)

    monkeypatch.setattr(audited, "open_rgb", noted)
    return names


def draw(path: Path, seed: int, age: float = 60.0) -> None:
    """A BMP, whose size does not depend on what it shows, written so many seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    when = time.time() - age
    os.utime(path, (when, when))


def write_set(folder: Path, first_seed: int = 0) -> Path:
    names = [f"{number}.bmp" for number in range(COUNT)]
    for number, name in enumerate(names):
        draw(folder / "images" / name, first_seed + number)
    rows = [{"image": name, "question": "what?", "answer": "this"} for name in names]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_set(tmp_path)


def run(folder: Path) -> Audit:
    return audit(folder / "train.jsonl", folder / "images", None)


def stamps(result: Audit) -> list[Stamp | None]:
    """Of the files, which a comparison of samples leaves out."""
    return [image.stamp for sample in result.samples for image in sample.images]


def test_a_second_audit_opens_no_image(folder: Path, opened: list[str]) -> None:
    first = run(folder)
    assert sorted(opened) == [f"{number}.bmp" for number in range(COUNT)]
    opened.clear()
    calls: list[tuple[int, int]] = []
    second = audit(folder / "train.jsonl", folder / "images", None, progress=lambda *counts: calls.append(counts))
    assert opened == calls == []
    assert second == first and stamps(second) == stamps(first)


def test_a_changed_file_is_decoded_again(folder: Path, opened: list[str]) -> None:
    before = run(folder)
    opened.clear()
    draw(folder / "images/1.bmp", 100, age=30)  # another time stamp
    Image.new("RGB", (9, 8)).save(folder / "images/2.bmp")  # another size, and the old time stamp
    old = before.samples[2].images[0].stamp
    assert old is not None
    os.utime(folder / "images/2.bmp", ns=(old[1], old[1]))
    after = run(folder)
    assert sorted(opened) == ["1.bmp", "2.bmp"]
    changed = [a.image_key != b.image_key for a, b in zip(before.samples, after.samples, strict=True)]
    assert changed == [False, True, True, False, False, False]
    opened.clear()
    assert run(folder) == after and opened == []


def test_another_file_with_the_old_size_and_time_is_decoded_again(
    folder: Path, tmp_path: Path, opened: list[str]
) -> None:
    """As `cp -p`, `rsync -t` and `tar` put it there."""
    before = run(folder)
    draw(tmp_path / "other.bmp", 100)
    old = (folder / "images/1.bmp").stat()
    os.utime(tmp_path / "other.bmp", ns=(old.st_mtime_ns, old.st_mtime_ns))
    shutil.copy2(tmp_path / "other.bmp", folder / "images/1.bmp")
    now = (folder / "images/1.bmp").stat()
    assert (now.st_size, now.st_mtime_ns) == (old.st_size, old.st_mtime_ns)
    opened.clear()
    after = run(folder)
    assert opened == ["1.bmp"]
    assert after.samples[1].image_key != before.samples[1].image_key


def test_a_line_without_the_time_of_the_last_change_is_not_trusted(folder: Path, home: Path, opened: list[str]) -> None:
    """Earlier releases did not write it."""
    first = run(folder)
    (file,) = (home / "audit").iterdir()
    lines = [json.loads(line) for line in file.read_bytes().splitlines() if line]
    file.write_text("".join(json.dumps({k: v for k, v in e.items() if k != "ctime_ns"}) + "\n" for e in lines))
    opened.clear()
    assert run(folder) == first and sorted(opened) == [f"{number}.bmp" for number in range(COUNT)]
    opened.clear()
    assert run(folder) == first and opened == []


def test_a_file_that_is_just_being_written_is_not_trusted(folder: Path, opened: list[str]) -> None:
    """Another image of the same size within the resolution of time stamps would look the same."""
    draw(folder / "images/3.bmp", 100, age=0.5)
    when = (folder / "images/3.bmp").stat().st_mtime_ns
    before = run(folder)
    draw(folder / "images/3.bmp", 200)
    os.utime(folder / "images/3.bmp", ns=(when, when))
    opened.clear()
    assert run(folder).samples[3].image_key != before.samples[3].image_key
    assert opened == ["3.bmp"]


def test_only_good_results_are_kept(folder: Path, opened: list[str]) -> None:
    Image.new("RGB", (201, 1)).save(folder / "images/0.bmp")
    (folder / "images/1.bmp").write_bytes(b"broken")
    for name in ("0.bmp", "1.bmp"):
        os.utime(folder / "images" / name, (1e9, 1e9))
    before = run(folder)
    assert len(before.problems) == 2
    opened.clear()
    assert run(folder) == before
    assert sorted(opened) == ["0.bmp", "1.bmp"]


def test_roots_with_the_same_names_do_not_mix(tmp_path: Path, opened: list[str]) -> None:
    one, other = write_set(tmp_path / "one"), write_set(tmp_path / "other", first_seed=50)
    first = run(one)
    opened.clear()
    second = run(other)
    assert len(opened) == COUNT
    assert not {s.image_key for s in first.samples} & {s.image_key for s in second.samples}
    opened.clear()
    assert (run(one), run(other), opened) == (first, second, [])


def test_another_pillow_decodes_again(folder: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder)
    opened.clear()
    monkeypatch.setattr(audit_cache.PIL, "__version__", "0.0")
    run(folder)
    assert len(opened) == COUNT


KILLED = """\
import os, signal, sys
from pathlib import Path
from sameday.data.questions.audit import audit

def progress(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
audit(folder / "train.jsonl", folder / "images", None, progress=progress)
"""


def test_a_kill_keeps_what_was_done(folder: Path, opened: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    run(folder)
    assert sorted(opened) == ["3.bmp", "4.bmp", "5.bmp"]


@pytest.mark.parametrize("tail", [b'{"path": "/a', b"\xff\xfe", b"[1, 2]", b'{"path": 3}', b"[" * 100_000, b"null"])
def test_torn_and_foreign_lines_are_passed(folder: Path, home: Path, opened: list[str], tail: bytes) -> None:
    first = run(folder)
    (file,) = (home / "audit").iterdir()
    lines = file.read_bytes().splitlines()
    wrong = json.loads(lines[-1]) | {"width": "8"}
    file.write_bytes(b"\n".join([*lines[:-1], json.dumps(wrong).encode(), tail]))  # the last entry is lost
    opened.clear()
    assert run(folder) == first and opened == ["5.bmp"]
    opened.clear()
    assert run(folder) == first and opened == [], "what is added after a torn line is a line of its own"


def occupied(home: Path) -> None:
    home.write_text("a file, and no folder")


def unwritable(home: Path) -> None:
    (home / "audit").mkdir(parents=True)
    (home / "audit").chmod(0o500)


@pytest.mark.parametrize("spoil", [occupied, unwritable])
def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, home: Path, spoil: Callable[[Path], None]) -> None:
    spoil(home)
    assert run(folder) == run(folder)


def test_a_full_disk_is_no_error(folder: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = os.write, list[int]()

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return plain(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(audit_cache.os, "write", full)
        first = run(folder)
    opened.clear()
    assert run(folder) == first
    assert 0 < len(opened) < COUNT


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_home() == tmp_path / "home"
    monkeypatch.delenv("SAMEDAY_CACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "sameday"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "sameday"
