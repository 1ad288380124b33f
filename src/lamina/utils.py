"""Helpers that the whole package shares: range checks, atomic writes, seeds, ranks of processes, progress bars."""

from __future__ import annotations

import difflib
import errno
import hashlib
import inspect
import itertools
import json
import math
import os
import pickle
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache, partial, wraps
from importlib.metadata import PackageNotFoundError, requires, version
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from packaging.requirements import Requirement

from lamina.errors import ConfigError, ErrorTypes, LaminaError, StoreError, begin_with, convert_errors

# What a JSON file can hold; an object of such a file: key -> JSON; and one row of a table: column -> value.
JSON: TypeAlias = bool | int | float | str | Sequence[Any] | Mapping[str, Any] | None
JSONObject: TypeAlias = dict[str, Any]
Row: TypeAlias = Mapping[str, JSON]
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _is_of(package: str, name: str, value: object) -> bool:
    """Return whether a value is an instance of a package's class `name`, without importing the package."""
    classes = type(value).__mro__
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in classes)


def _is_processor(value: object) -> bool:
    """Return whether a value can be a processor: it can be called, and is neither a class nor a model."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "named_parameters")


_NO_LISTS = (str, bytes, bytearray, memoryview, set, frozenset, Mapping)  # a set has no order
_SELECTORS = (int, str, list, tuple, range)
_MONITORS = ("Monitor", "Cascade")
_CLASSES = (
    *_MONITORS,
    "Calibration",
    "DriftSketch",
    "Figure",
    "Pivot",
    "ReaderBank",
    "ReaderCollection",
    "ReplyFacts",
    "Study",
    "Task",
)
# type of an option, as an annotation writes it -> (what it must be, whether a value is of the type)
_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": (  # `float` raises OverflowError for longer integers
        "a number",
        lambda value: isinstance(value, float) or (_TYPES["int"][1](value) and cast("int", value).bit_length() < 1024),
    ),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "str": ("a text", lambda value: isinstance(value, str)),
    **dict.fromkeys(("Path", "PathLike"), ("a path", lambda value: isinstance(value, os.PathLike))),
    "torch.Generator": ("a torch.Generator", partial(_is_of, "torch", "Generator")),
    "DataFrame": ("a DataFrame of pandas", partial(_is_of, "pandas", "DataFrame")),
    "torch.device": ("a torch.device", partial(_is_of, "torch", "device")),
    **{name: (f"a {name}", partial(_is_of, "lamina", name)) for name in _CLASSES},
    "Recipe": ("a recipe from load_recipe", partial(_is_of, "lamina", "Recipe")),
    "AnyMonitor": ("a Monitor or a Cascade", lambda value: any(_TYPES[name][1](value) for name in _MONITORS)),
    "Processor": ("a loaded tokenizer or processor of transformers", _is_processor),
    "Sequence": ("a list", lambda value: isinstance(value, Iterable) and not isinstance(value, _NO_LISTS)),
    **dict.fromkeys(
        ("Iterable", "Collection"),
        ("a list or a set", lambda value: isinstance(value, set | frozenset) or _TYPES["Sequence"][1](value)),
    ),
    "Literal": ("a name", lambda value: isinstance(value, str)),  # the function says which names there are
    "Selector": (
        "a layer number, a list of them, or a text such as 'top:4'",
        lambda value: hasattr(value, "tolist") or (isinstance(value, _SELECTORS) and not isinstance(value, bool)),
    ),
    "Mapping": ("a dict, as in {'train': ...}", lambda value: isinstance(value, Mapping)),
    "None": ("None", lambda value: value is None),
}
_EXACT: dict[str, type] = {"int": int, "float": float, "str": str}
_ITEMS = re.compile(r"(?:Sequence|Collection)\[(\w+(?: \| \w+)*)\]")
_PARAMETERS = re.compile(r"\[[^\[\]]*\]|\[[^\[\]]*$")  # of a generic type, the innermost first


def check_type(op: str, name: str, value: T, annotation: object) -> T:
    """Return an option's value: NumPy and torch numbers as Python numbers, arrays and sets as lists where allowed.

    Raises ConfigError if the value is not of the type `annotation`, or is an empty text although it may be a path. The
    type is not checked if `annotation` has a type that `_TYPES` lacks, or only "Literal" and "None". The items of a
    list or tuple are checked in the same way, by the types in brackets, as in "Sequence[int]". Generators become lists.
    True and False pass where both "int" and "str" are allowed, as names of classes. `op` and `name` are the operation
    and the option, for the message.
    """
    plain: object = value
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", 1) == 0:
        plain = value.item()  # pyright: ignore[reportAttributeAccessIssue]
    kinds, is_known, items = _parsed(annotation.__name__ if isinstance(annotation, type) else str(annotation))
    is_class = isinstance(plain, bool) and "str" in kinds and "int" in kinds  # the name of a class, such as True
    is_empty = isinstance(plain, str) and not plain and "Path" in str(annotation)  # which would be the current folder
    fits = is_known and any(_TYPES[kind][1](plain) for kind in kinds) and not is_empty
    if fits and "Sequence" in kinds and isinstance(plain, Iterable) and not hasattr(plain, "__getitem__"):
        plain = [*cast("Iterable[object]", plain)]  # of a generator, which could be read only once
    is_whole = isinstance(plain, str) or (isinstance(plain, Mapping) and "Mapping" in kinds)
    if fits and "Collection" in kinds and isinstance(plain, Iterable) and not is_whole:
        names = cast("Iterable[object]", plain)  # a set's order differs between processes
        plain = sorted(names, key=str) if isinstance(plain, set | frozenset) else list(names)
    if items and hasattr(plain, "tolist"):  # an array
        plain = cast("Any", plain).tolist()
    if items and isinstance(plain, list | tuple) and _parsed(items)[1]:
        listed = cast("Sequence[object]", plain)
        if not _fit_by_type(listed, _parsed(items)[0]):
            checked = (check_type(op, f"{name}[{place}]", item, items) for place, item in enumerate(listed))
            plain = [*checked] if isinstance(plain, list) else (*checked,)
    if fits or is_class or not is_known:
        return cast("T", plain)
    kind = type(plain).__name__
    kind = f"{type(plain).__module__}.{kind}" if kind in kinds else kind  # a class of another package
    got = repr(plain)[:60] if isinstance(plain, str | bytes | int | float | None) else f"a {kind}"
    allowed = " or ".join(dict.fromkeys(_TYPES[kind][0] for kind in kinds))
    allowed = allowed if {*_CLASSES, "Collection"}.isdisjoint(kinds) else allowed.replace(", as in {'train': ...}", "")
    raise ConfigError(f"{op}: {name} is {'empty' if is_empty else got}; it must be {allowed}.")


def _fit_by_type(listed: Sequence[object], kinds: Sequence[str]) -> bool:
    """Return whether all items fit by their types alone, so that a long list is not checked item by item."""
    samples = dict(zip(map(type, listed), listed, strict=True))
    others = [item for kind, item in samples.items() if kind not in map(_EXACT.get, kinds)]
    return all(any(_is_of("lamina", name, item) for name in kinds) for item in others)


@cache
def _parsed(annotation: str) -> tuple[tuple[str, ...], bool, str]:
    """Return the types of `annotation` without brackets, whether all can be checked, and the types of a list's items.

    "Sequence[int] | None" gives ("Sequence", "None"), True and "int"; the last is "" if items are not checked.
    """
    plain = annotation
    while "[" in plain:
        plain = _PARAMETERS.sub("", plain)
    kinds = tuple(plain.split(" | "))
    items = _ITEMS.search(f"Sequence[int] {annotation}" if "Selector" in kinds else annotation)
    is_known = set(kinds) <= _TYPES.keys() and not set(kinds) <= {"Literal", "None"}
    return kinds, is_known, items[1] if items else ""


def check_types(op: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that passes a function's arguments through `check_type` before each call.

    A wrong type raises ConfigError, whose message begins with `op`. Defaults are not checked. Errors that the function
    itself raises pass through `begin_with(op)`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        types = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            named = [check_type(op, name, value, types[name]) for name, value in zip(types, args, strict=False)]
            options = {name: check_type(op, name, value, types.get(name, "")) for name, value in kwargs.items()}
            with begin_with(op):
                return function(*named, *args[len(named) :], **options)  # pyright: ignore[reportCallIssue]

        return checked

    return decorate


def check_fields(op: str, settings: Any) -> None:  # noqa: ANN401  a dataclass
    """Call `check_type` for each field that `__init__` sets in a frozen dataclass, and store what it returns.

    Raises ConfigError if a field has a wrong type; its message begins with `op`.
    """
    for field in filter(attrgetter("init"), fields(settings)):
        value = check_type(op, field.name, getattr(settings, field.name), field.type)
        object.__setattr__(settings, field.name, value)


def check_range(
    op: str, name: str, value: float | None, low: float, high: float = math.inf, *, open_high: bool = False
) -> None:
    """Raise ConfigError unless `low <= value <= high`; None passes, NaN does not.

    With `open_high`, `value` must be smaller than `high` (by default, finite). `op` and `name` are the operation and
    the option, for the message.
    """
    if value is None or (low <= value < high if open_high else low <= value <= high):
        return
    top = f" and {'below' if open_high else 'at most'} {high}" if high < math.inf else " and finite" * open_high
    raise ConfigError(f"{op}: {name} is {value}; it must be at least {low}{top}.")


def check_inside(op: str, name: str, value: float, high: float = 1, usual: float = 0.01) -> None:
    """Raise ConfigError unless `value` is above 0 and below `high`; NaN does not pass.

    `op` and `name` are the operation and the option, for the message, and `usual` is a value that it suggests.
    """
    if not 0 < value < high:
        raise ConfigError(f"{op}: {name} is {value}; it must be above 0 and below {high:g}, such as {usual:g}.")


MAX_BYTES = 1 << 26  # largest file of settings, and longest line of a data file, that is read
_SHOWN = 100  # characters of a key that an error repeats
_NESTED = (list, dict)  # a tuple, because `list | dict` would be built for each value


def no_pipe(path: Path) -> Path:
    """Return `path`; raise OSError if there is a pipe, a socket or a device, which must not be read or replaced."""
    if path.exists() and not (is_file(path) or is_dir(path)):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file; ValueError if it is larger than `max_bytes`, OSError if it cannot be read.

    Pipes, sockets and devices count as files that cannot be read.
    """
    with no_pipe(path).open("rb") as file:
        if len(data := file.read(max_bytes + 1)) > max_bytes:
            raise ValueError(f"it has more than {max_bytes:,} bytes")
    return data


