"""Choose the threshold of a monitor for a false-positive rate."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, Unpack, cast, get_args

import numpy as np
import torch

from lamina.bank.monitoring import scores_of_monitors
from lamina.bank.reader import warn_of_untrained
from lamina.data.batches import length_batches
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, NotFiniteError, check_known, require_packages
from lamina.layers.types import special_ids
from lamina.monitors import Calibration, Cascade, DriftSketch, Monitor, ReplyFacts
from lamina.monitors.calibration import FLOAT32, Facts, Precision, Rounding, Unit, allowed_positives
from lamina.monitors.token_rate import TokenRateTest, alarms_per_thousand, threshold_per_thousand
from lamina.prediction.evaluate import scoring_groups
from lamina.tasks.label_cells import look
from lamina.tasks.metrics import named_class
from lamina.train.bank_runner import BankRunner
from lamina.train.options import PassOptions
from lamina.utils import check_inside, check_types, progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.encode import TokenRange, Windows
    from lamina.layers.types import Processor
    from lamina.tasks.outputs import Label
    from lamina.tasks.task import Task
    from lamina.train.plan import Group

    Piece = tuple[np.ndarray, np.ndarray]  # one window: its tokens' positions in the text, and their scores

logger = logging.getLogger(__name__)


@check_types("calibrate")
def calibrate(  # noqa: PLR0913
    bank: ReaderBank,
    monitor: Monitor | Cascade,
    task: Task,
    *,
    false_positive_rate: float = 0.01,
    per: Unit = "reply",
    split: str = "validation",
    positive: str | int | Sequence[str | int] | None = None,
    threshold: float | None = None,
    confidence: float = 0.95,
    guarantee: bool = False,
    store: bool = True,
    processor: Processor | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    stride: int | None = None,
    add_prefix_space: bool = False,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    progress: bool = False,
) -> Monitor | Cascade:
    """Choose the threshold with which a monitor has a given false-positive rate, and store the monitor in the bank.

    A monitor flags a text if its score reaches the threshold at any token, so the highest score of each text is what
    counts. Special tokens and rows without a label are left out. In a pair whose second text is labelled word by word,
    the first text is left out too. A text that is too long is scored in windows, and its highest score counts. A
    warning is logged if a reader is untrained, if the split is "train", if the monitor does no better than chance, or
    if texts with the same highest score keep it from flagging half of the negative texts that the rate allows. If the
    model, the reader or the pass computes in bfloat16 or float16, the threshold lies further above the texts that it
    does not flag, so that another attention kernel or batch size does not lift them over it.

    Args:
        bank: The bank with the monitor's readers, trained.
        monitor: The monitor; or a cascade, for whose second monitor the threshold is chosen.
        task: Labelled texts. If words are labelled, a text is positive if one of its words is.
        false_positive_rate: Fraction of the negative texts that may be flagged. At least 1 / `false_positive_rate`
            negative texts are needed to choose a threshold.
        per: "reply": `false_positive_rate` is a fraction of texts. "1000 tokens": it is the number of false alarms per
            thousand tokens of negative texts, above 0 and below 1000; each text counts up to its alarm.
        split: Split of the task. It should be one that no reader was trained on.
        positive: Label or labels of the texts that should be flagged. None: the labels that the monitor flags.
        threshold: A threshold whose rates on this split are measured. None: choose one.
        confidence: Confidence level of the intervals, between 0 and 1.
        guarantee: Choose the threshold so that with probability `confidence` the rate on *other* negative texts of the
            same kind is at most `false_positive_rate`. It takes more negatives:
            `lamina.monitors.calibration.needed_negatives` says how many. They must be independent, and a warning is
            logged if some look alike or are replies to one prompt. False: the rate holds on these texts.
        store: Keep the monitor in `bank.monitors`, in place of one with the same name; it is saved with the bank.
        processor: Tokenizer. None: the bank's.
        batch_size: Rows per pass. A row is a window of tokens.
        max_length: Tokens per window. None: as in training.
        stride: Tokens that two neighbouring windows share. None: as in training.
        add_prefix_space: Put a space before every text if the tokenizer needs one to read the first word as it reads
            any other word. False: it is put only for readers that were trained with this option.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
        progress: Show a progress bar.

    Returns:
        A copy of the monitor (or of the cascade, with a copy of its second monitor) that has `threshold` and
        `calibration`: the false-positive rate and the recall that it reached, with their confidence intervals. A copy
        that is no cascade also has `sketch`, a summary of the scores for `watch_drift`.

    Raises:
        ConfigError: If an option is out of range, or is set although a given `threshold` makes it useless; if there are
            no positive texts, no negative ones, or too few of these for the rate; if the task or monitor does not fit
            the bank's readers; if the model reads in both directions, or the monitor reads a decoder beside an encoder;
            if there is no tokenizer; or if the tokenizer or the frozen model has changed since the bank was made.
        UnknownNameError: If a reader, label, split, `precision` or the unit `per` does not exist.
        BaseMismatchError: If `processor` makes different inputs than the bank's own.
        NotFiniteError: If a score is NaN.
        MissingExtraError: If scipy is not installed.
    """
    check_inside("calibrate", "confidence", confidence, usual=0.95)
    check_known("calibrate", [per], get_args(Unit), "unit")
    unused = {"guarantee": guarantee, "per": per != "reply", "false_positive_rate": false_positive_rate != 0.01}
    if threshold is not None and (names := [name for name, is_set in unused.items() if is_set]):
        problem = f"{names[0]} is set, but has no effect on a fixed threshold"
        raise ConfigError(f"calibrate: {problem}. Leave one of both out.")
    require_packages("calibrate", "metrics", "scipy")
    options = PassOptions.checked(
        "calibrate",
        batch_size=batch_size,
        max_length=max_length,
        stride=stride,
        add_prefix_space=add_prefix_space,
        precision=precision,
        progress=progress,
    )
    flags = monitor.second.flag if isinstance(monitor, Cascade) else monitor.flag
    positive = flagged_labels("calibrate", flags if positive is None else positive, task.labels)
    check_reads_texts("calibrate", bank, monitor.readers)
    warn_of_untrained("calibrate", bank.select([*monitor.readers], "calibrate"))
    if split == "train":
        why = "Readers learn from it, so the false-positive rate and the recall will be worse on other texts"
        logger.warning("calibrate: the texts are those of the train split. %s. Use another split.", why)
    runner = BankRunner(bank, "calibrate", processor)
    bank.seal_base("calibrate")
    (group,) = scoring_groups(runner, {monitor.readers[0]: task}, split, options)
    features = not isinstance(monitor, Cascade)  # a cascade has no sketch
    scored = score_texts(runner, group, task, [monitor], options, features=features)[str(monitor.name)]
    positives = positives_of(task, split, positive)
    if guarantee:
        _warn_of_alike(task, split, positives)
    facts = facts_of(task, split, positives)
    if isinstance(monitor, Cascade):
        facts["asked"] = scored.asked()
    calibration = scored.calibration(
        positives,
        rate=false_positive_rate,
        per=per,
        threshold=threshold,
        confidence=confidence,
        guarantee=guarantee,
        **facts,
    )
    warn_of_ties("calibrate", scored, positives, calibration)
    chosen = {"threshold": calibration.threshold, "calibration": calibration}
    if isinstance(monitor, Cascade):
        monitor = replace(monitor, second=replace(monitor.second, **chosen))
    else:
        monitor = replace(monitor, **chosen, sketch=scored.sketch())
    if not calibration.is_useful:
        rates = f"recall {calibration.recall:.3f}, false positive rate {calibration.false_positive_rate:.3f}"
        logger.warning(
            "calibrate: monitor '%s' cannot be told from chance on these texts: %s, and the intervals of both "
            "overlap.%s",
            monitor.name,
            rates,
            " It is stored; bank.drop_monitor removes it." if store else "",
        )
    if store:
        bank.keep_monitor(monitor)
    return monitor


def _warn_of_alike(task: Task, split: str, positive: Sequence[bool | None]) -> None:
    """Log a warning if negative texts, or the first texts of pairs, or the prompts of chats look alike (see `look`)."""
    texts = [text for text, flag in zip(task.split(split).texts, positive, strict=True) if flag is False]
    pairs = any(isinstance(text, tuple | list) for text in texts)
    prompts = [getattr(text, "messages", [""])[:-1] or (text[0] if pairs else text) for text in texts]
    count = len({look(str(prompt)) for prompt in prompts})
    if count < len(texts):
        what = "first texts" if pairs else "contents or prompts"
        came = f"the {len(texts)} negative texts have only {count} different {what}"
        logger.warning("calibrate: %s; the guarantee holds for independent texts. Keep one of each.", came)


@dataclass(frozen=True)
class TextScores:
    """One monitor's scores for the texts of a task.

    Attributes:
        running: For each text, the running score at each token that counts (see `_running_scores`).
        features: For each text, the mean of the reader's features over these tokens; zeros for a text without any.
            None: they were not computed.
        rounding: How far another batch size or attention kernel may move a score.
    """

    running: Sequence[np.ndarray]
    features: Sequence[Tensor] | None = None
    rounding: Rounding = FLOAT32

    def highest(self) -> list[float]:
        """Return the highest score of each text; -inf for a text without a token."""
        return [float(own.max(initial=-math.inf)) for own in self.running]

    def asked(self) -> float:
        """Return the fraction of tokens with a finite score; 0 without tokens.

        For a cascade, these are the tokens that its second reader read.
        """
        count = sum(len(own) for own in self.running)
        return sum(int(np.isfinite(own).sum()) for own in self.running) / max(1, count)

    def sketch(self) -> DriftSketch | None:
        """Return a summary of these texts' scores and features for a drift test; None if no text has a score."""
        features = [None] * len(self.running) if self.features is None else self.features
        rows = zip(self.highest(), self.running, features, strict=True)
        facts = [ReplyFacts(score, len(own), part) for score, own, part in rows if math.isfinite(score)]
        return DriftSketch.of(facts) if facts else None

    def calibration(
        self,
        positive: Sequence[bool | None],
        *,
        rate: float,
        per: Unit,
        threshold: float | None,
        confidence: float,
        guarantee: bool,
        **facts: Unpack[Facts],
    ) -> Calibration:
        """Return the rates of `threshold` on these texts. If it is None, first choose one for a `rate` of false alarms.

        `positive` says which texts should be flagged; texts with None are left out. `per` is the unit of `rate`: texts,
        or thousands of tokens. The other arguments are those of `Calibration.of`. Raises ConfigError if all texts have
        one label or none has a score; and, to choose a threshold, if there are too few negative texts for the rate.
        """
        known = [at for at, flag in enumerate(positive) if flag is not None]
        flags, highest = [bool(positive[at]) for at in known], self.highest()
        chooses = threshold is None
        if chooses and per == "1000 tokens":
            running = [self.running[at] for at in known]
            sure = confidence if guarantee else None
            threshold = threshold_per_thousand(running, flags, rate=rate, confidence=sure, rounding=self.rounding)
        found = Calibration.of(
            [highest[at] for at in known],
            flags,
            false_positive_rate=rate,
            threshold=threshold,
            confidence=confidence,
            guarantee=guarantee and threshold is None,
            rounding=self.rounding,
            **facts,
        )
        if chooses:
            found = replace(found, target=rate, guaranteed=guarantee, per=per)
        return self.counted(found, positive)

    def counted(self, rates: Calibration, positive: Sequence[bool | None]) -> Calibration:
        """Return a copy of `rates` with false alarms per thousand tokens, their interval, and mean tokens until a flag.

        `positive` says which texts should be flagged; texts with None do not count. A text's tokens count up to its
        first flag. A false alarm is a flag on a text that should not be flagged. The mean is over the texts that were
        rightly flagged; None if there are none.
        """
        reached = [np.flatnonzero(own >= rates.threshold) for own in self.running]
        until = [int(at[0]) + 1 if len(at) else len(own) for own, at in zip(self.running, reached, strict=True)]
        alarms = sum(len(at) > 0 for at, bad in zip(reached, positive, strict=True) if bad is False)
        tokens = sum(count for count, bad in zip(until, positive, strict=True) if bad is False)
        per_thousand, interval = alarms_per_thousand(alarms, tokens, rates.confidence)
        caught = [count for count, at, bad in zip(until, reached, positive, strict=True) if bad and len(at)]
        mean = float(np.mean(caught)) if caught else None
        return replace(rates, alarms_per_thousand=per_thousand, alarms_interval=interval, tokens_to_flag=mean)


