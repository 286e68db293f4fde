"""How many words two texts share, by the libraries that the challenges count with: BLEU (sacrebleu), ROUGE
(rouge-score), METEOR (nltk). What is not installed is left out, with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

ORDER = 4
"""The longest n-grams of BLEU."""
BLEU_COUNTS = 2 * ORDER + 2
"""N-grams that match, by their length; n-grams of the prediction; tokens of the prediction and of the answer."""
ROUGE = ("rouge1", "rouge2", "rougeL")

Scorer = Callable[[str, str], dict[str, float]]


class Unavailable(Exception):
    """A metric that this machine cannot compute, and what it lacks, as a sentence."""


def missing(metrics: str, package: str) -> Unavailable:
    return Unavailable(f"{metrics} left out: {package} is not installed (pip install {package})")


@cache
def bleu_counter() -> Callable[[str, str], list[int]]:
    """What corpus BLEU is computed from, of one answer and one prediction; these counts are summed over questions."""
    try:
        from sacrebleu.metrics.helpers import extract_all_word_ngrams
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    except ImportError:
        raise missing("BLEU is", "sacrebleu") from None
    split = Tokenizer13a()

    def count(answer: str, given: str) -> list[int]:
        (right, right_tokens), (told, tokens) = (extract_all_word_ngrams(split(t), 1, ORDER) for t in (answer, given))
        matches = [0] * ORDER
        for ngram, times in (right & told).items():
            matches[len(ngram) - 1] += times
        return [*matches, *(max(0, tokens - n) for n in range(ORDER)), tokens, right_tokens]

    return count


def bleu(counts: Sequence[int]) -> float:
    """Corpus BLEU, 0 to 1, without smoothing, of summed counts."""
    from sacrebleu.metrics.bleu import BLEU

    *ngrams, tokens, right_tokens = map(int, counts)
    score = BLEU.compute_bleu(ngrams[:ORDER], ngrams[ORDER:], tokens, right_tokens, smooth_method="none")
    return min(1.0, float(score.score) / 100)  # which rounding may exceed by a bit


@cache
def rouge_scorer() -> Scorer:
    """ROUGE-1, ROUGE-2 and ROUGE-L: F measures, without a stemmer."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise missing("ROUGE is", "rouge-score") from None
    scorer = RougeScorer(ROUGE, use_stemmer=False)
    return lambda answer, given: {name: float(s.fmeasure) for name, s in scorer.score(answer, given).items()}


def unread_by_rouge(answer: str) -> bool:
    """Whether it has letters that rouge-score does not read, which knows a to z and digits alone: "größe" is two words
    to it, and "дом" none, so that its ROUGE is 0 even where it is right."""
    return any(letter.isalnum() and not letter.isascii() for letter in answer.lower())


@cache
def meteor_scorer() -> Scorer:
    """Of words that are equal, have one stem, or are synonyms in WordNet."""
    try:
        from nltk import word_tokenize
        from nltk.translate.meteor_score import single_meteor_score
    except ImportError:
        raise missing("METEOR is", "nltk") from None

    def score(answer: str, given: str) -> dict[str, float]:
        return {"meteor": float(single_meteor_score(word_tokenize(answer), word_tokenize(given)))}

    lacking = []
    for name, uses_it in (
        ("wordnet", lambda: single_meteor_score(["one"], ["other"])),
        ("punkt_tab", lambda: word_tokenize("one")),
    ):
        try:
            uses_it()
        except LookupError:
            lacking.append(name)
    if lacking:
        raise Unavailable(
            f"METEOR is left out: nltk's data {' and '.join(lacking)} not found, which no package brings; "
            f"`python -m nltk.downloader {' '.join(lacking)}` fetches it, or copy nltk_data from a machine that has it"
        )
    return score
