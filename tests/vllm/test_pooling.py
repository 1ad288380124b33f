"""Readers of encoders and embedding models in the real engine: answers equal those of the bank over the same texts."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs these tests in an environment of their own")

import torch
from benchmarks.vllm_engines import CLOSE, as_inputs, engine, save_tokenizer, scatter
from engines import VOCABULARY, server
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from lamina import (
    AdaLayers,
    PooledLayers,
    Reader,
    ReaderBank,
    ScalarMix,
    SequenceClassification,
    SingleLayer,
    TokenClassification,
    load,
)
from vllm import PoolingParams

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "bert": (BertModel, BertConfig(**SIZES)),
    "modernbert": (
        ModernBertModel,
        ModernBertConfig(**SIZES, bos_token_id=1, eos_token_id=1, cls_token_id=1, sep_token_id=1, local_attention=32),
    ),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig(**SIZES, type_vocab_size=1, position_embedding_type="absolute")),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32)),
}
USUAL = {("bert", False), ("modernbert", True), ("qwen3", False)}  # the others take minutes: run with -m full
READERS = {
    "default": Reader(PooledLayers(dim=32), SequenceClassification(("a", "b", "c"), pooling="first")),
    "ada": Reader(AdaLayers(dim=16), SequenceClassification(("no", "yes"), pooling="query"), seed=1),
    "deep": Reader(AdaLayers(dim=16), TokenClassification(("O", "X"), encoder_layers=1), seed=2),
    "mix": Reader(ScalarMix(), SequenceClassification(("a", "b"), pooling="attention"), seed=3),
    "last": Reader(SingleLayer(layer=3, dim=16), TokenClassification(("O", "X", "Y"), encoder_layers=0), seed=4),
    "words": Reader(SingleLayer(layer=0, dim=16), SequenceClassification(("a", "b"), pooling="mean"), seed=5),
}


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """Save a random model and a bank of it, and return their folders."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    kind(config).eval().save_pretrained(folder / "model")
    save_tokenizer(folder / "model", VOCABULARY)
    bank = ReaderBank(*load(folder / "model"))
    for reader, module in READERS.items():
        bank.add(reader, module)
    scatter(bank, 1 / 3)
    bank.eval().save_pretrained(folder / "bank")
    return folder / "model", folder / "bank"


def texts_of(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, VOCABULARY - 1) for _ in range(draw.randrange(1, 150))] for _ in range(count)]


def difference(model: Path, folder: Path, texts: list[list[int]], outputs: list[Any]) -> float:
    """Return the largest difference between a probability in the answers of outputs and the bank's own."""
    bank = ReaderBank.from_pretrained(folder, load(model)[0])
    worst = 0.0
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([text])
        with torch.no_grad():
            expected = bank(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert list(output.lamina) == list(READERS)
        for name, answers in output.lamina.items():
            want = expected[name].logits[0].softmax(-1)
            if "tokens" in answers:
                got = torch.tensor(answers["tokens"])
                assert set(answers) == {"tokens"}
            else:
                got = torch.tensor(list(answers["prompt"]["probabilities"].values()))
                assert set(answers) == {"prompt"}
            assert got.shape == want.shape
            worst = max(worst, float((got - want).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        pytest.param(name, eager, marks=[] if (name, eager) in USUAL else [pytest.mark.full])
        for name in MODELS
        for eager in (False, True)
    ],
)
def test_embeddings_and_answers_come_from_one_pass(tmp_path: Path, name: str, eager: bool):
    model, bank = make(tmp_path, name)
    texts = texts_of(20)
    settings = {"runner": "pooling", "enforce_eager": eager, "max_model_len": 160, "in_process": True}
    if name == "qwen3":  # its texts may come in pieces
        settings["max_num_batched_tokens"] = 64
    with engine(model, bank, **settings) as llm:
        for _ in range(2):
            embedded = llm.embed(as_inputs(texts), use_tqdm=False)
            assert difference(model, bank, texts, embedded) < CLOSE
        chosen = PoolingParams(extra_kwargs={"lamina": ["last"]})
        (single,) = llm.embed(as_inputs(texts[:1]), pooling_params=chosen, use_tqdm=False)
        assert list(single.lamina) == ["last"]
        wrong = PoolingParams(extra_kwargs={"lamina": ["lst"]})
        with pytest.raises(ValueError, match="unknown reader 'lst'"):
            llm.embed(as_inputs(texts[:1]), pooling_params=wrong, use_tqdm=False)
    with torch.no_grad():
        base = load(model)[0]
        states = base(input_ids=torch.tensor(texts[:1])).last_hidden_state[0]
    vector = torch.nn.functional.normalize(states[-1 if name == "qwen3" else 0], dim=0)
    torch.testing.assert_close(torch.tensor(embedded[0].outputs.embedding), vector, atol=CLOSE, rtol=0)


def test_the_server_gives_embeddings_with_answers(tmp_path: Path):
    model, bank = make(tmp_path, "bert")
    texts = texts_of(5)
    options = ["--runner", "pooling", "--enforce-eager", "--max-model-len", "160"]
    with server(model, bank, tmp_path / "log", *options) as client:
        for route, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            response = client.post(route, json={"model": "tiny", "input": texts})
            assert response.status_code == 200, response.text
            data = response.json()["data"]
            assert all(len(text[field]) == 128 for text in data)
            outputs = [SimpleNamespace(lamina=text["lamina"]) for text in data]
            assert difference(model, bank, texts, outputs) < CLOSE
        chosen = {"model": "tiny", "input": texts[0], "vllm_xargs": {"lamina": ["last", "ada"]}}
        (single,) = client.post("/v1/embeddings", json=chosen).json()["data"]
        assert list(single["lamina"]) == ["last", "ada"]
        wrong = client.post("/v1/embeddings", json={**chosen, "vllm_xargs": {"lamina": ["lst"]}})
        assert wrong.status_code == 422
        assert "unknown reader 'lst'; known: default, ada" in wrong.text
        assert client.post("/v1/embeddings", json={**chosen, "encoding_format": "bytes"}).status_code == 200
        assert client.post("/v1/embeddings", json=chosen).status_code == 200