def warn_of_ties(op: str, scores: TextScores, positive: Sequence[bool | None], found: Calibration) -> None:
    """Log a warning if equal highest scores keep the threshold of `found` from flagging half of the negatives allowed.

    Such texts are flagged together or not at all. `found` was chosen on `scores`, and `positive` says which of the
    texts should be flagged; `op` begins the message. Nothing is logged if the threshold was given.
    """
    if found.target is None:
        return
    highest = scores.highest()
    order = sorted((at for at, flag in enumerate(positive) if flag is False), key=highest.__getitem__, reverse=True)
    flagged = sum(highest[at] >= found.threshold for at in order)
    below = [highest[at] for at in order[flagged:]]
    if not below or below[0] == -math.inf:
        return
    ties = sum(score >= below[0] - 2 * scores.rounding.at(below[0]) for score in below)
    if ties <= max(1, flagged):
        return
    count = 2 * flagged + 1  # if so many are allowed, the flagged texts are less than half of them
    sure = found.confidence if found.guaranteed else None
    if found.per == "reply":
        is_allowed = count <= allowed_positives(len(order), found.target, sure)
    else:
        read = [int(scores.running[at].argmax()) + 1 for at in order[:count]]
        test = TokenRateTest([len(scores.running[at]) for at in order], found.target, sure)
        is_allowed = test.passes(range(count), read)
    if is_allowed:
        logger.warning(
            "%s: the threshold flags %d of %d negative texts, and the rate allows at least %d. %d texts have the same "
            "highest score, %.4g, and are flagged together or not at all. Try another aggregation, or a higher rate.",
            *(op, flagged, len(order), count, ties, below[0]),
        )


