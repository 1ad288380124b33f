"""The examples of a request (texts, pairs of texts or files), and which readers can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, final

from lamina.errors import ConfigError, LaminaError, check_known
from lamina.tasks import kind_of
from lamina.tasks.lazy_file import from_base64

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.tasks.lazy_file import LazyFile

TEXT = "text"
_MAX_DECODED = 1 << 26  # pixels or audio samples of all files of a request together, once they are decoded


class TooLargeError(LaminaError):
    """Raised when the files of a request would be too large once they are decoded."""


@final
@dataclass(frozen=True)
class Upload:
    """An image or audio file that a client sent. It stays in memory and is never written to disk.

    Attributes:
        medium: "image" or "audio".
        data: The file's bytes, still encoded as the client sent them (PNG, WAV, ...).
        size: Number of pixels or audio samples after decoding; 0 as long as the file's header has not been read.
    """

    medium: str
    data: bytes
    size: int = 0

    @classmethod
    def of(cls, medium: str, encoded: str) -> Upload:
        """Return the upload of a file in Base64 (`encoded`) with this medium; raise ConfigError if it is not Base64."""
        try:
            return cls(medium, from_base64(encoded))
        except ValueError:
            raise ConfigError(f"serve: {medium} is not Base64. Send the bytes of a file, encoded as Base64.") from None


# What a reader answers about: a text, a pair of texts, or a file.
Example: TypeAlias = str | tuple[str, str] | Upload


def medium_of(bank: ReaderBank, task: str) -> str:
    """Return what the reader called `task` reads: "text", "image" or "audio"."""
    file = _file_class(bank, task)
    return TEXT if file is None else file.column


def plain(examples: Sequence[Example]) -> list[str | tuple[str, str] | bytes]:
    """Return examples in the form that `lamina.predict` accepts: files as bytes, texts and pairs unchanged.

    Call it only after `readers_of` has checked the examples: for readers of files, `lamina.predict` would open a text
    as a path.
    """
    return [example.data if isinstance(example, Upload) else example for example in examples]


def readers_of(bank: ReaderBank, tasks: Sequence[str] | None, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the names of the readers that answer about `examples`, in the order of the bank.

    All examples are of one kind (text, image or audio). If `tasks` is None, all readers of this kind answer. Raises
    UnknownNameError if a name in `tasks` is not a reader of the bank, and ConfigError if `examples` or `tasks` is
    empty, a named reader does not read such examples, or no reader does.
    """
    if not examples:
        raise ConfigError("serve: no text came; at least one is needed.")
    check_known("serve", tasks or (), bank, "task")
    medium = examples[0].medium if isinstance(examples[0], Upload) else TEXT
    names = tuple(name for name in bank if tasks is None or name in tasks)
    if not names:
        raise ConfigError(f"serve: tasks is empty. Name at least one of {', '.join(bank)}.")
    fitting = tuple(name for name in names if medium_of(bank, name) == medium)
    if not fitting or (tasks is not None and len(fitting) < len(names)):
        other = next(name for name in names if name not in fitting)
        raise ConfigError(f"serve: got {medium} for '{other}', which reads {medium_of(bank, other)}.")
    return fitting


def sized(bank: ReaderBank, names: Sequence[str], examples: Sequence[Example]) -> Sequence[Example]:
    """Return the examples with `Upload.size` filled in from the files' headers; texts are returned unchanged.

    `names` are the readers that will answer, from `readers_of`. Only headers are read, so a small file that would
    decode to gigabytes is refused before it is decoded. Raises DataError if a file is not an image or audio file of a
    known format, TooLargeError if all files together have more than 2**26 pixels or audio samples, and
    MissingExtraError if audio needs soundfile, which is not installed.
    """
    file = _file_class(bank, names[0])
    if file is None:
        return examples
    uploads = [example for example in examples if isinstance(example, Upload)]
    sizes = [file.of(f"file {row}", upload.data).decoded_size() for row, upload in enumerate(uploads)]
    if sum(sizes) > _MAX_DECODED:
        came = f"the files have {sum(sizes):,} {file.units} in all"
        raise TooLargeError(f"serve: {came}; {_MAX_DECODED:,} are allowed. Send smaller files.")
    return [replace(upload, size=size) for upload, size in zip(uploads, sizes, strict=True)]


def _file_class(bank: ReaderBank, task: str) -> type[LazyFile] | None:
    return kind_of(bank[task].config.head.kind).file
