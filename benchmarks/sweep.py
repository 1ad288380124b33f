"""The cost of a sweep: 16 AdaLayers readers trained in one run, relative to one reader trained alone.

    python benchmarks/sweep.py [--json]

All of `lamina.fit` is timed (tokenising, training, scoring): one epoch over 960 sentences from the demo's generator,
batch 32, on MiniLM, without a cache. The 16 separate runs train the same 16 readers one by one. Budget: 16 readers at
most 2.5 x one reader.

The second table has the memory that a training step (batch 32 x 24 tokens) keeps for its gradients, relative to one
copy of all states that are read. The first reader keeps the GELU of the states, which all other readers share.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import base, options, report, synchronise, tokens

from lamina import AdaLayers, Reader, ReaderBank, SequenceClassification, Task, fit
from lamina.demo.corpus import write
from lamina.demo.timing import in_turn, ratio
from lamina.store import load

COUNT, ROWS, BUDGET = 16, 960, 2.5
BATCH, LENGTH = 32, 24


def readers(task: Task, count: int, *, first: int = 0) -> dict[str, Reader]:
    """Return AdaLayers readers with k = 64 and the attention head, each with its own seed, alpha and entropy."""
    alphas, entropies = (1.0, 8.0, 64.0, 128.0), (0.0, 0.01, 0.1, 1.0)
    return {
        f"r{n}": Reader(
            AdaLayers(dim=64, alpha=alphas[n % 4], entropy=entropies[n // 4 % 4]),
            SequenceClassification(task.labels),
            seed=n,
        )
        for n in range(first, first + count)
    }


def train(model: Any, processor: Any, task: Task, chosen: dict[str, Reader]) -> None:
    """Train readers in one run of one epoch."""
    bank = ReaderBank(model, processor)
    for name, reader in chosen.items():
        bank.add(name, reader)
    fit(bank, dict.fromkeys(chosen, task), epochs=1, batch_size=32, progress=False)
    synchronise()


def kept_bytes(model: Any, task: Task, count: int) -> int:
    """Return the bytes that autograd keeps for the backward pass of a training step, parameters left out."""
    bank = ReaderBank(model)
    for name, reader in readers(task, count).items():
        bank.add(name, reader)
    bank.train()
    own = {parameter.untyped_storage().data_ptr() for parameter in (*bank.parameters(), *model.parameters())}
    held: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    labels = torch.zeros(BATCH, dtype=torch.long, device=bank.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        bank(**tokens(model, BATCH, LENGTH), labels=dict.fromkeys(bank, labels))
    return sum(held.values())


def memory(model: Any, task: Task) -> list[dict[str, Any]]:
    """Return a table row for each number of readers."""
    states = 6 * BATCH * LENGTH * model.config.hidden_size * 4
    found = {count: kept_bytes(model, task, count) for count in (1, 2, 4, 8, 16)}
    return [
        {
            "readers": count,
            "kept MiB": kept / 2**20,
            "over the states": kept / states,
            "each further reader adds": (kept - found[1]) / (count - 1) / states if count > 1 else "",
        }
        for count, kept in found.items()
    ]


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=3)
    logging.getLogger("lamina").setLevel(logging.ERROR)
    model, processor = base("minilm").to(asked.device), load("minilm")[1]
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), rows=ROWS)
        task = Task.from_files(
            "sequence_classification",
            train=files["train"],
            validation=files["validation"],
            text="text",
            label="sentiment",
        )
    all_of_them = readers(task, COUNT)
    runs: dict[str | int, Any] = {
        "one": lambda: train(model, processor, task, readers(task, 1)),
        "together": lambda: train(model, processor, task, all_of_them),
        "apart": lambda: [train(model, processor, task, {name: one}) for name, one in all_of_them.items()],
    }
    taken = in_turn(runs, repeats=asked.repeats)
    rows = [
        {
            "run": what,
            "readers": count,
            "seconds": statistics.median(taken[name]),
            "ratio": ratio(taken, name, to="one"),
            "budget": BUDGET if name == "together" else "",
        }
        for name, what, count in (
            ("one", "one reader", 1),
            ("together", "one pass", COUNT),
            ("apart", "16 runs", COUNT),
        )
    ]
    report(rows, as_json=asked.json)
    report(memory(model, task), as_json=asked.json)


if __name__ == "__main__":
    main()
