"""Monitors: a reader's label, how its tokens' scores make one score of a text, and which score flags it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import torch
from torch import Tensor

from lamina.errors import ConfigError, check_known
from lamina.heads.base import HeadConfig
from lamina.monitors.base import AGGREGATIONS, Aggregation, RunningScore
from lamina.monitors.calibration import Calibration
from lamina.monitors.ema import EMA

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Scale = Literal["probability", "log_odds"]
GetLogits = Callable[[str, Tensor], Tensor]
"""What hands over a reader's logits `[rows, tokens, classes]`, by its name and the rows `[batch]` (bool) wanted.

Where its head weighs tokens, their log weights are a last column.
"""


class RunningMonitors(ABC):
    """Some monitors or a cascade at work on some texts."""

    @abstractmethod
    def add(self, ask: GetLogits, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "monitors batch tokens"]:
        """Take some more tokens; returns the score of each text up to and including each of them, in float64."""


@final
@dataclass(frozen=True)
class Monitor:
    """Watches a text while it is written: a reader's label, the score of the text so far, and a threshold.

    `lamina.monitors.calibrate` chooses the threshold for a rate of false alarms and keeps the monitor with the bank;
    `bank.stream` and `bank.watch` run it.

    Args:
        reader: Name of the reader in the bank. What it says of a token must not depend on later ones: a token-wise
            fusion under `TokenClassification(encoder_layers=0)`, or under `SequenceClassification(pooling="mean")` or
            "query", to which each token is then a text.
        flag: The reader's label that is watched for, or several: their probabilities are summed (of several
            independent labels the highest counts).
        aggregate: How the scores of the tokens make that of the text so far.
        threshold: The text is flagged from the first token on whose score is at least this; None: never.
        scale: Of a token's score: "probability", or "log_odds", its logarithm over that of all other labels. Of a
            regression it is the value either way.
        name: What it is called; None: as the reader.
        calibration: How the threshold was chosen, if by `lamina.monitors.calibrate`.
    """

    reader: str
    flag: str | Sequence[str]
    aggregate: Aggregation = field(default_factory=EMA)
    threshold: float | None = None
    scale: Scale = "probability"
    name: str | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "flag", (self.flag,) if isinstance(self.flag, str) else tuple(self.flag))
        object.__setattr__(self, "name", self.name or self.reader)
        check_known("monitor", [self.scale], get_args(Scale), "scale")
        given = self.threshold
        if given is not None and not (isinstance(given, int | float) and math.isfinite(given)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"monitor: the threshold of '{self.name}' is {given!r}; a finite number is needed.")
        if not self.flag:
            raise ConfigError(f"monitor: '{self.name}' flags no label; at least one is needed.")
        if twice := [label for label in self.flag if list(self.flag).count(label) > 1]:
            raise ConfigError(f"monitor: '{self.name}' flags '{twice[0]}' twice; each label counts once.")

    @property
    def readers(self) -> tuple[str, ...]:
        """The reader that always runs."""
        return (self.reader,)

    def check(self, heads: Mapping[str, HeadConfig]) -> None:
        """Raise UnknownNameError or ConfigError if it does not fit the reader's head."""
        labels = heads[self.reader].labels
        check_known(f"monitor '{self.name}'", self.flag, labels, "label")
        if set(labels) == set(self.flag) and heads[self.reader].problem_type == "classification":
            came = f"flags every label of reader '{self.reader}'"
            raise ConfigError(f"monitor '{self.name}': it {came}; at least one must be left.")
        is_share = self.scale == "probability" and heads[self.reader].problem_type != "regression"
        if is_share and self.threshold is not None and self.threshold > 1:
            came = f"the threshold is {self.threshold}, and a probability is at most 1, so nothing would be flagged"
            raise ConfigError(f"monitor '{self.name}': {came}. Give one below, or scale='log_odds'.")
        if self.aggregate.weighted and not heads[self.reader].weighs_tokens:
            came = f"{type(self.aggregate).__name__} weighs tokens as the head of reader '{self.reader}' does"
            raise ConfigError(
                f"monitor '{self.name}': {came}, and that weighs none. Use SequenceClassification(pooling='query')."
            )

    def token_scores(self, logits: Float[Tensor, "*batch columns"], head: HeadConfig) -> Float[Tensor, "*batch scores"]:
        """The score of each token.

        Where the aggregation is `per_label` one for each flagged label; where it is `weighted`, and its log weight.
        """
        logits, weights = logits[..., : len(head.labels)], logits[..., len(head.labels) :]
        flagged = [list(head.labels).index(label) for label in self.flag]
        groups = [[number] for number in flagged] if self.aggregate.per_label else [flagged]
        scores = torch.stack([self._score(logits.double(), group, head) for group in groups], dim=-1)
        return torch.cat([scores, weights.double()], dim=-1) if self.aggregate.weighted else scores

    def _score(self, logits: Tensor, group: list[int], head: HeadConfig) -> Float[Tensor, "*batch"]:
        if head.problem_type != "classification":
            highest = logits[..., group].amax(-1)
            return highest.sigmoid() if (head.problem_type, self.scale) == ("multi_label", "probability") else highest
        rest = [number for number in range(logits.shape[-1]) if number not in group]
        odds = logits[..., group].logsumexp(-1) - logits[..., rest].logsumexp(-1)
        return odds.sigmoid() if self.scale == "probability" else odds

    def group(self, heads: Mapping[str, HeadConfig]) -> Hashable:
        """Monitors with equal groups are computed as one."""
        head = heads[self.reader]
        return self.aggregate, self.scale, tuple(self.flag), tuple(head.labels), head.problem_type, head.weighs_tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        calibration = None if self.calibration is None else self.calibration.to_dict()
        own = {"flag": list(self.flag), "threshold": self.threshold, "scale": self.scale, "calibration": calibration}
        return {"reader": self.reader, "name": self.name, "aggregate": AGGREGATIONS.to_dict(self.aggregate), **own}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Monitor:
        """Build from what `to_dict` gave."""
        calibration = None if given["calibration"] is None else Calibration(**given["calibration"])
        aggregate = AGGREGATIONS.from_dict(given["aggregate"])
        return cls(**{**given, "aggregate": aggregate, "calibration": calibration})


@final
class MonitorGroup(RunningMonitors):
    """Monitors of one group at work."""

    def __init__(self, monitors: Sequence[Monitor], heads: Mapping[str, HeadConfig]) -> None:
        self._monitors, self._head = monitors, heads[monitors[0].reader]
        self._running = RunningScore(monitors[0].aggregate)

    def add(self, ask: GetLogits, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "monitors batch tokens"]:
        """Score the tokens, and aggregate."""
        every = torch.ones_like(mask[:, 0])
        logits = torch.stack([ask(monitor.reader, every) for monitor in self._monitors])
        scores = self._monitors[0].token_scores(logits, self._head)
        count = len(self._monitors)
        return self._running.add(scores.flatten(0, 1), mask.repeat(count, 1)).unflatten(0, (count, -1))
