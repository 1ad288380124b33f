"""Texts with spans of bad words, and a bank of readers that were trained to find them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from tests.support.stored import WORDS, tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import Monitor, RollingMax
from lamina.tasks.task import Task
from lamina.train import fit

NEUTRAL = ("the", "a", "film", "is", "good", "very", "paris", "anna", "went", "to", "and", "fun")


def spans(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of neutral words, half of them with one or two spans of "not bad slow"-like words, tagged as such."""
    rng, rows = random.Random(seed), []
    for row in range(count):
        words = [rng.choice(NEUTRAL) for _ in range(rng.randint(8, 16))]
        tags = ["O"] * len(words)
        for _ in range(rng.randint(1, 2) if row % 2 else 0):
            at = rng.randrange(len(words) - 3)
            words[at : at + 2], tags[at : at + 2] = rng.sample(["not", "bad", "slow"], 2), ["B-bad", "I-bad"]
        rows.append({"words": words, "tags": tags})
    return rows


@functools.cache
def spans_task() -> Task:
    parts = {"train": spans(120, 0), "validation": spans(120, 1)}
    return Task.from_dataset("token_classification", parts, text="words", label="tags", name="spans")


def whole_task(rows: list[dict[str, Any]] | None = None) -> Task:
    """The same by the whole text."""
    rows = spans(120, 1) if rows is None else rows
    named = [{"text": " ".join(row["words"]), "label": "bad" if "B-bad" in row["tags"] else "fine"} for row in rows]
    parts = {"train": named[:60], "validation": named}
    return Task.from_dataset("sequence_classification", parts, text="text", label="label", name="whole")


@functools.cache
def fitted() -> ReaderBank:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS),
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    bank = ReaderBank(GPT2LMHeadModel(config).eval(), tiny_tokenizer())
    tags, texts = spans_task().labels, ("bad", "fine")
    bank.add("spans", Reader(AdaLayers(dim=16), TokenClassification(tags, encoder_layers=0, dropout=0.0)))
    bank.add("cheap", Reader(SingleLayer(0), TokenClassification(tags, encoder_layers=0, dropout=0.0)))
    bank.add("whole", Reader(Mean(), SequenceClassification(texts, pooling="mean", dropout=0.0)))
    tasks = {"spans": spans_task(), "cheap": spans_task(), "whole": whole_task(spans(120, 0))}
    fit(bank, tasks, epochs=4, batch_size=8, learning_rate=2e-2, progress=False)
    return bank.eval()


FLAGS = ("B-bad", "I-bad")
SPANS = Monitor("spans", FLAGS, RollingMax(2))
