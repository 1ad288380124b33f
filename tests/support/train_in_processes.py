"""Train a small bank, by itself or by several processes at once: FOLDER, then "base" to train the model, or "cache"."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file
from tests.support.training import names, reader, tiny_model, tiny_tokenizer, yes_no

from lamina import ReaderBank, fit
from lamina.utils import rank


def train(folder: Path, *, train_base: bool = False, cache: bool = False) -> None:
    """Two tasks over their own texts, and readers of one of them with a penalty; the last batch has one row."""
    model = tiny_model()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    bank = ReaderBank(model, tiny_tokenizer(), train_base=train_base)
    tasks = {"a": yes_no(train=41), "b": yes_no(train=41), "t": names(train=30)}
    for seed, (name, task) in enumerate(tasks.items()):
        bank.add(name, reader(task, seed=seed, entropy=0.1))
    # At a high rate Adam makes a large step of a small difference where a gradient is nearly nothing.
    cached = {"cache": "on", "cache_dtype": "float32", "cache_dir": folder / "cache"} if cache else {}
    fit(bank, tasks, epochs=3, batch_size=8, learning_rate=3e-4, output=folder / "run", progress=False, **cached)
    if rank() == 0:
        save_file({k: v.contiguous().clone() for k, v in bank.state_dict().items()}, folder / "readers.safetensors")
        save_file({k: v.contiguous().clone() for k, v in model.state_dict().items()}, folder / "base.safetensors")


if __name__ == "__main__":
    train(Path(sys.argv[1]), train_base="base" in sys.argv[2:], cache="cache" in sys.argv[2:])
