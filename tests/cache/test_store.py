"""What is read is what was written, to the last bit. Pruning takes what is ours."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import CONTENT, FIELDS, OTHER, SETTINGS, names, same, small, written
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sameday.cache.key import Settings, differences, parse
from sameday.cache.store import (
    DTYPES,
    MAX_HEADER,
    PART_AGE,
    BadEntry,
    CacheFull,
    CacheReadOnly,
    Store,
    free_bytes,
    in_bytes,
    others,
    prune,
)
from sameday.spec.errors import BadInput

VALUES = st.recursive(
    st.text(max_size=4) | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
ALL_SETTINGS = st.builds(
    Settings, st.sampled_from(["pixels", "features"]), st.dictionaries(st.text(max_size=3), VALUES)
)


@given(ALL_SETTINGS, ALL_SETTINGS)
def test_settings_differ_in_name_exactly_where_a_field_differs(one: Settings, two: Settings) -> None:
    assert (one.name == two.name) == (one == two) == (not differences(one, two)) == (one.text == two.text)
    assert parse(one.text) == one and not differences(parse(one.text), one)
    shuffled = Settings(one.kind, dict(reversed(list(one.fields.items()))))
    assert shuffled.name == one.name and hash(shuffled) == hash(one)


def test_differences_name_every_field() -> None:
    other = Settings("features", {"backend": "pil", "max_pixels": 401408, "mean": [0.5, 0.5], "tower": "ab"}, format=2)
    assert differences(SETTINGS, other) == [
        "format: 1 here, 2 there",
        "kind: pixels here, features there",
        "max_pixels: 1310720 here, 401408 there",
        "mean: [0.5, 0.25] here, [0.5, 0.5] there",
        "pillow: '12.0.0' here, nothing there",
        "tower: nothing here, 'ab' there",
    ]


def test_one_and_one_point_zero_are_two_settings() -> None:
    one, two = Settings("pixels", {"scale": 1}), Settings("pixels", {"scale": 1.0})
    assert one != two and one.name != two.name and differences(one, two) == ["scale: 1 here, 1.0 there"]


def test_settings_are_not_changed_from_outside() -> None:
    fields = {"mean": [0.5]}
    settings = Settings("pixels", fields)
    name = settings.name
    fields["mean"].append(1.0)
    assert settings.name == name == pickle.loads(pickle.dumps(settings)).name


@pytest.mark.parametrize("value", [None, math.nan, math.inf, (1, 2), {"a": 1}, [[None]], torch.uint8, Path("x")])
def test_settings_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"pixels settings: 'backend' is .* lists of them are allowed"):
        Settings("pixels", {"backend": value})


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"kind": "pixels"}', '{"kind": [], "fields": 3, "format": 1}']
)
def test_text_that_is_no_settings(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits at all, in every type and in shapes with none, one and several axes."""
    dtype, shape = draw(st.sampled_from(list(DTYPES.values()))), draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))
    return (torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)


ENTRIES = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "__metadata__"), tensors(), min_size=1, max_size=4
)


