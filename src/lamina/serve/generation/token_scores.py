"""What the readers of a bank say of a text while it is written, and at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.errors import ConfigError, check_known
from lamina.monitors import LastScore, Monitor
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.bank.reader import BankOutput, ReaderOutput
    from lamina.bank.watching import Step
    from lamina.monitors.cascade import AnyMonitor

_LABELS = 32  # of a reader whose scores are told token by token; each costs a little at every one


@final
class TokenScores:
    """Which readers and monitors follow one text, and what they say in words of JSON.

    A reader that says of a token what later ones do not change gives the probabilities of its labels for each token.
    One of more than 32 labels gives none. One that looks at whole texts, or that reads an encoder, answers once at the
    end. The monitors that are saved with the readers give the score of the text so far.

    Args:
        bank: The readers and their model.
        tasks: Names of readers; None: all that can take part.
        each: Each reader that is named must give scores token by token.
        stop: Whether flags end the text, or the names of the monitors whose flags do.

    Raises:
        UnknownNameError: If there is no such reader, or no such monitor of theirs.
        ConfigError: If a reader that is named cannot take part or has too many labels, or no monitor can end a text.
    """

    def __init__(
        self, bank: ReaderBank, tasks: Sequence[str] | None = None, *, each: bool, stop: bool | Sequence[str] = False
    ) -> None:
        check_known("serve", tasks or (), bank, "task")
        self._bank, self.late = bank, list[str]()
        self._labels: dict[str, tuple[str, str]] = {}  # name of a monitor made here -> its reader and label
        watched: list[AnyMonitor] = []
        told: list[str] = []
        for name in bank if tasks is None else dict.fromkeys(tasks):
            own = self._monitors(name)
            if why := _problem(bank, own):
                self._take_late(name, why, named=tasks is not None, each=each)
                continue
            if tasks is not None and len(own) > _LABELS:
                came = f"task '{name}' has {len(own)} labels; token by token at most {_LABELS} are told"
                raise ConfigError(f"serve: {came}. Ask /predict.")
            told.append(name)
            watched += own if len(own) <= _LABELS else ()
        saved = {name: monitor for name, monitor in bank.monitors.items() if {*monitor.readers} <= {*told}}
        self.stopping = _stopping(saved, stop)
        self.saved, self.monitors = tuple(saved), [*watched, *saved.values()]

    def _monitors(self, name: str) -> list[AnyMonitor]:
        """One for each label of a reader."""
        monitors: list[AnyMonitor] = []
        for label in _labels_of(self._bank, name):
            key = f"{name}\0{label}"  # no name of a saved one
            self._labels[key] = name, label
            monitors.append(Monitor(name, label, LastScore(), name=key))
        return monitors

    def _take_late(self, name: str, why: str, *, named: bool, each: bool) -> None:
        """Let a reader answer at the end, or say why it cannot."""
        if named and each:
            raise ConfigError(f"serve: task '{name}' gives no scores token by token: {why} Send stream=false.")
        try:
            if not _labels_of(self._bank, name) or self._bank[name].config.fusion.reads_pairs:
                raise ConfigError(why)
            with self._bank.listen([name], over="both"):
                self.late.append(name)
        except ConfigError as error:
            if named:
                raise ConfigError(f"serve: task '{name}' cannot follow a text that is written: {error}") from None

    def of(self, step: Step) -> dict[str, dict[str, float | None]]:
        """Task -> label -> probability at a token; of a regression its value."""
        scores: dict[str, dict[str, float | None]] = {}
        for key, score in step.scores.items():
            if key in self._labels:
                name, label = self._labels[key]
                scores.setdefault(name, {})[label] = _number(score)
        return scores

    def so_far(self, step: Step) -> dict[str, float | None]:
        """Monitor -> the score of the text so far; None where the second of a cascade is not asked."""
        return {name: _number(step.scores[name]) for name in self.saved}

    def flagged(self, step: Step) -> list[str]:
        """The monitors that have flagged the text by now."""
        return [name for name in self.saved if bool(step.flagged[name][0])]

    def answers(self, heard: BankOutput) -> dict[str, Any]:
        """What the readers say that answer at the end; None of one whose stack did not run, such as that of images."""
        return {name: _answer(self._bank, name, heard[name]) if name in heard else None for name in self.late}


def _labels_of(bank: ReaderBank, name: str) -> tuple[str, ...]:
    """The labels that a reader scores; none if it gives tokens."""
    head = bank[name].config.head
    return tuple(head.labels) if kind_of(head.kind).has_classes else ()


def _problem(bank: ReaderBank, monitors: list[AnyMonitor]) -> str | None:
    """Why a reader cannot be told of token by token; None if it can."""
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
    """The names of the monitors whose flags end a text."""
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


def _answer(bank: ReaderBank, name: str, output: ReaderOutput) -> Any:
    """Of a whole text its labels with their scores, best first; of tokens a list of their labels with scores."""
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
    return [{"id": token, "label": labels[at], "score": _finite(score)} for token, at, score, real in rows if real]


def _number(value: torch.Tensor) -> float | None:
    return _finite(float(value.flatten()[0]))


def _finite(value: float) -> float | None:
    """As JSON knows it."""
    return value if math.isfinite(value) else None
