"""The python batches of CIFAR-10 and CIFAR-100: read without trusting them, and written in the same form."""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from sameday.spec.words import visible

SIDE = 32
ROW = 3 * SIDE * SIDE
TRAIN_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCH = "test_batch"
META = "batches.meta"


class BadBatch(ValueError):
    """A file that gives no usable batch; the text is a short reason without the file's name."""


def load(path: Path) -> dict[str, Any]:
    """The dictionary of one file, with text for keys. Only numbers, text, lists, dictionaries and numpy arrays of
    integers can come out of it: no name in the file is ever imported or called."""
    try:
        with path.open("rb") as file:
            content = _Reader(file).load()
    except BadBatch:
        raise
    except FileNotFoundError as error:
        raise BadBatch("is missing") from error
    except OSError as error:
        raise BadBatch(f"cannot be read: {error.strerror or error}") from error
    # Corrupt bytes make the reader raise nearly anything: EOFError, KeyError, UnicodeDecodeError, MemoryError.
    except Exception as error:
        raise BadBatch(f"is cut short or not a pickle: {_short(str(error) or type(error).__name__)}") from error
    if not isinstance(content, dict):
        raise BadBatch(f"holds a {type(content).__name__} where a dictionary is expected")
    named = {_text(key): value for key, value in content.items() if isinstance(key, bytes | str)}
    return {key: value.value if isinstance(value, _Array) else value for key, value in named.items()}


def rows(content: dict[str, Any], label_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 32, 32, 3) uint8 and labels (n,) int64 of a batch."""
    missing = [key for key in ("data", label_key) if key not in content]
    if missing:
        raise BadBatch(f"has no {' and no '.join(map(repr, missing))}; {_inside(content)}")
    data = content["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != ROW:
        shape = f"{data.dtype} of shape {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise BadBatch(f"'data' is {shape}; uint8 of shape (images, {ROW}) is expected")
    labels = content[label_key]
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise BadBatch(f"{label_key!r} is not a list of whole numbers")
    if len(labels) != len(data):
        raise BadBatch(f"has {len(data)} images and {len(labels)} labels")
    if not all(-(2**63) <= label < 2**63 for label in labels):
        raise BadBatch(f"{label_key!r} holds a number beyond 64 bits")
    planes = data.reshape(-1, 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, np.int64).reshape(-1)


def class_names(content: dict[str, Any], key: str) -> tuple[str, ...]:
    """The names that a meta file gives to labels 0, 1, 2 ..."""
    names = content.get(key)
    if not isinstance(names, list) or not names or not all(isinstance(name, bytes | str) for name in names):
        raise BadBatch(f"has no list of names under {key!r}; {_inside(content)}")
    return tuple(map(_text, names))


def write_batch(path: Path, pixels: np.ndarray, labels: Sequence[int], names: Sequence[str], title: str) -> None:
    """One batch file of images (n, 32, 32, 3) uint8."""
    assert pixels.dtype == np.uint8 and pixels.shape[1:] == (SIDE, SIDE, 3), f"{pixels.dtype} of shape {pixels.shape}"
    assert len(pixels) == len(labels) == len(names)
    content = {
        b"batch_label": title.encode(),
        b"labels": [int(label) for label in labels],
        b"data": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)).reshape(-1, ROW),
        b"filenames": [name.encode() for name in names],
    }
    path.write_bytes(_dumped(content))


def write_meta(path: Path, classes: Sequence[str], per_batch: int) -> None:
    names = [name.encode() for name in classes]
    path.write_bytes(_dumped({b"num_cases_per_batch": per_batch, b"label_names": names, b"num_vis": ROW}))


def _inside(content: dict[str, Any]) -> str:
    return f"it holds {_short(', '.join(sorted(content)) or 'nothing')}"


def _short(text: str) -> str:
    """What stands in a damaged file, as plain letters and not too many of them."""
    plain = text.encode("ascii", "backslashreplace").decode()
    return visible(plain if len(plain) <= 80 else plain[:77] + "...")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class _Dtype:
    """What stands in for numpy.dtype: integers alone."""

    def __init__(self, name: Any, *flags: Any) -> None:
        self.name = _text(name)
        if not re.fullmatch(r"[<>|=]?[iu][1248]", self.name):
            raise BadBatch(f"holds an array of {_short(self.name)!r}; only whole numbers are expected")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        self.name = {"<": "<", ">": ">"}.get(order, "") + self.name.lstrip("<>|=")


class _Array:
    """What stands in for numpy.ndarray while a file is read; `value` is the real one."""

    value: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        self.value = _array(data, dtype, shape, "F" if fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise BadBatch("holds an array in a form that is not expected")
    return np.frombuffer(data, np.dtype(dtype.name)).reshape(shape, order=order)


class _Reader(pickle.Unpickler):
    """Nothing is looked up by name: a few names have stand-ins, and all others are refused."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

        # Made anew for each file, because a pickle may write attributes onto whatever it has in hand.
        def reconstruct(*_: Any) -> _Array:
            return _Array()

        def from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
            array = _Array()
            array.value = _array(data, dtype, shape, _text(order))
            return array

        def dtype(*arguments: Any) -> _Dtype:
            return _Dtype(*arguments)

        def encoded(text: Any, encoding: Any) -> bytes:
            if not isinstance(text, str) or _text(encoding) != "latin1":
                raise BadBatch("holds text in a form that is not expected")
            return text.encode("latin1")

        def empty() -> bytes:
            return b""

        def no_array(*_: Any) -> None:
            raise BadBatch("holds an array in a form that is not expected")

        self.stand_ins: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): no_array,  # named as an argument, never called
            ("numpy", "dtype"): dtype,
            ("_codecs", "encode"): encoded,  # how Python 3 writes bytes in the old protocols
            ("__builtin__", "bytes"): empty,
            ("builtins", "bytes"): empty,
        }
        for core in ("numpy.core", "numpy._core"):
            self.stand_ins[f"{core}.multiarray", "_reconstruct"] = reconstruct
            self.stand_ins[f"{core}.numeric", "_frombuffer"] = from_buffer

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.stand_ins:
            raise BadBatch(
                f"asks for {_short(f'{module}.{name}')}, which no batch of images needs: refused, nothing of it was run"
            )
        return self.stand_ins[module, name]


_PlainPickler: Any = pickle._Pickler
"""The one written in Python: the fast one does not let bytes be written otherwise."""


class _Python2Pickler(_PlainPickler):
    """Writes bytes as Python 2's text, as the published files hold them; every reader of those then reads these."""

    dispatch: ClassVar[dict[type, Any]] = dict(_PlainPickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        if len(value) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(value)]) + value)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_bytes


def _dumped(content: dict[bytes, Any]) -> bytes:
    buffer = io.BytesIO()
    _Python2Pickler(buffer, protocol=2).dump(content)
    # numpy's name for itself before version 2, which versions of both kinds understand.
    return buffer.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n", 1)
