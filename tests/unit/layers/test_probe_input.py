import pytest
import torch
import transformers
from tests.support import toys
from tests.support.portions import one_in
from tests.support.small_configs import small_config
from tests.support.tiny import FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from lamina.errors import UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.causality import is_causal
from lamina.layers.layer_modules import layer_modules
from lamina.layers.probe_input import PADDED, NoInputError, probe_input
from lamina.layers.stack import position_limit

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def test_text_is_padded_on_the_right_and_ends_in_the_end_token():
    model = FAMILIES["bart"].build()
    inputs = probe_input(model, 7, seed=1).inputs
    assert inputs["attention_mask"].tolist() == [[1] * 7, [1] * (7 - PADDED) + [0] * PADDED]
    assert inputs["input_ids"][0, -1] == inputs["input_ids"][1, -1 - PADDED] == model.config.eos_token_id
    assert inputs["input_ids"][1, -1] == model.config.pad_token_id
    assert inputs["decoder_input_ids"].shape == (2, 5)


def test_special_tokens_are_kept_out():
    model = toys.Toy(image_token_id=3, mask_token_id=4, stop_token_ids=[5, 6, -200, 99], vocab_size=9)
    ids = probe_input(model, 60, seed=0).inputs["input_ids"][0]
    assert set(ids.tolist()) == {1, 2, 7, 8}


def test_the_seed_decides():
    model = toys.Toy()
    one, same, other = (probe_input(model, 9, seed=seed).inputs["input_ids"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_no_vocabulary():
    with pytest.raises(NoInputError, match="its config has no vocab_size"):
        probe_input(toys.Toy(vocab_size=None), 7, seed=0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("input_values", "it reads audio, .* nor num_mel_bins with max_length"),
        ("input_features", "it reads spectrograms"),
    ],
)
def test_audio_of_unknown_size(name, reason):
    model = toys.Toy()
    model.main_input_name = name
    with pytest.raises(UnsupportedModelError, match=reason):
        stacks(model)


def test_images_have_the_size_and_type_of_the_model():
    model = transformers.ViTModel(transformers.ViTConfig(**TINY, image_size=(16, 24), patch_size=8, num_channels=1))
    pixels = probe_input(model.bfloat16(), 7, seed=0).inputs["pixel_values"]
    assert (pixels.shape, pixels.dtype) == ((1, 1, 16, 24), torch.bfloat16)
    assert stacks(model)["main"].depth == 2


@pytest.mark.parametrize("frames", [7, 11])
def test_a_waveform_gives_the_frames_asked_for(frames):
    model = FAMILIES["wav2vec2"].build()
    inputs = probe_input(model, frames, seed=0).inputs
    assert model(**inputs).last_hidden_state.shape[:2] == (2, frames)


def test_spectrograms():
    ast = transformers.ASTModel(
        transformers.ASTConfig(**TINY, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8)
    )
    assert stacks(ast)["main"].depth == 2
    conformer = transformers.Wav2Vec2BertModel(transformers.Wav2Vec2BertConfig(**TINY, feature_projection_input_dim=8))
    assert stacks(conformer)["main"].depth == 2


def test_an_encoder_and_a_decoder_of_different_families():
    text = {**TINY, "vocab_size": 99}
    vision = transformers.ViTConfig(**TINY, image_size=16, patch_size=4)
    decoder = transformers.BertConfig(**text, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    found = stacks(transformers.VisionEncoderDecoderModel(config))
    assert {name: stack.depth for name, stack in found.items()} == {"encoder": 2, "decoder": 2}
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(transformers.BertConfig(**text), decoder)
    found = stacks(transformers.EncoderDecoderModel(config))
    assert {name: stack.scope_path for name, stack in found.items()} == {
        "encoder": "encoder",
        "decoder": "decoder.bert",
    }


def test_a_model_that_also_sees_is_read_as_text():
    vision = transformers.CLIPVisionConfig(**TINY, image_size=16, patch_size=4)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TINY, vocab_size=99), image_token_index=98
    )
    model = transformers.LlavaForConditionalGeneration(config)
    assert stacks(model)["main"].scope_path == "model.language_model"
    assert position_limit(model) == config.text_config.max_position_embeddings > 1 + (16 // 4) ** 2  # not the patches


@pytest.mark.parametrize(
    ("name", "variant", "full"),
    one_in(
        2,
        [
            ("bros", "small", True),
            ("glmasr_encoder", "small", True),
            ("moonshine", "default width", False),
            ("lfm3_vl_vision", "small", False),
        ],
    ),
)
def test_boxes_spectrograms_waveforms_and_packed_patches_fit(name: str, variant: str, full: bool):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = small_config(CONFIG_MAPPING[name], variant)
    model = MODEL_MAPPING[type(config)](config).eval()
    assert all(stack.depth > 1 for stack in stacks(model).values())
    assert probe_input(model, 7, seed=0).is_full == full  # remembered, as the model does not run on the other input


def test_a_backbone_gets_the_full_input_that_its_model_needs():
    config = small_config(CONFIG_MAPPING["bros"], "small")  # the backbone raises ValueError without boxes, too
    model = transformers.BrosForTokenClassification(config)
    stack = stacks(model)["main"]
    assert not is_causal(model, stack)
    assert model.bros.embeddings.word_embeddings in layer_modules(model, stack, [0])[0]


def test_a_model_in_a_wrapper_gets_the_inputs_that_it_gets_alone():
    peft = pytest.importorskip("peft")
    model = FAMILIES["t5"].build()  # it needs an input for the decoder; the wrapper's `forward` does not name any
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q"]))
    assert probe_input(wrapped, 7, seed=0).inputs.keys() == probe_input(model, 7, seed=0).inputs.keys()
    assert list(stacks(wrapped)) == ["encoder", "decoder"]


def test_a_full_input_says_where_the_patches_of_its_images_lie():
    config = small_config(CONFIG_MAPPING["siglip2"])
    model = MODEL_MAPPING[type(config)](config).eval()
    probe = probe_input(model, 7, seed=0, full=True)
    assert probe.inputs["spatial_shapes"].tolist() == [[4, 4]] * 2
    assert model(**probe.inputs).logits_per_image.shape == (2, 2)
