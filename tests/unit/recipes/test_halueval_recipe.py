"""The recipe on made-up chat replies: on rows of the same form it trains its readers in one pass, and scores them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support.files import jsonl

from lamina.errors import ConfigError, UnknownNameError
from lamina.recipes.estimate import estimate
from lamina.recipes.load_tasks import load_tasks
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import load_recipe, parse_recipe
from lamina.tasks.base import EncodeOptions
from lamina.train.groups import group_tasks

PATH = Path(__file__).parents[3] / "recipes/small/halueval.yaml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = random.Random(0)
    rows = []
    for number in range(120):
        made_up = rng.random() < 0.4
        place = rng.choice(["Paris", "Rome"])
        spans = ["on the moon"] if made_up else []
        rows.append(
            {
                "ID": str(number),
                "user_query": f"Where is {place}?",
                "chatgpt_response": f"{place} is {'on the moon' if made_up else 'in Europe'}.",
                "hallucination": "yes" if made_up else "no",
                "hallucination_spans": ["somewhere else"] if number == 7 else spans,
            }
        )
    (tmp_path / "halueval").mkdir()
    jsonl(tmp_path / "halueval/general.jsonl", rows)
    return tmp_path


@pytest.mark.long
def test_all_tasks_have_the_same_rows_so_that_one_pass_serves_them(data: Path, minilm: object):
    recipe = load_recipe(PATH)
    assert f"lamina train recipes/small/{PATH.name} " in PATH.read_text(encoding="utf-8").splitlines()[1]
    tasks = {name: own[0] for name, own in load_tasks(recipe, data).items()}
    for part in ("train", "validation", "test"):
        (group,) = group_tasks(tasks, EncodeOptions(part=part, max_length=64), minilm)
        assert group.names == ("whether", "where")
    assert [len(split) for split in tasks["where"].splits.values()] == [97, 11, 12]
    found = estimate(recipe, data=data)
    assert [row["method"] for row in found.runs] == ["the reply", "the pair", "the spans"]


@pytest.mark.full
def test_it_trains_and_scores(data: Path, tmp_path: Path):
    run = run_recipe(load_recipe(PATH), data=data, output=tmp_path / "out", epochs=4, progress=False, cache="off")
    whether = [row for row in run.rows if row["task"] == "whether"]
    (where,) = [row for row in run.rows if row["task"] == "where"]
    assert {row["metric"] for row in whether} == {"auroc"}
    assert [row["test"] for row in whether] == [1.0, 1.0]
    assert all({"test_recall_at_1", "test_recall_at_5"} <= set(row) for row in whether)
    assert (where["metric"], where["test"]) == ("span_f1", 1.0)
    assert run.steps == 4 * 4  # of all three readers together


def test_metrics_of_two_classes_are_for_two_classes():
    task = {"files": {"train": "a.tsv"}, "readers": {"it": {"fusion": "mean"}}, "metric": "auroc"}
    for more in ({"labels": ["a", "b", "c"]}, {"problem_type": "regression"}, {"kind": "token_classification"}):
        given = {"model": "minilm", "tasks": {"it": {"kind": "sequence_classification", **task, **more}}}
        with pytest.raises((UnknownNameError, ConfigError), match="unknown metric 'auroc'"):
            parse_recipe(given)
