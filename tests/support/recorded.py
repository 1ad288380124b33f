"""Folders of hidden states as other programs leave them: `.npy`, safetensors per row, Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from lamina.bank import ReaderBank
from lamina.tasks.split import Split

LABELS = ("no", "yes")


def states_of(bank: ReaderBank, texts: Sequence[str], layers: Sequence[int]) -> list[torch.Tensor]:
    """The states `[tokens, layers, width]` of each text, from the model itself, one text at a time."""
    rows = []
    for text in texts:
        batch = dict(bank.processor(text, return_tensors="pt", truncation=True))
        states = bank.record_states({"main": list(layers)}, batch)["main"]
        rows.append(torch.stack([states[layer][0] for layer in layers], dim=1))
    return rows


def manifest(folder: Path, states: Sequence[torch.Tensor], layers: Sequence[int], **facts: Any) -> Path:
    """Write `states.json`; `facts` say what is not said by the states, or other things than they do."""
    content = {
        "format": 1,
        "rows": len(states),
        "depth": 3,
        "width": states[0].shape[-1],
        "layers": list(layers),
        **facts,
    }
    (folder / "states.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def packed(folder: Path, states: Sequence[torch.Tensor], layers: Sequence[int], **facts: Any) -> Path:
    """One `.npy` file `[tokens, layers, width]`, and the lengths."""
    folder.mkdir(parents=True)
    joined = torch.cat(list(states)).numpy()
    np.save(folder / "states.npy", joined)
    np.save(folder / "lengths.npy", np.array([len(row) for row in states]))
    array = {
        "file": "states.npy",
        "axes": ["tokens", "layers", "width"],
        "shape": list(joined.shape),
        "rows": len(states),
    }
    return manifest(folder, states, layers, **{"arrays": [array], "lengths": "lengths.npy", **facts})


def per_request(folder: Path, states: Sequence[torch.Tensor], layers: Sequence[int], **facts: Any) -> Path:
    """A safetensors file per row, as vLLM's `extract_hidden_states` writes them."""
    folder.mkdir(parents=True)
    arrays = []
    for number, row in enumerate(states):
        name = f"hs_{number}.safetensors"
        ids = torch.zeros(len(row), dtype=torch.long)
        save_file({"hidden_states": row.contiguous(), "token_ids": ids}, folder / name)
        axes = ["tokens", "layers", "width"]
        arrays.append({"file": name, "tensor": "hidden_states", "axes": axes, "shape": list(row.shape), "rows": 1})
    return manifest(folder, states, layers, **{"arrays": arrays, **facts})


def labelled(split: Split) -> list[dict[str, Any]]:
    """The labels of a split of two classes as the rows of a table."""
    return [{"label": LABELS[label]} for label in split.labels]
