"""Every error that Lamina raises on purpose.

    LaminaError
    ├── ConfigError            an option has a value that cannot be           (ValueError)
    ├── UnknownNameError       a name that does not exist, with a suggestion  (LookupError)
    ├── LayerIndexError        a layer that the model does not have           (IndexError)
    ├── UnsupportedModelError  a model that an operation does not support     (TypeError)
    ├── ModelNotFoundError     a model that is neither on disk nor on the hub (OSError)
    ├── DataError              a file, row, column or label that does not fit (ValueError)
    ├── StoreError             a saved folder that is missing or damaged      (OSError)
    │   └── BaseMismatchError  a reader that was trained on another base
    ├── CacheError             states that cannot be cached                   (OSError)
    ├── NotFiniteError         a loss, weight or score that is NaN or infinite (ArithmeticError)
    ├── OutOfMemoryError       memory that could not be had                    (MemoryError)
    └── MissingExtraError      an optional package that is not installed      (ImportError)

A message reads `<operation>: <what came>; <what holds>. <what to do>`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Self


class LaminaError(Exception):
    """Root of all errors; catching it catches every error a user can cause."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state, since keyword-only fields break the default across processes."""
        return type(self).__new__, (type(self),), {**self.__dict__, "args": self.args}


class ConfigError(LaminaError, ValueError):
    """An option has a value that cannot be."""


