"""Every line and image of a question file is checked before training, and all problems come in one list."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sameday.data.problems import Problem, in_lines, report
from sameday.data.questions.audit_cache import AuditCache
from sameday.data.questions.family import QuestionFamily
from sameday.data.questions.images import MAX_ASPECT_RATIO, BadImage, check_aspect, digest, open_rgb, stamp
from sameday.data.questions.instructions import questions_lost
from sameday.data.questions.lines import NEEDED
from sameday.data.questions.names import NOT_FOUND, OUTSIDE, located, named
from sameday.data.questions.prompt import asked
from sameday.data.questions.read import OF_AN_IMAGE, TYPES, Raw, meant_keys
from sameday.data.questions.sample import ImageRef, Sample, last_user_text
from sameday.data.questions.tables import Say
from sameday.data.questions.wanted import Reader, Wanted
from sameday.data.questions.where import Tally
from sameday.spec.dataset import KEYS
from sameday.spec.errors import BadInput
from sameday.spec.words import count, first_names

SKIP = "recipe.data.on_bad=skip leaves them out"
_NAMES = {"system": "system text", "user": "question", "assistant": "answer"}


@dataclass(frozen=True)
class Audit:
    """`hints` are about the whole file: what its author may have meant. `lost` is the first image's name where none of
    several was found: then it is the folder that is wrong, and no line's problem. `tally` is what the conditions left
    of the file, `unsure` the questions of no category, and `own_words` those that no template was put around."""

    samples: list[Sample]
    problems: list[Problem]
    hints: list[str] = field(default_factory=list)
    lost: str | None = None
    tally: Tally = field(default_factory=lambda: Tally({}))
    unsure: list[Problem] = field(default_factory=list)
    own_words: int = 0


class EmptyFile(BadInput):
    """A file has no line."""


class NoneLeft(BadInput):
    """The conditions leave no question of a file, though some line has each of their fields."""


class WrongRoot(BadInput):
    """None of a file's images is where the recipe looks for them. `others` is what is wrong besides."""

    def __init__(self, root: Path, name: str, others: str) -> None:
        self.name, self.others = name, others
        super().__init__("\n".join(filter(None, [others, lost_images(root, name, [])])))


def lost_images(root: Path, name: str, files: Sequence[str]) -> str:
    """`name` is the first image that was looked for, for questions of these files."""
    listed = f"that {' and '.join(files)} name{'s' if len(files) == 1 else ''} " if files else ""
    such = f"such as {named(name)}: recipe.data.image_root may be another folder"
    return f"none of the images {listed}is under {root}, {such}"


def audit(
    path: Path,
    image_root: Path | None,
    family: QuestionFamily | None,
    limit: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    label: str | None = None,
    few: int | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008 (frozen)
    stages: Sequence[int] | None = None,
    say: Callable[[str], None] | None = None,
) -> Audit:
    """Read the file, decode each distinct image once, return the good questions and all that is wrong. An image that
    an earlier audit found good, in a file that is as it was, is not decoded again.

    `family` says which tokens must not stand in a text, and how long an image may be; None where the model is not
    known. `limit` takes the first so many lines that are not blank, good or bad. `progress` is called with the number
    of images decoded and the number of all that have to be. `label` is how problems call the file. `few` looks at so
    many questions and no more, taken image by image, as a short trial wants them. Without an `image_root` only texts
    are looked at, and no question is good. `wanted` says which lines are questions of the recipe: no other is looked
    at, nor its images. `stages` are those that a question may have, where it must have one.
    """
    root = None if image_root is None else _resolved_root(image_root)
    reader = Reader(path, label or path.name, wanted, limit, root, say or (lambda _: None))
    raws, wrong, where, hints = _read(reader, None if few is None else _image_by_image(reader, root, few))
    if not reader.tally.lines:
        raise EmptyFile(f"{path} is empty: it holds no question")
    if lacking := reader.lacking():
        raise BadInput("\n".join(lacking))
    over_instruction = wanted.prompt is not None and wanted.prompt.over_instruction
    if not over_instruction and (lost := questions_lost(raws, where, reader.label)) is not None:
        raise BadInput(lost)
    plain, own_words = raws, 0
    special = () if family is None else family.markers.special
    for number, raw in raws.items():
        wrong[number] += _text_problems(raw, special)
        wrong[number] += _stage_problems(raw.stage, stages)
    if wanted.prompt is not None:
        in_prompt = {number: asked(raw, wanted.prompt) for number, raw in raws.items()}
        own_words = list(in_prompt.values()).count(None)
        raws = {number: in_prompt[number] or raw for number, raw in raws.items()}
        for number, raw in raws.items():
            wrong[number] += _text_problems(raw, special)
    where = {number: f"{reader.label}:{place}" for number, place in where.items()}
    names = dict.fromkeys(name for raw in raws.values() for name in raw.images)
    counted: Any = {"hints": hints, "tally": reader.tally, "unsure": reader.unsure, "own_words": own_words}
    if root is None:
        return Audit([], _problems(wrong, where), **counted)

    places = {name: located(name, root) for name in names}
    about_images = len(names) > 1 and all(raw.images for raw in raws.values())
    elsewhere = (isinstance(place, str) and place.startswith((NOT_FOUND, OUTSIDE)) for place in places.values())
    if about_images and all(elsewhere):
        return Audit([], _problems(wrong, where), lost=next(iter(names)), **counted)
    files = dict.fromkeys(place for place in places.values() if isinstance(place, Path))
    longest = MAX_ASPECT_RATIO if family is None else family.max_aspect_ratio
    decoded = _decode_all(list(files), root, longest, workers, progress)
    samples: list[Sample] = []
    for number, raw in raws.items():
        refs: list[ImageRef] = []
        for name in raw.images:
            place = places[name]
            result = decoded[place] if isinstance(place, Path) else place
            if isinstance(result, ImageRef):
                refs.append(result)
            else:
                wrong[number].append(f"image {named(name)} {result}")
        if not wrong[number]:
            question = plain[number].question
            differs = question != last_user_text(raw.messages)
            told = (raw.stage, raw.type, question if differs else None)
            samples.append(Sample(number, where[number], tuple(refs), raw.messages, *told))
    return Audit(samples, _problems(wrong, where), **counted)


