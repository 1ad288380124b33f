"""Monitors: which label of a reader is watched, how token scores are aggregated, and which score flags a text."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final, get_args

import torch
from torch import Tensor

from lamina.errors import ConfigError, check_known
from lamina.heads.base import HeadConfig
from lamina.monitors.aggregations import EMA
from lamina.monitors.base import AGGREGATIONS, Aggregation, RunningScore
from lamina.monitors.calibration import Calibration
from lamina.monitors.reply_drift import DriftSketch, DriftWatcher
from lamina.utils import JSON, JSONObject, check_fields

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


Scale = Literal["probability", "log_odds"]
# Returns the logits [rows, tokens, classes] of a reader, from its name and a mask [batch] of the rows that are wanted.
# If the head of the reader weighs tokens, their log weights are the last column.
GetLogits = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Monitor:
    """A running score of a text, from one reader, and a threshold that flags the text.

    At each token, the score of the labels in `flag` is computed from the reader's logits, and `aggregate` turns the
    token scores so far into the score of the text. `bank.watch` and `bank.stream` run monitors while a model generates.
    `lamina.monitors.calibrate` chooses the threshold for a false positive rate and stores the monitor in the bank.

    Example:
        ```python
        monitor = Monitor("safety", flag="unsafe", aggregate=EMA(half_life=10), threshold=0.9)
        ```

    Args:
        reader: Name of a reader in the bank. Its logits at a token must not depend on later tokens: use a token-wise
            fusion with `TokenClassification(encoder_layers=0)`, or with `SequenceClassification` and `pooling="mean"`
            or "query", which then labels each token as if it were a text.
        flag: Label, or labels, of the reader to watch for. The probabilities of several labels are added; if the labels
            are independent (multi-label), the highest counts. `MultiMax` scores each label by itself. Stored as a
            tuple.
        aggregate: How the scores of the tokens are combined into the score of the text. Default: `EMA()`.
        threshold: The text is flagged from the first token on at which its score is at least this. None: never.
        scale: What a token's score is: "probability", or "log_odds", the logarithm of the odds of the flagged labels
            against all others, or of an independent label. For a regression reader it is the predicted value on either
            scale.
        name: Name of the monitor. None or "": the reader's name.
        calibration: How `lamina.monitors.calibrate` chose the threshold. None: it did not.
        sketch: Scores, lengths and projected features of the calibration's replies, which `watch_drift` needs; or None.

    Raises:
        ConfigError: If `flag` is empty or names a label twice, `aggregate` is not an aggregation, the threshold is not
            a finite number, or another option has a wrong type.
        UnknownNameError: If the scale does not exist.
    """

    reader: str
    flag: str | Sequence[str]
    aggregate: Aggregation = field(default_factory=EMA)
    threshold: float | None = None
    scale: Scale = "probability"
    name: str | None = None
    calibration: Calibration | None = None
    sketch: DriftSketch | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        check_fields("monitor", self)
        object.__setattr__(self, "flag", (self.flag,) if isinstance(self.flag, str) else tuple(self.flag))
        object.__setattr__(self, "name", self.name or self.reader)
        if not isinstance(self.aggregate, Aggregation):
            got = self.aggregate.__name__ if isinstance(self.aggregate, type) else repr(self.aggregate)[:60]
            raise ConfigError(f"monitor: aggregate is {got}; it must be an object, such as lamina.monitors.EMA(5).")
        check_known("monitor", [self.scale], get_args(Scale), "scale")
        if self.threshold is not None and not math.isfinite(self.threshold):
            problem = f"the threshold of '{self.name}' is {self.threshold!r}"
            raise ConfigError(f"monitor: {problem}; it must be a finite number.")
        if not self.flag:
            raise ConfigError(f"monitor: '{self.name}' flags no label; give at least one.")
        if twice := [label for label in self.flag if list(self.flag).count(label) > 1]:
            raise ConfigError(f"monitor: '{self.name}' flags '{twice[0]}' twice; name each label once.")

    @property
    def readers(self) -> tuple[str, ...]:
        """Name of the monitor's reader, in a tuple, because a cascade has two."""
        return (self.reader,)

    def check(self, heads: Mapping[str, HeadConfig]) -> None:
        """Raise an error unless the monitor fits the head of its reader.

        Args:
            heads: Reader name -> config of its head; the monitor's reader must be among them.

        Raises:
            UnknownNameError: If the reader does not have a flagged label.
            ConfigError: If all labels of the reader are flagged and each text has exactly one, the threshold is above
                the highest possible score, or the aggregation needs a head that weighs tokens and this head does not.
        """
        head = heads[self.reader]
        check_known(f"monitor '{self.name}'", self.flag, head.labels, "label")
        if set(head.labels) == set(self.flag) and head.problem_type == "classification":
            problem = f"flags every label of reader '{self.reader}'"
            raise ConfigError(f"monitor '{self.name}': it {problem}; at least one must remain.")
        is_probability = self.scale == "probability" and head.problem_type != "regression"
        most = len(self.flag) if self.aggregate.per_label else 1  # a sum of one probability per label
        if is_probability and self.threshold is not None and self.threshold > most:
            problem = f"the threshold is {self.threshold}, and a score is at most {most}, so nothing would be flagged"
            raise ConfigError(f"monitor '{self.name}': {problem}. Give one below, or scale='log_odds'.")
        if self.aggregate.weighted and not head.weighs_tokens:
            problem = f"{type(self.aggregate).__name__} needs the head of reader '{self.reader}' to weigh tokens"
            raise ConfigError(
                f"monitor '{self.name}': {problem}, which it does not. Use SequenceClassification(pooling='query')."
            )

    def token_scores(self, logits: Float[Tensor, "*batch columns"], head: HeadConfig) -> Float[Tensor, "*batch scores"]:
        """Return the scores of tokens on the monitor's scale, in the columns that the aggregation needs.

        Args:
            logits: A column per label of the head, then the log weight if the head weighs tokens.
            head: Config of the reader's head.

        Returns:
            Scores in float64: one column; or one per flagged label if the aggregation is `per_label`; or the score and
            the log weight if it is `weighted`.
        """
        logits, weights = logits[..., : len(head.labels)], logits[..., len(head.labels) :]
        flagged = [list(head.labels).index(label) for label in self.flag]
        groups = [[number] for number in flagged] if self.aggregate.per_label else [flagged]
        scores = torch.stack([self._score(logits.double(), group, head) for group in groups], dim=-1)
        return torch.cat([scores, weights.double()], dim=-1) if self.aggregate.weighted else scores

    def _score(self, logits: Tensor, group: list[int], head: HeadConfig) -> Float[Tensor, "*batch"]:
        """Return one score per token, on the monitor's scale, for the labels with indices `group`, taken together.

        `logits` has a column per label, and `head` is the config of the reader's head.
        """
        if head.problem_type != "classification":
            highest = logits[..., group].amax(-1)
            return highest.sigmoid() if (head.problem_type, self.scale) == ("multi_label", "probability") else highest
        rest = [number for number in range(logits.shape[-1]) if number not in group]
        odds = logits[..., group].logsumexp(-1) - logits[..., rest].logsumexp(-1)
        return odds.sigmoid() if self.scale == "probability" else odds

    def group(self, heads: Mapping[str, HeadConfig]) -> Hashable:
        """Return a key, equal for monitors that `start_monitors` can compute together as a `MonitorGroup`.

        These monitors differ only in readers and thresholds. `heads` maps reader name -> config of its head.
        """
        head = heads[self.reader]
        return self.aggregate, self.scale, tuple(self.flag), tuple(head.labels), head.problem_type, head.weighs_tokens

    def watch_drift(self, *, false_alarm_rate: float = 0.01, seed: int = 0) -> DriftWatcher:
        """Return a sequential test of whether new replies are still like the replies of the calibration.

        Example:
            ```python
            watcher = monitor.watch_drift()
            for score, length in replies:  # the highest score of each reply, and its number of tokens
                if alarm := watcher.update(score, length):
                    print(alarm.sentence())
            ```

        Args:
            false_alarm_rate: Highest probability of an alarm within a run of 10,000 replies, if the replies have not
                changed since the calibration; above 0 and below 1.
            seed: Seed of the random numbers that rank equal values.

        Raises:
            ConfigError: If the monitor has no `sketch` (a summary of the replies of its calibration), or the rate is
                out of range.
        """
        if self.sketch is None:
            problem = f"monitor '{self.name}' has no sketch of the replies that it was calibrated on"
            raise ConfigError(f"drift: {problem}. Use lamina.monitor or lamina.monitors.calibrate, which make one.")
        return DriftWatcher(self.sketch, false_alarm_rate=false_alarm_rate, seed=seed)

    def to_dict(self) -> dict[str, JSON]:
        """Return the fields as JSON-ready values, for `from_dict`."""
        sketch: dict[str, JSON] = {} if self.sketch is None else {"sketch": self.sketch.to_dict()}
        if self.sketch is not None and self.sketch.width is not None:
            sketch["sketch_width"] = self.sketch.width
        return {
            "reader": self.reader,
            "name": self.name,
            "aggregate": AGGREGATIONS.to_dict(self.aggregate),
            "flag": list(self.flag),
            "threshold": self.threshold,
            "scale": self.scale,
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            **sketch,
        }

    @classmethod
    def from_dict(cls, fields: JSONObject) -> Monitor:
        """Build a monitor from the fields that `to_dict` returned.

        Raises ConfigError if a value is not valid, UnknownNameError for an unknown aggregation or scale, and KeyError
        or TypeError if a field is missing or unknown.
        """
        calibration = None if fields["calibration"] is None else Calibration(**fields["calibration"])
        aggregate = AGGREGATIONS.from_dict(fields["aggregate"])
        width = (fields := dict(fields)).pop("sketch_width", None)
        sketch = DriftSketch.from_dict(fields["sketch"], width=width) if "sketch" in fields else None
        return cls(**{**fields, "aggregate": aggregate, "calibration": calibration, "sketch": sketch})