def check_reads_texts(op: str, bank: ReaderBank, names: Sequence[str]) -> None:
    """Check that the readers `names` of a bank exist and can score a task's texts; see `score_texts`.

    Raises UnknownNameError if there is no such reader, and ConfigError if one reads a decoder beside an encoder: it
    reads the text behind a start token, so its scores belong to other tokens. `op` begins messages.
    """
    check_known(op, names, bank, "reader")
    for name in names:
        if bank[name].stack == "decoder":
            came = f"reader '{name}' reads the decoder, and only the encoder reads a task's texts"
            raise ConfigError(f"{op}: {came}. Score texts by bank.monitor_scores and use Calibration.of.")


def score_texts(
    runner: BankRunner,
    group: Group,
    task: Task,
    monitors: Sequence[Monitor | Cascade],
    options: PassOptions,
    *,
    finished: bool = False,
    features: bool = False,
) -> dict[str, TextScores]:
    """Return monitor name -> its scores of each text of a task, from one pass of the model; see `_running_scores`.

    `group` has the task's encoded windows, `runner` the bank, and `options` the batch size and precision. With
    `finished`, a model that reads in both directions is allowed, whose scores then depend on the whole text; without
    it, such a model is a ConfigError. With `features`, the readers' features are averaged too, for a sketch. Raises
    NotFiniteError if a score is NaN, and ConfigError if the frozen model has changed. A pass may miss such a change:
    call `seal_base` before choosing a threshold. Call `check_reads_texts` before the texts are encoded.
    """
    inputs = cast("Windows", group.inputs)
    encoded, texts = inputs.encoded, inputs.encoded.texts
    pieces: dict[str, list[list[Piece]]] = defaultdict(lambda: [[] for _ in range(texts)])
    sums: dict[str, Tensor] = {}
    batches = _running_scores(runner, group, task, monitors, options, finished=finished, features=features)
    for rows, by_name, mask, sums_of_batch in batches:
        places = torch.as_tensor([int(encoded.text[row]) for row in rows])
        for reader, own in sums_of_batch.items():
            if reader not in sums:
                sums[reader] = own.new_zeros(texts, own.shape[1])
            sums[reader].index_add_(0, places, own)
        ranges = [encoded.token_ranges[row] for row in rows]
        numbers = [
            own.number - own.start + real.nonzero()[:, 0].numpy() for own, real in zip(ranges, mask, strict=True)
        ]
        for name, scores in by_name.items():
            for place, number, own, real in zip(places.tolist(), numbers, scores, mask, strict=True):
                pieces[name][place].append((number, own[real].numpy()))
    scored: dict[str, TextScores] = {}
    for monitor in monitors:
        whole = pieces[str(monitor.name)]
        counts = torch.as_tensor([max(1, sum(len(part) for _, part in own)) for own in whole]).unsqueeze(1)
        means = list(sums[monitor.readers[0]] / counts) if features else None
        found = TextScores([_joined(own) for own in whole], means)
        scored[str(monitor.name)] = replace(found, rounding=_rounding(runner, monitor, options, found.highest()))
    return scored


