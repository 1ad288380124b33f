"""Options that several commands share, and what they print: tables on a terminal, JSON, and progress."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from contextlib import suppress
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar, final

from typer import Argument, Option

from lamina.errors import ConfigError, StoreError, convert_errors, first_line
from lamina.utils import is_dir, is_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank

Number = TypeVar("Number", int, float)

_SAVED = "Folder or hub id of a saved bank, or of a whole model that Lamina fine-tuned or saved."
_BASE = "Folder or hub id of the bank's base model. Default: the model that the bank names."
_DEVICE = 'Device to run on, such as "cpu" or "cuda". "auto" uses a GPU if there is one.'
_DATA = (
    "Folder of the data files, with a subfolder per preset (known public data set). "
    "Default: files are relative to the current folder, and presets are loaded from the hub."
)
_TEXT = (
    "Column of texts, images or audio in a file. "
    'Default: the only one, the one that the readers learnt from, or a usual name ("sentence", "text").'
)
_RAY = "Run cells in parallel as Ray tasks: on this machine (local), on the running cluster (auto) or at HOST:PORT."

_OVERWRITE = "Replace the results that are in the output folder. Default: a folder that is not empty is refused."
_READERS = "Names of the readers, such as a,b; may be repeated. Default: all."
_BACKEND = (
    "torch: PyTorch. onnx: ONNX Runtime on a CPU; the bank is exported on first use, into its folder. int8: the export "
    "that `lamina export --int8` wrote there. auto: ONNX Runtime on a CPU if an onnx export is there, else PyTorch."
)


class Backend(StrEnum):
    """The engine that computes a bank's answers."""

    AUTO = "auto"
    TORCH = "torch"
    ONNX = "onnx"
    INT8 = "int8"


SavedArgument = Annotated[str, Argument(metavar="BANK|MODEL", help=_SAVED)]
ModelArgument = Annotated[str, Argument(metavar="MODEL", help='Folder or hub id of a model, or "minilm".')]
DataOption = Annotated[Path | None, Option(help=_DATA)]
TextOption = Annotated[str | None, Option("--text", "--inputs", help=_TEXT)]
PairOption = Annotated[
    str | None, Option(help="Column of the second text of a pair. Default: as the readers learnt, else none.")
]
ModelOption = Annotated[str | None, Option(help=_BASE)]
DeviceOption = Annotated[str, Option(help=_DEVICE)]
BackendOption = Annotated[Backend, Option(help=_BACKEND)]
BatchSizeOption = Annotated[int, Option(min=1, help="Number of texts per pass of the model.")]
RayOption = Annotated[str | None, Option(metavar="local|auto|ADDRESS", help=_RAY)]
JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
ProgressOption = Annotated[bool, Option(help="Show a progress bar.")]
OverwriteOption = Annotated[bool, Option("--overwrite", help=_OVERWRITE)]
ReadersOption = Annotated[list[str] | None, Option("--readers", "--reader", metavar="NAME,...", help=_READERS)]


def open_on(saved: str, *, base: str | None, device: str, writes: bool = False) -> ReaderBank | PreTrainedModel:
    """Load a bank or a whole model, and move it to a device.

    Raises ConfigError if the device cannot be used, or `base` is given for a whole model; and the other errors of
    `open_saved`, such as ModelNotFoundError and StoreError.

    Args:
        saved: Folder or hub id of the bank or model.
        base: Folder or hub id of the bank's base model. None: the model that the bank names.
        device: Name of the device. "auto": a GPU if there is one, otherwise the CPU.
        writes: Whether the bank's model will generate text; it is then loaded with its language model head, if any.
    """
    from lamina.layers.devices import usable_device
    from lamina.store.open_saved import open_saved

    return open_saved(saved, base=base, writes=writes).to(usable_device(device))  # pyright: ignore[reportArgumentType]


