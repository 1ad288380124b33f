"""Training off cached states: the weights of a run that computes them, resumed or not, now or later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import (
    largest_difference,
    names,
    reader,
    same,
    tiny_bank,
    tiny_model,
    train,
    weights,
    yes_no,
)

from lamina.bank import Reader, ReaderBank
from lamina.errors import CacheError, UnknownNameError
from lamina.fusion.extra_layers import ExtraLayers
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.task import Task
from lamina.train.engine import Engine
from lamina.train.options import FitOptions


class KilledError(Exception):
    """What ends a run early."""


def bank_and_tasks(rows: int = 20) -> tuple[ReaderBank, dict[str, Task]]:
    """Readers with dropout, over the same and over other texts, some of them cut into windows."""
    few = 2 * rows // 5
    task = yes_no(train=rows, validation=3 * rows // 5)
    other = names(metric="accuracy", train=few, validation=few, low=20, high=60)
    tasks = {"one": task, "two": task, "three": other}
    readers = {name: reader(tasks[name], dropout=0.2, seed=seed) for seed, name in enumerate(tasks)}
    return tiny_bank(readers), tasks


def trained(folder: Path, rows: int = 20, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    bank, tasks = bank_and_tasks(rows)
    result = train(bank, tasks, **{"epochs": 2, "cache_dir": str(folder / "cache"), **options})
    return weights(bank), result


def test_states_that_were_kept_whole_give_the_same_run_bit_for_bit(tmp_path: Path):
    # states of a text differ by rounding from batch to batch
    one_by_one = {"rows": 6, "batch_size": 1, "eval_batch_size": 1, "epochs": 1}
    plain, expected = trained(tmp_path, cache="off", **one_by_one)
    for where in ({"cache": "on", "cache_dtype": "float32"}, {"cache": "auto"}):  # on disk, in memory
        cached, result = trained(tmp_path, **where, **one_by_one)
        assert same(plain, cached)
        assert (result.history, result.importances) == (expected.history, expected.importances)


@pytest.mark.parametrize(
    ("dtype", "within"), [pytest.param("float32", 1e-3, marks=pytest.mark.full), ("float16", 1e-2)]
)
def test_cached_training_comes_close_to_uncached(tmp_path: Path, dtype: str, within: float):
    plain, _ = trained(tmp_path, cache="off")
    cached, _ = trained(tmp_path, cache="on", cache_dtype=dtype)
    assert 0 < largest_difference(plain, cached) <= within  # Adam makes steps of the rounding of gradients near 0


def test_a_later_run_does_not_run_the_model(tmp_path: Path):
    first, _ = trained(tmp_path, cache="on")
    bank, tasks = bank_and_tasks()
    assert bank.stacks
    seen: list[object] = []
    bank.model.register_forward_pre_hook(lambda *_: seen.append(1))
    train(bank, tasks, epochs=2, cache="on", cache_dir=str(tmp_path / "cache"))
    assert seen == []
    assert same(first, weights(bank))


def test_another_model_does_not_get_these_states(tmp_path: Path):
    task = yes_no(train=20, validation=12)
    slow = {"learning_rate": 1e-4}  # Adam turns rounding into whole steps
    given = {"cache": "on", "cache_dtype": "float32", "cache_dir": str(tmp_path), **slow}
    train(tiny_bank({"one": reader(task)}), {"one": task}, **given)
    for options in (given, slow):
        bank = tiny_bank({"one": reader(task)}, tiny_model(seed=9))
        train(bank, {"one": task}, **options)
        if options is given:
            cached = weights(bank)
        else:
            assert largest_difference(cached, weights(bank)) <= 1e-5


def test_a_killed_run_resumes_to_the_same_weights_off_the_cache(tmp_path: Path):
    whole, _ = trained(tmp_path, cache="on", save_steps=3)
    step, calls = Engine.step, []

    def dies(self: Engine, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 12:
            raise KilledError
        step(self, *args)

    options = {"cache": "on", "save_steps": 3, "output": tmp_path / "run"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", dies)
        with pytest.raises(KilledError):
            trained(tmp_path, **options)
    resumed, _ = trained(tmp_path, resume=True, **options)
    assert same(whole, resumed)


def test_a_folder_that_cannot_be_written_ends_the_run_before_it_begins(tmp_path: Path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(CacheError, match=r"cache cannot be read \(Not a directory\)"):
        trained(tmp_path, cache="on")
    trained(tmp_path, cache="auto", epochs=2)


@pytest.mark.parametrize("option", ["cache", "cache_dtype"])
def test_unknown_choices(option: str):
    with pytest.raises(UnknownNameError, match=f"unknown {option} 'always'"):
        FitOptions.of({option: "always"})


def test_a_group_that_cannot_be_cached_does_not_keep_others_from_it(tmp_path: Path):
    task, other = yes_no(train=12, validation=8), names(metric="accuracy", train=12, validation=8, seed=5)
    bank = tiny_bank({"cached": reader(task)})
    bank.add("deeper", Reader(ExtraLayers(), TokenClassification(other.labels, encoder_layers=0)))
    tasks = {"cached": task, "deeper": other}
    train(bank, tasks, epochs=2, cache="auto", cache_dir=str(tmp_path))
    with pytest.raises(CacheError, match="reader 'deeper' needs more of the model's pass than its states"):
        train(bank, tasks, epochs=2, cache="on", cache_dir=str(tmp_path))
