"""A text baseline: what TF-IDF and logistic regression score, to compare a reader with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lamina.errors import ConfigError, require_packages
from lamina.tasks.class_results import class_scores
from lamina.tasks.split import is_missing

if TYPE_CHECKING:
    from lamina.tasks.outputs import Label
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task

_NEVER = -1e9  # logit of a class without a training row


def tfidf_scores(task: Task, split: str) -> dict[str, float]:
    """Return metric -> score of TF-IDF of words and word pairs with logistic regression (numbers: ridge regression).

    Args:
        task: A task over texts or pairs of texts. The baseline is trained on its "train" split.
        split: The split that is scored. Rows without a label are skipped in both splits.

    Raises:
        ConfigError: If the task has no train split, or no class or number per text.
        MissingExtraError: If scikit-learn is not installed.
    """
    require_packages("evaluate", "sklearn", "sklearn")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline

    kind = task.kind
    if kind.per_token or kind.processor != "tokenizer" or not kind.has_classes:
        raise ConfigError(f"evaluate: tfidf is set for a task of kind {kind}; it is for one answer per text.")
    if "train" not in task.splits:
        hint = "Give tasks with one, or in place of tfidf=True a file to learn from"
        raise ConfigError(f"evaluate: tfidf is set, and task {task.name} has no train part. {hint}.")
    (texts, labels), (held, truths) = (_labelled(task.split(part)) for part in ("train", split))
    logistic = LogisticRegression(max_iter=1000)
    several = task.problem_type == "multi_label"
    model = {"regression": Ridge(), "multi_label": OneVsRestClassifier(logistic)}.get(task.problem_type, logistic)
    targets = torch.tensor(labels).numpy() if several else labels
    learnt = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]"), model)
    learnt.fit(texts, targets)
    if task.problem_type == "classification":
        logits = torch.full((len(held), len(task.labels)), _NEVER)
        logits[:, torch.tensor(learnt.classes_)] = torch.from_numpy(learnt.predict_log_proba(held)).float()
    else:
        values = torch.from_numpy(learnt.predict(held)).float().reshape(len(held), -1)
        logits = values * 2 - 1 if several else values
    return class_scores(task.metrics, logits, torch.tensor(truths), task)


def _labelled(split: Split) -> tuple[list[str], Sequence[Label]]:
    """Return the texts and labels of a split's rows that have a label. The texts of a pair are joined."""
    rows = [(text, label) for text, label in zip(split.texts, split.labels, strict=True) if not is_missing(label)]
    return [text if isinstance(text, str) else " ".join(text) for text, _ in rows], [label for _, label in rows]