def check_output(
    op: str, folder: Path, *, overwrite: bool, resume: bool | None = None, replaced: Collection[str] = ()
) -> None:
    """Check that a command may write to an output folder.

    Raises ConfigError if `overwrite` and `resume` are both set, or neither is and the folder is not empty; StoreError
    if the folder is a file or cannot be read.

    Args:
        op: The command, for the message.
        folder: The output folder, which need not exist. Hidden files, folders of studies, and paths with the name of a
            study do not count.
        overwrite: Whether --overwrite was given; results in the folder are then replaced.
        resume: Whether --resume was given. None: the command has no such option.
        replaced: Names in the folder that the command may replace without being asked.
    """
    from lamina.recipes.report_file import STUDY
    from lamina.registry import STUDIES

    if overwrite and resume:
        raise ConfigError(f"{op}: --overwrite and --resume were both given; one replaces what the other continues.")
    if is_file(folder):
        raise StoreError(f"{op}: {folder} is a file, not a folder. Give another folder.")
    if overwrite or resume or not is_dir(folder):
        return
    with convert_errors(lambda reason: StoreError(f"{op}: {folder} cannot be read ({reason}). Give another folder.")):
        ours = {*STUDIES.names(), *replaced}
        paths = [path for path in folder.iterdir() if not (path.name.startswith(".") or path.name in ours)]
    if any(not is_file(path / STUDY) for path in paths):
        others = "--resume to continue the run in it, or --overwrite" if resume is not None else "or --overwrite"
        raise ConfigError(f"{op}: {folder} is not empty. Give another folder, {others} to replace what is in it.")


def check_used(op: str, owner: str, given: Mapping[str, bool], *, requested: bool) -> None:
    """Raise ConfigError if an option was given without the one that it belongs to; the message names the first such.

    Args:
        op: The command, for the message.
        owner: What the options belong to, such as "--insert".
        given: Option -> whether it was given, or has another value than its default.
        requested: Whether `owner` was given; nothing is then wrong.
    """
    if not requested and any(given.values()):
        option = next(name for name, is_given in given.items() if is_given)
        raise ConfigError(f"{op}: {option} was given without {owner}, which it belongs to.")


def names_of(option: str, values: Sequence[str] | None) -> list[str] | None:
    """Return the names in the values of a list option, each once; None if the option was not given.

    `--readers a,b` and `--readers a --readers b` give the same names. Raises ConfigError if there is no name.
    """
    if values is None:
        return None
    if not (names := dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip())):
        raise ConfigError(f"lamina: {option} is '{','.join(values)}', which names nothing. Give names, such as a,b.")
    return list(names)


def by_reader(op: str, option: str, values: Sequence[str], allowed: str) -> dict[str, str]:
    """Return reader -> value from the values of a repeated option, each in the form READER=VALUE.

    Raises ConfigError for the first value that has another form or names a reader again. `op` is the command and
    `allowed` the form, for the message.
    """
    named: dict[str, str] = {}
    for text in values:
        reader, _, value = text.partition("=")
        if not (reader and value):
            raise ConfigError(f"{op}: {option} is '{text}'; give {allowed} once for each reader.")
        if reader in named:
            raise ConfigError(f"{op}: {option} names '{reader}' twice; give {allowed} once for each reader.")
        named[reader] = value
    return named


def numbers_of(option: str, values: Sequence[str] | None, kind: type[Number]) -> list[Number] | None:
    """Return a list option's numbers, each once; None if the option was not given.

    Raises ConfigError if there is no number, or one is not a `kind`, int or float.
    """
    if (names := names_of(option, values)) is None:
        return None
    try:
        return list(dict.fromkeys(map(kind, names)))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option}: got {', '.join(values or ())}; it must be {what}, such as 0,1.") from None


def selector_of(text: str | None) -> str | list[int]:
    """Return the layer selector for an option's text: [1, 3] for "1,3", [-1] for "-1", "" for None, else the text."""
    parts = (text or "").split(",")
    are_numbers = all(re.fullmatch(r"\s*-?\d{1,9}\s*", part) for part in parts)
    return [int(part) for part in parts] if are_numbers else text or ""


WIDE = 160  # characters per line where the output is not a terminal
MIN_HEADER = 12  # least width of a column whose name is broken over several lines, in characters
READER_GONE = 141  # exit code of a command whose output nobody reads any more, as in `lamina ... | head -1`


