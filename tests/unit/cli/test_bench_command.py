"""`lamina bench probes`: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.probing_sets import probing_sets

from lamina.studies.benchmarking import benchmark_cell

Lamina = Callable[..., Any]


@pytest.mark.long
def test_the_comparison_is_printed_and_a_lost_set_is_named(lamina: Lamina, base: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(benchmark_cell, "usual_epochs", lambda *_: 1)
    out = tmp_path / "out"
    arguments = ["bench", "probes", "--model", base, "--data", probing_sets(tmp_path), "--seeds", 0, "-o", out]
    arguments += ["--methods", "embedding", "--methods", "default", "--no-progress"]
    ran = lamina(*arguments)
    assert ran.code == 1
    assert "default is" in ran.out
    assert "Methods over all sets" in ran.out
    assert "4_lost" in ran.err
    again = lamina(*arguments, "--resume", "--json", "--sets", "1", "--sets", "2")
    printed = json.loads(again.out)
    assert (again.code, len(printed["sets"]), printed["failures"]) == (0, 4, [])
    assert {row["method"] for row in printed["methods"]} == {"embedding", "default"}


def test_bad_input_ends_with_one_sentence(lamina: Lamina, base: Path, tmp_path: Path):
    ran = lamina("bench", "probes", "--model", base, "--data", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: bench: {tmp_path} has no probing_datasets_MASTER.csv.zst")
