"""The tables about generated answers: metrics with their intervals, by groups of questions, what differs between sets
of answers to the same questions, and which answers are taken for which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from sameday.evaluate.words import GROUPS, NAMES, PLAIN, apart, between, counted, name_of, shown
from sameday.report.answers import PREDICTIONS, Answers, Confusion, Group, Metrics, read_predictions
from sameday.report.gather import Run
from sameday.report.tables import NONE, Cell, Row, memory
from sameday.report.words import value
from sameday.spec.words import count, number

MAIN = "exact_match"
MOST_COLUMNS, MOST_ROWS, MOST_SETTINGS, LONG = 12, 60, 16, 40


@dataclass(frozen=True)
class Set:
    """Answers to one split's questions by the weights of one run."""

    run: Run
    label: str
    answers: Answers
    metrics: Metrics


@dataclass
class Split:
    """All that a page tells of one split."""

    name: str
    sets: list[Set]
    settings: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    groups: list[Row] = field(default_factory=list)
    differences: list[Row] = field(default_factory=list)
    group_differences: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def splits(runs: Sequence[Run]) -> list[Split]:
    named: dict[str, list[tuple[Run, Answers]]] = {}
    for run in runs:
        for answers in run.answers:
            named.setdefault(answers.split, []).append((run, answers))
    return [_split(name, given, len(runs) > 1) for name, given in named.items()]


def _split(name: str, given: list[tuple[Run, Answers]], several: bool) -> Split:
    sets = []
    for run, answers in given:
        alone = sum(other is run for other, _ in given) == 1
        label = (run.label if alone else f"{run.label}: {answers.name}") if several else answers.name
        if answers.metrics is not None:
            sets.append(Set(run, label, answers, answers.metrics))
    columns = sets[:MOST_COLUMNS]
    split = Split(name, columns, _settings(columns), _metric_rows(columns), _group_rows(columns))
    split.notes += [
        f"{run.label}: answers/{answers.name} has no metrics.json yet: the command that began it goes on with it"
        for run, answers in given
        if answers.metrics is None
    ]
    if len(sets) > len(columns):
        split.notes.append(f"the first {len(columns)} of {len(sets)} sets of answers are shown")
    notes: dict[str, list[str]] = {}
    for each in columns:
        if lacking := each.metrics.without_earlier_answers:
            asked = f"{lacking:,} of {count(each.metrics.questions, 'question')} were asked"
            split.notes.append(f"{each.label}: {asked} without answers of earlier stages, which their images lack")
        for note in each.metrics.notes[:MOST_ROWS]:
            notes.setdefault(note, []).append(each.label)
    for note, labels in notes.items():
        split.notes.append(note if len(labels) == len(columns) else f"{', '.join(labels)}: {note}")
    if len(columns) > 1:
        _compare(split)
    return split


def _settings(sets: Sequence[Set]) -> list[Row]:
    """Where the runs' recipes differ, and what their steps cost."""
    runs = [each.run for each in sets]
    if len({run.label for run in runs}) < 2:
        return []
    recipes = [dict(_flat(run.recipe.model_dump(mode="json", exclude=set(run.recipe.ignored())))) for run in runs]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    rows = [Row(name, [Cell(value(recipe[name])) if name in recipe else NONE for recipe in recipes]) for name in names]
    rows = [row for row in rows if not row.alike][:MOST_SETTINGS]
    speeds = [Cell(f"{number(median(run.rates))} {run.recipe.sample}s/s") if run.rates else NONE for run in runs]
    costs = [Row("speed of training", speeds), Row("memory, at most", [memory(run) for run in runs])]
    return rows + [row for row in costs if any(cell != NONE for cell in row.cells)]


