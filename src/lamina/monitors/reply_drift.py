"""Drift: a sequential test of whether new replies still look like those that a monitor was calibrated on."""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, cast, final

import numpy as np
import torch
from torch import Tensor

from lamina.errors import ConfigError, convert_errors
from lamina.utils import JSON, check_inside, check_range, check_type, check_types

if TYPE_CHECKING:
    from jaxtyping import Float


_KEPT = 400  # replies in a sketch
_PROJECTIONS = 6  # projections of a reader's mean features
_SCORE, _LENGTH = "score", "length"
_RUN = 10_000  # replies of one run of the test; each is inserted into a sorted list, so the cost grows slowly
_JUMP = 0.002  # share of the wealth that is divided equally anew at each reply, so that a bet can begin to win late
# Bets on the p-value p of a reply, as functions of u = p - 1/2 whose mean over [0, 1] is 1: values shift up or down,
# or spread or narrow. The last one bets nothing.
_SLOPES = (-1.8, -1.0, -0.5, 0.5, 1.0, 1.8)
_BENDS = (-0.45, 0.45, 0.9)


@final
@dataclass(frozen=True)
class ReplyFacts:
    """The facts about one reply that a `DriftSketch` summarises and a `DriftWatcher` tests, without its text.

    Attributes:
        score: Highest running score that the monitor gave the reply.
        length: Number of tokens.
        features: Mean of the reader's features over the tokens, `[dim]`, an array or a tensor; None if it is not known.
            It is stored as a tensor.

    Raises:
        ConfigError: If `features` is not one row of numbers, `score` is not a number (NaN is one here), or `length` is
            not a finite number from 0 on.
    """

    score: float
    length: int
    features: Float[Tensor, " dim"] | np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("score", "length"):
            object.__setattr__(self, name, check_type("drift", name, getattr(self, name), "float"))
        check_range("drift", "length", self.length, 0, open_high=True)
        if self.features is not None:
            features = _features(self.features)
            if features.ndim != 1 or not len(features):
                got = f"the features of a reply have the shape {list(features.shape)}"
                hint = "Leave features out if there are none."
                raise ConfigError(f"drift: {got}; they are one row of numbers, at least one. {hint}")
            object.__setattr__(self, "features", features)

    @property
    def width(self) -> int | None:
        """Number of features; None if they are not known."""
        return None if self.features is None else len(self.features)


def _features(values: object) -> Tensor:
    """Return features as a tensor, which shares an array's memory if torch can use it; ConfigError if not numbers."""
    rule = "give one number per feature, or a row of them for each reply"
    with convert_errors(
        lambda reason: ConfigError(f"drift: features cannot be read as a table of numbers ({reason}); {rule}."),
        (TypeError, ValueError, RuntimeError),
    ):
        if isinstance(values, np.ndarray):
            values = values.astype(values.dtype.newbyteorder("="), order="C", copy=False)
        return torch.as_tensor(values)


