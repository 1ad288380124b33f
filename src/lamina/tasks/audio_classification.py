"""Classify audio clips: decode and resample them, run the feature extractor, and predict a class for each."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lamina.errors import ConfigError, DataError, MissingExtraError, convert_errors, first_line
from lamina.tasks.base import EncodeOptions
from lamina.tasks.file_classification import FileKind
from lamina.tasks.label_cells import plain
from lamina.tasks.lazy_file import REMOVE, LazyFile
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lamina.data.arrow import Column
    from lamina.layers.types import Processor

Samples: TypeAlias = npt.NDArray[np.float32]

_MOST_RATE, _MOST_CHANNELS = 768_000, 64  # samples per second, channels
_STREAMED = 0x7FFFF000  # programs that write to a pipe cannot know the size: they say 0, or this and more
# the chunk of samples of a WAV file, if its size is 0, but samples and no other chunk follow
_NO_SIZE = re.compile(rb"data\0{4}(?!\Z|[ -~]{4}..\0\0)", re.DOTALL)
# the first frame of an MP3 file, if it says how many follow; if not, libmpg123 guesses their number
_COUNT = re.compile(rb"\xff[\xe0-\xff].{2,4}\0{9,32}(Xing|Info)\0{3}[\1\3\5\7\t\v\r\17]", re.DOTALL)
# first bytes of a file -> where its header says a size: position, length and byte order, and what to add to it
_SIZES: Mapping[bytes, tuple[int, int, Literal["little", "big"], int]] = {
    b"RIFF": (4, 4, "little", 8),
    b"RIFX": (4, 4, "big", 8),
    b"FORM": (4, 4, "big", 8),  # AIFF
    b"RF64": (20, 8, "little", 8),
    b"riff": (16, 8, "little", 0),  # W64
    b".snd": (8, 4, "big", 24),  # AU, whose samples follow after at least 24 bytes
    b"dns.": (8, 4, "little", 24),
}
_UNKNOWN = 1 << 62  # samples of a FLAC file without their number, by libsndfile
_PAGE = 65_307  # bytes of the longest page of an Ogg file
_LEAST = 0.9  # share of the samples that the header of an MP3 file promises, which is sometimes too high
_FULL_SCALE = {"int16": 1 << 15, "int32": 1 << 31, "uint8": 1 << 7}  # the value of integers that stands for 1.0
_ENDINGS = "wav flac ogg oga opus mp3 aif aiff aifc au snd caf w64 rf64"

LONGEST_S = 30  # seconds of a clip that are read by default: the window of Whisper
_SHORTEST_S = 0.1  # shorter clips are padded with silence: one frame of a speech model needs a quarter of it
# lengths in ms to which shorter clips are padded before an extractor makes a spectrogram: the first that it can read
_TRIED_MS = (0, *range(25, 100, 5))
_FRAME_S = 0.025  # what one frame of a speech model reads
_MASK = "attention_mask"
_LOUD = 128  # no sample between -1 and 1 becomes this loud by mixing or resampling: its full scale is another


# Clips


@final
@dataclass(frozen=True)
class LazyAudio(LazyFile):
    """An audio clip that is read and decoded only when `open` is called.

    Attributes:
        rate: Samples per second, if `data` holds float32 samples. 0: their rate is not known; it counts as the rate
            that `open` asks for. None: the clip is an encoded file, on disk or in `data`.
    """

    rate: int | None = None

    column: ClassVar = "audio"
    op: ClassVar = "audio"
    one: ClassVar = "a clip"
    many: ClassVar = "clips"
    endings: ClassVar = frozenset(f".{ending}" for ending in _ENDINGS.split())
    feature: ClassVar = "Audio"
    units: ClassVar = "samples"
    forms: ClassVar = "a path, bytes, {'array': ..., 'sampling_rate': ...}, or an array at the feature extractor's rate"

    @classmethod
    def of_object(cls, name: str, entry: object) -> Self | None:
        """Return a clip from an array at the feature extractor's rate, or from {"array": ..., "sampling_rate": ...}.

        Returns None if `entry` is neither, or does not have one or two axes. The longer axis is time; channels are
        averaged. Floats are samples between -1 and 1. Integers of 16 or 32 bits are divided by their full scale,
        unsigned ones of 8 bits after 128 is subtracted. Raises DataError, naming the clip `name`, if a mapping has no
        "sampling_rate" or one out of range, or the samples have another type, such as int64.
        """
        has_rate = isinstance(entry, Mapping) or hasattr(entry, "get")  # decoders of `datasets` have `get` alone
        samples: object = entry.get("array") if has_rate else entry  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(samples, np.ndarray | Tensor | list | tuple):
            return None
        if isinstance(samples, Tensor):  # NumPy has no bfloat16
            samples = (samples.float() if samples.is_floating_point() else samples).detach().cpu().numpy()
        values = _as_array(samples)
        if values is None or values.ndim not in (1, 2):
            return None
        rate = _checked_rate(name, entry.get("sampling_rate")) if has_rate else 0  # pyright: ignore[reportAttributeAccessIssue]
        return cls(name, data=_mono(name, values).tobytes(), rate=rate)

    def length(self, rate: int) -> int:
        """Return the clip's samples per channel at `rate` samples per second, rounded up, without decoding the file.

        Raises DataError if the clip is empty or cut off, or its header is bad; MissingExtraError if soundfile is needed
        and not installed.
        """
        own_rate, frames = self._header(rate)
        if frames < 1:
            raise self.bad(self.name, "has no samples; a clip has at least one.")
        return -(-frames * rate // own_rate)

    def decoded_size(self) -> int:
        """Return the number of samples: of all channels, by a file's header; or of those in memory, which are averaged.

        Raises DataError if the header cannot be read, and MissingExtraError if soundfile is needed and not installed.
        """
        if self.rate is not None:
            return len(self.data or b"") // 4
        info = self._info()
        return info.frames * info.channels

    def open(self, rate: int, samples: int) -> Samples:
        """Decode the clip, and return its first `samples` samples, or all if it has fewer: float32, mean over channels.

        A clip whose rate is not `rate` samples per second is first resampled by a polyphase filter. Raises DataError if
        it cannot be decoded, is empty, or a sample is not finite; MissingExtraError if soundfile or SciPy is missing.
        """
        own_rate, frames = self._header(rate)
        needed = min(frames, -(-samples * own_rate // rate))
        if self.rate is None:
            values = _mono(self.name, self._decode(needed))
        else:
            values = np.frombuffer(self.data or b"", np.float32)[:needed]
        if not np.isfinite(values).all():
            raise self.bad(self.name, "has samples that are NaN or infinite; audio samples are finite numbers.")
        if own_rate != rate and len(values):
            common = math.gcd(own_rate, rate)
            values = _resample(values, rate // common, own_rate // common)
        if not len(values):
            raise self.bad(self.name, "has no samples; a clip has at least one.")
        return values[:samples].astype(np.float32, copy=False)

    def _header(self, rate: int) -> tuple[int, int]:
        """Return the clip's rate (`rate` if it is not known) and number of samples per channel.

        Raises DataError if its header cannot be read or its rate is out of range; MissingExtraError if soundfile is
        needed (the clip is a file) and not installed.
        """
        if self.rate is not None:
            return self.rate or rate, len(self.data or b"") // 4
        info = self._info()
        return _checked_rate(self.name, info.samplerate), info.frames

    def _info(self) -> Any:
        """Return soundfile's description of the file.

        Raises DataError if the file is missing, cut off or not audio, its header does not say its length, or it has too
        many channels; MissingExtraError if soundfile is missing.
        """
        info = self._call("info")
        if info.frames >= _UNKNOWN:
            rule = "the header of a clip says it, which programs that write to a pipe leave out. Save it as a file"
            raise self.bad(self.name, f"does not say its number of samples; {rule}.")
        if info.channels > _MOST_CHANNELS:
            raise self.bad(self.name, f"has {info.channels} channels; at most {_MOST_CHANNELS} are read.")
        return info

    def _whole(self) -> Path | BytesIO:
        """Return the file as `source` does.

        If a WAV file's header says 0 bytes of samples, return a copy in memory, in which they reach to the end of the
        file. Raises DataError if the file cannot be read, is shorter than its header says, or is an Ogg file whose last
        page is cut off; libsndfile reports neither of the last two.
        """
        source = self.source()
        with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
            head, size = file.read(28), file.seek(0, SEEK_END)
            place, length, order, rest = _SIZES.get(head[:4], (0, 0, "little", 0))
            said = rest + int.from_bytes(head[place : place + length], order)
            if size + 8 < said < _STREAMED:
                raise self.bad(self.name, f"is cut off after {size} of {said} bytes; every row is a whole clip.")
            file.seek(max(0, size - _PAGE))
            if head[:4] == b"OggS" and _is_cut_page(file.read()):
                raise self.bad(self.name, f"is cut off after {size} bytes; every row is a whole clip.")
            chunk, at = b"", 12  # a chunk is its name, its size, and its content, padded to an even size
            while head[:4] == b"RIFF" and file.seek(at) < size and (chunk := file.read(16))[:4] != b"data":
                at += 8 + (length := int.from_bytes(chunk[4:8], "little")) + length % 2
            file.seek(0)
        if not _NO_SIZE.match(chunk):
            return source
        data = self.read()
        return BytesIO(data[: at + 4] + b"\xff" * 4 + data[at + 8 :])

    def _decode(self, frames: int) -> Samples:
        """Return the first `frames` samples of the file, `[samples]` or `[samples, channels]`.

        Raises DataError if it cannot be decoded or is cut off, and MissingExtraError if soundfile is not installed.
        """
        values: Samples = self._call("read", frames=frames, dtype="float32")[0]
        if len(values) < _LEAST * frames and ("MPEG" not in self._info().subtype or _COUNT.search(self.read())):
            raise self.bad(self.name, f"is cut off after {len(values)} of {frames} samples; every row is a whole clip.")
        return values

    def _call(self, function: str, **options: object) -> Any:
        """Call a function of soundfile on the file, with `options`, and return its result.

        Raises DataError if the file is missing, cut off or not audio; MissingExtraError if soundfile is missing.
        """
        try:
            import soundfile
        except ImportError as error:
            raise MissingExtraError.of(error, op="audio", extra="audio") from error
        source = self._whole()
        try:
            return getattr(soundfile, function)(source, **options)
        except Exception as error:  # decoders raise errors of many types
            reason = first_line(getattr(error, "error_string", None) or error)
            problem = f"cannot be decoded ({reason}); every row of an audio task is a whole clip. {REMOVE}"
            raise self.bad(self.name, problem) from error


def _is_cut_page(end: bytes) -> bool:
    """Return whether the last page in the `end` of an Ogg file is shorter than its table of lengths says."""
    page = end[max(0, end.rfind(b"OggS")) :]  # if no page begins there, all `_PAGE` bytes, which no table exceeds
    return len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])


def _resample(values: Samples, up: int, down: int) -> Samples:
    """Return audio samples at `up / down` times their rate; raise MissingExtraError if SciPy is not installed."""
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise MissingExtraError.of(error, op="audio", extra="audio") from error
    return resample_poly(values, up, down)


def _as_array(samples: object) -> npt.NDArray[np.generic] | None:
    if isinstance(samples, np.ndarray):
        return samples
    try:
        array = np.asarray(samples)
    except (TypeError, ValueError):  # lists of unequal lengths
        return None
    return array if array.dtype.kind in "fiub" else None


def _mono(name: str, values: npt.NDArray[np.generic]) -> Samples:
    """Return samples averaged over their channels, as float32 `[samples]`; the longer of two axes is time.

    Raises DataError, naming the clip `name`, unless the values are floats or integers of 8 (unsigned), 16 or 32 bits.
    """
    if values.ndim == 2:
        values = values if values.shape[0] >= values.shape[1] else values.T
        values = values if values.size else values.reshape(-1)
    if (scale := _FULL_SCALE.get(values.dtype.name)) is not None:  # of any byte order
        shift = scale if values.dtype == np.uint8 else 0
        values = (values.astype(np.float64) - shift) / scale
    elif not np.issubdtype(values.dtype, np.floating):
        got = f"is an array of {values.dtype}; its full scale is not known."
        raise LazyAudio.bad(name, f"{got} Give floats between -1 and 1, or int16.")
    return np.ascontiguousarray(values.mean(1) if values.ndim == 2 else values, dtype=np.float32)


def _checked_rate(name: str, rate: object) -> int:
    """Return samples per second as an int; DataError, naming the clip, unless it is a whole number, 1 to 768,000."""
    if rate is None:
        problem = "has an array without a sampling rate, which is needed to resample it."
        raise LazyAudio.bad(name, f"{problem} Give {{'array': ..., 'sampling_rate': ...}}.")
    rate = plain(rate)
    rate = int(rate) if isinstance(rate, float) and rate.is_integer() else rate
    if isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= _MOST_RATE:
        rule = f"it is a whole number from 1 to {_MOST_RATE:,}, in samples a second"
        raise LazyAudio.bad(name, f"has a rate of {rate!r} ({type(rate).__name__}); {rule}.")
    return rate


# Inputs


def feature_extractor(processor: object) -> Any:
    """Return the feature extractor that a processor is or contains; raise ConfigError if there is none."""
    from transformers import SequenceFeatureExtractor

    extractor = getattr(processor, "feature_extractor", processor)
    if not isinstance(extractor, SequenceFeatureExtractor):
        rule = "audio needs the model's feature extractor"
        hint = "Give the one that AutoFeatureExtractor.from_pretrained finds for the model."
        raise ConfigError(f"audio: the processor is a {type(processor).__name__}; {rule}. {hint}")
    return extractor


def sample_limit(processor: object, asked: int | None) -> int:
    """Return the maximum number of samples that the processor's feature extractor gets of each clip.

    `asked` is the user's limit; None: 30 seconds, or less if the feature extractor reads less. Raises ConfigError if
    there is no feature extractor, or `asked` is below 1 or more than it reads.
    """
    extractor = feature_extractor(processor)
    frames = getattr(extractor, "max_length", None)  # AST counts frames of 10 ms
    counts = (getattr(extractor, name, None) for name in ("n_samples", "nb_max_samples"))
    samples = next((count for count in counts if isinstance(count, int)), None)
    allowed = frames * extractor.sampling_rate // 100 if isinstance(frames, int) else samples
    if asked is not None and (asked < 1 or (allowed is not None and asked > allowed)):
        most = "it must be positive" if allowed is None else f"the feature extractor takes 1 to {allowed}"
        raise ConfigError(f"audio: max_length is {asked} samples; {most}.")
    return asked or min(allowed or LONGEST_S * extractor.sampling_rate, LONGEST_S * extractor.sampling_rate)


@final
class AudioInputs:
    """Audio clips, encoded by a feature extractor. It is a `lamina.tasks.base.Inputs`.

    The output for a clip does not depend on its batch. There are three types of feature extractors. Some pad all clips
    to one length (Whisper, AST). Others pad a batch to its longest clip, and the model gets a mask. The third type
    (wav2vec2 and HuBERT with group norm, `return_attention_mask=False`) belongs to models without a mask, in which
    padding would change every frame. Clips for these models are padded with silence to whole seconds, and all clips of
    a batch have one length. Raises ConfigError if the processor has no feature extractor, DataError if the extractor
    fails or a clip is empty or has no readable header, and MissingExtraError if soundfile is needed and not installed.

    Args:
        split: The clips.
        processor: The feature extractor, or a processor that contains one.
        limit: Maximum samples of a clip; a longer clip loses its end.

    Attributes:
        equal_lengths: Whether all clips of a batch must have the same length.
        cut: Number of clips that are longer than `limit`.
        lengths: Number of samples of each clip, cut to `limit`, with the silence at its end; 1 for each clip if all
            outputs have one size.
    """

    uncacheable = None  # `frames` says whether the states of a model can be

    def __init__(self, split: Split, processor: object, *, limit: int) -> None:
        self._split, self._extractor, self._limit = split, feature_extractor(processor), limit
        self._shortest = round(_SHORTEST_S * self.rate)
        parameters = inspect.signature(type(self._extractor).__call__).parameters
        self._hop: int | None = getattr(self._extractor, "hop_length", None)  # samples per column of a spectrogram
        self._pads = "padding" in parameters and parameters["padding"].default is False
        self._options = {f"return_{_MASK}": True} if f"return_{_MASK}" in parameters else {}
        self._masked = self._reads_samples = False  # `_shape` reads both before they are known
        one_size = self._shape(1) == self._shape(2)
        self._masked = bool(self._options) and (one_size or bool(self._extractor.return_attention_mask))
        self.equal_lengths = not one_size and not self._masked
        self._counts_columns = one_size and self._masked and self._hop is not None
        self._reads_samples = len(self._shape(1)) == 2  # `[batch, samples]`, not a spectrogram
        self._fewest = self._shortest if self._reads_samples else self._fewest_samples()
        lengths = [clip.length(self.rate) for clip in split.texts]
        self._samples, self.cut = [min(length, limit) for length in lengths], sum(length > limit for length in lengths)
        self.lengths = [1] * len(split) if one_size else list(map(self._with_silence, self._samples))

    @property
    def rate(self) -> int:
        """The feature extractor's samples per second."""
        return self._extractor.sampling_rate

    @property
    def digest(self) -> str:
        """A hash that is equal for the same clips in the same order. Files count by their paths and are not read."""
        return self._split.key

    def content_digest(self) -> str:
        """Return a hash of the content of all clips and of the length limit; DataError if a clip cannot be read.

        The first call reads every clip.
        """
        return self._content_digest

    @cached_property
    def _content_digest(self) -> str:
        digest = hashlib.blake2b(f"{self._limit}".encode(), digest_size=16)
        for clip in cast("Sequence[LazyAudio]", self._split.texts):
            content = clip.read()
            digest.update(f"\0{clip.rate} {len(content)} ".encode())
            digest.update(content)
        return digest.hexdigest()

    def frames(self, model: PreTrainedModel) -> list[int] | None:
        """Return how many of the model's frames cover each clip, without the clip's padding. No clip is decoded.

        Returns None if the numbers cannot be known: the model does not say how many samples make a frame, or the
        extractor makes spectrograms that differ in size, have no mask, or have columns of unknown length.
        """
        count = getattr(model.base_model, "_get_feat_extract_output_lengths", None)
        if count is None or not (self._reads_samples or self._counts_columns):
            return None
        if self.equal_lengths:
            units = torch.tensor(self.lengths)
        elif self._reads_samples:
            units = torch.tensor(self._samples).clamp(min=round(_FRAME_S * self.rate))  # as `_extract` masks them
        else:
            units = -(-torch.tensor(self._samples).clamp(min=self._shortest) // cast("int", self._hop))
        return count(units).clamp(min=1).tolist()

    def _shape(self, tenths: int) -> tuple[int, ...]:
        """Return the shape `[1, ...]` of the extractor's first output for `tenths` tenths of a second of silence.

        Raises DataError if the feature extractor fails.
        """
        outputs = self._extract([np.zeros(round(self.rate * tenths / 10), np.float32)], {})
        return tuple(next(iter(outputs.values())).shape)

    def _with_silence(self, samples: int) -> int:
        """Return the length in samples of a clip of `samples` samples after it is padded with silence.

        It is at least a tenth of a second. If a batch needs clips of equal length, it is rounded up to whole seconds,
        but not above the limit.
        """
        whole = min(self._limit, -(-samples // self.rate) * self.rate) if self.equal_lengths else 0
        return max(samples, whole, self._shortest)

    def _fewest_samples(self) -> int:
        """Return the length, in samples, of the shortest clip that gives a finite spectrogram.

        It is at most a tenth of a second. Shorter clips are padded to it and no further, as silence changes all frames.
        """
        noise = np.random.default_rng(0).standard_normal(self._shortest).astype(np.float32)
        for ms in _TRIED_MS:
            samples = max(1, round(self.rate * ms / 1000))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # the variance of a single frame
                    outputs = self._extract([noise[:samples]], {})
            except DataError:
                continue
            if all(values.numel() and values.isfinite().all() for values in outputs.values()):
                return samples
        return self._shortest

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the clips with the indices `rows` as `input_values` `[batch, samples]` or `input_features`.

        Their mask is included if the model reads one. Clips are the same in every epoch. Raises DataError if a clip
        cannot be decoded, the extractor fails, or a sample that it does not normalise is above 128; MissingExtraError
        if soundfile or SciPy is missing.
        """
        clips: Sequence[LazyAudio] = cast("Column", self._split.texts).read_rows(rows)
        sounds = [clip.open(self.rate, self._samples[int(row)]) for clip, row in zip(clips, rows, strict=True)]
        padding: dict[str, object] = {}
        loudest = [float(np.abs(sound).max(initial=0)) for sound in sounds]
        if max(loudest) > _LOUD and not (self._reads_samples and getattr(self._extractor, "do_normalize", False)):
            name = clips[loudest.index(max(loudest))].name
            rule = "samples are between -1 and 1. Divide them by their full scale, which is 32,768 for 16 bits"
            raise LazyAudio.bad(name, f"has samples up to {max(loudest):,.0f}; {rule}.")
        if not self._reads_samples:
            sounds = [np.pad(sound, (0, max(0, self._fewest - len(sound)))) for sound in sounds]
        if self.equal_lengths or (self._reads_samples and self._pads):  # the extractor normalises, and pads afterwards
            padding = {"padding": "max_length", "max_length": max(self.lengths[int(row)] for row in rows)}
        elif self._pads:
            padding = {"padding": True}
        return self._extract(sounds, padding)

    def _extract(self, sounds: Sequence[Samples], padding: Mapping[str, object]) -> dict[str, Tensor]:
        """Run the feature extractor on the clips `sounds`; return the outputs that the model reads.

        `padding` holds further options for the call. Raises DataError if the extractor fails.
        """
        options = {"sampling_rate": self.rate, "return_tensors": "pt", **self._options, **padding}
        got = f"{type(self._extractor).__name__} fails on {len(sounds)} clips"
        with convert_errors(lambda reason: DataError(f"audio: {got} ({reason}); check its settings.")):
            outputs = self._extractor(list(sounds), **options)
        if self._masked and self._reads_samples:
            outputs[_MASK][:, : round(_FRAME_S * self.rate)] = 1  # a shorter clip would be masked as a whole
        names = dict.fromkeys((*self._extractor.model_input_names, _MASK))
        return {name: outputs[name] for name in names if name in outputs and (name != _MASK or self._masked)}


# The kind


@final
class AudioClassificationKind(FileKind[AudioInputs]):
    """The kind of task that predicts a class for every audio clip."""

    name = "audio_classification"
    auto_class = "AutoModelForAudioClassification"
    processor = "feature_extractor"
    inputs = predict_inputs = "audio"
    usual_columns = ("audio", "label")
    file = LazyAudio

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> AudioInputs:
        """Return the clips of a split as `AudioInputs` (with its errors), cut to `options.max_length` samples."""
        return AudioInputs(split, processor, limit=options.max_length)

    def length_limit(self, model: PreTrainedModel, processor: Processor, asked: int | None) -> int:
        """Return what `sample_limit` returns, with its errors; `model` is not used."""
        return sample_limit(processor, asked)

    def truncated(self, inputs: AudioInputs) -> int:
        """Return the number of clips that are longer than the limit and lose their end."""
        return inputs.cut

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: PreTrainedConfig | None, *, by_row: bool = False
    ) -> tuple[int, int]:
        """Return `rows`, and tokens per row: the config's fixed number of frames (Whisper), or else `tokens`.

        The other arguments are not used.
        """
        return rows, getattr(config, "max_source_positions", None) or round(tokens)