@final
class Stream:
    """A wrapper of standard output or standard error that handles failed writes: a full disk, or a closed pipe.

    After the first failure, everything that is written is dropped. With `needed=False` (standard error) nothing else
    happens. With `needed=True` (standard output) the process ends too: with `StoreError`, or with exit code 141 after a
    closed pipe.
    """

    def __init__(self, stream: TextIO, *, needed: bool) -> None:
        self._stream, self._needed = stream, needed
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text ("+-" for "±" if the encoding has no "±"); return its length. Errors are those of `_try`."""
        if text != "":  # typer writes "" to learn the type of the stream; on a full disk even that fails
            self._try(lambda: self._stream.write(with_known_signs(text, self._stream.encoding)))
        return len(text)

    def flush(self) -> None:
        """Write the text that the stream has buffered. Raises the errors of `_try`."""
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        """Call `write`; if it raises OSError, redirect the stream to the null device.

        Raises StoreError if the call failed and the stream is needed, and SystemExit if the stream is needed and is a
        pipe that was closed.
        """
        try:
            write()
        except OSError as error:
            # The buffer still holds the text. Python would try to write it again when the process ends.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._needed and isinstance(error, BrokenPipeError):
                raise SystemExit(READER_GONE) from None
            if self._needed:
                raise StoreError(f"output: standard output cannot be written ({first_line(error)}).") from error


def with_known_signs(text: str, encoding: str | None) -> str:
    """Return the text with "+-" instead of "±" if the encoding (None: UTF-8) has no "±"."""
    try:
        "±".encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.replace("±", "+-")
    return text


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print nested dicts, lists, numbers, strings, paths and dataclasses as JSON; NaN and infinity become null.

    `indent` is spaces per level; None: one line. Characters outside ASCII are escaped unless standard output is UTF-8.
    """
    from pydantic_core import to_jsonable_python

    plain, encoding = to_jsonable_python(value, inf_nan_mode="null"), str(sys.stdout.encoding).lower()
    print(json.dumps(plain, indent=indent, ensure_ascii=not encoding.startswith("utf")))


def end_if_failed(failures: Sequence[Mapping[str, object]]) -> None:
    """Print "key" and "error" of each failed cell (piece of a run) to stderr, and exit with code 1, if there is any."""
    from typer import Exit

    for failure in failures:
        print(f"failed: {failure['key']}: {failure['error']}", file=sys.stderr)
    if failures:
        raise Exit(1)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table as wide as the terminal, or 160 characters wide if the output is not a terminal.

    Args:
        title: Line above the table; "" for none.
        columns: Names of the columns. If the table is too wide, long names are broken after underscores.
        rows: The cells of each row: numbers, strings, None or rich texts, printed as `text` returns them. Columns of
            numbers are right-aligned.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)
    shown = [[cell if isinstance(cell, Text) else text(cell) for cell in row] for row in rows]
    widths = [max((len(row[number]) for row in shown), default=0) for number in range(len(columns))]
    # A border and two spaces add 3 characters to the width of a column.
    fits = sum(max(len(name), width) + 3 for name, width in zip(columns, widths, strict=True)) < console.width
    share = max(MIN_HEADER, console.width // max(1, len(columns)) - 3)
    table = Table()
    for number, name in enumerate(columns):
        numeric = all(isinstance(row[number], int | float) for row in rows)
        header = name if fits else broken(name, max(share, widths[number]))
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for cells in shown:
        encoding = sys.stdout.encoding
        table.add_row(*(cell if isinstance(cell, Text) else with_known_signs(cell, encoding) for cell in cells))
    if title:
        console.print(Text(title, style="bold"))  # a title inside the table would be broken to the width of the table
    console.print(table)


def broken(name: str, width: int) -> str:
    """Return a column name broken after underscores into lines of at most `width` characters.

    A part without underscores that is longer stays whole.
    """
    lines = textwrap.wrap(name.replace("_", "_ "), width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.replace("_ ", "_") for line in lines)


def text(cell: object) -> str:
    """Return a cell of a table as a string: integers with separators, floats with four decimals, None as ""."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
