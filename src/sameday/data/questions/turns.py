"""How training questions are laid out: where images and texts stand in a user turn, and with which line breaks between
them. A model answers worse where it is asked in another layout than the ones that it was trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sameday.data.questions.sample import PLACEHOLDER, TEXT_MARK, Message, Sample
from sameday.spec.questions import Prompt
from sameday.spec.words import count

IMAGE, TEXT = PLACEHOLDER, "{text}"
NAMED = 3
"""Layouts that are named; the others are counted."""

Render = Callable[[tuple[str | int, ...]], str]
"""The parts of a user turn as the chat template writes them."""


@dataclass(frozen=True)
class UserTurn:
    """A user turn without its question, whose place is the empty part numbered `at`: `around` is the white space before
    and behind it. Images that stand together are one. `at` is None where the question cannot be told from other text,
    all of which is TEXT then. A question `in_template` is in the recipe's prompt, or as it is where there is none."""

    parts: tuple[str, ...] = (IMAGE, "")
    at: int | None = 1
    around: tuple[str, str] = ("", "")
    in_template: bool = True

    @property
    def usable(self) -> bool:
        """Whether another question about one image can be asked so."""
        return self.at is not None and self.parts.count(IMAGE) == 1

    def pieces(self, question: str) -> list[str]:
        """The parts, with this as the question."""
        before, behind = self.around
        return [before + question + behind if n == self.at else part for n, part in enumerate(self.parts)]

    def rendered(self, render: Render) -> str:
        return render(tuple(0 if part == IMAGE else part for part in self.pieces(TEXT_MARK)))

    def __str__(self) -> str:
        return repr("".join(self.pieces("{question}" if self.in_template else "{question without prompt}")))


PLAIN = UserTurn()
"""Of a line with a question and an answer: the question behind its image."""

Counts = Mapping[UserTurn, int]


@dataclass(frozen=True)
class Asked:
    """How many training questions about images have each layout, the most common ones first; and the most common system
    turn of their own, None where they mostly have none."""

    turns: tuple[tuple[UserTurn, int], ...] = ()
    systems: tuple[tuple[str | None, int], ...] = ()

    @classmethod
    def of(cls, samples: Sequence[Sample], prompt: Prompt | None, render: Render) -> Asked:
        shown = [sample for sample in samples if sample.images]
        systems = Counter(m.text if (m := sample.messages[0]).role == "system" else None for sample in shown)
        turns = merged([user_turns(shown, prompt)], render)[0]
        return cls(tuple(Counter(turns).most_common()), tuple(systems.most_common(1)))

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Asked:
        turns = [
            (UserTurn(tuple(turn["parts"]), turn["at"], tuple(turn["around"]), turn["in_template"]), int(questions))
            for turn, questions in told["turns"]
        ]
        return cls(tuple(turns), tuple((system, int(questions)) for system, questions in told["systems"]))

    def json(self) -> dict[str, Any]:
        return {"turns": [(asdict(turn), questions) for turn, questions in self.turns], "systems": self.systems}

    @property
    def turn(self) -> UserTurn:
        """In which another question is asked."""
        return next((turn for turn, _ in self.turns if turn.usable), PLAIN)

    @property
    def system(self) -> str | None:
        """The system turn that is asked with instead of the recipe's."""
        return self.systems[0][0] if self.systems else None

    def words(self) -> str:
        """Of the lines of Python that ask in this layout."""
        turn, whole = self.turn, sum(questions for _, questions in self.turns)
        if not whole:
            return ""
        others = [each for each in self.turns if each[0] != turn]
        if len(others) == len(self.turns):
            said = f"The lines below ask as `{turn}`, which is no layout of the training questions: {_listed(others)}."
        elif not others:
            said = f"All training questions have the layout `{turn}`, in which the lines below ask."
        else:
            same = (
                f"`{turn}`, the layout of {whole - sum(n for _, n in others):,} of {count(whole, 'training question')}"
            )
            said = f"The lines below ask as {same}; there were others, too: {_listed(others)}."
        if self.system is None:
            own = whole - self.systems[0][1] if self.systems else 0
            left = f"{own:,} of {count(whole, 'training question')}"
            return (
                f"{said} {left} had a system turn of their own, which the lines below do not ask with." if own else said
            )
        return f"{said} The system turn is that of {self.systems[0][1]:,} of {count(whole, 'training question')}."


