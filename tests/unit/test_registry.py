"""Registries: names, suggestions, and configs that are written and read again."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from lamina import registry as module
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.base import FusionConfig
from lamina.fusion.mean import Mean
from lamina.heads import HEADS
from lamina.heads.sequence_classification import SequenceClassification
from lamina.registry import Registry

ROWS = {
    "ada": "lamina.fusion.ada_layers:AdaLayers",
    "sequence": "lamina.heads.sequence_classification:SequenceClassification",
}


@pytest.fixture
def registry() -> Registry:
    return Registry("method", ROWS)


@pytest.mark.parametrize("known", [FUSIONS, HEADS], ids=["fusions", "heads"])
def test_every_row_leads_to_a_frozen_config(known: Registry):
    for name in known.names():
        kind = known.get(name)
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen  # pyright: ignore
        assert known._rows[name] == f"{kind.__module__}:{kind.__qualname__}"


def test_an_unknown_name_is_answered_with_those_there_are(registry: Registry):
    with pytest.raises(
        UnknownNameError, match=r"method: unknown name 'aba'; known: ada, sequence. Did you mean 'ada'?"
    ):
        registry.get("aba")


def test_adding(registry: Registry):
    registry.add("mean", "lamina.fusion.mean:Mean")
    assert registry.names() == ("ada", "sequence", "mean")
    assert registry.get("mean").__name__ == "Mean"
    with pytest.raises(ConfigError, match=r"method: 'mean' is already registered as lamina.fusion.mean:Mean"):
        registry.add("mean", "elsewhere:Mean")


def test_the_table_given_is_left_as_it_was(registry: Registry):
    registry.add("mean", "lamina.fusion.mean:Mean")
    assert "mean" not in ROWS


@dataclasses.dataclass(frozen=True)
class Twice(FusionConfig):
    """A fusion of a third party, with a field that follows from another one."""

    layers: int = 1
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "doubled", 2 * self.layers)


def test_a_field_that_no_argument_sets_is_not_saved(registry: Registry):
    registry.add("twice", f"{__name__}:Twice")
    saved = registry.to_dict(Twice(np.int64(3)))  # pyright: ignore[reportArgumentType]
    assert saved == {"name": "twice", "layers": 3}
    assert registry.name_of(Twice(3)) == "twice"
    assert Twice(3) == Twice(layers=saved["layers"])


def test_entry_points_of_others_are_found(registry: Registry, monkeypatch: pytest.MonkeyPatch):
    points = [
        EntryPoint("theirs", "lamina.fusion.mean:Mean", "lamina.method"),
        EntryPoint("ada", "elsewhere:Ada", "lamina.method"),
    ]
    monkeypatch.setattr(module, "entry_points", lambda group: points if group == "lamina.method" else [])
    assert registry.names() == ("ada", "sequence", "theirs")
    assert registry.get("theirs").__name__ == "Mean"
    assert registry.get("ada") is AdaLayers  # they cannot take the place of what is there


def test_there_and_back(registry: Registry):
    config = AdaLayers(dim=32, cutoff=0.01)
    fields = registry.to_dict(config)
    assert fields["name"] == "ada"
    assert fields["dim"] == 32
    assert registry.from_dict(fields) == config
    assert "name" in fields  # what is given is not emptied


def test_a_class_may_be_registered_by_a_module_that_imports_it(registry: Registry):
    registry.add("mean", "tests.unit.test_registry:Mean")
    assert registry.to_dict(Mean()) == {"name": "mean", "layers": "all"}
    assert registry.from_dict({"name": "mean"}) == Mean()


@pytest.mark.parametrize("row", ["nowhere:X", "lamina.fusion.mean:X", "no row at all"])
def test_a_row_that_leads_nowhere(registry: Registry, row: str):
    registry.add("lost", row)
    with pytest.raises(ConfigError, match=f"method: 'lost' is registered as {row}, which cannot be imported"):
        registry.get("lost")


def test_the_name_of_a_stranger(registry: Registry):
    with pytest.raises(ConfigError, match=r"method: builtins:int is not registered. Call add\(name, 'builtins:int'\)"):
        registry.name_of(3)


@pytest.mark.parametrize("fields", [{"dim": 3}, {"name": 3}, {}])
def test_a_config_needs_its_name(registry: Registry, fields: dict[str, object]):
    with pytest.raises(ConfigError, match=r"method: no 'name' among .*; known: ada, sequence\."):
        registry.from_dict(fields)


def test_an_unknown_key_is_answered_with_those_there_are(registry: Registry):
    with pytest.raises(
        UnknownNameError, match=r"method 'ada': unknown key 'dimm'; known: dim, alpha.*Did you mean 'dim'?"
    ):
        registry.from_dict({"name": "ada", "dimm": 3})


def test_what_is_required_must_be_there(registry: Registry):
    with pytest.raises(ConfigError, match=r"method 'sequence': no labels given; it is required"):
        registry.from_dict({"name": "sequence", "pooling": "mean"})
    config = registry.from_dict({"name": "sequence", "labels": ["a", "b"]})
    assert config == SequenceClassification(("a", "b"))
