"""The kind of task that asks one thing about a whole text or pair of texts: a class, a number, or several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from lamina.data.read import Table
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, TaskLike
from lamina.tasks.inputs import ClassKind
from lamina.tasks.metrics import RANKING
from lamina.tasks.split import Split

_CONFIG = {
    "classification": "single_label_classification",
    "regression": "regression",
    "multi_label": "multi_label_classification",
}


@final
class SequenceClassificationKind(ClassKind):
    """Classes, numbers or several labels of texts and pairs."""

    name = "sequence_classification"
    problem_types = {
        "classification": ("accuracy", "f1", "mcc", "macro_f1"),
        "regression": ("pearson", "spearman"),
        "multi_label": ("f1", "accuracy"),
    }
    auto_class = "AutoModelForSequenceClassification"
    reads_pairs = True

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Settle columns, problem type and classes, and make the examples."""
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        tables = lab.labelled(tables, spec)
        problem = spec.problem_type or lab.infer_problem_type(next(iter(tables.values())), spec)
        if problem == "regression":
            labels = spec.labels or (str(spec.label),)
        else:
            labels = spec.labels or lab.class_labels(tables, spec.label, several=problem == "multi_label")
        spec = replace(spec, problem_type=problem, labels=labels)
        return spec, {name: _split(table, spec) for name, table in tables.items()}

    def further_metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Of two classes how well scores tell them apart."""
        return RANKING if problem_type == "classification" and len(labels) == 2 else ()

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """A class per example, or the labels that are set."""
        if task.problem_type == "multi_label":
            rows = [tuple(number for number, is_set in enumerate(row) if is_set) for row in split.labels]
            return tuple(task.labels), rows
        return super().row_classes(task, split)

    def truncated(self, inputs: Any) -> int:
        """Texts whose end was cut off, or is only in further windows."""
        return inputs.encoded.truncated or int((inputs.encoded.window == 1).sum())

    def configure(self, config: Any, task: TaskLike) -> None:
        """Name the classes, and what the loss is."""
        super().configure(config, task)
        config.problem_type = _CONFIG[task.problem_type]

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Several labels are floats in transformers."""
        return labels.float() if task.problem_type == "multi_label" else labels


def _split(table: Table, spec: ColumnSpec) -> Split:
    texts: Any = lab.texts(table, spec.text)
    if spec.text_pair is not None:
        texts = zip(texts, lab.texts(table, spec.text_pair), strict=True)
    if spec.problem_type == "regression":
        return Split.of(texts, lab.numbers(table, spec.label))
    read = lab.multi_hot if spec.problem_type == "multi_label" else lab.class_ids
    return Split.of(texts, read(table, spec.label, spec.labels or ()))
