"""Every error that Lamina raises on purpose.

    LaminaError
    ├── ConfigError            an option or argument has a value that is not allowed  (ValueError)
    ├── UnknownNameError       a name that does not exist, with a suggestion          (LookupError)
    ├── LayerIndexError        a layer that the model does not have                   (IndexError)
    ├── UnsupportedModelError  a model that an operation does not support             (TypeError)
    ├── ModelNotFoundError     a model that is neither on disk nor on the hub         (OSError)
    ├── DataError              a file, row, column or label that does not fit         (ValueError)
    ├── StoreError             a saved folder that is missing or damaged              (OSError)
    │   └── BaseMismatchError  readers that were trained on another base model
    ├── CacheError             hidden states that cannot be cached                    (OSError)
    ├── NotFiniteError         a loss, weight or score that is NaN or infinite        (ArithmeticError)
    ├── OutOfMemoryError       memory that could not be allocated                     (MemoryError)
    └── MissingExtraError      an optional package that is not installed              (ImportError)

A message reads `<operation>: <what came>; <what is allowed>. <what to do>`. The parameter `op` of the classes below is
that operation, usually the name of a public function ("fit", "tap", "insert_").
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Self, TypeAlias

ErrorTypes: TypeAlias = "type[Exception] | tuple[type[Exception], ...]"
_INNER = ("encode", "length_batches")  # functions with which messages begin, and which users do not call


class LaminaError(Exception):
    """Base class of all errors in this module; `except LaminaError` catches every error that a user can cause."""

    def __reduce__(self) -> tuple[object, ...]:
        """Return what `pickle` needs to rebuild the error without calling its class, which may require keywords."""
        return type(self).__new__, (type(self),), {**self.__dict__, "args": self.args}


class ConfigError(LaminaError, ValueError):
    """Raised when an option or argument has a value that is not allowed, or when options contradict each other."""


class UnknownNameError(LaminaError, LookupError):
    """Raised when a name does not exist. The message lists the names that exist, and suggests the closest.

    The parameter `hint`, if given, is a sentence without full stop that says what to do; it replaces the suggestion.

    Attributes:
        op: The operation that was called.
        got: The unknown name.
        known: The names that exist. If there are many, the message has only the closest of them, see `listed`.
        what: What the name should refer to, in the singular, such as "fusion" or "column".
        see: Where all names can be read, for long lists, such as "help(lamina.fit)"; "" if nowhere else.
    """

    def __init__(
        self, *, op: str, got: str, known: Iterable[str], what: str = "name", hint: str = "", see: str = ""
    ) -> None:
        self.op, self.got, self.known, self.what, self.see = op, got, tuple(known), what, see
        # "acc" is rather "accuracy" than "mcc", and "classification" can be several
        whole = [name for name in self.known if got and (name.startswith(str(got)) or name.endswith(str(got)))]
        cutoff = 0.85 if whole else 0.6
        close = whole if len(whole) == 1 else difflib.get_close_matches(str(got), whole or self.known, 1, cutoff)
        hint = f" {hint}." if hint else f" Did you mean '{close[0]}'?" if close else ""
        super().__init__(f"{op}: unknown {what} '{got}'; known: {listed(str(got), self.known, see)}.{hint}")


def listed(got: str, known: Sequence[str], see: str = "") -> str:
    """Return the names in `known`, joined by commas, for the message that the name `got` does not exist.

    Without names the result is "none". If there are more than 16, only those that resemble `got` are listed (or the
    first ones if none does), and the others are counted. `see` is the place where all names can be read; "" if nowhere.
    """
    if len(known) <= _MOST:
        return _joined(known) or "none"
    few = difflib.get_close_matches(got, known, n=_FEW, cutoff=0.5) or known[:_FEW]
    where = f" (all: {see})" if see else ""
    return f"{_joined(few)} and {len(known) - len(few)} others{where}"


def _joined(names: Sequence[str]) -> str:
    """Return the names in one line; a name that has a comma is in double quotes, as the option --only takes it."""
    return ", ".join(f'"{name}"' if "," in name else name for name in names)


_MOST, _FEW = 16, 5  # names in a message: the longest list that is given whole, and how many of a longer one


def check_known(op: str, got: Iterable[str], known: Iterable[str], what: str = "name", see: str = "") -> None:
    """Raise UnknownNameError for the first name in `got` that is not in `known`; return None if all are.

    For the message, `op` is the operation, `what` the thing that the names refer to, and `see` the place where all
    names can be read.
    """
    known = tuple(known)
    for name in got:
        if name not in known:
            raise UnknownNameError(op=op, got=name, known=known, what=what, see=see)


class LayerIndexError(LaminaError, IndexError):
    """Raised when a layer number is outside the model.

    Attributes:
        op: The operation that was called.
        got: The layer number that does not exist.
        layers: Number of layers that the model has: its blocks and the embeddings (layer 0).

    The parameter `end` is for selectors that count layers from one end: for "top:9" it is "top", and `got` is 8 (layers
    count from 0).
    """

    def __init__(self, *, op: str, got: int, layers: int, end: str = "") -> None:
        self.op, self.got, self.layers = op, got, layers
        what = f"layer {got} does not exist; the model has {layers} layers, embeddings included"
        hint = f"Use 0..{layers - 1}, or -1 for the last."
        if end:
            what, hint = f"{what}, not {got + 1} as in '{end}:{got + 1}'", f"Use '{end}:{layers}' or fewer."
        super().__init__(f"{op}: {what}. {hint}")


class UnsupportedModelError(LaminaError, TypeError):
    """Raised when an operation does not support the architecture of a model.

    Attributes:
        op: The operation that was called.
        model_type: The architecture's name, `config.model_type`.
        reason: Why the architecture is not supported; part of a sentence.

    The parameter `hint`, a full sentence, says what to do instead and ends the message. `what` names the thing that is
    not supported; None: the architecture, as "the family 'bert'".
    """

    def __init__(self, *, op: str, model_type: str, reason: str, hint: str, what: str | None = None) -> None:
        self.op, self.model_type, self.reason = op, model_type, reason
        what = f"the family '{model_type}'" if what is None else what
        super().__init__(f"{op}: {what} is not supported; {reason}. {hint}")


class ModelNotFoundError(LaminaError, OSError):
    """Raised when a model is neither a folder on disk nor available on the hub.

    Attributes:
        op: The operation that was called.
        got: The folder or hub id.
        reason: Why the model could not be loaded, from the message of a library or the system.

    The parameter `hint`, a full sentence, says what to do and ends the message. None: give a folder or a hub id.
    """

    def __init__(self, *, op: str, got: str, reason: str, hint: str | None = None) -> None:
        self.op, self.got, self.reason = op, got, reason
        hint = hint or "Give a local folder with config.json, or a hub id while the hub can be reached."
        super().__init__(f"{op}: no model '{got}'; {reason}. {hint}")


class DataError(LaminaError, ValueError):
    """Raised when a data file, or a row, column or label in it, cannot be used.

    Attributes:
        path: The file; None if the data did not come from a file.
        row: Number of the row, as the function that read the file counts rows (in text files: the line); None if no
            single row is wrong.
        column: The column's name; None if no single column is wrong.
    """

    def __init__(
        self, message: str, *, path: str | None = None, row: int | None = None, column: str | None = None
    ) -> None:
        self.path, self.row, self.column = path, row, column
        super().__init__(message)


class StoreError(LaminaError, OSError):
    """Raised when a saved folder or file is missing, incomplete or damaged, or cannot be written."""


class BaseMismatchError(StoreError):
    """Raised when saved readers are loaded onto another base model or tokenizer than they were trained on.

    Attributes:
        op: The operation that was called.
        differs: Name of the property -> (its saved value, its value here), for each property that differs.
        what: The thing that differs from the one in training: "base", "tokenizer" or "processor".

    With `had_adapters`, the message says to load the base with the adapters (PEFT) that it had in training.
    """

    def __init__(
        self, *, op: str, differs: dict[str, tuple[object, object]], what: str = "base", had_adapters: bool = False
    ) -> None:
        self.op, self.differs, self.what = op, differs, what
        listed = "; ".join(f"{name} was {saved}, here {here}" for name, (saved, here) in differs.items())
        option = "model=, or --model" if what == "base" else "processor=; by default the one that was saved with them"
        if had_adapters:  # and the base here has others
            option = "model=PeftModel.from_pretrained(...); the bank's folder contains no adapters"
        hint = f"Give the {what} that they were trained on ({option}), or train them again on this one."
        super().__init__(f"{op}: these readers were trained on another {what}: {listed}. {hint}")


class CacheError(LaminaError, OSError):
    """Raised when hidden states cannot be cached on disk.

    Attributes:
        needed_bytes: Size of the states; None unless the disk is too small for them.
        free_bytes: Free space on the disk; None unless the disk is too small.
        dtype: Type of the numbers in the cache, "float16" or "float32", if states are beyond its range, or NaN; else
            None.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        dtype: str | None = None,
    ) -> None:
        self.needed_bytes, self.free_bytes, self.dtype = needed_bytes, free_bytes, dtype
        super().__init__(message)


