"""What the papers' tasks learn from: rows or blocks of hidden tokens, first or all sub-tokens, pairs, languages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import LaminaError
from lamina.recipes.estimate import Estimate, estimate
from lamina.recipes.expand import with_sweep
from lamina.recipes.loading import load_task
from lamina.recipes.schema import Recipe, load_recipe, parse_recipe

PAPERS = Path(__file__).parents[3] / "recipes" / "papers"
BERT = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}


@cache
def recipe(path: str) -> Recipe:
    return load_recipe(PAPERS / f"{path}.yaml")


@cache
def tried(path: str) -> Estimate:
    return estimate(recipe(path))


def tuned(tasks: dict[str, Any], **fields: Any) -> Recipe:
    given = {"model": "nobody/none", "architecture": BERT, "tasks": tasks, "methods": {"plain": {}}, **fields}
    return parse_recipe(given)


# Masked language modelling


def test_hidden_tokens_of_figures_3_and_6_are_of_rows():
    path = "insertion/figures-3-and-6-masked-lm"
    tasks = recipe(path).tasks.values()
    assert [(task.masked_lm and task.masked_lm.rows, task.metric) for task in tasks] == [(True, "accuracy")] * 2
    found = [(row["kind"], row["rows"], row["validation"], row["tokens"]) for row in tried(path).tasks]
    assert found == [("masked_lm", 3668, 408, 53), ("masked_lm", 8551, 1043, 12)]  # a pair of MRPC is one row


@pytest.mark.parametrize(
    ("given", "rows", "tokens"),
    [(True, 3038, 64), ({}, 3038, 64), ({"rows": False}, 3038, 64), ({"rows": True}, 3668, 53)],
)
def test_rows_or_blocks(given: Any, rows: int, tokens: int):
    found = tuned({"mrpc": {"preset": "mrpc", "masked_lm": given}})
    (row,) = estimate(found).tasks
    assert (row["kind"], row["rows"], row["tokens"]) == ("masked_lm", rows, tokens)
    again = with_sweep(found, {"learning_rate": [1e-4, 1e-5]})
    assert again.tasks["mrpc"].masked_lm == found.tasks["mrpc"].masked_lm


def test_without_hidden_tokens_a_task_is_what_it_is():
    for given in ({}, {"masked_lm": False}):
        found = tuned({"mrpc": {"preset": "mrpc", **given}})
        assert found.tasks["mrpc"].masked_lm is None
        assert estimate(found).tasks[0]["kind"] == "sequence_classification"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "masked_lm: masked_lm must be true, false or {rows: true}, not 3"),
        ({"row": True}, "unknown key 'row'; known: rows. Did you mean 'rows'"),
        ({"rows": "yes"}, "tasks.mrpc.masked_lm.rows: input should be a valid boolean"),
    ],
)
def test_what_masked_lm_may_be(given: Any, message: str):
    with pytest.raises(LaminaError, match=message):
        tuned({"mrpc": {"preset": "mrpc", "masked_lm": given}})


def test_rows_are_loaded_as_rows(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text("a\tb\tlabel\none\ttwo\t0\nthree\tfour\t1\n", encoding="utf-8")
    files = {"train": path.name, "validation": path.name}
    body = {"files": files, "text": "a", "text_pair": "b", "masked_lm": {"rows": True}}
    task = load_task("pairs", tuned({"pairs": body}).tasks["pairs"], tmp_path)
    assert (task.kind, task.by_row) == ("masked_lm", True)
    assert task.split("train").texts == (("one", "two"), ("three", "four"))
    measured = estimate(tuned({"pairs": body}), data=tmp_path).tasks[0]
    assert (measured["rows"], measured["tokens"]) == (2, 5)  # two words, a third more of tokens, two special ones