def _rounding(
    runner: BankRunner, monitor: Monitor | Cascade, options: PassOptions, highest: Sequence[float]
) -> Rounding:
    """Return how far another batch size or attention kernel may move a monitor's scores in passes with `options`.

    `highest` has the highest score of each text. The lowest precision counts, among that of `options`, of the model's
    weights and of the weights of the monitor's readers.
    """
    parts = [runner.bank.model, *(runner.bank[name] for name in monitor.readers)]
    used = {weight.dtype for part in parts for weight in part.parameters()} | {getattr(torch, options.precision)}
    precision: Precision = "bfloat16" if torch.bfloat16 in used else "float16" if torch.float16 in used else "float32"
    last = monitor.second if isinstance(monitor, Cascade) else monitor
    is_predicted = runner.bank[last.reader].config.head.problem_type == "regression"
    return Rounding.of(precision, highest, probability=last.scale == "probability" and not is_predicted)


def _joined(windows: Sequence[Piece]) -> np.ndarray:
    """Return the score of each token of a text, from its windows' scores; a token in two gets the higher one."""
    if len(windows) == 1:
        return windows[0][1]
    numbers, scores = (np.concatenate(parts) for parts in zip(*windows, strict=True))
    tokens, places = np.unique(numbers, return_inverse=True)
    joined = np.full(len(tokens), -math.inf)
    np.maximum.at(joined, places, scores)
    return joined


