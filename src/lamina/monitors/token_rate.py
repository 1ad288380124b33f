"""Rates per thousand tokens: how many false alarms a monitor raises, and the threshold that bounds them.

A monitor reads each text up to its alarm, or to its end. The rate is the number of negative texts with an alarm, per
thousand of their tokens that were read. On longer texts the rate may be another one, if their alarms come later or
earlier.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import numpy as np

from lamina.errors import ConfigError
from lamina.monitors.calibration import FLOAT32, Interval, Rounding, by_label, lowest_threshold
from lamina.utils import check_inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float

    Scores = Sequence[Float[np.ndarray, " tokens"]]  # for each text, the running score at each token

_STAKES = np.arange(1, 100) / 100
_GUESS, _WEIGHT = 100, 0.1  # guess of a text's length in tokens, and how many texts it counts as


def alarms_per_thousand(alarms: int, tokens: int, confidence: float = 0.95) -> tuple[float, Interval]:
    """Return the alarms per thousand tokens, and the interval of this rate: Garwood's, exact for a Poisson count.

    `alarms` is the number of texts with an alarm, `tokens` the number of tokens that were read (0 counts as 1), and
    `confidence` the confidence level of the interval.
    """
    from scipy.stats import chi2

    tail, scale = (1 - confidence) / 2, 1000 / max(1, tokens)
    low = float(chi2.ppf(tail, 2 * alarms)) / 2 if alarms else 0.0
    high = float(chi2.ppf(1 - tail, 2 * alarms + 2)) / 2
    return alarms * scale, (low * scale, high * scale)


@final
class TokenRateTest:
    """A test of whether a monitor raises at most `rate` false alarms per thousand tokens.

    Let F be 1 for a text with an alarm and 0 for one without, T the number of its tokens that are read, and r the rate
    per token. If the true rate is r or more, F - r T has a mean of at least 0 over texts. A gambler bets a part s of
    their wealth that the rate is below r. At each text the wealth is multiplied by 1 - s (F - r T), which is never
    negative. So under a true rate of r or more, the wealth is not expected to grow, and by Markov's inequality it
    reaches 1 / (1 - `confidence`) with a probability of at most 1 - `confidence`. This holds for any number of texts,
    any distribution of their lengths and scores, and any dependence between the tokens of a text, if the texts are
    drawn independently of each other. The part s at a text depends on earlier lengths alone; the texts come in a random
    order, because a file may be sorted.

    Args:
        lengths: Number of tokens of each negative text.
        rate: False alarms per thousand tokens that are allowed, above 0 and below 1000.
        confidence: Probability with which the rate holds on other texts. None: it need only hold on these texts.

    Raises:
        ConfigError: If the rate or the confidence level is out of range.

    Source:
        Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", arXiv:2010.09686. The
        lowest threshold that passes keeps the rate because the rate falls with the threshold: Bates et al. 2021,
        "Distribution-free, risk-controlling prediction sets", arXiv:2101.02703, theorem 1.
    """

    def __init__(self, lengths: Sequence[int], rate: float, confidence: float | None) -> None:
        check_inside("calibrate", "the rate per thousand tokens", rate, 1000)
        self._rate, self._confidence = rate, confidence
        self._lengths = np.array(lengths, dtype=float)
        self._stakes = np.zeros(len(lengths))
        if confidence is not None:
            check_inside("calibrate", "confidence", confidence, usual=0.95)
            order = np.random.default_rng(0).permutation(len(lengths))
            self._stakes[order] = self._chosen_stakes(self._lengths[order], confidence)

    def _chosen_stakes(self, lengths: Float[np.ndarray, " texts"], confidence: float) -> Float[np.ndarray, " texts"]:
        """Return the stake of each text: the fraction of the wealth that the gambler bets at this text.

        It is the stake that would allow the most alarms if every text had the mean length of the texts before this one
        (for the first text: a guess, `_GUESS`). `lengths` are the texts' lengths in the order of the bets.
        """
        count, needed = len(lengths), -math.log1p(-confidence)
        before = _WEIGHT * _GUESS + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        expected = self._rate / 1000 * count * before / (_WEIGHT + np.arange(count))  # alarms of all texts at this rate
        points = np.geomspace(needed, 1e4 * needed, 400)
        allowed = (points[:, None] * _STAKES - needed) / -np.log1p(-_STAKES)
        return _STAKES[allowed.argmax(1)[np.searchsorted(points, expected).clip(max=len(points) - 1)]]

    def passes(self, alarms: Sequence[int] = (), read: Sequence[int] = ()) -> bool:
        """Return whether these alarms show that the rate is low enough.

        Args:
            alarms: Indices in `lengths` of the texts with an alarm.
            read: Number of tokens up to the alarm, for each text in `alarms`. The other texts are read to their end.
        """
        tokens, flags, per_token = self._lengths.copy(), np.zeros(len(self._lengths)), self._rate / 1000
        tokens[list(alarms)], flags[list(alarms)] = read, 1
        if self._confidence is None:
            return bool(flags.sum() <= per_token * tokens.sum() + 1e-9)
        growth = np.log1p(-self._stakes * (flags - per_token * tokens)).sum()
        return bool(growth >= -math.log1p(-self._confidence))

    def needed_tokens(self) -> int:
        """Return about how many tokens the test needs, in texts as long as `lengths`, if no text raises an alarm.

        Without a confidence level, or if all lengths are 0, it is the number of tokens for which the rate allows one
        alarm.
        """
        per_token = self._rate / 1000
        if self._confidence is None or not self._lengths.sum():
            return math.ceil(1 / per_token - 1e-9)
        gained = np.log1p(_STAKES[-1] * per_token * self._lengths).sum()
        return math.ceil(-math.log1p(-self._confidence) / gained * self._lengths.sum())


def threshold_per_thousand(
    running: Scores,
    positive: Sequence[bool],
    *,
    rate: float,
    confidence: float | None,
    rounding: Rounding = FLOAT32,
) -> float:
    """Return the lowest threshold whose rate of false alarms per thousand tokens is at most `rate`.

    Args:
        running: For each text, the running score at each of its tokens.
        positive: For each text, whether it should be flagged.
        rate: False alarms per thousand tokens of negative texts, above 0 and below 1000.
        confidence: Probability with which the rate holds on other texts of the same kind. None: it need only hold on
            these.
        rounding: How far another batch size or attention kernel may move a score, as in `Calibration.of`.

    Raises:
        ConfigError: If the rate or the confidence level is out of range. If all texts have the same label, an entry of
            `positive` is neither true nor false, no text has a score, or a score is NaN. If the negative texts have too
            few tokens for the rate. If the first monitor of a cascade alone raises too many alarms.
    """
    highest = [float(own.max(initial=-math.inf)) for own in running]
    ordered, _ = by_label(highest, positive)
    negative = [at for at, flag in enumerate(positive) if not flag]
    test = TokenRateTest([len(running[at]) for at in negative], rate, confidence)

    def passes(allowed: int) -> bool:
        """Return whether the lowest threshold that flags at most `allowed` negative texts passes."""
        threshold = lowest_threshold(ordered, highest, allowed, rounding)
        alarms = [number for number, at in enumerate(negative) if highest[at] >= threshold]
        read = [int((running[negative[number]] >= threshold).argmax()) + 1 for number in alarms]
        return test.passes(alarms, read)

    # `low` passes the test; `high` does not, because it would flag all negatives. In a cascade the first monitor alone
    # may flag some (inf).
    low, high = min(ordered.count(math.inf), len(negative) - 1), len(negative)
    if low and not passes(low):
        problem = f"the cascade's first monitor alone flags {low} negatives, too many for {rate:g} per thousand tokens"
        raise ConfigError(f"calibrate: {problem}. Raise its threshold 'sure', or ask for a higher rate.")
    if not passes(low):
        tokens = sum(len(running[at]) for at in negative)
        sure = "" if confidence is None else f" with {confidence:.0%} confidence"
        problem = f"the negatives have {tokens} tokens for a rate of {rate:g} per thousand tokens{sure}"
        rule = f"about {max(tokens + 1, test.needed_tokens())} are needed"
        raise ConfigError(f"calibrate: {problem}; {rule}. Give more, or ask for a higher rate.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return lowest_threshold(ordered, highest, low, rounding)
