"""The frontend's side: collect the scores of a request's tokens, and compute the readers' answers from them.

vLLM runs the model in worker processes; its frontend handles requests and responses. A request may have several output
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast, final

import numpy as np
import torch

from lamina.heads.sequence_classification import SequenceClassification
from lamina.vllm.layout import PARTS, Layout, ReaderColumns
from lamina.vllm.monitors import Verdict
from lamina.vllm.worker import StepScores

if TYPE_CHECKING:
    from lamina.utils import JSON
    from lamina.vllm.worker import Message


@final
class Answers(Mapping[str, "dict[str, JSON]"]):
    """The readers' answers for one output sequence: reader name -> answers, computed on access.

    The value of a reader has the keys "prompt", "output" and "both", which hold the answer over that part of the text
    (see `answer`), or None if the part has no tokens. The key "tokens" holds a list for each token that the engine has
    read, the prompt's first: the probabilities in the order of the labels, or a regression's only value. The engine
    does not read the last token of a sequence. Readers that label tokens have only "tokens", and readers that pool
    whole prompts only "prompt".

    Args:
        layout: The engine's readers.
        names: Names of the readers that the request has chosen.
        prompt: Number of tokens of the prompt.

    Attributes:
        monitors: Monitor name -> its verdict on the output so far.
        ended_by: Name of the monitor that ended the request; None: no monitor did.
    """

    def __init__(self, layout: Layout, names: Sequence[str], prompt: int) -> None:
        self._layout, self._names, self._prompt = layout, names, prompt
        self._scores = np.empty((0, layout.token_columns), dtype=np.float32)
        self._end = 0  # number of tokens that have scores
        self._whole: np.ndarray | None = None  # logits of the readers of whole prompts
        self.monitors: dict[str, Verdict] = {}
        self.ended_by: str | None = None

    def on_message(self, message: Message) -> None:
        """Store a message of the scheduler: this sequence's scores of one or several steps, and the latest verdicts."""
        for part in message["scores"]:
            self.add(StepScores(*part))
        self.monitors = {name: Verdict(*verdict) for name, verdict in message.get("monitors", {}).items()}
        self.ended_by = message.get("ended_by")

    def add(self, scores: StepScores) -> None:
        """Add the scores of a step. If a token was computed again, its new scores replace the old ones."""
        if scores.prompt is not None:
            self._whole = np.frombuffer(scores.prompt, dtype=np.float32).copy()  # torch needs a writable array
        if not self._layout.token_columns:
            return
        first, part = scores.first, np.frombuffer(scores.tokens, dtype=np.float32)
        part = part.reshape(-1, self._layout.token_columns)
        last = first + len(part)
        if last > len(self._scores):
            grown = np.full((max(last, 2 * len(self._scores)), self._layout.token_columns), np.nan, dtype=np.float32)
            grown[: len(self._scores)] = self._scores
            self._scores = grown
        self._scores[first:last] = part
        self._end = max(self._end, last)

    def __getitem__(self, name: str) -> dict[str, JSON]:
        """Return one reader's answers, with its `answer_keys`; raise KeyError if the request has not chosen it."""
        if name not in self._names:
            raise KeyError(name)
        reader = self._layout.readers[name]
        if reader.whole:
            whole = None if self._whole is None else torch.from_numpy(self._whole[None, reader.first : reader.last])
            return {"prompt": None if whole is None else answer(reader, whole)}
        tokens = self._token_rows(reader, 0, self._end)
        if not isinstance(reader.head, SequenceClassification):
            return {"tokens": tokens}
        scores = torch.from_numpy(self._scores[: self._end, reader.first : reader.last])
        parts = zip(PARTS, (scores[: self._prompt], scores[self._prompt :], scores), strict=True)
        answers: dict[str, JSON] = {part: answer(reader, rows) for part, rows in parts}
        return {**answers, "tokens": tokens}

    def _token_rows(self, reader: ReaderColumns, first: int, last: int) -> list[JSON]:
        logits = torch.from_numpy(self._scores[first:last, reader.first : reader.first + reader.logits])
        return probabilities(reader, logits).tolist()

    @property
    def read(self) -> int:
        """Number of tokens of the text (prompt and output together) that have scores so far."""
        return self._end

    def before(self, output: int) -> int:
        """Return how many tokens are read once `output` tokens are generated: the prompt, and all of these but one."""
        return self._prompt + output - 1

    def to_dict(self, first: int = 0) -> dict[str, JSON]:
        """Return all answers as JSON-ready values: reader name -> its answers; and "monitors" -> verdicts, if any.

        The lists "tokens" leave out the first `first` tokens of the text, prompt included. A score of a verdict that
        is not finite is None.
        """
        fields = {name: self[name] for name in self}
        for name in self._streamed():
            fields[name]["tokens"] = cast("list[JSON]", fields[name]["tokens"])[first:]
        return {**fields, **self._verdicts()}

    def part_to_dict(self, first: int, last: int) -> dict[str, JSON]:
        """Return reader name -> {"tokens": scores}, JSON-ready, and "monitors" -> verdicts, if any.

        The scores are those of the tokens `first` to `last - 1` of the text; the prompt begins at 0. Readers that pool
        whole prompts add their answer if `first` is 0.
        """
        fields: dict[str, JSON] = {name: self[name] for name in self if first == 0 and name not in self._streamed()}
        for name in self._streamed():
            fields[name] = {"tokens": self._token_rows(self._layout.readers[name], first, last)}
        return {**fields, **self._verdicts()}

    def _streamed(self) -> list[str]:
        return [name for name in self if not self._layout.readers[name].whole]

    def _verdicts(self) -> dict[str, JSON]:
        """Return {"monitors": name -> the verdict's fields}, or {}. A score that is not finite is None."""
        verdicts: dict[str, JSON] = {
            name: {**verdict._asdict(), "score": verdict.score if math.isfinite(verdict.score) else None}
            for name, verdict in self.monitors.items()
        }
        return {"monitors": verdicts} if verdicts else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Answers({dict(self)})"


def probabilities(reader: ReaderColumns, logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of a reader's classes, from logits `[..., classes]`; for a regression, the logits."""
    if reader.head.problem_type == "regression":
        return logits
    return logits.sigmoid() if reader.head.problem_type == "multi_label" else logits.softmax(-1)


def answer(reader: ReaderColumns, scores: torch.Tensor) -> dict[str, JSON] | None:
    """Return a reader's answer over some tokens, from their scores `[tokens, columns]`; None without tokens.

    It has "value" for a regression, otherwise "probabilities" (label -> probability), and the best "label" or, for a
    multi-label task, "labels": those above 0.5. The tokens' logits are averaged, by the tokens' weights if the reader
    has any.
    """
    if not len(scores):
        return None
    logits = scores[:, : reader.logits].double()
    if reader.weighs_tokens:
        pooled = (logits * scores[:, reader.logits].double().softmax(0).unsqueeze(-1)).sum(0)
    else:
        pooled = logits.mean(0)
    values = probabilities(reader, pooled).tolist()
    if reader.head.problem_type == "regression":
        return {"value": values[0]}
    by_label: dict[str, JSON] = dict(zip(reader.head.labels, values, strict=True))
    if reader.head.problem_type == "multi_label":
        above = [label for label, value in zip(by_label, values, strict=True) if value > 0.5]
        return {"labels": above, "probabilities": by_label}
    return {"label": list(by_label)[values.index(max(values))], "probabilities": by_label}