def _running_scores(
    runner: BankRunner,
    group: Group,
    task: Task,
    monitors: Sequence[Monitor | Cascade],
    options: PassOptions,
    *,
    finished: bool,
    features: bool,
) -> Iterator[tuple[Sequence[int], dict[str, Tensor], Tensor, dict[str, Tensor]]]:
    """Yield (window numbers, scores, mask, sums of features) for each batch of the task's windows.

    Scores are monitor name -> `[windows, tokens]`. The mask of the same shape is True at tokens that count: not at
    special tokens, and not in the first text of a pair if only the second has labels. The sums are reader name -> sum
    of its features over the tokens in the mask, `[windows, dim]`; {} without `features`. A model that reads in both
    directions is a ConfigError unless `finished`. Raises NotFiniteError if a score in the mask is NaN. The arguments
    are those of `score_texts`.
    """
    inputs = cast("Windows", group.inputs)
    special = special_ids(runner.processor)
    second = task.split(group.part).pairs and task.kind.judges_second  # only the second text is judged
    batches = length_batches(inputs.lengths, options.scoring_batch_size, equal=group.equal_lengths)
    for rows in progress_bar(batches, show=options.progress, unit="batch", leave=False):
        batch = inputs.batch(rows)
        batch.pop("labels", None)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        mask &= ~torch.isin(batch["input_ids"], special)
        if second:
            mask &= range_mask([inputs.encoded.token_ranges[row] for row in rows], mask.shape[1])
        sums: dict[str, Tensor] = {}

        def add(by_reader: Mapping[str, Tensor], sums: dict[str, Tensor] = sums, mask: Tensor = mask) -> None:
            for name, own in by_reader.items():
                sums[name] = (own.float() * mask.to(own.device).unsqueeze(-1)).sum(1).cpu()

        with runner.autocast(options), _named_rows(runner.op, group.part, [int(inputs.encoded.text[n]) for n in rows]):
            arguments = runner.arguments(batch)
            scores = scores_of_monitors(
                runner.bank, monitors, arguments, mask, finished=finished, on_features=add if features else None
            )
        yield rows, scores, mask, sums