class NotFiniteError(LaminaError, ArithmeticError):
    """Raised when a loss, weight or score is NaN or infinite.

    Attributes:
        name: Name of the reader, or of the parameter.
        step: The optimizer step in which it happened, from 1; None outside training.
        row: Index of the example for which it happened, from 0, or its row in the source of `predict_file`; None if no
            single example is known.
    """

    def __init__(self, message: str, *, name: str, step: int | None = None, row: int | None = None) -> None:
        self.name, self.step, self.row = name, step, row
        super().__init__(message)


class OutOfMemoryError(MemoryError, LaminaError):  # MemoryError first: CPython allocates its instances specially
    """Raised when memory could not be allocated, on a CPU or an accelerator.

    Attributes:
        op: The operation that was called.
        reason: The allocator's own message. If it names the size that was asked for, the error's message does too.
    """

    def __init__(self, *, op: str, reason: str) -> None:
        self.op, self.reason = op, reason
        request = re.search(r"allocate ([\d.]+) (\w+)", reason)
        amount, unit = request.groups() if request else ("", "")
        size = f"{amount} {unit}" if unit != "bytes" else _readable_bytes(int(amount))
        what = f"{size} more memory" if request else "the memory that this needs"
        super().__init__(
            f"{op}: {what} could not be allocated. Use a smaller batch_size, eval_batch_size or max_length."
        )