def check(
    path: Path,
    image_root: Path | None,
    family: QuestionFamily | None,
    limit: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    label: str | None = None,
    few: int | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008 (frozen)
    all_values: bool = False,
    all_fields: bool = False,
    say: Callable[[str], None] | None = None,
    stages: Sequence[int] | None = None,
) -> tuple[list[Sample], list[Problem]]:
    """The good questions and the problems; any problem stops, or is skipped, as `on_bad` says. With `all_values` each
    value that is asked for must occur, with `all_fields` each field that lines are skipped by.
    `say` hears what was counted on the way."""
    result = audit(path, image_root, family, limit, workers, progress, label, few, wanted, stages, say)
    listed = report(result.problems, in_lines(result.problems), path) if result.problems else ""
    unsure = _unsure(result, wanted, path, say)
    listed = "\n".join(filter(None, [listed, *result.hints, *unsure]))
    _check_left(result, listed, label or path.name, all_values, all_fields, say)
    if result.lost is not None and image_root is not None:
        raise WrongRoot(image_root, result.lost, listed)
    if result.problems and result.samples and on_bad == "stop":
        raise BadInput(f"{listed}\n{SKIP}")
    if unsure:
        raise BadInput(listed)
    if result.problems and not result.samples:
        raise BadInput(listed if image_root is None else f"{listed}\nno good question remains in {path}")
    return result.samples, result.problems


def _unsure(result: Audit, wanted: Wanted, path: Path, say: Callable[[str], None] | None) -> list[str]:
    """What is refused for it; where such questions are kept they are only said."""
    if not result.unsure or wanted.categorizer is None:
        return []
    unsure = len({problem.where for problem in result.unsure})
    heading = f"{unsure:,} question{'s have' if unsure > 1 else ' has'} no sure category:"
    listed = report(result.unsure, heading, path.with_name(f"{path.name}.unsure"))
    if wanted.categorizer.categories.on_unsure == "stop":
        return [f"{listed}\nrecipe.categories.on_unsure=keep takes them as they are"]
    if say is not None:
        say(listed)
    return []


def _check_left(
    result: Audit, listed: str, label: str, all_values: bool, all_fields: bool, say: Callable[[str], None] | None
) -> None:
    """Says how much the conditions leave; BadInput where that is nothing, or where nobody can have meant it."""
    tally = result.tally
    if tally.skipped == tally.lines:
        raise NoneLeft(f"{label}: {tally.passed_over()}; {tally.place}.skip leaves no question")
    absent, unknown = tally.missing(label), tally.unknown_skips(label) if all_fields else []
    if tally.where and not tally.taken:
        sentence = "; ".join([f"{label}: none {tally.told()[2:]}", *absent])
        kind = NoneLeft if tally.knows_fields and not listed and not unknown else BadInput
        raise kind("\n".join(filter(None, [listed, sentence, *unknown])))
    if (absent and all_values) or unknown:
        raise BadInput("\n".join(filter(None, [listed, *(absent if all_values else []), *unknown])))
    if say is not None and tally.where:
        say(f"{label}: {tally.told()}")
    if say is not None and tally.skip and (tally.skipped or all_fields):
        say(f"{label}: {tally.passed_over()}")
    if say is not None and result.own_words:
        keep = "keeps its" if result.own_words == 1 else "keep their"
        lines = count(result.own_words, "line")
        say(f"{label}: {lines} {keep} own text, and recipe.prompt is not put around it")


