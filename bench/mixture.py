"""A made set with the shape of a real one: as many questions for each image as Kvasir-VQA's validation part has, in
three stages, on JPEGs of mixed sizes. Other benches train on it; alone it writes one.

    python bench/mixture.py FOLDER [--images 4550 975 975] [--template 120]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

EACH = {1: 378, 2: 2, 6: 1, 7: 2, 8: 81, 9: 45, 10: 6, 11: 2, 12: 38, 13: 49, 14: 23, 15: 29, 16: 37, 17: 269, 18: 13}
"""Images with so many questions, of 975."""
STAGES = {1: 3086, 2: 5689, 3: 11}
"""Questions of each stage, of 8,786."""
USUAL, LARGE = ((768, 576), (720, 576)), (1280, 1024)
"""60% of the images, and 20%; the rest lies between the two of ODD."""
ODD = ((480, 400), (1920, 1072))

YES = ("yes", "no", "not relevant")
NUMBERS = tuple(map(str, range(7)))
COLOURS = ("pink", "red", "pink; red", "pink; red; white", "brown", "white")
PLACES = ("centre", "centre; upper left", "lower right", "centre; lower left; lower right", "none")
QUESTIONS = (
    ("yes or no", "Can letters or numbers be seen at the edge of the picture?", YES),
    ("yes or no", "Does the picture show anything that is not healthy?", YES),
    ("yes or no", "Is what was found easy to see?", YES),
    ("yes or no", "Is there a dark box in a corner?", YES),
    ("yes or no", "Were all polyps taken out?", YES),
    ("number", "How many polyps does the picture show?", NUMBERS),
    ("number", "How many tools does the picture show?", NUMBERS),
    ("number", "How many things were found in all?", NUMBERS),
    ("colour", "Which colours does the unhealthy part have?", COLOURS),
    ("colour", "Which colours does the landmark have?", COLOURS),
    ("place", "Where in the picture is the unhealthy part?", PLACES),
    ("place", "Where in the picture is the tool?", PLACES),
    ("place", "Where in the picture is the landmark?", PLACES),
    ("list", "Which tools are there? Name all of them.", ("none", "tube", "forceps", "tube; forceps", "clip")),
    ("list", "Which landmarks are there? Name all of them.", ("none", "z-line", "cecum", "pylorus")),
    ("list", "What is not healthy here? Name all of it.", ("polyp", "ulcerative colitis", "oesophagitis", "none")),
    ("kind", "By which procedure was the picture taken?", ("colonoscopy", "gastroscopy", "capsule endoscopy")),
    ("kind", "How large is the largest polyp?", ("none", "under 5 mm", "5 to 10 mm", "over 20 mm")),
)
ALL = "Look at the whole picture before you answer, and use only what can be seen in it."
WORDS = tuple(ALL.lower().strip(".").replace(",", "").split())


def write_mixture(
    folder: Path, images: tuple[int, int, int] = (4550, 975, 975), seed: int = 0, template: int = 0, shrink: int = 1
) -> None:
    """train, val and test.jsonl, and images/. With a `template` each type of question has an instruction of about so
    many words, most of them its own. Sides are divided by `shrink`, for a trial."""
    rng = random.Random(seed)
    for split, count in zip(("train", "val", "test"), images, strict=True):
        pictures = [(_size(rng), rng.choices(list(EACH), EACH.values())[0]) for _ in range(count)]
        write_split(folder, split, pictures, rng, template, shrink)


def write_split(
    folder: Path,
    split: str,
    pictures: Sequence[tuple[tuple[int, int], int]],
    rng: random.Random,
    template: int = 0,
    shrink: int = 1,
) -> None:
    """Of each picture its size, and how many questions it has."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[Path, tuple[int, int], int]] = []
    rows = []
    for number, ((width, height), each) in enumerate(pictures):
        name = f"{split}_{number:05d}.jpg"
        drawn.append((folder / "images" / name, (width // shrink, height // shrink), rng.randrange(2**32)))
        for kind, question, answers in rng.sample(_questions(each), each):
            row = {"image": name, "question": question, "answer": rng.choice(answers), "type": kind}
            row["stage"] = rng.choices(list(STAGES), STAGES.values())[0]
            rows.append(row | ({"instruction": _instruction(kind, question, template)} if template else {}))
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(_draw, *zip(*drawn, strict=True), chunksize=16):
            pass


def _questions(least: int) -> list[tuple[str, str, tuple[str, ...]]]:
    """All of them; where more are needed, each again in other words."""
    times = -(-least // len(QUESTIONS))
    again = [f"Look {'again, ' * n}and say: " if n else "" for n in range(times)]
    return [(kind, before + question, answers) for before in again for kind, question, answers in QUESTIONS]


def _size(rng: random.Random) -> tuple[int, int]:
    which = rng.random()
    if which < 0.6:
        return rng.choice(USUAL)
    if which < 0.8:
        return LARGE
    width, height = (rng.randint(least, most) for least, most in zip(*ODD, strict=True))
    return width, height


def _instruction(kind: str, question: str, words: int) -> str:
    """One sentence that all types share, the rest by type, the question last."""
    rng = random.Random(kind)
    own = " ".join(rng.choice(WORDS) for _ in range(max(0, words - len(WORDS))))
    return f"{ALL} This asks for a {kind}: {own}. {question}"


def _draw(path: Path, size: tuple[int, int], seed: int) -> None:
    """Neither flat nor noise; no two alike."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (size[1] // 16 + 1, size[0] // 16 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-12, 13, (size[1], size[0], 1), dtype=np.int16)
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(path, quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, nargs=3, default=(4550, 975, 975), help="of train, val and test")
    parser.add_argument("--template", type=int, default=0, help="words of an instruction for each type of question")
    args = parser.parse_args()
    write_mixture(args.folder, tuple(args.images), template=args.template)


if __name__ == "__main__":
    main()
