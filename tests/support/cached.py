"""Rows of tokens, and their states in a cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.training import reader, sentences, tiny_bank, tiny_tokenizer

from lamina.bank import Reader, ReaderBank
from lamina.data.state_cache import CacheSettings, open_states
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification

TEXTS = [" ".join(row) for row in sentences(12, seed=3, high=12)]


@dataclass(frozen=True)
class Rows:
    """Rows of tokens."""

    tokens: list[list[int]]
    uncacheable: str | None = None

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.tokens]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()

    def batch(self, rows: Any) -> dict[str, torch.Tensor]:
        longest = max(self.lengths[row] for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, : self.lengths[row]] = torch.tensor(self.tokens[row])
            mask[at, : self.lengths[row]] = 1
        return {"input_ids": ids, "attention_mask": mask}


def opened(bank: ReaderBank, folder: Path, inputs: Rows, **changes: Any) -> Any:
    settings = CacheSettings(**{"mode": "on", "dtype": "float32", "folder": folder, "batch_size": 1, **changes})
    return open_states(bank, inputs, list(bank), settings=settings)


def cached_rows(texts: list[str] = TEXTS, **options: Any) -> Rows:
    return Rows(tiny_tokenizer()(texts, **options)["input_ids"])


def cached_bank(model: Any = None, **readers: Reader) -> ReaderBank:
    chosen = readers or {"a": reader(), "b": Reader(Mean(layers=(0, 2)), SequenceClassification(2, 2))}
    return tiny_bank(chosen, model) if model is not None else tiny_bank(chosen)
