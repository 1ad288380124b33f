"""The rows of a task that were answered wrongly, the most confident answers first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from typing import Any

from torch import Tensor

from lamina.data.arrow import Column
from lamina.tasks.base import TaskLike

Span = dict[str, Any]  # "start" and "end" (characters), "label", "score"


def error_rows(wrong: Iterable[dict[str, Any]], texts: Column, count: int) -> list[dict[str, Any]]:
    """The `count` worst of some wrong answers, with their texts; only so many are held at a time.

    They are sorted by "confidence", or for numbers by the size of their "error"; those alike by their rows.
    """
    worst = nlargest(count, wrong, key=lambda row: (row.get("confidence", abs(row.get("error", 0))), -row["row"]))
    return [{"row": row["row"], "text": _plain(texts[row["row"]]), **row} for row in worst]


def _plain(text: Any) -> Any:
    """A text, a pair as a list, or an image's name."""
    return list(text) if isinstance(text, tuple) else getattr(text, "name", text)


def wrong_answers(logits: Tensor, targets: Tensor, task: TaskLike) -> Iterator[dict[str, Any]]:
    """What is wrong of the answers `[rows, classes]` of whole examples: row, true, predicted, and confidence or error.

    The confidence is the probability of the class that was predicted; of several labels that of the wrong decision that
    is surest. Of numbers the error is predicted - true.
    """
    labels = task.labels
    if task.problem_type == "regression":
        for row, (value, true) in enumerate(zip(logits[:, 0].tolist(), targets.tolist(), strict=True)):
            if value != true:
                yield {"row": row, "true": true, "predicted": value, "error": value - true}
    elif task.problem_type == "multi_label":
        guesses, decided, truths = logits > 0, logits.abs().sigmoid(), targets.bool()
        sure, wrong = decided.masked_fill(guesses == truths, 0).max(1).values, (guesses != truths).any(1)
        for row in wrong.nonzero().flatten().tolist():
            true, guess = (
                [labels[i] for i in side.nonzero().flatten().tolist()] for side in (truths[row], guesses[row])
            )
            yield {"row": row, "true": true, "predicted": guess, "confidence": float(sure[row])}
    else:
        sure, guesses = logits.softmax(-1).max(-1)
        for row in (guesses != targets).nonzero().flatten().tolist():
            true, guess = labels[int(targets[row])], labels[int(guesses[row])]
            yield {"row": row, "true": true, "predicted": guess, "confidence": float(sure[row])}


def wrong_spans(row: int, true: Sequence[Span], predicted: Sequence[Span]) -> dict[str, Any] | None:
    """The spans of a text that are in error, marked so; None if there is none.

    An "error" is "missed" (a true span where none was predicted), "extra" (a predicted one where none is), or "wrong"
    (on both sides: they overlap, but not with the same ends and label). The confidence is the highest "score" of an
    error: of a predicted span the mean probability of its words' tags, of a missed one that of the tags that its words
    were given instead.
    """
    right = {_key(span) for span in true} & {_key(span) for span in predicted}
    missed = [_marked(span, predicted, "missed") for span in true if _key(span) not in right]
    extra = [_marked(span, true, "extra") for span in predicted if _key(span) not in right]
    if not (missed or extra):
        return None
    confidence = max(span["score"] for span in (*extra, *(span for span in missed if span["error"] == "missed")))
    return {"row": row, "true": missed, "predicted": extra, "confidence": confidence}


def _key(span: Span) -> tuple[Any, ...]:
    return span["start"], span["end"], span["label"]


def _marked(span: Span, others: Sequence[Span], alone: str) -> Span:
    overlaps = any(span["start"] < other["end"] and other["start"] < span["end"] for other in others)
    return {**span, "error": "wrong" if overlaps else alone}