def user_turns(samples: Iterable[Sample], prompt: Prompt | None) -> Counter[UserTurn]:
    """How many of the questions about images have each layout. Of a conversation it is the first turn with an image.
    Text beside the question belongs to the layout where all questions of its kind have it, such as "Picture:"."""
    kinds: dict[tuple[int, tuple[str, ...]], list[tuple[Sample, tuple[str, ...]]]] = {}
    for sample in samples:
        parts = _parts(sample)
        if parts:
            form = tuple(part if part == IMAGE or not part.strip() else TEXT for part in parts)
            kinds.setdefault((sample.set, form), []).append((sample, parts))
    counts: Counter[UserTurn] = Counter()
    for (_, form), asked in kinds.items():
        at = _question_at(form, [parts for _, parts in asked])
        counts.update(UserTurn(form, None) if at is None else _turn(s, parts, at, form, prompt) for s, parts in asked)
    return counts


def merged(sides: Sequence[Counts], render: Render) -> list[Counts]:
    """With those layouts as one that the model's chat template writes alike."""
    if len({turn for side in sides for turn in side}) < 2:
        return list(sides)
    first: dict[tuple[str, bool], UserTurn] = {}
    found: list[Counts] = []
    for side in sides:
        counts: Counter[UserTurn] = Counter()
        for turn, questions in side.items():
            counts[first.setdefault((turn.rendered(render), turn.in_template), turn)] += questions
        found.append(counts)
    return found


def layouts_differ(
    splits: Mapping[str, Sequence[Sample]], prompt: Prompt | None, render: Callable[[], Render | None]
) -> str | None:
    """A sentence where a split has questions in a layout that no training question has, or most of them in another one
    than most of those. `render` is asked for where there are several layouts."""
    sides: dict[str, Counts] = {name: _plain_or_not(user_turns(side, prompt)) for name, side in splits.items()}
    sides = {name: side for name, side in sides.items() if side}
    if "train" not in sides or len({turn for side in sides.values() for turn in side}) < 2:
        return None
    template = render()
    if template is not None:
        sides = dict(zip(sides, merged(list(sides.values()), template), strict=True))
    train = sides["train"]
    differ = [name for name, side in sides.items() if side.keys() - train.keys() or _first(side) != _first(train)]
    if not differ:
        return None
    told = "; ".join(f"{name} has {_listed(Counter(sides[name]).most_common())}" for name in ("train", *differ))
    return f"the layouts of user turns differ: {told}. A model answers best in the layout that it was trained on"


def _parts(sample: Sample) -> tuple[str, ...]:
    """Of the first user turn with an image; empty where there is none."""
    turn = next((m for m in sample.messages if any(isinstance(part, int) for part in m.parts)), Message("user", ()))
    parts: list[str] = []
    for part in turn.parts:
        if not isinstance(part, int):
            parts.append(part)
        elif IMAGE in parts and not "".join(parts[_last_image(parts) + 1 :]).strip():
            del parts[_last_image(parts) + 1 :]
        else:
            parts.append(IMAGE)
    return tuple(parts)


def _last_image(parts: Sequence[str]) -> int:
    return len(parts) - 1 - parts[::-1].index(IMAGE)


def _question_at(form: Sequence[str], asked: Sequence[Sequence[str]]) -> int | None:
    """Which part is the question: the only text, or the only one of several that is not the same in all."""
    texts = [place for place, part in enumerate(form) if part == TEXT]
    varied = [place for place in texts if len({parts[place] for parts in asked}) > 1]
    if len(varied) > 1 or not texts:
        return None
    return (varied or texts)[-1]


def _turn(sample: Sample, parts: tuple[str, ...], at: int, form: Sequence[str], prompt: Prompt | None) -> UserTurn:
    text, rest = parts[at], (*parts[:at], "", *parts[at + 1 :])
    start = text.index(text.strip())
    own = UserTurn(rest, at, (text[:start], text[start + len(text.strip()) :]), prompt is None)
    users = sum(message.role == "user" for message in sample.messages)
    if prompt is None or users > 1 or sum(part != IMAGE for part in form) > 1:
        return own
    before, found, behind = text.partition(prompt.template(sample.stage, sample.type).format(question=sample.question))
    if not found or before.strip() or behind.strip():
        return own
    return UserTurn(rest, at, (before, behind))


def _plain_or_not(counts: Counts) -> Counts:
    """Which questions keep their own text is said elsewhere."""
    found: Counter[UserTurn] = Counter()
    for turn, questions in counts.items():
        found[replace(turn, in_template=True)] += questions
    return found


def _first(counts: Counts) -> UserTurn:
    return Counter(counts).most_common(1)[0][0]


def _listed(turns: Sequence[tuple[UserTurn, int]]) -> str:
    named = [f"`{turn}` ({count(questions, 'question')})" for turn, questions in turns[:NAMED]]
    rest = turns[NAMED:]
    more = f"{count(len(rest), 'other')} ({count(sum(questions for _, questions in rest), 'question')})"
    return ", ".join([*named, more] if rest else named)