@final
@dataclass(frozen=True)
class DriftSketch:
    """A summary of the replies that a monitor was calibrated on: scores, lengths, and projected features.

    Each list has the values of the same random sample of at most 400 replies. A projection is the sum of the entries of
    the reader's mean feature vector, each with a sign that depends on the projection's number. No text can be read from
    a sketch.

    Attributes:
        values: Name of a quantity -> its values, in ascending order. Quantities are "score", "length", and the
            projections "state 1" to "state 6".
        width: Number of features of each reply; None if replies had no features, or if the sketch was saved by a
            version that did not record the number.
    """

    values: Mapping[str, Sequence[float]]
    width: int | None = None

    @classmethod
    @check_types("drift")
    def of(cls, replies: Sequence[ReplyFacts], *, seed: int = 0) -> Self:
        """Return the sketch of the replies. Its scores and projections have five significant digits.

        Args:
            replies: Replies to summarise, all with features or all without.
            seed: Seed of the random sample, which is drawn if there are more than 400 replies.

        Raises:
            ConfigError: If there is no reply, a score or feature is NaN, or replies differ in their number of features.
        """
        if not replies:
            raise ConfigError("drift: there is no reply to make a sketch of. Give at least one.")
        widths = {reply.width for reply in replies}
        if len(widths) > 1:
            counts = " and ".join(str(width or "no") for width in sorted(widths, key=lambda width: width or 0))
            hint = " Give features for every reply or for none." if None in widths else ""
            rule = f"all must have as many, of the same reader.{hint}"
            raise ConfigError(f"drift: the replies have {counts} features; {rule}")
        kept = random.Random(seed).sample(list(replies), min(_KEPT, len(replies)))
        columns = [_quantities(reply) for reply in kept]
        return cls({name: sorted(own[name] for own in columns) for name in columns[0]}, widths.pop())

    @property
    def longest(self) -> int:
        """Number of tokens of the longest reply in the sketch."""
        return int(self.values[_LENGTH][-1])

    def to_dict(self) -> dict[str, JSON]:
        """Return the values as JSON-ready lists, for `from_dict`; the width is not among them."""
        return {name: list(own) for name, own in self.values.items()}

    @classmethod
    @check_types("drift")
    def from_dict(cls, fields: Mapping[str, Sequence[float]], *, width: int | None = None) -> Self:
        """Build a sketch from the values that `to_dict` returned; for `width` see the attribute.

        Raises ConfigError if `fields` are not lists of numbers, scores or lengths are missing, or the width is not a
        number from 1 on.
        """
        check_range("drift", "width", width, 1)
        with convert_errors(lambda reason: ConfigError(f"drift: the values of a sketch cannot be read ({reason}).")):
            values = {name: [float(value) for value in own] for name, own in fields.items()}
            if not (values.get(_SCORE) and values.get(_LENGTH)):
                raise ValueError("scores or lengths are missing")
            return cls(values, width)


def _quantities(reply: ReplyFacts) -> dict[str, float]:
    """Return name -> value of each quantity of a reply: "score", "length", and projections "state 1", "state 2", ...

    Score and projections have five significant digits, like those of a saved sketch that they are compared with. Raises
    ConfigError if one is NaN, because it cannot be ranked.
    """
    values = {_SCORE: float(f"{reply.score:.5g}"), _LENGTH: float(reply.length)}
    if reply.features is not None:
        features = cast("Tensor", reply.features)
        sums = _signs(len(features)) @ features.double().cpu()
        values |= {f"state {number}": float(f"{value:.5g}") for number, value in enumerate(sums.tolist(), 1)}
    if missing := [name for name, value in values.items() if math.isnan(value)]:
        raise ConfigError(f"drift: the {missing[0]} of a reply is NaN; scores and features must be numbers.")
    return values


@lru_cache
def _signs(dim: int) -> Float[Tensor, "projections dim"]:
    """Return the signs (1 or -1) of the projections, which depend only on `dim`, on every machine."""
    rows = [hashlib.shake_256(f"lamina drift {row}".encode()).digest(dim) for row in range(_PROJECTIONS)]
    return torch.tensor([[1.0 if byte & 1 else -1.0 for byte in row] for row in rows], dtype=torch.float64)


@final
@dataclass(frozen=True)
class DriftAlarm:
    """An alarm: new replies differ from the replies of the calibration. `DriftWatcher.update` returns it.

    Attributes:
        quantity: What has moved: "score", "length" or "state N", a projection of the reader's features.
        replies: Number of replies in this run of the test, up to and including the one that raised the alarm.
        median: Median of the quantity over the replies of the calibration.
        recent: Median of the quantity over the latest replies, at most 100.
        false_alarm_rate: Highest probability of an alarm within a run of 10,000 replies, if the replies have not
            changed since the calibration.
    """

    quantity: str
    replies: int
    median: float
    recent: float
    false_alarm_rate: float

    def sentence(self) -> str:
        """Return the alarm as a sentence: the quantity that moved, its two medians, and the number of replies."""
        named = {_SCORE: "the scores", _LENGTH: "the numbers of tokens"}
        what = named.get(self.quantity, f"the reader's features ({self.quantity})")
        moved = f"the median of {what} was {self.median:.3g} and is {self.recent:.3g} in the latest replies"
        return f"After {self.replies} replies, they differ from those of the calibration: {moved}."


