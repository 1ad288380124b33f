"""How good predictions are: one number per metric, and a table per class. What has no meaning is 0, never NaN.

Every `score_...` function gives metric -> score, in the order asked. A metric that it does not know is an
UnknownNameError; no rows, or not as many predictions as targets, are a DataError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lamina.errors import DataError, check_known, require_packages
from lamina.tasks.base import ClassRow

RECALL_RATES = {"recall_at_1": 0.01, "recall_at_5": 0.05}  # metric -> rate of false positives
RANKING = ("auroc", *RECALL_RATES)  # metrics of two classes by their scores
LOWER = frozenset({"perplexity"})  # metrics of which less is better; of all others more is
_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
BOUNDS: Mapping[str, tuple[float, float]] = {  # metric -> the least and the most that it can be
    **dict.fromkeys(("accuracy", "f1", "macro_f1", "span_f1", *RANKING, *_ROUGE), (0.0, 1.0)),
    **dict.fromkeys(("mcc", "pearson", "spearman"), (-1.0, 1.0)),
    **dict.fromkeys(("bleu", "chrf"), (0.0, 100.0)),
    "perplexity": (1.0, math.inf),
}
_SIGNS = re.compile(r"[^a-z0-9]+")
_SPAN_TAG = re.compile(r"O|[BIESLU]-.+")
_STEMMED = 4  # letters: shorter words stay as they are
Tags = Sequence[Sequence[int]]  # per text a tag for every word


_PACKAGES = {  # metric -> the modules that compute it, which the extra "metrics" installs; torch computes all others
    "span_f1": ("seqeval",),
    **dict.fromkeys(_ROUGE, ("torchmetrics", "snowballstemmer")),
    **dict.fromkeys(("bleu", "chrf"), ("sacrebleu",)),
}


def require_metrics(op: str, metrics: Iterable[str]) -> None:
    """Raise MissingExtraError, with `op` as the operation, if a metric needs a package that is not installed."""
    require_packages(op, "metrics", *(module for name in metrics for module in _PACKAGES.get(name, ())))


def better(metric: str, new: float, old: float) -> bool:
    """Whether a score beats another; NaN beats nothing, and a tie is not better."""
    return new < old if metric in LOWER else new > old


def score_classes(
    metrics: Sequence[str], predictions: Tensor, targets: Tensor, classes: int, *, binary: bool = True
) -> dict[str, float]:
    """Score class ids `[rows]`: "accuracy", "mcc", "macro_f1" (the mean over the classes that occur) and "f1".

    "f1" is "macro_f1", but of two classes that of the second one where `binary` is set.
    """
    _check_rows(predictions, targets)
    count = max(2, classes)
    cells = (targets.long() * count + predictions.long()).cpu()
    confusion = torch.bincount(cells, minlength=count**2).reshape(count, count).double()  # true class, predicted class
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    sizes = true + predicted
    f1 = 2 * right / sizes.clamp(min=1)
    macro_f1 = f1[sizes > 0].mean()
    known = {
        "accuracy": lambda: right.sum() / len(targets),
        "f1": lambda: f1[1] if classes == 2 and binary else macro_f1,
        "mcc": lambda: _matthews(right.sum(), true, predicted),
        "macro_f1": lambda: macro_f1,
    }
    return named_scores(metrics, known)


def _matthews(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """Return Matthews' correlation of several classes from the number of right rows and the rows per class.

    It is 0 if all rows have one class, or all predictions are one class. Source: Gorodkin 2004, equation 8.
    """
    rows = true.sum()
    variances = (rows**2 - (true**2).sum()) * (rows**2 - (predicted**2).sum())
    return float((right * rows - true @ predicted) / variances.sqrt()) if variances > 0 else 0.0


def score_ranking(metrics: Sequence[str], scores: Tensor, targets: Tensor) -> dict[str, float]:
    """How well scores `[rows]` tell the second of two classes (1 in `targets`) from the first.

    "auroc" is the area under the ROC curve. "recall_at_1" and "recall_at_5" are the shares of the second class whose
    scores reach the lowest threshold that at most 1 % or 5 % of the first do, as `monitors.Calibration` chooses it; of
    fewer than 100 or 20 rows of the first class, none. All are 0 if a class has no row.
    """
    _check_rows(scores, targets)
    positive = targets.bool()
    known = {
        "auroc": lambda: _auroc(scores, positive),
        **{name: partial(_recall_at, scores, positive, rate) for name, rate in RECALL_RATES.items()},
    }
    return named_scores(metrics, known)


def _auroc(scores: Tensor, positive: Tensor) -> float:
    """Return the share of pairs of a positive and a negative row in which the positive one has the higher score.

    Equal scores count half. It is 0 if one of both classes has no row.
    """
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return 0.0
    below = _ranks(scores.double())[positive].sum() - positives * (positives + 1) / 2
    return float(below / (positives * negatives))


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of every value, from 1; equal values share the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def _recall_at(scores: Tensor, positive: Tensor, rate: float) -> float:
    negatives = scores[~positive].sort(descending=True).values
    if not len(negatives) or bool(positive.logical_not().all()):
        return 0.0
    highest = negatives[math.floor(len(negatives) * rate + 1e-9)]  # that is not flagged
    return float((scores[positive] > highest).double().mean())


def score_multi_label(metrics: Sequence[str], predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """Score zeros and ones `[rows, classes]`: "accuracy" (of whole rows) and "f1" (over all labels at once)."""
    _check_rows(predictions, targets)
    predicted, true = predictions.bool(), targets.bool()
    known = {
        "accuracy": lambda: (predicted == true).all(-1).double().mean(),
        "f1": lambda: 2 * (predicted & true).sum() / (predicted.sum() + true.sum()).clamp(min=1),
    }
    return named_scores(metrics, known)


def score_numbers(metrics: Sequence[str], predictions: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    """Score predicted numbers: "pearson" and "spearman" correlation; 0 where one of both does not vary."""
    _check_rows(predictions, targets)
    both = [torch.as_tensor(rows, dtype=torch.float64).reshape(-1) for rows in (predictions, targets)]
    varies = all(bool((row != row[0]).any()) and bool(row.isfinite().all()) for row in both)
    known = {
        "pearson": lambda: torch.corrcoef(torch.stack(both))[0, 1] if varies else 0.0,
        "spearman": lambda: torch.corrcoef(torch.stack([_ranks(row) for row in both]))[0, 1] if varies else 0.0,
    }
    return named_scores(metrics, known)


def score_tags(metrics: Sequence[str], predictions: Tags, targets: Tags, labels: Sequence[str]) -> dict[str, float]:
    """Score a tag for every word: "span_f1" (micro, as seqeval counts), "accuracy" and "f1" of single words."""
    _check_tags(predictions, targets)
    guesses, truths = (torch.tensor([int(tag) for row in rows for tag in row]) for rows in (predictions, targets))
    plain = [name for name in metrics if name != "span_f1"]
    scores = score_classes(plain, guesses, truths, len(labels), binary=False)
    if "span_f1" in metrics:
        from seqeval.metrics import f1_score

        if not marks_spans(labels):
            came = f"the labels {', '.join(labels)} mark no spans"
            raise DataError(f"metrics: {came}; span F1 needs tags as O, B-x and I-x. Use 'accuracy' or 'f1'.")
        names = _names(labels, targets), _names(labels, predictions)
        scores["span_f1"] = float(f1_score(*names, zero_division=0))  # pyright: ignore[reportArgumentType]
    return {name: scores[name] for name in metrics}


def score_texts(metrics: Sequence[str], predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Score texts against those that were to be written.

    "rouge1", "rouge2", "rougeL" and "rougeLsum" are the mean over the texts of the F-measure, 0 to 1, of words in lower
    case that Porter's algorithm has stemmed; "rougeLsum" takes each line for a sentence. "bleu" and "chrf" are of the
    whole corpus, 0 to 100, as sacrebleu computes them by default.

    Source:
        Lin 2004, aclanthology.org/W04-1013. Post 2018, arXiv:1804.08771. Popović 2015, aclanthology.org/W15-3049.
        The stemmer is Porter's own; others except a few words, which moves ROUGE by less than 0.001.
    """
    texts = list(predictions), list(references)
    known = {
        **{name: partial(_rouge, name, *texts) for name in ("rouge1", "rouge2", "rougeL")},
        "rougeLsum": partial(_rouge_lsum, *texts),
        "bleu": partial(_of_corpus, "BLEU", *texts),
        "chrf": partial(_of_corpus, "CHRF", *texts),
    }
    return named_scores(metrics, known)


