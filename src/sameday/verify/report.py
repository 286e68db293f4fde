"""The verdict in words: at most 40 lines of 100 columns, and the same as data."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sameday.spec.plan import Claim
from sameday.spec.recipe import Recipe

if TYPE_CHECKING:
    from sameday.verify.compare import Comparison

WIDTH, HEIGHT = 100, 40
AROUND_KINDS = 6
"""Lines above and below the kinds of tensors in their table."""
WORDS = {
    "bitwise": "the same bits",
    "rounding": "the same mathematics, in another order of rounding",
    "statistical": "the same mathematics with dropout off; with it on, another draw of the masks",
    "different": "NOT the same model",
}
NOISY = 0.5
NOISE = (
    "rounding alone is {error:.0%} of the gradient here: faults that are smaller hide in it; --precision float32 "
    "compares strictly"
)
"""Above which share of the gradient, and what is said then."""
NOT_RECORDED = (
    "the verdict says nothing about cuda_graphs; sizes that do not come again within --steps, or are too large for it "
    "to pay, are launched"
)
"""Where cuda_graphs is asked for, and all is launched."""


@dataclass(frozen=True)
class Report:
    recipe: Recipe
    names: tuple[str, str]
    fields: Mapping[str, tuple[Any, Any, Claim]]
    precision: str
    steps: int
    sizes: tuple[int, ...]
    killed_in: int
    resumed_from: int
    ranks: int
    comparison: Comparison
    seconds: float
    false_alarms: str = ""
    """How rarely equivalent plans of the task are called different, in a sentence."""
    dropout: bool = True
    """Whether the arms trained with the recipe's dropout."""
    peer: bool = False
    """Whether the other arm is another trainer."""
    recorded: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of arms whose plan has `cuda_graphs`: how many micro-batches of training ran recorded, and how many there were.
    """

    @property
    def verdict(self) -> str:
        if not self.comparison.same:
            return "different"
        if self.recipe.dropout and any(claim == "statistical" for *_, claim in self.fields.values()):
            return "statistical"
        return "bitwise" if self.comparison.bitwise else "rounding"

    @property
    def exit_code(self) -> int:
        return int(self.verdict == "different")

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "recipe": self.recipe.fingerprint,
            "plan": self.names[0],
            "against": self.names[1],
            "fields": {name: {"against": a, "plan": b, "claim": c} for name, (a, b, c) in self.fields.items()},
            "precision": self.precision,
            "dropout": "none" if not self.recipe.dropout else "on" if self.dropout else "off",
            "steps": self.steps,
            "ranks": self.ranks,
            "recorded": {name: {"recorded": n, "micro_batches": m} for name, (n, m) in self.recorded.items()},
            "differences": [{**d.__dict__} for d in self.comparison.differences],
            "largest": self.comparison.worst,
            "whose": self.comparison.names,
            "bounds": self.comparison.bounds,
            "groups": self.comparison.groups,
            "limits": dict(self.comparison.limits.__dict__),
            "seconds": self.seconds,
        }

    def lines(self) -> list[str]:
        head = [
            f"{self.verdict}: {WORDS[self.verdict]}",
            _row("recipe", f"{self.recipe.fingerprint}, precision {self._format()}, {_short(self.recipe.name, 40)}"),
            _row("plan", _short(self.names[0], WIDTH - 12)),
            _row("against", _short(self.names[1], WIDTH - 12)),
            *self._fields(),
            *_wrapped(
                "steps",
                f"{self.steps} of {', '.join(map(str, self.sizes))} {self.recipe.sample}s, over an epoch's end"
                f"{' and a partial batch' if min(self.sizes) < self.recipe.effective_batch else ''}, killed in step "
                f"{self.killed_in}, resumed from step {self.resumed_from}" + self._ranked(),
            ),
        ]
        head += self._recorded()
        if self.recipe.dropout:
            how = "off, since its masks are another draw in one of the plans"
            if self.dropout or self.peer:
                how = "on, with the same masks" if self.dropout else "set to 0 in both arms, which draw other masks"
            head += _wrapped("dropout", f"{self.recipe.dropout:g}, {how}")
        head += self._structure()
        training = self._training()
        tail = [*training, *self._first_difference(HEIGHT - len(head) - len(training) - AROUND_KINDS - 2)]
        body = self._gradients(HEIGHT - len(head) - len(tail) - AROUND_KINDS)
        return [line[:WIDTH] for line in [*head, *body, *tail]][:HEIGHT]

    def _format(self) -> str:
        other = self.precision != self.recipe.precision
        return f"{self.precision} (the recipe's is {self.recipe.precision})" if other else self.precision

    def _ranked(self) -> str:
        return f"; the plan on {self.ranks} ranks" if self.ranks > 1 else ""

    def _recorded(self) -> list[str]:
        """A verdict must not be taken for one about graphs that never ran."""
        if not self.recorded:
            return []
        said = "; ".join(f"{name}: {n} of {m} micro-batches" for name, (n, m) in self.recorded.items())
        none = [name for name, (n, _) in self.recorded.items() if not n]
        why = f". NOTHING was recorded in {' and '.join(none)}: {NOT_RECORDED}" if none else ""
        return _wrapped("recorded", said + why)

    def _fields(self) -> list[str]:
        if self.peer:
            theirs = "their processor, chat template, forward and loss, torch's AdamW, one question at a time; "
            return _wrapped("", theirs + "the questions of each step and the starting adapter are ours")
        if not self.fields:
            return [_row("", "the two plans are equal")]
        said = [f"{name} {_value(a)} -> {_value(b)} ({claim})" for name, (a, b, claim) in self.fields.items()]
        lines = _wrapped("", "differ in " + "; ".join(said))
        return lines if len(lines) <= 7 else [*lines[:6], _row("", "and more: --json has all of them")]

    def _structure(self) -> list[str]:
        odd = sum(difference.exact for difference in self.comparison.differences)
        rest = ("rates", "groups") if self.peer else ("rates", "groups", "dtypes", "flags")
        words = ", ".join(["samples", *self.comparison.seen, *rest])
        return _wrapped("structure", f"NOT equal: {odd} differences" if odd else f"equal: {words}")

    def _gradients(self, room: int) -> list[str]:
        worst, bounds, limits = self.comparison.worst, self.comparison.bounds, self.comparison.limits
        if not self.comparison.groups:
            return [
                _row(
                    "gradients",
                    f"at the starting weights: {worst['gradient']:.1e} apart (limit {limits.gradient:.0e}), "
                    f"one tensor {worst['tensor']:.1e} (limit {limits.tensor:.0e})",
                ),
                _row("", f"{_short(self.comparison.names['tensor'], WIDTH - 30)} is the furthest"),
                _row("", self._alarms()),
            ]
        lines = [
            _row(
                "gradients", f"at the starting weights, {self.steps} batches, against a {self._reference()} reference"
            ),
            f"  {'tensors':34s} {'R':>6s} {'limit':>6s} {'slope':>8s} {'other':>8s} {'error':>7s}",
        ]
        kinds = sorted(self.comparison.groups, key=lambda k: (k != "all", -self.comparison.groups[k]["R"]))
        for kind in kinds[: max(1, room)]:
            g = self.comparison.groups[kind]
            limit = g.get("limit", limits.ratio_all if kind == "all" else limits.ratio_group)
            lines.append(
                f"  {_short(kind, 34):34s} {g['R']:6.3f} {limit:6.2f} {g['slope']:8.4f} {g['plain slope']:8.4f} "
                f"{g['error']:7.4f}"
            )
        if len(kinds) > room:
            lines.append(f"  and {len(kinds) - room} kinds of tensors with smaller R")
        lines.append(
            f"  {'one tensor, largest for its limit':34s} {worst['ratio_tensor']:6.3f} {bounds['ratio_tensor']:6.2f}"
            f" {_short(self.comparison.names['ratio_tensor'], WIDTH - 52)}"
        )
        lines.append(
            f"  slope, largest for its limit: {worst['slope']:.2f} of the error further from 1 "
            f"(limit {bounds['slope']:.2f}), of {_short(self.comparison.names['slope'], 25)}"
        )
        lines.append(f"  limits: {self._alarms()}")
        if (error := self.comparison.groups["all"]["error"]) > NOISY:
            lines += _wrapped("", NOISE.format(error=error))
        return lines

    def _alarms(self) -> str:
        return self.false_alarms or f"no rate of false alarms was measured for task {self.recipe.task}"

    def _reference(self) -> str:
        return "float64" if self.comparison.precision == "float32" else "float32"

    def _training(self) -> list[str]:
        worst, half = self.comparison.worst, self.comparison.precision == "bf16"
        limits = self.comparison.limits.trained(half)
        said = [f"{name} {worst[key]:.1e} ({limits[key]:.0e})" for key, name in TRAINED.items() if key in worst]
        lines = _wrapped("training", "largest relative differences (limits): " + ", ".join(said))
        if "generation" in worst:
            limit = self.comparison.bounds["generation"]
            text = f"tokens at most {worst['generation']:.2g} standard deviations below training's (limit {limit:.2g})"
            lines += _wrapped("generation", text)
        return lines

    def _first_difference(self, room: int) -> list[str]:
        """The first difference in all its words, as far as there is room, and the others in a line each."""
        if self.comparison.same:
            return [_row("", f"no difference beyond a limit; took {self.seconds:.0f} s")]
        first, *more = self.comparison.differences
        lines, most = _wrapped("first", str(first)), max(4, room - min(len(more), 4))
        if len(lines) > most:
            lines = [*lines[: most - 1], _row("", "(the rest of this sentence is in what --json writes)")]
        for other in more[:3]:
            lines.append(_row("then", _short(str(other), WIDTH - 12)))
        if len(more) > 3:
            lines.append(_row("", f"and {len(more) - 3} more; --json has all of them"))
        return lines


TRAINED = {
    "loss": "loss",
    "question": "loss of a question",
    "norm": "norm of the gradient",
    "trained gradient": "gradient",
    "trained update": "update",
    "validation": "validation loss",
    "replay": "update replayed in float64",
}


def _row(label: str, text: str) -> str:
    return f"{label:11s} {text}"


def _wrapped(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - 12, break_long_words=True) or [""]
    return [_row(label if i == 0 else "", line) for i, line in enumerate(lines)]


def _short(text: str, room: int) -> str:
    """The ends of a long name tell it apart; its middle goes."""
    if len(text) <= room:
        return text
    keep = room - 1
    return text[: keep // 3] + "…" + text[-(keep - keep // 3) :]


def _value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else _short(str(value), 40)
