"""What a set of questions is like, as lines of a terminal: numbers, what sharing gives, some questions, problems."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sameday.data.problems import in_lines, report
from sameday.data.questions.sample import Sample
from sameday.data.questions.summary import (
    ORDERS,
    Spread,
    Summary,
    common_images,
    contents,
    images_a_step,
    on_several_sides,
    spaces_around,
    steps_in,
    summary_of,
)
from sameday.data.questions.turns import layouts_differ
from sameday.spec.load import resolve_path
from sameday.spec.vlm import VlmRecipe
from sameday.spec.words import count, in_one_line

if TYPE_CHECKING:
    from sameday.commands.data import Given, Looked
    from sameday.data.questions.encode import Encoded, Encoder

STEPS = 64
"""Steps whose tokens stand for an epoch's."""
SHOWN = 2
"""Questions that are shown as the model reads them."""


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
    for (one, other), images in on_several_sides(contents(looked.splits)).items():
        yield from _wrapped(common_images(one, other, images), width)
    for line in spaces_around(looked.splits):
        yield from _wrapped(line, width)
    prompt = None if given.recipe is None else given.recipe.prompt
    if differ := layouts_differ(looked.splits, prompt, lambda: None if encoder is None else encoder.user_turn):
        yield from _wrapped(differ, width)
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
        "duplicates": lambda _, each: f"{each.repeated:,}",
        "answers that differ": lambda _, each: f"{each.disagreeing:,}",
        "duplicate images": lambda _, each: f"{each.renamed:,}",
    }
    yield f"{'':20}" + "".join(f"{name:>19}" for name in there)
    for label, cell in lines.items():
        yield f"{label:20}" + "".join(f"{cell(name, each):>19}" for name, each in there.items())


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
    yield f"{title:24}{'images a step':>14}" + (f"{'tokens alone':>14}{'shared':>14}{'fewer':>12}" if encoder else "")
    for kind in ORDERS:
        steps = steps_in(kind, samples, batch)
        line = f"  order {kind:16}{images_a_step(steps, samples):>14,.1f}"
        if encoder is not None:
            alone, shared = tokens_of(steps, samples, encoder)
            line += f"{alone:>14,.0f}{shared:>14,.0f}{f'{alone / shared:.1f} times':>12}"
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
