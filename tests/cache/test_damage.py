"""An entry that is not what was written is refused with the reason, whatever happened to it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import CONTENT, FIELDS, OTHER, SETTINGS, refusal, same, small, written

from sameday.cache.key import Settings
from sameday.cache.store import (
    MAX_HEADER,
    Store,
)


@pytest.mark.slow
def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    whole, rng = path.read_bytes(), random.Random(3)
    for at in range(len(whole)):
        for mask in (rng.randrange(1, 256), 1 << rng.randrange(8)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
            assert refusal(store), f"byte {at} xor {mask}"
    path.write_bytes(whole)
    assert same(store.read(CONTENT), small())


def test_every_other_length_is_noticed(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refusal(store), f"cut to {length} bytes"
        assert not store.has(CONTENT, len(whole))
    for more in (1, 8, 4096):
        path.write_bytes(whole + bytes(more))
        assert refusal(store) == f"has {len(whole) + more} bytes and not {len(whole)}"


def test_zeros_where_a_page_was_lost(tmp_path: Path) -> None:
    """A crash of a machine leaves whole pages of zeros, where its file system promises no more."""
    store = Store(tmp_path, SETTINGS)
    store.write(CONTENT, {"pixels": torch.arange(20000, dtype=torch.int64)})
    path = store.path(CONTENT)
    whole = path.read_bytes()
    for at in range(0, len(whole), 4096):
        path.write_bytes(whole[:at] + bytes(len(whole[at : at + 4096])) + whole[at + 4096 :])
        assert refusal(store)


def test_a_huge_file_asks_for_no_memory(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    length = path.stat().st_size
    os.truncate(path, 1 << 40)  # sparse
    assert refusal(store) == f"has {1 << 40} bytes and not {length}"
    path.write_bytes(b"\xff" * 8)
    os.truncate(path, 1 << 40)
    assert refusal(store) == f"its header's length is {2**64 - 1}; 99 to {MAX_HEADER} is allowed"


def forged(change: Any, data: bytes = bytes(60)) -> bytes:
    """A file whose header was changed by someone who mended its checksum."""
    table: dict[str, Any] = {
        "__metadata__": {
            "content": CONTENT,
            "data_sha256": hashlib.sha256(data).hexdigest(),
            "settings": SETTINGS.text,
        },
        "x": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
    }
    change(table)
    metadata = table.pop("__metadata__")
    compact = json.JSONEncoder(separators=(",", ":")).encode
    rest = f'",{compact(metadata)[1:]},{compact(table)[1:]}'.encode()
    opening = b'{"__metadata__":{"header_sha256":"'
    rest += b" " * (-(len(opening) + 64 + len(rest)) % 8)
    length = (len(opening) + 64 + len(rest)).to_bytes(8, "little")
    return length + opening + hashlib.sha256(length + rest).hexdigest().encode() + rest + data


@pytest.mark.parametrize(
    "row",
    [
        {"dtype": "F31"},
        {"dtype": ["F32"]},
        {"dtype": "F64"},
        {"shape": [5, 4]},
        {"shape": [3, -5]},
        {"shape": [3, 5.0]},
        {"shape": "35"},
        {"shape": None},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [1 << 80]},
        {"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]},
        {"data_offsets": [0, 64]},
        {"data_offsets": [4, 64]},
        {"data_offsets": None},
        {"more": 1},
    ],
)
def test_headers_that_say_nonsense(tmp_path: Path, row: dict[str, Any]) -> None:
    store, path = written(tmp_path)
    path.write_bytes(forged(lambda table: table["x"].update(row)))
    assert refusal(store) == "its header is not one that sameday writes"


@pytest.mark.parametrize("key", ["content", "data_sha256", "settings"])
@pytest.mark.parametrize("value", [None, 3, "", "{}", "[" * 100000])
def test_metadata_that_says_nonsense(tmp_path: Path, key: str, value: Any) -> None:
    store, path = written(tmp_path)
    path.write_bytes(forged(lambda table: table["__metadata__"].update({key: value})))
    assert refusal(store)
    path.write_bytes(forged(lambda table: table["__metadata__"].pop(key)))
    assert refusal(store) == "its header is not one that sameday writes"


def test_the_forger_can_write_a_good_one(tmp_path: Path) -> None:
    """So that the tests above are refused for what they changed, and for nothing else."""
    store, path = written(tmp_path)
    path.write_bytes(forged(lambda table: None))
    assert same(store.read(CONTENT), {"x": torch.zeros(3, 5)})


def test_a_file_of_another_program(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    store, path = written(tmp_path)
    save_file(small(), path, {"content": CONTENT, "settings": SETTINGS.text, "more": "x" * 100})
    assert refusal(store) == "its header is damaged, or sameday did not write it"
    path.unlink()
    path.mkdir()
    assert refusal(store) == "cannot be read: Is a directory"
    assert not store.has(CONTENT) and store.contents() == set()


def test_an_entry_under_another_name(tmp_path: Path) -> None:
    store, path = written(tmp_path)
    shutil.copy(path, store.path(OTHER))
    assert refusal(store, OTHER) == f"content: {OTHER} here, {CONTENT} in the entry"
    store.write(OTHER, small())  # made again
    assert same(store.read(OTHER), small())


def test_an_entry_in_the_folder_of_other_settings(tmp_path: Path) -> None:
    _, path = written(tmp_path)
    for settings, reason in (
        (Settings("pixels", FIELDS | {"max_pixels": 401408}), "max_pixels: 401408 here, 1310720 there"),
        (Settings("features", FIELDS), "kind: features here, pixels there"),
        (
            Settings("pixels", FIELDS | {"pillow": "13"}, 2),
            "format: 2 here, 1 there; pillow: '13' here, '12.0.0' there",
        ),
    ):
        store, copy = written(tmp_path, settings)
        assert same(store.read(CONTENT), small())
        shutil.copy(path, copy)
        assert refusal(store) == f"is of other settings: {reason}"
