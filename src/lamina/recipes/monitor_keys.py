"""The keys of a monitor in a recipe, and its calibration after the readers are trained."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from lamina.errors import ConfigError, check_known, error_context
from lamina.monitors import AGGREGATIONS, Monitor
from lamina.prediction.calibrate import calibrate
from lamina.recipes.report_file import REPORT, Report, TableRow, with_drawn_files, write_report_file
from lamina.recipes.strict_yaml import NAMED, Fields, Strict, checked, error_at
from lamina.train.results import sort_key
from lamina.utils import JSONObject, run_in_first

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

logger = logging.getLogger(__name__)


class MonitorRecipe(Strict):
    """A monitor in a recipe. Its reader is trained, its threshold is calibrated, and both are saved with the bank.

    Attributes:
        task: Name of a task of the recipe.
        reader: Name of a reader of the task; None: its only one.
        flag: Label or labels to watch for.
        aggregate: The aggregation of token scores: its name, or settings with "name". The default is "mean_score".
        scale: The scale of token scores: "log_odds" (the default) or "probability".
        rate: Rate of false positives; below 1 if it is per reply.
        per: Unit of the rate: "reply" (the default) or "1000 tokens".
        guarantee: Keep the rate on other texts too, with 95 % confidence.
        split: The split whose texts choose the threshold.
    """

    task: str
    reader: str | None = None
    flag: str | list[str]
    aggregate: Annotated[Fields, NAMED, checked(AGGREGATIONS.from_dict)] = Field(
        default_factory=lambda: {"name": "mean_score"}
    )
    scale: Literal["probability", "log_odds"] = "log_odds"
    rate: Annotated[float, Field(gt=0, lt=1000)] = 0.01
    per: Literal["reply", "1000 tokens"] = "reply"
    guarantee: bool = False
    split: Literal["train", "validation", "test"] = "validation"

    @model_validator(mode="after")
    def _is_fraction(self) -> Self:
        with error_at("rate"):
            if self.per == "reply" and self.rate >= 1:
                raise ConfigError(f"the rate is {self.rate:g}; a rate per reply is below 1")
        return self


def check_monitor(monitor: MonitorRecipe, readers: Mapping[str, Collection[str]], *, shared: bool) -> None:
    """Check that a monitor's task and reader exist, and that the recipe's readers are in one bank (`shared`).

    `readers` is task name -> names of its readers. Raises ConfigError if there is no common bank; ValidationError,
    which says where, if the task or the reader does not exist, or no reader is named where the task has several.
    """
    if not shared:
        raise ConfigError("recipe: a monitor needs a bank; leave out 'methods' and 'separately'.")
    with error_at("task"):
        check_known("recipe", [monitor.task], readers, "task")
    with error_at("reader"):
        own = readers[monitor.task]
        if monitor.reader is None and len(own) != 1:
            raise ConfigError(f"recipe: task '{monitor.task}' has {len(own)} readers; name one of them.")
        check_known("recipe", [monitor.reader] if monitor.reader else [], own, "reader")


def add_monitors(
    bank: ReaderBank,
    monitors: Mapping[str, MonitorRecipe],
    specs: Mapping[str, RunSpec],
    tasks: Mapping[str, Task],
    rows: Sequence[TableRow],
) -> list[TableRow]:
    """Calibrate a recipe's monitors on a trained bank, store them in it, and return a row of rates for each.

    `specs` is run name -> run, and `rows` has one row of results per run: if a reader has several runs, the one with
    the best validation score is watched. A monitor whose reader was not trained (because of `only`) is left out with a
    warning. If a monitor fails, those before it stay in the bank. Raises ConfigError if a monitor does not fit its
    reader, or there are too few texts for its rate; UnknownNameError if the reader lacks a flagged label, or the task
    lacks the split. Other errors are those of `calibrate`.
    """
    rates: list[TableRow] = []
    for name, keys in monitors.items():
        of_task = [spec for spec in specs.values() if spec.task == keys.task]
        wanted = {spec.name for spec in of_task if keys.reader in (None, spec.settings["method"])}
        if not wanted:
            logger.warning("recipe: monitor '%s' is left out, because 'only' chooses no run of its reader.", name)
            continue
        scored = [row for row in rows if row["reader"] in wanted]
        reader = min(scored, key=lambda row: sort_key(row["metric"], row["score"]))["reader"]
        monitor = Monitor(reader, keys.flag, AGGREGATIONS.from_dict(keys.aggregate), scale=keys.scale, name=name)
        how: JSONObject = {"false_positive_rate": keys.rate, "per": keys.per, "guarantee": keys.guarantee}
        with error_context(f"monitor {name}"):
            found = calibrate(bank, monitor, tasks[keys.task], split=keys.split, **how)
        facts = {} if found.calibration is None else found.calibration.to_dict()
        rates.append({"monitor": name, "reader": reader, "flag": ", ".join(monitor.flag), **facts})
    return rates


def monitored_report(
    monitors: Mapping[str, MonitorRecipe],
    bank: ReaderBank | None,
    report: Report,
    rows: Sequence[TableRow],
    specs: Mapping[str, RunSpec],
    tasks: Mapping[str, Task],
    folder: Path | None,
) -> Report:
    """Calibrate a recipe's monitors, save them with the bank, and return the report with their rates added.

    Without monitors or a bank, return `report` as it is. `folder` is the output folder, into which the first process
    writes the bank and the report; None: nothing is written. The other arguments and the errors are those of
    `add_monitors`; StoreError if the folder cannot be written.
    """
    if not monitors or bank is None:
        return report
    report = replace(report, monitors=add_monitors(bank, monitors, specs, tasks, rows))
    if folder is not None:

        def write() -> None:
            bank.save_pretrained(folder)
            write_report_file(folder / REPORT, with_drawn_files(report, folder))

        run_in_first(write)
    return report


def rates_text(row: TableRow) -> str:
    """Return the false positive rate and recall in `row`, from `add_monitors`, with their intervals, as a sentence."""
    (low, high), (least, most) = row["false_positive_interval"], row["recall_interval"]
    flags = f"flags {100 * row['false_positive_rate']:.1f} % ({100 * low:.1f} to {100 * high:.1f}) of the negatives"
    caught = f"catches {100 * row['recall']:.1f} % ({100 * least:.1f} to {100 * most:.1f}) of the positives"
    return f"{row['monitor']} {flags} and {caught}, on the {row['split']} part."
