"""A tiny BERT with a tokenizer of a few words, and banks on it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers.discovery import same_stacks

if TYPE_CHECKING:
    from pathlib import Path

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *["the", "a", "film", "is", "good", "bad", "very", "not", "paris", "anna", "went", "to", "and", "slow", "fun", "."],
]
TEXTS = ["the film is good .", "anna went to paris", "bad"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    )


def tiny_config(**changes: int) -> BertConfig:
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    return BertConfig(**{**settings, **changes})


def tiny_model(seed: int = 0, kind: type = BertModel, **changes: int) -> BertModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(tiny_config(**changes)).eval()


def save_base(folder: Path, seed: int = 0) -> Path:
    tiny_model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def _known() -> BertModel:
    return tiny_model()


def tiny_bank(model: BertModel | None = None) -> ReaderBank:
    """Two readers whose scores and norms were moved away from their start."""
    if model is None:
        same_stacks(_known(), model := tiny_model())
    bank = ReaderBank(model, tiny_tokenizer())
    bank.add("mood", Reader(AdaLayers(dim=16), SequenceClassification(("bad", "good"))))
    bank.add("who", Reader(Mean(layers=(1, 3)), TokenClassification(("O", "B-PER", "B-LOC"), feedforward=24), seed=5))
    with torch.no_grad():
        for number, parameter in enumerate(bank.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    bank.info = {"note": "made for a test"}
    bank["mood"].info = {"metric": "mcc", "scores": {"mcc": 0.2814}, "max_length": 32}
    return bank.eval()


def logits(bank: ReaderBank) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = bank(**tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True))
    return {name: out[name].logits for name in out}
