"""Clips as what feature extractors make of them: of one size, padded with a mask, or in batches of one length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.sounds import RATE, ast_features, sound_bytes, tone, waves, whisper_features
from transformers import (
    ASTFeatureExtractor,
    SeamlessM4TFeatureExtractor,
    Speech2TextFeatureExtractor,
    ViTImageProcessor,
)

from lamina.data.batches import batch_count, length_batches
from lamina.data.state_cache import FramedInputs
from lamina.errors import ConfigError, DataError
from lamina.tasks import kind_of
from lamina.tasks.audio_classification import AudioInputs, LazyAudio, sample_limit
from lamina.tasks.base import Inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

KIND: Any = kind_of("audio_classification")
SECONDS = (0.05, 0.3, 0.6, 1.4)


def inputs(extractor: Any, seconds: Sequence[float] = SECONDS, *, asked: int | None = None) -> AudioInputs:
    sounds = [tone(seconds=length, rate=extractor.sampling_rate, seed=row) for row, length in enumerate(seconds)]
    return AudioInputs(KIND.examples(sounds, None), extractor, limit=sample_limit(extractor, asked))


def test_whisper_reads_one_size_and_is_told_what_is_sound():
    made = inputs(whisper_features())
    assert isinstance(made, Inputs)
    batch = made.batch([1, 3])
    assert set(batch) == {"input_features", "attention_mask"}
    assert batch["input_features"].shape == (2, 8, 40)
    assert batch["attention_mask"].sum(1).tolist() == [12, 40]
    assert (made.lengths, made.equal_lengths, made.cut) == ([1] * 4, False, 1)


def test_floats_at_the_scale_of_integers_are_refused_unless_clips_are_normalised():
    sound = (tone(seconds=0.3, rate=RATE) * 20_000).astype(np.float32)
    for extractor in (whisper_features(), waves(do_normalize=False)):
        made = AudioInputs(KIND.examples([sound / 20_000, sound], None), extractor, limit=400)
        made.batch([0])
        with pytest.raises(
            DataError, match=r"entry 1 has samples up to \d+,\d+; samples are between -1 and 1\. Divide"
        ):
            made.batch([0, 1])
    batch = AudioInputs(KIND.examples([sound / 20_000, sound], None), waves(), limit=400).batch([0, 1])["input_values"]
    torch.testing.assert_close(batch[0], batch[1], atol=1e-4, rtol=0)


def test_ast_reads_one_size_without_a_mask():
    made = inputs(ast_features())
    assert {name: tuple(part.shape) for name, part in made.batch([0, 1]).items()} == {"input_values": (2, 32, 16)}
    assert (made.equal_lengths, made.cut) == (False, 2)  # 0.32 seconds are read


def test_clips_are_padded_with_a_mask():
    made = inputs(waves())
    batch = made.batch([1, 2])
    assert batch["input_values"].shape == batch["attention_mask"].shape == (2, 240)
    assert batch["attention_mask"].sum(1).tolist() == [120, 240]
    assert made.lengths == [40, 120, 240, 560]
    assert (made.equal_lengths, made.cut) == (False, 0)
    np.testing.assert_allclose(batch["input_values"][0, :120].mean(), 0, atol=1e-5)  # normalised by themselves
    assert (batch["input_values"][0, 120:] == 0).all()


def test_without_a_mask_batches_have_one_length():
    made = inputs(waves(return_attention_mask=False))
    assert (made.lengths, made.equal_lengths) == ([400, 400, 400, 800], True)
    batch = made.batch([0, 2])
    assert {name: tuple(part.shape) for name, part in batch.items()} == {"input_values": (2, 400)}
    assert torch.equal(batch["input_values"][1], made.batch([2])["input_values"][0])
    masked = inputs(waves()).batch([2])["input_values"][0]
    torch.testing.assert_close(batch["input_values"][1, :240], masked)


@pytest.mark.parametrize("masked", [True, False])
def test_a_short_clip_is_normalised_before_it_is_padded(masked: bool):
    """The padding up to the shortest length is no part of the clip: its samples are those that it has alone."""
    extractor = waves(return_attention_mask=masked)
    sound = 0.3 + tone(seconds=0.05, rate=RATE)
    batch = AudioInputs(KIND.examples([sound], None), extractor, limit=RATE).batch([0])
    alone = extractor(sound, sampling_rate=RATE, return_tensors="pt")["input_values"][0]
    torch.testing.assert_close(batch["input_values"][0, : len(sound)], alone)
    assert (batch["input_values"][0, len(sound) :] == 0).all()
    assert batch["input_values"].shape[1] > len(sound)
    assert not masked or batch["attention_mask"].sum() == len(sound)
    few = AudioInputs(KIND.examples([sound[:2]], None), extractor, limit=RATE).batch([0])
    assert not masked or few["attention_mask"].sum() == round(0.025 * RATE)  # one frame, so that some is real


@pytest.mark.parametrize("extractor", [SeamlessM4TFeatureExtractor, Speech2TextFeatureExtractor, ASTFeatureExtractor])
def test_a_spectrogram_of_a_short_clip_is_normalised_over_the_clip_alone(extractor: Any):
    made, rate = extractor(), 16_000
    sound = np.random.default_rng(0).standard_normal(800).astype(np.float32)
    batch = AudioInputs(KIND.examples([sound, sound[:100]], None), made, limit=rate)
    alone = made([sound], sampling_rate=rate, return_tensors="pt")[made.model_input_names[0]]
    assert torch.equal(batch.batch([0])[made.model_input_names[0]], alone)
    assert batch.batch([1])[made.model_input_names[0]].isfinite().all()  # padded to the shortest that can be read


def test_silence_fills_no_clip_beyond_the_longest_length():
    made = inputs(waves(return_attention_mask=False), asked=100)
    assert made.lengths == [100] * 4
    assert made.batch([0, 3])["input_values"].shape == (2, 100)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_batches_of_one_length(seed: int | None):
    lengths = [3, 1, 3, 2, 3, 1, 3, 3]
    batches = length_batches(lengths, 2, seed=seed, equal=True)
    assert sorted(row for rows in batches for row in rows) == list(range(8))
    assert all(len({lengths[row] for row in rows}) == 1 for rows in batches)
    assert len(batches) == batch_count(lengths, 2, equal=True) == 5
    assert batch_count(lengths, 3) == len(length_batches(lengths, 3, seed=seed)) == 3


def test_a_longest_length():
    made = inputs(waves(), asked=100)
    assert (made.lengths, made.cut) == ([40, 100, 100, 100], 3)
    assert torch.equal(made.batch([3])["attention_mask"], torch.ones(1, 100, dtype=torch.int32))
    limits = [sample_limit(extractor, None) for extractor in (waves(), whisper_features(), ast_features())]
    assert limits == [30 * RATE, RATE, 5120]
    with pytest.raises(ConfigError, match="audio: max_length is 401 samples; the feature extractor takes 1 to 400"):
        sample_limit(whisper_features(), 401)
    with pytest.raises(ConfigError, match="audio: max_length is 0 samples; it must be positive"):
        sample_limit(waves(), 0)


def test_other_processors_are_refused():
    with pytest.raises(
        ConfigError, match=r"audio: the processor is a ViTImageProcessor.*; .* Give the one that AutoFeature"
    ):
        sample_limit(ViTImageProcessor(), None)


def test_an_extractor_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    made = inputs(whisper_features())
    monkeypatch.setattr(type(made._extractor), "_np_extract_fbank_features", lambda *_: 1 / 0)
    monkeypatch.setattr(type(made._extractor), "_torch_extract_fbank_features", lambda *_: 1 / 0)
    with pytest.raises(DataError, match=r"audio: WhisperFeatureExtractor fails on 1 clips \(division by zero\)"):
        made.batch([0])


def test_files_are_as_their_samples():
    sound = tone(seconds=0.7)
    split = KIND.examples([sound_bytes(sound, subtype="FLOAT"), sound], None)
    values = AudioInputs(split, waves(), limit=400).batch([0, 1])["input_values"]
    assert torch.equal(values[0], values[1])


def test_clips_are_read_only_for_the_hash_of_their_content(monkeypatch: pytest.MonkeyPatch):
    made, other = (inputs(waves(), seconds) for seconds in ([0.3], [0.4]))
    read: list[LazyAudio] = []
    whole = LazyAudio.read
    monkeypatch.setattr(LazyAudio, "read", lambda clip: read.append(clip) or whole(clip))
    assert isinstance(made, FramedInputs)
    assert made.digest != other.digest
    assert not read
    assert made.content_digest() == made.content_digest() != other.content_digest()
    assert len(read) == 2
