"""Models that read padding: their batches have texts of one length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.training import WORDS, tiny_tokenizer
from transformers import AutoModel, BertConfig, ConvBertConfig, FNetConfig, YosoConfig

from lamina import Reader, ReaderBank, evaluate, fit, predict
from lamina.data.batches import length_batches
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.studies.passes import text_inputs
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "max_position_embeddings": 32}
CONFIGS = {
    "fnet": FNetConfig(**SIZES, max_position_embeddings=32, pad_token_id=3),
    "yoso": YosoConfig(**HEADS),
    "convbert": ConvBertConfig(**HEADS, embedding_size=16),
    "bert": BertConfig(**HEADS),
}


def built(family: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModel.from_config(CONFIGS[family]).eval()


def test_cached_states_are_those_without_padding():
    weights = []
    for cache in ("off", "on"):
        bank = ReaderBank(built("fnet"), processor=tiny_tokenizer())
        bank.add("mood", Reader(AdaLayers(dim=8), SequenceClassification(("bad", "good"), pooling="mean"), seed=0))
        texts = ["anna", "the film is good", "paris is very fun and slow", "the film", "not bad at all", "is it"]
        rows = [{"text": text, "label": ("bad", "good")[at % 2]} for at, text in enumerate(texts)]
        task = Task.from_dataset("sequence_classification", dict.fromkeys(("train", "validation"), rows))
        fit(bank, {"mood": task}, epochs=3, batch_size=4, seed=0, cache=cache, cache_dtype="float32")
        weights.append(torch.cat([weight.flatten() for weight in bank["mood"].parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("family", ["fnet", "yoso", "convbert"])
def test_results_do_not_depend_on_the_texts_beside(family: str):
    bank = ReaderBank(built(family), processor=tiny_tokenizer())
    bank.add("mood", Reader(AdaLayers(dim=8), SequenceClassification(("bad", "good"), pooling="mean"), seed=0))
    texts = ["anna", "the film is good", "paris is very fun and slow", "the film", "not bad at all", "is it"]
    rows = [{"text": text, "label": ("bad", "good")[at % 2]} for at, text in enumerate(texts)]
    task = Task.from_dataset("sequence_classification", dict.fromkeys(("train", "validation", "test"), rows))
    fit(bank, {"mood": task}, epochs=2, batch_size=4, seed=0)
    alone = [predict(bank, [text])[0]["mood"]["probabilities"] for text in texts]
    together = [answer["mood"]["probabilities"] for answer in predict(bank, texts)]
    assert together == [pytest.approx(one, abs=1e-6) for one in alone]
    losses = [evaluate(bank, {"mood": task}, batch_size=size)["mood"] for size in (1, 6)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_rows_of_one_length_share_batches():
    texts = ["anna is good", "the film", "is it bad", "fun"]
    for family, batches in (("fnet", [[0, 2], [1], [3]]), ("bert", [[0, 2, 1, 3]])):
        inputs = text_inputs(built(family), texts, tiny_tokenizer(), None, op="lens")
        assert length_batches(inputs.lengths, 4, equal=inputs.equal_lengths) == batches
