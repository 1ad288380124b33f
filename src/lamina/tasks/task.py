"""A task: labelled examples, what is asked about them, and how the answers are scored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from lamina.data.read import Table
from lamina.errors import ConfigError, DataError, check_known
from lamina.tasks import kind_of
from lamina.tasks.base import PARTS, ColumnSpec, check_image_size, check_label_all_tokens
from lamina.tasks.kind import Kind
from lamina.tasks.labels import check_names, class_names
from lamina.tasks.presets import fetch, find_preset, published_files
from lamina.tasks.sampling import SampleSize, subsample_rows
from lamina.tasks.split import Split, held_out, limited

logger = logging.getLogger(__name__)
_SHOWN = 6  # labels in the print of a task
Source = str | Path | tuple[str | Path, str | Path] | list[str]  # of a part: a file or folder, or a pair of files


@dataclass(frozen=True)
class Task:
    """Labelled examples, and what is asked about them.

    Attributes:
        kind: The kind of task, which is equal to its name and prints as it: "sequence_classification",
            "token_classification", "masked_lm", "causal_lm", "summarization",
            "translation", "image_classification", "audio_classification", or another that is registered in
            `lamina.tasks.KINDS`.
        problem_type: "classification", "regression", "multi_label", or "generation" where texts are to be written.
        labels: Class names in the order of their ids; regression: the score's name; "masked_lm" and "causal_lm":
            ("token",); where texts are to be written: ("text",).
        metric: The metric that picks the best checkpoint; see `lamina.tasks.metrics.better`.
        metrics: All metrics that are reported.
        splits: "train", "validation" and perhaps "test".
        name: What the task is called in tables and files.
        image_size: Pixels of the width and height that images are brought to; None: as the image processor has it.
        subsampled: How the train part was drawn from a larger one, if it was, JSON-ready: "per_class", "fraction" or
            "rows" as asked, "of" how many rows, "stratified" and "seed"; "before" it an earlier subsample.
        by_row: Of "masked_lm" and "causal_lm": each row is read by itself; else rows are joined and cut into blocks.
        label_all_tokens: Of "token_classification": all sub-tokens of a word are learnt from, not the first alone.
    """

    kind: Kind
    problem_type: str
    labels: tuple[str, ...]
    metric: str
    metrics: tuple[str, ...]
    splits: Mapping[str, Split]
    name: str
    subsampled: dict[str, Any] | None = None
    by_row: bool = False
    label_all_tokens: bool = False
    image_size: int | None = None

    def __post_init__(self) -> None:
        """Look up the kind where its name was passed, raising `UnknownNameError` if no such kind is registered."""
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", kind_of(self.kind))

    def __repr__(self) -> str:
        """What is asked, and of how many rows."""
        rows = ", ".join(f"{name}: {len(split)}" for name, split in self.splits.items())
        labels = f"[{', '.join(self.labels[:_SHOWN])}{', ...' * (len(self.labels) > _SHOWN)}]"
        return (
            f"Task('{self.name}', {self.kind}, {len(self.labels)} labels {labels}, metric {self.metric}; rows: {rows})"
        )

    @property
    def pairs(self) -> bool:
        """Whether its examples are pairs of texts."""
        return any(split.pairs for split in self.splits.values())

    def split(self, name: str) -> Split:
        """One part; an UnknownNameError if the task has none of that name."""
        check_known(f"task {self.name}", [name], self.splits, "split")
        return self.splits[name]

    def subsample(
        self,
        *,
        per_class: int | None = None,
        fraction: float | None = None,
        rows: int | None = None,
        stratified: bool = False,
        seed: int = 0,
    ) -> Task:
        """The same task with fewer rows to learn from; a class that is left without one is named in a warning.

        Args:
            per_class: So many rows times the number of classes. Of token tasks whose tags mark spans the classes are
                the span types (four in CoNLL-2003), as the papers count them.
            fraction: This share of the rows.
            rows: So many rows.
            stratified: As many rows of each class (`per_class`), or the same share of each, where every row has one
                class; else rows are drawn uniformly, without replacement, as in the papers.
            seed: Which rows.

        Raises:
            UnknownNameError: If the task has no train part.
            ConfigError: Unless exactly one size is given, and there are that many rows; or if `stratified` is set
                where rows have several classes or none.
        """
        size, kind, train = SampleSize(per_class, fraction, rows), self.kind, self.split("train")
        if stratified and not kind.single_label(self.problem_type):
            came = f"stratified is set for a task of kind {self.kind} ({self.problem_type})"
            raise ConfigError(f"subsample: {came}; its rows have not one class each.")
        names, classes = kind.row_classes(self, train)
        chosen = subsample_rows(names, classes, size, stratified=stratified, seed=seed)
        for name in _without_rows(names, (classes[row] for row in chosen)):
            logger.warning("task %s: none of the %d rows drawn is of class '%s'", self.name, len(chosen), name)
        facts = {**size.given(), "of": len(train), "stratified": stratified, "seed": seed}
        if self.subsampled is not None:
            facts["before"] = self.subsampled
        return replace(self, splits={**self.splits, "train": train.select_rows(chosen)}, subsampled=facts)

    def masked_lm(self, *, rows: bool = False) -> Task:
        """The texts that are read (no blank ones) as a task of masked language modelling, "<name>-mlm".

        Args:
            rows: Hide tokens of each row by itself, a pair joined into one text in the tokenizer's own form for pairs;
                what is longer than the model reads loses its end. Else the texts, both of a pair, are joined one after
                the other and cut into blocks of the model's length.

        Raises:
            ConfigError: If the rows are images.
        """
        return self._of_running_text("masked_lm", "mlm", rows=rows)

    def causal_lm(self, *, rows: bool = False) -> Task:
        """The same as a task of causal language modelling, "<name>-clm"; of pairs in `rows` the second is a reply."""
        return self._of_running_text("causal_lm", "clm", rows=rows)

    def _of_running_text(self, kind: str, short: str, *, rows: bool) -> Task:
        if self.kind.processor != "tokenizer":
            raise ConfigError(f"task {self.name}: a task of kind {self.kind} has no texts; {kind} needs some.")
        task = _assemble(ColumnSpec(kind_of(kind), "text", "label"), {}, metrics=None, name=f"{self.name}-{short}")
        splits = {name: split.without_labels(rows=rows) for name, split in self.splits.items()}
        return replace(task, splits=splits, subsampled=self.subsampled, by_row=rows)

    def join_pairs(self, separator: str) -> Task:
        """The same task with each pair of texts as one text, `separator` between the two, in place of the model's form.

        To predict, join the texts in the same way.

        Raises:
            ConfigError: If the rows are no pairs, or the words or replies of the second text are what is learnt.
        """
        if not any(split.pairs for split in self.splits.values()):
            raise ConfigError(f"task {self.name}: its rows are no pairs of texts; there is nothing to join.")
        if self.kind.judges_second:
            came = f"a task of kind {self.kind} is about the second text of a pair"
            raise ConfigError(f"task {self.name}: {came}; leave its pairs as they are.")
        splits = {name: Split.of(map(separator.join, part.texts), part.labels) for name, part in self.splits.items()}
        return replace(self, splits=splits)

    def held_out(self, seed: int = 0, *, stratify: bool = True) -> Task:
        """Validate on a tenth of the training rows, drawn by `seed`; an old validation part tests if no part does.

        `stratify` keeps the share of each class, where rows have one each.
        """
        kind, whole, test = (
            self.kind,
            self.split("train"),
            self.splits.get("test", self.splits.get("validation")),
        )
        stratify = stratify and kind.single_label(self.problem_type)
        train, validation = held_out(whole, stratify=stratify, seed=seed, last=kind.sequential and not self.by_row)
        splits = {"train": train, "validation": validation, "test": test}
        return replace(self, splits={part: split for part, split in splits.items() if split is not None})

    def sized(self, image_size: int | None) -> Task:
        """The same task with images of so many pixels; a ConfigError if it has none, or the size is below 1."""
        if image_size is None:
            return self
        check_image_size(image_size, self.kind, f"task {self.name}")
        return replace(self, image_size=image_size)

    @classmethod
    def from_files(  # noqa: PLR0913
        cls,
        kind: str | Kind,
        *,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        text: str | int = "sentence",
        text_pair: str | int | None = None,
        label: str | int = "label",
        labels: Sequence[str] | None = None,
        metric: str | None = None,
        problem_type: str | None = None,
        missing_labels: str = "error",
        label_all_tokens: bool = False,
        name: str | None = None,
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
        image_size: int | None = None,
        by_row: bool = False,
        stratify: bool = True,
    ) -> Task:
        """Read a task from TSV, CSV, JSONL, Parquet, CoNLL-column or plain text files, or from images.

        Args:
            kind: What is asked; see `Task`.
            train: Rows to learn from: a file. Summaries and translations: perhaps a pair of text files whose lines go
                together. Images and sound: a folder (or a tar) with a folder per class, or a file of paths.
            validation: Rows to choose by; else a tenth of `train`, class by class; of running text in blocks the last.
            test: Rows that only `evaluate` looks at.
            text: Column of the text or of the list of words (default "sentence", or "text" where there is none of that
                name), or of images or sound (default "image", "audio"). In CoNLL files its number (default 0). In plain
                text every line that is not blank is a row. "translation.en" is what objects in column "translation"
                have under "en".
            text_pair: Column of the second text of sentence-pair tasks; of "causal_lm" that of replies to `text`; of
                "token_classification" that of texts whose spans are labelled, in the light of `text`.
            label: Column of the label, of the list of tags, or of the text to write; in CoNLL files a number (default
                the last). Of "token_classification" over plain texts, of the list of spans: texts, pairs of characters
                (from, before), or objects with "start", "end" and "label".
            labels: Class names in the order of their ids (one that no training row has is named in a warning); by
                default those of `train`, sorted. The files hold these names, or whole numbers that are the ids.
            metric: The metric that picks the best checkpoint; by default the usual one of the problem.
            problem_type: "classification", "regression" (labels with a decimal point) or "multi_label" (lists of
                labels); by default read off the labels, or what the kind says.
            missing_labels: What becomes of rows without a label (a cell that is empty, null, NaN, or a text such as
                "NA", "null" or "None" that is none of `labels`): "error", or "drop", with a warning that counts them;
                of rows with spans that are not in their text, "ignore" keeps them, without labels.
            label_all_tokens: Of "token_classification": learn from every sub-token of a word, with B- continued as I-,
                and not from its first alone. Words are scored by their first sub-token either way.
            name: What the task is called; by default the first file's name without its ending.
            limit: At most so many training rows, drawn uniformly.
            limit_validation: At most so many validation rows, drawn uniformly; the test part stays whole.
            seed: Decides which rows are set aside and which are drawn.
            image_size: Pixels of images' width and height; by default as the image processor has it. A model of another
                size interpolates its position embeddings, if it can.
            by_row: Of running text ("masked_lm", "causal_lm"): read each row by itself, not blocks of joined rows.
            stratify: Set rows aside class by class; else by `seed` alone, as other tasks over as many rows do.

        Raises:
            DataError: If a file, row, column or label does not fit; names it.
            UnknownNameError: If there is no such kind, problem type or metric.
            ConfigError: If a limit or `image_size` is below 1, a label is named twice, or a kind reads no pairs, has no
                tags, no images or no running text.
        """
        given = zip(PARTS, (train, validation, test), strict=True)
        sources = {part: source for part, source in given if source is not None}
        if not sources:
            raise DataError("task: no file was given; it needs `train`, `validation` or `test`.")
        classes = check_names(labels)
        spec = ColumnSpec(
            kind_of(str(kind)), text, label, text_pair, classes, problem_type, missing_labels, by_row, stratify
        )
        tables = {part: spec.kind.read(source, spec) for part, source in sources.items()}
        first = next(iter(sources.values()))
        name = name or Path(first if isinstance(first, str | Path) else first[0]).stem
        more: dict[str, Any] = {"limits": (limit, limit_validation), "label_all_tokens": label_all_tokens}
        return _assemble(spec, tables, metrics=metric, name=name, seed=seed, **more).sized(image_size)

    @classmethod
    def from_dataset(  # noqa: PLR0913
        cls,
        kind: str | Kind,
        dataset: Mapping[str, Any],
        *,
        text: str = "sentence",
        text_pair: str | None = None,
        label: str = "label",
        labels: Sequence[str] | None = None,
        metric: str | None = None,
        problem_type: str | None = None,
        missing_labels: str = "error",
        label_all_tokens: bool = False,
        name: str = "task",
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
        image_size: int | None = None,
        by_row: bool = False,
        stratify: bool = True,
    ) -> Task:
        """Make a task of data that is at hand; arguments and errors are those of `from_files`, but for these.

        `dataset` maps parts ("train", "validation", "test") to rows: a `datasets.DatasetDict`, or a mapping of
        `datasets.Dataset`s or of lists (or other iterables) of dicts. Images and sound stand in a column of
        `datasets.Image` or `datasets.Audio`, or in dicts as `predict` takes them; `text` is their column. `labels` are
        by default those that the column itself has, or those of "train", sorted.

        Raises:
            DataError: If a column is missing, or a cell or label does not fit; names the row.
            UnknownNameError: If there is no such kind, problem type, metric or part.
            ConfigError: If a limit or `image_size` is below 1, labels are named twice, a part holds no rows of a known
                form, or the rows are texts and have an `image_size`.
        """
        if not isinstance(dataset, Mapping):
            came = f"the dataset is {type(dataset).__name__}"
            raise ConfigError(f"task: {came}; it must map parts to rows, as in {{'train': ...}}.")
        check_known(f"task {name}", dataset, PARTS, "split")
        parts = {part: rows_of(part, rows, label) for part, rows in dataset.items()}
        if not parts:
            raise DataError("task: the dataset has no parts; it needs 'train', 'validation' or 'test'.")
        first = next(iter(parts.values()))
        if labels is None and kind_of(str(kind)).has_classes and not isinstance(first, Mapping):
            labels = class_names(first, label)
        classes = check_names(labels)
        spec = ColumnSpec(
            kind_of(str(kind)), text, label, text_pair, classes, problem_type, missing_labels, by_row, stratify
        )
        tables = {part: spec.kind.from_rows(f"{name}/{part}", rows, spec) for part, rows in parts.items()}
        more: dict[str, Any] = {"limits": (limit, limit_validation), "label_all_tokens": label_all_tokens}
        return _assemble(spec, tables, metrics=metric, name=name, seed=seed, **more).sized(image_size)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        files: str | Path | Mapping[str, Source] | None = None,
        label_all_tokens: bool = False,
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
        image_size: int | None = None,
    ) -> Task:
        """A known public task, from local files in the published format or from the hub.

        Args:
            name: "cola", "sst2", "mrpc", "rte", "stsb", "wnli", "qnli", "imdb", "conll2003", "wikiann", "wikitext2",
                "cnn_dailymail", "wmt16_en_ro", "cifar10", "cifar100" or "imagenet"; "glue/cola" is "cola", and
                "wikiann/de" is WikiAnn's German part (else English).
            files: Part ("train", "validation", "test") to file (or to what else `from_files` takes), or the folder
                with the published files; None fetches the set from the hub.
            label_all_tokens: As of `from_files`.
            limit: At most so many training rows, drawn uniformly.
            limit_validation: At most so many validation rows, drawn uniformly.
            seed: Decides which rows are drawn, and which are set aside where there is no validation part.
            image_size: Pixels of images' width and height; see `from_files`.

        Raises:
            UnknownNameError: If there is no such preset or part.
            DataError: If a file, row, column or label does not fit, or the hub cannot be reached.
            ConfigError: If a limit or `image_size` is below 1, or it is given for texts.
        """
        short, preset = find_preset(name)
        kind = kind_of(preset.kind)
        text, pair, label = (files is None and preset.hub_columns) or preset.columns
        spec = ColumnSpec(kind, text, label, pair, preset.labels or None, preset.problem_type)
        if files is None:
            parts = fetch(short, preset)
            spec = replace(spec, labels=preset.labels or class_names(next(iter(parts.values())), label))
            tables = {part: kind.from_rows(f"{preset.hub}/{part}", rows, spec) for part, rows in parts.items()}
        else:
            sources = files if isinstance(files, Mapping) else published_files(short, preset, Path(files))
            check_known(f"task {short}", sources, PARTS, "split")
            tables = {part: kind.read(source, spec, preset.header) for part, source in sources.items()}
        more: dict[str, Any] = {"limits": (limit, limit_validation), "label_all_tokens": label_all_tokens}
        return _assemble(spec, tables, metrics=preset.metrics, name=short, seed=seed, **more).sized(image_size)


def _assemble(
    spec: ColumnSpec,
    tables: Mapping[str, Table],
    *,
    metrics: str | tuple[str, ...] | None,
    name: str,
    limits: tuple[int | None, int | None] = (None, None),
    seed: int = 0,
    label_all_tokens: bool = False,
) -> Task:
    kind = spec.kind
    check_spec(spec)
    check_label_all_tokens(label_all_tokens, kind)
    named = bool(spec.labels)
    spec, splits = kind.build(spec, tables)
    labels, problem_type = spec.labels or (), spec.problem_type or "classification"
    if len(labels) == 1 and "train" in splits and kind.single_label(problem_type):
        raise DataError(f"task {name}: '{labels[0]}' is its only class; there must be another to tell it from.")
    if not isinstance(metrics, tuple):
        known, further, first = kind.metrics(problem_type, labels), kind.further_metrics(problem_type, labels), metrics
        known = (*known, *further) if first in further else known
        check_known(f"task {name}", [] if first is None else [first], (*known, *further), "metric")
        metrics = tuple(sorted(known, key=lambda name: name != first))
    ordered = {part: splits[part] for part in PARTS if part in splits}
    more: dict[str, Any] = {"label_all_tokens": label_all_tokens, "by_row": spec.by_row}
    task = Task(spec.kind, problem_type, labels, metrics[0], metrics, ordered, name, **more)
    if "train" in splits and "validation" not in splits:
        task = task.held_out(seed, stratify=spec.stratify)
    if "validation" in task.splits:
        validation = limited(task.split("validation"), limits[1], seed, option="limit_validation")
        task = replace(task, splits={**task.splits, "validation": validation})
    if "train" in splits and limited(train := task.split("train"), limits[0], seed) is not train:
        return task.subsample(rows=limits[0], seed=seed)
    if named and "train" in splits:
        for label in _without_rows(*kind.row_classes(task, task.split("train"))):
            logger.warning("task %s: no row of the train part is of class '%s', which nothing can learn", name, label)
    return task


def _without_rows(names: Sequence[str], classes: Iterable[Sequence[int]]) -> list[str]:
    """The classes that no row is of."""
    seen = set(chain.from_iterable(classes))
    return [name for number, name in enumerate(names) if number not in seen]


def rows_of(part: str, given: Any, label: str | int) -> Any:
    """One part as a data set, or (of dicts) as columns."""
    import datasets

    is_dataset = isinstance(given, datasets.Dataset)
    rows: Any = given if is_dataset else [None]
    if isinstance(given, Iterable) and not isinstance(given, datasets.Dataset | str | bytes | Mapping):
        rows = list(given)
    if not is_dataset and not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"task: part '{part}' is {type(given).__name__}; it must be a Dataset or a list of dicts.")
    if len(rows) == 0:
        raise DataError(f"task: part '{part}' is empty; it needs at least one row.")
    if is_dataset:
        return rows.with_format(None)
    names = dict.fromkeys(key for row in rows for key in row)
    return {key: [_plain(row.get(key), whole=key == label) for row in rows] for key in names}


def _plain(cell: Any, *, whole: bool) -> Any:
    """A number of NumPy or torch as one of Python; a `whole` array too, which else is an image or sound."""
    is_array = hasattr(cell, "dtype") and hasattr(cell, "tolist")
    return cell.tolist() if is_array and (whole or not getattr(cell, "ndim", 0)) else cell


def check_spec(spec: ColumnSpec) -> None:
    """Raise an error if a kind does not do what is asked of it, as far as that shows without the data."""
    kind, labels = spec.kind, spec.labels
    check_known("task", [spec.missing_labels], kind.missing, "missing_labels")
    if spec.problem_type is not None:
        check_known("task", [spec.problem_type], kind.problem_types, "problem type")
    if labels is not None and (not labels or len(set(labels)) < len(labels)):
        raise ConfigError(f"task: labels are {', '.join(labels) or 'none'}; every class has a name of its own.")
    if spec.by_row and not kind.sequential:
        raise ConfigError(f"task: by_row is set for a task of kind {spec.kind}; it is for running text.")
    if spec.text_pair is not None and not kind.reads_pairs:
        raise ConfigError(f"task: text_pair is '{spec.text_pair}'; a task of kind {spec.kind} reads one text a row.")
