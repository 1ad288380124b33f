"""What surrounds a run: checkpoints, random numbers, and the model given back."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lamina.train.runs import (
    COMPLETE,
    EpochProgress,
    MarkComplete,
    begin,
    checkpoint_folder,
    newest_checkpoint,
    own_randomness,
    put_back,
)
from torch import nn


def checkpoints(folder: Path, steps: dict[int, bool]) -> list[Path]:
    made = [folder / f"checkpoint-{step}" for step in steps]
    for path, whole in zip(made, steps.values(), strict=True):
        path.mkdir()
        (path / "model.safetensors").touch()
        if whole:
            (path / COMPLETE).touch()
    return made


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path):
    nine, hundred, last = checkpoints(tmp_path, {9: True, 100: True, 200: False})
    assert begin(tmp_path, resume=True) == hundred == newest_checkpoint(tmp_path)
    assert nine.exists()
    assert not last.exists()


def test_a_new_run_clears_the_old_checkpoints_and_nothing_else(tmp_path: Path):
    checkpoints(tmp_path, {9: True, 100: False})
    (tmp_path / "notes").touch()
    assert begin(tmp_path, resume=False) is None
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_nothing_to_go_on_from(tmp_path: Path):
    assert begin(tmp_path / "none", resume=True) is None
    assert newest_checkpoint(tmp_path) is None


def test_a_checkpoint_is_whole_once_it_was_saved(tmp_path: Path):
    (made,) = checkpoints(tmp_path, {7: False})
    arguments: Any = SimpleNamespace(output_dir=str(tmp_path), should_save=False)
    state: Any = SimpleNamespace(global_step=7)
    MarkComplete().on_save(arguments, state, None)
    assert not (made / COMPLETE).exists()
    arguments.should_save = True
    MarkComplete().on_save(arguments, state, None)
    assert newest_checkpoint(tmp_path) == made


def test_where_checkpoints_are(tmp_path: Path):
    with checkpoint_folder(tmp_path) as folder:
        assert folder == tmp_path / "checkpoints"
    with checkpoint_folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_random_numbers_go_on_as_before():
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    with own_randomness():
        draw()
        torch.manual_seed(5)
    assert draw() == expected


def test_a_module_is_given_back_as_it_was():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module[0].weight.requires_grad_(False)
    module.eval()
    module[1].train()
    with put_back(module):
        module.train()
        module.requires_grad_(True)
        module(torch.ones(1, 2)).sum().backward()
        vars(module).update(forward=len, _original_forward=len)
    assert [one.training for one in module.modules()] == [False, False, True]
    assert [one.requires_grad for one in module.parameters()] == [False, True]
    assert all(one.grad is None for one in module.parameters())
    assert not {"forward", "_original_forward"} & vars(module).keys()


def test_a_forward_of_the_user_s_own_stays():
    module = nn.Linear(2, 2)
    vars(module)["forward"] = len
    with put_back(module):
        vars(module).update(forward=max, _original_forward=len)
    assert vars(module)["forward"] is len
    assert "_original_forward" not in vars(module)


def test_a_short_line_per_epoch():
    history = [{"reader": f"r{number}", "epoch": 2, "f1": number / 10} for number in range(8)]
    bar = EpochProgress([{"reader": "r0", "epoch": 1, "f1": 0.0}, *history], {f"r{n}": "f1" for n in range(8)})
    lines: list[str] = []
    bar.on_log(None, None, None, {"eval_f1": 1.0})
    vars(bar)["training_bar"] = SimpleNamespace(write=lines.append)
    bar.on_log(None, None, None, {"loss": 1.0})
    assert lines == []
    bar.on_log(None, None, None, {"eval_f1": 1.0})
    assert lines == ["epoch 2: r0 0.000, r1 0.100, r2 0.200, r3 0.300, r4 0.400, r5 0.500 and 2 more"]
