"""What earlier versions saved still loads, to the same logits.

`files/` was written by version 0.1 at commit 7422078, before the one loader, with the logits of a fixed batch in
`expected.safetensors`: a bank with its base, a bank whose base was trained along, an edited model, a fine-tuned model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lamina

FILES = Path(__file__).with_name("files")
CLOSE = {"rtol": 0.0, "atol": 1e-6}  # another machine may add in another order


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return load_file(FILES / "batch.safetensors")


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(FILES / "expected.safetensors")


@torch.no_grad()
def check_bank(bank: lamina.ReaderBank, prefix: str, batch: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    out = bank(**batch)
    assert {f"{prefix}.{name}" for name in out} == {key for key in expected if key.split(".")[0] == prefix}
    for name in out:
        torch.testing.assert_close(out[name].logits, expected[f"{prefix}.{name}"], **CLOSE)


def test_a_bank(batch, expected):
    model, tokenizer = lamina.load(FILES / "base")
    bank = lamina.ReaderBank.from_pretrained(FILES / "bank", model, tokenizer)
    assert bank.info == {"note": "golden"}
    assert bank["mood"].info["scores"] == {"mcc": 0.28, "accuracy": 0.6}
    check_bank(bank, "bank", batch, expected)


def test_a_bank_with_a_base_of_its_own(batch, expected):
    bank = lamina.ReaderBank.from_pretrained(FILES / "trained_bank")
    assert bank.processor is not None
    check_bank(bank, "trained_bank", batch, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["edited", "finetuned"])
def test_a_model(name, batch, expected):
    model, tokenizer = lamina.load(FILES / name, head="BertForSequenceClassification")
    assert tokenizer is not None
    torch.testing.assert_close(model(**batch).logits, expected[name], **CLOSE)


def test_the_edits_of_a_model():
    model, _ = lamina.load(FILES / "edited")
    assert [edit.kind for edit in lamina.edits(model)] == ["truncate", "insert", "freeze"]
    assert not model.get_input_embeddings().weight.requires_grad