class RepeatedKeyError(ValueError):
    """Raised when an object of a JSON text has a key twice.

    Args:
        keys: All keys of the object, in order; the message names the first that comes twice.
    """

    def __init__(self, keys: Iterable[Hashable]) -> None:
        seen = set[Hashable]()
        key = str(next(key for key in keys if key in seen or seen.add(key)))
        super().__init__(f"the key '{key if len(key) <= _SHOWN else key[:_SHOWN] + '...'}' comes twice")


class TooDeepError(ValueError):
    """Raised when lists and objects in a JSON text are nested in each other more deeply than `parse_json` allows."""


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the pairs of a JSON object as a dict; raise RepeatedKeyError if a key comes twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RepeatedKeyError(key for key, _ in pairs)
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)  # `json.loads` would make one for each row of a file


def parse_json(text: str, max_depth: int = 100, *, last_wins: bool = False) -> Any:  # noqa: ANN401
    """Return the value of a JSON text that a user or another program wrote.

    Args:
        text: The text.
        max_depth: Maximum depth of lists and objects in each other.
        last_wins: Whether an object may have a key twice. The last value then counts, as in Python's own parser.

    Raises:
        ValueError: If the text is not JSON. NaN and Infinity are read, as by Python's own parser.
        RepeatedKeyError: If an object has a key twice, without `last_wins`. It is a ValueError.
        TooDeepError: If lists and objects are nested more than `max_depth` levels deep. It is a ValueError.
    """
    with suppress(RecursionError):
        value = json.loads(text) if last_wins else _DECODER.decode(text)
        if text.count("[") + text.count("{") <= max_depth:  # almost always: this runs for each row of a file
            return value
        level = [value]
        for _ in range(max_depth + 1):
            lists = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, _NESTED)]
            if not lists:
                return value
            level = list(itertools.chain.from_iterable(lists))
    raise TooDeepError(f"it is nested more than {max_depth} deep")