@given(ENTRIES)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, entry: dict[str, Tensor]) -> None:
    store = Store(tmp_path_factory.getbasetemp() / "round-trip", SETTINGS)
    store.write(CONTENT, entry)
    assert same(store.read(CONTENT), entry)
    size = store.path(CONTENT).stat().st_size
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in entry.items()}
    assert store.size_of(CONTENT, entry) == store.size_of(CONTENT, shapes) == size
    assert store.has(CONTENT) and store.has(CONTENT, size) and not store.has(CONTENT, size + 1)
    assert same(load_file(store.path(CONTENT)), entry)  # the library reads it, and agrees
    header = store.path(CONTENT).read_bytes()[: size - sum(tensor.nbytes for tensor in entry.values())]
    assert len(header) % 8 == 0
    for name, tensor in entry.items():  # whoever maps the file finds each tensor aligned
        assert json.loads(header[8:])[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


@given(ENTRIES, st.permutations(range(4)))
def test_an_entry_has_the_same_bytes_whoever_writes_it(
    tmp_path_factory: pytest.TempPathFactory, entry: dict[str, Tensor], order: list[int]
) -> None:
    root = tmp_path_factory.getbasetemp() / "same-bytes"
    one, two = Store(root / "one", SETTINGS), Store(root / "two", Settings("pixels", dict(reversed(FIELDS.items()))))
    one.write(CONTENT, entry)
    listed = list(entry.items())
    two.write(CONTENT, dict(listed[i] for i in order if i < len(listed)))
    assert one.path(CONTENT).read_bytes() == two.path(CONTENT).read_bytes()


def test_tensors_that_are_views_or_need_gradients(tmp_path: Path) -> None:
    store = Store(tmp_path, SETTINGS)
    entry = {
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "spread": torch.ones(1, dtype=torch.uint8).expand(3, 5),
        "trained": torch.zeros(2, requires_grad=True),
    }
    store.write(CONTENT, entry)
    found = store.read(CONTENT)
    assert same(found, {name: tensor.detach().contiguous() for name, tensor in entry.items()})
    assert found is not None and not any(tensor.requires_grad for tensor in found.values())


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    found, again = store.read(CONTENT), store.read(CONTENT)
    assert found is not None
    with path.open("r+b") as file:  # in place, as nobody should
        file.write(bytes(path.stat().st_size))
    assert same(found, small())
    for tensor in found.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()
    assert same(again, small())


def test_other_programs_can_read_what_it_is(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["content"] == CONTENT
    assert json.loads(metadata["settings"]) == {"format": 1, "kind": "pixels", "fields": FIELDS}
    assert (store.folder / "settings.json").read_text() == metadata["settings"] + "\n"
    assert names(store.folder) == sorted([path.name, "settings.json"])
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_nothing_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "absent", SETTINGS)
    assert store.read(CONTENT) is None and not store.has(CONTENT) and store.contents() == set()
    assert others(store.root, SETTINGS) == [] and prune(store.root, {}) == (0, 0)
    assert free_bytes(store.folder) > 0 and names(tmp_path) == []


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    store = Store(tmp_path / "cache", SETTINGS)
    store.root.write_text("mine")
    assert store.read(CONTENT) is None and not store.has(CONTENT) and store.contents() == set()
    with pytest.raises(CacheReadOnly, match="cannot be written: Not a directory"):
        store.write(CONTENT, small())
    store.root.unlink()
    store.root.mkdir()
    store.folder.write_text("mine")
    with pytest.raises(CacheReadOnly, match="cannot be written: File exists"):
        store.write(CONTENT, small())


@pytest.mark.parametrize("content", ["", "abc", "../" + CONTENT, CONTENT.upper(), CONTENT + "\n", "g" * 32, "a" * 129])
def test_content_that_is_no_digest(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path, SETTINGS)
    for act in (store.has, store.read, lambda c: store.write(c, small())):
        with pytest.raises(ValueError, match="is not a digest: 16 to 128 digits"):
            act(content)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, "one tensor or more"),
        ({"__metadata__": torch.zeros(1)}, "none of them named __metadata__"),
        ({"x": torch.zeros(1, dtype=torch.complex64)}, "tensor 'x' is torch.complex64, .*F64, .* are allowed"),
        ({"x": torch.zeros(2, 2).to_sparse()}, "torch.sparse_coo; dense ones"),
        ({"x" * MAX_HEADER: torch.zeros(1)}, f"at most {MAX_HEADER} are allowed"),
    ],
)
def test_what_an_entry_cannot_hold(tmp_path: Path, entry: dict[str, Tensor], why: str) -> None:
    store = Store(tmp_path, SETTINGS)
    for act in (store.size_of, store.write):
        with pytest.raises(ValueError, match=why):
            act(CONTENT, entry)
    assert names(tmp_path) == []


@pytest.mark.parametrize("spoil", [lambda file: file.write_bytes(b"\xff{"), Path.unlink])
def test_entries_do_without_the_settings_file(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    store, _ = written(tmp_path)
    file = store.folder / "settings.json"
    spoil(file)
    assert same(store.read(CONTENT), small()) and store.contents() == {CONTENT}
    assert others(tmp_path, Settings("pixels", {})) == [(SETTINGS, 1)]  # told by the entry
    store.write(OTHER, small())
    assert same(store.read(OTHER), small())
    file.unlink()
    store.write(OTHER, small())
    assert parse(file.read_text()) == SETTINGS


def test_others_are_told_with_their_settings(tmp_path: Path) -> None:
    lower, features = Settings("pixels", FIELDS | {"max_pixels": 401408}), Settings("features", FIELDS)
    for settings in (SETTINGS, lower, features):
        written(tmp_path, settings)
    written(tmp_path, lower, OTHER)
    (tmp_path / "pixels-0123456789ab").mkdir()
    (tmp_path / "pixels-mine").mkdir()
    assert others(tmp_path, SETTINGS) == [(lower, 2)]
    assert others(tmp_path, features) == []
    # A folder renamed by hand says nothing that can be believed.
    (tmp_path / lower.name).rename(tmp_path / "pixels-0123456789ac")
    assert others(tmp_path, SETTINGS) == []


def test_readers_and_writers_of_one_entry(tmp_path: Path) -> None:
    store, _ = written(tmp_path)
    entry = {"pixels": torch.arange(200_000, dtype=torch.int64)}
    store.write(OTHER, entry)

    def act(number: int) -> None:
        if number % 4 == 0:
            store.write(OTHER, entry)
        assert same(store.read(OTHER), entry)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(act, range(60)))
    assert names(store.folder) == sorted([store.path(CONTENT).name, store.path(OTHER).name, "settings.json"])


