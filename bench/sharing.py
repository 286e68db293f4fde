"""How many tokens sharing saves on real annotations: per step in order by_image, no image needed, nothing trained.

    python bench/sharing.py QUESTIONS.jsonl --model DIR [--template 120] [--image 768 576] [--batch 16]

DIR holds a Qwen3-VL's tokenizer, chat template and image settings. Each question is asked in a template of so many
tokens by its type, which its first words say; the first sentence of all templates is the same.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sameday.data.order import Place, epoch_steps
from sameday.data.questions import tree
from sameday.data.questions.encode import Encoded, Encoder
from sameday.data.questions.partition import Cut, micro_batches
from sameday.data.questions.processor import ImageProcessor
from sameday.data.questions.sample import ImageRef, Message, Sample
from sameday.models.families import family_of
from sameday.spec.order import Order
from sameday.tasks.vqa.task import items_of

FIRST = "You are looking at an image of an examination. Read the question and look at the whole image first. "
TYPES = {
    "yes or no": r"(?i)^(is|are|does|do|has|have|can)\b(?!.*all that)",
    "number": r"(?i)^how many",
    "colour": r"(?i)\bcolou?r",
    "place": r"(?i)^where",
    "size": r"(?i)\bsize",
    "list": r"(?i)all that",
    "name": r"",
}
RULES = " The answer is short, in lower case and without a full stop, and nothing is explained."
PLANS = {
    "nothing shared": (False, False, tree.LEAST),
    "share_images": (True, False, tree.LEAST),
    "share_images, share_text, without forks": (True, True, sys.maxsize),
    "share_images, share_text": (True, True, tree.LEAST),
}


def template(kind: str, tokens: int, tokenizer: Any) -> str:
    """Of about so many tokens."""

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    text = FIRST + f"This question asks for a {kind}." if tokens else ""
    while tokens and count(text) + count(RULES) < tokens:
        text += RULES
    return text + (" Question: " if tokens else "")


def questions(path: Path, size: Sequence[int], tokens: int, tokenizer: Any) -> list[Sample]:
    templates = {kind: template(kind, tokens, tokenizer) for kind in TYPES}
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        name, question = row.get("image_filename") or row["image"], row["question"]
        kind = next(kind for kind, words in TYPES.items() if re.search(words, question))
        image = ImageRef(Path(name), name, *size)
        asked = Message("user", (0, templates[kind] + question)), Message("assistant", (str(row["answer"]),))
        samples.append(Sample(number, f"{path.name}:{number}", (image,), asked, type=kind))
    return samples


def tokens_of(step: Sequence[Encoded], share_images: bool, share_text: bool) -> int:
    (parts,) = micro_batches(items_of(step, share_text), Cut(share_images, True, sys.maxsize))
    return sum(unit.tokens for part in parts for unit in part)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("questions", type=Path)
    asked.add_argument("--model", required=True)
    asked.add_argument("--template", type=int, nargs="+", default=[120], help="tokens")
    asked.add_argument("--image", type=int, nargs=2, default=[768, 576], help="width and height")
    asked.add_argument("--batch", type=int, default=16)
    args = asked.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoder = Encoder(tokenizer, ImageProcessor.load(family_of("qwen3_vl"), args.model))
    print(
        f"{args.questions.name}, images of {args.image[0]}×{args.image[1]}, steps of {args.batch} in order by_image\n"
    )
    print(f"{'tokens of a template':>20}  {'plan':40}{'tokens a step':>14}{'least to most':>18}{'of share_images':>17}")
    for tokens in args.template:
        encoded = [encoder.encode(each) for each in questions(args.questions, args.image, tokens, tokenizer)]
        places = [Place(each.sample.id, each.sample.image_key, None) for each in encoded]
        steps = epoch_steps(places, Order(kind="by_image"), args.batch, 0, 0)
        counts: dict[str, list[int]] = {}
        for name, (images, text, least) in PLANS.items():
            with patch.object(tree, "LEAST", least):
                counts[name] = [tokens_of([encoded[i] for i in step], images, text) for step in steps]
        base = statistics.mean(counts["share_images"])
        for name, each in counts.items():
            mean, spread = statistics.mean(each), f"{min(each):,} to {max(each):,}"
            print(f"{tokens:20}  {name:40}{mean:14,.0f}{spread:>18}{mean / base:16.2f}×")


if __name__ == "__main__":
    main()
