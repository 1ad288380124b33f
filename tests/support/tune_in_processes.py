"""Fine-tune small models, by itself or by several processes at once: FOLDER, then the kinds of runs."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import save_file
from tests.support.finetuned import bert, copies, t5, t5_tokenizer, tensors, tune
from tests.support.training import names, yes_no

import lamina
from lamina.utils import rank


def run(folder: Path, kind: str) -> None:
    """One batch has one row, so that one of two processes has none; epsilon keeps Adam from scaling up rounding."""
    options = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "output": folder / "run"}
    if kind == "tags":
        model = bert("AutoModelForTokenClassification", 5)
        task = names(train=33)
    elif kind == "summaries":
        model, task = t5(), copies(train=33)
        options |= {"processor": t5_tokenizer(), "max_target_length": 8}
    else:
        model, task = bert(), yes_no(train=33)
    if kind == "accumulated":
        options |= {"batch_size": 4, "gradient_accumulation_steps": 2}
    if kind == "frozen":
        lamina.insert_(model, "attention")
        lamina.freeze_(model, train="inserted")
    tune(model, task, **options)
    if rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file(tensors(model), folder / "model.safetensors")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        run(Path(sys.argv[1]) / each, each)
