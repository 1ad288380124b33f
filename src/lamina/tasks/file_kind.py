"""What kinds of task share that ask for the class of a file: of an image, of a clip of sound."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lamina.data.read import Table, parquet_rows, read_table
from lamina.errors import ConfigError
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, Inputs, TaskLike, cells_of
from lamina.tasks.class_files import LazyFile, dataset_files, file_column, file_split, object_files, read_class_files
from lamina.tasks.inputs import ClassKind, ClassResults, RowTargets, label_array
from lamina.tasks.split import Split

if TYPE_CHECKING:
    import datasets

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")


class FileKind(ClassKind):
    """A class for every file."""

    problem_types = {"classification": ("accuracy", "f1")}
    file: ClassVar[type[LazyFile]]  # pyright: ignore[reportIncompatibleVariableOverride]  here there always is one

    def read(self, source: Any, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """A folder with a folder per class, a plain tar file of one, or a Parquet file.

        Or a CSV, TSV or JSONL file with a column of paths, which are relative to its own folder.
        """
        if not isinstance(source, str | Path):
            return super().read(source, spec, header)
        if Path(source).suffix == ".parquet":
            rows = parquet_rows(source, self.column(spec), self.file.feature)
            return self.from_rows(str(source), rows, spec)
        if Path(source).suffix in _TABLES and Path(source).is_file():
            table, column = read_table(source, header=header), self.column(spec)
            files = object_files(str(source), table.column(column), column, self.file, Path(source).parent)
            return replace(table, columns={**table.columns, column: files})
        return read_class_files(source, self.file)

    def from_rows(self, name: str, rows: datasets.Dataset | Mapping[str, list[Any]], spec: ColumnSpec) -> Table:
        """The columns of files, none of which is opened, and of labels."""
        column = self.column(spec)
        if isinstance(rows, Mapping):
            table = Table(name, dict(rows), range(1, len(next(iter(rows.values()), ())) + 1))
            files = object_files(name, table.cells(column), column, self.file, None)
            return replace(table, columns={**table.columns, column: files})
        columns: dict[str, Any] = {column: dataset_files(rows, column, self.file)}
        columns |= {label: cells_of(rows, label, spec) for label in rows.column_names if label == spec.label}
        return Table(name, columns, range(1, len(rows) + 1))

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Settle the classes, and make the examples."""
        tables = lab.labelled(tables, spec)
        labels, column = spec.labels or lab.class_labels(tables, spec.label), self.column(spec)
        splits: dict[str, Split] = {}
        for name, table in tables.items():
            files: Any = table.columns.get(column) or table.column(column)  # none of which is opened
            splits[name] = file_split(files, lab.class_ids(table, spec.label, labels))
        return replace(spec, text=column, problem_type="classification", labels=labels), splits

    def column(self, spec: ColumnSpec) -> str:
        """The column of the files: the usual one, where none is named."""
        return self.file.column if spec.text == "sentence" else str(spec.text)

    @abstractmethod
    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> Inputs:
        """Pixels or sound."""

    def targets(self, task: TaskLike, split: Split, inputs: Any) -> RowTargets:
        """A file's class."""
        return RowTargets(label_array(split))

    def results(self, task: TaskLike, split: Split, inputs: Any) -> ClassResults:
        """Logits of each file."""
        return ClassResults(task, split, np.arange(len(split)))

    def examples(self, raw: Sequence[Any], processor: Any) -> Split:
        """Files by their paths, as the bytes of their files, or as objects at hand."""
        files: list[LazyFile] = []
        for row, entry in enumerate(raw):
            try:
                files.append(self.file.of(f"entry {row}", entry))
            except TypeError as error:
                raise ConfigError(f"predict: entry {row} {error}.") from error
        return file_split(file_column(files, self.file), None)
