"""A task: labelled texts, what is asked about them, and how the answers are scored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.data.build import MASKED, METRICS, SEQUENCE, TOKEN, Wanted, build
from lamina.data.draw import Amount, Classes, draw_rows
from lamina.data.presets import Preset, find_preset
from lamina.data.read import Table, read_table
from lamina.data.split import Split, held_out, limited
from lamina.data.tags import marks_spans
from lamina.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Split", "Task"]

logger = logging.getLogger(__name__)

PARTS = ("train", "validation", "test")
_UNNAMED = {TOKEN: "conll", MASKED: "lines"}  # what files hold whose ending does not say


@dataclass(frozen=True)
class Task:
    """Labelled texts and what is asked about them.

    Attributes:
        kind: "sequence_classification", "token_classification" or "masked_lm".
        problem: "classification", "regression" or "multi_label"; of other kinds "classification".
        labels: Class names in the order of their ids; regression: the score's name; "masked_lm": ("token",).
        metric: The metric that picks the best checkpoint; see `lamina.data.build.better`.
        metrics: All metrics that are reported.
        splits: "train", "validation" and perhaps "test".
        name: What the task is called in tables and files.
        drawn: How the train part was drawn from a larger one, JSON-ready: "per_class", "fraction" or "rows" with the
            value that was asked, "of" how many rows, "stratified" and "seed"; "before" it an earlier draw. None: it
            was not.
    """

    kind: str
    problem: str
    labels: tuple[str, ...]
    metric: str
    metrics: tuple[str, ...]
    splits: Mapping[str, Split]
    name: str
    drawn: dict[str, Any] | None = None

    def split(self, name: str) -> Split:
        """One part.

        Raises:
            UnknownNameError: If the task has no such part.
        """
        if name not in self.splits:
            raise UnknownNameError(op=f"task {self.name}", got=name, known=self.splits, what="split")
        return self.splits[name]

    def draw(
        self,
        *,
        per_class: int | None = None,
        fraction: float | None = None,
        rows: int | None = None,
        stratified: bool = False,
        seed: int = 0,
    ) -> Task:
        """The same task with fewer rows to learn from; validation and test stay whole.

        A class that is left without a row is named in a warning.

        Args:
            per_class: So many rows times the number of classes. Of token tasks whose tags mark spans the classes are
                the span types (four in CoNLL-2003), as the papers count them.
            fraction: This share of the rows.
            rows: So many rows.
            stratified: As many rows of each class (`per_class`), or the same share of each; else rows are drawn
                uniformly, without replacement, whatever their classes, as in the papers. Only where a row has one
                class: not for token tasks, multi-label tasks, and tasks without classes.
            seed: Which rows.

        Raises:
            UnknownNameError: If the task has no train part.
            ConfigError: Unless exactly one of `per_class`, `fraction` and `rows` is given, and there are that many
                rows; or if `stratified` is set where rows have several classes or none.
        """
        amount = Amount(per_class, fraction, rows)
        train = self.split("train")
        if stratified and (self.kind, self.problem) != (SEQUENCE, "classification"):
            raise ConfigError(
                f"draw: stratified is set for a task of kind {self.kind} ({self.problem}); its rows have not one class "
                "each. Draw without it."
            )
        classes = Classes.of(self.kind, self.problem, self.labels, train)
        chosen = draw_rows(classes, amount, stratified=stratified, seed=seed)
        for missing in classes.missing(chosen):
            logger.warning("task %s: none of the %d rows drawn is of class '%s'", self.name, len(chosen), missing)
        facts = {**amount.given(), "of": len(train), "stratified": stratified, "seed": seed}
        if self.drawn is not None:
            facts["before"] = self.drawn
        return replace(self, splits={**self.splits, "train": train.take(chosen)}, drawn=facts)

    @classmethod
    def from_files(  # noqa: PLR0913
        cls,
        kind: str,
        *,
        train: str | Path | None = None,
        validation: str | Path | None = None,
        test: str | Path | None = None,
        text: str | int = "sentence",
        text_pair: str | int | None = None,
        label: str | int = "label",
        labels: Sequence[str] | None = None,
        metric: str | None = None,
        problem: str | None = None,
        name: str | None = None,
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
    ) -> Task:
        """Read a task from TSV, CSV, JSONL, Parquet, CoNLL-column or (for "masked_lm") plain text files.

        Args:
            kind: "sequence_classification", "token_classification" or "masked_lm".
            train: Rows to learn from.
            validation: Rows to choose by; without them a tenth of `train` is set aside, class by class; of running
                text ("masked_lm") its last tenth.
            test: Rows that only `evaluate` looks at.
            text: Column of the text; of the list of words in a token task. In CoNLL files its number (default 0). In
                plain text every line that is not blank is a row.
            text_pair: Column of the second text of sentence-pair tasks.
            label: Column of the label; of the list of tags in a token task. In CoNLL files a number (default the last).
            labels: Class names in the order of their ids; by default those of `train`, sorted. The files hold
                these names, or whole numbers that are the ids.
            metric: The metric that picks the best checkpoint; by default the usual one of the problem.
            problem: "classification", "regression" (labels with a decimal point) or "multi_label" (lists of labels);
                by default read off the labels.
            name: What the task is called; by default the first file's name without its ending.
            limit: At most so many training rows, drawn uniformly.
            limit_validation: At most so many validation rows, drawn uniformly; the test part stays whole.
            seed: Decides which rows are set aside and which are drawn.

        Raises:
            DataError: If a file, row, column or label does not fit; names it.
            UnknownNameError: If kind, problem or metric is none there is.
            ConfigError: If a limit is below 1, labels are named twice, or a kind that reads single texts is to read
                pairs.
        """
        given = {part: path for part, path in zip(PARTS, (train, validation, test), strict=True) if path is not None}
        if not given:
            raise DataError("task: no file was given; a task needs rows. Give `train`, `validation` or `test`.")
        wanted = Wanted(kind, text, label, text_pair, None if labels is None else tuple(labels), problem)
        tables = {part: read_table(path, other=_UNNAMED.get(kind)) for part, path in given.items()}
        if kind == TOKEN and all(table.numbered for table in tables.values()):
            wanted = replace(wanted, text=0 if text == "sentence" else text, label=-1 if label == "label" else label)
        if kind == MASKED and text == "sentence" and not any(text in table.columns for table in tables.values()):
            wanted = replace(wanted, text="text")
        name = name or Path(next(iter(given.values()))).stem
        return _assemble(wanted, tables, metrics=metric, name=name, limits=(limit, limit_validation), seed=seed)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        files: str | Path | Mapping[str, str | Path] | None = None,
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
    ) -> Task:
        """A known public task, from local files in the published format or from the hub.

        Args:
            name: "cola", "sst2", "mrpc", "rte", "stsb", "wnli", "qnli", "imdb", "conll2003", "wikiann" or "wikitext2";
                "glue/cola" is "cola", and "wikiann/de" is WikiAnn's German part (else English).
            files: Part ("train", "validation", "test") to file, or the folder with the published files;
                None fetches the set from the hub.
            limit: At most so many training rows, drawn uniformly.
            limit_validation: At most so many validation rows, drawn uniformly.
            seed: Decides which rows are drawn, and which are set aside where there is no validation part.

        Raises:
            UnknownNameError: If the preset or a part is none there is.
            DataError: If a file, row, column or label does not fit, or the hub cannot be reached.
            ConfigError: If a limit is below 1.
        """
        short, preset = find_preset(name)
        text, pair, label = preset.hub_columns if files is None else preset.columns
        wanted = Wanted(preset.kind, text, label, pair, preset.labels, preset.problem)
        tables = _fetch(short, preset) if files is None else _open(short, preset, files)
        limits = (limit, limit_validation)
        return _assemble(wanted, tables, metrics=preset.metrics, name=short, limits=limits, seed=seed)


def _assemble(
    wanted: Wanted,
    tables: Mapping[str, Table],
    *,
    metrics: str | tuple[str, ...] | None,
    name: str,
    limits: tuple[int | None, int | None],
    seed: int,
) -> Task:
    wanted, splits = build(wanted, tables)
    labels, problem = wanted.labels or (), wanted.problem or "classification"
    if not isinstance(metrics, tuple):
        metrics = _metrics(wanted.kind, problem, labels, metrics)
    if "train" in splits and "validation" not in splits:
        stratify = problem == "classification" and wanted.kind == SEQUENCE
        last = wanted.kind == MASKED
        splits["train"], splits["validation"] = held_out(splits["train"], stratify=stratify, seed=seed, last=last)
    if "validation" in splits:
        splits["validation"] = limited(splits["validation"], limits[1], seed, option="limit_validation")
    ordered = {part: splits[part] for part in PARTS if part in splits}
    task = Task(wanted.kind, problem, labels, metrics[0], metrics, ordered, name)
    if "train" not in splits or limited(splits["train"], limits[0], seed) is splits["train"]:
        return task
    return task.draw(rows=limits[0], seed=seed)


def _metrics(kind: str, problem: str, labels: Sequence[str], metric: str | None) -> tuple[str, ...]:
    """All metrics that fit, the chosen one first."""
    known = METRICS[kind, problem]
    if kind == TOKEN and not marks_spans(labels):
        known = tuple(one for one in known if one != "span_f1")
    if metric is None:
        return known
    if metric not in known:
        raise UnknownNameError(op="task", got=metric, known=known, what="metric")
    return (metric, *(one for one in known if one != metric))


def _open(name: str, preset: Preset, files: str | Path | Mapping[str, str | Path]) -> dict[str, Table]:
    paths = files if isinstance(files, Mapping) else _published(name, preset, Path(files))
    for part in paths:
        if part not in PARTS:
            raise UnknownNameError(op=f"task {name}", got=part, known=PARTS, what="split")
    other = _UNNAMED.get(preset.kind)
    return {part: read_table(path, header=preset.header, other=other) for part, path in paths.items()}


def _published(name: str, preset: Preset, folder: Path) -> dict[str, Path]:
    """The published files that a folder holds."""
    found = {
        part: next((folder / one for one in names if (folder / one).is_file()), None)
        for part, names in preset.files.items()
    }
    if found["train"] is None and preset.kind == MASKED and found["validation"] is not None:
        found["train"] = found.pop("validation")
        logger.warning("task %s: %s has no train file; the validation file stands in for it", name, folder)
        logger.warning("task %s: the last tenth of the text is set aside for validation", name)
    elif found["train"] is None:
        raise DataError(
            f"task {name}: {folder} has no {' or '.join(preset.files['train'])}; "
            "a folder must hold the published files. Check the folder, or name the files one by one.",
            path=str(folder),
        )
    elif found.get("validation", folder) is None:
        logger.warning("task %s: %s has no validation file; a tenth of the train part is set aside", name, folder)
    return {part: path for part, path in found.items() if path is not None}


def _fetch(name: str, preset: Preset) -> dict[str, Table]:
    """The parts of a hub set that have labels."""
    import datasets

    try:
        fetched = datasets.load_dataset(preset.hub, preset.config, revision=preset.revision)
    except Exception as error:  # the hub's clients raise many unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"task {name}: '{preset.hub}' cannot be fetched ({reason}); without files a preset comes from the hub. "
            "Give `files`, or try again with a connection."
        ) from error
    return {part: _table(f"{preset.hub}/{part}", fetched[part]) for part in preset.parts}  # pyright: ignore


def _table(path: str, rows: object) -> Table:
    columns = {name: list(rows[name]) for name in rows.column_names}  # pyright: ignore
    return Table(path, columns, range(1, len(rows) + 1))  # pyright: ignore
