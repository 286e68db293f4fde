"""Stages that build on each other, as pure functions; and what a person sees on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.evaluate.cascade import Findings, rounds
from sameday.evaluate.progress import Progress
from sameday.spec.evaluation import Evaluation

CONTEXT = Evaluation().context


def question(number: int, image: int, stage: int | None, text: str = "") -> Sample:
    ref = ImageRef(Path(f"{image}.png"), f"digest {image}", 8, 8)
    turns = (Message("user", (0, text or f"question {number}?")), Message("assistant", ("yes",)))
    return Sample(number, f"test.jsonl:{number}", (ref,), turns, stage)


asked = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, 1, 2, 3, 7])), max_size=20)


@given(asked)
def test_findings_are_of_the_same_image_and_of_earlier_stages(drawn: list[tuple[int, int | None]]) -> None:
    samples = [question(number, image, stage) for number, (image, stage) in enumerate(drawn)]
    stages = rounds(samples, True)
    assert sorted(number for stage in stages for number in stage) == list(range(len(samples)))
    findings, prompts = Findings(CONTEXT), dict[int, Sample]()
    for stage in stages:
        own = [samples[number] for number in stage]
        prompts |= {sample.id: findings.asked(sample) for sample in own}
        findings.add(own, {sample.id: f" answer\n{sample.id}\n" for sample in own})
    first = min((stage for _, stage in drawn if stage is not None), default=0)
    lacking = 0
    for sample in samples:
        earlier = [
            other
            for other in sorted(samples, key=lambda s: s.stage or 0)
            if None not in (other.stage, sample.stage)
            and other.stage < sample.stage  # type: ignore[operator]
            and other.image_key == sample.image_key
        ]
        lines = [f"- question {other.id}? answer {other.id}" for other in earlier]
        own_text = f"question {sample.id}?"
        text = "\n".join(["Earlier findings:", *lines, "", own_text]) if lines else own_text
        assert prompts[sample.id].messages[0].parts == (0, text)
        assert prompts[sample.id].messages[1:] == sample.messages[1:]
        lacking += sample.stage is not None and sample.stage > first and not lines
    assert findings.lacking == lacking
    assert rounds(samples, False) == [list(range(len(samples)))]


def test_a_template_is_filled_once_and_after_the_image() -> None:
    """Whatever letters predictions and questions hold; text before the image stays where it is."""
    findings = Findings("{question} (known: {findings})")
    findings.add([question(0, 0, 1, "{findings}?")], {0: "{question}"})
    turns = (
        Message("user", ("look", 0, "what?")),
        Message("assistant", ("that",)),
        Message("user", ("and", " {findings}?")),
        Message("assistant", ("this",)),
    )
    chat = Sample(1, "here", question(0, 0, 1).images, turns, 2)
    assert findings.asked(chat).messages == (
        *turns[:2],
        Message("user", ("and {findings}? (known: - {findings}? {question})",)),
        turns[3],
    )
    before = Sample(2, "here", chat.images, (Message("user", ("look", 0, "what?")), turns[3]), 2)
    assert findings.asked(before).messages[0].parts == ("look", 0, "what? (known: - {findings}? {question})")


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr("sameday.evaluate.progress.time.monotonic", lambda: now[0])
    with Progress(100, 40, said.append) as progress:
        for _ in range(5):
            now[0] += 10
            progress.add(6)
    assert said == ["answers 58/100  0.6 questions/s  left 1:10"]
