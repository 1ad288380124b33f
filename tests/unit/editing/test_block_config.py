"""Settings that number the blocks of a stack follow an edit of the blocks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import lamina


def whisper() -> WhisperForConditionalGeneration:
    """A small Whisper that can compute timestamps of tokens, from heads of its decoder blocks 2 and 4."""
    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"vocab_size": 200, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8}
    depths = {"encoder_layers": 2, "decoder_layers": 4, "max_source_positions": 1500, "max_target_positions": 40}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = WhisperForConditionalGeneration(WhisperConfig(**heads, **sizes, **depths, **tokens, **none)).eval()
    generation = model.generation_config
    generation.alignment_heads, generation.no_timestamps_token_id = [[1, 0], [3, 2]], 150
    generation._from_model_config = False  # else transformers builds a new one from the config when it loads the model
    generation.is_multilingual, generation.prev_sot_token_id = False, 5
    return model


def token_times(model: WhisperForConditionalGeneration) -> torch.Tensor:
    audio = torch.randn(1, 8, 3000, generator=torch.Generator().manual_seed(1))
    tokens = {"max_new_tokens": 6, "min_new_tokens": 6}
    return model.generate(audio, return_token_timestamps=True, return_timestamps=True, **tokens)["token_timestamps"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [([2, 3, 4], [[0, 0], [2, 2]]), ([1, 2], [[1, 0]]), ([4, 3, 2, 1], [[2, 0], [0, 2]]), ([4], [[0, 2]])],
)
def test_heads_that_give_timestamps_follow_their_blocks(order: list[int], expected: list[list[int]], tmp_path: Path):
    model = whisper()
    lamina.keep_(model, order, stack="decoder")
    assert model.generation_config.alignment_heads == expected
    lamina.save(model, tmp_path)
    for again in (lamina.load(tmp_path, type(model))[0], type(model).from_pretrained(tmp_path).eval()):
        assert again.generation_config.alignment_heads == expected
        assert torch.equal(token_times(again), token_times(model))


def test_copies_that_change_nothing_leave_the_timestamps():
    model = whisper()
    before = token_times(model)
    lamina.duplicate_(model, [1, 2], identity=True, stack="decoder")
    assert model.generation_config.alignment_heads == [[1, 0], [5, 2]]
    assert torch.equal(token_times(model), before)


def test_edits_of_the_encoder_leave_the_heads_of_the_decoder():
    model = whisper()
    lamina.keep_(model, [2], stack="encoder")
    assert model.generation_config.alignment_heads == [[1, 0], [3, 2]]


def test_without_the_last_head_timestamps_end_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = whisper()
    with caplog.at_level(logging.WARNING, logger="lamina"):
        lamina.keep_(model, [1, 3], stack="decoder")
    assert "keep_: timestamps of words are no longer available: they are computed from" in caplog.text
    assert "the decoder blocks 2, 4, and none of these is left" in caplog.text
    lamina.save(model, tmp_path)
    for again in (model, lamina.load(tmp_path, type(model))[0]):
        with pytest.raises(ValueError, match="token-level timestamps not available"):
            token_times(copy.deepcopy(again))
