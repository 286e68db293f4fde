"""What was measured, as JSON and as people read it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sameday.spec.plan import Plan, changed, claims
from sameday.spec.recipe import Recipe
from sameday.tune.search import SearchState, Worth, middle
from sameday.tune.trial import Result

if TYPE_CHECKING:  # it loads torch
    from sameday.hardware.machine import Machine

WIDTH = 100
"""Columns of a line."""
UNSTEADY = 1.25
"""Times as long, from which on it is told."""
UNITS = ((3600.0, "seconds"), (60.0, "minutes"), (1.0, "hours"))
"""By how many there are in an hour."""


def as_json(
    recipe: Recipe, machine: Machine, minutes: float, state: SearchState, worth: Sequence[Worth]
) -> dict[str, Any]:
    plain, best = state.of(state.plain), state.of(state.best)
    assert plain is not None and best is not None
    known, steps = claims(recipe.dropout > 0), plain.whole
    return {
        "fingerprint": recipe.fingerprint,
        "machine": {"device": machine.device, "name": machine.name, "cores": machine.cores},
        "minutes": minutes,
        "steps": steps,
        "plain": {**(_numbers(plain) or {}), "finish_hours": finish(plain, steps)},
        "best": {
            **(_numbers(best) or {}),
            "finish_hours": finish(best, steps),
            "plan": state.best.model_dump(mode="json"),
        },
        "times": middle(plain) / middle(best),
        "ablation": [
            {
                "field": each.name,
                "value": each.change,
                "claim": _weakest([known[name] for name in each.change]),
                "alone": _numbers(each.alone),
                "added": _numbers(each.added),
                "left_out": _numbers(each.left_out),
            }
            for each in worth
        ],
        "tried": state.tried,
        "unsteady": state.unsteady,
        "looked_faster": len(state.refused),
        "not_tried": state.not_tried,
    }


def finish(result: Result, steps: int) -> list[float]:
    """Hours of all steps, from the least to the most that the timed ones allow: their mean and two standard errors."""
    seconds = list(result.seconds.values())
    error = statistics.stdev(seconds) / len(seconds) ** 0.5 if len(seconds) > 1 else statistics.mean(seconds)
    mean = statistics.mean(seconds)
    return [steps * max(0.0, mean - 2 * error) / 3600, steps * (mean + 2 * error) / 3600]


def _weakest(each: Sequence[str]) -> str:
    return max(each, key=("bitwise", "rounding", "statistical").index)


def _numbers(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    if result.failed:
        return {"seconds": None, "memory_gib": None, "failed": result.failed}
    each = result.seconds.values()
    memory = None if result.memory is None else result.memory / 2**30
    return {"seconds": {"median": middle(result), "least": min(each), "most": max(each)}, "memory_gib": memory}


def lines(table: dict[str, Any]) -> list[str]:
    """The whole as people read it."""
    nothing = "nothing that was tried is faster than the plain plan for sure"
    if not table["tried"]:
        nothing = "no other plan than the plain one could be timed: give more --minutes"
    output = _ablation(table) if table["ablation"] else [nothing]
    if table["unsteady"] > UNSTEADY:
        output.append(
            wrapped(
                f"this machine is not steady: timed again, the best plan took {table['unsteady']:.2f} times as long, "
                "or as short; what was timed earlier and later may not compare"
            )
        )
    if table["looked_faster"]:
        output.append(f"looked faster, and was not when it was timed again: {table['looked_faster']}")
    output += [wrapped(f"not measured: {text}") for text in table["not_tried"]]
    for name in ("plain", "best") if table["ablation"] else ("plain",):
        seconds = table[name]["seconds"]
        output.append(
            f"{name:6s}{seconds['median']:9.4f} s/step ({seconds['least']:.4f}-{seconds['most']:.4f}), "
            f"{table['steps']} steps in {duration(*table[name]['finish_hours'])}, validation not counted"
        )
    if table["ablation"]:
        output.append(f"the best plan is {table['times']:.2f} times as fast as the plain one")
    return output


def _ablation(table: dict[str, Any]) -> list[str]:
    """How many times as fast each choice is alone and added to those before it, and the best plan without it: there,
    less than one means that the choice is worth having. What was added to a plan that was not measured is not known."""
    plain, best = (table[name]["seconds"]["median"] for name in ("plain", "best"))
    before: float | None = plain
    rows = [("choice", "claim", "alone", "added", "left out")]
    for row in table["ablation"]:
        own = {name: each for name, each in row["value"].items() if name == row["field"]} or row["value"]
        cells = (_cell(row["alone"], plain), _cell(row["added"], before), _cell(row["left_out"], best))
        rows.append((cut(in_words(own), WIDTH - 42), row["claim"], *cells))
        added = (row["added"] or {}).get("seconds")
        before = added and added["median"]
    width = max(34, *(len(row[0]) for row in rows))
    told = [f"{name:{width}s} {claim:12s} {a:>8s} {b:>8s} {c:>9s}" for name, claim, a, b, c in rows]
    return [*told, "times as fast: alone as the plain plan, added as those above, left out as the best plan"]


def _cell(measured: dict[str, Any] | None, over: float | None) -> str:
    seconds = (measured or {}).get("seconds")
    if seconds is None:
        return "failed" if measured else "-"
    return "-" if over is None else f"{over / seconds['median']:.2f}×"


def duration(low: float, high: float) -> str:
    """Hours, in the unit that fits and with the digits that tell the two apart."""
    each, unit = next((pair for pair in UNITS if high * pair[0] < 120), UNITS[-1])
    for digits in range(1, 6):
        least, most = (f"{hours * each:.{digits}f}" for hours in (low, high))
        if least != most:
            return f"{least} to {most} {unit}"
    return f"{high * each:.1f} {unit}"


def trial_line(minutes: float, plan: Plan, result: Result, plain: Result | None, beside: Mapping[str, Plan]) -> str:
    """One trial, `beside` plans that have a name."""
    if result.failed or plain is None:
        what = cut((result.failed or "").partition("\n")[0], WIDTH)
    else:
        each = result.seconds.values()
        what = f"{middle(result):8.4f} ({min(each):.4f}-{max(each):.4f})  {middle(plain) / middle(result):5.2f}×"
        what += "" if result.memory is None else f"  {result.memory / 2**30:5.1f} GiB"
    words = difference(plan, beside).replace(" ", "\xa0").replace(",\xa0", ", ")  # so that a field keeps its value
    return wrapped(f"{minutes:4.1f} min  {what}  {words}").replace("\xa0", " ")


def difference(plan: Plan, beside: Mapping[str, Plan]) -> str:
    """The plan by what it has other than one of these: the one from which it is told in the fewest words."""
    said = {
        name: in_words({field: new for field, (_, new, _) in changed(base, plan, False).items()})
        for name, base in beside.items()
    }
    name = min(said, key=lambda name: len(said[name]))
    return f"{name} with {said[name]}" if said[name] else name


def in_words(fields: Mapping[str, Any]) -> str:
    return ", ".join(
        ", ".join(f"{variable}={text}" for variable, text in value.items()) or "no environment"
        if name == "environment"
        else f"{name} {_short(value)}"
        for name, value in fields.items()
    )


def _short(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False))
