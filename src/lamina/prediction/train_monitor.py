"""Train a monitor from a file of replies: train candidates, choose one, set its threshold, and measure its rates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, final, get_args

import numpy as np
import torch

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, MissingExtraError, check_known, require_packages
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.single_layer import SingleLayer
from lamina.layers.causality import is_causal
from lamina.layers.devices import usable_device
from lamina.layers.types import tokenizer_of
from lamina.monitors import EMA, Calibration, LastScore, MeanScore, Monitor, RollingMax
from lamina.monitors.calibration import Unit, needed_negatives
from lamina.monitors.token_rate import TokenRateTest
from lamina.prediction.calibrate import TextScores, check_reads_texts, score_texts, today, warn_of_ties
from lamina.prediction.evaluate import scoring_groups
from lamina.prediction.reply_file import SHARES, LabelledReply, ReplyColumns, divide, read_labels, replies_of
from lamina.store.bank_folder import claimed_output
from lamina.store.load_model import load
from lamina.store.models import writing_class
from lamina.tasks.label_cells import look
from lamina.tasks.metrics import score_ranking
from lamina.tasks.task import Task
from lamina.tasks.words import word_spans
from lamina.train.bank_runner import BankRunner
from lamina.train.fit import fit
from lamina.train.options import PassOptions
from lamina.utils import check_inside, check_types

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor

logger = logging.getLogger(__name__)

AGGREGATES = (MeanScore(), EMA(half_life=8), RollingMax(window=8), LastScore())
Parts = Mapping[str, Sequence[LabelledReply]]


@final
@dataclass(frozen=True, kw_only=True)
class TrainedMonitor(Monitor):
    """The monitor that `lamina.monitor` trained, with its threshold and what was measured.

    The replies were divided into four parts: "train", "choosing", "calibration" and "test". The attribute
    `calibration` has the rates on the test part.

    Attributes:
        bank: The bank with the monitor's reader. It also holds the monitor if `stored` is True.
        candidates: Name of each candidate -> AUROC on the part that chooses between them, best first.
        rows: Part -> number of its replies.
        tfidf_recall: Recall of TF-IDF and logistic regression on the finished texts of the test part, with a threshold
            for the same rate of false alarms; None if scikit-learn is not installed.
        live: Whether the monitor can score a text while it is written. False: the model reads in both directions, so
            that only finished replies can be scored; see `score_replies`.
        scores: Part ("calibration" and "test") -> the highest score of each of its replies, and whether it is bad.
        running: Part -> for each reply, in the order of `scores`, the running score at each token.
    """

    bank: ReaderBank = field(repr=False)
    candidates: Mapping[str, float]
    rows: Mapping[str, int]
    tfidf_recall: float | None
    live: bool
    scores: Mapping[str, Sequence[tuple[float, bool]]] = field(repr=False)
    running: Mapping[str, Sequence[Float[np.ndarray, " tokens"]]] = field(repr=False, compare=False)

    @property
    def is_useful(self) -> bool:
        """Whether the monitor beats chance: on the test part, the recall's interval is above the false alarm rate's."""
        return cast("Calibration", self.calibration).is_useful

    @property
    def stored(self) -> bool:
        """Whether the monitor is stored in the bank: because it is useful, or because `anyway` was set."""
        return str(self.name) in self.bank.monitors

    def sentences(self) -> str:
        """Return the rates of the monitor, its guarantee and the recall of TF-IDF as sentences."""
        found = cast("Calibration", self.calibration)
        flags = f"flags {_percent(found.false_positive_rate, found.false_positive_interval)} of good replies"
        catches = f"catches {_percent(found.recall, found.recall_interval)} of bad ones"
        when = "" if found.tokens_to_flag is None else f", on average after {found.tokens_to_flag:.0f} tokens"
        words = self.tfidf_recall
        rival = "" if words is None else f"; TF-IDF on the finished text catches {100 * words:.0f} %"
        text = f"{flags}, {catches}{when if self.live else ', once they are finished'}{rival}."
        low, high = found.alarms_interval or (math.nan, math.nan)
        count = f"{found.alarms_per_thousand:.2g}"
        alarms = f"{count} false alarm{'s' * (count != '1')} per thousand tokens ({low:.2g} to {high:.2g})"
        useless = " It is useless: its recall cannot be told from its rate of false alarms." * (not found.is_useful)
        seen = "on the test part there were " * (found.per == "1000 tokens")
        return f"{text} {self._bound(found)}; {seen}{alarms}.{useless}"

    def _bound(self, found: Calibration) -> str:
        """Return a sentence, without its full stop: which rate the calibration `found` promises for which replies."""
        sure = f"With {100 * found.confidence:g} % confidence it"
        if found.per == "1000 tokens":
            alarms = f"{found.target:g} false alarm{'s' * (found.target != 1)} per thousand tokens"
            return f"{sure} raises at most {alarms} of good replies of this kind"
        longest = "" if self.sketch is None else f" and of at most {self.sketch.longest} tokens, as in the calibration"
        return f"{sure} flags at most {100 * (found.target or 0):g} % of good replies of the same kind{longest}"


def _percent(rate: float, interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{100 * rate:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


@check_types("monitor")
def monitor(  # noqa: PLR0913
    train: str | Path,
    *,
    model: str | Path | PreTrainedModel,
    positive: str | int | None = None,
    rate: float = 0.01,
    per: Unit = "reply",
    confidence: float = 0.95,
    messages: str | None = None,
    prompt: str | None = None,
    reply: str | None = None,
    label: str | None = None,
    spans: str | None = None,
    processor: Processor | None = None,
    output: str | Path | None = None,
    anyway: bool = False,
    epochs: int = 4,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    max_length: int | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: bool = False,
) -> TrainedMonitor:
    """Train a monitor that flags bad replies, from a file of labelled replies, and measure it on unseen ones.

    The replies are divided by prompt: 40 % to train, 15 % to choose, 25 % to calibrate, 20 % to test. Candidate
    readers, which do not look ahead, are trained together. The best pair of a reader and an aggregation becomes the
    monitor. Its threshold is the lowest one with which, at the given confidence, the rate holds on other replies of the
    same kind (an exact bound for any number of replies, see `per`). The rates are measured on the test part. Bounds and
    intervals hold for independent replies; so to calibrate and test, a prompt has one good and one bad reply, drawn
    with `seed`. A warning is logged if this leaves out replies, if the monitor is useless and so not stored, if test
    replies also occur in the train part, if several labels count as good, or if equal scores keep the threshold from
    flagging half of what the rate allows.

    Args:
        train: File with a prompt, a reply and a label per row: .jsonl, .csv, .tsv or .parquet.
        model: The model whose replies are watched: a folder, a hub id or a loaded model, which is left frozen and on
            `device`. A model that reads in both directions judges finished replies only.
        positive: The label of bad replies; required. Replies with any other label count as good.
        rate: Rate of false alarms that is allowed, in the unit `per`.
        per: "reply": `rate` is the fraction of good replies that may be flagged, above 0 and below 1 (a conformal
            bound). "1000 tokens": it is the number of false alarms per thousand tokens of good replies, above 0 and
            below 1000; each reply counts up to its alarm (see `TokenRateTest`). Choose it if replies differ much in
            length.
        confidence: Probability with which the rate holds, and confidence level of the intervals.
        messages: Column of chats, whose last message is the reply; `prompt` and `reply` are then not read. None: a
            column with a usual name, such as "messages"; without one, or if one of those two is named, they are read.
        prompt: Column of prompts. None: a column with a usual name.
        reply: Column of replies. None: a column with a usual name.
        label: Column of labels. None: a column with a usual name.
        spans: Column of the bad spans of replies. None: bad replies are bad as a whole.
        processor: Tokenizer. None: the tokenizer saved with the model; `model` must then be a name.
        output: Folder for the bank with the monitor. None: nothing is written.
        anyway: Store the monitor even if it is useless: its recall may be no higher than its false alarm rate.
        epochs: Number of passes over the training part.
        batch_size: Rows per pass of the model.
        learning_rate: Peak learning rate of the readers.
        max_length: Tokens per window. None: the most that the model allows.
        device: Device on which replies are scored; "auto" is a GPU if there is one. Training uses a GPU if there is
            one, as `fit` does. None: scoring uses the device of the training.
        seed: Seed of the division and of the readers.
        progress: Show a progress bar.

    Returns:
        The monitor, its bank and its rates. If the monitor is useless it is in neither the bank nor the folder, unless
        `anyway` is set.

    Raises:
        ConfigError: If an option is out of range, no positive label is named, there are too few good or bad replies,
            the model has no tokenizer, the tokenizer has no chat template for chats, or `device` does not exist.
        DataError: If a row or a column of the file cannot be used.
        UnknownNameError: If no reply has the positive label, or the unit `per` does not exist.
        ModelNotFoundError: If the model cannot be found.
        UnsupportedModelError: If the model's layers cannot be found.
        NotFiniteError: If a score is NaN.
        StoreError: If the model's files are damaged, or `output` cannot be written or holds files of another program.
            Raised before training.
        MissingExtraError: If scipy is not installed.
    """
    promise = _Promise(rate, per, confidence)
    scores_on = None if device is None else usable_device(device)
    require_packages("monitor", "metrics", "scipy")
    columns = ReplyColumns(messages, prompt, reply, label, spans)
    labelled = read_labels(train, columns, positive)  # before a large model is loaded
    with nullcontext() if output is None else claimed_output({"monitor": None}, Path(output)):
        pass  # the bank can be saved there
    base, processor = _model(model, processor)
    replies, digest = replies_of(labelled, processor)
    parts = divide(replies, seed)
    if left := len(replies) - sum(map(len, parts.values())):
        rule = "a bound holds for independent replies, so a prompt has one good and one bad reply in these parts"
        logger.warning("monitor: %d of %d replies are left out of calibration and test: %s.", left, len(replies), rule)
    _check_parts(parts, processor, promise)
    _warn_of_repeated(parts)
    options = PassOptions.checked("monitor", batch_size=batch_size, max_length=max_length, progress=progress)
    bank = ReaderBank(base, processor=processor)
    tasks = _tasks(parts, str(positive))
    live = _add_candidates(bank, tasks["train"], seed)
    fit(
        bank,
        dict.fromkeys(bank, tasks["train"]),
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        max_length=max_length,
        seed=seed,
        keep="last",
        cache="auto",
        progress=progress,
    )
    bank.to(scores_on or bank.device)
    score = partial(_scores, "monitor", bank, options=options, live=live)
    best, compared = _choose(bank, tasks["choosing"], parts["choosing"], score)
    unseen = {
        part: score([best], tasks[part], features=part == "calibration")["monitor"] for part in ("calibration", "test")
    }
    facts = {"task": Path(train).name, "split": "test", "target": rate, "guaranteed": True, "per": per}
    found = replace(promise.rates(unseen, parts, warns=True), **facts, data=digest, date=today())
    best = replace(best, threshold=found.threshold, calibration=found, sketch=unseen["calibration"].sketch())
    rival = _tfidf_recall(parts, unseen, promise)
    trained = TrainedMonitor(
        **vars(best),
        bank=bank,
        candidates=compared,
        rows={part: len(own) for part, own in parts.items()},
        tfidf_recall=rival,
        live=live,
        scores={
            part: [(high, one.positive) for high, one in zip(own.highest(), parts[part], strict=True)]
            for part, own in unseen.items()
        },
        running={part: own.running for part, own in unseen.items()},
    )
    if found.is_useful or anyway:
        bank.keep_monitor(best)
        if output is not None:
            bank.save_pretrained(output)
    else:
        where = f" Nothing is written to {output}; anyway=True (--anyway) writes it." if output is not None else ""
        logger.warning(
            "monitor: its recall cannot be told from its rate of false alarms, so it is not stored.%s", where
        )
    return trained


def score_replies(
    bank: ReaderBank,
    monitor: Monitor | str,
    replies: Sequence[tuple[str, str]],
    *,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = False,
) -> list[float]:
    """Return the highest score of each finished reply, -inf for one without a token.

    A reply is flagged if its score reaches the monitor's threshold. The model need not be causal: it may read texts in
    both directions. A warning is logged if replies are longer than those of the calibration.

    Args:
        bank: The bank with the monitor's reader.
        monitor: A monitor that `lamina.monitor` trained, or its name in the bank.
        replies: Pairs of a prompt and a reply.
        batch_size: Rows per pass of the model.
        max_length: Tokens per window. None: as in training.
        progress: Show a progress bar.

    Raises:
        UnknownNameError: If the bank does not have a monitor of this name, or lacks the monitor's reader.
        ConfigError: If the bank has no tokenizer, the monitor is a cascade or reads a decoder beside an encoder, there
            are no replies, one is not a pair of texts, an option is out of range, or the tokenizer or the frozen model
            has changed.
        NotFiniteError: If a score is NaN.
    """
    if isinstance(monitor, str):
        check_known("score_replies", [monitor], bank.monitors, "monitor")
        monitor = cast("Monitor", bank.monitors[monitor])
    if not isinstance(monitor, Monitor) or not len(replies):
        got = f"the monitor is a {type(monitor).__name__}, and there are {len(replies)} replies"
        raise ConfigError(f"score_replies: {got}; a Monitor and at least one reply are needed.")
    check_reads_texts("score_replies", bank, [monitor.reader])
    op = "score_replies"
    for row, pair in enumerate(cast("Sequence[object]", replies)):
        texts = list(pair) if isinstance(pair, Collection) and not isinstance(pair, str | Mapping) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            got = f"replies[{row}] is {pair!r:.60}"
            raise ConfigError(f"{op}: {got}; it must be a pair of texts, a prompt and a reply.")
    options = PassOptions.checked(op, batch_size=batch_size, max_length=max_length, progress=progress)
    # a task needs labels, which are not used here
    spans = [[(words[0][0], words[-1][1])] if (words := word_spans(reply)) else [] for _, reply in replies]
    rows = [LabelledReply(*pair, True, own) for pair, own in zip(replies, spans, strict=True)]
    name = bank[monitor.reader].config.head.labels[-1].removeprefix("I-")
    (task,) = _tasks({"replies": rows}, name).values()
    live = is_causal(bank.model, bank.stacks[bank[monitor.reader].stack])
    scored = _scores(op, bank, [monitor], task, options=options, live=live)[str(monitor.name)]
    longest = math.inf if monitor.sketch is None else monitor.sketch.longest
    if longer := [row for row, own in enumerate(scored.running) if len(own) > longest]:
        came = f"{len(longer)} of {len(replies)} replies, such as number {longer[0]}, have more than {longest} tokens"
        logger.warning("%s: %s; for those, the rate of the calibration is not promised.", op, came)
    return scored.highest()


def _model(model: str | Path | PreTrainedModel, processor: Processor | None) -> tuple[PreTrainedModel, Processor]:
    """Return the model and its tokenizer: `processor`, or else the one saved with a model that is given by name.

    A model given by name is loaded, with its language model head if it has one. Raises ConfigError without a tokenizer,
    and the errors of `load`.
    """
    loaded, own = load(model, writing_class(model)) if isinstance(model, str | Path) else (model, None)
    if (processor := own if processor is None else processor) is None:
        raise ConfigError("monitor: the model has no tokenizer; it is needed to read texts. Give processor=tokenizer.")
    return loaded, processor


def _check_parts(parts: Parts, processor: Processor, promise: _Promise) -> None:
    """Raise ConfigError if a part lacks good or bad replies, or "calibration" has too few good ones for the promise."""
    texts = [one.reply for one in parts["calibration"] if not one.positive]
    if promise.per == "reply":
        unit, count, least = (
            "good replies to different prompts",
            len(texts),
            needed_negatives(promise.rate, promise.confidence),
        )
    else:
        ids = tokenizer_of(processor)(texts, add_special_tokens=False).input_ids if texts else []
        lengths = [len(own) for own in ids]
        test = TokenRateTest(lengths, promise.rate, promise.confidence)
        unit, count = "tokens of good replies", sum(lengths)
        least = 0 if test.passes() else max(test.needed_tokens(), count + 1)
    if count < least:
        problem = f"there are {count} {unit} to calibrate on"
        sure = f"a rate of {promise.rate:g} per {promise.per} with {100 * promise.confidence:g} % confidence"
        rule = f"{sure} needs about {least}, so the file about {math.ceil(least / SHARES['calibration'])} {unit}"
        raise ConfigError(f"monitor: {problem}; {rule}. Give more, or ask for a higher rate.")
    for part, own in parts.items():
        for what, count in (("bad", sum(one.positive for one in own)), ("good", sum(not one.positive for one in own))):
            if not count:
                rule = "each of the parts (train, choosing, calibration, test) needs one, with a prompt of its own"
                raise ConfigError(f"monitor: the {part} part has no {what} reply; {rule}. Give more {what} replies.")


def _warn_of_repeated(parts: Parts) -> None:
    """Log a warning if test replies that look alike (see `look`) occur in the train part, after other prompts."""
    seen, count = {look(one.reply) for one in parts["train"]}, len(parts["test"])
    if repeated := sum(look(one.reply) in seen for one in parts["test"]):
        share = f"{repeated} of {count} test replies ({100 * repeated / count:.3g} %)"
        rule = "the measured recall may be too high for other replies"
        logger.warning("monitor: %s are in the train part too, after another prompt; %s.", share, rule)


def _tasks(parts: Parts, positive: str) -> dict[str, Task]:
    """Return part -> a task whose only split, "train", has the part's replies; bad words have the label `positive`."""
    tasks: dict[str, Task] = {}
    for part, own in parts.items():
        rows = [
            {"prompt": one.prompt, "reply": one.reply, "spans": [[*span, positive] for span in one.spans]}
            for one in own
        ]
        task = Task.from_dataset(
            "token_classification",
            {"train": rows, "validation": rows[:1]},  # without a validation part, a tenth of the rows would become one
            text="prompt",
            text_pair="reply",
            label="spans",
            labels=("O", f"B-{positive}", f"I-{positive}"),
            metric="accuracy",
            label_all_tokens=True,
            name="monitor",
        )
        tasks[part] = replace(task, splits={"train": task.split("train")})
    return tasks


