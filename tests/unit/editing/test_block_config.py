"""Settings that number the blocks of a stack follow an edit of the blocks."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    CLIPSegConfig,
    CLIPSegModel,
    Data2VecVisionConfig,
    Data2VecVisionForSemanticSegmentation,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    Dinov2Config,
    DPTConfig,
    DPTForDepthEstimation,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import lamina
from lamina.errors import ConfigError


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


_VISION = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 64, "patch_size": 16}
_VISION["num_hidden_layers"] = 8


def with_taps(family: str) -> PreTrainedModel:
    """A small model whose head reads the outputs of the blocks 2, 4, 6 and 8 of 8."""
    torch.manual_seed(0)
    necks = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8}
    pools = {"out_indices": [2, 4, 6, 8], "use_auxiliary_head": False, "pool_scales": [1, 2], "num_labels": 3}
    if family == "dpt":
        return DPTForDepthEstimation(DPTConfig(**_VISION, backbone_out_indices=(1, 3, 5, 7), **necks)).eval()
    if family == "beit":
        return BeitForSemanticSegmentation(BeitConfig(**_VISION, **pools)).eval()
    if family == "data2vec":
        return Data2VecVisionForSemanticSegmentation(Data2VecVisionConfig(**_VISION, **pools)).eval()
    stages = [f"stage{number}" for number in (2, 4, 6, 8)]
    backbone = Dinov2Config(**_VISION, out_features=stages, reshape_hidden_states=False)
    sizes = {"patch_size": 16, "reassemble_hidden_size": 32, "head_hidden_size": 4}
    return DepthAnythingForDepthEstimation(DepthAnythingConfig(backbone_config=backbone, **sizes, **necks)).eval()


def taps(model: PreTrainedModel) -> list[int]:
    """The blocks, from 1, whose outputs the head reads."""
    config = model.config
    if hasattr(config, "backbone_out_indices"):
        return [number + 1 for number in config.backbone_out_indices]
    return list(getattr(config, "backbone_config", config).out_indices)


@pytest.mark.parametrize("family", ["dpt", "beit", "data2vec", "depth_anything"])
@torch.no_grad()
def test_blocks_whose_outputs_a_head_reads_are_renumbered(family: str, tmp_path: Path):
    model, image = with_taps(family), torch.randn(1, 3, 64, 64)
    before = model(image)[0]
    lamina.duplicate_(model, [2, 5], identity=True)
    assert taps(model) == [2, 5, 8, 10]
    torch.testing.assert_close(model(image)[0], before)
    lamina.drop_(model, [1, 3])
    assert taps(model) == [1, 3, 6, 8]
    lamina.save(model, tmp_path)
    for again in (lamina.load(tmp_path, type(model))[0], type(model).from_pretrained(tmp_path).eval()):
        assert taps(again) == [1, 3, 6, 8]
        torch.testing.assert_close(again(image)[0], model(image)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "dpt",
            r"reads the outputs of the blocks 2, 4, 6, 8 \('backbone_out_indices'\), and 4 would be removed\. Keep",
        ),
        (
            "depth_anything",
            r"reads the outputs of the blocks 2, 4, 6, 8 \('out_features'\), and 4 would be removed\. Keep",
        ),
        ("beit", "requires config.out_indices to be a list of 4"),
        ("data2vec", "requires config.out_indices to be a list of 4"),
    ],
)
def test_a_block_whose_output_a_head_reads_stays(family: str, message: str):
    model = with_taps(family)
    with pytest.raises(ConfigError, match=message):
        lamina.drop_(model, 4)
    assert taps(model) == [2, 4, 6, 8]


def test_without_the_head_any_block_can_go():
    model = with_taps("dpt").base_model
    lamina.truncate_(model, 5)
    assert list(model.config.backbone_out_indices) == [1, 3]


def test_a_list_in_the_outer_config_follows_the_blocks_of_its_tower():
    text = {"hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 64}
    text |= {"vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPSegConfig(text_config=text, vision_config=_VISION, projection_dim=16, extract_layers=[1, 3, 5])
    model = CLIPSegModel(config).eval()
    lamina.drop_(model, 1, stack="text")
    assert model.config.extract_layers == [1, 3, 5]
    lamina.drop_(model, [1, 3], stack="vision")
    assert model.config.extract_layers == [0, 1, 3]
