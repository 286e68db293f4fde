"""BLEU, ROUGE and METEOR are the libraries' own numbers, as the challenges' library computes them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from answered import prediction, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from sameday.evaluate import overlap
from sameday.evaluate.measure import measure

pairs = st.lists(st.tuples(texts, texts), min_size=1, max_size=6)


def bleu_of(pairs: list[tuple[str, str]]) -> float:
    counted = [overlap.bleu_counter()(*pair) for pair in pairs]
    return overlap.bleu([sum(column) for column in zip(*counted, strict=True)])


def by_definition(pairs: list[tuple[list[str], list[str]]]) -> float:
    """Corpus BLEU as the challenges' library has it: no smoothing, 0 where an order of n-grams is missing."""
    lengths = [sum(len(tokens) for tokens in side) for side in zip(*pairs, strict=True)]
    product = 1.0
    for order in range(1, 5):
        hits = total = 0
        for pair in pairs:
            right, told = (Counter(tuple(t[i : i + order]) for i in range(len(t) - order + 1)) for t in pair)
            hits, total = hits + (right & told).total(), total + told.total()
        product *= hits / total if total else 0.0
    return product**0.25 * (math.exp(min(0.0, 1 - lengths[0] / lengths[1])) if all(lengths) else 0.0)


@given(pairs)
def test_bleu_is_corpus_bleu(pairs: list[tuple[str, str]]) -> None:
    """By its definition, and as sacrebleu itself computes it, which cuts off spaces at the end."""
    sacrebleu = pytest.importorskip("sacrebleu")
    split = pytest.importorskip("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    tokens = [tuple(split(text).split() for text in pair) for pair in pairs]
    assert bleu_of(pairs) == pytest.approx(by_definition(tokens), abs=1e-9)
    pairs = [(answer.rstrip(), told.rstrip()) for answer, told in pairs]
    usual = sacrebleu.BLEU(tokenize="13a", smooth_method="none")
    score = usual.corpus_score([told for _, told in pairs], [[answer for answer, _ in pairs]])
    assert bleu_of(pairs) == pytest.approx(score.score / 100, abs=1e-9)


def test_bleu_of_texts_that_end_in_a_line_break() -> None:
    """A hyphen there joins two lines, as in the challenges' library; sacrebleu itself cuts off the break first."""
    pytest.importorskip("sacrebleu")
    assert overlap.bleu_counter()("a b c d", "a b c d-\n") == [4, 3, 2, 1, 4, 3, 2, 1, 4, 4]


@given(texts, texts)
def test_rouge_is_the_librarys_f_measure_without_a_stemmer(answer: str, told: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    usual = scorer.RougeScorer(["rouge1", "rouge2", "rougeL"]).score(answer, told)
    assert overlap.rouge_scorer()(answer, told) == {name: score.fmeasure for name, score in usual.items()}


@given(st.text(min_size=1, max_size=6))
def test_what_rouge_reads_of_a_right_answer(answer: str) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    score = scorer.RougeScorer(["rouge1"]).score(answer, answer)["rouge1"].fmeasure
    assert score == 1 or overlap.unread_by_rouge(answer) or not any(map(str.isalnum, answer))
    assert not (answer.isascii() and overlap.unread_by_rouge(answer))


def test_answers_that_rouge_cannot_read_are_told_beside_it() -> None:
    pytest.importorskip("rouge_score.rouge_scorer")
    note = (
        "2 of 3 right answers have letters that ROUGE does not read (rouge-score knows a to z and digits alone): a "
        "word of such letters counts for nothing, even where it is right"
    )
    measured = measure([prediction(word, word, n) for n, word in enumerate(("дом", "größe", "yes"))], resamples=2)
    assert measured["metrics"]["rouge1"]["value"] == pytest.approx(2 / 3) and note in measured["notes"]
    plain = measure([prediction("yes", "нет", 0)], resamples=2)
    assert not any("ROUGE does not read" in each for each in plain["notes"])


@settings(max_examples=15)
@given(pairs)
def test_rouge_of_a_set_is_the_mean(pairs: list[tuple[str, str]]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    usual = scorer.RougeScorer(["rougeL"])
    mean = sum(usual.score(*pair)["rougeL"].fmeasure for pair in pairs) / len(pairs)
    measured = measure([prediction(*pair, n) for n, pair in enumerate(pairs)], resamples=2)
    assert measured["metrics"]["rougeL"]["value"] == pytest.approx(mean, abs=1e-9)


WORDNET = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import nltk
from sameday.evaluate.overlap import Unavailable, meteor_scorer
from sameday.evaluate.measure import measure
from answered import prediction

nltk.data.path[:] = []
try:
    meteor_scorer()
except Unavailable as why:
    print(why)
asked = [prediction("the red mass", "red growth"), prediction("polyp", "polyps", 1)]
said = measure(asked, resamples=2)
assert "meteor" not in said["metrics"] and any(note.startswith("METEOR is left out") for note in said["notes"])

nltk.data.path[:] = [sys.argv[1]]
score = meteor_scorer()
from nltk.translate.meteor_score import single_meteor_score
for answer, given in (("the red mass", "red growth"), ("polyp", "polyps"), ("", "a"), ("", ""), ("東京", "é . b")):
    mine = score(answer, given)["meteor"]
    plain = single_meteor_score(nltk.word_tokenize(answer), nltk.word_tokenize(given))
    assert abs(mine - plain) < 1e-9, (mine, plain)
assert score("mass", "growth")["meteor"] > 0 and score("mass", "ulcer")["meteor"] == 0
said = measure(asked, resamples=50)
whole = said["metrics"]["meteor"]
assert abs(whole["value"] - sum(score(p.answer, p.prediction)["meteor"] for p in asked) / 2) < 1e-9
assert whole["low"] <= whole["value"] <= whole["high"]
assert not {"torch", "transformers"} & set(sys.modules), "metrics are counted without them"
"""


def write_wordnet(home: Path) -> None:
    """One meaning, which two words have, in WordNet's own format; and a sentence splitter that has learned nothing."""
    wordnet, punkt = home / "corpora/wordnet", home / "tokenizers/punkt_tab/english"
    for folder in (wordnet, punkt):
        folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).touch()
    for kind in ("noun", "verb", "adj", "adv"):
        for name in (f"data.{kind}", f"index.{kind}", f"{kind}.exc"):
            (wordnet / name).touch()
    for name in ("cntlist.rev", "index.sense"):
        (wordnet / name).touch()
    (wordnet / "lexnames").write_text("00\tnoun.all\t1\n")
    license_line = "  1 This software and database is being provided  \n"
    (wordnet / "data.noun").write_text(
        f"{license_line}{len(license_line):08d} 00 n 02 mass 0 growth 0 000 | something that grows  \n"
    )
    (wordnet / "index.noun").write_text(
        "".join(f"{word} n 1 0 1 0 {len(license_line):08d}  \n" for word in ("growth", "mass"))
    )


def test_meteor_where_wordnet_is_and_a_sentence_where_it_is_not(tmp_path: Path) -> None:
    """In a process of its own: nltk keeps what it loaded."""
    pytest.importorskip("nltk")
    write_wordnet(tmp_path / "nltk_data")
    done = subprocess.run(
        [sys.executable, "-c", WORDNET, tmp_path / "nltk_data", Path(__file__).parents[1]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "METEOR is left out: nltk's data wordnet and punkt_tab not found, which no package brings; `python -m "
        "nltk.downloader wordnet punkt_tab` fetches it, or copy nltk_data from a machine that has it\n"
    )


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sameday.evaluate import sums

    for module in ("sacrebleu.metrics.helpers", "rouge_score.rouge_scorer", "nltk", "sklearn.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    makers = (overlap.bleu_counter, overlap.rouge_scorer, overlap.meteor_scorer, sums.class_scorer)
    for maker in makers:
        maker.cache_clear()
    try:
        measured = measure([prediction("yes", "yes"), prediction("no", "yes", 1)], resamples=20)
    finally:
        for maker in makers:
            maker.cache_clear()
    assert measured["notes"][:4] == [
        "ROUGE is left out: rouge-score is not installed (pip install rouge-score)",
        "METEOR is left out: nltk is not installed (pip install nltk)",
        "BLEU is left out: sacrebleu is not installed (pip install sacrebleu)",
        "Accuracy and macro scores over answers are left out: scikit-learn is not installed (pip install scikit-learn)",
    ]
    assert measured["metrics"]["exact_match"]["value"] == 0.5
    assert not {"bleu", "rouge1", "meteor", "accuracy", "macro_f1"} & measured["metrics"].keys()
