"""Collect the logits of classified examples: scores, tables, wrong answers and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import TypeAlias, TypedDict, cast, final

import numpy as np
import torch
from torch import Tensor

from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.tasks import metrics as score
from lamina.tasks.metrics import LOWER, Tags, spans_of
from lamina.tasks.outputs import ClassRow, Label, Results, WrongAnswer
from lamina.tasks.split import Split
from lamina.tasks.targets import Array, label_array
from lamina.utils import JSON

REPEATS = 1000  # resamples of the bootstrap
_FEWEST = 200  # resamples of many rows
_MOST_ROWS = 20_000_000  # rows of all resamples together
_ENDS = (2.5, 97.5)  # percentiles that bound a 95 % interval
# Scores some rows (indices, which may repeat): the predictions, or with True always the same answer by a metric.
RowScore: TypeAlias = Callable[[Tensor, bool], Mapping[str, float]]


class ClassAnswer(TypedDict):
    """Prediction for an example with one class: `label`, its probability `score`, and the `probabilities` of all."""

    label: str
    score: float
    probabilities: dict[str, float]


class MultiLabelAnswer(TypedDict):
    """Prediction for an example with any number of labels: `labels` above one half, and the `probabilities` of all."""

    labels: list[str]
    probabilities: dict[str, float]


class ValueAnswer(TypedDict):
    """The prediction of a regression: `value`."""

    value: float


class LogitsAnswer(TypedDict):
    """The logit of each label, for callers who asked for logits."""

    logits: dict[str, float]


Answer = ClassAnswer | MultiLabelAnswer | ValueAnswer


@final
class ClassResults(Results[Tensor, Answer]):
    """Collects the logits of classified examples, and scores them. `Kind.results` makes one.

    Args:
        task: Problem type and labels of the task.
        split: The examples, with their labels if they are to be scored.
        example: For each row of the inputs, the index of the example to which its logits belong; -1: they are not used.

    Attributes:
        logits: The logits of all examples, float32 `[examples, classes]`; 0 for examples not added yet.
    """

    def __init__(self, task: TaskLike, split: Split, example: Array) -> None:
        self._task, self._split, self._example = task, split, example
        self.logits = torch.zeros(len(split), len(task.labels))

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Store the logits `[batch, classes]` in `outputs`, of the rows with the indices `rows`. `labels` is unused."""
        examples = torch.from_numpy(self._example[np.asarray(rows)])
        has_example = examples >= 0
        self.logits[examples[has_example]] = outputs.float().cpu()[has_example]

    def in_units(self, mean: float, scale: float) -> ClassResults:
        """Return the results of a regression in other units: those of numbers that became (number - mean) / scale."""
        labels = [None if label is None else label * scale + mean for label in self._split.labels]
        results = ClassResults(self._task, self._split.with_labels(labels), self._example)
        results.logits = self.logits * scale + mean
        return results

    def first_not_finite(self) -> int | None:
        """Return the index of the first example with invalid logits, see `first_invalid_row`; None if there is none."""
        return first_invalid_row(self.logits)

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Return metric -> score over the examples that have a label.

        Raises DataError if no example has a label, UnknownNameError for an unknown metric, and ConfigError if a metric
        needs a positive class and it is not clear which it is.
        """
        return class_scores(metrics, *self._both(), self._task)

    def _both(self) -> tuple[Tensor, Tensor]:
        targets = torch.from_numpy(label_array(self._split))
        present = _has_label(targets)
        return self.logits[present], targets[present]

    def baseline(self, metrics: Sequence[str]) -> tuple[str, dict[str, float]] | None:
        """Return the constant prediction that is best by the first metric, and metric -> best score of any of them.

        Errors as in `scores`; see `_constant`.
        """
        _, targets = self._both()
        constants, scores = _constants(metrics, targets, self._task), dict[str, float]()
        for names, logits in constants.values():
            scores |= class_scores(names, logits, targets, self._task)
        return next(iter(constants)), {name: scores[name] for name in metrics}

    def compare(self, metrics: Sequence[str]) -> Comparison:
        """Return how the scores by `metrics` compare with those of a constant prediction; errors as in `scores`.

        The bootstrap draws examples.
        """
        logits, targets = self._both()
        constants, classes = _constants(metrics, targets, self._task), len(self._task.labels)
        single = self._task.problem_type == "classification"
        answers = [
            [
                (names, rows, score.class_f1(rows.argmax(-1), targets, classes) if single else None)
                for names, rows in side
            ]
            for side in ([(metrics, logits)], constants.values())
        ]
        always = next(iter(constants))
        needs_both = any(name in score.RANKING for name in metrics) and len(targets.unique()) > 1

        def score_rows(rows: Tensor, is_constant: bool) -> dict[str, float]:
            if needs_both and len(targets[rows].unique()) < 2:
                return {}  # how well two classes are separated cannot be said of one
            scores: dict[str, float] = {}
            for names, answer, whole_f1 in answers[int(is_constant)]:
                scores |= class_scores(names, answer[rows], targets[rows], self._task, absent_f1=whole_f1)
            return {name: scores[name] for name in metrics}

        result = compare(metrics, len(targets), always, score_rows)
        if "mae" in metrics and result["verdict"] is None:  # a correlation ignores the scale
            error = class_scores(["mae"], logits, targets, self._task)["mae"]
            if error >= result["baseline"]["mae"]:
                result["verdict"] = f"not better by mae than always answering '{always}'"
        return result

    def per_class(self) -> list[ClassRow]:
        """Return the rows of `metrics.class_table`: one per class, then the averages; [] for a regression."""
        problem, labels = self._task.problem_type, self._task.labels
        if problem == "regression":
            return []
        logits, targets = self._both()
        return score.class_table(logits > 0 if problem == "multi_label" else logits.argmax(-1), targets, labels)

    def errors(self, count: int) -> list[WrongAnswer]:
        """Return at most `count` wrong predictions, the most confident first; see `error_rows`."""
        wrong = wrong_answers(self.logits, torch.from_numpy(label_array(self._split)), self._task)
        return error_rows(wrong, self._split.texts, count)

    def guesses(self) -> list[Label]:
        """Return one prediction per example: a class id, a number (regression), or a tuple of 0 and 1 (multi-label)."""
        if self._task.problem_type == "regression":
            return self.logits[:, 0].tolist()
        if self._task.problem_type == "multi_label":
            return [tuple(row) for row in (self.logits > 0).long().tolist()]
        return self.logits.argmax(-1).tolist()

    def predictions(self) -> list[Answer]:
        """Return a dict for each example: "label", "score" (its probability) and "probabilities" (by label).

        Multi-label: "labels" (those above 0.5) and "probabilities". Regression: "value".
        """
        problem, labels = self._task.problem_type, self._task.labels
        if problem == "regression":
            return [{"value": value} for value in self.logits[:, 0].tolist()]
        values = self.logits.sigmoid() if problem == "multi_label" else self.logits.softmax(-1)
        answers: list[Answer] = []
        for row in values.tolist():
            probabilities: dict[str, float] = dict(zip(labels, row, strict=True))
            if problem == "multi_label":
                likely = [name for name, p in probabilities.items() if p > 0.5]
                answers.append({"labels": likely, "probabilities": probabilities})
            else:
                label = max(probabilities, key=probabilities.__getitem__)
                answers.append({"label": label, "score": probabilities[label], "probabilities": probabilities})
        return answers

    def raw_predictions(self) -> list[LogitsAnswer] | list[Answer]:
        """Return the logit of each label for each example. For a regression, return what `predictions` returns."""
        if self._task.problem_type == "regression":
            return self.predictions()
        return [{"logits": dict(zip(self._task.labels, row, strict=True))} for row in self.logits.tolist()]


def first_invalid_row(logits: Tensor) -> int | None:
    """Return the index of the first row of `logits` `[rows, classes]` with a NaN in its softmax; None if there is none.

    A -inf beside finite numbers is valid: its probability is 0.
    """
    bad = (~logits.float().logsumexp(-1).isfinite()).nonzero()
    return int(bad[0]) if len(bad) else None


def _constants(metrics: Sequence[str], targets: Tensor, task: TaskLike) -> dict[str, tuple[list[str], Tensor]]:
    """Return the best constant answers as texts, each with the metrics by which it is best and its logits.

    The logits are `[rows, classes]`. The first answer is that of the first metric. `targets` has no missing label.
    Raises DataError if it has no label at all, and ConfigError if it is not clear which class is positive for "f1".
    """
    score.check_rows(targets, targets)
    found: dict[str, tuple[list[str], Tensor]] = {}
    for metric in metrics:
        answer, logits = _constant(metric, targets, task)
        found.setdefault(answer, ([], logits.expand(len(targets), -1)))[0].append(metric)
    return found


def _constant(metric: str, targets: Tensor, task: TaskLike) -> tuple[str, Tensor]:
    """Return the answer that scores best by a metric if it is given for all rows, as text and logits `[classes]`.

    It is the mean of a regression, the most frequent class, or the most frequent combination of labels; but for "f1",
    the positive one of two classes, or the combination of labels with the highest F1. No label in `targets` is missing.
    """
    if task.problem_type == "regression":
        mean = targets.double().mean()
        return f"{float(mean):.3g}", mean.float()[None]
    if task.problem_type == "multi_label":
        if metric == "f1":
            counts, order = targets.double().sum(0).sort(descending=True, stable=True)
            f1 = counts.cumsum(0) / (torch.arange(1, len(counts) + 1) * len(targets) + counts.sum())  # half of it
            is_set = torch.zeros(len(counts), dtype=torch.bool)
            is_set[order[: int(f1.argmax()) + 1]] = bool(counts.any())
        else:
            rows, counts = targets.unique(dim=0, return_counts=True)
            is_set = rows[counts.argmax()] > 0
        names = [name for name, flag in zip(task.labels, is_set.tolist(), strict=True) if flag]
        return ", ".join(names) or "no label", is_set.float() * 2 - 1
    most = int(torch.bincount(targets, minlength=len(task.labels)).argmax())
    if metric == "f1" and len(task.labels) == 2 and (positive := positive_id(task, [metric])) is not None:
        most = positive
    return task.labels[most], torch.nn.functional.one_hot(torch.tensor(most), len(task.labels)).float()


def _has_label(targets: Tensor) -> Tensor:
    """Return a mask `[examples]`, True where no label of the example is NaN, -1 or -100."""
    present = ~targets.isnan() if targets.is_floating_point() else targets >= 0
    return present if present.ndim == 1 else present.all(-1)


def class_scores(
    metrics: Sequence[str], logits: Tensor, targets: Tensor, task: TaskLike, *, absent_f1: Tensor | None = None
) -> dict[str, float]:
    """Return metric -> score of logits `[examples, classes]` against `targets`, the correct answers.

    `absent_f1` is the F1 of classes that do not occur, see `score_classes`; None: macro F1 leaves them out. Raises
    DataError without examples, UnknownNameError for an unknown metric, and ConfigError if a metric needs a positive
    class and it is not clear which it is (see `positive_id`).
    """
    if task.problem_type == "regression":
        return score.score_numbers(metrics, logits[:, 0].tolist(), targets.tolist())
    if task.problem_type == "multi_label":
        return score.score_multi_label(metrics, logits > 0, targets)
    plain, ranked = ([name for name in metrics if (name in score.RANKING) is flag] for flag in (False, True))
    positive = positive_id(task, metrics)
    guesses, classes = logits.argmax(-1), len(task.labels)
    scores = score.score_classes(plain, guesses, targets, classes, positive=positive, absent_f1=absent_f1)
    if ranked:
        positive = 1 if positive is None else positive  # these metrics do not depend on it
        margin = logits[:, positive] - logits[:, 1 - positive]
        scores |= score.score_ranking(ranked, margin, (targets == positive).long())
    return {name: scores[name] for name in metrics}


def positive_id(task: TaskLike, metrics: Sequence[str]) -> int | None:
    """Return the id of a task's positive class, the declared one or else the usual one (see `usual_positive`).

    None if there is neither. Raises ConfigError if there is neither, there are two classes, and one of `metrics` needs
    a positive class.
    """
    positive = getattr(task, "positive", None) or score.usual_positive(task.labels)
    if positive is not None:
        return task.labels.index(positive)
    if len(task.labels) == 2 and (unclear := [name for name in metrics if name in score.ABOUT_POSITIVE]):
        got = f"'{unclear[0]}' is about the positive class, and the classes are {' and '.join(task.labels)}"
        raise ConfigError(f"metrics: {got}. Say which one is positive, as in positive='{task.labels[1]}'.")
    return None


def error_rows(wrong: Iterable[WrongAnswer], texts: Sequence[object], count: int) -> list[WrongAnswer]:
    """Return at most `count` wrong predictions with their texts, the most confident first; `texts` are all examples.

    In a regression, the predictions with the largest errors come first. Equally confident predictions stay in the order
    of their examples.
    """
    worst = nlargest(count, wrong, key=lambda answer: (_confidence(answer), -answer["row"]))
    return [_with_text(answer, texts[answer["row"]]) for answer in worst]


def _confidence(answer: WrongAnswer) -> float:
    return answer.get("confidence", abs(answer.get("error", 0.0)))


def _with_text(answer: WrongAnswer, example: object) -> WrongAnswer:
    text = list(example) if isinstance(example, tuple) else getattr(example, "name", example)
    return {**answer, "text": cast("JSON", text)}


def wrong_answers(logits: Tensor, targets: Tensor, task: TaskLike) -> Iterator[WrongAnswer]:
    """Yield a record for each example with a wrong prediction, in the examples' order; texts are added later.

    Examples without a label are skipped. In a regression, any difference is wrong. In multi-label tasks, one wrong
    label makes an example wrong, and its confidence is that of the most confident wrong label.

    Args:
        logits: Logits `[examples, classes]`.
        targets: The correct answers: class ids or numbers `[examples]`, or 0 and 1 `[examples, classes]`.
        task: Problem type and labels of the task.
    """
    present = _has_label(targets)
    if task.problem_type == "regression":
        for row, (value, true) in enumerate(zip(logits[:, 0].tolist(), targets.tolist(), strict=True)):
            if present[row] and value != true:
                yield {"row": row, "text": None, "true": true, "predicted": value, "error": value - true}
    elif task.problem_type == "multi_label":
        yield from _wrong_label_sets(logits, targets.bool(), present, task.labels)
    else:
        confidences, guesses = logits.softmax(-1).max(-1)
        for row in ((guesses != targets) & present).nonzero().flatten().tolist():
            true, guess = task.labels[int(targets[row])], task.labels[int(guesses[row])]
            yield {"row": row, "text": None, "true": true, "predicted": guess, "confidence": float(confidences[row])}


def _wrong_label_sets(logits: Tensor, truths: Tensor, present: Tensor, labels: Sequence[str]) -> Iterator[WrongAnswer]:
    """Yield what `wrong_answers` yields, for a multi-label task: in the examples' order, with lists of labels.

    "true" and "predicted" are these lists. `truths` are bools `[examples, classes]`, and `present` is a mask of the
    examples that have labels.
    """
    guesses = logits > 0
    is_wrong = (guesses != truths) & present[:, None]
    confidences = logits.abs().sigmoid().masked_fill(~is_wrong, 0).max(1).values
    for row in is_wrong.any(1).nonzero().flatten().tolist():
        true, guess = ([labels[i] for i in side.nonzero().flatten().tolist()] for side in (truths[row], guesses[row]))
        yield {"row": row, "text": None, "true": true, "predicted": guess, "confidence": float(confidences[row])}


class Comparison(TypedDict):
    """The scores of a reader beside those of the best constant predictions.

    Attributes:
        rows: Number of rows that were scored; for tags, of texts.
        always: The constant prediction, as text: the mean or the most frequent class, combination of labels or tag. If
            the task's first metric is "f1", it is the positive one of two classes, or the labels with the highest F1.
        baseline: Metric -> score of the constant prediction that is best by this metric.
        interval: Metric -> ends of the 95 % interval of the reader's own score, from a percentile bootstrap over rows;
            {} if no metric could be compared.
        verdict: None if the reader is better by the first metric in `interval`: the 95 % interval of the difference on
            the same rows lies above 0. Otherwise a phrase that says that it is not. It names the metric if that is not
            the task's first, or says that no metric could be compared. It also says if the mean absolute error is not
            below that of the constant prediction.
    """

    rows: int
    always: str
    baseline: dict[str, float]
    interval: dict[str, tuple[float, float]]
    verdict: str | None


def compare(metrics: Sequence[str], rows: int, always: str, score: RowScore) -> Comparison:
    """Return how predictions compare with the best constant predictions, by a bootstrap over rows.

    The 1,000 resamples (fewer for many rows, but at least 200) are the same in all calls with equal `rows`.

    Args:
        metrics: The metrics, at least one. The first of them that `score` returns decides the verdict.
        rows: Number of rows, at least 1.
        always: The constant prediction that is best by the metric that decides, as text.
        score: Called with row indices `[rows]`, which may repeat, and a flag. Returns metric -> score on these rows: of
            the predictions, or of constant predictions if the flag is True. {}: these rows cannot be scored, and are
            left out of the bootstrap.

    Source:
        Efron and Tibshirani 1993, "An introduction to the bootstrap", chapter 13.
    """
    baseline = dict(score(torch.arange(rows), True))
    decisive = next((metric for metric in metrics if metric in baseline), None)
    if decisive is None:
        verdict = f"not compared with always answering '{always}'"
        return {"rows": rows, "always": always, "baseline": baseline, "interval": {}, "verdict": verdict}
    rng, values, gains = np.random.default_rng(0), dict[str, list[float]](), list[float]()
    sign = -1 if decisive in LOWER else 1
    for _ in range(max(_FEWEST, min(REPEATS, _MOST_ROWS // rows))):
        drawn = torch.from_numpy(rng.integers(rows, size=rows))
        own, other = score(drawn, False), score(drawn, True)
        if not own:
            continue
        for metric, value in own.items():
            values.setdefault(metric, []).append(value)
        gains.append(sign * (own[decisive] - other[decisive]))
    better = float(np.percentile(gains, _ENDS[0])) > 0
    by = f"better by {decisive} than" if decisive != metrics[0] else "better than"
    return {
        "rows": rows,
        "always": always,
        "baseline": baseline,
        "interval": {metric: _interval(drawn) for metric, drawn in values.items()},
        "verdict": None if better else f"not {by} always answering '{always}'",
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, _ENDS).tolist()
    return low, high


def compare_tags(metrics: Sequence[str], guesses: Tags, truths: Tags, labels: Sequence[str]) -> Comparison:
    """Compare the scores of predicted tags with those of the most frequent tag for every word.

    `guesses` and `truths` hold, for each text, the ids of every word's predicted and true tag; `labels` are the names
    of the tags. The bootstrap draws texts. Only "span_f1" and "accuracy" are compared, if `metrics` names them.
    """
    always, constant = most_frequent_tag(truths, labels)
    own, other = (_tag_counts(rows, truths, labels, spans="span_f1" in metrics) for rows in (guesses, constant))

    def score(rows: Tensor, is_constant: bool) -> Mapping[str, float]:
        right, guessed, true, right_words, words = (other if is_constant else own)[rows].sum(0).tolist()
        scores = {"span_f1": 2 * right / max(1.0, guessed + true), "accuracy": right_words / max(1.0, words)}
        return {name: scores[name] for name in metrics if name in scores}

    return compare(metrics, len(truths), always, score)


def most_frequent_tag(truths: Tags, labels: Sequence[str]) -> tuple[str, list[list[int]]]:
    """Return the name of the most frequent tag in `truths`, and predictions that give it to every word of all texts.

    `truths` has the tag ids of each text's words that have labels, without -100; the predictions are ids too.
    """
    tags = torch.tensor([tag for row in truths for tag in row], dtype=torch.long)
    most = int(torch.bincount(tags, minlength=len(labels)).argmax())
    return labels[most], [[most] * len(row) for row in truths]


def _tag_counts(guesses: Tags, truths: Tags, labels: Sequence[str], *, spans: bool) -> Tensor:
    """Return five counts per text, `[texts, 5]`: correct, predicted and true spans; correct words, and all words.

    `guesses` and `truths` are the predicted and true ids of tags, and `labels` the tags' names. Without `spans`, the
    counts of spans are 0.
    """
    rows: list[list[int]] = []
    for guess, truth in zip(guesses, truths, strict=True):
        both = [spans_of(row, labels) if spans else set[object]() for row in (guess, truth)]
        words = sum(int(one) == int(other) for one, other in zip(guess, truth, strict=True))
        rows.append([len(both[0] & both[1]), len(both[0]), len(both[1]), words, len(truth)])
    return torch.tensor(rows, dtype=torch.float64)
