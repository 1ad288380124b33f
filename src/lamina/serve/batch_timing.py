"""The times and sizes of a batch, for metrics and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchTiming:
    """How long each step of a batch took, and its size. All times are in seconds.

    Attributes:
        queue: For each request, the time from its arrival to the start of the pass, without the time of tokenising.
        read: Time of tokenising.
        run: Time of the passes of the model, and of turning their outputs into answers.
        requests: Number of requests.
        texts: Number of texts of all requests.
        tokens: Number of tokens of all texts, without padding.
    """

    queue: Sequence[float]
    read: float
    run: float
    requests: int
    texts: int
    tokens: int
