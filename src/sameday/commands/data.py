"""`sameday data`: what a set of questions is like before anything is trained on it, on one screen, and a recipe to
start from."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sameday.commands.data_screen import screen
from sameday.data.problems import Problem, in_lines, report
from sameday.data.questions.audit import audit, lost_images, tenths
from sameday.data.questions.audit_cache import cache_home
from sameday.data.questions.guess import by_split, image_root, meaning_of, question_files
from sameday.data.questions.hub import brought, located, name_of
from sameday.data.questions.lines import preview
from sameday.data.questions.sample import SET_SPAN, Sample
from sameday.data.questions.sets import cannot_unpack
from sameday.data.questions.split import divided, images_in, told
from sameday.data.questions.tables import Say
from sameday.data.questions.wanted import Wanted
from sameday.spec.dataset import Data, QuestionSet, Split, hub_name
from sameday.spec.errors import BadInput, refuse
from sameday.spec.load import load_recipe, recipe_from, resolve_path
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import count, first_names, tell
from sameday.spec.writing import check_folder, check_output, write_text

if TYPE_CHECKING:
    from sameday.data.questions.encode import Encoder
    from sameday.data.questions.family import QuestionFamily

WIDTH = 100
"""Columns that are used at most, however wide a terminal is."""
BEGINS = "# A recipe to start from"
SEEDS = 100
"""Seeds that are tried for a set so small that a side of it may be empty."""


@dataclass(frozen=True)
class Given:
    """What is looked at: files and what they mean, and where paths start. `recipe` where a model is known."""

    data: Data
    home: Path
    recipe: VlmRecipe | None = None
    guessed: tuple[str, ...] = ()


@dataclass
class Looked:
    """What was found in the files of each split."""

    splits: dict[str, list[Sample]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """A sentence about files of which no image was found: then it is a folder that is wrong."""


def inspect_data(what: Sequence[str], model: str | None, out: Path | None, root: Path | None) -> None:
    """Progress goes to standard error, so that the screen can be kept."""

    def say(text: str) -> None:
        tell(text, sys.stderr)

    if out is not None and model is None:
        raise BadInput(f"--recipe {out}: needs --model, the name or folder of the model that is to be trained")
    if out is not None and _is_recipe(what):
        raise BadInput(f"--recipe {out}: is for files of questions, and {what[0]} is a recipe already")
    check_output("--recipe", out, map(Path, what), BEGINS.encode())
    given = _given(what, model, root, say)
    if wrong := cannot_unpack(given.home, given.data.sets):
        raise BadInput("\n".join(wrong))
    encoder = None
    try:
        encoder = None if given.recipe is None else _encoder(given.recipe, given.home, say)
    except BadInput as error:
        if model is not None:
            raise
        say(f"tokens are not counted: {error}")  # a recipe's data can be looked at without its model
    looked = look(given, None if encoder is None else encoder.family, say)
    for line in screen(given, looked, encoder, min(shutil.get_terminal_size((WIDTH, 40)).columns, WIDTH)):
        tell(line)
    refuse(looked.lost)
    if out is not None and model is not None:
        write_text(out, recipe_text(given, looked, model, out.absolute().parent))
        tell(f"\nwritten: {out}; `sameday train {out}` trains from it")


# What is looked at


def _given(what: Sequence[str], model: str | None, root: Path | None, say: Say) -> Given:
    if _is_recipe(what):
        return _of_recipe(Path(what[0]), model, root)
    paths = [_brought(each, say) for each in what]
    if missing := [str(each) for each in paths if not each.exists() and not _is_pattern(each)]:
        raise BadInput(f"{first_names(missing)}: not found; files of questions, a folder or a recipe are needed")
    files = [file for path in paths for file in (question_files(path) if path.is_dir() else [path])]
    splits = by_split(files)
    for file in files:
        if file not in splits.values():
            say(f"{file}: is not looked at, because its name says neither train, val nor test")
    return _guessed(splits, model, root)


def _brought(what: str, say: Say) -> Path:
    """A file or a folder, of a set on the Hub too."""
    try:
        name = hub_name(what)
    except ValueError as error:
        raise BadInput(f"{what}: {error}") from None
    return Path(what) if name is None else brought(name, say) / (name.path or "")


def _is_recipe(what: Sequence[str]) -> bool:
    return len(what) == 1 and Path(what[0]).suffix.lower() in (".yaml", ".yml")


def _is_pattern(path: Path) -> bool:
    return any(mark in path.name for mark in "*?[")


def _of_recipe(path: Path, model: str | None, root: Path | None) -> Given:
    recipe = load_recipe(path)
    if not isinstance(recipe, VlmRecipe):
        raise BadInput(f"{path}: is a recipe of task {recipe.task}, which has no questions about images")
    changes: dict[str, Any] = {} if model is None else {"model": _model(model)}
    if root is not None:
        changes["data"] = recipe.data.model_copy(update={"image_root": str(root.absolute())})
    recipe = recipe.model_copy(update=changes)
    return Given(recipe.data, path.resolve().parent, recipe)


def _guessed(splits: Mapping[str, Path], model: str | None, root: Path | None) -> Given:
    """The recipe's data as names of files, columns and images suggest it."""
    train = splits["train"]
    home = train.absolute().parent
    meaning = meaning_of(preview(train))
    root = root or (image_root(meaning.images, home) if meaning.images else None)
    if root is None and name_of(train) is not None:
        root = _own_folder(train)
    values: dict[str, Any] = {name: str(file.absolute()) for name, file in splits.items()}
    values |= {"fields": meaning.fields, "where": meaning.where, "skip": meaning.skip}
    values["image_root"] = str((root or home).absolute())
    guessed = [
        *(f"{theirs} is taken for {ours}" for ours, theirs in meaning.fields.items()),
        *(f"{name} has several values, of which {' and '.join(one)} is taken" for name, one in meaning.where.items()),
        *(f"{name} {' and '.join(map(repr, values))} is none, and skipped" for name, values in meaning.skip.items()),
    ]
    recipe = None
    if model is not None:
        made = recipe_from({"model": _model(model), "data": values})
        assert isinstance(made, VlmRecipe)
        recipe = made
    return Given(Data.model_validate(values) if recipe is None else recipe.data, home, recipe, tuple(guessed))


