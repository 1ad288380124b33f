"""A task: labelled texts or pictures, what is asked about them, and how the answers are scored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.data.read import Table, parquet_rows, read_pair, read_table
from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks.kinds import (
    GENERATION,
    IMAGE,
    MASKED,
    MASKED_LABELS,
    METRICS,
    TOKEN,
    Wanted,
    build,
    one_class,
)
from lamina.tasks.presets import Preset, class_names, file_names, find_preset, first_there
from lamina.tasks.sampling import Amount, Classes, draw_rows
from lamina.tasks.split import Split, held_out, limited, without_labels
from lamina.tasks.tags import marks_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Split", "Task"]

logger = logging.getLogger(__name__)

PARTS = ("train", "validation", "test")
Source = str | Path | tuple[str | Path, str | Path] | list[str]
"""Where one part of a task is: a file or folder, or a pair of files."""
_UNNAMED = {TOKEN: "conll", MASKED: "lines"}  # what files hold whose ending does not say


@dataclass(frozen=True)
class Task:
    """Labelled texts or pictures, and what is asked about them.

    Attributes:
        kind: "sequence_classification", "token_classification", "masked_lm", "summarization", "translation" or
            "image_classification".
        problem: "classification", "regression" or "multi_label"; "generation" where texts are to be written; of other
            kinds "classification".
        labels: Class names in the order of their ids; regression: the score's name; "masked_lm": ("token",);
            where texts are to be written: ("text",).
        metric: The metric that picks the best checkpoint; see `lamina.tasks.kinds.better`.
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
        if stratified and not one_class(self.kind, self.problem):
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

    def masked_lm(self) -> Task:
        """The same texts as a task of masked language modelling, named after this one with "-mlm" behind.

        Both texts of a pair become rows, one after the other; blank texts are none. Of texts that become others, those
        that are read are taken.

        Raises:
            ConfigError: If the rows are pictures.
        """
        if self.kind == IMAGE:
            raise ConfigError(
                f"task {self.name}: a task of kind {IMAGE} was asked for its texts; it holds pictures. "
                "Use a task of texts."
            )
        splits = {name: without_labels(split) for name, split in self.splits.items()}
        metrics = METRICS[MASKED, "classification"]
        return Task(
            MASKED, "classification", MASKED_LABELS, metrics[0], metrics, splits, f"{self.name}-mlm", self.drawn
        )

    @classmethod
    def from_files(  # noqa: PLR0913
        cls,
        kind: str,
        *,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
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
        """Read a task from TSV, CSV, JSONL, Parquet, CoNLL-column or plain text files, or from pictures.

        Args:
            kind: "sequence_classification", "token_classification", "masked_lm", "summarization", "translation" or
                "image_classification".
            train: Rows to learn from: a file. For summaries and translations perhaps a pair of plain text files whose
                lines belong together, the texts to read and those to write. For "image_classification" a folder
                with a folder of pictures per class, or a tar of one.
            validation: Rows to choose by; without them a tenth of `train` is set aside, class by class; of running
                text ("masked_lm") its last tenth.
            test: Rows that only `evaluate` looks at.
            text: Column of the text; of the list of words in a token task. In CoNLL files its number (default 0). In
                plain text every line that is not blank is a row. "translation.en" is what the objects in column
                "translation" have under "en".
            text_pair: Column of the second text of sentence-pair tasks.
            label: Column of the label; of the list of tags in a token task; of the text to write. In CoNLL files a
                number (default the last).
            labels: Class names in the order of their ids; by default those of `train`, sorted. The files hold
                these names, or whole numbers that are the ids.
            metric: The metric that picks the best checkpoint; by default the usual one of the problem.
            problem: "classification", "regression" (labels with a decimal point) or "multi_label" (lists of labels);
                by default read off the labels, or what the kind says.
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
        text = "image" if kind == IMAGE and text == "sentence" else text
        wanted = Wanted(kind, text, label, text_pair, None if labels is None else tuple(labels), problem)
        tables = {part: _read(source, wanted) for part, source in given.items()}
        wanted = _usual_columns(wanted, tables)
        first = next(iter(given.values()))
        name = name or Path(first if isinstance(first, str | Path) else first[0]).stem
        return _assemble(wanted, tables, metrics=metric, name=name, limits=(limit, limit_validation), seed=seed)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        files: str | Path | Mapping[str, Source] | None = None,
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
    ) -> Task:
        """A known public task, from local files in the published format or from the hub.

        Args:
            name: "cola", "sst2", "mrpc", "rte", "stsb", "wnli", "qnli", "imdb", "conll2003", "wikiann", "wikitext2",
                "cnn_dailymail", "wmt16_en_ro", "cifar10", "cifar100" or "imagenet"; "glue/cola" is "cola", and
                "wikiann/de" is WikiAnn's German part (else English).
            files: Part ("train", "validation", "test") to file (or to what else `from_files` takes), or the folder
                with the published files; None fetches the set from the hub.
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
        wanted = Wanted(preset.kind, text, label, pair, preset.labels or None, preset.problem)
        if files is None:
            tables, names = _fetch(short, preset)
            wanted = replace(wanted, labels=preset.labels or names)
        else:
            tables = _open(short, preset, wanted, files)
        limits = (limit, limit_validation)
        return _assemble(wanted, tables, metrics=preset.metrics, name=short, limits=limits, seed=seed)


def _read(source: Source, wanted: Wanted, header: Sequence[str] | None = None) -> Table:
    """One part, from wherever it is."""
    if not isinstance(source, str | Path):
        if wanted.kind not in GENERATION:
            raise ConfigError(
                f"task: {len(source)} files were given for one part of a task of kind {wanted.kind}; a pair of files "
                "is for texts that become others. Give one file."
            )
        return read_pair(source, (str(wanted.text), str(wanted.label)))
    if wanted.kind == IMAGE and Path(source).suffix == ".parquet":
        return _pictures(str(source), parquet_rows(source, wanted.text), str(wanted.text), str(wanted.label))
    if wanted.kind == IMAGE:
        from lamina.tasks.images import read_images

        return read_images(source)
    return read_table(source, header=header, other=_UNNAMED.get(wanted.kind))


def _usual_columns(wanted: Wanted, tables: Mapping[str, Table]) -> Wanted:
    """The columns that are meant where none was named and there is none of the usual name."""

    def absent(column: str | int, usual: str) -> bool:
        return column == usual and not any(usual in table.columns for table in tables.values())

    kind, text, label = wanted.kind, wanted.text, wanted.label
    if kind == TOKEN and all(table.numbered for table in tables.values()):
        return replace(wanted, text=0 if text == "sentence" else text, label=-1 if label == "label" else label)
    if kind in (MASKED, *GENERATION) and absent(text, "sentence"):
        text = "text"
    if kind in GENERATION and absent(label, "label"):
        label = "target"
    return replace(wanted, text=text, label=label)


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
        stratify, last = one_class(wanted.kind, problem), wanted.kind == MASKED
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


def _open(name: str, preset: Preset, wanted: Wanted, files: str | Path | Mapping[str, Source]) -> dict[str, Table]:
    sources = files if isinstance(files, Mapping) else _published(name, preset, Path(files))
    for part in sources:
        if part not in PARTS:
            raise UnknownNameError(op=f"task {name}", got=part, known=PARTS, what="split")
    return {part: _read(source, wanted, preset.header) for part, source in sources.items()}


def _published(name: str, preset: Preset, folder: Path) -> dict[str, Source]:
    """The published files that a folder holds."""
    found = {part: first_there(folder, names) for part, names in preset.files.items()}
    if found["train"] is None and preset.kind == MASKED and found["validation"] is not None:
        found["train"] = found.pop("validation")
        logger.warning("task %s: %s has no train file; the validation file stands in for it", name, folder)
        logger.warning("task %s: the last tenth of the text is set aside for validation", name)
    elif not any(found.values()) and (stand_in := first_there(folder, preset.stand_ins)):
        found["train"] = stand_in
        logger.warning(
            "task %s: %s has no train file; the train part is read from %s", name, folder, file_names(stand_in)
        )
    if found["train"] is None:
        known = " or ".join(file_names(one) for one in preset.files["train"])
        raise DataError(
            f"task {name}: {folder} has no {known}; "
            "a folder must hold the published files. Check the folder, or name the files one by one.",
            path=str(folder),
        )
    if found.get("validation", folder) is None:
        logger.warning("task %s: %s has no validation file; a tenth of the train part is set aside", name, folder)
    return {part: source for part, source in found.items() if source is not None}


def _fetch(name: str, preset: Preset) -> tuple[dict[str, Table], tuple[str, ...] | None]:
    """The parts of a hub set that have labels, and the names of these as the set has them."""
    import datasets

    try:
        fetched = datasets.load_dataset(preset.hub, preset.config, revision=preset.revision)
    except Exception as error:  # the hub's clients raise many unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"task {name}: '{preset.hub}' cannot be fetched ({reason}); without files a preset comes from the hub. "
            "Give `files`, or try again with a connection."
        ) from error
    tables = {part: _table(f"{preset.hub}/{part}", fetched[part], preset) for part in preset.parts}  # pyright: ignore
    return tables, class_names(fetched[preset.parts[0]], preset.hub_columns[2])  # pyright: ignore


def _table(path: str, rows: Any, preset: Preset) -> Table:
    if preset.kind == IMAGE:
        return _pictures(path, rows, preset.hub_columns[0], preset.hub_columns[2])
    return Table(path, {name: list(rows[name]) for name in rows.column_names}, range(1, len(rows) + 1))


def _pictures(path: str, rows: Any, image: str, label: str) -> Table:
    """The two columns of a set of pictures, none of which is opened."""
    from lamina.tasks.images import hub_pictures

    columns = {image: hub_pictures(rows, image)}
    columns |= {name: list(rows[name]) for name in rows.column_names if name == label}
    return Table(path, columns, range(1, len(rows) + 1))
