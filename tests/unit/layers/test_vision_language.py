"""Vision-language models: layers of the language model, read while the model gets an image beside its text."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.small_configs import small_config
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

import lamina

FAMILIES = ("llava", "paligemma", "qwen2_vl", "qwen3_vl", "gemma3", "llama4", "mistral3")


def build(name: str) -> Any:
    """A small model that writes texts about images."""
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[name])
    cls: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model = cls(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a Gemma 3 that was not trained sees no images
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def image(model: Any, seed: int) -> dict[str, Tensor]:
    """An image as the model reads it: pixels, or the packed patches of four by four."""
    config, rng = model.config.vision_config, torch.Generator().manual_seed(seed)
    if hasattr(config, "temporal_patch_size"):
        values = 3 * config.temporal_patch_size * config.patch_size**2
        return {
            "pixel_values": torch.randn(16, values, generator=rng),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
    size = config.image_size
    sizes = {"image_sizes": torch.tensor([[size, size]])} if model.config.model_type == "mistral3" else {}
    return {"pixel_values": torch.randn(1, 3, size, size, generator=rng), **sizes}


@torch.no_grad()
def with_image(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """A text with an image in it."""
    pixels = image(model, seed)
    output = model.get_image_features(**pixels)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    count = sum(feature.shape[0] for feature in features)
    token = model.config.image_token_id
    ids = torch.tensor([[5, 6, *[token] * count, 7, 8, 9]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    accepted = inspect.signature(model.forward).parameters
    return inputs | {name: (ids == token).long() for name in _KINDS if name in accepted}


_KINDS = ("token_type_ids", "mm_token_type_ids")  # which tokens stand for an image


@pytest.mark.parametrize("name", one_in(4, FAMILIES))
@torch.no_grad()
def test_layers_are_the_states_of_text_and_image(name: str):
    """Law 2: the stack was found on a text alone."""
    model = build(name)
    assert lamina.stacks(model)["main"].depth == model.config.text_config.num_hidden_layers
    inputs = with_image(model)
    with lamina.tap(model) as states:
        own = model(**inputs, output_hidden_states=True).hidden_states
    assert [*states] == [*range(len(own))]
    assert all(torch.equal(states[layer], state) for layer, state in enumerate(own))
    with lamina.tap(model) as others:
        model(**with_image(model, seed=1))
    assert all((states[layer] - state).abs().max() > 1e-4 for layer, state in others.items())  # the image is seen


@pytest.mark.parametrize("name", one_in(4, FAMILIES))
@torch.no_grad()
def test_a_reader_reads_the_same_alone_and_while_the_model_writes(name: str):
    model = build(name)
    inputs = with_image(model)
    plain = model(**inputs).logits
    bank = lamina.ReaderBank(model)
    bank.add("a", lamina.Reader(lamina.ScalarMix(), lamina.SequenceClassification(("a", "b"), pooling="mean")))
    bank.eval()
    alone = bank(**inputs)["a"].logits
    with bank.listen() as heard:
        assert torch.equal(model(**inputs).logits, plain)
    torch.testing.assert_close(heard["a"].logits, alone, rtol=1e-5, atol=1e-5)


def tower_of(model: Any) -> Any:
    towers = ("visual", "vision_tower", "vision_model")
    return next(part for name, part in model.named_modules() if name.rpartition(".")[2] in towers)


@pytest.mark.parametrize("name", one_in(4, FAMILIES))
@torch.no_grad()
def test_both_parts_are_cut_and_reload(name: str, tmp_path: Any):
    """The stack is the language model; the vision tower is edited as a model of its own."""
    model = build(name)
    inputs = with_image(model)
    lamina.drop_(model, 2)
    lamina.duplicate_(model, 1, identity=False)
    lamina.drop_(tower_of(model), 1)
    edited = model(**inputs).logits
    lamina.save(model, tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, edited)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached, plain = (again.generate(**inputs, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    whole, *cut = (lamina.stacks(tower_of(part))["main"].depth for part in (build(name), model, again))
    assert cut == [whole - 1] * 2
