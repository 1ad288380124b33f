"""Sound as rows of a task: decoded from files or arrays when needed, made mono, and resampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import numpy as np
from torch import Tensor

from lamina.errors import DataError, MissingExtraError, first_line
from lamina.tasks.class_files import LazyFile

if TYPE_CHECKING:
    from collections.abc import Mapping

Samples = np.ndarray[Any, np.dtype[np.float32]]

_MOST_RATE, _MOST_CHANNELS = 768_000, 64  # samples a second
_FULL_SCALE = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}  # the loudest value of integers
_ENDINGS = "wav flac ogg oga opus mp3 aif aiff aifc au snd caf w64 rf64"


@final
@dataclass(frozen=True)
class LazyAudio(LazyFile):
    """A clip of sound that is decoded when it is opened."""

    rate: int | None = None  # of `data` that are float32 samples, not a file; 0: that at which it is opened

    column: ClassVar = "audio"
    op: ClassVar = "audio"
    one: ClassVar = "a clip"
    many: ClassVar = "clips"
    endings: ClassVar = frozenset(f".{ending}" for ending in _ENDINGS.split())
    feature: ClassVar = "Audio"
    units: ClassVar = "samples"
    forms: ClassVar = "a path, bytes, {'array': ..., 'sampling_rate': ...}, or an array at the feature extractor's rate"

    @classmethod
    def of_object(cls, name: str, entry: Any) -> Self | None:
        """One of samples `[samples]` or of several channels, the longer axis being time.

        Floats are taken as they are, between -1 and 1; integers of 8 (unsigned), 16 or 32 bits are divided by their
        full scale. A mapping has their "sampling_rate", as in `datasets`; a bare array is at the rate of the feature
        extractor.
        """
        given: Any = entry.get("array") if (has_rate := hasattr(entry, "get")) else entry
        if not isinstance(given, np.ndarray | Tensor | list | tuple):
            return None
        values = given.detach().cpu().numpy() if isinstance(given, Tensor) else _as_array(given)
        if values is None or values.ndim not in (1, 2):
            return None
        return cls(name, data=_mono(cls, name, values).tobytes(), rate=cls._rate(name, entry) if has_rate else 0)

    @classmethod
    def _rate(cls, name: str, entry: Mapping[str, Any]) -> int:
        rate = entry.get("sampling_rate")
        if rate is None:
            problem = "has an array without its rate; which pitch it has is not known."
            raise cls.bad(name, f"{problem} Give {{'array': ..., 'sampling_rate': ...}}.")
        return _checked_rate(cls, name, rate)

    def length(self, rate: int) -> int:
        """How many samples it has at a rate, by what its file says; none is a DataError."""
        own, frames = self._header(rate)
        if frames < 1:
            raise self.bad(self.name, "has no samples; a clip has at least one.")
        return -(-frames * rate // own)

    def decoded_size(self) -> int:
        """How many samples it has in all its channels, of which none is decoded."""
        if self.rate is not None:
            return len(self.data or b"") // 4
        info = self._info()
        return info.frames * info.channels

    def open(self, rate: int, samples: int) -> Samples:
        """Its first `samples` at a rate, float32 between -1 and 1, the mean of its channels.

        Another rate than its own is reached by a polyphase filter (`scipy.signal.resample_poly`).
        """
        from scipy.signal import resample_poly

        own, frames = self._header(rate)
        needed = min(frames, -(-samples * own // rate))
        if self.rate is None:
            values = _mono(type(self), self.name, self._decode(needed))
        else:
            values = np.frombuffer(self.data or b"", np.float32)[:needed]
        if not np.isfinite(values).all():
            raise self.bad(self.name, "has samples that are NaN or infinite; a sound has none.")
        if own != rate and len(values):
            common = math.gcd(own, rate)
            values = resample_poly(values, rate // common, own // common)
        if not len(values):
            raise self.bad(self.name, "has no samples; a clip has at least one.")
        return values[:samples].astype(np.float32, copy=False)

    def _header(self, rate: int) -> tuple[int, int]:
        """Its rate, and how many samples of each channel it has at it."""
        if self.rate is not None:
            return self.rate or rate, len(self.data or b"") // 4
        info = self._info()
        return _checked_rate(type(self), self.name, info.samplerate), info.frames

    def _info(self) -> Any:
        source, soundfile = self.source(), _soundfile()
        try:
            info = soundfile.info(source)
        except Exception as error:  # the decoders raise many unrelated kinds
            raise self._undecodable(error) from error
        if info.channels > _MOST_CHANNELS:
            raise self.bad(self.name, f"has {info.channels} channels; at most {_MOST_CHANNELS} are read.")
        return info

    def _decode(self, frames: int) -> Samples:
        source, soundfile = self.source(), _soundfile()
        try:
            return soundfile.read(source, frames=frames, dtype="float32")[0]
        except Exception as error:
            raise self._undecodable(error) from error

    def _undecodable(self, error: Exception) -> DataError:
        reason = first_line(getattr(error, "error_string", None) or error)
        return self.bad(self.name, f"cannot be decoded ({reason}); every row of an audio task is a whole clip.")


def _soundfile() -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise MissingExtraError.of(error, op="audio", extra="audio") from error
    return soundfile


def _as_array(given: Any) -> Any:
    """A list of numbers, or an array, as an array; None of anything else."""
    if isinstance(given, np.ndarray):
        return given
    try:
        made = np.asarray(given)
    except (TypeError, ValueError):  # lists of unequal lengths
        return None
    return made if made.dtype.kind in "fiub" else None


def _mono(kind: type[LazyAudio], name: str, values: Any) -> Samples:
    """The mean of the channels of an array `[samples]`, `[samples, channels]` or `[channels, samples]`, as float32."""
    if values.ndim == 2:
        values = values if values.shape[0] >= values.shape[1] else values.T
    if (scale := _FULL_SCALE.get(str(values.dtype))) is not None:
        shift = scale if values.dtype == np.uint8 else 0
        values = (values.astype(np.float64) - shift) / scale
    elif not np.issubdtype(values.dtype, np.floating):
        came = f"is an array of {values.dtype}; how loud its largest value is is not known."
        raise kind.bad(name, f"{came} Give floats between -1 and 1, or int16.")
    return np.ascontiguousarray(values.mean(1) if values.ndim == 2 else values, dtype=np.float32)


def _checked_rate(kind: type[LazyAudio], name: str, rate: Any) -> int:
    if not isinstance(rate, int | np.integer) or not 1 <= rate <= _MOST_RATE:
        raise kind.bad(name, f"has a rate of {rate} samples a second; it is a whole number from 1 to {_MOST_RATE:,}.")
    return int(rate)
