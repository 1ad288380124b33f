"""The kind of task that asks for the class of a clip of sound."""

from __future__ import annotations

from typing import Any, final

from lamina.tasks.audio import LazyAudio
from lamina.tasks.audio_inputs import AudioInputs, sample_limit
from lamina.tasks.base import EncodeOptions
from lamina.tasks.file_kind import FileKind
from lamina.tasks.split import Split


@final
class AudioClassificationKind(FileKind):
    """A class for every clip."""

    name = "audio_classification"
    auto_class = "AutoModelForAudioClassification"
    processor = "feature_extractor"
    inputs = predict_inputs = "audio"
    usual_columns = ("audio", "label")
    file = LazyAudio

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> AudioInputs:
        """What the feature extractor makes of the clips."""
        return AudioInputs(split, processor, limit=options.max_length)

    def length_limit(self, model: Any, processor: Any, asked: int | None) -> int:
        """How many samples of a clip are read."""
        return sample_limit(processor, asked)

    def truncated(self, inputs: Any) -> int:
        """How many clips are read without their end."""
        return inputs.cut

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: Any, *, by_row: bool = False
    ) -> tuple[int, int]:
        """As many frames as Whisper's encoder has of every clip; else as many tokens as usual."""
        return rows, getattr(config, "max_source_positions", None) or round(tokens)