def pluralize(count: int, noun: str) -> str:
    """Return `count` with a noun that agrees with it, such as "1 run" or "1,200 runs" (`noun` and an s)."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def is_dir(path: str | Path) -> bool:
    """Return whether `path` is a folder. A name that is too long gives False, where pathlib may raise an error."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: str | Path) -> bool:
    """Return whether `path` is a file. A name that is too long gives False, as in `is_dir`."""
    return os.path.isfile(path)  # noqa: PTH113


def similar_file(path: str | Path, *, folder: bool = False) -> str:
    """Return a sentence for the message that the file `path` is missing: "Did you mean" and a close name in its folder.

    The sentence begins with a space. Returns "" if no name is close. `folder`: a folder is missing, so suggest folders.
    """
    path = Path(path)
    with suppress(OSError, ValueError):  # a folder that does not exist or cannot be read, or a path with a null byte
        fits = Path.is_dir if folder else Path.is_file
        names = [file.name for file in itertools.islice(path.parent.iterdir(), 1000) if fits(file)]
        close = difflib.get_close_matches(path.name, names, n=1)
        return f" Did you mean '{path.with_name(close[0])}'?" if close else ""
    return ""


@contextmanager
def write_errors(
    what: str,
    left: str = "",
    hint: str = "Check the rights and the space there.",
    *,
    kind: type[Exception] = Exception,
    of_disk: ErrorTypes = OSError,
) -> Iterator[None]:
    """Convert errors in the `with` block, which writes a file, to StoreErrors; Lamina's own errors pass through.

    For errors of the types `of_disk` the message ends with `hint`; for other errors of type `kind` it does not. All
    others pass through. `what` is the operation and the place. `left` says what is there after an error; "": nothing is
    said.
    """
    left = f"; {left}." if left else "."
    with (
        convert_errors(lambda reason: StoreError(f"{what} was not written ({reason}){left}"), kind),
        convert_errors(lambda reason: StoreError(f"{what} cannot be written ({reason}){left} {hint}".strip()), of_disk),
    ):
        yield


