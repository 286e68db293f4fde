"""Small sets with the shapes of those that people download: columns, folders and kinds of files as they are there."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ASKED = ("is there a polyp?", "how many polyps are there?", "what colour is it?", "where is it?", "what size is it?")
ANSWERS = ("yes", "no", "2", "red", "in the upper left; in the middle")


def jpeg(number: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """Another picture for each number."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size).save(file, format="JPEG")
    return file.getvalue()


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], group: int = 8) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def kvasir(folder: Path, images: int = 9) -> Path:
    """One split in parts; the image's bytes in every row, some answers "nan"."""
    rows = [
        {
            "source": "HyperKvasir",
            "question": question,
            "answer": "nan" if number == 1 and n == 2 else ANSWERS[(number + n) % len(ANSWERS)],
            "img_id": f"cl8k2{number}",
            "image": {"bytes": jpeg(number), "path": f"{number}.jpg"},
        }
        for number in range(images)
        for n, question in enumerate(ASKED)
    ]
    half = len(rows) // 2
    for part, some in enumerate((rows[:half], rows[half:])):
        write_parquet(folder / f"data/raw-{part:05d}-of-00002.parquet", some)
    return folder


def kvasir_x1(folder: Path, images: int = 9) -> Path:
    """Train and test, a complexity, lists of what a question was made of and of its classes."""

    def rows(numbers: range) -> list[dict[str, Any]]:
        return [
            {
                "image": {"bytes": jpeg(number), "path": None},
                "img_id": f"cl8k2{number}",
                "complexity": 1 + n % 3,
                "question": question,
                "answer": f"It is {ANSWERS[n]}.",
                "original": [{"q": question, "a": ANSWERS[n]}, {"q": ASKED[0], "a": "yes"}],
                "question_class": ["polyp_type", "color"][: 1 + n % 2],
            }
            for number in numbers
            for n, question in enumerate(ASKED)
        ]

    write_parquet(folder / "data/train-00000-of-00001.parquet", rows(range(2, images)))
    write_parquet(folder / "data/test-00000-of-00001.parquet", rows(range(2)))
    return folder


def slake(folder: Path, images: int = 9) -> Path:
    """JSON arrays in two languages; each image in a folder of its own, beside JSON that holds no questions."""
    rng = random.Random(0)
    for number in range(images):
        place = folder / f"imgs/xmlab{number}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "source.jpg").write_bytes(jpeg(number, (48, 48)))
        (place / "detection.json").write_text(json.dumps([{"Liver": [1.0, 2.0, 3.0, 4.0]}]))
    numbers = {"train": range(2, images), "validate": range(1), "test": range(1, 2)}
    for name, some in numbers.items():
        rows = [
            {
                "img_id": number,
                "img_name": f"xmlab{number}/source.jpg",
                "question": "这是什么?" if language == "zh" else question,
                "answer": rng.choice(ANSWERS),
                "q_lang": language,
                "location": "Abdomen",
                "modality": "MRI",
                "answer_type": "OPEN" if n % 2 else "CLOSED",
                "base_type": "vqa",
                "content_type": "Modality",
                "triple": ["vhead", "_", "_"],
                "qid": 100 * number + n,
            }
            for number in some
            for n, (question, language) in enumerate([*((each, "en") for each in ASKED[:3]), (ASKED[0], "zh")])
        ]
        (folder / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    return folder


SHAPES: dict[str, Callable[[Path], Path]] = {"kvasir": kvasir, "kvasir_x1": kvasir_x1, "slake": slake}
