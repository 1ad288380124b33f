"""Which rows a step sees, in which batches, and how much each counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.train import steps as module
from lamina.train.steps import SHARE, Steps, share_out


class Numbered:
    """Rows whose only token is their number; every third has no label."""

    truncated = 0

    def __init__(self, count: int, *, numbers: bool = False) -> None:
        self.lengths = [row % 7 + 1 for row in range(count)]
        self.numbers = numbers
        self.epochs: list[int] = []

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        self.epochs.append(epoch)
        labels = (
            torch.tensor([float(row) for row in rows])
            if self.numbers
            else torch.tensor([[-100, -100] if row % 3 == 0 else [1, -100] for row in rows])
        )
        return {"input_ids": torch.tensor(rows), "labels": labels}


def made(count: int = 21, size: int = 8, batches: int = 1, **more: Any) -> tuple[Steps, Numbered]:
    rows = Numbered(count, **more)
    return Steps(rows, size, batches=batches, seed=0, epoch=lambda: 0), rows


def test_every_row_is_in_one_step():
    steps, rows = made()
    found = list(steps)
    assert len(found) == len(steps) == 3
    assert sorted(row for step in found for row in step) == list(range(21))
    assert sorted(map(len, found)) == [5, 8, 8]
    for step in found:
        assert max(rows.lengths[row] for row in step) - min(rows.lengths[row] for row in step) <= 4


def test_epochs_have_orders_of_their_own():
    epoch = [0]
    rows = Numbered(21)
    steps = Steps(rows, 8, batches=1, seed=0, epoch=lambda: epoch[0])
    first, again = list(steps), list(steps)
    epoch[0] = 1
    second = list(steps)
    assert first == again != second
    steps.collate(second[0])
    assert rows.epochs == [1]
    assert list(Steps(rows, 8, batches=1, seed=1, epoch=lambda: 0)) != first


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_and_batches_share_a_step(batches: int, processes: int, monkeypatch: pytest.MonkeyPatch):
    steps, _ = made(batches=batches)
    step = list(range(1, 9))
    seen: list[int] = []
    for rank in range(processes):
        monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(module, "world_size", lambda: processes)
        parts = steps.collate(step)["parts"]
        assert len(parts) <= batches
        for part in parts:
            rows = part["input_ids"].tolist()
            assert part[SHARE] == sum(row % 3 != 0 for row in rows)
            seen += rows
    assert sorted(seen) == step


def test_a_process_without_a_row_counts_for_nothing(monkeypatch: pytest.MonkeyPatch):
    steps, _ = made(batches=2)
    monkeypatch.setattr(module, "rank", lambda: 1)
    monkeypatch.setattr(module, "world_size", lambda: 2)
    (part,) = steps.collate([4])["parts"]
    assert (part["input_ids"].tolist(), part[SHARE]) == ([4], 0)


def test_numbers_are_labels_all():
    steps, _ = made(numbers=True)
    assert steps.collate([0, 3, 5])["parts"][0][SHARE] == 3


def test_counts_become_shares():
    parts: list[dict[str, Any]] = [{SHARE: 3}, {SHARE: 0}, {SHARE: 1}]
    share_out(parts, torch.device("cpu"))
    assert [part[SHARE] for part in parts] == [0.75, 0.0, 0.25]
    blank: list[dict[str, Any]] = [{SHARE: 0}]
    share_out(blank, torch.device("cpu"))
    assert blank[0][SHARE] == 0


def test_shares_are_of_all_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "rank", lambda: 0)
    monkeypatch.setattr(module, "world_size", lambda: 2)
    monkeypatch.setattr(module.distributed, "all_reduce", lambda total: total.add_(6))
    parts: list[dict[str, Any]] = [{SHARE: 2}]
    share_out(parts, torch.device("cpu"))
    assert parts[0][SHARE] == 0.25
