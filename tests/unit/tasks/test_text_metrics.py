"""Scores of written texts, against values worked out by hand and against the reference itself."""

from __future__ import annotations

import sys

import pytest
import sacrebleu
import snowballstemmer
from tests.support.deaths import forked

from lamina.errors import DataError, UnknownNameError
from lamina.tasks import metrics
from lamina.tasks.metrics import score_texts

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
HYPOTHESES = ["The cat sat on a mat .", "He is nice", "Nothing matches here at all"]
REFERENCES = ["The cat sat on the mat .", "He is nice to me.", "Quite another sentence"]


def rouge(prediction: str, reference: str) -> dict[str, float]:
    return score_texts(ROUGE, [prediction], [reference])


def test_rouge_counts_words_and_pairs_of_words():
    # 5 of 6 words are shared, 3 of 5 neighbours (the cat, cat sat, sat on), and "the cat sat on mat" in order
    scores = rouge("the cat sat on a mat", "the cat sat on the mat")
    assert list(scores) == list(ROUGE)
    assert scores == pytest.approx({"rouge1": 5 / 6, "rouge2": 3 / 5, "rougeL": 5 / 6, "rougeLsum": 5 / 6})


def test_rouge_is_the_mean_of_precision_and_recall():
    # precision 2/2, recall 2/4: F 2/3
    assert rouge("big cat", "a big cat sat")["rouge1"] == pytest.approx(2 / 3)


def test_rouge_is_the_mean_over_the_texts():
    assert score_texts(("rouge1",), ["cat", "cat", "x"], ["cat", "cat", "y"])["rouge1"] == pytest.approx(2 / 3)


def test_one_stemmer_serves_all_words(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    stemmer = snowballstemmer.stemmer
    monkeypatch.setattr(snowballstemmer, "stemmer", lambda name: made.append(name) or stemmer(name))
    metrics._porter.cache_clear()
    rouge("horses galloping", "foals grazing")
    assert made == ["porter"]


def test_rouge_looks_past_endings_case_and_signs():
    assert rouge("Running, CATS!", "runs -- cat") == pytest.approx({**dict.fromkeys(ROUGE, 1.0)})
    assert rouge("gas", "ga")["rouge1"] == 0.0  # words of up to three letters stay as they are


def test_only_one_of_the_two_longest_takes_each_line_for_a_sentence():
    # Turned around, the lines share no longer run than one line, but every line of one is in the other.
    scores = rouge("red cats sleep\nbig dogs bark", "big dogs bark\nred cats sleep")
    assert scores["rougeL"] == pytest.approx(3 / 6)
    assert scores["rougeLsum"] == pytest.approx(1.0)


def test_a_word_is_found_as_often_as_it_is_there():
    # Union of lines: "w1 w2" and "w1 w3" cover w1 w2 w3 of w1 w2 w3 w4 w5; 4 words written, w1 counts once.
    scores = rouge("wa wb\nwa wc", "wa wb wc wd we")
    assert scores["rougeLsum"] == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))


@pytest.mark.parametrize(("prediction", "reference"), [("", "a cat"), ("a cat", "..."), ("\n", "\n")])
def test_nothing_written_is_worth_nothing(prediction: str, reference: str):
    assert rouge(prediction, reference) == dict.fromkeys(ROUGE, 0.0)
    if reference == "a cat":
        assert score_texts(("bleu", "chrf"), [prediction], [reference]) == {"bleu": 0.0, "chrf": 0.0}


def test_corpus_scores_are_those_of_the_reference():
    scores = score_texts(("bleu", "chrf"), HYPOTHESES, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert 0 < scores["bleu"] < scores["chrf"] < 100


def test_bleu_by_hand():
    # 4 of 5 words, 2 of 4 pairs, 1 of 3 triples and no four: that is halved once instead; no word is missing.
    score = score_texts(("bleu",), ["a b c x e"], ["a b c d e"])["bleu"]
    assert score == pytest.approx(100 * (4 / 5 * 2 / 4 * 1 / 3 * (1 / 2) / 2) ** 0.25)


def test_names_that_are_none():
    with pytest.raises(UnknownNameError, match=r"metrics: unknown metric 'rougel'; .* Did you mean 'rougeL'\?"):
        score_texts(("rougel",), ["a"], ["a"])
    for texts, problem in (([], "there are no rows"), (["a"], "1 predictions for 0 targets")):
        with pytest.raises(DataError, match=f"metrics: {problem}"):
            score_texts(("rougeLsum",), texts, [])


def test_no_package_that_fetches_models_is_needed():
    """Some of ROUGE's own dependencies would download a sentence splitter."""
    names = (*ROUGE, "bleu", "chrf")

    def scored() -> None:
        for name in [name for name in sys.modules if name.startswith(("nltk", "rouge_score", "torchmetrics"))]:
            del sys.modules[name]
        sys.modules["nltk"] = None  # pyright: ignore
        sys.stdout.write(str(list(score_texts(names, ["a cat"], ["a cat"]))))

    ended = forked(scored)
    assert (ended.code, ended.out) == (0, str(list(names))), ended.err


def test_rouge_lsum_compares_sentences_and_not_lines_only():
    lead, reference = 'Mr. Fox ran. The dog slept! "It snowed." He left.', "The dog slept .\nHe left ."
    on_lines = score_texts(("rougeLsum",), [lead.replace(". ", ".\n").replace("! ", "!\n")], [reference])
    assert score_texts(("rougeLsum",), [lead], [reference]) == pytest.approx(on_lines, abs=0.05)
    swapped = score_texts(("rougeLsum",), ["He left. The dog slept."], ["The dog slept. He left."])
    assert swapped["rougeLsum"] == pytest.approx(1)  # by lines it would be 0.6