def class_table(predictions: Tensor, targets: Tensor, labels: Sequence[str]) -> list[ClassRow]:
    """Scores per class of class ids `[rows]`, or of zeros and ones `[rows, classes]`, and their averages.

    A row has "label", "precision", "recall", "f1", "count" (how many are truly so) and "guessed" (how many were said to
    be). After the classes come "micro avg" (of all together), "macro avg" and "weighted avg" (by the true counts; both
    over the classes that occur), as scikit-learn and seqeval print them. The thesis's figure 19 prints "guessed" as its
    count.
    """
    if predictions.ndim == 1:
        predictions, targets = (torch.nn.functional.one_hot(ids, len(labels)) for ids in (predictions, targets))
    predictions, targets = predictions.bool(), targets.bool()
    counts = torch.stack([hits.sum(0) for hits in (predictions & targets, predictions, targets)], dim=1)
    return _class_rows(labels, counts.tolist())


def span_table(predictions: Tags, targets: Tags, labels: Sequence[str]) -> list[ClassRow]:
    """The same for every type of span; spans count if type, start and end are right, as seqeval finds them."""
    from seqeval.metrics.sequence_labeling import get_entities

    guessed, true = (set(get_entities(_names(labels, rows))) for rows in (predictions, targets))
    kinds = sorted({label[2:] for label in labels if label != "O"})
    counts = [[sum(span[0] == kind for span in spans) for spans in (guessed & true, guessed, true)] for kind in kinds]
    return _class_rows(kinds, counts)


