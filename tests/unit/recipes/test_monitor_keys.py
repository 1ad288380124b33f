"""Monitors of a recipe: calibrated on the trained readers, saved with the bank, and shown in the report."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.causal import causal_model, causal_tokenizer
from tests.support.files import jsonl

from lamina import save
from lamina.bank import ReaderBank
from lamina.errors import ConfigError, UnknownNameError
from lamina.recipes.report_file import read_report_file
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import Recipe, parse_recipe
from lamina.report.run_report import write_report
from lamina.report.sections import run_section

READER = {"fusion": {"name": "ada_layers", "dim": 8}, "head": {"pooling": "mean"}}
GUARD = {"task": "film", "flag": "bad", "rate": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monitors")
    save(causal_model(), folder / "base", causal_tokenizer())
    rng = random.Random(0)
    for part, count in (("train", 60), ("validation", 60)):
        rows = [
            {"text": f"the film is {'very ' * rng.randint(0, 2)}{word}", "label": word}
            for row in range(count)
            for word in [("good", "bad")[row % 3 == 0]]
        ]
        jsonl(folder / f"{part}.jsonl", rows)
    return folder


def recipe(folder: Path, readers: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    files = {part: str(folder / f"{part}.jsonl") for part in ("train", "validation")}
    body = {"files": files, "text": "text", "readers": readers or {"ada": READER}}
    fit = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05, "progress": False}
    return parse_recipe({"model": str(folder / "base"), "tasks": {"film": body}, "fit": fit, **fields})


def test_a_monitor_is_calibrated_saved_and_reported(folder: Path, tmp_path: Path):
    smooth = {**GUARD, "aggregate": {"name": "ema", "half_life": 2}, "scale": "probability"}
    run = run_recipe(recipe(folder, monitors={"guard": GUARD, "smooth": smooth}, seeds=[0, 1]), output=tmp_path)
    saved = ReaderBank.from_pretrained(tmp_path).monitors
    assert list(saved) == ["guard", "smooth"]
    best = max(run.rows, key=lambda row: row["score"])
    assert saved["guard"].reader == best["reader"]
    rates = saved["guard"].calibration
    assert rates is not None
    assert (rates.target, rates.split, rates.negatives) == (0.1, "validation", 40)
    assert rates.false_positive_rate <= 0.1
    assert f"at most 0.1 on these texts, {rates.date}, data {rates.data}" in (tmp_path / "README.md").read_text()
    other = saved["smooth"].calibration
    assert other is not None
    assert (len(rates.data), len(rates.date), other.data) == (16, 10, rates.data)  # of the same texts
    assert run.report.monitors[0]["threshold"] == saved["guard"].threshold
    write_report(tmp_path, [])
    text = (tmp_path / "report.md").read_text()
    assert "## Monitors" in text
    assert f"catches {100 * rates.recall:.1f} %" in text
    section = run_section(tmp_path, "run")
    assert [table.title for table in section.tables][-1] == "Monitors"
    assert any(line.startswith("smooth flags") for line in section.conclusions)


@pytest.mark.long
def test_the_drawn_files_of_an_earlier_run_are_still_known(folder: Path, tmp_path: Path):
    for _ in range(2):
        run_recipe(recipe(folder, monitors={"guard": GUARD}), output=tmp_path)
        known = read_report_file(tmp_path).files
        write_report(tmp_path, [])
    assert known == read_report_file(tmp_path).files != []


@pytest.mark.parametrize(
    ("monitor", "error", "message"),
    [
        ({"task": "films"}, UnknownNameError, r"unknown task 'films'.*Did you mean 'film'"),
        ({"reader": "adda"}, UnknownNameError, r"unknown reader 'adda'.*Did you mean 'ada'"),
        ({"rate": 1}, ConfigError, r"monitors\.guard\.rate"),
        ({"aggregate": "means"}, UnknownNameError, r"aggregate.*unknown name 'means'"),
        ({"when": 1}, UnknownNameError, r"unknown key 'when'"),
    ],
)
def test_what_a_monitor_cannot_be_is_an_error_before_anything_runs(
    folder: Path, monitor: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        recipe(folder, monitors={"guard": {**GUARD, **monitor}})


def test_a_monitor_needs_one_reader_in_a_bank(folder: Path):
    with pytest.raises(ConfigError, match=r"task 'film' has 2 readers; name one of them"):
        recipe(folder, {"ada": READER, "other": READER}, monitors={"guard": GUARD})
    with pytest.raises(ConfigError, match=r"a monitor needs a bank; leave out 'methods' and 'separately'"):
        recipe(folder, monitors={"guard": GUARD}, separately=True)