class UnknownNameError(LaminaError, LookupError):
    """A name that does not exist; says which do, and which was probably meant."""

    def __init__(self, *, op: str, got: str, known: Iterable[str], what: str = "name") -> None:
        self.op, self.got, self.known, self.what = op, got, tuple(known), what
        close = difflib.get_close_matches(str(got), self.known, n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(f"{op}: unknown {what} '{got}'; known: {', '.join(self.known) or 'none'}.{hint}")


def check_known(op: str, got: Iterable[str], known: Iterable[str], what: str = "name") -> None:
    """Raise UnknownNameError for the first name that is not among those known."""
    known = tuple(known)
    for name in got:
        if name not in known:
            raise UnknownNameError(op=op, got=name, known=known, what=what)


class LayerIndexError(LaminaError, IndexError):
    """A layer that the model does not have."""

    def __init__(self, *, op: str, got: int, layers: int) -> None:
        self.op, self.got, self.layers = op, got, layers
        what = f"layer {got} does not exist; the model has {layers} layers, embeddings included"
        super().__init__(f"{op}: {what}. Use 0..{layers - 1}, or -1 for the last.")


class UnsupportedModelError(LaminaError, TypeError):
    """A model that an operation does not support; names the family and the reason."""

    def __init__(self, *, op: str, model_type: str, reason: str, hint: str) -> None:
        self.op, self.model_type, self.reason = op, model_type, reason
        super().__init__(f"{op}: the family '{model_type}' is not supported; {reason}. {hint}")


class ModelNotFoundError(LaminaError, OSError):
    """A model that is neither a folder on disk nor to be had from the hub."""

    def __init__(self, *, op: str, got: str, reason: str) -> None:
        self.op, self.got, self.reason = op, got, reason
        hint = "Give a local folder with config.json, or a hub id while the hub can be reached."
        super().__init__(f"{op}: no model '{got}'; {reason}. {hint}")


class DataError(LaminaError, ValueError):
    """A file, row, column or label that does not fit; `path`, `row` and `column` where known."""

    def __init__(
        self, message: str, *, path: str | None = None, row: int | None = None, column: str | None = None
    ) -> None:
        self.path, self.row, self.column = path, row, column
        super().__init__(message)


class StoreError(LaminaError, OSError):
    """A saved folder that is missing, incomplete or damaged."""


class BaseMismatchError(StoreError):
    """A reader that was trained on another base; `differs` maps a field to (saved, given)."""

    def __init__(self, *, op: str, differs: dict[str, tuple[object, object]]) -> None:
        self.op, self.differs = op, differs
        listed = "; ".join(f"{name} was {saved}, here {given}" for name, (saved, given) in differs.items())
        hint = "Give the base that they were trained on (model=, or --model), or train them again on this one."
        super().__init__(f"{op}: these readers were trained on another base: {listed}. {hint}")


class CacheError(LaminaError, OSError):
    """States that cannot be cached; `needed_bytes` and `free_bytes` where there is no room for them."""

    def __init__(self, message: str, *, needed_bytes: int | None = None, free_bytes: int | None = None) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(message)


class NotFiniteError(LaminaError, ArithmeticError):
    """A loss, weight or score that is NaN or infinite.

    `name` is the reader's or the weight's; `step` (from 1) and `row` (from 0) are given where known.
    """

    def __init__(self, message: str, *, name: str, step: int | None = None, row: int | None = None) -> None:
        self.name, self.step, self.row = name, step, row
        super().__init__(message)


class OutOfMemoryError(MemoryError, LaminaError):  # in this order: Python makes a MemoryError in a way of its own
    """Memory that could not be had; `reason` is what the allocator said."""

    def __init__(self, *, op: str, reason: str) -> None:
        self.op, self.reason = op, reason
        asked = re.search(r"allocate ([\d.]+) (\w+)", reason)
        amount, unit = asked.groups() if asked else ("", "")
        size = f"{amount} {unit}" if unit != "bytes" else _binary(int(amount))
        what = f"{size} more of memory" if asked else "as much memory as this takes"
        super().__init__(f"{op}: {what} could not be had. Use a smaller batch_size, eval_batch_size or max_length.")


def _binary(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


@contextmanager
def memory_errors(op: str) -> Generator[None]:
    """Raise OutOfMemoryError where Python, NumPy or PyTorch, on any device, could not have memory."""
    try:
        yield
    except LaminaError:
        raise
    except (MemoryError, RuntimeError) as error:
        said = isinstance(error, RuntimeError) and re.search("(allocate|not enough|out of) memory", str(error))
        if not said and not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise  # the last is torch's, which is not loaded for its name
        raise OutOfMemoryError(op=op, reason=str(error)) from error


@contextmanager
def error_context(note: str, op: str = "") -> Generator[None]:
    """Add a note to errors of Lamina's; with `op`, what Python itself refuses becomes a ConfigError."""
    try:
        yield
    except LaminaError as error:
        error.add_note(note)
        raise
    except (TypeError, ValueError) as error:
        if not op:
            raise
        raise ConfigError(f"{op}: {note}; {error}.") from error


@contextmanager
def convert_errors(to_error: Callable[[str], LaminaError], kind: type[Exception] = Exception) -> Generator[None]:
    """Raise what `to_error` makes of the reason in place of any error of that kind by a library or the system.

    Reading, writing and loading go through here; by default it takes all, which come in too many kinds to list.
    """
    try:
        yield
    except LaminaError:
        raise
    except BaseException as error:
        if not isinstance(error, kind) and type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        raise to_error(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """What an error of another library says, as far as a message can quote it: one line, without its full stop."""
    lines = [line.strip() for line in str(getattr(error, "strerror", None) or error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if not said or isinstance(error, LookupError):
        said = f"{type(error).__name__} {said}"
    return said[:300].strip().rstrip(".")


class MissingExtraError(LaminaError, ImportError):
    """An optional package that is not installed; names the extra that brings it."""

    def __init__(self, *, op: str, package: str, extra: str) -> None:
        self.op, self.package, self.extra = op, package, extra
        what = f"needs the package '{package}', which is not installed"
        super().__init__(f"{op}: {what}. Run: pip install 'lamina[{extra}]'")

    @classmethod
    def of(cls, error: ImportError, *, op: str, extra: str) -> Self:
        """Build from the import that failed."""
        return cls(op=op, package=error.name or "?", extra=extra)
