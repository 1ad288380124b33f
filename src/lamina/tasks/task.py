"""Tasks: read labelled examples from files, from rows in memory or from presets, and draw subsamples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamina.data.read import Table
from lamina.errors import ConfigError, DataError, check_known
from lamina.tasks import naming_checks
from lamina.tasks.annotator_marks import kept_table
from lamina.tasks.base import (
    PARTS,
    ColumnSpec,
    Kind,
    Source,
    check_image_size,
    check_label_all_tokens,
    kind_of,
    positive_name,
)
from lamina.tasks.labels import check_names, with_declared_names
from lamina.tasks.metrics import metrics_of, named_class
from lamina.tasks.presets import fetch, find_preset, published_files
from lamina.tasks.recorded_rows import ROW, RecordedTables, StatesSource, build_rows, recorded_of, recorded_tables
from lamina.tasks.rows_in_memory import rows_by_part
from lamina.tasks.split import Split, held_out, limited
from lamina.tasks.stratify import SampleSize, strata_of, subsample_rows
from lamina.utils import JSON, check_types

logger = logging.getLogger(__name__)
_COLUMNS = ("text", "label", "text_pair", "separator")  # what says how to read another file in the same way
_SHOWN = 6  # labels that the printed form of a task lists


@dataclass(frozen=True)
class Task:
    """Labelled examples, and the question about them: what to learn, predict and score.

    Attributes:
        kind: The kind of task. It compares equal to its name, and prints as its name: "sequence_classification",
            "token_classification", "masked_lm", "causal_lm", "summarization", "translation", "image_classification",
            "audio_classification", or another that is registered in `lamina.tasks.KINDS`.
        problem_type: "classification", "regression", "multi_label", or "generation" if texts are generated.
        labels: Class names in the order of their ids. A regression has the name of the score, "masked_lm" and
            "causal_lm" have ("token",), and kinds that generate texts ("text",).
        metric: The metric that picks the best checkpoint; see `lamina.tasks.metrics.better`.
        metrics: All metrics that are reported.
        positive: The class that "f1" and the recalls are about, if there are two. None: "1" beside "0", "yes" beside
            "no" or "true" beside "false"; otherwise neither.
        splits: Split name -> examples, for those of "train", "validation" and "test" that exist.
        name: Name of the task in tables and files.
        columns: The columns of the source: "text", "label", and perhaps "text_pair" and "separator". A reader remembers
            them, so that `evaluate` can score it on a file.
        missing_labels: What was done with rows without a label, as in `from_files`. None: the user chose nothing; if
            rows without a label were masked, `fit` then needs another task over the same rows.
        subsampled: How the train split was drawn from a larger one, JSON-ready: "per_class", "fraction" or "rows", "of"
            (rows of the larger split), "stratified" and "seed"; "before" describes an earlier subsample. None: the
            split is whole.
        by_row: For "masked_lm" and "causal_lm", whether each row is read alone. Otherwise rows are joined and cut into
            blocks.
        label_all_tokens: For "token_classification", whether all sub-tokens of a word are learnt, and not only the
            first.
        image_size: Width and height of images in pixels. None: the size that the image processor has.
    """

    kind: Kind
    problem_type: str
    labels: tuple[str, ...]
    metric: str
    metrics: tuple[str, ...]
    splits: Mapping[str, Split]
    name: str
    positive: str | None = None
    missing_labels: str | None = "mask"
    subsampled: dict[str, JSON] | None = None
    by_row: bool = False
    label_all_tokens: bool = False
    image_size: int | None = None
    columns: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Replace the name of a kind by the kind, and `positive` by the label that it names (`named_class`).

        Raises:
            UnknownNameError: If no such kind is registered, or there is no such class.
            ConfigError: If `positive` is set and rows do not have one of two classes, or it cannot name a class.
        """
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", kind_of(self.kind))
        if self.positive is not None:
            if len(self.labels) != 2 or not self.kind.single_label(self.problem_type):
                got = f"positive is '{self.positive}' for {len(self.labels)} labels ({self.problem_type})"
                raise ConfigError(f"task {self.name}: {got}; only one of two classes can be positive.")
            object.__setattr__(self, "positive", named_class(f"task {self.name}", self.positive, self.labels))

    def with_positive(self, positive: str | int) -> Task:
        """Return the same task with another positive class. "f1" is added after its metrics, if its kind has it.

        A number or bool names a label as `lamina.tasks.metrics.named_class` says.

        Raises:
            UnknownNameError: If there is no such class.
            ConfigError: If rows do not have one of two classes, or `positive` cannot be the name of a class.
        """
        known = self.kind.metrics(self.problem_type, self.labels)
        metrics = (*self.metrics, *(name for name in known if name == "f1" and name not in self.metrics))
        return replace(self, positive=named_class(f"task {self.name}", positive, self.labels), metrics=metrics)

    def __repr__(self) -> str:
        """Return name, kind, labels, metric and the number of rows of each split."""
        rows = ", ".join(f"{name}: {len(split)}" for name, split in self.splits.items())
        labels = f"[{', '.join(self.labels[:_SHOWN])}{', ...' * (len(self.labels) > _SHOWN)}]"
        facts = f"{len(self.labels)} labels {labels}, metric {self.metric}; rows: {rows}"
        return f"Task('{self.name}', {self.kind}, {facts})"

    @property
    def pairs(self) -> bool:
        """Whether each example is a pair of texts."""
        return any(split.pairs for split in self.splits.values())

    def split(self, name: str) -> Split:
        """Return the split of this name; raise UnknownNameError if the task has none."""
        check_known(f"task {self.name}", [name], self.splits, "split")
        return self.splits[name]

    @check_types("subsample")
    def subsample(
        self,
        *,
        per_class: int | None = None,
        fraction: float | None = None,
        rows: int | None = None,
        stratified: bool = False,
        seed: int = 0,
    ) -> Task:
        """Return the same task with fewer training rows, in the same order. A warning names classes without rows.

        Exactly one of `per_class`, `fraction` and `rows` must be passed.

        Args:
            per_class: Rows per class; the subsample has this number times the number of classes. For tags that mark
                spans, classes are the span labels (four in CoNLL-2003).
            fraction: Fraction of the rows, above 0 and at most 1.
            rows: Number of rows.
            stratified: Whether each class gets the same number of rows (with `per_class`), or the same fraction of its
                rows; rows without a label are then left out. By default rows are drawn uniformly without replacement.
            seed: Seed of the choice.

        Raises:
            UnknownNameError: If the task has no train split.
            ConfigError: If there are not enough rows, no size, several sizes or one out of range are passed,
                `per_class` is passed and the task has no classes, or `stratified` is set and rows do not have exactly
                one class.
        """
        size, kind, train = SampleSize(per_class, fraction, rows), self.kind, self.split("train")
        if stratified and not kind.single_label(self.problem_type):
            got = f"stratified is set for a task of kind {self.kind} ({self.problem_type})"
            raise ConfigError(f"subsample: {got}; its rows do not have exactly one class each.")
        names, classes = kind.row_classes(self, train)
        chosen = subsample_rows(names, classes, size, stratified=stratified, seed=seed)
        for name in naming_checks.classes_without_rows(names, (classes[row] for row in chosen)):
            logger.warning("task %s: none of the %d rows drawn is of class '%s'", self.name, len(chosen), name)
        facts: dict[str, JSON] = {**size.chosen(), "of": len(train), "stratified": stratified, "seed": seed}
        if self.subsampled is not None:
            facts["before"] = self.subsampled
        return replace(self, splits={**self.splits, "train": train.select_rows(chosen)}, subsampled=facts)

    @check_types("masked_lm")
    def masked_lm(self, *, rows: bool = False) -> Task:
        """Return a task of masked language modelling over the same texts, with the name "<name>-mlm".

        Blank texts are left out.

        Args:
            rows: Whether each row is read alone. Pairs are then joined by the tokenizer, and a row that is too long for
                the model is truncated. By default all texts are joined and cut into blocks of the model's maximum
                length.

        Raises:
            ConfigError: If the examples are not texts.
        """
        return self._of_running_text("masked_lm", "mlm", rows=rows)

    @check_types("causal_lm")
    def causal_lm(self, *, rows: bool = False) -> Task:
        """Return a task of causal language modelling over the same texts, with the name "<name>-clm".

        Blank texts are left out.

        Args:
            rows: Whether each row is read alone; of a pair, only the second text, the reply, is then learnt. By default
                all texts are joined and cut into blocks of the model's maximum length.

        Raises:
            ConfigError: If the examples are not texts.
        """
        return self._of_running_text("causal_lm", "clm", rows=rows)

    def _of_running_text(self, kind: str, short: str, *, rows: bool) -> Task:
        """Return a language modelling task over the same texts, named "<name>-<short>"; see `masked_lm` for `rows`.

        `kind` is the name of its kind. Raises ConfigError if the task has no texts.
        """
        has_states = any(map(recorded_of, self.splits.values()))
        if has_states or self.kind.processor != "tokenizer":
            what = "over recorded states" if has_states else f"of kind {self.kind}"
            raise ConfigError(f"task {self.name}: a task {what} has no texts; {kind} needs some.")
        task = _assemble(ColumnSpec(kind_of(kind), "text", "label"), {}, None, f"{self.name}-{short}")
        splits = {name: split.without_labels(rows=rows) for name, split in self.splits.items()}
        return replace(task, splits=splits, subsampled=self.subsampled, by_row=rows, columns=self.columns)

    @check_types("join_pairs")
    def join_pairs(self, separator: str) -> Task:
        """Return the same task with each pair of texts joined into one text, with `separator` between the two.

        To predict, join the texts with the same separator.

        Raises:
            ConfigError: If the examples are not pairs, or the kind learns words or replies of the second text.
        """
        if not any(split.pairs for split in self.splits.values()):
            raise ConfigError(f"task {self.name}: its rows are not pairs of texts; there is nothing to join.")
        if self.kind.judges_second:
            got = f"a task of kind {self.kind} is about the second text of a pair"
            raise ConfigError(f"task {self.name}: {got}; leave its pairs as they are.")
        splits: dict[str, Split] = {}
        for name, part in self.splits.items():
            joined = Split.of(map(separator.join, part.texts), part.labels).with_strata(part.strata)
            joined.origin = part.origin
            splits[name] = joined
        return replace(self, splits=splits)

    @check_types("held_out")
    def held_out(self, seed: int = 0, *, stratify: bool = True) -> Task:
        """Return the same task with a tenth of the training rows as its validation split.

        The previous validation split becomes the test split if the task has none; else it is dropped. Tasks over one
        file hold out the same rows, and no class loses its last training row, so that fewer may be held out.

        Args:
            seed: Seed of the choice. For running text in blocks, the last tenth is held out instead.
            stratify: Whether to keep the share of each class, in all label columns of the file.

        Raises:
            UnknownNameError: If the task has no train split.
            DataError: If the train split has fewer than two rows, or every row is the only one of a class.
        """
        if (task := self._cut(seed, stratify)) is None:
            raise DataError(f"task {self.name}: {naming_checks.NOTHING_SPARE}")
        test = self.splits.get("test", self.splits.get("validation"))
        return task if test is None else replace(task, splits={**task.splits, "test": test})

    def _cut(self, seed: int, stratify: bool) -> Task | None:
        """Return the task with about a tenth of the training rows as its validation split; None if no row can be moved.

        There are fewer such rows where a class would lose its last training row. For running text in blocks they are
        the last ones. `stratify` has no effect if rows do not have one class and the file's label columns are unknown.
        Raises UnknownNameError without a train split, and DataError if that has fewer than two rows.
        """
        kind, whole = self.kind, self.split("train")
        stratify = stratify and (whole.strata is not None or kind.single_label(self.problem_type))
        _, classes = kind.row_classes(self, whole)
        last = kind.sequential and not self.by_row
        train, validation = held_out(whole, stratify=stratify, seed=seed, last=last, classes=classes)
        splits = {**self.splits, "train": train, "validation": validation}
        return replace(self, splits={part: splits[part] for part in PARTS if part in splits}) if validation else None

    def without_test(self) -> Task:
        """Return the same task without its test split, for training that does not use it."""
        return replace(self, splits={part: split for part, split in self.splits.items() if part != "test"})

    def sized(self, image_size: int | None) -> Task:
        """Return the same task with another `image_size`; None leaves it unchanged.

        Raises ConfigError if the task has no images, or the size is below 1.
        """
        if image_size is None:
            return self
        check_image_size(image_size, self.kind, f"task {self.name}")
        return replace(self, image_size=image_size)

    @classmethod
    @check_types("task")
    def from_files(  # noqa: PLR0913
        cls,
        kind: str | Kind,
        *,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        text: str | int = "sentence",
        inputs: str | int | None = None,
        text_pair: str | int | None = None,
        label: str | int = "label",
        labels: Sequence[str] | None = None,
        metric: str | None = None,
        positive: str | int | None = None,
        problem_type: str | None = None,
        missing_labels: str | None = None,
        label_all_tokens: bool = False,
        name: str | None = None,
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
        image_size: int | None = None,
        by_row: bool = False,
        stratify: bool = True,
        separator: str | None = None,
    ) -> Task:
        """Read a task from TSV, CSV, JSONL, Parquet, CoNLL or plain text files, or from images or audio clips.

        Args:
            kind: The kind of task; see `Task`.
            train: File of the train split. Summarization and translation also read a pair of text files whose lines
                belong together. Images and audio are read from a folder (or tar file) with a folder per class, or from
                a table with a column of paths. None: there is no such split.
            validation: File of the validation split, which picks the best checkpoint. None: a tenth of `train`, drawn
                so that every class of every column that looks like labels keeps its share. All tasks over the file get
                the same tenth, and every class keeps a training row; if no row can be spared, there is no validation
                split, and a warning is logged. For running text in blocks it is the last tenth.
            test: File of the test split, for `evaluate` and for `fit` with `test=True`. None: there is no such split.
            text: Column of the text or of the list of words (default "sentence", or "text" if there is no "sentence"),
                of chats (default "messages"), or of images or audio (default "image", "audio"). In CoNLL files its
                number (default 0). In plain text files every line that is not blank is a row. "translation.en" is the
                value under "en" of the objects in column "translation".
            inputs: Column of the inputs, whatever they are: texts, images or audio. The same as `text`; give one.
            text_pair: Column of the second text of a pair. For "causal_lm" it has the replies to `text`; for
                "token_classification" the texts whose spans are labelled, while `text` is their context.
            label: Column of the label, of the list of tags, or of the text to generate (default "label"; "target" if
                there is none); in CoNLL files a number (default: the last column). For "token_classification" over
                plain texts it has lists of spans: a span is a text, a pair of offsets (of its first character, and
                after its last one), or an object with "start", "end" and "label".
            labels: Class names in the order of their ids. None: the names that the file declares for its column, or
                else the names in `train`, sorted. Label cells hold these names. If the names are not from the cells of
                `train`, or are like "no" and "yes", cells may also hold the ids as whole numbers, unless a name is a
                number. A warning names a class that no training row has.
            metric: The metric that picks the best checkpoint. None: the default of the problem type.
            positive: The class that "f1" and the recalls are about, if there are two. None: "1", "yes" or "true" if the
                other one is "0", "no" or "false"; otherwise neither, and these metrics are not reported.
            problem_type: "classification", "regression" (labels with a decimal point) or "multi_label" (lists of
                labels, texts that spell lists, or lists of 0 and 1 per class). None: inferred from the labels, or fixed
                by the kind.
            missing_labels: What to do with rows without a label: a cell that is empty, null, NaN, or a text such as
                "NA", "null" or "None" that is not among `labels`. "error" raises DataError. "drop" leaves them out.
                "mask" keeps them for other tasks over the same rows, without loss and score for this one. The last two
                count them in a warning. "ignore", for spans, is like "error", but rows with a span that is not in their
                text, shares a word with another, contains no word or has several labels are kept without labels. None:
                "mask" if another column of the file looks like labels and `fit` gets a task over the same rows, else
                "error". With None, rows that an annotator rejected, skipped or did not finish (Prodigy, Label Studio)
                are left out, and an empty text is no class under the problem type "multi_label".
            label_all_tokens: For "token_classification", whether to learn every sub-token of a word (B- is continued as
                I-), and not only the first. Words are scored by their first sub-token in either case.
            name: Name of the task. None: the name of the first file, without its ending.
            limit: Maximum number of training rows, drawn uniformly. None: all.
            limit_validation: Maximum number of validation rows, drawn uniformly. None: all. The test split stays whole.
            seed: Seed of the rows that are held out or drawn.
            image_size: Width and height of images in pixels. None: the image processor's size. A model of another size
                interpolates its position embeddings, if it can.
            by_row: For running text ("masked_lm", "causal_lm"), whether to read each row alone, not joined rows.
            stratify: Whether validation rows are held out class by class. Otherwise they depend on `seed` and the
                number of rows alone.
            separator: The sign between the class names in one text, for "multi_label". None: the sign among `,` `;` `|`
                that occurs in the column.

        Raises:
            DataError: If no file is passed, a file, row, column or label does not fit (the message names it), there is
                only one class, or `train` has a single row and there is no `validation`.
            UnknownNameError: If there is no such kind, problem type, metric, positive class or `missing_labels`.
            ConfigError: If a limit or `image_size` is below 1, a label is named twice, text and label are one column,
                or an option does not fit the kind or the classes, such as `positive` without two classes.
            MissingExtraError: If the kind or a clip needs a package that is not installed.
        """
        kind = kind if isinstance(kind, Kind) else kind_of(str(kind))
        by_part = zip(PARTS, (train, validation, test), strict=True)
        sources = {part: source for part, source in by_part if source is not None}
        if not sources:
            raise DataError("task: no file was given; it needs `train`, `validation` or `test`.")
        classes, flagged = check_names(labels), positive_name(positive)
        how = (text_pair, classes, problem_type, missing_labels, by_row, stratify, separator, True, flagged)
        spec = ColumnSpec(kind, naming_checks.input_column(text, inputs), label, *how)
        tables = {part: spec.kind.read(source, spec) for part, source in sources.items()}
        first = next(iter(sources.values()))
        name = name or Path(first if isinstance(first, str | Path) else first[0]).stem
        limits = (limit, limit_validation)
        return _assemble(spec, tables, metric, name, limits, seed, label_all_tokens).sized(image_size)

    @classmethod
    @check_types("task")
    def from_dataset(  # noqa: PLR0913
        cls,
        kind: str | Kind,
        dataset: Mapping[str, object],
        *,
        text: str = "sentence",
        inputs: str | None = None,
        text_pair: str | None = None,
        label: str = "label",
        labels: Sequence[str] | None = None,
        metric: str | None = None,
        positive: str | int | None = None,
        problem_type: str | None = None,
        missing_labels: str | None = None,
        label_all_tokens: bool = False,
        parts: Mapping[str, str] | None = None,
        name: str = "task",
        limit: int | None = None,
        limit_validation: int | None = None,
        seed: int = 0,
        image_size: int | None = None,
        by_row: bool = False,
        stratify: bool = True,
        separator: str | None = None,
    ) -> Task:
        """Make a task of rows in memory. Options that are not described here are those of `from_files`.

        `dataset` maps splits to rows: a `datasets.DatasetDict`, or a mapping of `datasets.Dataset`s or of lists (or
        other iterables) of dicts. `parts` says which of its splits are "train", "validation" and "test", as in
        `{"train": "train", "validation": "validation_matched"}`; the others are not read. By default the splits must
        have these three names. A split of another name that has no labels (as "unsupervised" in IMDB) is left out with
        a warning. Images and audio are in a column of `datasets.Image` or `datasets.Audio`, or in dicts in the forms
        that `predict` accepts; `inputs` is their column. `labels` are by default those that the dataset has for its
        column, otherwise those of "train", sorted.

        Raises:
            DataError: If there are no splits, or one is empty, and as in `from_files`.
            UnknownNameError: If a labelled split or `parts` has an unknown name, and as in `from_files`.
            ConfigError: If a split is neither a dataset nor a list of dicts or has a transform, and as in `from_files`.
            MissingExtraError: As in `from_files`.
        """
        kind = kind if isinstance(kind, Kind) else kind_of(str(kind))
        splits = rows_by_part(name, dataset, parts, label)
        if not splits:
            raise DataError("task: the dataset has no splits; it needs 'train', 'validation' or 'test'.")
        classes, flagged = check_names(labels), positive_name(positive)
        how = (text_pair, classes, problem_type, missing_labels, by_row, stratify, separator, True, flagged)
        spec = ColumnSpec(kind, naming_checks.input_column(text, inputs), label, *how)
        tables = {part: spec.kind.from_rows(f"{name}/{part}", rows, spec) for part, rows in splits.items()}
        limits = (limit, limit_validation)
        return _assemble(spec, tables, metric, name, limits, seed, label_all_tokens).sized(image_size)

    @classmethod
    def from_states(
        cls,
        kind: str | Kind,
        *,
        train: StatesSource | None = None,
        validation: StatesSource | None = None,
        test: StatesSource | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Task:
        """Make a task from recorded hidden states, so that readers can be trained without running the model.

        `train`, `validation` and `test` are each a folder with `states.json` (see `lamina extract`), or None for no
        such split; validation rows are then taken from `train`. The table that `states.json` names has the labels. If
        they are elsewhere, give a tuple (folder, table): the table is a file, or a list of dicts, with a row for each
        row of states. For "token_classification", `label` has lists with a tag per token, -100 for none. `options` are
        `label`, `labels`, `metric`, `positive`, `name` (default: the first folder's), `problem_type`, `missing_labels`,
        `limit`, `limit_validation`, `seed` and `stratify`, as in `from_files`.

        Raises:
            DataError: If no split is given, a file does not have the shape of its manifest, or a table is missing or
                does not fit the states, or a label does not fit.
            StoreError: If a folder has no manifest, or the manifest contradicts itself.
            UnknownNameError: If there is no such option, and as in `from_files`.
            ConfigError: If tasks of the kind need more than states; if splits have states of several models, or of
                texts that were read in different ways; and as in `from_files`.
        """
        kind = kind_of(kind) if isinstance(kind, str) else kind
        tables, get = recorded_tables(kind, (train, validation, test), options), options.get
        name = get("name") or next(iter(tables.states.values())).folder.name
        limits = get("limit"), get("limit_validation")
        return _assemble(tables.spec, tables, get("metric"), name, limits, get("seed", 0))

    @classmethod
    @check_types("task")
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
        """Return a public task, from local files in the published format or from the hub.

        Args:
            name: "cola", "sst2", "mrpc", "rte", "stsb", "wnli", "qnli", "imdb", "conll2003", "wikiann", "wikitext2",
                "cnn_dailymail", "wmt16_en_ro", "cifar10", "cifar100" or "imagenet". "glue/cola" is the same as "cola",
                and "wikiann/de" is WikiAnn in German ("wikiann": in English).
            files: The folder with the published files; or a mapping of splits ("train", "validation", "test") to files,
                in any form that `from_files` reads. None: the dataset is downloaded from the hub.
            label_all_tokens: As in `from_files`.
            limit: Maximum number of training rows, drawn uniformly. None: all.
            limit_validation: Maximum number of validation rows, drawn uniformly. None: all.
            seed: Seed of the rows that are drawn, or held out if there is no validation split.
            image_size: Width and height of images in pixels; see `from_files`.

        Raises:
            UnknownNameError: If there is no such preset or split.
            DataError: If a file, row, column or label does not fit, or the hub cannot be reached.
            ConfigError: If a limit or `image_size` is below 1, the language is no code, or an option does not fit.
            MissingExtraError: If images need Pillow, which is not installed.
        """
        short, preset = find_preset(name)
        kind = kind_of(preset.kind)
        text, pair, label = (files is None and preset.hub_columns) or preset.columns
        spec = ColumnSpec(kind, text, label, pair, preset.labels or None, preset.problem_type, positive=preset.positive)
        if files is None:
            parts = fetch(short, preset)
            tables = {part: kind.from_rows(f"{preset.hub}/{part}", rows, spec) for part, rows in parts.items()}
        else:
            sources = files if isinstance(files, Mapping) else published_files(short, preset, Path(files))
            check_known(f"task {short}", sources, PARTS, "split")
            tables = {part: kind.read(source, spec, preset.header) for part, source in sources.items()}
        limits = (limit, limit_validation)
        return _assemble(spec, tables, preset.metrics, short, limits, seed, label_all_tokens).sized(image_size)


def _assemble(
    spec: ColumnSpec,
    tables: Mapping[str, Table],
    metrics: str | tuple[str, ...] | None,
    name: str,
    limits: tuple[int | None, int | None] = (None, None),
    seed: int = 0,
    label_all_tokens: bool = False,
) -> Task:
    """Return a task over the tables of its splits; if there is no validation split, it is cut from the train split.

    If no row can be spared for it, there is none, and a warning is logged.

    `spec` says which columns to read. `metrics` is the metric that the user has named, or None; or the tuple of a
    preset's metrics, which replaces the kind's. `limits` are the maximum numbers of training and of validation rows;
    the other options are those of `Task.from_files`.

    Raises:
        DataError: If a cell does not fit, there is only one class, or a train split to be cut has a single row.
        ConfigError: If an option does not fit the kind or the classes.
        UnknownNameError: If a metric, problem type, positive class or value of `missing_labels` is unknown.
    """
    kind = spec.kind
    spec = with_declared_names(spec, tables)
    naming_checks.check_spec(spec)
    check_label_all_tokens(label_all_tokens, kind)
    # columns of files have other defaults, so they are checked once these are known
    naming_checks.check_columns(spec, tables.values() if kind.file is None else ())
    named = bool(spec.labels)
    spec, splits = build_rows(spec, tables) if isinstance(tables, RecordedTables) else kind.build(spec, tables)
    naming_checks.check_columns(spec, tables.values())  # now with the kind's defaults
    labels, problem_type = spec.labels or (), spec.problem_type or "classification"
    is_one_class = kind.single_label(problem_type) or (kind.tags_words and not named)
    if len(labels) == 1 and "train" in splits and is_one_class:
        hint = "" if named else f" Classes are read from column '{spec.label}'; label= names another."
        raise DataError(f"task {name}: '{labels[0]}' is its only class; a task needs at least two classes.{hint}")
    if not named:
        naming_checks.warn_of_cases(name, labels)
    if not isinstance(metrics, tuple):
        metrics = metrics_of(kind, problem_type, labels, metrics, spec.positive, f"task {name}")
    train = splits.get("train") if spec.all_columns else None
    if train is not None and (table := kept_table(tables["train"], spec, len(train))) is not None:
        texts = {ROW, *(str(column) for column in (spec.text, spec.text_pair))}
        splits["train"] = train.with_strata(strata_of(table, texts, spec.label))
    ordered = {part: splits[part] for part in PARTS if part in splits}
    task = Task(
        spec.kind,
        problem_type,
        labels,
        metrics[0],
        metrics,
        ordered,
        name,
        positive=spec.positive,
        missing_labels=spec.missing_labels,
        by_row=spec.by_row,
        label_all_tokens=label_all_tokens,
        columns={key: value for key in _COLUMNS if (value := getattr(spec, key)) is not None},
    )
    if "train" in splits and "validation" not in splits:
        if (cut := task._cut(seed, spec.stratify)) is None:
            logger.warning("task %s: %s", name, naming_checks.NOTHING_SPARE)
        task = cut or task
    if "validation" in task.splits:
        validation = limited(task.split("validation"), limits[1], seed, option="limit_validation")
        task = replace(task, splits={**task.splits, "validation": validation})
    if "train" in splits and limited(train := task.split("train"), limits[0], seed) is not train:
        return task.subsample(rows=limits[0], seed=seed)
    is_checked = named and "train" in splits  # a name that was read from the column occurs in it
    absent = naming_checks.classes_without_rows(*kind.row_classes(task, task.split("train"))) if is_checked else []
    for label in absent:
        logger.warning("task %s: no row of the train split has class '%s', which cannot be learnt", name, label)
    return task
