"""What AdaLayers and SingleLayer share: projections, dropout and positions."""

from __future__ import annotations

import pytest
import torch
from tests.support.formulas import positions, view_of

from lamina.errors import ConfigError
from lamina.fusion import ada_layers
from lamina.fusion.ada_layers import AdaLayers, sinusoids
from lamina.fusion.single_layer import SingleLayer

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("dim", [1, 5, 8])
def test_positions_are_the_papers(dim: int):
    torch.testing.assert_close(sinusoids(MASK, dim)[MASK], positions(MASK, dim)[MASK], rtol=0, atol=1e-6)


def test_positions_count_real_tokens_only():
    table = sinusoids(MASK, 8)
    assert torch.equal(table[0, :2], table[1, :2])
    assert torch.equal(table[0, :2], table[2, 2:])


def test_positions_of_a_row_without_tokens_are_finite():
    assert bool(sinusoids(torch.zeros(1, 3, dtype=torch.bool), 6).isfinite().all())


def test_dropout_is_on_while_training_only_and_keeps_the_mean():
    fusion = AdaLayers(dim=64, dropout=0.25, output_activation=False).build(1, 8)
    fusion.generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 20, 20, 8)
    whole = fusion.eval()(states)
    dropped = fusion.train()(states)
    gone = dropped == 0
    assert gone.float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75)
    assert torch.equal(fusion.eval()(states), whole)


def test_each_layer_has_its_own_dropout():
    fusion = AdaLayers(dim=64, dropout=0.5, output_activation=False).build(2, 8).train()
    fusion.generator = torch.Generator().manual_seed(0)
    both_gone = (fusion(torch.randn(2, 40, 10, 8)) == 0).float().mean()
    assert both_gone.item() == pytest.approx(0.25, abs=0.02)


def test_positions_are_dropped_too():
    fusion = AdaLayers(dim=64, dropout=0.5, positions=True).build(1, 8).train()
    fusion.generator = torch.Generator().manual_seed(0)
    assert (fusion(torch.randn(1, 40, 10, 8)) == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_dropout_follows_the_fusions_own_generator_and_not_torchs():
    states = torch.randn(2, 2, 3, 8)
    fusion = AdaLayers(dim=8, dropout=0.5).build(2, 8).train()

    def run(own: int, global_seed: int) -> torch.Tensor:
        fusion.generator = torch.Generator().manual_seed(own)
        torch.manual_seed(global_seed)
        return fusion(states)

    before = torch.get_rng_state()
    assert torch.equal(run(1, 5), run(1, 6))
    assert not torch.equal(run(1, 5), run(2, 5))
    torch.set_rng_state(before)
    fusion.generator = torch.Generator().manual_seed(1)
    fusion(states)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_fusions_that_run_as_one_is_that_of_each_alone():
    states = torch.randn(3, 2, 4, 8)
    members = [AdaLayers(dim=8, dropout=0.5, positions=True).build(3, 8).train() for _ in range(3)]

    def seeded() -> None:
        for number, member in enumerate(members):
            member.generator = torch.Generator().manual_seed(number)

    seeded()
    alone = [member(states) for member in members]
    seeded()
    stream = members[0].stream(members)
    for index in range(3):
        stream.step(index, view_of(states[index]))
    together = stream.finish(torch.ones(2, 4, dtype=torch.bool))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_what_may_run_as_one():
    config = AdaLayers(dim=8)
    one, other = config.build(3, 8), config.build(3, 8)
    assert one.group() == other.group()
    assert one.group() == AdaLayers(dim=8, alpha=1.0, cutoff=0.1, entropy=3.0).build(3, 8).group()
    assert one.group() != AdaLayers(dim=4).build(3, 8).group()
    assert one.group() != AdaLayers(dim=8, dropout=0.5).build(3, 8).group()
    assert one.group() != AdaLayers(dim=8, output_activation=False).build(3, 8).group()
    assert one.group() != AdaLayers(dim=8, positions=True).build(3, 8).group()
    assert one.group() != config.build(3, 16).group()
    assert one.group() != config.build(3, 8).eval().group()
    assert one.group() != config.build(3, 8).double().group()


@pytest.mark.parametrize("config", [AdaLayers(dim=8), AdaLayers(dim=8, dropout=0.0), SingleLayer(layer=1, dim=8)])
def test_features_that_are_computed_again_have_the_gradients_of_features_that_are_kept(
    config: AdaLayers | SingleLayer, monkeypatch: pytest.MonkeyPatch
):
    members = [config.build(3, 16).train() for _ in range(2)]
    states = torch.randn(3, 4, 6, 16)

    def gradients() -> list[torch.Tensor]:
        for number, member in enumerate(members):
            member.generator = torch.Generator().manual_seed(number)
            member.zero_grad()
        stream = members[0].stream(members)
        for index in stream.active_layers(members):
            stream.step(index, view_of(states[index]))
        stream.finish(torch.ones(4, 6, dtype=torch.bool)).square().sum().backward()
        return [value.grad for member in members for value in member.parameters() if value.grad is not None]

    calls: list[int] = []
    again = ada_layers._Recomputed.backward
    monkeypatch.setattr(ada_layers._Recomputed, "backward", lambda *args: calls.append(1) or again(*args))
    kept = gradients()
    assert not calls
    monkeypatch.setattr(ada_layers, "KEPT", 0)
    computed = gradients()
    assert calls
    assert len(kept) == len(computed) > 0
    for one, other in zip(kept, computed, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("grad", [False, True])
def test_a_stream_keeps_one_accumulator(grad: bool):
    members = [AdaLayers(dim=8).build(3, 16).eval() for _ in range(2)]
    with torch.set_grad_enabled(grad):
        stream = members[0].stream(members)
        for index in range(3):
            stream.step(index, view_of(torch.randn(2, 80, 16)))
    tensors = {name: value for name, value in vars(stream).items() if isinstance(value, torch.Tensor)}
    kept = [value for name, value in tensors.items() if value.ndim > 2 and name != "_buffer"]
    assert [tuple(one.shape) for one in kept] == [(2, 80, 2, 8)]


def test_a_stream_that_was_fed_nothing_says_so():
    fusion = AdaLayers(dim=8).build(3, 16)
    with pytest.raises(ConfigError, match="fusion: no state was fed"):
        fusion.stream([fusion]).finish(torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_states_of_another_precision_are_read_in_the_parameters_own(dtype: torch.dtype):
    fusion = AdaLayers(dim=8).build(2, 16).eval()
    states = torch.randn(2, 1, 3, 16)
    got = fusion(states.to(dtype))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, fusion(states), rtol=0, atol=0.1)