def _read(
    reader: Reader, chosen: set[int] | None
) -> tuple[dict[int, Raw], dict[int, list[str]], dict[int, str], list[str]]:
    """By their numbers: what was read, what is wrong with each, where each stands; and what may have been meant."""
    raws: dict[int, Raw] = {}
    wrong: dict[int, list[str]] = {}
    where: dict[int, str] = {}
    every: set[str] | None = None
    table = imaged = False
    for question in reader:
        line, value = question.line, question.value
        if chosen is not None and line.number not in chosen:
            continue
        wrong[line.number], where[line.number] = [question.wrong] if question.wrong else [], line.place
        table |= line.row is not None
        if isinstance(value, dict):
            every = set(value) if every is None else every & set(value)
            imaged |= not value.keys().isdisjoint(OF_AN_IMAGE)
        if question.raw is not None:
            raws[line.number] = question.raw
    hints = [
        f"every line has {key!r}: did you mean {ours!r}?"
        for key, ours in meant_keys(every or set()).items()
        if any(wrong.values())
    ]
    others = [repr(key) for key in sorted((every or set()) - {*KEYS, *TYPES})]
    if not raws and not hints and not imaged and others and {"question", "answer"} <= (every or set()):
        hints.append(
            f"no line has 'image': recipe.data.fields.image can name what is meant, of {first_names(others, 8)}"
        )
    if wrong and every is None and not table:
        hints.append(f"no line of {reader.path} is a JSON object; {NEEDED}")
    return raws, wrong, where, hints


def _stage_problems(stage: int | None, allowed: Sequence[int] | None) -> list[str]:
    if allowed is None or stage in allowed:
        return []
    needed = ", ".join(map(str, allowed))
    return [f"has no 'stage'; needed: {needed}" if stage is None else f"'stage' is {stage}; allowed: {needed}"]


def _problems(wrong: dict[int, list[str]], where: dict[int, str]) -> list[Problem]:
    """The same thing said twice of one line, as of an image that it lists twice, is one problem."""
    return [Problem(where[number], what) for number in wrong for what in dict.fromkeys(wrong[number])]


def _image_by_image(reader: Reader, root: Path | None, count: int) -> set[int]:
    """The lines of so many questions: all about the first image of the file, then all about the next. Lines that
    cannot be read and images that are not there come last: a trial is about the others."""
    images: dict[tuple[str, ...], list[int]] = {}
    bad: list[int] = []
    for question in reader:
        images_of = () if question.raw is None else tuple(question.raw.images)
        there = root is None or all(isinstance(located(name, root), Path) for name in images_of)
        if question.raw is not None and there:
            images.setdefault(images_of, []).append(question.line.number)
        else:
            bad.append(question.line.number)
    return set([number for lines in (*images.values(), bad) for number in lines][:count])


def _text_problems(raw: Raw, special_tokens: Sequence[str]) -> list[str]:
    problems = []
    last_user = max(i for i, message in enumerate(raw.messages) if message.role == "user")
    for number, message in enumerate(raw.messages):
        name, text = _NAMES[message.role], message.text
        bare_user = message.role == "user" and (number == last_user or not message.parts)
        if (message.role == "assistant" or bare_user) and not text.strip():
            problems.append(f"{name} is empty")
        for token in special_tokens:
            if token in text:
                problems.append(f"{name} holds {token!r}, which would become a real token and not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            problems.append(f"{name} holds half of a surrogate pair (\\u{code:04x}), which is no character")
    return problems


def _resolved_root(image_root: Path) -> Path:
    root = image_root.resolve()
    if not root.is_dir():
        raise BadInput(f"image_root {image_root} is not a folder")
    return root


def _inspect(path: Path) -> ImageRef | str:
    try:
        before = stamp(path)
        image = open_rgb(path)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return ImageRef(path, digest(image), image.width, image.height, before)


def _judge(image: ImageRef, max_aspect_ratio: int) -> ImageRef | str:
    try:
        check_aspect(image.width, image.height, max_aspect_ratio)
    except BadImage as error:
        return str(error)
    return image


def _inspect_all(paths: Sequence[Path], workers: int | None) -> Iterator[ImageRef | str]:
    workers = cores() if workers is None else workers
    # Threads: decoding and hashing let go of the interpreter's lock, and nothing has to be started or sent.
    with ThreadPoolExecutor(max(1, workers)) as pool:
        yield from pool.map(_inspect, paths)


def _decode_all(
    paths: Sequence[Path],
    root: Path,
    max_aspect_ratio: int,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> dict[Path, ImageRef | str]:
    with AuditCache(root) as cache:
        known = {path: _judge(image, max_aspect_ratio) for path in paths if (image := cache.get(path)) is not None}
        unknown = [path for path in paths if path not in known]
        results = dict(known)
        for path, result in zip(unknown, _inspect_all(unknown, workers), strict=True):
            results[path] = judged = _judge(result, max_aspect_ratio) if isinstance(result, ImageRef) else result
            if isinstance(judged, ImageRef):
                cache.add(judged)
            if progress is not None:
                progress(len(results) - len(known), len(unknown))
    return results


def cores() -> int:
    """The cores this process may use: a container or a batch job often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tenths(name: str, say: Say) -> Callable[[int, int], None]:
    """A line at each tenth of a long audit; nothing for a short one."""
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        if total >= 500 and done * 10 // total > shown:
            shown = done * 10 // total
            say(f"checking {name}: {done} of {total} images decoded")

    return show
