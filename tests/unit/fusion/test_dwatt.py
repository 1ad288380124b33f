"""DWAtt: its size, its fixed positions, its attention, and the states that it frees."""

from __future__ import annotations

import weakref

import pytest
import torch
from tests.support.formulas import dwatt_attention, stir_, view_of

from lamina.errors import ConfigError
from lamina.fusion.dwatt import DWAtt


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_it_has_the_papers_size():
    with torch.device("meta"):
        fusion = DWAtt().build(24, 1024)
    assert size(fusion) == 26_326_528
    assert size(fusion.query) == size(fusion.values[0]) == 1024 * 512 + 512 + 2 * 512 + 512 * 1024
    assert size(fusion.norms) == 24 * 2 * 1024
    assert size(fusion.keys) == 24 * 1024
    assert fusion.places.shape == (24, 24)


def test_sizes_that_are_chosen():
    fusion = DWAtt(bottleneck=3, position_dim=5).build(4, 8)
    assert fusion.values[0].down.weight.shape == (3, 8)
    assert fusion.keys.weight.shape == (8, 5)
    assert fusion.places.shape == (4, 5)
    assert fusion.dim == 8
    assert DWAtt().build(2, 9).values[0].down.weight.shape == (4, 9)
    assert DWAtt().build(2, 1).values[0].down.weight.shape == (1, 1)
    assert DWAtt().selector() == "1-"


def test_it_says_that_it_does_not_stream():
    assert not DWAtt.streams


def test_the_positions_are_drawn_once_from_torchs_generator_and_saved():
    torch.manual_seed(4)
    fusion, other = DWAtt(position_dim=400).build(5, 8), DWAtt(position_dim=400).build(5, 8)
    torch.manual_seed(4)
    assert torch.equal(DWAtt(position_dim=400).build(5, 8).places, fusion.places)
    assert not torch.equal(fusion.places, other.places)
    assert 0 <= fusion.places.min() < 0.01 < 0.99 < fusion.places.max() < 1
    assert fusion.places.mean().item() == pytest.approx(0.5, abs=0.03)
    assert "places" in fusion.state_dict()
    assert not any(parameter is fusion.places for parameter in fusion.parameters())
    fusion(torch.randn(5, 1, 2, 8)).sum().backward()
    assert not fusion.places.requires_grad


def test_the_top_state_goes_straight_through():
    fusion = DWAtt().build(3, 8)
    with torch.no_grad():
        for norm in fusion.norms:
            norm.weight.zero_()
    states = torch.randn(3, 1, 2, 8)
    assert torch.equal(fusion(states), states[-1])


def test_the_query_is_the_top_states():
    fusion = DWAtt().build(3, 8).eval()
    stir_(fusion)
    states = torch.randn(3, 1, 2, 8)
    fusion(states)
    before = fusion.importance()
    for index, changes in ((0, False), (1, False), (2, True)):
        other = states.clone()
        other[index] += 1
        fusion.train().eval()(other)
        assert torch.allclose(fusion.importance(), before) is not changes


def test_scores_are_not_divided_by_the_root_of_their_size():
    fusion = DWAtt(position_dim=1).build(2, 64).eval()
    with torch.no_grad():
        fusion.query.up.weight.zero_()
        fusion.keys.weight.fill_(1 / 64)
        fusion.places.copy_(torch.tensor([[0.0], [1.0]]))
    fusion(torch.zeros(2, 1, 1, 64))  # q is all ones, so the scores are 0 and 1
    assert fusion.importance()[1].item() == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=1e-6)


def test_importances_are_the_attention_of_the_real_tokens_that_were_read():
    fusion = DWAtt().build(4, 8).eval()
    stir_(fusion)
    assert fusion.importance().tolist() == [0.25] * 4
    states, mask = torch.randn(4, 2, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        attention = dwatt_attention(fusion, states)[mask]
        fusion(states, mask)
        torch.testing.assert_close(fusion.importance(), attention.mean(0))
        fusion(states[:, :1, :3], mask[:1, :3])
        everything = torch.cat([attention, dwatt_attention(fusion, states[:, :1, :3])[0]])
    torch.testing.assert_close(fusion.importance(), everything.mean(0))
    assert "amounts" not in fusion.state_dict()
    fusion.train()
    assert fusion.importance().tolist() == [0.25] * 4


@torch.no_grad()
def test_the_states_are_let_go():
    fusion = DWAtt().build(4, 8).eval()
    stream = fusion.stream([fusion])
    states = [torch.randn(1, 2, 8) for _ in range(4)]
    known = [weakref.ref(state) for state in states]
    for index in range(4):
        stream.step(index, view_of(states[index]))
    del states
    assert all(one() is not None for one in known)
    alive: list[int] = []
    for value in fusion.values:
        value.register_forward_pre_hook(lambda *_: alive.append(sum(one() is not None for one in known)))
    stream.finish(torch.ones(1, 2, dtype=torch.bool))
    assert alive == [4, 3, 2, 1]  # those above were read already; the top one went into the result
    assert [one() for one in known] == [None] * 4


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="dwatt: bottleneck is 0; it must be"):
        DWAtt(bottleneck=0)
    with pytest.raises(ConfigError, match="dwatt: position_dim is 0; it must be"):
        DWAtt(position_dim=0)
    with pytest.raises(ConfigError, match="fusion: layers is 0; it must be"):
        DWAtt().build(0, 8)