@contextmanager
def atomic_write(path: Path, kind: type[Exception] = Exception) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; at the end, rename the file written there to `path`.

    So `path` holds either its old content or all of the new content, even if the process dies. The file is flushed to
    disk before it is renamed. If the `with` block raises, the temporary file is removed and `path` stays as it was.
    Parent folders are created.

    Args:
        path: The file.
        kind: Errors of this type become StoreErrors; others, and LaminaErrors, pass through. Pass OSError if the block
            does more than write a file, for example runs a model.

    Raises:
        StoreError: If the file cannot be written.
    """
    with write_errors(f"save: {path}", kind=kind):
        no_pipe(path).parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}{get_ident()}")  # `remove_leftovers` knows this form
        try:
            yield beside
            fsync(beside)
            beside.replace(path)
        finally:
            with suppress(OSError):
                beside.unlink()


def fsync(path: Path) -> None:
    """Flush a file from the system's buffers to the disk, so that its content survives a power failure."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def remove_leftovers(*paths: Path) -> None:
    """Remove the temporary files of `atomic_write` beside `paths`, which are files of one folder.

    Files that another process is still writing are removed too, so the caller must hold the lock of `paths`, if there
    is one. Files that cannot be removed stay.
    """
    stems = {f".{path.name}" for path in paths}
    for beside in paths[0].parent.glob(".*") if paths else ():
        if beside.stem in stems and beside.suffix[1:].isdecimal():
            with suppress(OSError):
                beside.unlink()


