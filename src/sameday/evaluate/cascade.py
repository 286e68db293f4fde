"""Sequential chain of thought: questions are answered stage by stage, and what was predicted for an image at earlier
stages goes into the prompts of later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sameday.data.questions.sample import Message, Sample
from sameday.spec.evaluation import FINDINGS, QUESTION


def rounds(samples: Sequence[Sample], cascade: bool) -> list[list[int]]:
    """Numbers of the samples that are answered together: all of them; or by stage, those without one first."""
    if not cascade:
        return [list(range(len(samples)))]
    of_stage: dict[int | None, list[int]] = {}
    for number, sample in enumerate(samples):
        of_stage.setdefault(sample.stage, []).append(number)
    return [of_stage[stage] for stage in sorted(of_stage, key=lambda stage: -1 if stage is None else stage)]


class Findings:
    """What was predicted so far, by image and stage."""

    def __init__(self, context: str) -> None:
        self.context = context
        self._lines: dict[str, list[tuple[int, str]]] = {}
        self._first: int | None = None
        self.lacking = 0
        """Questions of later stages that had nothing to go on."""

    def add(self, samples: Sequence[Sample], predicted: Mapping[int, str]) -> None:
        """Of a whole stage, `predicted` by the samples' ids."""
        for sample in samples:
            if sample.stage is not None:
                self._first = sample.stage if self._first is None else min(self._first, sample.stage)
                line = " ".join(f"- {sample.question} {predicted[sample.id]}".split())  # whatever lines it has
                self._lines.setdefault(sample.image_key, []).append((sample.stage, line))

    def asked(self, sample: Sample) -> Sample:
        """The sample as it is asked: the text of its last user turn that follows the image is put into the context."""
        stage = sample.stage
        if stage is None or self._first is None:
            return sample
        lines = [line for earlier, line in self._lines.get(sample.image_key, ()) if earlier < stage]
        if not lines:
            self.lacking += 1
            return sample
        number = max(i for i, message in enumerate(sample.messages) if message.role == "user")
        parts = sample.messages[number].parts
        after = max((i + 1 for i, part in enumerate(parts) if isinstance(part, int)), default=0)
        question = "".join(str(part) for part in parts[after:])
        # One after the other from the template's own pieces: a prediction may hold the letters {question}.
        text = question.join(piece.replace(FINDINGS, "\n".join(lines)) for piece in self.context.split(QUESTION))
        turn = Message("user", (*parts[:after], text))
        return replace(sample, messages=(*sample.messages[:number], turn, *sample.messages[number + 1 :]))
