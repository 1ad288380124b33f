"""A part of a recipe: which runs it has, and that the paper's numbers stay beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.errors import ConfigError, UnknownNameError
from lamina.recipes.expand import expand_recipe, with_part
from lamina.recipes.paper_tables import pivot
from lamina.recipes.schema import Recipe, load_recipe, parse_recipe, row_and_column_names
from lamina.recipes.table_layouts import read_only

PAPERS = Path(__file__).parents[3] / "recipes" / "papers"
GLUE = load_recipe(PAPERS / "insertion" / "table-1.yaml")


def part(recipe: Recipe, *texts: str, seeds: int | None = None) -> Recipe:
    return with_part(recipe, read_only(texts), seeds)


def test_a_part_is_those_runs_of_the_whole_recipe_under_the_same_names():
    whole = expand_recipe(GLUE, {})
    some = expand_recipe(
        part(GLUE, "task=cola", "method=no ins*,prop*", "position=attention", "learning_rate=3e-05"), {}
    )
    assert {spec.task for spec in some.values()} == {"cola"}
    assert {spec.settings["method"] for spec in some.values()} == {"no insertion", "proposed"}
    assert {spec.settings.get("insert.position") for spec in some.values()} == {None, "attention"}
    assert len(some) == 2 + 2 * 2
    assert all(whole[name] == spec for name, spec in some.items())


def test_the_paper_s_numbers_of_the_part_stay_beside_it():
    chosen = part(GLUE, "task=cola", "method=proposed")
    (table,) = pivot(chosen, [], [], []).tables
    assert table.published == {
        "proposed, attention": {"cola": 75.85},
        "proposed, ffn": {"cola": 73.03},
        "proposed, both": {"cola": 74.28},
    }
    assert row_and_column_names(chosen, chosen.table[0]) == (table.rows, ["cola"])
    assert len(pivot(GLUE, [], [], []).tables[0].published) == 10


def test_seeds_replace_those_of_the_recipe():
    seeds = {spec.settings["seed"] for spec in expand_recipe(part(GLUE, "task=cola", seeds=5), {}).values()}
    assert seeds == {0, 1, 2, 3, 4}
    assert part(GLUE, "task=cola").seeds == GLUE.seeds


def test_readers_have_parts_too():
    recipe = load_recipe(PAPERS / "adalayers" / "imdb-roberta-large.yaml")
    some = expand_recipe(part(recipe, "layer=1?"), {})
    layers = [spec.settings.get("fusion.layer") for spec in some.values()]
    assert layers == [None, *range(10, 20)]  # AdaLayers has no layer of its own and stays


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["task=colla"], r"^only: unknown task 'colla'; known: cola, sst2.*Did you mean 'cola'"),
        (["method=baseline,unit*"], r"unknown method 'baseline'; known: no insertion, without the method"),
        (["metod=x"], r"^only: unknown key 'metod'; known: task, method, learning_rate"),
        (["position=left"], r"unknown insert\.position 'left'; known: attention, ffn, both"),
        (["task="], r"^only: 'task=' names nothing; the form is key=pattern"),
        (["task"], r"^only: 'task' names nothing"),
    ],
)
def test_what_matches_nothing_is_an_error_that_says_what_exists(texts: list[str], message: str):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        part(GLUE, *texts)


def test_patterns_that_match_only_apart_are_an_error():
    readers = {"a": {"fusion": "mean"}}
    tasks = {"cola": {"preset": "cola", "readers": readers}, "sst2": {"preset": "sst2", "readers": {"b": readers["a"]}}}
    recipe = parse_recipe({"model": "minilm", "tasks": tasks})
    with pytest.raises(ConfigError, match="no run has task=cola and method=b; the methods of these tasks are a"):
        part(recipe, "task=cola", "method=b")


def test_a_name_with_a_comma_is_listed_as_the_option_takes_it():
    runs = load_recipe(PAPERS / "insertion" / "later-runs.yaml")
    with pytest.raises(
        UnknownNameError, match='known: no insertion, "unit, gelu on the weight", "unit, no activation"'
    ):
        part(runs, "method=baseline")
    assert part(runs, 'method="unit, gelu on the weight"').only == {"method": ["unit, gelu on the weight"]}


def test_seeds_of_a_grid_are_not_replaced_in_silence():
    tasks = {"cola": {"preset": "cola", "readers": {"a": {"fusion": "mean", "grid": {"seed": [1, 2]}}}}}
    with pytest.raises(ConfigError, match="sets 'seed' in a grid"):
        part(parse_recipe({"model": "minilm", "tasks": tasks}), seeds=3)


def test_a_recipe_may_say_which_part_to_run():
    tasks = {name: {"preset": name} for name in ("cola", "sst2")}
    fields = {"model": "minilm", "tasks": tasks, "methods": {"a": {}, "b": {}}, "table": {"rows": "method"}}
    recipe = parse_recipe({**fields, "only": {"task": "cola", "method": ["a"]}})
    assert list(expand_recipe(recipe, {})) == ["cola-a-0"]
    assert list(recipe.chosen_tasks) == ["cola"]
    with pytest.raises(UnknownNameError, match="unknown method 'c'; known: a, b"):
        parse_recipe({**fields, "only": {"method": "c"}})