class RunningMonitors(ABC):
    """Monitors in progress, over a batch of texts whose tokens arrive in chunks. `start_monitors` makes it."""

    @abstractmethod
    def add(self, get_logits: GetLogits, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "monitors batch tokens"]:
        """Add the next tokens of each text, and return the running scores of the texts at each of them, in float64.

        At padding, the score of the token before is repeated; before a text's first token it is NaN. A cascade has -inf
        at both.

        Args:
            get_logits: Called with a reader's name and a mask `[batch]`; returns the reader's logits at these tokens,
                `[texts, tokens, classes]`, of the texts where the mask is True. If the reader's head weighs tokens, a
                last column has their log weights.
            mask: True at the tokens to score, False at padding.
        """


@final
class MonitorGroup(RunningMonitors):
    """Monitors in progress whose `Monitor.group` is equal; they are computed together. `start_monitors` makes it."""

    def __init__(self, monitors: Sequence[Monitor], heads: Mapping[str, HeadConfig]) -> None:
        self._monitors, self._head = monitors, heads[monitors[0].reader]
        self._running = RunningScore(monitors[0].aggregate)

    def add(self, get_logits: GetLogits, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "monitors batch tokens"]:
        """Score the tokens for all monitors at once, as one batch that holds the texts once per monitor.

        Parameters and result are those of `RunningMonitors.add`.
        """
        all_rows = torch.ones_like(mask[:, 0])
        logits = torch.stack([get_logits(monitor.reader, all_rows) for monitor in self._monitors])
        scores = self._monitors[0].token_scores(logits, self._head)
        count = len(self._monitors)
        return self._running.add(scores.flatten(0, 1), mask.repeat(count, 1)).unflatten(0, (count, -1))
