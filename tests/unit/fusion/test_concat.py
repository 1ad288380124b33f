"""Concat: its initialisation, its size, and what it computes once for several readers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.formulas import view_of
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.errors import ConfigError
from lamina.fusion.concat import Concat

PRODUCTS = [getattr(torch.ops.aten, name) for name in ("mm", "addmm", "linear", "bmm", "baddbmm", "baddbmm_")]


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_it_is_one_linear_map_of_the_states_side_by_side():
    fusion = Concat(dim=5, bias=True).build(3, 8)
    linear = torch.nn.Linear(24, 5)
    with torch.no_grad():
        linear.weight.copy_(torch.cat(list(fusion.projection), dim=1))
        linear.bias.copy_(fusion.bias)
    states = torch.randn(3, 2, 4, 8)
    torch.testing.assert_close(fusion(states), linear(torch.cat(list(states), dim=-1)))


def test_it_has_the_papers_size():
    with torch.device("meta"):
        assert size(Concat().build(24, 1024)) == 25_165_824
        assert size(Concat(bias=True).build(24, 1024)) == 25_165_824 + 1024
        assert size(Concat(dim=64).build(24, 1024)) == 24 * 64 * 1024


def test_its_size_is_the_models_width_unless_said():
    assert Concat().build(3, 12).dim == 12
    assert Concat(dim=5).build(3, 12).dim == 5


def test_it_starts_as_a_linear_map_of_all_the_states_does():
    fusion = Concat(dim=200, bias=True).build(4, 64)
    linear = torch.nn.Linear(4 * 64, 200)
    for own, plain in ((fusion.projection, linear.weight), (fusion.bias, linear.bias)):
        assert own is not None
        assert own.abs().max() <= 1 / math.sqrt(4 * 64)
        assert own.std().item() == pytest.approx(plain.std().item(), rel=0.1)
    assert not torch.equal(fusion.projection[0], fusion.projection[1])


def test_the_default_leaves_the_embeddings_out():
    assert Concat().selector() == "1-"


def test_several_cost_one_matrix_product_per_layer():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func.overloadpacket in PRODUCTS
            return func(*args, **(kwargs or {}))

    members = [Concat(dim=6).build(3, 8) for _ in range(5)]
    with torch.no_grad(), Products() as seen:
        stream = members[0].stream(members)
        for index in range(3):
            stream.step(index, view_of(torch.randn(2, 4, 8)))
        stream.finish(torch.ones(2, 4, dtype=torch.bool))
    assert seen.count == 3


def test_what_may_run_as_one():
    one = Concat(dim=6).build(3, 8)
    assert one.group() == Concat(dim=6).build(3, 8).group()
    assert Concat().build(3, 8).group() == Concat(dim=8).build(3, 8).group()
    for other in (Concat(dim=5).build(3, 8), Concat(dim=6, bias=True).build(3, 8), Concat(dim=6).build(3, 16)):
        assert one.group() != other.group()
    assert one.group() != Concat(dim=6).build(3, 8).double().group()


@pytest.mark.parametrize("grad", [False, True])
def test_a_stream_keeps_one_accumulator(grad: bool):
    members = [Concat(dim=5).build(3, 16) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        stream = members[0].stream(members)
        for index in range(3):
            stream.step(index, view_of(torch.randn(2, 5, 16)))
    kept = [value for value in vars(stream).values() if isinstance(value, torch.Tensor) and value.ndim > 2]
    assert [tuple(one.shape) for one in kept] == [(2, 10, 5)]


def test_a_stream_that_was_fed_nothing_says_so():
    fusion = Concat().build(3, 16)
    with pytest.raises(ConfigError, match="fusion: no state was fed; feed every active layer before finish"):
        fusion.stream([fusion]).finish(torch.ones(1, 1, dtype=torch.bool))


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="concat: dim is 0; it must be"):
        Concat(dim=0)
    with pytest.raises(ConfigError, match="fusion: layers is 0; it must be"):
        Concat().build(0, 8)
