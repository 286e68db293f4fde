"""Coloured shapes on a coloured ground, about nine questions each: a set that a tiny model can learn."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from sameday.spec.evaluation import FINDINGS, QUESTION, Evaluation

GROUNDS = {
    "white": (245, 245, 245),
    "black": (12, 12, 12),
    "grey": (128, 128, 128),
    "pink": (250, 190, 205),
    "cyan": (130, 225, 235),
    "brown": (105, 65, 35),
}
COLOURS = {"red": (225, 20, 20), "green": (15, 150, 30), "blue": (25, 50, 225), "yellow": (250, 225, 20)}
KINDS = ("circle", "square", "triangle")
CELLS = ("top left", "top right", "bottom left", "bottom right")
# With one wording for each note, a model tells notes apart by single words, wherever these stand in a prompt: behind
# earlier findings it then answers one of them. With several it has learned that the last line is what is asked.
WORDINGS = {
    "background": (
        "background",
        "ground colour",
        "Which colour has the background?",
        "Name the colour of the background.",
    ),
    "count": ("count", "number of shapes", "How many shapes can you see?", "Count the shapes."),
    "colour": (
        "{}, colour",
        "{} corner: colour",
        "Which colour has the shape at the {}?",
        "Name the colour of the shape in the {} corner.",
    ),
    "shape": ("{}, shape", "{} corner: shape", "Which shape is at the {}?", "Name the shape in the {} corner."),
    "there": ("any {}", "{}: yes or no", "Can you see a {}?", "Say whether a {} is there."),
}

Row = dict[str, Any]
Scene = dict[str, tuple[str, str]]
"""What stands in each cell that is not empty: a kind and a colour."""
Ask = Callable[[str, Scene, random.Random], list[Row]]
"""Questions about a scene on its ground."""


def draw(
    out: Path,
    train_images: int,
    val_images: int,
    seed: int,
    size: int = 96,
    test_images: int = 0,
    ask: Ask | None = None,
) -> None:
    """Write `images/*.png`, `train.jsonl` and `val.jsonl` into `out`, and `test.jsonl` where images for it are asked
    for. Equal seeds give equal sets."""
    folder = out / "images"
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": train_images, "val": val_images} | ({"test": test_images} if test_images else {})
    for split, count in splits.items():
        rows: list[Row] = []
        for index in range(count):
            # Keyed by split and number, so that a larger set begins with the smaller one.
            rng = random.Random(f"{seed} {split} {index}")
            name = f"images/{split}-{index:05d}.png"
            ground, scene = rng.choice(list(GROUNDS)), _scene(rng)
            _paint(ground, scene, size, rng).save(out / name)
            rows += [{"image": name, **row} for row in (ask or _questions)(ground, scene, rng)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{split}.jsonl").write_text(text, encoding="utf-8")


def majority_baseline(train_rows: Sequence[Mapping[str, Any]], val_rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of `val_rows` that each question's most frequent training answer gets right, image unseen."""
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    overall: Counter[str] = Counter()
    for row in train_rows:
        answers[row["question"]][row["answer"]] += 1
        overall[row["answer"]] += 1
    right = 0
    for row in val_rows:
        counts = answers.get(row["question"], overall)
        right += counts.most_common(1)[0][0] == row["answer"]
    return right / len(val_rows)


def _scene(rng: random.Random) -> Scene:
    # Never all kinds and never all colours: "is there a ...?" then always has a true "no".
    kinds = rng.sample(KINDS, rng.randint(1, len(KINDS) - 1))
    colours = rng.sample(list(COLOURS), rng.randint(1, len(COLOURS) - 1))
    cells = rng.sample(CELLS, rng.randint(1, len(CELLS)))
    return {cell: (rng.choice(kinds), rng.choice(colours)) for cell in sorted(cells)}


def _paint(ground: str, scene: Scene, size: int, rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (size, size), GROUNDS[ground])
    pen = ImageDraw.Draw(image)
    for cell, (kind, colour) in scene.items():
        radius = rng.uniform(0.15, 0.19) * size
        room = size / 4 - radius - 1
        x = size * (0.75 if "right" in cell else 0.25) + rng.uniform(-room, room)
        y = size * (0.75 if "bottom" in cell else 0.25) + rng.uniform(-room, room)
        box = (x - radius, y - radius, x + radius, y + radius)
        if kind == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif kind == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLOURS[colour])
    return image


def _questions(ground: str, scene: Scene, rng: random.Random) -> list[Row]:
    """In three stages, each with questions of several types, as those of real stages are."""
    rows = [
        _row("What colour is the background?", ground, 3),
        _row("How many shapes are there?", str(len(scene)), 2),
    ]
    for cell, stage in zip(CELLS, (1, 2, 3, 3), strict=True):
        colour = scene[cell][1] if cell in scene else "none"
        rows.append(_row(f"What colour is the shape in the {cell} corner?", colour, stage))
    kinds = {kind for kind, _ in scene.values()}
    colours = {colour for _, colour in scene.values()}
    there = _is_there(KINDS, kinds, "Is there a {}?", rng.randint(1, 2), rng)
    there += _is_there(tuple(COLOURS), colours, "Is there a {} shape?", rng.randint(1, 2), rng)
    rows += [{**row, "stage": rng.randint(1, 3)} for row in there]
    rng.shuffle(rows)
    return rows


def notes(ground: str, scene: Scene, rng: random.Random) -> list[Row]:
    """The same scenes in other words, for a model to learn from before it meets the questions: `WORDINGS`, each corner
    with its colour and its shape. Some follow what is known already of the scene, as a pretrained model has read."""

    def note(what: str, answer: str, stage: int, about: str = "") -> Row:
        return _row(rng.choice(WORDINGS[what]).format(about), answer, stage)

    rows = [note("background", ground, 1), note("count", str(len(scene)), 2)]
    for cell in CELLS:
        kind, colour = scene.get(cell, ("nothing", "none"))
        rows += [note("colour", colour, 3, cell), note("shape", kind, 3, cell)]
    there = {word for thing in scene.values() for word in thing}
    words = rng.sample([*KINDS, *COLOURS], 3)
    rows += [note("there", "yes" if word in there else "no", 1, word) for word in words]
    return [_behind(rng.sample(rows, rng.randint(1, 6)), row) if rng.random() < 0.4 else row for row in rows]


def _behind(known: Sequence[Row], row: Row) -> Row:
    """A note behind others, in the words in which an evaluation puts a question behind earlier findings."""
    others = [f"- {each['question']} {each['answer']}" for each in known if each is not row]
    if not others:
        return row
    text = Evaluation().context.replace(FINDINGS, "\n".join(others)).replace(QUESTION, row["question"])
    return {**row, "question": text}


def _is_there(words: Sequence[str], present: set[str], form: str, count: int, rng: random.Random) -> list[Row]:
    """Questions whose answer is drawn first, so that yes and no are as frequent as each other."""
    yes = rng.sample(sorted(present), len(present))
    no = rng.sample([word for word in words if word not in present], len(words) - len(present))
    # Two questions are one of each: drawn one by one, the larger side would run dry less often.
    answers = ["yes", "no"] if count == 2 else [rng.choice(["yes", "no"])]
    return [_row(form.format((yes if answer == "yes" else no).pop()), answer, 1) for answer in answers]


def _row(question: str, answer: str, stage: int) -> Row:
    return {"question": question, "answer": answer, "stage": stage}