@contextmanager
def _named_rows(op: str, part: str, numbers: Sequence[int]) -> Iterator[None]:
    """Let a NotFiniteError for a score name the row of the split `part`; `numbers` has the row of each text."""
    try:
        yield
    except NotFiniteError as error:
        if error.row is None:
            raise
        row = numbers[error.row]
        what = f"monitor '{error.name}' gives NaN for row {row} of the {part} part, counted from 0"
        raise NotFiniteError(f"{op}: {what}; a score is a finite number.", name=error.name, row=row) from None


def range_mask(ranges: Sequence[TokenRange], length: int) -> Tensor:
    """Return a mask `[windows, length]`, True at the tokens inside each window's range in `ranges`."""
    at = torch.arange(length)
    return torch.stack([(at >= own.start) & (at < own.stop) for own in ranges])


def flagged_labels(op: str, positive: str | int | Sequence[str | int], labels: Sequence[str]) -> list[str]:
    """Return the labels that `positive` names, in the forms of `named_class`; `op` begins messages.

    Raises UnknownNameError if there is no such label, and ConfigError if it cannot be a name.
    """
    names = [positive] if isinstance(positive, str | int) else positive
    return [named_class(op, name, labels) for name in names]


def positives_of(task: Task, split: str, positive: Sequence[str]) -> list[bool | None]:
    """Return for each text of a split whether it, or one of its words, has a label in `positive`.

    None for a text if a missing label leaves this open. Raises UnknownNameError if the task has no such split.
    """
    wanted = {task.labels.index(label) for label in positive}

    def is_positive(label: Label) -> bool | None:
        own = label if isinstance(label, tuple | list) else [label]
        if task.problem_type == "multi_label":
            marks = [own[number] for number in wanted]
            return True if any(mark > 0 for mark in marks) else None if any(mark < 0 for mark in marks) else False
        return True if not wanted.isdisjoint(own) else None if IGNORED in own else False

    return [is_positive(label) for label in task.split(split).labels]


def facts_of(task: Task, split: str, positives: Sequence[bool | None]) -> Facts:
    """Return the fields of a calibration that say what it was measured on.

    They are the task, the split, the day in UTC, and a digest of the split's texts and of `positives`, from
    `positives_of`.
    """
    digest = sha256(json.dumps([task.split(split).key, list(positives)]).encode()).hexdigest()[:16]
    return {"task": task.name, "split": split, "data": digest, "date": today()}


def today() -> str:
    """Return the day in UTC, as "2026-01-31"."""
    return datetime.now(UTC).date().isoformat()
