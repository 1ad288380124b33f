"""The estimate of kept states against one worked out by hand."""

from __future__ import annotations

import pytest
from tests.support.training import reader, tiny_bank, yes_no

from lamina import DWAtt, Reader, ReaderBank, SequenceClassification, fit
from lamina.errors import ConfigError
from lamina.train import memory


def bank_of(*layers: str) -> ReaderBank:
    bank = tiny_bank({"streams": reader()})
    for name in layers:
        bank.add(f"keeps-{name}", Reader(DWAtt(layers=name), SequenceClassification(("no", "yes"), attention_heads=2)))
    return bank


def test_states_are_counted_once_and_each_reader_beside():
    bank = bank_of("1-", "2-")
    shared, own = 3 * 16 * 4, (3 + 2) * 16 * 4
    assert memory.kept_bytes(bank, list(bank), 10) == 10 * (shared + own)
    assert memory.kept_bytes(bank, ["streams"], 10) == 0


def test_too_much_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    bank = bank_of("1-")
    before = {key: value.clone() for key, value in bank.state_dict().items()}
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"the fusions of keeps-1- need all layers' states at once, 0\.0 GiB for 8"):
        fit(bank, {"streams": yes_no(), "keeps-1-": yes_no()}, batch_size=8, epochs=1, progress=False)
    assert all((value == before[key]).all() for key, value in bank.state_dict().items())


def test_free_memory_is_some():
    assert memory.free_bytes(bank_of().device) > 1 << 20
