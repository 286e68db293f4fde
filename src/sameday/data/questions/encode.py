"""From a sample to tokens: the chat template rendered piece by piece, image tokens expanded, answers marked, and
truncation that never cuts an image or a whole answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sameday.data.questions.sample import TEXT_MARK, Message, Sample
from sameday.spec.errors import BadInput

if TYPE_CHECKING:
    from sameday.data.questions.processor import ImageProcessor


OWN = 2
"""Tokens before its first target that a question shares with no other: the one that predicts it, whose logits must be
the question's own, and one before, so that none of its predicting places ends up in a fork."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """A question as the model sees it alone. `targets[t]` says that token t is to be predicted from those before."""

    sample: Sample
    tokens: np.ndarray
    targets: np.ndarray
    prefix: int
    grids: tuple[tuple[int, int], ...]
    image_spans: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @cached_property
    def target_count(self) -> int:
        return int(self.targets.sum())

    @cached_property
    def text(self) -> tuple[int, ...]:
        """What comes after the prefix and may be shared as well, as far as others agree. Nothing of a prompt, whose
        answer is to be generated."""
        if self.prefix == 0 or not self.targets.any():
            return ()
        return tuple(self.tokens[self.prefix : int(self.targets.argmax()) - OWN].tolist())

    @cached_property
    def key(self) -> bytes | None:
        """Equal for samples whose prefixes are computed alike: the same tokens and the same image content."""
        if self.prefix == 0:
            return None
        digest = hashlib.blake2b(self.tokens[: self.prefix].tobytes(), digest_size=16)
        for image, (_, end) in zip(self.sample.images, self.image_spans, strict=True):
            if end <= self.prefix:
                digest.update(image.digest.encode())
        return digest.digest()


