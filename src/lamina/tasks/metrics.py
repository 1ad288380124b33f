"""How good predictions are: one number per metric, and a table per class.

A score that is undefined, such as the correlation with a constant, is 0 and never NaN. Every `score_...` function
returns metric -> score, in the order of the names that are passed. `require_metrics` checks the packages for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError, check_known, require_packages
from lamina.tasks.label_cells import LabelCellError, class_name
from lamina.tasks.outputs import ClassRow

if TYPE_CHECKING:
    from lamina.tasks.base import Kind

RECALL_RATES = {"recall_at_1": 0.01, "recall_at_5": 0.05}  # metric -> rate of false positives
RANKING = ("auroc", *RECALL_RATES)  # metrics of how well scores separate two classes
ABOUT_POSITIVE = frozenset({"f1", *RECALL_RATES})  # metrics of two classes that change if the classes are swapped
_NO, _YES = ("0", "no", "false"), ("1", "yes", "true")
_USUAL = {frozenset(pair): pair[1] for pair in zip(_NO, _YES, strict=True)}
SUBTOKENS = "subtoken_f1"  # macro F1 over all sub-tokens of words, not over words
LOWER = frozenset({"perplexity", "mae"})  # metrics of which a lower score is better
_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
BOUNDS: Mapping[str, tuple[float, float]] = {  # metric -> its smallest and largest possible score
    **dict.fromkeys(("accuracy", "f1", "macro_f1", "span_f1", SUBTOKENS, *RANKING, *_ROUGE), (0.0, 1.0)),
    **dict.fromkeys(("mcc", "pearson", "spearman"), (-1.0, 1.0)),
    **dict.fromkeys(("bleu", "chrf"), (0.0, 100.0)),
    "perplexity": (1.0, math.inf),
    "mae": (0.0, math.inf),
}
_SIGNS = re.compile(r"[^a-z0-9]+")
_SPAN_TAG = re.compile(r"O|[BIESLU]-.+")
_STEMMED = 4  # letters of the shortest word that is stemmed
Tags: TypeAlias = Sequence[Sequence[int]]  # for each text the id of every word's tag
_PACKAGES = {  # metric -> the modules that compute it, which the extra "metrics" installs; torch computes all others
    "span_f1": ("seqeval",),
    **dict.fromkeys(_ROUGE, ("torchmetrics", "snowballstemmer")),
    **dict.fromkeys(("bleu", "chrf"), ("sacrebleu",)),
}


def require_metrics(op: str, metrics: Iterable[str]) -> None:
    """Raise MissingExtraError if one of the metrics needs a package that is not installed; `op` is for the message."""
    require_packages(op, "metrics", *(module for name in metrics for module in _PACKAGES.get(name, ())))


def usual_positive(labels: Sequence[str]) -> str | None:
    """Return which of two classes usually counts as positive: "1" (beside "0"), "yes" or "true", in any case.

    Returns None for any other labels.
    """
    names = {name.lower(): name for name in labels}
    return names.get(_USUAL.get(frozenset(names), "")) if len(labels) == 2 else None


def named_class(op: str, name: object, labels: Sequence[str]) -> str:
    """Return the label that the user means by `name`: a text, whole number or bool; `op` begins error messages.

    If the labels are 0 and 1, no and yes, or false and true (in any case), names of the same meaning are equal: beside
    "no" and "yes", 1 and True stand for "yes". A number never means a label's id. Raises UnknownNameError if
    no label has this name, and ConfigError if `name` cannot be the name of a class.
    """
    try:
        text = class_name(name, labels)
    except LabelCellError as error:
        raise ConfigError(f"{op}: {error.got} is not a class; the classes are {', '.join(labels)}.") from None
    usual = usual_positive(labels)
    if text not in labels and usual is not None and text.lower() in (*_NO, *_YES):
        return usual if text.lower() in _YES else next(label for label in labels if label != usual)
    check_known(op, [text], labels, "label")
    return text


def metrics_of(
    kind: Kind, problem_type: str, labels: Sequence[str], first: str | None, positive: str | None, op: str
) -> tuple[str, ...]:
    """Return the metrics of a task; `first`, the metric that the user has named, comes first. None: the kind's order.

    The kind's `further_metrics` are included only if `first` is one. Metrics about a positive class are left out if
    there are two classes, `positive` is None and `usual_positive` finds none. `op` is the operation, for messages.
    Raises UnknownNameError if there is no metric `first`, and ConfigError if it is one of those left out.
    """
    known, further = kind.metrics(problem_type, labels), kind.further_metrics(problem_type, labels)
    known = (*known, *further) if first in further else known
    check_known(op, [] if first is None else [first], (*known, *further), "metric")
    if len(labels) == 2 and kind.single_label(problem_type) and (positive or usual_positive(labels)) is None:
        if first in ABOUT_POSITIVE:
            got = f"the metric '{first}' is about the positive class, and the classes are {' and '.join(labels)}"
            raise ConfigError(f"{op}: {got}. Say which one is positive, as in positive='{labels[1]}'.")
        known = tuple(metric for metric in known if metric not in ABOUT_POSITIVE)
    return tuple(sorted(known, key=lambda name: name != first))


def better(metric: str, new: float, old: float, *, by: float = 0.0) -> bool:
    """Return whether score `new` is better than `old` by more than `by`; False if they are equal or one is NaN.

    For metrics such as perplexity, lower is better.
    """
    return new < old - by if metric in LOWER else new > old + by


def score_classes(
    metrics: Sequence[str],
    predictions: Tensor,
    targets: Tensor,
    classes: int,
    *,
    positive: int | None = 1,
    absent_f1: Tensor | None = None,
) -> dict[str, float]:
    """Return metric -> score; `metrics` may name "accuracy", "mcc" (Matthews' correlation), "macro_f1" and "f1".

    Raises UnknownNameError for other metrics, and DataError without rows or if the numbers of rows differ.

    Args:
        metrics: Their names.
        predictions: Predicted class ids `[rows]`.
        targets: True class ids `[rows]`.
        classes: Number of classes.
        positive: With two classes, the id of the class whose F1 is "f1". With more, or None, "f1" equals "macro_f1".
        absent_f1: The F1 of each class if it occurs neither among predictions nor targets, as from `class_f1`; NaN: the
            class is left out of "macro_f1", the mean over classes. None: NaN for all.
    """
    check_rows(predictions, targets)
    right, true, predicted = _class_counts(predictions, targets, classes)
    f1 = 2 * right / (true + predicted)  # NaN for a class that does not occur
    macro_f1 = (f1 if absent_f1 is None else torch.where(f1.isnan(), absent_f1, f1)).nanmean()
    known = {
        "accuracy": lambda: right.sum() / len(targets),
        "f1": lambda: f1[positive].nan_to_num() if classes == 2 and positive is not None else macro_f1,
        "mcc": lambda: _matthews(right.sum(), true, predicted),
        "macro_f1": lambda: macro_f1,
    }
    return named_scores(metrics, known)


def class_f1(predictions: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Return the F1 of each class, float64 `[classes]`, at least two; NaN for a class that does not occur.

    `predictions` and `targets` are class ids `[rows]`, and `classes` is the number of classes.
    """
    right, true, predicted = _class_counts(predictions, targets, classes)
    return 2 * right / (true + predicted)


def _class_counts(predictions: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many rows of each class are predicted correctly, are true, and are predicted; each `[classes]`.

    A single class counts as two, because predictions may have the id 1 all the same.
    """
    count = max(2, classes)
    cells = (targets.long() * count + predictions.long()).cpu()
    confusion = torch.bincount(cells, minlength=count**2).reshape(count, count).double()  # true, predicted class
    return confusion.diagonal(), confusion.sum(1), confusion.sum(0)


def _matthews(right: Tensor, true: Tensor, predicted: Tensor) -> float:
    """Return Matthews' correlation for any number of classes; 0 if all rows, or all predictions, have one class.

    `right`, `true` and `predicted` are numbers of rows per class: predicted correctly, true, and predicted. Source:
    Gorodkin 2004, equation 8.
    """
    rows = true.sum()
    variances = (rows**2 - (true**2).sum()) * (rows**2 - (predicted**2).sum())
    return float((right * rows - true @ predicted) / variances.sqrt()) if variances > 0 else 0.0


def score_ranking(metrics: Sequence[str], scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Return metric -> score: how well scores separate two classes.

    "auroc" is the area under the ROC curve. "recall_at_1" and "recall_at_5" are the fractions of positive rows with a
    score above a threshold: the lowest threshold that at most 1 % or 5 % of the negative rows exceed. With fewer than
    100 or 20 negative rows, it is their highest score. All three metrics are 0 if one of the classes has no row. Raises
    UnknownNameError for other metrics, and DataError without rows or if the numbers of rows differ.

    `scores` are `[rows]`, higher for the positive class; `targets` are 1 for a positive row and 0 for a negative one.
    """
    check_rows(scores, targets)
    positive = targets.bool()
    known = {
        "auroc": lambda: _auroc(scores, positive),
        **{name: partial(_recall_at, scores, positive, rate) for name, rate in RECALL_RATES.items()},
    }
    return named_scores(metrics, known)


def _auroc(scores: Tensor, positive: Tensor) -> float:
    """Return the fraction of all pairs of a positive and a negative row in which the positive row scores higher.

    Equal scores count half. The result is 0 if there are no such pairs. `positive` is a mask `[rows]`.
    """
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return 0.0
    below = _ranks(scores.double())[positive].sum() - positives * (positives + 1) / 2
    return float(below / (positives * negatives))


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of every value in float64 (1 for the lowest); equal values get the mean of their ranks."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[place].double()


def _recall_at(scores: Tensor, positive: Tensor, rate: float) -> float:
    """Return the recall of a threshold: the lowest that at most the fraction `rate` of the negative rows exceed.

    `positive` is a mask `[rows]`. The result is 0 if there are no positive or no negative rows.
    """
    negatives = scores[~positive].sort(descending=True).values
    if not len(negatives) or not positive.any():
        return 0.0
    highest = negatives[math.floor(len(negatives) * rate + 1e-9)]  # the highest score of a negative row that is allowed
    return float((scores[positive] > highest).double().mean())


def score_multi_label(metrics: Sequence[str], predictions: Tensor, targets: Tensor) -> dict[str, float]:
    """Return "accuracy" (the fraction of rows with every class right) and "f1" (micro-averaged over all labels).

    `predictions` and `targets` are 0 and 1 `[rows, classes]`; `metrics` names one or both. Raises UnknownNameError for
    other metrics, and DataError without rows or if the numbers of rows differ.
    """
    check_rows(predictions, targets)
    predicted, true = predictions.bool(), targets.bool()
    known = {
        "accuracy": lambda: (predicted == true).all(-1).double().mean(),
        "f1": lambda: 2 * (predicted & true).sum().double() / (predicted.sum() + true.sum()).clamp(min=1),
    }
    return named_scores(metrics, known)


def score_numbers(metrics: Sequence[str], predictions: Sequence[float], targets: Sequence[float]) -> dict[str, float]:
    """Return "pearson" and "spearman" (correlations with the targets) and "mae", as `metrics` names them.

    Both correlations are 0 if predictions or targets are constant, or have NaN or infinity. "mae" is the mean absolute
    error, at most exp(700) and also exp(700) if a row has NaN or infinity. Raises UnknownNameError for other metrics,
    and DataError without rows or if the numbers of rows differ.
    """
    check_rows(predictions, targets)
    both = [torch.as_tensor(rows, dtype=torch.float64).reshape(-1) for rows in (predictions, targets)]
    varies = all(bool((row != row[0]).any()) and bool(row.isfinite().all()) for row in both)
    known = {
        "pearson": lambda: torch.corrcoef(torch.stack(both))[0, 1] if varies else 0.0,
        "spearman": lambda: torch.corrcoef(torch.stack([_ranks(row) for row in both]))[0, 1] if varies else 0.0,
        # far below the largest float, so that the interval over such runs is finite
        "mae": lambda: (both[0] - both[1]).abs().mean().nan_to_num(math.inf).clamp(max=math.exp(700)),
    }
    return named_scores(metrics, known)


def score_tags(metrics: Sequence[str], predictions: Tags, targets: Tags, labels: Sequence[str]) -> dict[str, float]:
    """Return "span_f1" (micro F1 of spans, as seqeval counts), and "accuracy" and "f1" (macro) of single words.

    `predictions` and `targets` hold, for each text, the id of every word's tag; `labels` are the names of the tags.
    `metrics` may also name those of `score_classes`. Raises UnknownNameError for others; DataError if a text has not
    one prediction per word, there are no words, or "span_f1" is requested and the tags mark no spans.
    """
    _check_tags(predictions, targets)
    guesses, truths = (torch.tensor([int(tag) for row in rows for tag in row]) for rows in (predictions, targets))
    plain = [name for name in metrics if name != "span_f1"]
    scores = score_classes(plain, guesses, truths, len(labels), positive=None)
    if "span_f1" in metrics:
        from seqeval.metrics import f1_score

        if not marks_spans(labels):
            got = f"the labels {', '.join(labels)} mark no spans"
            raise DataError(f"metrics: {got}; span F1 needs tags such as O, B-x and I-x. Use 'accuracy' or 'f1'.")
        names = _names(labels, targets), _names(labels, predictions)
        scores["span_f1"] = float(f1_score(*names, zero_division=0))  # pyright: ignore[reportArgumentType]
    return {name: scores[name] for name in metrics}


def score_texts(metrics: Sequence[str], predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return scores of generated texts (`predictions`) against the true texts (`references`).

    "rouge1", "rouge2", "rougeL" and "rougeLsum" are means over the texts of an F-measure from 0 to 1. Words are in
    lower case and stemmed by Porter's algorithm, and "rougeLsum" compares sentence by sentence: both texts are split at
    line breaks and after the signs that end a sentence. "bleu" and "chrf" are scores of the whole corpus from 0 to 100,
    with the default settings of sacrebleu. Raises UnknownNameError for other metrics, and DataError without texts or if
    the numbers of texts differ.

    Source:
        Lin 2004, aclanthology.org/W04-1013. Post 2018, arXiv:1804.08771. Popović 2015, aclanthology.org/W15-3049.
    """
    check_rows(predictions, references)
    texts = list(predictions), list(references)
    known = {
        **{name: partial(_rouge, name, *texts) for name in ("rouge1", "rouge2", "rougeL")},
        "rougeLsum": partial(_rouge_lsum, *texts),
        "bleu": partial(_of_corpus, "BLEU", *texts),
        "chrf": partial(_of_corpus, "CHRF", *texts),
    }
    return named_scores(metrics, known)


def class_table(predictions: Tensor, targets: Tensor, labels: Sequence[str]) -> list[ClassRow]:
    """Return one row of scores per class, followed by the averages that scikit-learn and seqeval print.

    The averages are "micro avg" (all classes pooled), "macro avg" (the mean over the classes that are true or predicted
    for a row) and "weighted avg" (the mean weighted by the number of true rows). `predictions` and `targets` are class
    ids `[rows]`, or 0 and 1 `[rows, classes]`, and `labels` the class names.
    """
    if predictions.ndim == 1:
        predictions, targets = (torch.nn.functional.one_hot(ids, len(labels)) for ids in (predictions, targets))
    predictions, targets = predictions.bool(), targets.bool()
    counts = torch.stack([hits.sum(0) for hits in (predictions & targets, predictions, targets)], dim=1)
    return _class_rows(labels, counts.tolist())


def span_table(predictions: Tags, targets: Tags, labels: Sequence[str]) -> list[ClassRow]:
    """Return the rows of `class_table` for spans: one per span label, in alphabetical order, then the averages.

    A predicted span is correct if its label, start and end equal those of a true span. seqeval finds the spans.

    `predictions` and `targets` are for each text the id of every word's predicted and true tag, `labels` the tags'
    names.
    """
    from seqeval.metrics.sequence_labeling import get_entities

    guessed, true = (set(get_entities(_names(labels, rows))) for rows in (predictions, targets))
    types = sorted({label[2:] for label in labels if label != "O"})
    counts = [[sum(span[0] == type_ for span in spans) for spans in (guessed & true, guessed, true)] for type_ in types]
    return _class_rows(types, counts)


def spans_of(tags: Sequence[int], labels: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return the spans that seqeval finds in one text's tags, as (label, first word, last word), words from 0.

    `tags` are ids, and `labels` the names of all tags.
    """
    from seqeval.metrics.sequence_labeling import get_entities

    return set(get_entities(_names(labels, [tags])))


def labelled_words(predictions: Tags, targets: Tags) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the predicted and the true tags of each text, without the words that have no label (-100).

    A text without labels stays, with () for both.
    """
    texts = zip(predictions, targets, strict=True)
    known = ([pair for pair in zip(*rows, strict=True) if pair[1] != IGNORED] for rows in texts)
    both = [tuple(zip(*pairs, strict=True)) if pairs else ((), ()) for pairs in known]
    return [guess for guess, _ in both], [truth for _, truth in both]


def _class_rows(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> list[ClassRow]:
    """Return one row of scores per class, named by `labels`, then the averages that `class_table` describes.

    `counts` has for each class its numbers of rows predicted correctly, predicted, and true. 0 / 0 counts as 0.
    """
    total = [sum(class_counts[at] for class_counts in counts) for at in range(3)]
    right, guessed, true = torch.tensor([*counts, total], dtype=torch.float64).T  # the last row is the total
    scores = torch.stack([right / guessed, right / true, 2 * right / (guessed + true)], dim=1).nan_to_num(0.0)
    class_scores, class_guessed, class_true = scores[:-1], guessed[:-1], true[:-1]
    weights = torch.stack([(class_guessed + class_true > 0).double(), class_true])  # of macro and weighted avg
    means = weights @ class_scores / weights.sum(1, keepdim=True).clamp(min=1)
    names = [*labels, "micro avg", "macro avg", "weighted avg"]
    rows = zip(names, [*counts, *[total] * 3], torch.cat([scores, means]).tolist(), strict=True)
    return [
        {"label": name, "precision": precision, "recall": recall, "f1": f1, "count": trues, "guessed": guesses}
        for name, (_, guesses, trues), (precision, recall, f1) in rows
    ]


def named_scores(metrics: Sequence[str], known: Mapping[str, Callable[[], Tensor | float]]) -> dict[str, float]:
    """Return name -> value of the metrics in `metrics`, in their order; NaN and infinity become 0.

    `known` maps the name of a metric to a function that computes it. Any other name raises UnknownNameError.
    """
    check_known("metrics", metrics, known, "metric")
    scores = {name: float(known[name]()) for name in metrics}
    return {name: score if math.isfinite(score) else 0.0 for name, score in scores.items()}


def check_rows(predictions: Sized, targets: Sized) -> None:
    """Raise DataError if there are no targets, or if there is not one prediction per target."""
    if len(predictions) != len(targets):
        raise DataError(f"metrics: {len(predictions)} predictions for {len(targets)} targets; every row has both.")
    if len(targets) == 0:
        raise DataError("metrics: there are no rows; a score needs at least one.")


_AS_IOBES = {"L": "E", "U": "S"}  # marks of BILOU tags -> those of IOBES, which seqeval reads


def _names(labels: Sequence[str], rows: Tags) -> list[list[str]]:
    named = [_AS_IOBES.get(label[0], label[0]) + label[1:] for label in labels]
    return [[named[int(tag)] for tag in row] for row in rows]


@lru_cache(maxsize=1)
def _porter() -> Callable[[str], str]:
    from snowballstemmer import stemmer

    return stemmer("porter").stemWord


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return _porter()(word) if len(word) >= _STEMMED else word


def _words(text: str) -> list[str]:
    return [_stem(word) for word in _SIGNS.sub(" ", text.lower()).split()]


def _rouge(name: str, predictions: list[str], references: list[str]) -> Tensor | float:
    """Return the mean F-measure of the ROUGE metric `name`, one of those that compare whole texts, such as "rouge1"."""
    from torchmetrics.functional.text import rouge_score

    scores = rouge_score(predictions, references, tokenizer=_words, rouge_keys=name)  # pyright: ignore[reportArgumentType]
    return scores[f"{name}_fmeasure"]


def _rouge_lsum(*texts: list[str]) -> float:
    """Return the mean F-measure of rougeLsum; `texts` are the predictions and the references."""
    # The public function splits sentences with a model that it downloads; this one splits after their last sign.
    from torchmetrics.functional.text.rouge import _rouge_lsum_score

    scores = [
        float(_rouge_lsum_score(*([_words(part) for part in _SENTENCES.split(text)] for text in both))["fmeasure"])
        for both in zip(*texts, strict=True)
    ]
    return sum(scores) / len(scores)


# Where sentences are divided: at line breaks, and at blanks after a final sign, unless a lower-case letter follows or
# the sign ends an initial or a common abbreviation.
_SENTENCES = re.compile(
    r"\n+|(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:Mr|Dr|Ms|St|vs)\.)(?<!\bMrs\.)\s+(?=[\"'(\[\u201c\u2018]?[A-Z0-9])"
    r"|(?<=[.!?][\"'\u201d\u2019)])\s+(?=[\"'(\[\u201c\u2018]?[A-Z0-9])"
)


def _of_corpus(name: str, predictions: list[str], references: list[str]) -> float:
    from sacrebleu import metrics

    return getattr(metrics, name)().corpus_score(predictions, [references]).score


def _check_tags(predictions: Tags, targets: Tags) -> None:
    """Raise DataError unless there is a word, and every word of every text has one prediction."""
    check_rows(predictions, targets)
    if not any(len(row) for row in targets):
        raise DataError("metrics: there are no words; a score needs at least one.")
    for row, (guess, truth) in enumerate(zip(predictions, targets, strict=True)):
        if len(guess) != len(truth):
            got = f"text {row} has {len(guess)} predictions for {len(truth)} words"
            raise DataError(f"metrics: {got}; every word has one.", row=row)


def marks_spans(tags: Iterable[str]) -> bool:
    """Return whether tags mark spans, as for named entities, and do not just classify single words.

    Tags mark spans if each is "O" or an IOB, IOBES or BILOU mark with a label, such as "B-PER", and not all are "O".
    """
    seen = set(tags)
    return bool(seen - {"O"}) and all(_SPAN_TAG.fullmatch(tag) for tag in seen)
