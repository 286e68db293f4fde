"""`sameday data`: what a set of questions is like before anything is trained on it, on one screen, and a recipe to
start from."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sameday.data.problems import Problem, in_lines, report
from sameday.data.questions.audit import audit, lost_images, tenths
from sameday.data.questions.audit_cache import cache_home
from sameday.data.questions.guess import by_split, image_root, meaning_of, question_files
from sameday.data.questions.hub import brought, located, name_of
from sameday.data.questions.lines import read_lines
from sameday.data.questions.sample import Sample
from sameday.data.questions.split import divided, images_in, told
from sameday.data.questions.summary import (
    ORDERS,
    Spread,
    Summary,
    images_a_step,
    on_several_sides,
    steps_in,
    summary_of,
)
from sameday.data.questions.tables import Say
from sameday.data.questions.wanted import Wanted
from sameday.spec.dataset import Data, QuestionSet, Split, hub_name
from sameday.spec.errors import BadInput
from sameday.spec.load import load_recipe, recipe_from, resolve_path
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import count, first_names, in_one_line, tell
from sameday.spec.writing import check_output, write_text

if TYPE_CHECKING:
    from sameday.data.questions.encode import Encoded, Encoder
    from sameday.data.questions.family import QuestionFamily

WIDTH = 100
"""Columns that are used at most, however wide a terminal is."""
STEPS = 64
"""Steps whose tokens stand for an epoch's."""
SHOWN = 2
"""Questions that are shown as the model reads them."""
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
    return _guessed(splits, model, root, say)


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
    changes: dict[str, Any] = {} if model is None else {"model": model}
    if root is not None:
        changes["data"] = recipe.data.model_copy(update={"image_root": str(root.absolute())})
    recipe = recipe.model_copy(update=changes)
    return Given(recipe.data, path.resolve().parent, recipe)


def _guessed(splits: Mapping[str, Path], model: str | None, root: Path | None, say: Say) -> Given:
    """The recipe's data as names of files, columns and images suggest it."""
    train = splits["train"]
    home = train.absolute().parent
    unpack_into = root or (home if name_of(train) is None else _own_folder(train))

    def rows() -> Iterator[Any]:
        for line in read_lines(train, images=unpack_into, say=say):
            try:
                yield line.parse()
            except ValueError:
                continue

    meaning = meaning_of(rows())
    root = root or (image_root(meaning.images, home) if meaning.images else unpack_into)
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
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _model(name: str) -> str:
    """A folder is found from anywhere."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def look(given: Given, family: QuestionFamily | None, say: Say) -> Looked:
    """Every line and image of every split, as a run would check them; what is bad is listed, and the rest looked at."""
    data, looked = given.data, Looked()
    for part in data.sets:
        _look_at(given, part, family, looked, say)
    if not any(looked.splits.values()):
        train = resolve_path(given.home, data.train)
        listed = report(looked.problems, in_lines(looked.problems), train) if looked.problems else ""
        raise BadInput("\n".join(filter(None, [listed, *looked.said, f"no good question remains in {train}"])))
    return looked


def _look_at(given: Given, part: QuestionSet, family: QuestionFamily | None, looked: Looked, say: Say) -> None:
    """One of several sets that are mixed, or the only one."""
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
        looked.said += result.hints
        looked.said += [f"{label}: {result.tally.told()}"] if wanted.where else []
        looked.said += [f"{label}: {result.tally.passed_over()}"] if wanted.skip else []
        looked.said += result.tally.missing(label)
        if result.lost is not None:
            lost[label] = result.lost
    if lost:
        raise BadInput(lost_images(root, next(iter(lost.values())), list(lost)) + "; --image-root names it")
    if part.split is not None:
        sides = divided(splits["train"], part.split)
        looked.said.append(told(Path(part.train).name, sides, part.split))
        splits |= sides
    for name, samples in splits.items():
        looked.splits.setdefault(name, []).extend(samples)


# The screen


def screen(given: Given, looked: Looked, encoder: Encoder | None, width: int) -> Iterator[str]:
    """All of it, a line each, none wider than so many columns unless a word of it is."""
    there = {name: summary_of(side) for name, side in looked.splits.items() if side}
    first = next(iter(there))
    sets = given.data.sets
    files = [f"{_short(given, getattr(p, name))} ({name})" for p in sets for name in looked.rows if getattr(p, name)]
    roots = dict.fromkeys(_short(given, part.image_root) for part in sets)
    yield from _wrapped(f"{', '.join(files)}; images in {', '.join(roots)}", width)
    for each in (*given.guessed, *looked.said):
        yield from _wrapped(each, width)
    yield ""
    yield from _table(there, looked.rows)
    yield from _sentences(there[first], width)
    for (one, other), images in on_several_sides(looked.splits).items():
        yield from _wrapped(
            f"{count(images, 'image')} of {one} are in {other} too: scores of it will be too good", width
        )
    yield ""
    yield from _sharing(looked.splits[first], encoder, given.recipe, width)
    yield ""
    yield from _samples(looked.splits[first], encoder, width)
    if looked.problems:
        yield ""
        of = resolve_path(given.home, given.data.train)
        for line in report(looked.problems, in_lines(looked.problems), of).splitlines():
            yield from _wrapped(line, width)


def _short(given: Given, file: str) -> str:
    path = resolve_path(given.home, file)
    inside = path.is_relative_to(given.home)
    return str(path.relative_to(given.home)) if inside and path != given.home else str(path)


def _wrapped(text: str, width: int, indent: str = "    ") -> list[str]:
    """A word that is too long, such as a path, stays whole."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [""]


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return (
        f"{spread.least:,}-{spread.most:,}, median {spread.middle:,.0f}"
        if spread.least < spread.most
        else f"{spread.most:,}"
    )


