"""How good written texts are: ROUGE of summaries, BLEU and chrF of translations."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from lamina.errors import UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SIGNS = re.compile(r"[^a-z0-9]+")
_STEMMED = 4  # letters: shorter words stay as they are


def score_texts(metrics: Sequence[str], predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Score texts against the ones that were to be written.

    Args:
        metrics: Names, some of `TEXT_METRICS`.
        predictions: What was written.
        references: What was to be written: one text for each, and at least one.

    Returns:
        Name to score, in the order asked. "rouge1", "rouge2", "rougeL" and "rougeLsum" are the mean over the texts of
        the F-measure, 0 to 1, of words in lower case that Porter's algorithm has stemmed; "rougeLsum" takes each line
        for a sentence. "bleu" and "chrf" are of the whole corpus, 0 to 100, as sacrebleu computes them by default.

    Raises:
        UnknownNameError: If a metric is none of these.

    Source:
        Lin 2004, aclanthology.org/W04-1013. Post 2018, arXiv:1804.08771. Popović 2015, aclanthology.org/W15-3049.
        The stemmer is as Porter published it; others add exceptions for a few words, which moves ROUGE by less than
        0.001.
    """
    for name in metrics:
        if name not in TEXT_METRICS:
            raise UnknownNameError(op="metrics", got=name, known=TEXT_METRICS, what="metric")
    return {name: TEXT_METRICS[name](name, predictions, references) for name in metrics}


@cache
def _stemmer() -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer("porter")


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return _stemmer().stemWord(word) if len(word) >= _STEMMED else word


def _words(text: str) -> list[str]:
    return [_stem(word) for word in _SIGNS.sub(" ", text.lower()).split()]


def _rouge(name: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    from torchmetrics.functional.text import rouge_score

    key = f"{name}_fmeasure"
    return float(rouge_score(list(predictions), list(references), tokenizer=_words, rouge_keys=name)[key])


def _rouge_lsum(_name: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    # The public function splits sentences with a model that it fetches; papers score lines.
    from torchmetrics.functional.text.rouge import _rouge_lsum_score

    scores = [
        float(_rouge_lsum_score(*([_words(line) for line in text.split("\n")] for text in both))["fmeasure"])
        for both in zip(predictions, references, strict=True)
    ]
    return sum(scores) / len(scores)


def _bleu(_name: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    from sacrebleu.metrics import BLEU  # pyright: ignore[reportPrivateImportUsage]

    return BLEU().corpus_score(list(predictions), [list(references)]).score


def _chrf(_name: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    from sacrebleu.metrics import CHRF  # pyright: ignore[reportPrivateImportUsage]

    return CHRF().corpus_score(list(predictions), [list(references)]).score


TEXT_METRICS: dict[str, Callable[[str, Sequence[str], Sequence[str]], float]] = {
    "rouge1": _rouge,
    "rouge2": _rouge,
    "rougeL": _rouge,
    "rougeLsum": _rouge_lsum,
    "bleu": _bleu,
    "chrf": _chrf,
}
"""The metrics of texts; `lamina.tasks.kinds.METRICS` says which fit which task."""