def write_text(path: Path, text: str) -> None:
    """Write text to `path` in UTF-8, atomically; raise StoreError, and leave `path` as it was, if that fails."""
    with atomic_write(path) as beside:
        beside.write_text(text, encoding="utf-8")


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed computed from `parts`; equal parts (as text) give the same seed in every process."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's global generators as `torch.manual_seed` does.

    On a machine without an accelerator only the CPU generator is seeded, because `torch.manual_seed` is slower.
    """
    import torch

    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def usable_cores() -> int:
    """Return how many cores this process may use: those that it is bound to, or fewer if its container has a quota.

    The quota is that of cgroup v2, rounded down, and at least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no control groups of version 2, or the quota is "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def rank() -> int:
    """Return this process's rank among the processes of a distributed run, from 0; 0 in a single process.

    Processes of `torchrun` know their rank even before they join a process group.
    """
    if group := _group():
        return group.get_rank()
    return int(os.environ["RANK"]) if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys() else 0


def world_size() -> int:
    """Return the number of processes in a distributed run; 1 in a single process, or before they join a group."""
    group = _group()
    return group.get_world_size() if group else 1


def local_world_size() -> int:
    """Return the number of processes of a distributed run on this machine, as `torchrun` counts them.

    Without `torchrun`, all processes of the run count. 1 in a single process.
    """
    size = world_size()
    return int(os.environ.get("LOCAL_WORLD_SIZE") or size) if size > 1 else 1


def barrier() -> None:
    """Wait until every process of a distributed run has called this; return at once in a single process."""
    if (group := _group()) and group.get_world_size() > 1:
        group.barrier()


def run_in_first(work: Callable[[], object]) -> None:
    """Call `work` in the first process of a distributed run; if it raises there, raise the error in every process.

    All processes must call this, and return together. The others get a RuntimeError if the error is not Lamina's own or
    cannot be pickled. A single process just calls `work`.
    """
    problem: Exception | None = None
    if rank() == 0:
        try:
            work()
        except Exception as error:  # errors of any type, or the other processes would wait for ever
            problem = error
    if (group := _group()) and group.get_world_size() > 1:
        sent: list[Exception | None] = [RuntimeError(f"the first process failed: {problem!r}")]
        with suppress(Exception):  # an error may not survive pickling, above all one of another package
            if problem is None or isinstance(problem, LaminaError):
                sent = [pickle.loads(pickle.dumps(problem))]
        group.broadcast_object_list(sent)
        group.barrier()  # the first process, which only sends, may not end before the others have received
        problem = problem or sent[0]
    if problem is not None:
        raise problem


def least_of_all(number: int, device: object) -> int:
    """Return the smallest `number` that any process of a distributed run passes; all processes must call this.

    They exchange their numbers on `device`, a torch.device. A single process gets its own number.
    """
    if world_size() == 1:
        return number
    import torch

    least = torch.tensor(number, device=cast("torch.device", device))
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)


def _group() -> ModuleType | None:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def progress_bar(batches: Iterable[T], *, show: bool, **options: Any) -> Iterable[T]:  # noqa: ANN401
    """Return an iterable over `batches`; if `show`, it draws tqdm's progress bar on standard error.

    `options` are those of tqdm, such as `desc`.
    """
    if not show:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, **options)


@cache
def check_versions() -> None:
    """Check that torch, transformers and the other required packages are installed and new enough.

    The requirements are read from the package's metadata. Nothing is checked if Lamina itself is not installed, or an
    earlier call succeeded.

    Raises:
        ConfigError: If a package is missing, too old or too new. The message names its version.
    """
    with suppress(PackageNotFoundError):
        for requirement in map(Requirement, requires("lamina") or ()):
            if requirement.marker is not None:  # belongs to an extra
                continue
            try:
                installed = version(requirement.name)
            except PackageNotFoundError:
                installed = None
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                state = "is not installed" if installed is None else f"has version {installed}"
                wanted = f"{requirement.name}{requirement.specifier}"
                problem = f"{requirement.name} {state}; {wanted} is needed"
                raise ConfigError(f"lamina: {problem}. Run: pip install '{wanted}'")
