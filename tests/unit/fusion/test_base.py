"""The base classes of fusions; the promises of every registered fusion are tested in contract/test_fusions.py."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.support.formulas import view_of
from torch import nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion import FUSIONS
from lamina.fusion.base import Fusion, FusionConfig, WeightedSum
from lamina.fusion.scalar_mix import ScalarMix
from lamina.layers.sites import Site
from lamina.utils import check_range


@dataclass(frozen=True)
class Own(FusionConfig):
    """A fusion that another package adds."""

    ranges: tuple[int, ...] = (1, 2)
    op: str = "sum"


@dataclass(frozen=True)
class WithBlocks(FusionConfig):
    needs_block_inputs = True


@dataclass(frozen=True)
class AtSite(FusionConfig):
    site: Site = "output"  # pyright: ignore[reportIncompatibleVariableOverride]


def test_a_fusion_reads_inside_the_blocks_if_it_needs_their_inputs_or_has_a_site_there():
    assert WithBlocks().reads_inside
    assert AtSite("ffn").reads_inside
    assert not AtSite().reads_inside
    assert not Own().reads_inside


def test_settings_of_other_packages_may_have_any_name():
    assert (Own().ranges, Own().op) == ((1, 2), "sum")
    with pytest.raises(ConfigError, match="own: op is 3; it must be a text"):
        Own(op=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["shared", "stream_of"])
def test_a_submodule_that_a_setting_hides_is_refused(name: str):
    class Hidden(Fusion):
        def __init__(self) -> None:
            super().__init__(None, layers=1, width=2)
            self.__setattr__(name, nn.Linear(2, 2))

    with pytest.raises(ConfigError, match=f"Hidden has a submodule '{name}'.*'{name}_layer'"):
        Hidden()


def test_a_stream_that_was_fed_nothing_says_so():
    with pytest.raises(ConfigError, match="fusion: no state was fed; feed every active layer before finish"):
        WeightedSum(torch.ones(2)).finish(torch.ones(1, 1, dtype=torch.bool))


def test_a_stream_keeps_one_state_only():
    stream = WeightedSum(torch.tensor([1.0, 2.0, 3.0]))
    for index in range(3):
        stream.step(index, view_of(torch.full((1, 2, 3), 10.0**index)))
    kept = [value for value in vars(stream).values() if isinstance(value, torch.Tensor)]
    assert len(kept) == 1
    assert torch.equal(stream.finish(torch.ones(1, 2, dtype=torch.bool))[0], torch.full((1, 2, 3), 321.0))


def test_half_precision_states_are_summed_in_the_precision_of_the_weights():
    stream = WeightedSum(torch.tensor([1.0, 1.0]))
    stream.step(0, view_of(torch.full((1, 1, 1), 256.0, dtype=torch.bfloat16)))
    stream.step(1, view_of(torch.full((1, 1, 1), 1.0, dtype=torch.bfloat16)))
    assert stream.finish(torch.ones(1, 1, dtype=torch.bool))[0].item() == 257  # bfloat16 has no 257


def test_a_view_works_gelu_out_once(monkeypatch: pytest.MonkeyPatch):
    calls = []
    gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda state: calls.append(1) or gelu(state))
    view = view_of(torch.randn(1, 2, 3))
    assert view.gelu is view.gelu
    assert view.normed is view.normed
    assert calls == [1]


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_a_value_within_its_range_passes(value: float):
    check_range("here", "share", value, 0, 1)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_value_outside_its_range_is_refused(value: float):
    with pytest.raises(ConfigError, match=rf"here: share is {value}; it must be "):
        check_range("here", "share", value, 0, 1)


def test_an_open_range_leaves_its_end_out():
    with pytest.raises(ConfigError, match=r"here: share is 1; it must be "):
        check_range("here", "share", 1, 0, 1, open_high=True)


@pytest.mark.parametrize("layers", [np.array([1, 3]), torch.tensor([1, 3]), [1, 3], range(1, 4, 2)])
def test_layers_are_kept_in_a_form_that_can_be_saved(layers: object):
    fusion = ScalarMix(layers=layers)  # pyright: ignore[reportArgumentType]
    assert fusion.layers == (1, 3)
    assert json.loads(json.dumps(FUSIONS.to_dict(fusion)))["layers"] == [1, 3]
    assert hash(fusion) == hash(ScalarMix(layers=(1, 3)))
