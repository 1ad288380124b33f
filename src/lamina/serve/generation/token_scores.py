"""The readers' scores for a text while it is generated, and their answers at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from lamina.errors import ConfigError, check_known
from lamina.monitors import LastScore, Monitor
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.bank.reader import BankOutput, ReaderOutput
    from lamina.bank.step import Step
    from lamina.monitors.cascade import AnyMonitor
    from lamina.utils import JSON

_MAX_LABELS = 32  # labels of a reader that gives scores token by token: each label adds a little to every step


@final
class TokenScores:
    """Decides which readers and monitors take part in one generated text, and converts their scores to JSON.

    There are three ways to take part:

    - A reader whose scores at a token do not depend on later tokens gives the probabilities of its labels at each
      token, if it has at most 32 labels. One monitor per label computes them.
    - Other readers, such as those of whole texts or of an encoder, answer once at the end.
    - Monitors that are saved with the readers give the score of the text so far.

    Args:
        bank: The readers and their model.
        tasks: Names of the readers that take part. None: all that can.
        each: Whether every reader named in `tasks` must give scores at each token, as streaming requires.
        stop: Which flags end the text. True: those of all monitors. False: none. Names: those of these monitors.

    Attributes:
        monitors: The monitors to pass to `bank.watch`.
        saved: Names of those monitors that are saved with the readers; all readers of a monitor must take part.
        late: Names of the readers that answer at the end; to be passed to `bank.listen`.
        stopping: Names of the monitors whose flags end the text.

    Raises:
        UnknownNameError: If a reader does not exist, or a monitor in `stop` is not in `saved`.
        ConfigError: If a reader named in `tasks` cannot take part or has too many labels; if `stop` names no monitor or
            one without a threshold, or is True and no monitor has one.
    """

    def __init__(
        self, bank: ReaderBank, tasks: Sequence[str] | None = None, *, each: bool, stop: bool | Sequence[str] = False
    ) -> None:
        check_known("serve", tasks or (), bank, "task")
        self._bank, self.late = bank, list[str]()
        self._labels: dict[str, tuple[str, str]] = {}  # name of a monitor made here -> its reader and label
        label_monitors: list[AnyMonitor] = []
        by_token: list[str] = []  # readers that give scores at each token, or could if they had fewer labels
        for name in bank if tasks is None else dict.fromkeys(tasks):
            monitors = self._label_monitors(name)
            if problem := _problem(bank, monitors):
                self._add_late(name, problem, named=tasks is not None, each=each)
                continue
            if tasks is not None and len(monitors) > _MAX_LABELS:
                came = f"task '{name}' has {len(monitors)} labels"
                raise ConfigError(
                    f"serve: {came}; scores token by token are given for at most {_MAX_LABELS}. Use /predict."
                )
            by_token.append(name)
            label_monitors += monitors if len(monitors) <= _MAX_LABELS else ()
        saved = {name: monitor for name, monitor in bank.monitors.items() if {*monitor.readers} <= {*by_token}}
        self.stopping = _stopping(saved, stop)
        self.saved, self.monitors = tuple(saved), [*label_monitors, *saved.values()]

    def _label_monitors(self, name: str) -> list[AnyMonitor]:
        """Return a new monitor for each label of the reader `name`, in the order of its labels.

        Its score at a token is the label's probability, or a regression's value. [] if the reader's classes are the
        entries of a vocabulary. Each monitor's name is added to `_labels`, with the reader and the label.
        """
        monitors: list[AnyMonitor] = []
        for label in _labels_of(self._bank, name):
            key = f"{name}\0{label}"  # cannot be the name of a saved monitor
            self._labels[key] = name, label
            monitors.append(Monitor(name, label, LastScore(), name=key))
        return monitors

    def _add_late(self, name: str, problem: str, *, named: bool, each: bool) -> None:
        """Add a reader to `late`: it answers at the end, because it cannot give scores token by token.

        `problem` says why it cannot. A reader that cannot answer at the end either is left out; if the request names it
        (`named`), ConfigError is raised instead. For a named reader, ConfigError is also raised if scores at each token
        are required (`each`); for other readers, `each` has no effect.
        """
        if named and each:
            raise ConfigError(f"serve: task '{name}' gives no scores token by token: {problem} Send stream=false.")
        try:
            if not _labels_of(self._bank, name) or self._bank[name].config.fusion.reads_pairs:
                raise ConfigError(problem)
            with self._bank.listen([name], over="both"):
                self.late.append(name)
        except ConfigError as error:
            if named:
                raise ConfigError(f"serve: task '{name}' cannot follow a generated text: {error}") from None

    def at(self, step: Step) -> dict[str, dict[str, float | None]]:
        """Return the readers' scores at one token: task -> label -> probability. `step` comes from `bank.watch`.

        A regression has its value in place of a probability. Infinity becomes None, and so does the NaN of tokens
        without a score.
        """
        scores: dict[str, dict[str, float | None]] = {}
        for key, score in step.scores.items():
            if key in self._labels:
                name, label = self._labels[key]
                scores.setdefault(name, {})[label] = _number(score)
        return scores

    def so_far(self, step: Step) -> dict[str, float | None]:
        """Return saved monitor -> score of the text up to the token of `step`.

        A score is None if it is not finite, or if the second monitor of a cascade has not run.
        """
        return {name: _number(step.scores[name]) for name in self.saved}

    def flagged(self, step: Step) -> list[str]:
        """Return the names of the saved monitors that have flagged the text at the token of `step` or before."""
        return [name for name in self.saved if bool(step.flagged[name][0])]

    def answers(self, outputs: BankOutput) -> dict[str, JSON]:
        """Return task -> answer for the readers in `late`; `outputs` is what `bank.listen` yielded for them.

        An answer is None if the reader's stack did not run, for instance an image tower while text was generated.
        """
        return {name: _answer(self._bank, name, outputs[name]) if name in outputs else None for name in self.late}


def _labels_of(bank: ReaderBank, name: str) -> tuple[str, ...]:
    """Return the labels of the reader `name`; () if its classes are the vocabulary's entries."""
    head = bank[name].config.head
    return tuple(head.labels) if kind_of(head.kind).has_classes else ()