def test_prune_keeps_what_is_asked_for_and_what_is_not_ours(tmp_path: Path) -> None:
    lower = Settings("pixels", FIELDS | {"max_pixels": 401408})
    store, _ = written(tmp_path)
    written(tmp_path, SETTINGS, OTHER)
    size = sum(written(tmp_path, lower, content)[1].stat().st_size for content in (CONTENT, OTHER))
    size += store.path(OTHER).stat().st_size
    theirs = [
        *(store.folder / name for name in ("notes.txt", "x.safetensors", f"{CONTENT}.safetensors.old", "a.part")),
        *(tmp_path / name for name in (f"{CONTENT}.safetensors", "pixels-mine")),
    ]
    for path in theirs:
        path.write_text("mine")
    outside = tmp_path / "elsewhere"
    written(outside, lower)
    (tmp_path / "features-0123456789ab").symlink_to(outside / lower.name)
    assert prune(tmp_path, {"pixels-0123456789ab": set()}) == prune(tmp_path, {}) == (0, 0), (
        "folders that are not named"
    )
    assert prune(tmp_path, {SETTINGS.name: {CONTENT}, lower.name: set()}) == (3, size)
    assert store.contents() == {CONTENT} and same(store.read(CONTENT), small())
    assert all(path.read_text() == "mine" for path in theirs)
    assert not (tmp_path / lower.name).exists() and same(Store(outside, lower).read(CONTENT), small())
    assert prune(tmp_path, {SETTINGS.name: {CONTENT}}) == (0, 0)
    # A folder with something of a user's own is never empty.
    assert prune(tmp_path, {SETTINGS.name: ()})[0] == 1 and (store.folder / "notes.txt").exists()


def test_prune_takes_only_old_remains(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    young = path.with_name(f"{OTHER}.safetensors.node-7-17-0123456789abcdef.part")
    old = path.with_name(f"{CONTENT}.safetensors.node-7-18-0123456789abcdef.part")
    settings = path.with_name("settings.json.node-7-18-0123456789abcdef.part")
    for part in (young, old, settings):
        part.write_bytes(bytes(100))
    for part in (old, settings):
        os.utime(part, (0, time.time() - PART_AGE - 60))
    assert store.contents() == {CONTENT}
    assert prune(tmp_path, {SETTINGS.name: {CONTENT}}) == (2, 200)
    assert young.exists() and not old.exists() and not settings.exists()
    assert prune(tmp_path, {SETTINGS.name: ()})[0] == 1
    assert names(store.folder) == [young.name, "settings.json"]  # its writer is at work
    store.write(CONTENT, small())
    assert same(store.read(CONTENT), small())


def test_writing_while_another_job_prunes(tmp_path: Path) -> None:
    """An empty folder goes, and may go while a writer is about to use it."""
    store = Store(tmp_path, SETTINGS)

    def fill(number: int) -> None:
        content = f"{number:032x}"
        store.write(content, small())
        store.path(content).unlink(missing_ok=True)

    with ThreadPoolExecutor(3) as pool:
        pruning = [pool.submit(lambda: [prune(tmp_path, {SETTINGS.name: ()}) for _ in range(150)]) for _ in range(2)]
        for number in range(150):
            fill(number)
        for each in pruning:
            each.result()


@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "replace"])
@pytest.mark.parametrize("kept", [True, False])
def test_another_job_prunes_at_any_moment_of_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, kept: bool
) -> None:
    """Before the entry's part is in the folder, once or twice; later as often as it likes."""
    store = Store(tmp_path, SETTINGS)
    store.folder.mkdir()
    real, calls = getattr(os, call), []

    def then_pruned(*arguments: Any) -> Any:
        try:
            return real(*arguments)
        finally:
            calls.append(arguments)
            if call != "mkdir" or len(calls) <= 2:
                prune(tmp_path, {SETTINGS.name: {CONTENT} if kept else ()})

    with monkeypatch.context() as patch:
        patch.setattr(os, call, then_pruned)
        store.write(CONTENT, small())
    assert calls
    assert same(store.read(CONTENT), small()) if kept or call == "mkdir" else store.read(CONTENT) is None
    assert not list(tmp_path.rglob("*.part"))


def test_errors_say_what_and_where_and_survive_a_process(tmp_path: Path) -> None:
    full = CacheFull(tmp_path, 812_400_000, 1_234)
    read_only = CacheReadOnly(tmp_path, "Read-only file system")
    bad = BadEntry(tmp_path / "x", "its data is damaged")
    assert str(full) == f"{tmp_path}: 812.4 MB needed, 1.2 kB free"
    assert str(read_only) == f"{tmp_path}: cannot be written: Read-only file system"
    assert str(bad) == f"{tmp_path / 'x'}: its data is damaged"
    for error in (full, read_only, bad):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(full, BadInput) and isinstance(read_only, BadInput)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (40_123_456_789, "40.1 GB"), (2e12, "2.0 TB")],
)
def test_sizes_as_people_read_them(size: int, text: str) -> None:
    assert in_bytes(size) == text
