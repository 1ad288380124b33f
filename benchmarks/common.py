"""Functions that the benchmarks share: they make models and banks, and print results."""

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

SHAPES = {"minilm": (16, 64), "roberta-large": (4, 128)}  # model -> batch size, tokens per text


def options(description: str, *, repeats: int, backend: bool = False) -> argparse.Namespace:
    """Parse the options that every benchmark has: `json`, `repeats` and `device`.

    Args:
        description: Text of --help.
        repeats: Default of --repeats.
        backend: Whether there is --backend too: what computes the readers' answers.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=repeats, help="number of measured runs (default %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default %(default)s)"
    )
    if backend:
        parser.add_argument("--backend", default="torch", help="torch, onnx or int8 (default %(default)s)")
    return parser.parse_args()


def base(name: str) -> PreTrainedModel:
    """Return MiniLM with its weights for the name "minilm", otherwise a random model of the size of RoBERTa-large."""
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
    """Return a batch of random token ids `[batch, length]` without padding, with its mask, on the model's device."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bank_of(model: PreTrainedModel, readers: int, fusion: str = "ada_layers", processor: Any = None) -> ReaderBank:
    """Return a bank with untrained readers that classify texts, in eval mode.

    Args:
        model: The model of the bank.
        readers: Number of readers.
        fusion: Fusion of all readers, with 64 dimensions: "ada_layers", "pooled_layers" or "paired_layers".
        processor: Tokenizer of the bank. None: it has none.
    """
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
    """Wait until the GPU has finished its work; return at once without a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print rows as JSON, or as a table with the keys of the first row as header."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    cells = [list(rows[0]), *([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(rows[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
