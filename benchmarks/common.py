"""What the benchmarks share: bases, readers, and how a result is printed."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import RobertaConfig, RobertaModel

from lamina import AdaLayers, PairedLayers, PooledLayers, Reader, ReaderBank, SequenceClassification
from lamina.store import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = {"minilm": (16, 64), "roberta-large": (4, 128)}  # batch, tokens


def options(description: str, *, repeats: int) -> argparse.Namespace:
    """The options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"counted runs of each (default {repeats})")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs (default %(default)s)"
    )
    return parser.parse_args()


def base(name: str) -> PreTrainedModel:
    """MiniLM with its weights, or RoBERTa-large's shape with random ones."""
    if name == "minilm":
        return load("minilm")[0]
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=50265,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=514,
        type_vocab_size=1,
    )
    return RobertaModel(config, add_pooling_layer=False).eval()


def tokens(model: PreTrainedModel, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random token ids without padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bank_of(model: PreTrainedModel, readers: int, fusion: str = "ada_layers", processor: Any = None) -> ReaderBank:
    """A bank of readers of whole texts with k = 64: AdaLayers with its attention head, or a pooling fusion."""
    bank, labels = ReaderBank(model, processor), ("no", "yes")
    attention, first = (SequenceClassification(labels, pooling=pooling) for pooling in ("attention", "first"))
    parts = {
        "ada_layers": (AdaLayers(dim=64), attention),
        "pooled_layers": (PooledLayers(dim=64), first),
        "paired_layers": (PairedLayers(dim=64), first),
    }[fusion]
    for number in range(readers):
        bank.add(f"r{number}", Reader(*parts, seed=number))
    return bank.eval()


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print rows as JSON or as aligned columns."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    cells = [list(rows[0]), *([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(rows[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
