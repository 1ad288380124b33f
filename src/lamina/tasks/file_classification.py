"""Classify files, such as images or audio clips: find them in folders, tar files or tables, and read them lazily."""

from __future__ import annotations

import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import numpy as np
import pyarrow as pa

from lamina.data.arrow import Column, dataset_of, derived
from lamina.data.encode import encodable
from lamina.data.parquet import parquet_rows
from lamina.data.read import Table, read_table
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError, first_line
from lamina.heads.base import TaskLike
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, InputsT, LabelledTask, Source
from lamina.tasks.class_results import ClassResults
from lamina.tasks.kind import ClassKind
from lamina.tasks.lazy_file import FILE_KEYS, LazyFile, beside
from lamina.tasks.naming_checks import check_columns
from lamina.tasks.split import Split
from lamina.tasks.targets import RowTargets, label_array

if TYPE_CHECKING:
    import datasets

    from lamina.layers.types import Processor

logger = logging.getLogger(__name__)

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
_CELL = {
    "name": pa.string(),
    "path": pa.string(),
    "offset": pa.int64(),
    "size": pa.int64(),
    "data": pa.binary(),
    "rate": pa.int64(),
}  # the fields of a file in Arrow
_NAMES = ("text", "row")  # the columns from which a `Column` makes files
_BLOCK = 512  # bytes of a block of a tar file, which ends with blocks of zeros
_TAR_ERRORS = (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError, RecursionError)  # for damaged headers
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


# The parts of a file's name in a folder or tar file, and the file; None for links and special files.
Member: TypeAlias = tuple[tuple[str, ...], LazyFile | None]


# Columns of files


def file_column(files: Sequence[LazyFile], file_class: type[LazyFile]) -> Column:
    """Return a table column that holds `files`, all of class `file_class`, without opening them."""
    cells = [asdict(file) for file in files]
    table = {"text": pa.array(cells, pa.struct(_CELL)), "row": pa.array(range(len(cells)), pa.int64())}
    return Column(dataset_of([pa.table(table)]), _NAMES, partial(_from_cell, file_class))


def dataset_files(
    rows: datasets.Dataset, column: str, file_class: type[LazyFile], folder: Path | None = None
) -> Column:
    """Return the files in a column of the dataset `rows`, without decoding them.

    Relative paths start from `folder`; None: from the working directory. Raises DataError if there is no such column,
    its cells are no files of class `file_class`, or they are texts and another column has the type of such files.
    """
    import datasets

    feature = getattr(datasets, file_class.feature)
    known = [name for name, kind in rows.features.items() if isinstance(kind, feature) or _has_files(kind)]
    is_text = "string" in str(getattr(rows.features.get(column), "dtype", ""))
    if column in rows.features and not (is_text and known):  # among columns of files, a text is no path
        plain = rows.with_format(None).select_columns([column])
        if isinstance(rows.features[column], feature):
            plain = plain.cast_column(column, feature(decode=False))
        plain = plain if column == "text" else plain.rename_column(column, "text")
        plain = plain.add_column("row", range(1, len(rows) + 1))  # pyright: ignore[reportArgumentType]
        files = Column(derived(plain, rows), _NAMES, partial(_from_column, file_class, column, folder))
        with suppress(TypeError):  # all cells have one type
            next((file for file in files if file.path or file.data), None)
            return files
    got = f"has no {file_class.many} in" if column in rows.features else "has no"
    rule = f"its columns of {file_class.many} are: {', '.join(known) or 'none'}"
    raise DataError(f"{file_class.op}: the data set {got} column '{column}'; {rule}.", column=column)


def _has_files(feature: object) -> bool:
    return isinstance(feature, dict) and not feature.keys().isdisjoint(FILE_KEYS)


def object_files(
    table: Table, cells: Iterable[object], column: str, file_class: type[LazyFile], folder: Path | None
) -> Column:
    """Return the `cells` of a column, in forms that `LazyFile.of` accepts, as objects of `file_class`; none is opened.

    Relative paths in strings and mappings start from `folder`; None: the working directory, as always for a `Path`.
    Raises DataError, which names the `table` and the row, if a cell has none of the accepted forms or wrong values.
    """
    files: list[LazyFile] = []
    for row, cell in zip(table.rows, cells, strict=True):
        try:
            files.append(file_class.of(f"row {row} of column '{column}'", beside(folder, cell)))
        except TypeError as error:
            raise file_class.bad(table.path, f"cannot be read (row {row} {error}).") from error
    return file_column(files, file_class)


def file_split(files: Column, labels: Iterable[int] | None) -> Split:
    """Return the files of a column as a split, with `labels` as their class ids. None: a split without labels."""
    ids = pa.nulls(len(files)) if labels is None else pa.array(labels, pa.int64())
    rows = files.rows.add_column("label", ids)  # pyright: ignore[reportArgumentType]
    return Split(derived(rows, files.rows), files.decode)


def _from_cell(file_class: type[LazyFile], cell: Mapping[str, object], _row: int) -> LazyFile:
    return file_class(**{name: value for name, value in cell.items() if name in file_class.__dataclass_fields__})  # pyright: ignore[reportArgumentType]


