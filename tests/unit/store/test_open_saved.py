"""A saved bank or model is opened by its name, and loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from tests.support.finetuned import bert
from tests.support.stored import save_base, tiny_bank, tiny_tokenizer

import lamina
from lamina.bank import ReaderBank
from lamina.errors import ConfigError, LaminaError
from lamina.store import open_saved

TEXTS = ["the film is good ."]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_base(tmp_path / "base")
    model, processor = lamina.load(tmp_path / "base")
    bank = tiny_bank(model)
    bank.processor = processor
    bank.save_pretrained(tmp_path / "bank")
    return tmp_path / "bank"


def test_a_name_is_enough_to_predict(saved: Path, monkeypatch: pytest.MonkeyPatch):
    loaded: list[str] = []
    load = open_saved.load_bank
    monkeypatch.setattr(
        open_saved, "load_bank", lambda name, *more, **options: loaded.append(name) or load(name, *more, **options)
    )
    bank = ReaderBank.from_pretrained(saved)
    expected = lamina.predict(bank, TEXTS)
    assert lamina.predict(saved, TEXTS) == lamina.predict(str(saved), TEXTS) == expected
    assert loaded == [str(saved)]
    with torch.no_grad():
        bank["mood"].head.output.weight[0] += 1
    bank.save_pretrained(saved)
    assert lamina.predict(str(saved), TEXTS) == lamina.predict(bank, TEXTS) != expected
    assert len(loaded) == 2
    weights = saved / "readers/mood/model.safetensors"  # exchanged by hand
    weights.write_bytes(save({name: value * 0 for name, value in load_file(weights).items()}))
    assert lamina.predict(str(saved), TEXTS)[0]["mood"]["score"] == pytest.approx(0.5)


def test_a_whole_model_that_is_written_anew_is_read_anew(tmp_path: Path):
    for number in (0, 1):
        model = bert()
        torch.nn.init.constant_(model.classifier.bias[number], 9.0)
        lamina.save(model, tmp_path, tiny_tokenizer())
        assert lamina.predict(tmp_path, TEXTS)[0]["sequence_classification"]["label"] == f"LABEL_{number}"


def test_a_whole_model_has_no_base(tmp_path: Path):
    model, _ = lamina.load(save_base(tmp_path / "plain"))
    lamina.save(model, tmp_path / "model")
    assert type(open_saved.open_saved(str(tmp_path / "model"))) is type(model)
    with pytest.raises(ConfigError, match=r"was given as a base; .* is a whole model, which needs no base"):
        open_saved.open_saved(str(tmp_path / "model"), base="other")


def test_a_name_of_nothing_is_an_error():
    with pytest.raises(LaminaError, match="no-such-bank"):
        lamina.predict("no-such-bank", TEXTS)
