"""Choose the thresholds of a cascade: the cheapest one whose recall is not below a given one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, final

import torch

from lamina.bank.monitoring import check_reads_stepwise, reader_seconds
from lamina.errors import ConfigError, require_packages
from lamina.monitors import Calibration, Cascade, Monitor
from lamina.prediction.calibrate import (
    TextScores,
    check_reads_texts,
    facts_of,
    flagged_labels,
    positives_of,
    score_texts,
)
from lamina.prediction.evaluate import scoring_groups
from lamina.train.bank_runner import BankRunner
from lamina.train.options import PassOptions
from lamina.utils import JSONObject, check_inside, check_types

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task

# fractions of the flagged positives that the first monitor may lose, from the safest cascade to the cheapest
_LOST = (0.0, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


@final
@dataclass(frozen=True)
class CascadeChoice:
    """The cascade that `choose_cascade` chose, and the work that it saves.

    Attributes:
        cascade: The cascade. Its `calibration` has the rates on the half of the rows that did not choose thresholds.
        recall: The recall that was asked for.
        saving: 1 minus the cascade's work (of both readers) as a fraction of the second reader's work on all tokens.
            Work is the number of parameters that a reader multiplies per token.
        seconds: Seconds for a thousand tokens: of the cascade, and of the second reader alone. Measured on this
            machine, one token at a time as during generation, without the model's own pass.
        alone: Rates of the second monitor alone, on the same half of the rows.
        considered: Number of cascades whose recall was tested.
    """

    cascade: Cascade
    recall: float
    saving: float
    seconds: tuple[float, float]
    alone: Calibration
    considered: int

    def sentence(self) -> str:
        """Return a text that compares the cascade with its second monitor alone: recall, work and seconds of both.

        It also has the shares of negatives that the cascade flags, and of tokens for which the second reader runs.
        """
        rates = cast("Calibration", self.cascade.calibration)
        low, high = rates.recall_interval
        caught = f"catches {100 * rates.recall:.1f} % ({100 * low:.1f} to {100 * high:.1f}) of the positives"
        flags = f"flags {100 * rates.false_positive_rate:.1f} % of the negatives"
        asked = f"runs the second reader on {100 * (rates.asked or 0):.1f} % of the tokens"
        alone = f"The second monitor alone catches {100 * self.alone.recall:.1f} %"
        both, dear = self.seconds
        taken = f"A thousand tokens take {both:.2g} s in place of {dear:.2g} s, without the model's own pass"
        saves = f"which saves {100 * self.saving:.0f} % of its work"
        return f"The cascade {caught}, {flags} and {asked}, {saves}. {taken}. {alone}."


@check_types("choose_cascade")
def choose_cascade(  # noqa: PLR0913
    bank: ReaderBank,
    first: Monitor,
    second: Monitor,
    task: Task,
    *,
    recall: float,
    false_positive_rate: float = 0.01,
    split: str = "validation",
    positive: str | int | Sequence[str | int] | None = None,
    confidence: float = 0.95,
    name: str = "cascade",
    seed: int = 0,
    store: bool = True,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = False,
) -> CascadeChoice:
    """Choose the cheapest cascade of two monitors that keeps a given recall.

    In a cascade, the first monitor reads every token, and the second only those at which the first reaches its
    threshold. Half of the rows choose the thresholds. The first monitor's threshold is set by the fraction of positives
    that it may miss, the second monitor's by the rate of false positives. On the other half, cascades are tested from
    the safest to the cheapest, and the search ends at the first one whose recall cannot be shown to be at least
    `recall`. So with the given confidence, the recall on other texts of the same kind is at least `recall`.

    Args:
        bank: The bank with both readers, trained.
        first: The cheap monitor, for example of a reader of a low layer. Its threshold is not used.
        second: The expensive monitor. Its threshold is not used.
        task: Labelled texts.
        recall: The lowest recall that is acceptable, above 0 and below 1.
        false_positive_rate: Fraction of the negative texts that may be flagged.
        split: Split of the task. It should be one that no reader was trained on.
        positive: Label or labels of the texts that should be flagged. None: those that the second monitor flags.
        confidence: Probability with which the recall holds, and confidence level of the intervals.
        name: Name of the cascade.
        seed: Seed of the division into halves.
        store: Keep the cascade in `bank.monitors`, in place of a monitor with the same name.
        batch_size: Rows per pass.
        max_length: Tokens per window. None: as in training.
        progress: Show a progress bar.

    Returns:
        The cascade, its rates and what it saves.

    Raises:
        ConfigError: If a number is out of range, the first reader is not smaller than the second, a monitor does not
            fit its reader, a reader reads a decoder beside an encoder, its fusion reads inside the model's blocks, the
            model reads in both directions, there is no tokenizer, there are too few texts, no cascade has the recall,
            or the tokenizer or the frozen model has changed since the bank was made.
        UnknownNameError: If a reader, label or split of the task does not exist.
        NotFiniteError: If a score is NaN.
        MissingExtraError: If scipy is not installed.

    Source:
        Fixed-sequence testing as in Angelopoulos et al. 2021, "Learn then Test", arXiv:2110.01052.
    """
    op = "choose_cascade"
    check_inside(op, "confidence", confidence, usual=0.95)
    check_inside(op, "recall", recall, usual=0.9)
    require_packages(op, "metrics", "scipy")
    check_reads_texts(op, bank, [first.reader, second.reader])
    check_reads_stepwise(op, {name: bank[name] for name in (first.reader, second.reader)})
    share = _relative_work(bank, first.reader, second.reader)
    flags = flagged_labels(op, second.flag if positive is None else positive, task.labels)
    options = PassOptions.checked(op, batch_size=batch_size, max_length=max_length, progress=progress)
    runner = BankRunner(bank, op, None)
    bank.seal_base(op)
    (group,) = scoring_groups(runner, {first.reader: task}, split, options)
    labels = positives_of(task, split, flags)
    halves = _halves(labels, seed)
    rates: JSONObject = {"confidence": confidence, **facts_of(task, split, labels)}

    alone = replace(first, name="first", threshold=None), replace(second, name="second", threshold=None)
    scored = score_texts(runner, group, task, alone, options)
    dear = _fitted(scored["second"], labels, halves, false_positive_rate, rates)
    cascades = _candidates(first, second, scored["first"], labels, halves[0])
    named = {str(cascade.name): cascade for cascade in cascades}
    scored = score_texts(runner, group, task, list(named.values()), options)
    best: Cascade | None = None
    considered = 0
    for key, cascade in named.items():  # from the safest to the cheapest
        found = _fitted(scored[key], labels, halves, false_positive_rate, rates)
        considered += 1
        if _least_recall(found) < recall:
            break
        chosen = replace(cascade.second, threshold=found.threshold, calibration=found)
        best = replace(cascade, second=chosen, name=name)
    if best is None:
        low = _least_recall(dear)
        problem = f"no cascade has a recall of {recall:g} with {confidence:.0%} confidence"
        raise ConfigError(
            f"{op}: {problem}; the second monitor alone has {dear.recall:.3g}, at least {low:.3g}. Ask for less."
        )
    if store:
        bank.keep_monitor(best)
    asked = cast("Calibration", best.calibration).asked or 0.0
    cheap, whole = reader_seconds(bank, [first.reader, second.reader]).values()
    seconds = 1000 * (cheap + asked * whole), 1000 * whole
    return CascadeChoice(best, recall, 1 - share - asked, seconds, dear, considered)


def _relative_work(bank: ReaderBank, first: str, second: str) -> float:
    """Return how many parameters the first reader multiplies per token, divided by the second reader's number.

    Raises ConfigError if the first reader multiplies as many or more.
    """
    counts = [sum(part.numel() for part in bank[name].parameters() if part.ndim > 1) for name in (first, second)]
    if counts[0] >= counts[1]:
        problem = f"reader '{first}' multiplies {counts[0]} parameters per token, '{second}' {counts[1]}"
        rule = "the first must be smaller. Exchange them, or leave the cascade out"
        raise ConfigError(f"choose_cascade: {problem}; {rule}.")
    return counts[0] / counts[1]


def _halves(labels: Sequence[bool | None], seed: int) -> tuple[list[int], list[int]]:
    """Divide the positives, and the negatives, into random halves by `seed`; return the row numbers of both halves.

    `labels` has a label for each row. A row with None is in neither half.
    """
    first, second = list[int](), list[int]()
    for wanted in (True, False):
        rows = [row for row, label in enumerate(labels) if label is wanted]
        random.Random(seed).shuffle(rows)
        first += rows[::2]
        second += rows[1::2]
    return first, second


def _part(scored: TextScores, labels: Sequence[bool | None], rows: Sequence[int]) -> tuple[TextScores, list[bool]]:
    return TextScores([scored.running[row] for row in rows], rounding=scored.rounding), [
        bool(labels[row]) for row in rows
    ]


def _fitted(
    scored: TextScores,
    labels: Sequence[bool | None],
    halves: tuple[list[int], list[int]],
    rate: float,
    facts: JSONObject,
) -> Calibration:
    """Choose a threshold on the first half of the rows, and return its rates on the second half.

    `scored` and `labels` are the scores and labels of all rows, and `halves` the row numbers of both halves. `rate` is
    the highest false positive rate that the threshold may have. `facts` are further fields of the result.
    Raises ConfigError if a half has too few negative or no positive rows.
    """
    choosing, testing = (_part(scored, labels, half) for half in halves)
    scores, flags = choosing
    threshold = Calibration.of(scores.highest(), flags, false_positive_rate=rate, rounding=scores.rounding).threshold
    own, positive = testing
    found = Calibration.of(own.highest(), positive, threshold=threshold, asked=own.asked(), **facts)
    return own.counted(replace(found, target=rate), positive)


def _candidates(
    first: Monitor, second: Monitor, scored: TextScores, labels: Sequence[bool | None], rows: Sequence[int]
) -> list[Cascade]:
    """Return up to 12 cascades, the safest first; each further one may miss more positives, and is cheaper.

    Their second monitor is `second` without a threshold. `scored` are the first monitor's scores of all rows, `labels`
    the rows' labels. The rows in `rows` decide the first monitor's thresholds. Raises ConfigError if no positive row
    has a token with a score.
    """
    own, positive = _part(scored, labels, rows)
    highest = torch.tensor([score for score, flag in zip(own.highest(), positive, strict=True) if flag])
    highest = highest[highest.isfinite()].double().sort().values
    if not len(highest):
        raise ConfigError("choose_cascade: no positive row has a token that is scored. Check the texts.")
    lows = dict.fromkeys(float(highest[min(len(highest) - 1, math.floor(lost * len(highest)))]) for lost in _LOST)
    # calibrations and sketches of the monitors alone do not hold for the cascade
    bare: JSONObject = {"calibration": None, "sketch": None}
    return [
        Cascade(
            replace(first, threshold=low, **bare), replace(second, threshold=None, **bare), name=f"cascade {number}"
        )
        for number, low in enumerate(lows)
    ]


def _least_recall(rates: Calibration) -> float:
    """Return the one-sided lower confidence bound (Clopper-Pearson) of the recall in `rates`; 0 for a recall of 0."""
    from scipy.stats import beta

    hits = round(rates.recall * rates.positives)
    return float(beta.ppf(1 - rates.confidence, hits, rates.positives - hits + 1)) if hits else 0.0
