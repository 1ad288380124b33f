"""Answers put back where they belong: from windows of texts to texts and their words."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.windows import word_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from lamina.data.windows import Encoded

    Words = Sequence[Sequence[tuple[int, int]]]

MOST_SCORES = 1 << 27  # of tokens at once, when every entry of a vocabulary is scored: 512 MB

Places = list[list[tuple[int, int]]]  # per window: (position, word)


def places_of(encoded: Encoded, words: Mapping[str, Words]) -> dict[str, Places]:
    """Reader name -> where in each window the words are that it counts; made once for readers of the same words."""
    made: dict[int, Places] = {}
    for spans in words.values():
        if id(spans) not in made:
            made[id(spans)] = [[] for _ in encoded.features]
            for found in word_tokens(encoded, spans):
                for word, place in enumerate(found):
                    if place is not None:
                        made[id(spans)][place[0]].append((place[1], word))
    return {name: made[id(spans)] for name, spans in words.items()}


def put(
    logits: Tensor,
    rows: Sequence[int],
    encoded: Encoded,
    places: Places | None,
    answers: list[Tensor],
    *,
    shrink: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Put one batch's logits, or what `shrink` makes of those of a word, where they belong."""
    for at, row in enumerate(rows):
        text = encoded.text[row]
        if places is None:
            if encoded.window[row] == 0:
                answers[text] = logits[at]
        elif places[row]:
            positions, words = zip(*places[row], strict=True)
            chosen = logits[at, list(positions)]
            answers[text][list(words)] = chosen if shrink is None else shrink(chosen).cpu()


def blank(labels: Sequence[str], words: Words | None, texts: int) -> list[Tensor]:
    """Answers before anything was read: a word that has no token gets the label "O", or else the first."""
    empty = torch.zeros(len(labels))
    if words is None:
        return [empty] * texts
    empty[labels.index("O") if "O" in labels else 0] = 1.0
    return [empty.repeat(len(some), 1) for some in words]


def guess(logits: Tensor, problem: str) -> Any:
    """The prediction that a metric compares: a class id, one per word, a number, or zeros and ones."""
    if problem == "regression":
        return float(logits[0])
    if problem == "multi_label":
        return (logits > 0).int().tolist()
    return logits.argmax(-1).tolist()


@contextmanager
def asking(module: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients."""
    modes = [(one, one.training) for one in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, mode in modes:
            one.training = mode