def _from_column(file_class: type[LazyFile], column: str, folder: Path | None, cell: object, row: int) -> LazyFile:
    return file_class.of(f"row {row} of column '{column}'", beside(folder, cell))


# Folders and tar files


def read_class_files(path: str | Path, file_class: type[LazyFile]) -> Table:
    """Return the files in a folder or plain tar file with one subfolder per class, without opening them.

    The class of `airplane/0001.jpg` or `train/airplane/0001.jpg` is "airplane". Rows are sorted by path. Files with
    other extensions, hidden files, links, and files that a tar file has again later are left out, and their number is
    logged. Raises DataError if the path is missing or has no such files, a folder cannot be listed, a file lies outside
    all class folders, a class has two folders, a name is not UTF-8, or a tar file is damaged or compressed. The table
    has the files in the column `file_class.column`, and their classes in "label".
    """
    path = Path(path)
    if not (path.is_dir() or path.is_file()):
        raise file_class.bad(path, f"is not there; {file_class.many} are read from a folder or a tar file.")
    files: dict[tuple[str, ...], LazyFile] = {}
    ignored: Counter[str] = Counter()
    for parts, file in _in_folder(path, file_class) if path.is_dir() else _in_tar(path, file_class):
        if encodable(name := "/".join(parts)) != name:
            raise file_class.bad(path, f"has the file {name!r}, whose name is not UTF-8; rename it.")
        is_hidden = any(part.startswith(".") for part in parts)
        if file is None:
            ignored["links and special files, which are not followed"] += 1
        elif is_hidden or PurePosixPath(parts[-1]).suffix.lower() not in file_class.endings:
            ignored["other files"] += 1
        else:
            ignored["files that come again later"] += parts in files
            files[parts] = file
    names = sorted(files)
    counts = ", ".join(f"{count} {what}" for what, count in sorted((+ignored).items())) or "nothing"
    if not names:
        got = f"has no {file_class.many} (ignored: {counts}); they end in {', '.join(sorted(file_class.endings))}"
        raise file_class.bad(path, f"{got}. Put the {file_class.many} of each class into a folder named after it.")
    _check_classes(path, names, file_class)
    labels = [parts[-2] for parts in names]
    level = logging.WARNING if +ignored else logging.INFO
    message = "%s: %s has %d %s of %d classes; ignored: %s"
    logger.log(level, message, file_class.op, path, len(names), file_class.many, len(set(labels)), counts)
    columns = {file_class.column: file_column([files[parts] for parts in names], file_class), "label": labels}
    return Table(str(path), columns, range(1, len(names) + 1))


def _in_folder(root: Path, file_class: type[LazyFile]) -> Iterator[Member]:
    """Yield every file at any depth below the folder `root`: the parts of its path below `root`, and a `file_class`.

    For links, and anything else that is not a plain file, None takes the place of the `file_class`. Raises DataError if
    a folder cannot be listed.
    """

    def unreadable(error: OSError) -> None:
        raise file_class.bad(error.filename, f"cannot be listed ({error.strerror}); all class folders are read.")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for file in (Path(folder, name) for name in (*files, *links)):
            plain = file.is_file() and not file.is_symlink()
            yield file.relative_to(root).parts, file_class(str(file), str(file)) if plain else None


def _in_tar(path: Path, file_class: type[LazyFile]) -> Iterator[Member]:
    """Yield every file in the plain tar file `path`: the parts of its name, and a `file_class` that reads it in place.

    For links and special files, None takes the place of the `file_class`. Raises DataError if the tar file is
    compressed, damaged or cut off.
    """
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                if not member.isdir():
                    parts = tuple(part for part in PurePosixPath(member.name).parts if part != "/")
                    plain = member.isreg() and not member.issparse()  # the bytes of sparse files are not in one piece
                    file = file_class(f"{path}/{'/'.join(parts)}", str(path), member.offset_data, member.size)
                    yield parts or (".",), file if plain else None
            end = archive.offset
    except _TAR_ERRORS as error:
        raise _not_a_tar(path, error, file_class) from None
    with path.open("rb") as file:
        file.seek(end)
        if file.read(_BLOCK) != bytes(_BLOCK):  # tarfile takes a damaged header for the end of the file
            problem = f"is cut off or damaged after {end} bytes; a tar file ends with a block of zeros."
            raise file_class.bad(path, problem)


def _not_a_tar(path: Path, error: Exception, file_class: type[LazyFile]) -> DataError:
    """Return the DataError for `path`, a file that tarfile cannot read; it names the compression, or quotes `error`."""
    with path.open("rb") as file:
        start = file.read(8)
    packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
    if packed is not None:
        problem = f"is compressed with {packed}; {file_class.many} are read in place. Unpack it first."
        return file_class.bad(path, problem)
    rule = f"{file_class.many} are read from a folder or a plain tar file"
    return file_class.bad(path, f"is not a whole tar file ({first_line(error)}); {rule}.")


