"""Sizes that a saved folder claims: refused before memory is taken for them."""

from __future__ import annotations

import json
import resource
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.portions import one_in
from tests.support.stored import save_base, tiny_bank, tiny_model

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, LaminaError, StoreError
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.store import load, load_bank, save_bank
from lamina.store.models import load_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HUGE = [10**5, 10**9, 10**12, 10**400]
FUSIONS: list[dict[str, Any]] = [
    {"name": "ada_layers", "dim": 1},
    {"name": "concat", "dim": 1},
    {"name": "depth_lstm", "dim": 1},
    {"name": "gated", "hidden": 1},
    {"name": "dwatt", "bottleneck": 1},
    {"name": "dwatt", "position_dim": 1},
    {"name": "extra_layers", "n": 1},
]
DEPTHS = ["num_hidden_layers", "num_labels"]
WIDTHS = ["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "type_vocab_size"]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Whatever asks for more than 3 GiB beyond what is there fails at once, and not the whole machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("fusion", one_in(3, FUSIONS), ids=repr)
def test_of_a_fusion(tmp_path: Path, fusion: dict[str, Any]):
    save_bank(tiny_bank(), tmp_path / "bank")
    (key,) = fusion.keys() - {"name"}
    for size in HUGE:
        changed(tmp_path / "bank" / "readers" / "mood" / "reader.json", fusion={**fusion, key: size})
        start = time.monotonic()
        with pytest.raises(LaminaError, match=f"{key} is {size}; it must be|describe .* parameters|layers|must be a"):
            load_bank(tmp_path / "bank", tiny_model())
        assert time.monotonic() - start < 5


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("key", ["encoder_layers", "feedforward"])
def test_of_a_head(tmp_path: Path, key: str):
    save_bank(tiny_bank(), tmp_path / "bank")
    path = tmp_path / "bank" / "readers" / "who" / "reader.json"
    head = json.loads(path.read_text())["head"]
    for size in HUGE:
        changed(path, head={**head, key: size})
        with pytest.raises(LaminaError, match=rf"{key} is {size}; it must be|describe .* parameters"):
            load_bank(tmp_path / "bank", tiny_model())


@pytest.mark.parametrize("layers", ["1-999999999999", "top:999999999999", "9" * 5000, f"1-{'9' * 5000}", [10**12]])
def test_of_layers(layers: Any):
    bank = ReaderBank(tiny_model())
    with pytest.raises(LaminaError, match=r"does not exist|not a layer selector"):
        bank.add("a", Reader(AdaLayers(dim=4, layers=layers), SequenceClassification(("a", "b"))))


@pytest.mark.parametrize("seed", [-1, 2**63, 10**400])
def test_of_a_seed(seed: int):
    with pytest.raises(ConfigError, match=r"reader: seed is -?[0-9]+; it must be at least 0"):
        Reader(AdaLayers(dim=4), SequenceClassification(("a", "b")), seed=seed)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("key", [*DEPTHS, *WIDTHS])
@pytest.mark.parametrize("size", one_in(4, [10**7, 10**9, 10**12, 10**30]))
def test_of_a_config(tmp_path: Path, key: str, size: int):
    base = save_base(tmp_path / "base")
    changed(base / "config.json", **{key: size})
    start = time.monotonic()
    with pytest.raises(LaminaError, match=r"config\.json|hidden|size|storage"):
        load(base)
    assert time.monotonic() - start < 5
    if key in DEPTHS:
        with pytest.raises(StoreError, match=rf"config\.json has {size:,} as '{key}'; at most"):
            load_config(base)


def test_of_a_config_as_it_is_saved(tmp_path: Path):
    base = save_base(tmp_path / "base")
    for head in (None, "masked_lm", "sequence_classification"):
        load(base, head)
