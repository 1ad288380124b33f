"""Clips of sound as what a model's feature extractor makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
from torch import Tensor

from lamina.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    from lamina.tasks.audio import LazyAudio
    from lamina.tasks.split import Split

LONGEST_S = 30  # seconds that are read of a clip, where nothing else is asked: the window of Whisper
_SHORTEST_S = 0.1  # shorter clips are followed by silence: one frame of a speech model takes a quarter of it
_MASK = "attention_mask"


def feature_extractor(processor: Any) -> Any:
    """The feature extractor that a processor holds, or the feature extractor itself; without one a ConfigError."""
    from transformers import SequenceFeatureExtractor

    own = getattr(processor, "feature_extractor", processor)
    if not isinstance(own, SequenceFeatureExtractor):
        rule = "sound is made a model's input by its feature extractor"
        hint = "Give the one that AutoFeatureExtractor.from_pretrained finds for the model."
        raise ConfigError(f"audio: the processor is a {type(processor).__name__}; {rule}. {hint}")
    return own


def sample_limit(processor: Any, asked: int | None) -> int:
    """How many samples of a clip are read: `asked`, or 30 seconds; no more than the feature extractor takes."""
    own = feature_extractor(processor)
    allowed = _window(own)
    if asked is not None and (asked < 1 or (allowed is not None and asked > allowed)):
        most = "it must be positive" if allowed is None else f"the feature extractor takes 1 to {allowed}"
        raise ConfigError(f"audio: max_length is {asked} samples; {most}.")
    return asked or min(allowed or LONGEST_S * own.sampling_rate, LONGEST_S * own.sampling_rate)


def _window(extractor: Any) -> int | None:
    """How many samples one that makes inputs of one size reads, cutting the rest; None: any number."""
    samples = next((getattr(extractor, name, None) for name in ("n_samples", "nb_max_samples")), None)
    frames = getattr(extractor, "max_length", None)
    if isinstance(frames, int):  # of AST, 10 ms each
        samples = frames * extractor.sampling_rate // 100
    return samples if isinstance(samples, int) else None


@final
class AudioInputs:
    """Clips as what a feature extractor makes of them; an `Inputs`.

    What is made of a clip does not depend on its batch. Extractors that fill up all clips to one length (Whisper, AST)
    do so by themselves. Others pad a batch to its longest clip, and their models are told what is padding by a mask. A
    model that takes no such mask (wav2vec2 and HuBERT with group norm, whose extractors have
    `return_attention_mask=False`) would let the padding into every frame: their clips are followed by silence up to a
    whole second, and a batch has clips of one such length.
    """

    uncacheable = "the inputs are sound; only texts are cached"

    def __init__(self, split: Split, processor: Any, *, limit: int) -> None:
        self._split, self._extractor, self._limit = split, feature_extractor(processor), limit
        parameters = inspect.signature(type(self._extractor).__call__).parameters
        self._pads = "padding" in parameters and parameters["padding"].default is False
        self._options = {f"return_{_MASK}": True} if f"return_{_MASK}" in parameters else {}
        self._masked = False
        one_size = self._shape(1) == self._shape(2)
        self._masked = bool(self._options) and (one_size or bool(self._extractor.return_attention_mask))
        self.equal_lengths = not one_size and not self._masked
        self._samples, self.cut = self._lengths()
        self.lengths = [1] * len(split) if one_size else [self._filled(count) for count in self._samples]

    @property
    def rate(self) -> int:
        """Samples a second."""
        return self._extractor.sampling_rate

    @property
    def digest(self) -> str:
        """Equal for equal clips of equal names."""
        return self._split.key

    def _shape(self, tenths: int) -> tuple[int, ...]:
        """The shape of what is made of silence."""
        made = self._made([np.zeros(round(self.rate * tenths / 10), np.float32)], {})
        return tuple(next(iter(made.values())).shape)

    def _lengths(self) -> tuple[list[int], int]:
        """How many samples are read of each clip, and how many clips have more."""
        lengths = [clip.length(self.rate) for clip in self._split.texts]
        return [min(length, self._limit) for length in lengths], sum(length > self._limit for length in lengths)

    def _filled(self, samples: int) -> int:
        """The length of a clip with the silence that belongs to it."""
        if self.equal_lengths:
            return max(samples, min(self._limit, -(-samples // self.rate) * self.rate), self._shortest)
        return max(samples, self._shortest)

    @property
    def _shortest(self) -> int:
        return round(_SHORTEST_S * self.rate)

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some clips, as `input_values` `[batch, samples]` or `input_features`, perhaps with their mask."""
        clips: Sequence[LazyAudio] = self._split.texts.read_rows(rows)
        sounds = [clip.open(self.rate, self._samples[int(row)]) for clip, row in zip(clips, rows, strict=True)]
        sounds = [np.pad(sound, (0, max(0, self._shortest - len(sound)))) for sound in sounds]
        padding: dict[str, Any] = {}
        if self.equal_lengths:
            padding = {"padding": "max_length", "max_length": max(self.lengths[int(row)] for row in rows)}
        elif self._pads:
            padding = {"padding": True}
        return self._made(sounds, padding)

    def _made(self, sounds: Sequence[Any], padding: dict[str, Any]) -> dict[str, Tensor]:
        """What the extractor makes for the model, its input first."""
        options = {"sampling_rate": self.rate, "return_tensors": "pt", **self._options, **padding}
        try:
            made = self._extractor(list(sounds), **options)
        except Exception as error:  # each extractor raises what it likes
            came = f"{type(self._extractor).__name__} fails on {len(sounds)} clips ({first_line(error)})"
            raise DataError(f"audio: {came}; a model's sound is made by it.") from error
        names = dict.fromkeys((*self._extractor.model_input_names, _MASK))
        return {name: made[name] for name in names if name in made and (name != _MASK or self._masked)}
