"""Tokens are transformers' own, answers alone are learned, truncation cuts no image and no whole answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sameday.data.questions.encode import Encoded, Encoder
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.models.families import family_of, known_families
from sameday.spec.errors import BadInput

QWEN = family_of("qwen3_vl")
IMAGE_TOKEN, END_OF_TURN, VISION_END = QWEN.markers.image, QWEN.markers.end_of_turn, "<|vision_end|>"
REAL_DATA = os.environ.get("SAMEDAY_TEST_DATA")
SMALL, WIDE = ImageRef(Path("small.png"), "small", 48, 48), ImageRef(Path("wide.png"), "wide", 96, 64)
QUESTIONS = ("what size is the red polyp?", "Is there\n\n  a wall?", "どこ 🙂 é", "1, 2; 3.5 mm?", "a\n")
ANSWERS = ("no", "near the left wall", "12.5 mm", "Ünï 漢字 🙂", "two\nlines")


@dataclass(frozen=True)
class Kit:
    """A tokenizer with the arithmetic of its image processor."""

    tokenizer: Any
    processor: ImageProcessor

    def encoder(self, system_prompt: str | None = None, max_length: int | None = None) -> Encoder:
        return Encoder(self.tokenizer, self.processor, system_prompt, max_length)

    def id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)


@pytest.fixture(scope="module", params=["tiny", "qwen3-vl"])
def kit(request: pytest.FixtureRequest) -> Kit:
    from transformers import AutoTokenizer

    if request.param == "tiny":
        folder = request.getfixturevalue("tiny_qwen3")
    elif REAL_DATA:
        folder = Path(REAL_DATA) / "qwen3-vl-processor"
    else:
        pytest.skip("SAMEDAY_TEST_DATA names no folder with qwen3-vl-processor/")
    return Kit(AutoTokenizer.from_pretrained(folder), ImageProcessor.load(QWEN, str(folder)))


@pytest.fixture(scope="module")
def tiny(tiny_qwen3: Path) -> Kit:
    from transformers import AutoTokenizer

    return Kit(AutoTokenizer.from_pretrained(tiny_qwen3), ImageProcessor.load(QWEN, str(tiny_qwen3)))


def user(*parts: str | int) -> Message:
    return Message("user", parts)


def assistant(text: str) -> Message:
    return Message("assistant", (text,))


def make(*messages: Message, images: tuple[ImageRef, ...] = (), id: int = 7) -> Sample:
    return Sample(id, f"train.jsonl:{id}", images, messages)


def single(question: str, answer: str, *images: ImageRef) -> Sample:
    return make(user(*range(len(images)), question), assistant(answer), images=images)


def reference(kit: Kit, sample: Sample) -> list[int]:
    """transformers' tokens of the rendered chat, up to the last end of turn."""
    chat = [
        {
            "role": m.role,
            "content": [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in m.parts],
        }
        for m in sample.messages
    ]
    first, *rest = kit.tokenizer.apply_chat_template(chat, tokenize=False).split(IMAGE_TOKEN)
    for image, text in zip(sample.images, rest, strict=True):
        first += IMAGE_TOKEN * kit.processor.tokens(image.width, image.height) + text
    ids = kit.tokenizer(first)["input_ids"]
    return ids[: len(ids) - ids[::-1].index(kit.id(END_OF_TURN))]


