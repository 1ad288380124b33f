"""States that a model keeps in another form than `[batch, tokens, width]`: streams, patches, padding of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.portions import one_in
from tests.support.small_configs import small_config
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import lamina
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.probe_input import Probe, probe_input
from lamina.layers.state_forms import Form, count_tokens, forms_of

TAKEN_AS: dict[str, Callable[[Tensor], Tensor]] = {
    "gemma3n_text": lambda state: state.mean(0) if state.ndim == 4 else state,
    "deepseek_v4": lambda state: state.mean(2) if state.ndim == 4 else state,
    "sam_vision_model": lambda state: state.flatten(1, 2),
    "vitdet": lambda state: state.flatten(2).transpose(1, 2),
    "qwen3_5_vision": lambda state: state[None],
    "longformer": lambda state: state,
    "cpmant": lambda state: state,
    "qwen2_audio_encoder": lambda state: state.repeat_interleave(2, 1) if state.shape[1] == 512 else state,
}


def build(name: str):
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[name])
    return MODEL_MAPPING[type(config)](config).eval()


@pytest.mark.parametrize("name", one_in(3, TAKEN_AS))
@torch.no_grad()
def test_layers_are_the_states_in_one_form(name: str):
    model = build(name)
    for tokens in (5, 9):
        inputs = probe_input(model, tokens, seed=tokens).inputs
        with lamina.tap(model) as states:
            output = model(**inputs, output_hidden_states=True)
        expected = [TAKEN_AS[name](state) for state in output.hidden_states]
        assert [*states] == [*range(len(expected))]
        assert all(torch.equal(states[layer], state) for layer, state in enumerate(expected))
        assert len({state.shape for state in states.values()}) == 1


@torch.no_grad()
def test_padding_that_the_model_adds_is_cut_without_a_mask_too():
    model = build("longformer")
    ids = torch.randint(5, 99, (3, 6))
    with lamina.tap(model, [0, 2]) as states:
        model(ids)
    assert {state.shape for state in states.values()} == {(3, 6, 64)}


@torch.no_grad()
def test_each_stack_is_cut_to_its_own_number_of_tokens():
    model = build("prophetnet")  # its decoder carries streams for the next tokens behind the stream of the states
    inputs = {"input_ids": torch.randint(5, 99, (2, 6)), "decoder_input_ids": torch.randint(5, 99, (2, 4))}
    with lamina.tap(model, stack="decoder") as states:
        expected = model(**inputs, output_hidden_states=True).decoder_hidden_states
    assert all(torch.equal(states[layer], state) for layer, state in enumerate(expected))
    assert {state.shape[:2] for state in states.values()} == {(2, 4)}


def test_what_needs_plain_states_inside_the_blocks_is_refused():
    model = build("deepseek_v4")
    with pytest.raises(UnsupportedModelError, match=r"that are not \[batch, tokens"), lamina.tap(model, site="ffn"):
        pass
    with pytest.raises(ConfigError, match=r"that are not \[batch, tokens"):
        lamina.ReaderBank(model).add(
            "a", lamina.Reader(lamina.fusion.ExtraLayers(), lamina.SequenceClassification(["x", "y"]))
        )


def test_the_side_of_padding_is_seen_in_layer_0():
    probe = Probe({"input_ids": torch.zeros(2, 3, dtype=torch.long)}, 2)
    padded = torch.randn(2, 5, 4)
    padded[:, 3:] = 1.0
    later = torch.randn(2, 5, 4)
    last = torch.randn(2, 3, 4)
    assert forms_of([padded, later, last], probe, 3) == [Form("first"), Form("first"), None]
    assert forms_of([padded.flip(1), later, last], probe, 3) == [Form("last"), Form("last"), None]
    assert forms_of([later, padded, last], probe, 3) == [None] * 3  # not known: what was added differs between the rows
    assert forms_of([padded, later], probe, 3) == [None, None]  # tokens of the model's own, in every layer


@torch.no_grad()
@pytest.mark.parametrize("tokens", one_in(3, [4, 9, 16]))
def test_characters_that_share_a_state_are_those_of_the_model(tokens: int):
    """Layer i of CANINE's middle blocks is what the model itself joins with the states of its characters."""
    model = build("canine")
    joined: list[Tensor] = []
    model.projection.register_forward_pre_hook(lambda _module, args: joined.append(args[0]))
    ids = torch.randint(5, 99, (2, tokens))
    with lamina.tap(model) as states:
        own = model(ids, output_hidden_states=True).hidden_states
    last = model.config.num_hidden_layers + 2  # after two states of characters and one of the first molecules
    assert len(own[last][0]) == tokens // model.config.downsampling_rate
    assert torch.equal(states[last], joined[-1][..., model.config.hidden_size :])
    assert {state.shape for state in states.values()} == {(2, tokens, model.config.hidden_size)}


def test_pooled_states_have_a_form_for_audio_only():
    sound, image = (Probe({name: torch.zeros(1, 3, 8, 8)}, 1) for name in ("input_features", "pixel_values"))
    states = [torch.randn(1, 8, 6), torch.randn(1, 8, 6), torch.randn(1, 4, 6)]
    assert forms_of(states, sound, None) == [None, None, Form("repeated", each=2)]
    assert forms_of(states, image, None) == [None] * 3
    assert forms_of(states[::-1], sound, None) == [None] * 3
    assert forms_of([*states[:2], torch.randn(1, 3, 6)], sound, None) == [None] * 3  # no whole number of positions


def test_ambiguous_axes_have_no_form():
    text = Probe({"input_ids": torch.zeros(2, 7, dtype=torch.long)}, 2)
    assert forms_of([torch.randn(3, 2, 7, 8)], text, 7) == [Form("streams", 0)]
    assert forms_of([torch.randn(2, 2, 7, 8)], text, 7) == [None]  # two streams, or two rows
    image = Probe({"pixel_values": torch.zeros(1, 3, 8, 8)}, 1)
    assert forms_of([torch.randn(1, 4, 4, 6)], image, None) == [Form("patches")]
    assert forms_of([torch.randn(1, 4, 4, 4)], image, None) == [None]
    assert forms_of([torch.randn(1, 6, 4, 4), torch.randn(1, 6, 2, 2)], image, None) == [None, None]


def test_tokens_are_counted_in_the_input_of_a_module():
    assert count_tokens({"attention_mask": torch.ones(2, 5)}) == 5
    assert count_tokens({"inputs_embeds": torch.ones(2, 4, 8), "attention_mask": None}) == 4
    assert count_tokens({"hidden_states": torch.ones(2, 4, 8)}) is None
