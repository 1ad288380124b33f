"""Cells that tests run here and on workers of Ray: functions of a module, which pickle."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from lamina.studies.runner import Cell


def cells(folder: Path, count: int = 4, *, fails: int = -1, dies: int = -1, always: bool = False) -> list[Cell]:
    """Cells that note each run in a file of the folder; one raises, and one kills its process (the first time)."""
    return [
        Cell({"task": "toy", "seed": n}, partial(_work, str(folder), n, fails == n, dies == n, always))
        for n in range(count)
    ]


def runs(folder: Path) -> dict[int, int]:
    """How often each cell was run."""
    return {int(path.stem): len(path.read_text().splitlines()) for path in sorted(folder.glob("*.runs"))}


def _work(folder: str, number: int, fails: bool, dies: bool, always: bool) -> list[dict[str, object]]:
    with (Path(folder) / f"{number}.runs").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if fails:
        raise ValueError(f"number {number} is odd")
    if dies and (always or runs(Path(folder))[number] == 1):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    drawn = torch.rand(2).double()
    return [{"layer": layer, "score": drawn[layer], "loss": float("nan")} for layer in range(2)]
