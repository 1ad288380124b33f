"""A tiny model with a head for masked language modelling, and running text that follows a rule."""

from __future__ import annotations

import random

import torch
from tests.support.training import LENGTH, PEOPLE, PLACES, PLAIN, WORDS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from lamina.bank import Reader, ReaderBank
from lamina.fusion.base import FusionConfig
from lamina.fusion.last_layer import LastLayer
from lamina.heads.masked_lm import MaskedLM
from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.tasks.task import Task

VOCABULARY = [*WORDS, "[MASK]"]
MASK = len(WORDS)


def masking_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LENGTH,
    )


def masked_model(seed: int = 0) -> BertForMaskedLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=LENGTH,
            initializer_range=0.3,
        )
        return BertForMaskedLM(config).eval()


def masked_bank(*names: str, fusion: FusionConfig | None = None) -> ReaderBank:
    bank = ReaderBank(masked_model(), masking_tokenizer())
    for seed, name in enumerate(names):
        bank.add(name, Reader(fusion or LastLayer(), MaskedLM(), seed=seed))
    return bank


def running(*, train: int = 60, validation: int = 20, seed: int = 0) -> Task:
    """Lines of words; half of all words are the full stop, so that there is something to learn."""
    rng = random.Random(seed)
    words = [*PLAIN, *PEOPLE, *PLACES]
    splits = {}
    for part, count in (("train", train), ("validation", validation)):
        lines = (
            " ".join(word for _ in range(rng.randint(3, 9)) for word in (rng.choice(words), ".")) for _ in range(count)
        )
        splits[part] = Split.of(lines)
    return Task(
        kind_of("masked_lm"), "classification", ("token",), "perplexity", ("perplexity", "accuracy"), splits, "running"
    )