class Encoder:
    """Holds the tokenizer, the image processor with its family's markers, and what the recipe says about prompts and
    length."""

    def __init__(
        self,
        tokenizer: Any,
        processor: ImageProcessor,
        system_prompt: str | None = None,
        max_length: int | None = None,
        answer_end: Literal["end_token", "turn"] = "end_token",
    ) -> None:
        self.tokenizer = tokenizer
        self.processor, self.family, self.merge_size = processor, processor.family, processor.merge_size
        self.system_prompt = system_prompt
        self.max_length, self.answer_end = max_length, answer_end
        markers = self.family.markers
        self.image_token = tokenizer.convert_tokens_to_ids(markers.image)
        self.end_token = tokenizer.convert_tokens_to_ids(markers.end_of_turn)
        self.header = self._tokenize(markers.user_header)

    def encode(self, sample: Sample) -> Encoded:
        ids, targets = self._turns(sample)
        grids = tuple(self.processor.grid(image.width, image.height) for image in sample.images)
        tokens, marks, spans = self._expand(ids, targets, grids, sample)
        first_target = int(marks.argmax())
        ends = [end for _, end in spans]
        after_image = ends[-1] + 1 if ends else 0  # the image's closing token belongs to the prefix
        # A prefix holds no position that predicts a target: what is shared is counted once, and must not be.
        prefix = min(after_image, first_target - OWN) if ends else 0
        if self.max_length is not None and len(tokens) > self.max_length:
            tokens, marks = self._truncate(tokens, marks, after_image, sample, self.max_length)
        return Encoded(sample, tokens, marks, prefix, grids, spans)

    def prompt(self, sample: Sample) -> Encoded:
        """Everything before the last answer, which is to be generated: without targets, and never cut."""
        ids, targets = self._turns(sample)
        before = len(targets) - targets[::-1].index(False)
        grids = tuple(self.processor.grid(image.width, image.height) for image in sample.images)
        tokens, none, spans = self._expand(ids[:before], [False] * before, grids, sample)
        return Encoded(sample, tokens, none, spans[-1][1] + 1 if spans else 0, grids, spans)

    def _turns(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Token ids with one image token per image. Each answer is tokenized on its own, as it will be generated."""
        messages = sample.messages
        if self.system_prompt is not None and messages[0].role != "system":
            messages = (Message("system", (self.system_prompt,)), *messages)
        ids: list[int] = []
        targets: list[bool] = []
        done = ""
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self._render(messages[:number], generate=True)
            whole = self._render(messages[: number + 1], generate=False)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise BadInput(
                    f"{sample.where}: the model's chat template rewrites earlier turns when a later one is added, "
                    "so the answer cannot be told from the prompt"
                )
            context = self._tokenize(prompt[len(done) :])
            if not done and self._begin and not prompt.startswith(self.tokenizer.bos_token):
                context = self._begin + context  # as transformers' processors do, where the template has it not
            ids += context
            targets += [False] * len(context)
            ids += (answer := self._tokenize(said := self._answer(whole[len(prompt) :])))
            targets += [True] * len(answer)
            done = prompt + said
        last = len(targets) - targets[::-1].index(True)
        return ids[:last], targets[:last]

    def _answer(self, text: str) -> str:
        """As much of what the template makes of an answer as is learned. The rest belongs to the next turn, with which
        the tokenizer may join it."""
        end = self.family.markers.end_of_turn
        if self.answer_end == "turn" or end not in text:
            return text
        return text[: text.index(end) + len(end)]

    @cached_property
    def _begin(self) -> list[int]:
        """The token that the tokenizer puts before every text; most of these have none."""
        first = self.tokenizer("a")["input_ids"][:1]
        return first if first == [self.tokenizer.bos_token_id] else []

    @cached_property
    def closing(self) -> str:
        """What is put behind each answer: the token that ends a turn, where the chat template leaves it out. Without it
        nothing would be learned about where to stop."""
        chat = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]
        prompt = self.tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        whole = self.tokenizer.apply_chat_template(chat, tokenize=False)
        end = self.family.markers.end_of_turn
        return "" if end in whole[len(prompt) :] else end

    @cached_property
    def note(self) -> str | None:
        if not self.closing:
            return None
        return f"the model's chat template does not end answers: {self.closing} is put behind each, and learned"

    @cached_property
    def opening(self) -> str:
        """What the chat template puts between a prompt and an answer's own text: the end of a reasoning, even of an
        empty one, in templates of models that reason."""
        before, mark, _ = self._said(TEXT_MARK).partition(TEXT_MARK)
        return before if mark and before.strip() else ""

    @cached_property
    def opening_note(self) -> str | None:
        if not self.opening:
            return None
        return (
            f"the model's chat template puts {self.opening!r} before each answer: it is learned; generated answers are "
            f"what comes behind {self.opened}"
        )

    @cached_property
    def opened(self) -> str:
        """What an opening ends with, and a reasoning too."""
        return self.opening.split()[-1]

    def own_text(self, answer: str) -> str:
        """Of an answer, as it is generated or stands in the data, what comes behind the template's opening."""
        if not self.opening or self.opened not in answer:
            return answer
        return answer.rpartition(self.opened)[2].lstrip()

    @cached_property
    def end_note(self) -> str | None:
        """What is learned behind an answer's end, which families have differently."""
        if self.answer_end == "end_token":
            return None
        end = self.family.markers.end_of_turn
        behind = self._said("a").partition(end)[2]
        if not behind:
            return f"answer_end turn: nothing follows {end} in the model's chat template; end_token is the same"
        return f"answer_end turn: {behind!r}, which the model's chat template has behind {end}, is learned with answers"

    def _said(self, answer: str) -> str:
        """What the chat template makes of an answer."""
        ask, reply = Message("user", ("a",)), Message("assistant", (answer,))
        return self._render((ask, reply), generate=False)[len(self._render((ask,), generate=True)) :]

    @cached_property
    def _before_answer(self) -> int:
        """How many tokens the chat template has between a question's text and its answer."""
        marked = self._render((Message("user", (TEXT_MARK,)),), generate=True)
        return len(self._tokenize(marked[marked.rindex(TEXT_MARK) + len(TEXT_MARK) :]))

    def _behind_end(self, answer: list[int]) -> int:
        """How many tokens the chat template has behind the one that ends a turn."""
        return len(answer) - 1 - answer.index(self.end_token) if self.end_token in answer else 0

    @cached_property
    def learned_behind_end(self) -> int:
        """How many of them are learned, though no answer that is generated has them."""
        if self.answer_end == "end_token":
            return 0
        return self._behind_end(self._tokenize(self._said("a")))

    def user_turn(self, parts: tuple[str | int, ...]) -> str:
        """A user turn in the chat template, up to its answer."""
        return self._render((Message("user", parts),), generate=True)

    def _render(self, messages: tuple[Message, ...], generate: bool) -> str:
        chat: list[dict[str, Any]] = [
            {
                "role": m.role,
                "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in m.parts],
            }
            for m in messages
        ]
        for turn in chat:
            if self.closing and turn["role"] == "assistant":
                turn["content"][-1]["text"] += self.closing
        text: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
        written = self.family.markers.written
        return text if written is None else text.replace(*written)

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _expand(
        self, ids: list[int], targets: list[bool], grids: tuple[tuple[int, int], ...], sample: Sample
    ) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
        images = ids.count(self.image_token)
        if images != len(grids):
            raise BadInput(f"{sample.where}: {images} image tokens in the prompt for {len(grids)} images")
        tokens: list[int] = []
        marks: list[bool] = []
        spans: list[tuple[int, int]] = []
        for token, target in zip(ids, targets, strict=True):
            repeat = 1
            if token == self.image_token:
                repeat = self.family.image_tokens(grids[len(spans)], self.merge_size)
                spans.append((len(tokens), len(tokens) + repeat))
            tokens += [token] * repeat
            marks += [target] * repeat
        return np.asarray(tokens, np.int64), np.asarray(marks, bool), tuple(spans)

    def _truncate(
        self, tokens: np.ndarray, marks: np.ndarray, after_image: int, sample: Sample, limit: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The last answer loses its end first, down to one token; then the last turn's text after its image does."""
        answer = len(marks) - int((~marks[::-1]).argmax())
        keep = max(1, limit - answer)
        tokens, marks = tokens[: answer + keep], marks[: answer + keep]
        excess = len(tokens) - limit
        if excess > 0:
            # What closes the question (end of turn, the assistant's opening) stays.
            closing = answer - self._before_answer
            first = max(after_image, self._text_start(tokens, closing))
            if closing - first < excess:
                raise BadInput(
                    f"{sample.where}: max_length {limit} has no room for what is never cut (images, earlier turns, the "
                    f"turn's frame and one token of the answer), which takes {len(tokens) - (closing - first)} tokens"
                )
            kept = np.r_[0 : closing - excess, closing : len(tokens)]
            tokens, marks = tokens[kept], marks[kept]
        return tokens, marks

    def _text_start(self, tokens: np.ndarray, closing: int) -> int:
        """Where the text of the last user turn may be cut from: behind its header and the line break, which a
        tokenizer may have joined with line breaks of the text."""
        for at in range(closing - len(self.header), -1, -1):
            if tokens[at : at + len(self.header)].tolist() == self.header:
                return min(closing, at + len(self.header) + 1)
        return closing