def learned(kit: Kit, encoded: Encoded) -> list[str]:
    """The texts of the runs of targets."""
    edges = np.flatnonzero(np.diff(np.r_[False, encoded.targets, False]))
    return [kit.tokenizer.decode(encoded.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("images", [(), (SMALL,), (SMALL, WIDE)], ids=["text", "one", "two"])
@pytest.mark.parametrize(("question", "answer"), list(zip(QUESTIONS, ANSWERS, strict=True)))
def test_tokens_are_those_of_transformers(kit: Kit, question: str, answer: str, images: tuple[ImageRef, ...]) -> None:
    sample = single(question, answer, *images)
    encoded = kit.encoder().encode(sample)
    assert encoded.tokens.tolist() == reference(kit, sample)
    assert learned(kit, encoded) == [answer + END_OF_TURN]
    assert encoded.targets[-1] and encoded.target_count == encoded.targets.sum()


def test_the_line_break_after_an_answer_is_learned_where_asked(kit: Kit) -> None:
    sample = make(user(0, "what?"), assistant("a polyp"), user("where?"), assistant("near"), images=(SMALL,))
    alone, turn = (Encoder(kit.tokenizer, kit.processor, answer_end=end) for end in ("end_token", "turn"))
    ends = [text + END_OF_TURN for text in ("a polyp", "near")]
    assert learned(kit, alone.encode(sample)) == ends
    encoded = turn.encode(sample)
    assert learned(kit, encoded) == [end + "\n" for end in ends]
    assert encoded.tokens[:-1].tolist() == alone.encode(sample).tokens.tolist()
    assert (alone.learned_behind_end, turn.learned_behind_end) == (0, 1)


ENDS = {"gemma3": ("<end_of_turn>", "\n"), "llava": ("</s>", " ")}


@pytest.mark.parametrize("family", known_families())
def test_what_is_learned_behind_an_answer_is_said_of_each_family(family: str, tiny_models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    end, behind = ENDS.get(family, ("<|im_end|>", "\n"))
    folder = tiny_models[family]
    kit = Kit(AutoTokenizer.from_pretrained(folder), ImageProcessor.load(family_of(family), str(folder)))
    whole, short = (Encoder(kit.tokenizer, kit.processor, answer_end=each) for each in ("turn", "end_token"))
    assert short.end_note is None
    sentence = f"answer_end turn: {behind!r}, which the model's chat template has behind {end}, is learned with answers"
    assert whole.end_note == sentence
    sample = Sample(1, "a:1", (), (Message("user", ("q",)), Message("assistant", ("a",))))
    longer = whole.encode(sample).tokens[len(short.encode(sample).tokens) :]
    assert kit.tokenizer.decode(longer) == behind


def test_images_lie_where_their_spans_say(kit: Kit) -> None:
    sample = make(user("first", 1, "then", 0, "differ?"), assistant("yes"), images=(SMALL, WIDE))
    encoded = kit.encoder().encode(make(*sample.messages, images=sample.images))
    inside = np.zeros(encoded.length, bool)
    for (start, end), (high, wide) in zip(encoded.image_spans, encoded.grids, strict=True):
        assert end - start == high * wide // kit.processor.merge_size**2
        inside[start:end] = True
    assert np.array_equal(inside, encoded.tokens == kit.id(IMAGE_TOKEN))


def test_every_assistant_turn_is_learned(kit: Kit) -> None:
    sample = make(
        user(0, "what?"),
        assistant("a polyp"),
        user("where?"),
        assistant("near the wall"),
        user("size?"),
        assistant("3 mm"),
        images=(SMALL,),
    )
    encoded = kit.encoder().encode(sample)
    assert encoded.tokens.tolist() == reference(kit, sample)
    assert learned(kit, encoded) == [text + END_OF_TURN for text in ("a polyp", "near the wall", "3 mm")]


@pytest.mark.parametrize("images", [(SMALL,), (SMALL, WIDE)], ids=["one", "two"])
def test_the_prefix_ends_after_the_last_image(kit: Kit, images: tuple[ImageRef, ...]) -> None:
    encoded = kit.encoder("be brief").encode(single("where?", "there", *images))
    assert encoded.tokens[encoded.prefix - 1] == kit.id(VISION_END)
    assert encoded.prefix == np.flatnonzero(encoded.tokens == kit.id(VISION_END))[-1] + 1


def test_without_an_image_there_is_no_prefix(kit: Kit) -> None:
    encoded = kit.encoder("be brief").encode(single("where?", "there"))
    assert encoded.prefix == 0 and encoded.key is None


@pytest.mark.parametrize("first", [(), (SMALL,)], ids=["image in the second turn", "image in both turns"])
def test_the_prefix_holds_no_place_that_predicts(kit: Kit, first: tuple[ImageRef, ...]) -> None:
    sample = make(
        user(*range(len(first)), "what?"),
        assistant("a wall"),
        user(len(first), "and here?"),
        assistant("no"),
        images=(*first, WIDE),
    )
    encoded = kit.encoder().encode(sample)
    predicting = np.flatnonzero(encoded.targets) - 1
    assert 0 < encoded.prefix <= predicting.min()
    # No image is cut in two by the prefix.
    assert all(end <= encoded.prefix or start >= encoded.prefix for start, end in encoded.image_spans)


def test_a_system_prompt_is_put_where_there_is_none(kit: Kit) -> None:
    bare = single("where?", "there", SMALL)
    system = Message("system", ("be brief",))
    given_one = replace(bare, messages=(system, *bare.messages))
    with_prompt = kit.encoder("be brief").encode(bare)
    assert with_prompt.tokens.tolist() == reference(kit, given_one)
    own = replace(bare, messages=(Message("system", ("be exact",)), *bare.messages))
    assert kit.encoder("be brief").encode(own).tokens.tolist() == reference(kit, own)
    assert kit.encoder().encode(bare).tokens.tolist() == reference(kit, bare)


def test_the_key_is_equal_exactly_where_prefixes_are_computed_alike(kit: Kit) -> None:
    encode = kit.encoder().encode
    here = encode(single("where?", "there", SMALL))
    assert encode(single("what size?", "3 mm", SMALL)).key == here.key is not None
    # The same pixels under another file name.
    assert encode(single("where?", "there", replace(SMALL, path=Path("copy.png")))).key == here.key
    twin = encode(single("where?", "there", replace(SMALL, digest="twin")))
    assert np.array_equal(twin.tokens, here.tokens) and twin.key != here.key
    assert kit.encoder("be brief").encode(single("where?", "there", SMALL)).key != here.key
    assert (
        kit.encoder("be brief").encode(single("?", "!", SMALL)).key
        != kit.encoder("be exact").encode(single("?", "!", SMALL)).key
    )
    two = encode(single("where?", "there", SMALL, replace(SMALL, digest="twin")))
    swapped = encode(single("where?", "there", replace(SMALL, digest="twin"), SMALL))
    assert np.array_equal(two.tokens, swapped.tokens) and two.key != swapped.key
    assert encode(single("where?", "there", WIDE)).key != here.key


def test_text_before_the_image_is_part_of_the_prefix(kit: Kit) -> None:
    encode = kit.encoder().encode
    keys = {
        encode(make(user(text, 0, "where?"), assistant("there"), images=(SMALL,))).key
        for text in ("look:", "see:", "look:")
    }
    assert len(keys) == 2


def test_more_image_tokens_than_images_are_refused(tiny: Kit) -> None:
    with pytest.raises(BadInput, match=r"train\.jsonl:7: 2 image tokens in the prompt for 1 images"):
        tiny.encoder().encode(single(f"what is {IMAGE_TOKEN}?", "no", SMALL))


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    encoder = Encoder(tokenizer, ImageProcessor.load(QWEN, str(tiny_qwen3)))
    with pytest.raises(BadInput, match=r"train\.jsonl:7: .* rewrites earlier turns"):
        encoder.encode(single("where?", "there", SMALL))


# Truncation

words = st.lists(st.sampled_from(("polyp", "left", "wall", "red", "mm")), min_size=1, max_size=40).map(" ".join)
pictures = st.sampled_from([(), (SMALL,), (WIDE,), (SMALL, WIDE)])
shares = st.integers(1, 110)
"""The limit, in hundredths of the whole sample's length."""


@dataclass(frozen=True)
class Cut:
    """A question whole and under a limit, and where its answer starts in both."""

    whole: Encoded
    short: Encoded

    @property
    def whole_answer(self) -> int:
        return self.whole.length - self.whole.target_count

    @property
    def short_answer(self) -> int:
        return self.short.length - self.short.target_count


def cut(kit: Kit, sample: Sample, share: int) -> Cut:
    """Skips the example where the limit refuses the sample."""
    whole = kit.encoder().encode(sample)
    try:
        return Cut(whole, kit.encoder(max_length=max(1, whole.length * share // 100)).encode(sample))
    except BadInput:
        assume(False)
        raise


@given(question=words, answer=words, images=pictures, share=shares)
def test_truncation_keeps_images_and_some_answer(
    tiny: Kit, question: str, answer: str, images: tuple[ImageRef, ...], share: int
) -> None:
    both = cut(tiny, single(question, answer, *images), share)
    whole, short = both.whole, both.short
    assert short.length == min(whole.length, max(1, whole.length * share // 100))
    assert short.target_count >= 1 and short.targets[-1]
    assert short.image_spans == whole.image_spans and short.grids == whole.grids
    assert (short.tokens == tiny.id(IMAGE_TOKEN)).sum() == sum(b - a for a, b in whole.image_spans)
    assert short.prefix == whole.prefix and short.key == whole.key
    kept = short.tokens[both.short_answer :]
    assert np.array_equal(kept, whole.tokens[both.whole_answer :][: len(kept)])


@given(question=words, answer=words, images=pictures, share=shares)
def test_the_question_is_cut_only_once_the_answer_is_one_token(
    tiny: Kit, question: str, answer: str, images: tuple[ImageRef, ...], share: int
) -> None:
    both = cut(tiny, single(question, answer, *images), share)
    prompt, whole_prompt = both.short.tokens[: both.short_answer], both.whole.tokens[: both.whole_answer]
    if both.short.target_count > 1:
        assert np.array_equal(prompt, whole_prompt)
    # What is left of the prompt is its start and its end, with a piece of the question's end gone.
    start = int((prompt == whole_prompt[: len(prompt)]).cumprod().sum())
    assert np.array_equal(prompt[start:], whole_prompt[len(whole_prompt) - (len(prompt) - start) :])


@given(question=words, answer=words, images=pictures, share=shares)
def test_the_end_is_learned_only_of_a_whole_answer(
    tiny: Kit, question: str, answer: str, images: tuple[ImageRef, ...], share: int
) -> None:
    both = cut(tiny, single(question, answer, *images), share)
    complete = both.short.target_count == both.whole.target_count
    ends = both.short.tokens[both.short.targets] == tiny.id(END_OF_TURN)
    assert ends.sum() == (1 if complete else 0)


@given(question=words, answer=words, images=pictures, share=shares, system=st.booleans())
def test_the_turns_frame_is_never_cut(
    tiny: Kit, question: str, answer: str, images: tuple[ImageRef, ...], share: int, system: bool
) -> None:
    sample = single(question, answer, *images)
    if system:
        sample = replace(sample, messages=(Message("system", ("be brief",)), *sample.messages))
    both = cut(tiny, sample, share)
    text, whole = (tiny.tokenizer.decode(e.tokens.tolist()) for e in (both.short, both.whole))
    for piece in (whole[: whole.index("user\n") + 5], END_OF_TURN + "\n<|im_start|>assistant\n"):
        assert piece in text


@given(question=words, answer=words, images=pictures, share=shares)
def test_a_limit_is_refused_exactly_where_it_has_no_room(
    tiny: Kit, question: str, answer: str, images: tuple[ImageRef, ...], share: int
) -> None:
    sample = single(question, answer, *images)
    whole = tiny.encoder().encode(sample)
    limit = max(1, whole.length * share // 100)
    asked = len(tiny.tokenizer(question)["input_ids"])
    least = whole.length - asked - (whole.target_count - 1)
    if limit >= min(least, whole.length):
        assert tiny.encoder(max_length=limit).encode(sample).length <= limit
        return
    with pytest.raises(BadInput) as refusal:
        tiny.encoder(max_length=limit).encode(sample)
    message = str(refusal.value)
    assert message.startswith("train.jsonl:7: ") and f"max_length {limit} " in message
    assert f"which takes {least} tokens" in message


@given(answers=st.tuples(words, words), question=words, share=shares)
def test_earlier_answers_survive_or_the_sample_is_refused(
    tiny: Kit, answers: tuple[str, str], question: str, share: int
) -> None:
    sample = make(user(0, "what?"), assistant(answers[0]), user(question), assistant(answers[1]), images=(SMALL,))
    whole = tiny.encoder().encode(sample)
    limit = max(1, whole.length * share // 100)
    try:
        short = tiny.encoder(max_length=limit).encode(sample)
    except BadInput as refusal:
        assert "train.jsonl:7" in str(refusal) and f"max_length {limit} " in str(refusal)
        assert whole.length > limit
        return
    assert short.length == min(limit, whole.length)
    texts = learned(tiny, short)
    assert texts[0] == answers[0] + END_OF_TURN
    assert len(texts) == 2 and (answers[1] + END_OF_TURN).startswith(texts[1])


@pytest.mark.parametrize("images", [(), (SMALL,)], ids=["text", "image"])
def test_a_question_that_starts_with_line_breaks_can_be_cut(kit: Kit, images: tuple[ImageRef, ...]) -> None:
    """Its breaks may become one token with the one that ends the turn's header."""
    text = "\n\n" + "left wall " * 20
    sample = make(user(text, *range(len(images)), text), assistant("no"), images=images)
    whole = kit.encoder().encode(sample)
    short = kit.encoder(max_length=whole.length - 10).encode(sample)
    assert short.length == whole.length - 10 and short.target_count == 1
    assert short.tokens[: whole.prefix or 3].tolist() == whole.tokens[: whole.prefix or 3].tolist()


CHEAP: dict[str, Callable[[], Sample]] = {
    "no question left": lambda: single("polyp " * 30, "no", SMALL),
    "answer of one token": lambda: single("polyp", "red", SMALL),
}


@pytest.mark.parametrize("what", CHEAP)
def test_the_tightest_limit_leaves_the_frame_and_one_token(kit: Kit, what: str) -> None:
    sample = CHEAP[what]()
    whole = kit.encoder().encode(sample)
    least = whole.length
    for limit in range(whole.length, 0, -1):
        try:
            least = kit.encoder(max_length=limit).encode(sample).length
        except BadInput:
            break
    tightest = kit.encoder(max_length=least).encode(sample)
    text = kit.tokenizer.decode(tightest.tokens[tightest.prefix :].tolist())
    assert text.startswith("<|im_end|>\n<|im_start|>assistant\n") and tightest.target_count == 1
