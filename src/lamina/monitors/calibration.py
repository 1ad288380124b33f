"""Calibration: choose a monitor's threshold for a false positive rate, and measure how certain the rates are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Self, SupportsFloat, TypedDict, Unpack, cast, final

from lamina.errors import ConfigError, require_packages
from lamina.utils import JSON, check_inside, check_types

Interval = tuple[float, float]
Unit = Literal["reply", "1000 tokens"]  # what a rate of false alarms is counted per
Precision = Literal["float32", "bfloat16", "float16"]

_EPS: dict[Precision, float] = {"float32": 0.0, "bfloat16": 2**-7, "float16": 2**-10}  # float32 has a rule of its own


@final
@dataclass(frozen=True)
class Rounding:
    """How far the batch size and the attention kernel may move a score.

    Attributes:
        logit: How far a logit may move in a precision below float32; 0 for float32.
        probability: Whether the scores are probabilities. False: they are log odds or predicted values. No effect if
            `logit` is 0.
    """

    logit: float = 0.0
    probability: bool = True

    @classmethod
    def of(cls, precision: Precision, highest: Sequence[float], *, probability: bool = True) -> Self:
        """Return the rounding of scores that are computed in `precision`: the lowest of the model and the reader.

        Rounding moves a logit by up to 16 times the precision's `eps`. If the logits of all texts lie within less than
        2 of each other, it is 8 times `eps` times that range: such a reader has smaller weights. Both numbers are above
        the largest differences between kernels and batch sizes that were measured on two small models. `highest` has
        the highest score of each text.
        """
        finite = [score for score in highest if math.isfinite(score)] or [0.0]
        low, high = min(finite), max(finite)
        if probability:
            low, high = _log_odds(low), _log_odds(high)
        return cls(_EPS[precision] * min(16.0, 8 * (high - low)), probability)

    def at(self, score: float) -> float:
        """Return by how much rounding may raise or lower `score`; 0 for -inf (no score).

        So two passes over a text differ by at most twice as much. In float32, scores from 0 to 1 move by at most
        1.1e-5, and by less near 0 and 1, where a probability changes less than its logit.
        """
        if score == -math.inf:
            return 0.0
        near = min(1e-5, 4e-5 * min(abs(score), abs(1 - score))) + 1e-6 * max(1.0, abs(score))
        if self.probability and 0 <= score <= 1:  # the sum of several labels' highest probabilities may exceed 1
            return max(near, self.logit * score * (1 - score))
        return max(near, self.logit * max(1.0, abs(score) / 8))


def _log_odds(probability: float) -> float:
    """Return the log odds of a probability, finite for 0 and 1 too."""
    inside = min(max(probability, 1e-9), 1 - 1e-9)
    return math.log(inside / (1 - inside))


FLOAT32 = Rounding()


class Facts(TypedDict, total=False):
    """Optional fields of a `Calibration`, explained there: `task`, `split`, `asked`, `data` and `date`."""

    task: str
    split: str
    asked: float | None
    data: str
    date: str


@final
@dataclass(frozen=True)
class Calibration:
    """A monitor's threshold, and the rates that were measured with it. `lamina.monitors.calibrate` makes it.

    A text is flagged if its running score reaches the threshold at any token, so only the highest score of each text
    matters. The intervals are exact (Clopper-Pearson). If the threshold was chosen on the same texts, the false
    positive rate on other texts is slightly higher on average.

    Attributes:
        threshold: The lowest running score that flags a text, from that token on.
        target: Rate of false alarms for which the threshold was chosen, in the unit `per`. None: the user set the
            threshold.
        false_positive_rate: Fraction of the negative texts that are flagged.
        false_positive_interval: Confidence interval of the false positive rate.
        recall: Fraction of the positive texts that are flagged.
        recall_interval: Confidence interval of the recall.
        negatives: Number of negative texts.
        positives: Number of positive texts.
        confidence: Confidence level of the intervals.
        task: Name of the task of the texts; "" if it is not known.
        split: Name of the split of the texts; "" if it is not known.
        asked: For a cascade, the fraction of tokens for which its second reader ran; else None.
        guaranteed: Whether the threshold was chosen so that the rate of false alarms on other texts of the same kind is
            at most `target` with probability `confidence`. False: a target only holds on these texts.
        alarms_per_thousand: Number of false alarms per thousand tokens of negative texts, read up to the alarm; None if
            the tokens were not counted.
        alarms_interval: Confidence interval of `alarms_per_thousand` (Garwood's, exact for a Poisson count); None if
            the tokens were not counted.
        tokens_to_flag: Mean number of tokens up to the flag, over the positive texts that are flagged; None if none is,
            or the tokens were not counted.
        data: Digest of the labelled texts; "" if it was not computed.
        date: Day of the calibration, as "2026-01-31"; "" if it is not known.
        per: Unit of `target`. "reply": the false positive rate. "1000 tokens": false alarms per thousand tokens; see
            `lamina.monitors.token_rate`.
    """

    threshold: float
    target: float | None
    false_positive_rate: float
    false_positive_interval: Interval
    recall: float
    recall_interval: Interval
    negatives: int
    positives: int
    confidence: float = 0.95
    task: str = ""
    split: str = ""
    asked: float | None = None
    guaranteed: bool = False
    alarms_per_thousand: float | None = None
    alarms_interval: Interval | None = None
    tokens_to_flag: float | None = None
    data: str = ""
    date: str = ""
    per: Unit = "reply"

    def __post_init__(self) -> None:
        for name in ("false_positive_interval", "recall_interval", "alarms_interval"):
            if getattr(self, name) is not None:  # JSON files have lists in place of tuples
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def is_useful(self) -> bool:
        """Whether the monitor beats chance: the recall's interval lies above the false positive rate's interval."""
        return self.recall_interval[0] > self.false_positive_interval[1]

    def promise(self) -> str:
        """Return the target as text, such as "at most 0.01 with 95% confidence"; "" if the target is None.

        If not `guaranteed`, it ends in "on these texts" instead. With `per` "1000 tokens", "false alarms per thousand
        tokens" follows the number.
        """
        if self.target is None:
            return ""
        what = f"{self.target:g}" + " false alarms per thousand tokens" * (self.per == "1000 tokens")
        return f"at most {what} " + (f"with {self.confidence:.0%} confidence" if self.guaranteed else "on these texts")

    def to_dict(self) -> dict[str, JSON]:
        """Return the fields as JSON-ready values; `Calibration(**fields)` builds the same object again."""
        return {**asdict(self), **{key: list(value) for key, value in vars(self).items() if isinstance(value, tuple)}}

    @classmethod
    @check_types("calibrate")
    def of(
        cls,
        highest: Sequence[object],
        positive: Sequence[object],
        *,
        false_positive_rate: float = 0.01,
        threshold: float | None = None,
        confidence: float = 0.95,
        guarantee: bool = False,
        rounding: Rounding = FLOAT32,
        **facts: Unpack[Facts],
    ) -> Self:
        """Return the calibration for `threshold`, or for the lowest one with a rate of at most `false_positive_rate`.

        Args:
            highest: Highest running score of each text. -inf: a text without a score; inf: one that the first monitor
                of a cascade flags.
            positive: For each text, whether it should be flagged: True or False, or 1 or 0.
            false_positive_rate: Fraction of the negative texts that may be flagged, above 0 and below 1. No effect
                beside a `threshold`.
            threshold: Measure the rates of this threshold. None: choose one.
            confidence: Confidence level of the intervals, above 0 and below 1.
            guarantee: Choose the threshold so that with probability `confidence` the false positive rate on *other*
                texts of the same kind is at most `false_positive_rate`; `needed_negatives` says how many negatives that
                takes. False: the rate on these texts is at most `false_positive_rate`.
            rounding: How far another batch size or attention kernel may move a score. After such a move, scores
                that a chosen threshold does not flag are still below it. Default: the rounding of float32.
            **facts: Other fields of the result, such as `task` and `split`.

        Raises:
            ConfigError: If the confidence level is out of range; if the numbers of scores and labels differ; if there
                are no positive or no negative texts; if a score is NaN or no number, or the threshold NaN; if an entry
                of `positive` is neither true nor false; or if `guarantee` is set beside a threshold. Without a
                threshold also: if the rate is out of range; if there are fewer negative texts than `needed_negatives`
                returns; if no text has a score; or if a cascade's first monitor alone flags more texts than the rate
                allows.
            MissingExtraError: If scipy is not installed.
        """
        require_packages("calibrate", "metrics", "scipy")
        check_inside("calibrate", "confidence", confidence, usual=0.95)
        if threshold is not None and math.isnan(threshold):
            raise ConfigError("calibrate: the threshold is NaN; it must be a number.")
        if threshold is not None and guarantee:
            problem = "guarantee is set, and so is the threshold; only a chosen one can guarantee a rate"
            raise ConfigError(f"calibrate: {problem}. Leave one of both out.")
        threshold = None if threshold is None else float(threshold)
        try:
            # NumPy's numbers would not be written as JSON
            scores = [float(cast("SupportsFloat", score)) for score in highest]
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                "calibrate: `highest` has an entry that is not a number; it has a score per text."
            ) from None
        negatives, positives = by_label(scores, positive)
        target = None if threshold is not None else false_positive_rate
        if threshold is None:
            check_inside("calibrate", "false_positive_rate", false_positive_rate)
            least = needed_negatives(false_positive_rate, confidence if guarantee else None)
            if len(negatives) < least:
                problem = f"there are {len(negatives)} negatives for a false_positive_rate of {false_positive_rate:g}"
                sure = f" with {confidence:.0%} confidence" if guarantee else ""
                hint = "Give more, or ask for a higher rate."
                raise ConfigError(f"calibrate: {problem}{sure}; at least {least} are needed. {hint}")
            allowed = allowed_positives(len(negatives), false_positive_rate, confidence if guarantee else None)
            threshold = lowest_threshold(negatives, scores, allowed, rounding)
        false_positives = sum(score >= threshold for score in negatives)
        true_positives = sum(score >= threshold for score in positives)
        return cls(
            threshold=threshold,
            target=target,
            false_positive_rate=false_positives / len(negatives),
            false_positive_interval=interval(false_positives, len(negatives), confidence),
            recall=true_positives / len(positives),
            recall_interval=interval(true_positives, len(positives), confidence),
            negatives=len(negatives),
            positives=len(positives),
            confidence=confidence,
            guaranteed=guarantee and target is not None,
            **facts,
        )


def by_label(highest: Sequence[float], positive: Sequence[object]) -> tuple[list[float], list[float]]:
    """Return the highest scores of the negative texts and of the positive texts, each in descending order.

    `highest` has the highest score of each text, and `positive` whether it should be flagged. Raises ConfigError if
    their numbers differ, a score is NaN, an entry of `positive` is neither true nor false, or there are no negative or
    no positive texts.
    """
    if len(highest) != len(positive):
        raise ConfigError(f"calibrate: {len(highest)} scores for {len(positive)} texts; every text has one.")
    if any(map(math.isnan, highest)):
        raise ConfigError("calibrate: a score is NaN; scores are numbers. Check the reader.")
    if (odd := next((flag for flag in positive if flag not in (False, True)), positive)) is not positive:
        raise ConfigError(f"calibrate: `positive` has {odd!r}; it is True or False. Leave out texts without a label.")
    labelled = list(zip(highest, positive, strict=True))
    negatives = sorted((score for score, is_positive in labelled if not is_positive), reverse=True)
    positives = sorted((score for score, is_positive in labelled if is_positive), reverse=True)
    for kind, scores, what in (("negative", negatives, "a rate of false positives"), ("positive", positives, "recall")):
        if not scores:
            raise ConfigError(f"calibrate: no row is {kind}; {what} needs at least one. Check `positive` and the task.")
    return negatives, positives


@check_types("calibrate")
def needed_negatives(false_positive_rate: float, confidence: float | None = 0.95) -> int:
    """Return the smallest number of negative texts from which a threshold for this false positive rate can be chosen.

    Args:
        false_positive_rate: The rate, above 0 and below 1.
        confidence: Probability with which the rate holds on other texts. None: the rate need only hold on these texts.

    Raises:
        ConfigError: If the rate or the confidence level is out of range.
    """
    check_inside("calibrate", "false_positive_rate", false_positive_rate)
    if confidence is None:
        return math.ceil(1 / false_positive_rate - 1e-9)
    check_inside("calibrate", "confidence", confidence, usual=0.95)
    # the highest of n negatives bounds the rate unless all n lie below its quantile, with probability (1 - rate) ** n
    return math.ceil(math.log1p(-confidence) / math.log1p(-false_positive_rate) - 1e-9)


def allowed_positives(negatives: int, false_positive_rate: float, confidence: float | None) -> int:
    """Return how many negative texts a threshold may flag and still keep the rate.

    Without a confidence level, it is the rate times `negatives`, rounded down, and at most all but one. With one, it is
    the exact conformal bound, or -1 if there are too few negative texts. If k of n negatives are flagged, the rate on
    other texts exceeds the wanted one with at most the probability that a binomial count of n trials at the wanted rate
    is at most k.

    Args:
        negatives: Number of negative texts.
        false_positive_rate: The wanted rate.
        confidence: Probability with which the rate holds on other texts. None: it need only hold on these texts.
    """
    if confidence is None:
        return min(math.floor(negatives * false_positive_rate + 1e-9), negatives - 1)  # 0.29 * 100 is 28.999...
    from scipy.stats import binom

    count = int(binom.ppf(1 - confidence, negatives, false_positive_rate))  # lowest with cdf >= 1 - confidence
    return count if binom.cdf(count, negatives, false_positive_rate) <= 1 - confidence else count - 1


def lowest_threshold(
    negatives: Sequence[float], highest: Sequence[float], allowed: int, rounding: Rounding = FLOAT32
) -> float:
    """Return the lowest threshold that flags at most `allowed` of the negative texts.

    `negatives` are the highest scores of the negative texts, in descending order; `highest` are those of all texts.
    `allowed` is at least 0 and less than the number of negative texts. `rounding` says how far above the other scores
    the threshold must lie. Raises ConfigError if no text has a score, or if the first monitor of a cascade alone (score
    inf) flags more than `allowed`.
    """
    if not any(map(math.isfinite, highest)):
        problem = "no text has a token that is scored"
        raise ConfigError(f"calibrate: {problem}. Check the texts, and the first threshold of a cascade.")
    if negatives[allowed] == math.inf:
        count = sum(score == math.inf for score in negatives)
        problem = f"{count} of {len(negatives)} negatives are flagged by the first monitor of the cascade alone"
        raise ConfigError(f"calibrate: {problem}, whatever the threshold. Raise `sure`.")
    # the first negative beyond those allowed must stay below the threshold
    return _just_above(negatives[allowed], highest, rounding)


def interval(hits: int, count: int, confidence: float = 0.95) -> Interval:
    """Return the exact (Clopper-Pearson) confidence interval of `hits / count`; `count` is at least 1."""
    from scipy.stats import binomtest

    low, high = binomtest(hits, count).proportion_ci(confidence, method="exact")
    return float(low), float(high)


def _just_above(score: float, scores: Sequence[float], rounding: Rounding) -> float:
    """Return a threshold so far above `score` that rounding cannot lift the score of the same text over it.

    Texts with a common prefix often have the same highest score up to rounding, which changes with the batch and the
    attention kernel. So the threshold lies above all entries of `scores` (the highest scores of all texts) that equal
    `score` up to rounding: half-way between the highest of them and the next higher score, or close above `score` if
    there is none. If `score` is -inf (no score), the threshold lies closely below the next higher score; there is one,
    as `lowest_threshold` has checked.
    """
    least = score + 2 * rounding.at(score)
    tie = max((other for other in scores if score <= other <= least), default=score)
    above = min((other for other in scores if least < other < math.inf), default=None)
    if above is None:
        return least
    if tie == -math.inf:  # a text without a score, which rounding cannot lift
        return above - 2 * rounding.at(above)
    return max(least, tie / 2 + above / 2)  # a sum could be infinite