@final
class DriftWatcher:
    """A test, reply by reply, of whether new replies are like the calibration's. `Monitor.watch_drift` makes it.

    At each reply, each quantity is ranked among the calibration's replies and all replies since; the rank gives a
    conformal p-value. If new replies are exchangeable with the replies of the calibration, the p-values of a quantity
    are independent and uniform. This holds for any distribution of the quantity, and even if the sketch has few
    replies. For each of the d quantities a gambler bets that its p-values are not uniform. The alarm is raised once a
    gambler has multiplied its stake by d / `false_alarm_rate`. By Ville's inequality, the probability of a false alarm
    within a run is at most `false_alarm_rate`.

    A run has 10,000 replies; then the test begins again, so that over several runs a false alarm is more probable than
    `false_alarm_rate`. After an alarm, replies are only counted until `restart` is called. The methods may be called
    from several threads.

    Args:
        sketch: Summary of the replies of the calibration.
        false_alarm_rate: Highest probability of a false alarm per run of 10,000 replies, above 0 and below 1.
        seed: Seed of the random numbers that rank equal values.

    Raises:
        ConfigError: If the rate is out of range.

    Source:
        Vovk et al. 2021, "Retrain or not retrain: conformal test martingales for change-point detection",
        arXiv:2102.10439; the bets are a mixture of fixed ones, with jumps.
    """

    @check_types("drift")
    def __init__(self, sketch: DriftSketch, *, false_alarm_rate: float = 0.01, seed: int = 0) -> None:
        check_inside("drift", "false_alarm_rate", false_alarm_rate)
        self._sketch, self._rate, self._random = sketch, false_alarm_rate, random.Random(seed)
        self._lock = Lock()
        self.restart()

    def restart(self) -> None:
        """Begin a new run of the test, without replies and alarm."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        self._gamblers = {name: _Gambler(own) for name, own in self._sketch.values.items()}
        self._count = 0
        self._alarm: DriftAlarm | None = None

    @property
    def replies(self) -> int:
        """Number of replies since this run of the test began, including those after an alarm."""
        return self._count

    @property
    def alarm(self) -> DriftAlarm | None:
        """The alarm of this run of the test; None while there is none."""
        return self._alarm

    @property
    def evidence(self) -> float:
        """Evidence of drift: the largest wealth of a gambler, divided by the wealth that raises the alarm.

        From 1 on, there is an alarm.
        """
        with self._lock:
            largest = max(gambler.log_wealth for gambler in self._gamblers.values())
        return math.exp(min(700.0, largest - math.log(len(self._gamblers) / self._rate)))

    def update(
        self,
        scores: float | Sequence[float] | np.ndarray | Tensor,
        lengths: int | Sequence[int] | np.ndarray | Tensor,
        features: Float[Tensor, " dim"] | Float[Tensor, "replies dim"] | np.ndarray | None = None,
    ) -> DriftAlarm | None:
        """Test one reply or several, in their order.

        Return the alarm of this run of the test, or None while there is none. If a reply is refused, those before it
        count.

        Args:
            scores: Highest running score of each reply.
            lengths: Number of tokens of each reply.
            features: Mean of the reader's features over the tokens of each reply. None, or a sketch without features:
                only scores and lengths are tested.

        Raises:
            ConfigError: If the numbers of scores, lengths and features differ, a value is NaN or one that `ReplyFacts`
                refuses, or the sketch was made from another number of features.
        """
        own_scores, own_lengths = _listed(scores), _listed(lengths)
        rows = [None] * len(own_scores)
        if features is not None:
            rows = list(torch.atleast_2d(_features(features)))
        if not len(own_scores) == len(own_lengths) == len(rows):
            counts = f"{len(own_scores)} scores, {len(own_lengths)} lengths and {len(rows)} rows of features"
            raise ConfigError(f"drift: there are {counts}; each reply has one of each.")
        for score, length, row in zip(own_scores, own_lengths, rows, strict=True):
            self.add(ReplyFacts(score, length, row))
        return self._alarm

    @check_types("drift")
    def add(self, reply: ReplyFacts) -> DriftAlarm | None:
        """Test one reply. Return the alarm of this run of the test, or None while there is none.

        A run without an alarm ends after 10,000 replies, and the next reply begins a new run. After an alarm, replies
        are only counted. A reply that is refused does not count.

        Raises:
            ConfigError: If the reply's score or a feature is NaN, or the sketch was made from another number of
                features.
        """
        values = _quantities(reply)
        if None not in (reply.width, self._sketch.width) and reply.width != self._sketch.width:
            got = f"a reply has {reply.width} features, and the replies of the calibration have {self._sketch.width}"
            raise ConfigError(f"drift: {got}; both must come from the same reader.")
        with self._lock:
            if self._count == _RUN and self._alarm is None:
                self._begin()
            self._count += 1
            if self._alarm is not None:
                return self._alarm
            for name, gambler in self._gamblers.items():
                if name in values:
                    gambler.bet(values[name], self._random.random())
            best = max(self._gamblers, key=lambda name: self._gamblers[name].log_wealth)
            if self._gamblers[best].log_wealth >= math.log(len(self._gamblers) / self._rate):
                known, recent = self._sketch.values[best], sorted(self._gamblers[best].recent)
                medians = (known[len(known) // 2], recent[len(recent) // 2])
                self._alarm = DriftAlarm(best, self._count, *medians, self._rate)
            return self._alarm


def _listed(values: float | Sequence[float] | np.ndarray | Tensor) -> list[Any]:
    plain: Any = values.tolist() if isinstance(values, np.ndarray | Tensor) else values
    return list(plain) if isinstance(plain, Sequence) else [plain]


@dataclass
class _Gambler:
    """A gambler that bets that the p-values of one quantity are not uniform. Its wealth is the evidence of drift.

    Attributes:
        sketch: Values of the quantity in the calibration, in ascending order.
        log_wealth: Logarithm of the wealth, which began at 1.
        recent: The latest values of the quantity, at most 100.
    """

    sketch: Sequence[float]
    log_wealth: float = 0.0
    recent: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._values = list(self.sketch)
        self._count = len(_SLOPES) + len(_BENDS) + 1
        self._parts = [1 / self._count] * self._count  # share of the wealth that each bet has

    def bet(self, value: float, tie: float) -> None:
        """Bet on the p-value of the next reply, and update the wealth and the recent values.

        The p-value is the rank of the reply's `value` among the sketch's values and all values since. `tie`, a random
        number between 0 and 1, places the value among equal ones.
        """
        below, upto = bisect_left(self._values, value), bisect_right(self._values, value)
        self._values.insert(upto, value)
        self.recent = [*self.recent[-99:], value]
        u = (below + tie * (upto - below + 1)) / len(self._values) - 0.5
        bend = 12 * u * u - 1
        gains = [*(1 + slope * u for slope in _SLOPES), *(1 + size * bend for size in _BENDS), 1.0]
        wealth = [part * gain for part, gain in zip(self._parts, gains, strict=True)]
        total = sum(wealth)
        self.log_wealth += math.log(total)
        self._parts = [(1 - _JUMP) * own / total + _JUMP / self._count for own in wealth]
