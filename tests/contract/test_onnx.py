"""Every fusion, and a head of each form, says the same in onnxruntime, in several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.formulas import SETTINGS, stir_
from tests.support.stored import tiny_tokenizer
from tests.support.tiny import FAMILIES, model_of

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion import FUSIONS
from lamina.heads.causal_lm import CausalLM
from lamina.heads.masked_lm import MaskedLM
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.store.onnx import export_onnx

READ = [("bert", None), ("gpt2", None), ("llama-CausalLM", None), ("t5", "encoder"), ("bart", "decoder")]
HEADS = [
    SequenceClassification(("a", "b", "c"), pooling="attention", attention_heads=4),
    SequenceClassification(("a", "b", "c"), pooling="mean"),
    SequenceClassification(("a", "b"), pooling="first", problem_type="multi_label"),
    TokenClassification(("a", "b"), feedforward=16, attention_heads=4),
    TokenClassification(("a", "b"), encoder_layers=0),
    MaskedLM(),
    CausalLM(),
]


def add_all(bank: ReaderBank, fusions: list[Any], heads: list[Any], stack: str | None) -> None:
    """A reader of every fusion with the first of the heads that it takes."""
    for number, fusion in enumerate(fusions):
        for head in heads:
            try:
                stir_(bank.add(f"r{number}", Reader(fusion, head, stack)), number, 0.1)
            except ConfigError:
                continue
            break
        else:
            raise AssertionError(f"no head for {fusion}")
    bank.eval()


@pytest.mark.full
@pytest.mark.parametrize(("family", "stack"), READ)
@pytest.mark.parametrize("name", FUSIONS.names())
def test_every_fusion(name: str, family: str, stack: str | None, tmp_path: Path):
    bank = ReaderBank(model_of(family), tiny_tokenizer())
    add_all(bank, [FUSIONS.get(name)(**settings) for settings in SETTINGS[name]], HEADS, stack)
    assert export_onnx(bank, tmp_path).max_difference < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("head", HEADS, ids=lambda head: f"{head.kind}-{getattr(head, 'pooling', '')}")
@pytest.mark.parametrize(("family", "stack"), READ)
def test_every_head(head: Any, family: str, stack: str | None, tmp_path: Path):
    if isinstance(head, CausalLM | MaskedLM) and isinstance(head, CausalLM) != FAMILIES[family].causal:
        pytest.skip("the head is for models of the other kind")
    bank = ReaderBank(model_of(family))
    add_all(bank, [FUSIONS.get("scalar_mix")()], [head], stack)
    facts = export_onnx(bank, tmp_path, main=True)
    assert len(facts.outputs) == 2