def _readable_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


@contextmanager
def memory_errors(op: str) -> Generator[None]:
    """Raise OutOfMemoryError for any out-of-memory error of Python, NumPy or PyTorch in the `with` block.

    `op` is the operation with which the message begins. Other errors pass through unchanged.
    """
    try:
        yield
    except LaminaError:
        raise
    except (MemoryError, RuntimeError) as error:
        is_runtime = isinstance(error, RuntimeError)
        by_text = is_runtime and re.search("(allocate|not enough|out of) memory", str(error))
        by_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # by name: torch's own
        if not by_text and not by_type:
            raise
        raise OutOfMemoryError(op=op, reason=str(error)) from error


@contextmanager
def begin_with(op: str) -> Generator[None]:
    """Let a LaminaError from the `with` block begin with `op`, the function that the user called.

    Only the names in `_INNER`, of functions that users do not call, are replaced.
    """
    try:
        yield
    except LaminaError as error:
        inner, _, problem = str(error).partition(": ")
        if inner in _INNER:
            error.args = (f"{op}: {problem}",)
        raise


@contextmanager
def error_context(note: str, op: str = "") -> Generator[None]:
    """Add `note` to every LaminaError that the `with` block raises, by `BaseException.add_note`.

    If `op` is given, a TypeError or ValueError becomes a ConfigError whose message consists of `op`, `note` and the
    original text.
    """
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
def convert_errors(to_error: Callable[[str], LaminaError], kind: ErrorTypes = Exception) -> Generator[None]:
    """Raise `to_error(reason)` for any error of type `kind` that a library or the system raises in the `with` block.

    `reason` is the first line of the original message. A panic in a library written in Rust is converted too; a
    LaminaError passes through unchanged.
    """
    try:
        yield
    except LaminaError:
        raise
    except BaseException as error:
        # libraries written in Rust raise a PanicException, which is no Exception
        if not isinstance(error, kind) and type(error).__name__ != "PanicException":
            raise
        raise to_error(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters, without the final full stop.

    If the first line ends in a colon, the second is added. For an OSError the result is its reason, without the file.
    It begins with the error's type if the text alone says little: for an empty message, and for a LookupError such as
    KeyError, whose message may be just the key.
    """
    lines = [line.strip() for line in str(getattr(error, "strerror", None) or error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if not text or isinstance(error, LookupError):
        text = f"{type(error).__name__} {text}"
    return text[:300].strip().rstrip(".")


_DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}  # module -> the name that pip knows, where they differ


class MissingExtraError(LaminaError, ImportError):
    """Raised when an optional package is needed and not installed; the message gives the command that installs it.

    Attributes:
        op: The operation that was called.
        package: The missing package, as pip names it; the parameter may be its module's name.
        extra: The extra of Lamina that installs it, as in `pip install 'lamina[extra]'`.
    """

    def __init__(self, *, op: str, package: str, extra: str) -> None:
        self.op, self.package, self.extra = op, _DISTRIBUTIONS.get(package, package), extra
        what = f"needs the package '{self.package}', which is not installed"
        super().__init__(f"{op}: {what}. Run: pip install 'lamina[{extra}]'")

    @classmethod
    def of(cls, error: ImportError, *, op: str, extra: str) -> Self:
        """Return the error for an operation `op` whose import of an optional package raised `error`.

        The package's name is read from `error` ("?" if unknown). `extra` is the extra of Lamina that installs the
        package.
        """
        return cls(op=op, package=error.name or "?", extra=extra)


def require_packages(op: str, extra: str, *modules: str) -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        op: The operation that needs the packages, for the message.
        extra: The extra of Lamina that installs the packages.
        *modules: Names of the packages' modules, as in an `import` statement.

    Raises:
        MissingExtraError: If a package is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtraError(op=op, package=module, extra=extra)