def _problem(bank: ReaderBank, monitors: list[AnyMonitor]) -> str | None:
    """Return why a reader cannot give scores token by token, as a sentence; None if it can.

    `monitors` has a monitor for each label of the reader.
    """
    if not monitors:
        return "it has no labels."
    if bank[monitors[0].readers[0]].config.fusion.reads_pairs:
        return "it compares two texts."
    try:
        with bank.watch(monitors):
            return None
    except ConfigError as error:
        return str(error).removeprefix("bank.watch: ")


def _stopping(saved: dict[str, AnyMonitor], stop: bool | Sequence[str]) -> list[str]:
    """Return the names of the monitors in `saved` whose flags end a text; [] if `stop` is False.

    `stop` is True for all that have a threshold, or names. Raises UnknownNameError if a name is not in `saved`, and
    ConfigError if `stop` is empty, a named monitor has no threshold, or for True none has one.
    """
    able = [name for name, monitor in saved.items() if monitor.threshold is not None]
    if stop is False:
        return []
    if not isinstance(stop, bool):
        check_known("serve", stop, saved, "monitor")
        able = [name for name in stop if name in able]
    if not able or (not isinstance(stop, bool) and len(able) < len(stop)):
        rule = "a text is flagged by a monitor that is saved with a reader of these tasks and has a threshold"
        raise ConfigError(
            f"serve: stop_on_flag is {stop}, but no monitor can raise a flag; {rule}. See lamina.monitors.calibrate."
        )
    return able


def _answer(bank: ReaderBank, name: str, output: ReaderOutput) -> JSON:
    """Return the answer of the reader `name` about the only text of a batch, made from the reader's output.

    A regression answers {"value"}. A reader of whole texts answers {"label", "score"} for each label, best first. A
    reader of tokens answers {"id", "label", "score"} for each token: its id (None if it is not text), its best label
    and that label's score. Numbers that are not finite become None.
    """
    problem, labels = bank[name].config.head.problem_type, _labels_of(bank, name)
    logits = output.logits[0].detach().double().cpu()
    if problem == "regression":
        return {"value": _number(logits)}
    scores = logits.sigmoid() if problem == "multi_label" else logits.softmax(-1)
    if scores.ndim == 1:
        ranked = sorted(zip(labels, scores.tolist(), strict=True), key=lambda pair: -pair[1])
        return [{"label": label, "score": _finite(score)} for label, score in ranked]
    best, ids = scores.max(-1), output.tokens
    tokens = [None] * len(scores) if ids is None else ids[0].tolist()
    rows = zip(tokens, best.indices.tolist(), best.values.tolist(), output.mask[0].tolist(), strict=True)
    return [
        {"id": token, "label": labels[id_], "score": _finite(score)} for token, id_, score, is_real in rows if is_real
    ]


def _number(value: Tensor) -> float | None:
    return _finite(float(value.flatten()[0]))


def _finite(value: float) -> float | None:
    """Return the value, or None if it is NaN or infinite, because JSON has no such numbers."""
    return value if math.isfinite(value) else None
