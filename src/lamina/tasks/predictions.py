"""From logits to answers that a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import regex
import torch

from lamina.data.batches import tokenizer_of
from lamina.tasks.tags import marks_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from lamina.heads.base import HeadConfig

    Span = tuple[int, int]

BEST = 5  # candidates for a mask token

# A word: letters and digits that may be joined inside by - ' . , / : (as in U.N., 1996-08-22 or 7:30), one character of
# a script that puts no spaces between words, or one other sign.
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
_LETTERS = rf"(?:(?!{_UNSPACED})[\w\p{{M}}])+"
_WORD = regex.compile(rf"{_UNSPACED}|{_LETTERS}(?:[-'\u2019.,/:]{_LETTERS})*|[^\w\s]")


def word_spans(text: str) -> list[Span]:
    """Character span of every word of a plain text."""
    return [match.span() for match in _WORD.finditer(text)]


def mask_spans(text: str, token: str) -> list[Span]:
    """Character span of every mask token of a text."""
    return [match.span() for match in regex.finditer(regex.escape(token), text)]


def best_tokens(logits: Float[Tensor, "... classes"]) -> Float[Tensor, "... best 2"]:
    """The five likeliest entries of the vocabulary (all, if it is smaller), best first: number and probability."""
    shares, ids = logits.float().softmax(-1).topk(min(BEST, logits.shape[-1]))
    return torch.stack([ids.to(shares.dtype), shares], dim=-1)


def fill(best: Float[Tensor, "masks best 2"], masks: Sequence[Span], processor: Any) -> list[dict[str, Any]]:
    """What may stand at the mask tokens of a text.

    Args:
        best: What `best_tokens` gave for each of them.
        masks: Their spans.
        processor: The tokenizer, or a processor that holds one.
    """
    tokenizer = tokenizer_of(processor)
    return [
        {
            "start": start,
            "end": end,
            "candidates": [
                {"token": tokenizer.decode([int(number)]).strip(), "score": share} for number, share in some
            ],
        }
        for (start, end), some in zip(masks, best.tolist(), strict=True)
    ]


def decode(logits: Tensor, head: HeadConfig, text: str | tuple[str, str], words: Sequence[Span]) -> Any:
    """The answer of one reader about one text; see `lamina.predict`.

    Args:
        logits: `[classes]`, or `[words, classes]`.
        head: Its labels and problem.
        text: The text.
        words: Spans of its words, for token tasks.
    """
    if head.kind == "token_classification":
        return _spans(logits, head.labels, str(text), words)
    if head.problem_type == "regression":
        return {"value": float(logits[0])}
    if head.problem_type == "multi_label":
        shares = dict(zip(head.labels, logits.sigmoid().tolist(), strict=True))
        return {"labels": [label for label, share in shares.items() if share > 0.5], "probabilities": shares}
    shares = dict(zip(head.labels, logits.softmax(-1).tolist(), strict=True))
    best = max(shares, key=shares.__getitem__)
    return {"label": best, "score": shares[best], "probabilities": shares}


def _spans(logits: Tensor, labels: Sequence[str], text: str, words: Sequence[Span]) -> list[dict[str, Any]]:
    """Spans of B- and I- tags; for labels that mark no spans, every word."""
    shares, ids = logits.softmax(-1).max(-1) if len(words) else ((), ())
    joins = marks_spans(labels)
    found: list[dict[str, Any]] = []
    before = ""
    for (start, end), share, number in zip(words, map(float, shares), map(int, ids), strict=True):
        mark, _, kind = labels[number].partition("-") if joins else ("B", "", labels[number])
        if joins and labels[number] == "O":
            before = ""
            continue
        if mark in "IEL" and kind == before:
            found[-1]["end"] = end
            found[-1]["scores"].append(share)
        else:
            found.append({"start": start, "end": end, "label": kind, "scores": [share]})
        before = kind if joins else ""
    for one in found:
        scores = one.pop("scores")
        one["text"] = text[one["start"] : one["end"]]
        one["score"] = sum(scores) / len(scores)
    return found
