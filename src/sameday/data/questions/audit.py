"""Every line and image of a question file is checked before training, and all problems come in one list."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sameday.data.questions.audit_cache import AuditCache
from sameday.data.questions.family import QuestionFamily
from sameday.data.questions.images import MAX_ASPECT_RATIO, BadImage, check_aspect, digest, open_rgb, stamp
from sameday.data.questions.read import Raw, parse_line
from sameday.data.questions.sample import ImageRef, Sample
from sameday.spec.errors import BadInput

_NAMES = {"system": "system text", "user": "question", "assistant": "answer"}


@dataclass(frozen=True)
class Problem:
    """`where` is the file's name with the line; `what` is a sentence about it."""

    where: str
    what: str


@dataclass(frozen=True)
class Audit:
    samples: list[Sample]
    problems: list[Problem]


def audit(
    path: Path,
    image_root: Path,
    family: QuestionFamily | None,
    limit: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    label: str | None = None,
    few: int | None = None,
) -> Audit:
    """Read the file, decode each distinct image once, return the good questions and all that is wrong. An image that
    an earlier audit found good, in a file that is as it was, is not decoded again.

    `family` says which tokens must not stand in a text, and how long an image may be; None where the model is not
    known. `limit` takes the first so many lines that are not blank, good or bad. `progress` is called with the number
    of images decoded and the number of all that have to be. `label` is how problems call the file. `few` looks at so
    many questions and no more, taken image by image, as a short trial wants them.
    """
    root = _resolved_root(image_root)
    raws: dict[int, Raw] = {}
    wrong: dict[int, list[str]] = {}
    chosen = None if few is None else _image_by_image(path, root, limit, few)
    for number, line in _lines(path, limit):
        if chosen is not None and number not in chosen:
            continue
        wrong[number] = []
        try:
            raws[number] = parse_line(_json(line))
        except ValueError as error:
            wrong[number].append(str(error))
    if not wrong:
        raise BadInput(f"{path} is empty: it holds no question")
    for number, raw in raws.items():
        wrong[number] += _text_problems(raw, () if family is None else family.markers.special)

    names = dict.fromkeys(name for raw in raws.values() for name in raw.images)
    places = {name: _locate(name, root) for name in names}
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
                wrong[number].append(f"image {name!r} {result}")
        if not wrong[number]:
            where = f"{label or path.name}:{number}"
            samples.append(Sample(number, where, tuple(refs), raw.messages, raw.stage))
    # The same thing said twice of one line, as of an image that it lists twice, is one problem.
    problems = [
        Problem(f"{label or path.name}:{number}", what) for number in wrong for what in dict.fromkeys(wrong[number])
    ]
    return Audit(samples, problems)


def check(
    path: Path,
    image_root: Path,
    family: QuestionFamily | None,
    limit: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_bad: Literal["stop", "skip"] = "stop",
    label: str | None = None,
    few: int | None = None,
) -> tuple[list[Sample], list[Problem]]:
    """The good questions and the problems; any problem stops, or is skipped, as `on_bad` says."""
    result = audit(path, image_root, family, limit, workers, progress, label, few)
    if result.problems and on_bad == "stop":
        raise BadInput(f"{report(result.problems)}\nrecipe.data.on_bad=skip leaves them out")
    if not result.samples:
        raise BadInput(f"{report(result.problems)}\nno good question remains in {path}")
    return result.samples, result.problems


def report(problems: Sequence[Problem]) -> str:
    """A heading with the count, then one line per problem, all of them."""
    lines = len({problem.where for problem in problems})
    heading = f"{_count(len(problems), 'problem')} in {_count(lines, 'line')}:"
    return "\n".join([heading, *(f"{problem.where}: {problem.what}" for problem in problems)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1, with bytes, so that bad bytes spoil only their own line. Blank ones are passed."""
    try:
        with path.open("rb") as file:
            taken = 0
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                if limit is not None and taken == limit:
                    return
                taken += 1
                yield number, line.rstrip(b"\r\n")
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist; a JSONL file with one question per line is needed") from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from error


def _image_by_image(path: Path, root: Path, limit: int | None, count: int) -> set[int]:
    """The lines of so many questions: all about the first image of the file, then all about the next. Lines that
    cannot be read and images that are not there come last: a trial is about the others."""
    images: dict[tuple[str, ...], list[int]] = {}
    bad: list[int] = []
    for number, line in _lines(path, limit):
        try:
            named = tuple(parse_line(_json(line)).images)
        except ValueError:
            bad.append(number)
            continue
        if all(isinstance(_locate(name, root), Path) for name in named):
            images.setdefault(named, []).append(number)
        else:
            bad.append(number)
    return set([number for lines in (*images.values(), bad) for number in lines][:count])


def _json(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}") from error
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("invalid JSON: nested too deeply") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"invalid JSON: {name} is no JSON value")


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


def _locate(name: str, root: Path) -> Path | str:
    """The file behind an image's name, or what is wrong with it."""
    try:
        place = (root / name).resolve()
        if not place.is_relative_to(root):
            return f"leaves the image root {root}: it is {place}"
        if place.is_file():
            return place
        return f"is not a file but a folder or device under {root}" if place.exists() else f"not found under {root}"
    except OSError as error:
        return f"cannot be reached under {root}: {error.strerror or error}"
    # A loop of links, a NUL or half a surrogate in the name: no path at all.
    except (RuntimeError, ValueError) as error:
        return f"is no usable path: {error}"


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