def _class_rows(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> list[ClassRow]:
    """Return a row per class, then "micro avg", "macro avg" and "weighted avg".

    `counts` has for each class how many rows were predicted correctly, predicted, and true.
    """
    rows = [_class_row(label, *class_counts) for label, class_counts in zip(labels, counts, strict=True)]
    total = _class_row("micro avg", *(sum(column) for column in zip(*counts, strict=True)))
    occurs = [float(row["count"] + row["guessed"] > 0) for row in rows]
    return [
        *rows,
        total,
        _average("macro avg", total, rows, occurs),
        _average("weighted avg", total, rows, [row["count"] for row in rows]),
    ]


def _average(label: str, total: ClassRow, rows: Sequence[ClassRow], weights: Sequence[float]) -> ClassRow:
    """Return a row with the weighted means of precision, recall and F1 over classes, and the counts of `total`."""
    whole = sum(weights) or 1

    def mean(values: Iterable[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / whole

    return {
        "label": label,
        "precision": mean(row["precision"] for row in rows),
        "recall": mean(row["recall"] for row in rows),
        "f1": mean(row["f1"] for row in rows),
        "count": total["count"],
        "guessed": total["guessed"],
    }


def named_scores(metrics: Sequence[str], known: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return metric -> score in the order of `metrics`, with 0 in place of NaN and infinity.

    `known` maps the name of each metric to a function that computes it; another name is an UnknownNameError.
    """
    check_known("metrics", metrics, known, "metric")
    scores = {name: float(known[name]()) for name in metrics}
    return {name: score if math.isfinite(score) else 0.0 for name, score in scores.items()}


def _check_rows(predictions: Sequence[Any] | Tensor, targets: Sequence[Any] | Tensor) -> None:
    if len(predictions) != len(targets):
        raise DataError(f"metrics: {len(predictions)} predictions for {len(targets)} targets; every row has both.")
    if len(targets) == 0:
        raise DataError("metrics: there are no rows; a score needs at least one.")


_AS_IOBES = {"L": "E", "U": "S"}  # the same marks by names that seqeval knows


def _names(labels: Sequence[str], rows: Tags) -> list[list[str]]:
    named = [_AS_IOBES.get(label[0], label[0]) + label[1:] for label in labels]
    return [[named[int(tag)] for tag in row] for row in rows]


def _class_row(label: str, both: int = 0, guesses: int = 0, trues: int = 0) -> ClassRow:
    """Return the scores of a class from how many rows were predicted correctly, predicted, and true; 0 for 0 / 0."""
    return {
        "label": label,
        "precision": both / guesses if guesses else 0.0,
        "recall": both / trues if trues else 0.0,
        "f1": 2 * both / (guesses + trues) if guesses + trues else 0.0,
        "count": trues,
        "guessed": guesses,
    }


@lru_cache(maxsize=1)
def _porter() -> Callable[[str], str]:
    """Return the function that stems a word by Porter's algorithm."""
    from snowballstemmer import stemmer

    return stemmer("porter").stemWord


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return _porter()(word) if len(word) >= _STEMMED else word


def _words(text: str) -> list[str]:
    return [_stem(word) for word in _SIGNS.sub(" ", text.lower()).split()]


def _rouge(name: str, predictions: list[str], references: list[str]) -> Any:
    from torchmetrics.functional.text import rouge_score

    return rouge_score(predictions, references, tokenizer=_words, rouge_keys=name)[f"{name}_fmeasure"]  # pyright: ignore


def _rouge_lsum(*texts: list[str]) -> float:
    # The public function splits sentences with a model that it fetches; papers score lines.
    from torchmetrics.functional.text.rouge import _rouge_lsum_score

    scores = [
        float(_rouge_lsum_score(*([_words(line) for line in text.split("\n")] for text in both))["fmeasure"])
        for both in zip(*texts, strict=True)
    ]
    return sum(scores) / len(scores)


def _of_corpus(name: str, predictions: list[str], references: list[str]) -> float:
    from sacrebleu import metrics

    return getattr(metrics, name)().corpus_score(predictions, [references]).score


def _check_tags(predictions: Tags, targets: Tags) -> None:
    _check_rows(predictions, targets)
    if not any(len(row) for row in targets):
        raise DataError("metrics: there are no words; a score needs at least one.")
    for row, (guess, truth) in enumerate(zip(predictions, targets, strict=True)):
        if len(guess) != len(truth):
            came = f"text {row} has {len(guess)} predictions for {len(truth)} words"
            raise DataError(f"metrics: {came}; every word has one.", row=row)


def marks_spans(tags: Iterable[str]) -> bool:
    """Whether the tags mark spans (IOB, IOBES, BILOU), so that span F1 has a meaning."""
    seen = set(tags)
    return bool(seen - {"O"}) and all(_SPAN_TAG.fullmatch(tag) for tag in seen)