def _own_folder(train: Path) -> Path:
    """Nothing is written into the Hub's cache: images of its tables go to ours."""
    cache = cache_home()
    if cache is None:
        raise BadInput(f"{train}: there is no cache folder for its images; --image-root names one")
    folder = cache / "unpacked" / hashlib.blake2b(str(train).encode(), digest_size=6).hexdigest()
    check_folder(folder, f"{train}: its images are unpacked into")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _model(name: str) -> str:
    """A folder is found from anywhere."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def look(given: Given, family: QuestionFamily | None, say: Say) -> Looked:
    """Every line and image of every split, as a run would check them; what is bad is listed, and the rest looked at."""
    data, looked = given.data, Looked()
    for number, part in enumerate(data.sets):
        for name, samples in _look_at(given, part, family, looked, say).items():
            numbered = (replace(each, id=each.id + number * SET_SPAN) for each in samples)
            looked.splits.setdefault(name, []).extend(numbered)
    if not any(looked.splits.values()):
        refuse(looked.lost)
        train = resolve_path(given.home, data.train)
        listed = report(looked.problems, in_lines(looked.problems), train) if looked.problems else ""
        raise BadInput("\n".join(filter(None, [listed, *looked.said, f"no good question remains in {train}"])))
    return looked


def _look_at(
    given: Given, part: QuestionSet, family: QuestionFamily | None, looked: Looked, say: Say
) -> dict[str, list[Sample]]:
    """The good questions of one of several sets that are mixed, or of the only one; `looked` hears of all else."""
    data, lost, splits = given.data, dict[str, str](), dict[str, list[Sample]]()
    root = resolve_path(given.home, part.image_root)
    wanted = Wanted(data.where_of(part), None, None, part.skip, part.fields)
    if given.recipe is not None:
        wanted = Wanted.by(given.recipe, given.home, part)
    for name in ("train", "val", "test"):
        file = getattr(part, name)
        if file is None:
            continue
        path = located(given.home, file, name, say)
        label = path.name
        result = audit(path, root, family, data.limit, progress=tenths(name, say), label=label, wanted=wanted, say=say)
        splits[name], looked.rows[name] = result.samples, looked.rows.get(name, 0) + result.tally.lines
        looked.problems += result.problems
        looked.said += [hint for hint in result.hints if hint not in looked.said]
        looked.said += [f"{label}: {result.tally.told()}"] if wanted.where else []
        skipped = wanted.skip and (result.tally.skipped or name == "train")
        looked.said += [f"{label}: {result.tally.passed_over()}"] if skipped else []
        looked.said += result.tally.missing(label)
        looked.said += result.tally.unknown_skips(label) if name == "train" else []
        if result.lost is not None:
            lost[label] = result.lost
    if lost:
        looked.lost.append(lost_images(root, next(iter(lost.values())), list(lost)) + "; --image-root names it")
    if part.split is not None and splits["train"]:
        sides = divided(splits["train"], part.split)
        looked.said.append(told(Path(part.train).name, sides, part.split))
        splits |= sides
    return splits


# The recipe


def recipe_text(given: Given, looked: Looked, model: str, folder: Path) -> str:
    """A recipe with what was guessed, whose paths start at `folder`. It trains, or there is no question to train on."""
    old = given.data
    data: dict[str, Any] = {
        name: file if (file := getattr(old, name)).startswith("hf:") else _from(folder, resolve_path(given.home, file))
        for name in ("train", "val", "test")
        if getattr(old, name) is not None
    }
    data["image_root"] = _from(folder, resolve_path(given.home, old.image_root))
    data |= {name: dict(getattr(old, name)) for name in ("fields", "where", "skip") if getattr(old, name)}
    data |= {name: {key: list(each) for key, each in data[name].items()} for name in ("where", "skip") if name in data}
    split = _split(looked.splits)
    train = divided(looked.splits["train"], split)["train"] if split is not None else looked.splits["train"]
    data |= {} if split is None else {"split": split.model_dump()}
    data |= {"on_bad": "skip"} if looked.problems else {}
    values: dict[str, Any] = {"model": _model(model), "data": data, "order": "by_image"}
    values |= {"effective_batch": min(16, len(train)), "learning_rate": 5e-5, "num_epochs": 3}
    recipe_from(values)
    notes = {
        "split": "shares of the images, by content",
        "fields": "ours: theirs",
        "on_bad": f"{count(len({each.where for each in looked.problems}), 'line')} with problems",
        "order": "an image's questions together: what sharing needs",
    }
    return "\n".join([f"{BEGINS}, by `sameday data`; every other field has its default.", *_yaml(values, notes), ""])


def _yaml(values: Mapping[str, Any], notes: Mapping[str, str], indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if name == "data":
            yield "data:"
            yield from _yaml(value, notes, "  ")
            continue
        # A list of one, so that a plain text gets no mark of an end.
        written = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=sys.maxsize)
        line = f"{indent}{name}: {written.strip()[1:-1]}"
        yield f"{line}  # {notes[name]}" if name in notes else line


def _from(folder: Path, path: Path) -> str:
    """As a recipe in this folder names it: below it, or from the root."""
    if (name := name_of(path)) is not None:
        return name
    path = Path(os.path.abspath(path))
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _split(splits: Mapping[str, Sequence[Sample]]) -> Split | None:
    """Shares for what there is no file of; of a small set a seed under which no side is empty. None where both are
    there, or where there are too few images."""
    held = {"val": 0.1} if "val" not in splits else {}
    held |= {"test": 0.1} if "test" not in splits and "val" not in splits else {}
    if not held or images_in(splits["train"]) < 2 * (1 + len(held)):
        return None
    for seed in range(SEEDS):
        sides = divided(splits["train"], split := Split(seed=seed, **held))
        if all(sides.values()) and images_in(sides["train"]) * 2 > images_in(splits["train"]):
            return split
    return None


def _encoder(recipe: VlmRecipe, home: Path, say: Say) -> Encoder:
    """The model's tokenizer, template and image settings; none of its weights."""
    from transformers import AutoConfig, AutoTokenizer

    from sameday.data.questions.encode import Encoder
    from sameday.data.questions.processor import ImageProcessor
    from sameday.models.families import family_of
    from sameday.spec.load import resolve_model
    from sameday.tasks.registry import setup_of

    setup_of(recipe, home).check_model(say)
    name, revision = resolve_model(home, recipe.model), recipe.revision
    family = family_of(AutoConfig.from_pretrained(name, revision=revision).model_type)
    limits = (recipe.image_backend, recipe.min_pixels, recipe.max_pixels)
    processor = ImageProcessor.load(family, name, revision, *limits)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    return Encoder(tokenizer, processor, recipe.system_prompt, recipe.max_length, recipe.answer_end)
