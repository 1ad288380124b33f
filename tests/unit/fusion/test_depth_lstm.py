"""DepthLSTM against torch's LSTM over the layers."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.formulas import view_of

from lamina.errors import ConfigError
from lamina.fusion.depth_lstm import DepthLSTM, DepthLSTMFusion


def torchs_own(fusion: DepthLSTMFusion) -> torch.nn.LSTM:
    lstm = torch.nn.LSTM(fusion.width, fusion.dim)
    lstm.load_state_dict({f"{key}_l0": value for key, value in fusion.cell.state_dict().items()})
    return lstm


def over_the_layers(lstm: torch.nn.LSTM, states: torch.Tensor) -> torch.Tensor:
    """The last hidden state of each token; its layers are the time."""
    layers, batch, tokens, width = states.shape
    return lstm(states.reshape(layers, batch * tokens, width))[0][-1].view(batch, tokens, -1)


def test_it_is_torchs_lstm_over_the_layers():
    fusion = DepthLSTM(dim=5).build(4, 8)
    states = torch.randn(4, 2, 3, 8)
    torch.testing.assert_close(fusion(states), over_the_layers(torchs_own(fusion), states), rtol=0, atol=1e-6)


def test_its_gradients_are_those_of_torchs_lstm():
    fusion = DepthLSTM(dim=5).build(4, 8)
    lstm = torchs_own(fusion)
    states = torch.randn(4, 2, 3, 8)
    fusion(states).square().sum().backward()
    over_the_layers(lstm, states).square().sum().backward()
    for own, plain in zip(fusion.parameters(), lstm.parameters(), strict=True):
        torch.testing.assert_close(own.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_one_layer_is_one_step():
    fusion = DepthLSTM(dim=5).build(1, 8)
    state = torch.randn(1, 2, 3, 8)
    torch.testing.assert_close(fusion(state), over_the_layers(torchs_own(fusion), state), rtol=0, atol=1e-6)


def test_the_order_of_the_layers_matters():
    fusion = DepthLSTM().build(3, 8)
    states = torch.randn(3, 1, 2, 8)
    assert not torch.allclose(fusion(states), fusion(states.flip(0)), atol=1e-3)


def test_sizes_and_start():
    fusion = DepthLSTM().build(3, 64)
    assert fusion.dim == 64
    assert sum(parameter.numel() for parameter in fusion.parameters()) == 4 * 64 * (64 + 64 + 2)
    assert all(parameter.abs().max() <= 1 / math.sqrt(64) for parameter in fusion.parameters())
    assert DepthLSTM().selector() == "1-"
    assert DepthLSTM.streams


def test_what_may_run_as_one():
    one = DepthLSTM(dim=4).build(3, 8)
    assert one.group() == DepthLSTM(dim=4).build(3, 8).group()
    assert one.group() != DepthLSTM(dim=5).build(3, 8).group()
    assert one.group() != DepthLSTM(dim=4).build(3, 16).group()
    assert one.group() != DepthLSTM(dim=4).build(3, 8).double().group()


def test_a_stream_keeps_two_states_of_its_own_size():
    members = [DepthLSTM(dim=5).build(9, 16) for _ in range(2)]
    with torch.no_grad():
        stream = members[0].stream(members)
        for index in range(9):
            stream.step(index, view_of(torch.randn(3, 7, 16)))
    tensors = [value for value in vars(stream).values() if isinstance(value, torch.Tensor)]
    assert [tuple(value.shape) for value in tensors] == [(2, 21, 5)] * 2


def test_a_stream_that_was_fed_nothing_says_so():
    fusion = DepthLSTM().build(3, 16)
    with pytest.raises(ConfigError, match="fusion: no state was fed; feed every active layer before finish"):
        fusion.stream([fusion]).finish(torch.ones(1, 1, dtype=torch.bool))


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="depth_lstm: dim is 0; it must be"):
        DepthLSTM(dim=0)
    with pytest.raises(ConfigError, match="fusion: layers is 0; it must be"):
        DepthLSTM().build(0, 8)