def _flat(fields: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, given in fields.items():
        if isinstance(given, dict):
            yield from _flat(given, f"{path}{name}.")
        elif isinstance(given, list) and given and all(isinstance(each, dict) and "name" in each for each in given):
            yield from _flat({each["name"]: each for each in given}, f"{path}{name}.")
        else:
            yield f"{path}{name}", given


def _metric_rows(sets: Sequence[Set]) -> list[Row]:
    known = dict.fromkeys(name for each in sets for name in each.metrics.metrics if name != "accuracy")
    order = [name for name in NAMES if name in known] + [name for name in known if name not in NAMES]
    asked = Row("questions", [Cell(f"{s.metrics.questions:,}", f"on {count(s.metrics.images, 'image')}") for s in sets])
    return [asked, *(Row(name_of(name), [_cell(each.metrics, name) for each in sets]) for name in order[:MOST_ROWS])]


def _group_rows(sets: Sequence[Set]) -> list[Row]:
    rows = []
    for label, groups in _groups([each.metrics.groups for each in sets]):
        counts = [None if group is None else counted(group.questions, group.images) for group in groups]
        cells = [NONE if group is None else _cell(group, MAIN) for group in groups]
        rows.append(_row(label, cells, counts))
    return rows[:MOST_ROWS]


def _row(label: str, cells: list[Cell], counts: Sequence[str | None]) -> Row:
    """With how many questions it is of: once where they are the same for all sets, otherwise in each cell."""
    known = {each for each in counts if each is not None}
    if len(known) == 1:
        return Row(label, cells, *known)
    both = zip(cells, counts, strict=True)
    return Row(label, [replace(cell, note=f"{cell.note}, {said}") if said else cell for cell, said in both])


def _groups(sets: Sequence[Mapping[str, Mapping[str, Any]]]) -> Iterator[tuple[str, list[Any]]]:
    for by, word in GROUPS.items():
        for key in dict.fromkeys(key for each in sets for key in each.get(by, {})):
            yield f"{word}{key}", [each.get(by, {}).get(key) for each in sets]


def _cell(group: Group, name: str) -> Cell:
    if name not in group.metrics:
        return NONE
    measured = group.metrics[name]
    said = between(name, measured.low, measured.high)
    about = count(measured.questions, "question") if measured.questions != group.questions else ""
    return Cell(shown(name, measured.value), ", ".join(filter(None, (said, about))))


def _compare(split: Split) -> None:
    """What each set differs by from the first, over the questions that both have."""
    from sameday.evaluate.compare import compare

    first, *others = split.sets
    files = {each.label: each.answers.path / PREDICTIONS for each in split.sets}
    if gone := [label for label, file in files.items() if not file.is_file()]:
        split.notes.append(f"there is no difference to tell: no {PREDICTIONS} of {', '.join(gone)}")
        return
    there = read_predictions(files[first.label])
    compared = [compare(there, read_predictions(files[each.label])) for each in others]
    for each, result in zip(others, compared, strict=True):
        alone = {first.label: result["only_first"], each.label: result["only_second"]}
        said = "; ".join(f"{count(n, 'question')} of {label} alone" for label, n in alone.items() if n)
        if not result["questions"]:
            split.notes.append(f"{each.label} and {first.label} share no question: there is no difference to tell")
        elif said:
            shared = count(result["questions"], "question")
            split.notes.append(f"the difference of {each.label} is of the {shared} that both answered; {said}")
    known = [name for name in NAMES if any(name in result["metrics"] for result in compared)]
    split.differences = [Row(name_of(name), [_difference(result, name) for result in compared]) for name in known]
    for label, groups in _groups([result["groups"] for result in compared]):
        counts = [None if group is None else counted(group["questions"], group["images"]) for group in groups]
        cells = [NONE if group is None else _difference(group, MAIN) for group in groups]
        split.group_differences.append(_row(label, cells, counts))
    del split.group_differences[MOST_ROWS:]


def _difference(group: Mapping[str, Any], name: str) -> Cell:
    each = group["metrics"].get(name)
    if each is None:
        return NONE
    said = apart(name, group)
    sure = each["low"] is not None and (each["low"] > 0 or each["high"] < 0)
    unit = "" if name in PLAIN else " points"
    return Cell(f"{shown(name, each['difference'], '+')}{unit}", said, sure)


def confusion_heads(table: Confusion) -> list[tuple[str, str]]:
    """Of each column a short text and the whole one."""
    return [(_short(answer), answer) for answer in table.answers]


def _short(text: str) -> str:
    return (text if len(text) <= LONG else f"{text[: LONG - 1]}…") or "(empty)"
