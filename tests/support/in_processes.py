"""Train small banks and whole models, by itself or by several processes at once: FOLDER, then the runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from tests.support.finetuned import bert, copies, t5, t5_tokenizer, tune
from tests.support.training import names, reader, tiny_model, tiny_tokenizer, yes_no

import lamina
from lamina import ReaderBank, fit
from lamina.utils import rank

if TYPE_CHECKING:
    from torch import nn

BANKS = ("readers", "base", "cache")
MODELS = ("tags", "summaries", "accumulated", "frozen")


def train_bank(folder: Path, name: str) -> list[nn.Module]:
    """Two tasks over their own texts, and readers of one of them with a penalty; the last batch has one row."""
    model = tiny_model()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    bank = ReaderBank(model, tiny_tokenizer(), train_base=name == "base")
    tasks = {"a": yes_no(train=41), "b": yes_no(train=41), "t": names(train=30)}
    for seed, (task_name, task) in enumerate(tasks.items()):
        bank.add(task_name, reader(task, seed=seed, entropy=0.1))
    # At a high rate Adam makes a large step of a small difference where a gradient is nearly nothing.
    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "learning_rate": 3e-4, "progress": False}
    if name == "cache":
        options |= {"cache": "on", "cache_dtype": "float32", "cache_dir": folder / "cache"}
    fit(bank, tasks, output=folder / "run", **options)
    return [bank, model]


def train_model(folder: Path, name: str) -> list[nn.Module]:
    """One batch has one row, so that one of two processes has none; epsilon keeps Adam from scaling up rounding."""
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    if name == "tags":
        model, task = bert("AutoModelForTokenClassification", 5), names(train=33)
    elif name == "summaries":
        model, task = t5(), copies(train=33)
        options |= {"processor": t5_tokenizer(), "max_target_length": 8}
    else:
        model, task = bert(), yes_no(train=33)
    if name == "accumulated":
        options |= {"batch_size": 4, "gradient_accumulation_steps": 2}
    if name == "frozen":
        lamina.insert_(model, "attention")
        lamina.freeze_(model, train="inserted")
    tune(model, task, output=folder / "run", **options)
    return [model]


def run(folder: Path, name: str) -> None:
    """Train, and write all weights."""
    folder.mkdir(exist_ok=True)
    modules = train_bank(folder, name) if name in BANKS else train_model(folder, name)
    if rank() == 0:
        for number, module in enumerate(modules):
            tensors = {key: value.contiguous().clone() for key, value in module.state_dict().items()}
            save_file(tensors, folder / f"{number}.safetensors")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        run(Path(sys.argv[1]) / each, each)