def _table(there: Mapping[str, Summary], rows: Mapping[str, int]) -> Iterator[str]:
    lines = {
        "rows in the file": lambda name, _: f"{rows[name]:,}" if name in rows else "of train",
        "questions": lambda _, each: f"{each.questions:,}",
        "images, by content": lambda _, each: f"{each.images:,}",
        "questions per image": lambda _, each: _spread(each.per_image),
        "words of an answer": lambda _, each: _spread(each.words),
        "asked twice": lambda _, each: f"{each.repeated:,}",
        "with another answer": lambda _, each: f"{each.disagreeing:,}",
        "images of two names": lambda _, each: f"{each.renamed:,}",
    }
    yield f"{'':20}" + "".join(f"{name:>22}" for name in there)
    for label, cell in lines.items():
        yield f"{label:20}" + "".join(f"{cell(name, each):>22}" for name, each in there.items())


def _sentences(summary: Summary, width: int) -> Iterator[str]:
    yield from _wrapped(f"image sizes: {_most(Counter({f'{w}×{h}': n for (w, h), n in summary.sizes.items()}))}", width)
    yield from _wrapped(f"answers: {_most(summary.answers, summary.questions)}", width)
    if summary.stages:
        yield from _wrapped(f"stages: {_most(Counter({str(k): v for k, v in summary.stages.items()}))}", width)
    if summary.types:
        yield from _wrapped(f"types: {_most(summary.types)}", width)


def _most(counted: Counter[str], of: int | None = None, listed: int = 5) -> str:
    if not counted:
        return "none"
    parts = [
        f"{in_one_line(text, 30)} ({n / of:.0%})" if of else f"{in_one_line(text, 30)} ({n:,})"
        for text, n in counted.most_common(listed)
    ]
    more = len(counted) - listed
    return ", ".join(parts) + (f" and {more:,} others" if more > 0 else "")


def _sharing(samples: Sequence[Sample], encoder: Encoder | None, recipe: VlmRecipe | None, width: int) -> Iterator[str]:
    """What computing each image of a step once gives, in each order."""
    batch = min(16 if recipe is None else recipe.effective_batch, len(samples))
    title = f"steps of {count(batch, 'question')}"
    yield f"{title:26}{'images a step':>16}" + (f"{'tokens alone':>16}{'shared':>16}{'fewer':>10}" if encoder else "")
    for kind in ORDERS:
        steps = steps_in(kind, samples, batch)
        line = f"  order {kind:18}{images_a_step(steps, samples):>16,.1f}"
        if encoder is not None:
            alone, shared = tokens_of(steps, samples, encoder)
            line += f"{alone:>16,.0f}{shared:>16,.0f}{f'{alone / shared:.1f} times':>10}"
        yield line
    few = len(samples) > STEPS * batch
    yield from _wrapped(
        f"Tokens are those of a step, the mean of {f'{STEPS} steps' if few else 'all steps'}."
        if encoder
        else "With --model: in tokens too.",
        width,
    )


def tokens_of(steps: Sequence[Sequence[int]], samples: Sequence[Sample], encoder: Encoder) -> tuple[float, float]:
    """Of a step on average: each question by itself, and each image, and the text that its questions share, once."""
    from sameday.data.questions.partition import Cut, Item, micro_batches

    chosen = steps[:: -(-len(steps) // STEPS)]
    alone = shared = 0
    for step in chosen:
        encoded = [encoder.encode(samples[i]) for i in step]
        items = [Item(n, each.length, each.prefix, each.key, each.text) for n, each in enumerate(encoded)]
        (parts,) = micro_batches(items, Cut(True, True, sys.maxsize))
        alone += sum(each.length for each in encoded)
        shared += sum(unit.tokens for part in parts for unit in part)
    return alone / len(chosen), shared / len(chosen)


def _samples(samples: Sequence[Sample], encoder: Encoder | None, width: int) -> Iterator[str]:
    """Some questions of different images: as the model reads them, or as their file has them."""
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.image_key, sample)
    for sample in list(first.values())[:SHOWN]:
        sizes = ", ".join(f"{image.width}×{image.height}" for image in sample.images) or "no image"
        if encoder is None:
            yield from _wrapped(f"{sample.where} ({sizes}): {in_one_line(sample.prompt, 300)}", width)
            yield from _wrapped(f"    answer: {in_one_line(sample.answer, 300)}", width)
            continue
        encoded = encoder.encode(sample)
        prompt, answer = as_read(encoded, encoder)
        yield f"{sample.where} ({sizes}), {count(encoded.length, 'token')}, as the model reads it:"
        lines = [*prompt.splitlines(), "learned: " + answer.replace("\n", "\\n")]
        room = width - 4
        yield from (f"    {line[at : at + room]}" for line in lines for at in range(0, max(1, len(line)), room))


def as_read(encoded: Encoded, encoder: Encoder) -> tuple[str, str]:
    """The tokens before the first answer and those that are learned, decoded; an image's as one with their number."""
    pieces, runs = list[str](), list[tuple[bool, list[int]]]()
    end = int(encoded.targets.argmax())
    for token in encoded.tokens[:end].tolist():
        image = token == encoder.image_token
        if not runs or runs[-1][0] != image:
            runs.append((image, []))
        runs[-1][1].append(token)
    for image, tokens in runs:
        text = encoder.tokenizer.decode(tokens[:1] if image else tokens)
        pieces.append(f"{text}×{len(tokens)}" if image else text)
    return "".join(pieces), encoder.tokenizer.decode(encoded.tokens[encoded.targets].tolist())


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