def _check_classes(source: Path, names: Sequence[tuple[str, ...]], file_class: type[LazyFile]) -> None:
    """Raise DataError if a file of the folder or tar file `source` has no class folder, or a class has two.

    `names` holds the parts of each file's path; the last folder is the class.
    """
    places: dict[str, str] = {}
    for *folders, name in names:
        if not folders:
            rule = f"the class of {file_class.one} is the name of its folder. Put each class into a folder"
            raise file_class.bad(source, f"has {name} outside all class folders; {rule}.")
        label, folder = folders[-1], "/".join(folders)
        first = places.setdefault(label, folder)
        if first != folder:
            problem = f"has the class folder '{label}' twice, as {first} and {folder}; a class has one folder."
            raise file_class.bad(source, f"{problem} Give the folder, or a tar file, of one part.")


# The kind


class FileKind(ClassKind[InputsT]):
    """Base class of kinds that predict a class for each file. A subclass implements `encode` and `length_limit`.

    It sets `file`, `name`, `auto_class`, `processor`, `inputs`, `predict_inputs` and `usual_columns`.
    """

    problem_types = {"classification": ("accuracy", "f1")}
    missing = (*ClassKind.missing, "mask")
    file: ClassVar[type[LazyFile]]  # pyright: ignore[reportIncompatibleVariableOverride]  never None here

    def read(self, source: Source, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """Return the table of a split; the files that it names are not opened.

        Raises DataError if `source` cannot be read, holds no files of the kind, or lacks their column; ConfigError if
        it is no path.

        Args:
            source: A folder or plain tar file with a folder per class; or a Parquet file; or a CSV, TSV or JSON Lines
                file with a column of paths. Relative paths start from the folder of that file; if only the working
                directory has the path, from there.
            spec: Which columns to read.
            header: Column names, if a CSV or TSV file has no header. None: it has one.
        """
        if not isinstance(source, str | Path):
            return super().read(source, spec, header)
        ending = Path(source).suffix.lower()
        column, folder = self.column(spec), Path(source).parent
        if ending == ".parquet":
            rows = parquet_rows(source)
            table, files = super().from_rows(str(source), rows, spec), dataset_files(rows, column, self.file, folder)
        elif ending in _TABLES and Path(source).is_file():
            table = read_table(source, header=header)
            files = object_files(table, table.column(column), column, self.file, folder)
        else:
            return read_class_files(source, self.file)
        return replace(table, columns={**table.columns, column: files})

    def from_rows(self, name: str, rows: datasets.Dataset | Mapping[str, list[object]], spec: ColumnSpec) -> Table:
        """Return a table of rows in memory, as `Kind.from_rows` does; the files that it names are not opened.

        Relative paths start from the working directory. Raises DataError if the column of files is missing, or a cell
        has none of the accepted forms.
        """
        table, column = super().from_rows(name, rows, spec), self.column(spec)
        if isinstance(rows, Mapping):
            files = object_files(table, table.cells(column), column, self.file, None)
        else:
            files = dataset_files(rows, column, self.file)
        return replace(table, columns={**table.columns, column: files})

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Make the examples of every split: files, which are not opened, with class ids (`IGNORED` without a label).

        See `Kind.build` for arguments, result and errors; ConfigError also if files and labels are one column.
        """
        column = self.column(spec)
        check_columns(replace(spec, text=column), tables.values())
        tables = lab.labelled(tables, spec)
        labels = spec.labels or lab.class_labels(tables, spec.label)
        has_known_ids = lab.has_known_ids(spec, labels)
        lab.warn_of_ids(tables, spec)
        splits: dict[str, Split] = {}
        for name, table in tables.items():
            # `Table.column` would open every file to see whether one is missing
            every = table.whole or table
            files = every.columns.get(column) or every.column(column)
            ids = lab.class_ids(table, spec.label, labels, has_known_ids=has_known_ids)
            splits[name] = file_split(cast("Column", files), lab.with_gaps(ids, table, lambda _: IGNORED))
        return replace(spec, text=column, problem_type="classification", labels=labels), splits

    def column(self, spec: ColumnSpec) -> str:
        """Return the column with the files: `spec.text`, or the kind's default if the user named none."""
        return self.file.column if spec.text == "sentence" else str(spec.text)

    def targets(self, task: LabelledTask, split: Split, inputs: InputsT) -> RowTargets:
        """Return the class id of every file of `split`, -100 for none; the other arguments are not used."""
        return RowTargets(label_array(split))

    def results(self, task: TaskLike, split: Split, inputs: InputsT) -> ClassResults:
        """Return an empty `ClassResults`, which collects the logits of every file of `split`."""
        return ClassResults(task, split, np.arange(len(split)))

    def examples(self, raw: Sequence[object], processor: Processor) -> Split:
        """Return the files `raw`, which a user passed to `predict`, as a split without labels.

        They are paths, bytes or objects in memory, and are not opened. Raises ConfigError if an example has none of the
        accepted forms, and DataError if an object in memory has wrong values; the message names it.
        """
        files: list[LazyFile] = []
        for row, entry in enumerate(raw):
            try:
                files.append(self.file.of(f"entry {row}", entry))
            except TypeError as error:
                raise ConfigError(f"predict: entry {row} {error}.") from error
        return file_split(file_column(files, self.file), None)
