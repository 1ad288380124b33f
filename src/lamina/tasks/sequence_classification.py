"""Classify whole texts or pairs of texts: one class, any number of classes, or a number."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, final

from torch import Tensor

from lamina.data.read import Table
from lamina.data.windows import IGNORED
from lamina.heads.base import TaskLike
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec
from lamina.tasks.kind import TextClassKind
from lamina.tasks.metrics import RANKING
from lamina.tasks.problem_type import infer_problem_type
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# problem types that have another name in transformers' configs
_CONFIG = {"classification": "single_label_classification", "multi_label": "multi_label_classification"}


@final
class SequenceClassificationKind(TextClassKind):
    """The kind of task that predicts a class, any number of classes, or a number for a whole text or pair of texts."""

    name = "sequence_classification"
    problem_types = {
        "classification": ("accuracy", "f1", "mcc", "macro_f1"),
        "regression": ("pearson", "spearman", "mae"),
        "multi_label": ("f1", "accuracy"),
    }
    auto_class = "AutoModelForSequenceClassification"
    reads_pairs = True
    missing = (*TextClassKind.missing, "mask")

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Make the examples of every split; the default column is "sentence", or "text" if no table has a "sentence".

        See `Kind.build` for arguments, result and errors.
        """
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        if spec.problem_type == "multi_label":
            lists = lab.as_lists(tables, spec)
            _tell_of_blanks({part: tables[part] for part in lists}, spec)
            tables = lists
        tables = lab.labelled(tables, spec)
        problem = spec.problem_type or infer_problem_type(next(iter(tables.values())), spec)
        if problem == "multi_label" != spec.problem_type:
            tables = lab.as_lists(tables, spec)
        if problem == "regression":
            labels = spec.labels or (str(spec.label),)
        else:
            labels = spec.labels or lab.class_labels(tables, spec.label, several=problem == "multi_label")
        has_known_ids = lab.has_known_ids(spec, labels)
        spec = replace(spec, problem_type=problem, labels=labels)
        is_hot = problem == "multi_label" and lab.hot_width(tables.values(), spec.label, labels) is not None
        if problem != "regression":
            lab.warn_of_ids(tables, spec, is_hot=is_hot)
        how = {"is_hot": is_hot, "has_known_ids": has_known_ids}
        return spec, {name: _split(table, spec, **how) for name, table in tables.items()}

    def further_metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the ranking metrics, such as "auroc", for classification with exactly two classes; else none."""
        return RANKING if problem_type == "classification" and len(labels) == 2 else ()

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Return the class names of a task, and a list with the class ids of each example; see `Kind.row_classes`."""
        if task.problem_type == "multi_label":
            rows = [tuple(number for number, is_set in enumerate(row) if is_set > 0) for row in split.labels]
            return tuple(task.labels), rows
        return super().row_classes(task, split)

    def configure(self, config: PreTrainedConfig, task: TaskLike) -> None:
        """Write class names (as `ClassKind.configure` does, with its errors) and problem type into a model's config."""
        super().configure(config, task)
        config.problem_type = _CONFIG.get(task.problem_type, task.problem_type)  # pyright: ignore[reportAttributeAccessIssue]

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Return a batch's labels in the dtype that transformers' losses expect: floats for multi-label tasks."""
        return labels.float() if task.problem_type == "multi_label" else labels


def _tell_of_blanks(tables: Mapping[str, Table], spec: ColumnSpec) -> None:
    """Log how many blank texts each table has in the label column, if `spec` leaves open whether labels are missing."""
    for table in tables.values() if spec.missing_labels is None else ():
        blank = sum(isinstance(cell, str) and not cell.strip() for cell in table.cells(spec.label))
        if blank:
            what = "%d of %d cells in column '%s' are empty, which is read as no class"
            hint = "Give missing_labels='drop' if these rows were not labelled"
            logger.info(f"task: %s: {what}. {hint}.", table.path, blank, len(table), spec.label)


def _split(table: Table, spec: ColumnSpec, *, is_hot: bool, has_known_ids: bool) -> Split:
    """Return the examples in a table: texts or pairs, with class ids, numbers, or 0 and 1 per class as labels.

    Rows without a label, which only `table.whole` has, get -100, NaN, or -1 per class. `spec` has the columns and the
    problem type. `is_hot` says that the lists in the label column are already 0 and 1 per class, and `has_known_ids`
    that cells may hold class ids. Raises DataError for a cell of another form.
    """
    every, classes = table.whole or table, spec.labels or ()
    texts = lab.texts(every, spec.text)
    pairs = texts if spec.text_pair is None else zip(texts, lab.texts(every, spec.text_pair), strict=True)
    if spec.problem_type == "regression":
        return Split.of(pairs, lab.with_gaps(lab.numbers(table, spec.label), table, lambda _: math.nan))
    if spec.problem_type == "multi_label":
        rows = lab.multi_hot(table, spec.label, classes, is_hot=is_hot, has_known_ids=has_known_ids)
        none = (-1,) * len(classes)
        return Split.of(pairs, lab.with_gaps(rows, table, lambda _: none))
    ids = lab.class_ids(table, spec.label, classes, has_known_ids=has_known_ids)
    return Split.of(pairs, lab.with_gaps(ids, table, lambda _: IGNORED))
