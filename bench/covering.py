"""Few rows that show every pair: any two values of two fields that can stand in one row do so in one of these. What
goes wrong between settings mostly takes two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, combinations, combinations_with_replacement, product
from typing import Any

from sameday.hardware.machine import Machine
from sameday.spec.errors import BadInput
from sameday.spec.plan import Plan
from sameday.tasks.setup import TaskSetup
from sameday.verify.registry import trial_values

TRIES = 200
"""After so many rows that are not allowed, a pair is given up, or a value with all of its pairs. Where the fields
beside it have no more combinations than this, it is impossible; elsewhere it may only be hard to find."""

SWEEPS = 20
"""So often all rows are rearranged to do with fewer. Twice as often saves less than a row on average."""

Row = tuple[int, ...]
"""A value of each field, by number. Numbers run on from field to field: the bits of an int are a set of values."""


def pairwise(
    choices: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda row: True
) -> list[dict[str, Any]]:
    """Allowed rows, each with a value for every field, that show every pair of values that an allowed row can hold,
    but for those given up after `TRIES` rows: `uncovered` tells what is not there. The search sets out from the first
    value of each field, so these should go together; a row has another value only where a pair needs it. Equal
    arguments give equal rows."""
    for name, values in choices.items():
        if not len(values):
            raise ValueError(f"choices[{name!r}] is empty: a row needs a value for every field")
    table = _Table(choices, allowed)
    return [table.named(row) for row in table.plainer(table.fewer(table.cover()))]


def trial_plans(setup: TaskSetup, device: str, size: int) -> list[Plan]:
    """Every pair of values under which a task's claims are tested and that can stand together, in as few plans as are
    found."""
    machine = Machine(device, device, 0, 1, device == "cuda", capability=(9, 0))

    def can_run(row: dict[str, Any]) -> bool:
        try:
            setup.check_plan(Plan(**row), machine)
        except BadInput:
            return False
        return True

    return [Plan(**row) for row in pairwise(trial_values(setup, device, size), can_run)]


def uncovered(
    rows: Sequence[Mapping[str, Any]], choices: Mapping[str, Sequence[Any]]
) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    """The pairs of values that stand together in none of `rows`, in the order of `choices`."""

    def same(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and a == b)  # 1 and True are equal, yet two settings

    cells = [(name, value) for name, values in choices.items() for value in values]
    holders = [{i for i, row in enumerate(rows) if same(row[name], value)} for name, value in cells]
    pairs = combinations(zip(cells, holders, strict=True), 2)
    return [(a, b) for (a, with_a), (b, with_b) in pairs if a[0] != b[0] and not with_a & with_b]


class _Table:
    def __init__(self, choices: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]) -> None:
        self.cells = [(name, value) for name, values in choices.items() for value in values]
        sizes = [len(values) for values in choices.values()]
        self.fields = [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.field_of = [field for field, size in enumerate(sizes) for _ in range(size)]
        self.accepts = cache(lambda row: allowed(self.named(row)))

    def named(self, row: Row) -> dict[str, Any]:
        return dict(self.cells[value] for value in row)

    def left(self, wanted: Sequence[int], rows: Iterable[Row]) -> list[int]:
        """What `rows` do not show of `wanted`: for each value, the values that it is to stand with."""
        result = list(wanted)
        for row in rows:
            shown = _bits(row)
            for value in row:
                result[value] &= ~shown
        return result

    def cover(self) -> list[Row]:
        """As long as a pair is missing, one more row."""
        rows: list[Row] = []
        missing = [-1] * len(self.cells)
        # A value by itself comes before its pairs: where no row is found for it, they need no search.
        targets = [(value, value) for value in range(len(self.cells))]
        targets += [pair for f, g in combinations(self.fields, 2) for pair in product(f, g)]
        # What a hard pair needs around it often stands in the rows of the easy ones, so these go first.
        for tries in (TRIES // 10, TRIES):
            hopeless: set[int] = set()
            for a, b in targets:
                # A climb may leave this pair for others; then it gets another row.
                while missing[a] >> b & 1 and not hopeless & {a, b}:
                    row = self.find((a, b), rows, tries)
                    if row is None:
                        hopeless |= {a} & {b}
                        break
                    rows.append(self.climb(self.climb(row, missing), missing))
                    missing = self.left(missing, rows[-1:])
        return rows

    def find(self, pair: tuple[int, int], rows: Sequence[Row], tries: int) -> Row | None:
        """An allowed row with `pair`: one of `rows`, or the first values, with as few fields changed as will do."""
        fixed = {self.field_of[value]: value for value in pair}
        starts = [_put(row, fixed) for row in (*rows, tuple(values[0] for values in self.fields))]
        free = [field for field in range(len(self.fields)) if field not in fixed]
        tries = min(tries, math.prod(len(self.fields[field]) for field in free))
        tried: set[Row] = set()
        for changes in range(len(free) + 1):
            for start, places in product(starts, combinations(free, changes)):
                for values in product(*(self.fields[field] for field in places)):
                    row = _put(start, dict(zip(places, values, strict=True)))
                    if self.accepts(row):
                        return row
                    tried.add(row)
                    if len(tried) == tries:
                        return None
        raise AssertionError("the last row there is ends the search")

    def climb(self, row: Row, missing: Sequence[int], turn: int = 0) -> Row:
        """Field after field to the value that shows most of what is missing. Among equals the old value comes last
        and `turn` decides, so that the next climb sets out from elsewhere."""
        for field, values in enumerate(self.fields):
            old, rest = row[field], _bits(row) & ~(1 << row[field])
            order = {
                v: (-(missing[v] & (rest | 1 << v)).bit_count(), v == old, (v + turn) % len(values)) for v in values
            }
            changes = (_put(row, {field: value}) for value in sorted(values, key=order.__getitem__))
            row = next(changed for changed in changes if changed == row or self.accepts(changed))
        return row

    def fewer(self, rows: list[Row]) -> list[Row]:
        """The same pairs in fewer rows: leave one out, and let the others take over what only it showed."""
        wanted = [~bits for bits in self.left([-1] * len(self.cells), rows)]
        # Two fields show one pair in each row.
        blocks = combinations_with_replacement(self.fields, 2)
        least = max((sum((wanted[value] & _bits(g)).bit_count() for value in f) for f, g in blocks), default=0)

        def loss(some: Iterable[Row]) -> int:
            return sum(bits.bit_count() for bits in self.left(wanted, some))

        turn = 0
        while len(rows) > least:
            trial = list(min(combinations(rows, len(rows) - 1), key=loss))
            while loss(trial):
                if turn == SWEEPS:
                    return rows
                for i, row in enumerate(trial):
                    trial[i] = self.climb(row, self.left(wanted, trial[:i] + trial[i + 1 :]), turn)
                turn += 1
            rows = trial
        return rows

    def plainer(self, rows: list[Row]) -> list[Row]:
        """The same pairs in as many rows, with the first value of a field, which mostly costs least, where another one
        shows nothing that is not in a row besides."""
        wanted = [~bits for bits in self.left([-1] * len(self.cells), rows)]
        before: list[Row] = []
        while rows != before:
            before = rows
            for (field, values), i in product(enumerate(self.fields), range(len(rows))):
                trial = [*rows[:i], _put(rows[i], {field: values[0]}), *rows[i + 1 :]]
                if self.accepts(trial[i]) and not any(self.left(wanted, trial)):
                    rows = trial
        return rows


def _bits(values: Iterable[int]) -> int:
    return sum(1 << value for value in values)


def _put(row: Row, fixed: Mapping[int, int]) -> Row:
    return tuple(fixed.get(field, value) for field, value in enumerate(row))
