"""Cells that tests run here and on workers of Ray: functions of a module, which pickle."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lamina.recipes import run_recipe as recipe_run
from lamina.studies.runner import Cell
from lamina.train.learner import Learner

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra 'ray')")
in_worker = recipe_run._train_in_worker


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


def run_that_dies(folder: str, dying: str, at: int, given: bytes, name: str) -> Any:
    """Train a run of a recipe, and note its steps in a file; one kills its process at a step, the first time."""
    real, notes = Learner.step, Path(folder) / f"{name}.runs"

    def noting(self: Learner, *args: Any) -> Any:
        with notes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if name == dying and len(notes.read_text().splitlines()) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", noting)
        return in_worker(given, name)
