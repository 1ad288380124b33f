"""Short tones made from a seed: each class has its own pitch, so that a model can tell them apart."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile
import torch
import transformers
from tests.support.pictures import put
from tests.support.tiny import FAMILIES
from transformers import ASTConfig, ASTFeatureExtractor, AutoModel, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

TONES = ("high", "low", "middle")
RATE = 400  # of the tiny models: a second is a hundred of their frames
_PITCH = {"low": 20.0, "middle": 50.0, "high": 110.0}


def tone(label: str = "low", *, seconds: float = 0.5, rate: int = RATE, seed: int = 0) -> np.ndarray[Any, Any]:
    """A sine with some noise, float32 `[samples]`."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    sound = 0.5 * np.sin(2 * np.pi * (_PITCH[label] * time + rng.random())) + rng.normal(0, 0.02, len(time))
    return sound.astype(np.float32)


def sound_bytes(sound: Any, *, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of samples `[samples]` or `[samples, channels]`."""
    file = BytesIO()
    soundfile.write(file, sound, rate, format=kind, subtype=subtype)
    return file.getvalue()


def sound_folder(root: Path, *, rows: int = 2, classes: Sequence[str] = TONES, kind: str = "WAV") -> Path:
    """Write `rows` clips of unequal lengths per class as `root/<class>/<number>.wav`; returns `root`."""
    for number, label in enumerate(classes):
        for row in range(rows):
            clip = tone(label, seconds=0.3 + 0.05 * (row % 5), seed=100 * number + row)
            put(root, f"{label}/{row:04d}.{kind.lower()}", sound_bytes(clip, kind=kind))
    return root


def waves(**options: Any) -> Wav2Vec2FeatureExtractor:
    """Return the feature extractor of wav2vec2 with layer norm, which takes a mask, changed by `options`."""
    return Wav2Vec2FeatureExtractor(**{"sampling_rate": RATE, "return_attention_mask": True, **options})


def whisper_features() -> WhisperFeatureExtractor:
    """Return the features of `whisper`, which reads one second: 40 columns of 8 mel bins."""
    features = WhisperFeatureExtractor(feature_size=8, hop_length=10, n_fft=40, chunk_length=1, sampling_rate=RATE)
    features.mel_filters = mel_filter_bank(21, 8, 0.0, RATE / 2, RATE)  # its own go up to 8 kHz
    return features


def whisper(auto: str = "AutoModelForSpeechSeq2Seq") -> PreTrainedModel:
    """A tiny Whisper that hears: at random its positions are a hundred times as loud as the sound."""
    config = FAMILIES["whisper"].config()
    config.max_source_positions, config.num_labels = 20, len(TONES)
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".conv" in name and name.endswith("weight"):
                weight *= 20
    return model


def ast_features() -> ASTFeatureExtractor:
    """Return the features of `tiny_ast`: 32 columns of 16 mel bins, 10 ms each."""
    return ASTFeatureExtractor(num_mel_bins=16, max_length=32, sampling_rate=16_000)


def tiny_ast() -> PreTrainedModel:
    """An audio spectrogram transformer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = ASTConfig(**sizes, patch_size=8, frequency_stride=8, time_stride=8, max_length=32, num_mel_bins=16)
    return AutoModel.from_config(config).eval()


def group_normed(name: str = "wav2vec2") -> PreTrainedModel:
    """A model that takes no mask of padding (the tiny one of the registry is it)."""
    return FAMILIES[name].build()


def layer_normed(name: str = "wav2vec2") -> PreTrainedModel:
    """A model that takes a mask of padding, as wav2vec2-large-960h-lv60 does."""
    family = FAMILIES[name]
    config = family.config()
    config.feat_extract_norm, config.do_stable_layer_norm, config.conv_bias = "layer", True, True
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()