def _add_candidates(bank: ReaderBank, task: Task, seed: int) -> bool:
    """Add the candidate readers to a bank; return whether they can score a text while it is written.

    They have the task's default fusion, `AdaLayers` of 64 features, the middle layer, and the last. `task` has the
    labels of their heads, and `seed` decides their random weights.
    """
    default = Reader.default(task, watch=True)
    stack = next(iter(bank.stacks.values()))
    live = is_causal(bank.model, stack)
    readers = {"all": default.fusion, "weighted": AdaLayers(dim=64)}
    readers |= {f"layer{at}": SingleLayer(layer=at) for at in sorted({stack.depth // 2, stack.depth})}
    for name, fusion in readers.items():
        bank.add(name, Reader(fusion, default.head, seed=seed), watch=live)
    return live


def _scores(
    op: str,
    bank: ReaderBank,
    monitors: Sequence[Monitor],
    task: Task,
    *,
    options: PassOptions,
    live: bool,
    features: bool = False,
) -> dict[str, TextScores]:
    """Return monitor name -> the running scores of each reply in a task's "train" split, from one pass.

    With `live` False, scores may depend on the whole text. With `features`, features are averaged too. The errors are
    those of `score_texts`, and begin with `op`.
    """
    runner = BankRunner(bank, op, None)
    (group,) = scoring_groups(runner, {monitors[0].reader: task}, "train", options)
    return score_texts(runner, group, task, monitors, options, finished=not live, features=features)


def _choose(
    bank: ReaderBank,
    task: Task,
    replies: Sequence[LabelledReply],
    score: Callable[[Sequence[Monitor], Task], Mapping[str, TextScores]],
) -> tuple[Monitor, dict[str, float]]:
    """Compare each reader of a bank with each aggregation, and keep the best reader only, under the name "monitor".

    Return the best monitor without a threshold, and candidate name -> AUROC of its highest scores, the best first.
    `task` has the `replies` on which `score` scores the candidates.
    """
    flags = [tag for tag in task.labels if tag != "O"]
    monitors = {
        (name := f"{reader}, {type(aggregate).__name__}"): Monitor(
            reader, flags, aggregate, scale="log_odds", name=name
        )
        for reader in bank
        for aggregate in AGGREGATES
    }
    positive = torch.tensor([reply.positive for reply in replies])
    highest = {name: own.highest() for name, own in score(list(monitors.values()), task).items()}
    auroc = {
        name: score_ranking(["auroc"], torch.tensor(own, dtype=torch.float64), positive)["auroc"]
        for name, own in highest.items()
    }
    ranked = sorted(auroc, key=lambda name: -auroc[name])
    best = monitors[ranked[0]].reader
    for reader in [reader for reader in bank if reader != best]:
        bank.remove(reader)
    bank.rename(best, "monitor")
    return replace(monitors[ranked[0]], reader="monitor", name="monitor"), {name: auroc[name] for name in ranked}


@dataclass(frozen=True)
class _Promise:
    """The rate of false alarms that is promised, its unit, and the confidence with which it holds.

    Raises ConfigError if a number is out of range, UnknownNameError for an unknown unit.
    """

    rate: float
    per: Unit
    confidence: float

    def __post_init__(self) -> None:
        check_known("monitor", [self.per], get_args(Unit), "unit")
        check_inside("monitor", "the rate", self.rate, 1 if self.per == "reply" else 1000)
        check_inside("monitor", "confidence", self.confidence, usual=0.95)

    def rates(self, scores: Mapping[str, TextScores], parts: Parts, *, warns: bool = False) -> Calibration:
        """Choose a threshold that guarantees the promised rate on "calibration", and return its rates on "test".

        `scores` and `parts` have the scores and the replies of both. `warns`: whether to call `warn_of_ties`. Raises
        ConfigError if all replies of a part are good or all are bad, or there are too few good ones to choose a
        threshold.
        """

        def measured(part: str, threshold: float | None) -> Calibration:
            return scores[part].calibration(
                [one.positive for one in parts[part]],
                rate=self.rate,
                per=self.per,
                threshold=threshold,
                confidence=self.confidence,
                guarantee=True,
            )

        chosen = measured("calibration", None)
        if warns:
            warn_of_ties("monitor", scores["calibration"], [one.positive for one in parts["calibration"]], chosen)
        return measured("test", chosen.threshold)


def _tfidf_recall(parts: Parts, unseen: Mapping[str, TextScores], promise: _Promise) -> float | None:
    """Return the recall of TF-IDF on the test part, at a threshold with the same promise; None without scikit-learn.

    TF-IDF with logistic regression learns from the train part. `unseen` has the monitor's scores on the parts
    "calibration", where the threshold is chosen, and "test"; they tell the number of tokens of each reply.
    """
    try:
        require_packages("monitor", "sklearn", "sklearn")
    except MissingExtraError:
        return None
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = {part: [f"{one.prompt}\n{one.reply}" for one in own] for part, own in parts.items()}
    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]", sublinear_tf=True)
    rival = make_pipeline(words, LogisticRegression(max_iter=1000, class_weight="balanced"))
    rival.fit(texts["train"], [one.positive for one in parts["train"]])
    scores: dict[str, TextScores] = {}
    for part, own in unseen.items():
        ends = zip(own.running, rival.decision_function(texts[part]).tolist(), strict=True)
        # the score is known at the last token only
        running = [np.append(np.full(max(0, len(tokens) - 1), -math.inf), score) for tokens, score in ends]
        scores[part] = TextScores(running)
    return promise.rates(scores, parts).recall
