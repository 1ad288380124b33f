"""Files in a request: images and sound, which stay in memory, and the readers that read them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from lamina.errors import ConfigError, LaminaError, check_known
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from lamina.bank import ReaderBank

TEXT = "text"
_MOST = 1 << 26  # pixels or samples of all files of a request, once they are decoded


class TooLargeError(LaminaError):
    """Files of a request are too large once they are decoded."""


@final
@dataclass(frozen=True)
class Upload:
    """The bytes of a file, and what it is: "image" or "audio"."""

    medium: str
    data: bytes
    size: int = 0  # pixels or samples that it has once decoded, where that is known

    @classmethod
    def of(cls, medium: str, encoded: str) -> Upload:
        """One from Base64; a ConfigError if it is none."""
        try:
            return cls(medium, base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError):
            raise ConfigError(f"serve: {medium} is not Base64; the bytes of a file are needed, encoded so.") from None


def medium_of(bank: ReaderBank, task: str) -> str:
    """What a reader reads: "text", or what its files are."""
    file = kind_of(bank[task].config.head.kind).file
    return TEXT if file is None else file.column


def plain(examples: Sequence[Any]) -> list[Any]:
    """Examples as `lamina.predict` takes them; texts are never taken for paths, since `readers_of` keeps them apart."""
    return [example.data if isinstance(example, Upload) else example for example in examples]


def readers_of(bank: ReaderBank, tasks: Sequence[str] | None, examples: Sequence[Any]) -> tuple[str, ...]:
    """The readers that are asked about examples, in the order of the bank; None: all that read such.

    Raises:
        UnknownNameError: If a reader does not exist.
        ConfigError: If one does not read such examples, or none does.
    """
    check_known("serve", tasks or (), bank, "task")
    medium = examples[0].medium if isinstance(examples[0], Upload) else TEXT
    names = tuple(name for name in bank if tasks is None or name in tasks)
    if not names:
        raise ConfigError(f"serve: tasks is empty; name one at least of {', '.join(bank)}.")
    fitting = tuple(name for name in names if medium_of(bank, name) == medium)
    if not fitting or (tasks is not None and len(fitting) < len(names)):
        other = next(name for name in names if name not in fitting)
        raise ConfigError(f"serve: {medium} came for '{other}', which reads {medium_of(bank, other)}.")
    return fitting


def sized(bank: ReaderBank, names: Sequence[str], examples: Sequence[Any]) -> Sequence[Any]:
    """Examples, files with their sizes, which stand in their headers; nothing is decoded.

    Raises:
        DataError: If one is no file of its kind.
        TooLargeError: If all together would be too large.
    """
    file = kind_of(bank[names[0]].config.head.kind).file
    if file is None:
        return examples
    sizes = [file.of(f"file {row}", upload.data).decoded_size() for row, upload in enumerate(examples)]
    if sum(sizes) > _MOST:
        came = f"the files have {sum(sizes):,} {file.units} in all"
        raise TooLargeError(f"serve: {came}; {_MOST:,} are read. Send them smaller.")
    return [replace(upload, size=size) for upload, size in zip(examples, sizes, strict=True)]
