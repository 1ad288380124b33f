"""The keys `table` and `figure`: what they name must exist, and shipped recipes give the tables of their papers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.recipes.expand import with_sweep
from lamina.recipes.schema import Recipe, all_coordinates, load_recipe, parse_recipe, row_and_column_names
from lamina.recipes.strict_yaml import read_yaml
from lamina.recipes.table_layouts import PAPERS, AxisLayout, x_value

ROOT = Path(__file__).parents[3] / "recipes"
PATHS = sorted(path for path in ROOT.rglob("*.yaml") if path.parent.name != "studies")
ADA, DWATT, INSERTION, REINIT = (
    ROOT / "papers" / name for name in ("adalayers", "dwatt", "insertion", "partial-reinit")
)

GOOD = """\
model: minilm
table: {rows: [method, insert.position], published: table 1}
figure:
  - {x: {count: insert.layers}, facet: task}
tasks:
  cola: {preset: cola}
  mrpc: {preset: mrpc}
methods:
  none: {}
  new:
    edits: [{insert: {init: unit}}]
    grid: {insert.position: [attention, ffn], insert.layers: [null, "1-2", [3, 5, 6]]}
"""
PAPER = """\
table 1:
  source: a paper
  values:
    none: {cola: 75.87}
    new, attention: {cola: 0, mrpc: 91.5}
  others: {elsewhere: {cola: 80}}
  notes: a misprint
"""


@cache
def recipe(path: Path) -> Recipe:
    return load_recipe(path)


def written(tmp_path: Path, text: str = GOOD, paper: str | None = PAPER) -> Path:
    (tmp_path / "recipe.yaml").write_text(text)
    if paper is not None:
        (tmp_path / "published.yaml").write_text(paper)
    return tmp_path / "recipe.yaml"


def test_rows_columns_and_what_the_paper_prints(tmp_path: Path):
    made = load_recipe(written(tmp_path))
    (table,) = made.table
    assert row_and_column_names(made, table) == (["none", "new, attention", "new, ffn"], ["cola", "mrpc"])
    assert table.published is not None
    assert table.published.values == {"none": {"cola": 75.87}, "new, attention": {"cola": 0, "mrpc": 91.5}}
    assert (table.published.source, table.published.notes) == ("a paper", ["a misprint"])


def test_a_copy_of_a_recipe_finds_the_paper_s_numbers(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_bytes((DWATT / "table-2.yaml").read_bytes())
    assert load_recipe(path).table == recipe(DWATT / "table-2.yaml").table
    path.write_text(path.read_text().replace("dwatt/table 2", "dwatt/table 20"))
    with pytest.raises(UnknownNameError, match=r"line 19, table\.published: unknown table or figure 'table 20'; known"):
        load_recipe(path)


def test_a_sweep_may_take_rows_and_names_away(tmp_path: Path):
    text = GOOD.replace("facet: task", "facet: task, series: {insert.position: {attention: A, ffn: F}}")
    made = with_sweep(load_recipe(written(tmp_path, text)), {"insert.position": ["both"], "learning_rate": [0.1, 0.2]})
    assert row_and_column_names(made, made.table[0]) == (["none", "new, both"], ["cola", "mrpc"])
    assert made.table[0].published == load_recipe(written(tmp_path, text)).table[0].published


def test_without_keys_the_methods_are_rows_and_the_tasks_columns():
    made = parse_recipe({"model": "minilm", "tasks": {"cola": {"preset": "cola"}}, "methods": {"a": {}, "b": {}}})
    assert row_and_column_names(made, made.table[0]) == (["a", "b"], ["cola"])
    assert made.figure == []


def test_an_x_is_a_count_a_value_or_a_line_across(tmp_path: Path):
    made = load_recipe(written(tmp_path))
    axis = made.figure[0].x
    found = [x_value(axis, place) for place in all_coordinates(made, {"insert.layers"}) if place["task"] == "cola"]
    assert found[1:] == [0, 2, 3]
    assert x_value(axis, {"method": "none"}) is found[0]
    counted = AxisLayout(key="insert.layers", count=True, names={"1-3": "three"})
    assert x_value(counted, {"insert.layers": "1-2"}) == 2  # names have no effect where layers are counted


def test_a_reader_s_grid_has_its_short_keys_and_methods_of_fusion():
    reader = {
        "fusion": "ada_layers",
        "grid": {"alpha": [1, 8], "fusion": ["ada_layers", {"name": "ada_layers", "dim": 8}]},
    }
    task = {"preset": "cola", "readers": {"a": reader}}
    made = parse_recipe(
        {"model": "minilm", "tasks": {"t": task}, "table": {"rows": "fusion", "columns": "fusion.alpha"}}
    )
    assert row_and_column_names(made, made.table[0]) == (["AdaLayers()", "AdaLayers(dim=8)"], ["1", "8"])


BAD: list[tuple[str, str, str]] = [
    (
        "rows: [method",
        "rows: [metod",
        r"line 2, table\.rows: unknown axis 'metod'; known: task, method, model, train_base, insert\.position",
    ),
    ("insert.position], published", "insert.positions], published", r"unknown axis 'insert\.positions'"),
    ("facet: task", "facets: task", r"line 4, figure\.0: unknown key 'facets'; .* Did you mean 'facet'"),
    ("facet: task", "facet: task, series: seed", r"line 4, figure\.0\.series: unknown axis 'seed'"),
    ("facet: task", "facet: {task: {kola: CoLA}}", r"unknown task 'kola'; known: cola, mrpc"),
    (
        ", facet: task",
        "",
        r"line 4, figure\.0: scores of 2 tasks would be mixed; x or series or facet must name 'task'",
    ),
    ("facet: task", "facet: task, metric: f2", r"line 4, figure\.0\.metric: unknown metric 'f2'; known: mcc"),
    ("facet: task", "facet: task, part: test", r"figure\.0\.part: part is test, but test parts are scored only with"),
    ("facet: task", "facet: task, scale: 0", r"figure\.0\.scale: input should be greater than 0"),
    ('"1-2"', '"1-"', r"figure\.0\.x: '1-' names layers up to the top, whose number is not known\. Write '1-24'"),
    ("{count: insert.layers}", "{count: insert.position}", r"figure\.0\.x: .*'attention'.* not a layer selector"),
    ("{count: insert.layers}", "{task: cola}", r"line 4, figure\.0\.x: unknown key 'task'"),
    ("{count: insert.layers}", "epoch, metric: parameters", "metric is parameters, which are the same in every epoch"),
    (
        "published: table 1",
        "metrics: [mcc], published: table 1",
        r"table\.metrics: unknown metric 'mcc'; known: accuracy, f1",
    ),
    ("published: table 1", "published: table 2", r"line 2, table\.published: unknown table or figure 'table 2'"),
    ("published: table 1", "published: dwat/table 2", r"unknown paper 'dwat'; known: .*Did you mean 'dwatt'"),
    (
        "rows: [method, insert.position]",
        "rows: method",
        r"recipe, published: unknown row 'new, attention'|unknown row 'new, att",
    ),
]


@pytest.mark.parametrize(("old", "new", "match"), BAD)
def test_what_cannot_be_is_an_error_with_its_line(old: str, new: str, match: str, tmp_path: Path):
    with pytest.raises((ConfigError, UnknownNameError), match=match):
        load_recipe(written(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("cola: 75.87", "colla: 75.87", r"line 2, table\.published: unknown column 'colla'; .*Did you mean 'cola'"),
        ("elsewhere: {cola", "elsewhere: {rte", "unknown column 'rte'"),
        ("source: a paper", "sources: a paper", r"unknown key 'sources'; .*Did you mean 'source'"),
        ("75.87", "much", r"table\.published"),
        ("  source: a paper\n", "", r"line 2, table\.published\.source: field required"),
    ],
)
def test_a_paper_s_numbers_are_checked(old: str, new: str, match: str, tmp_path: Path):
    with pytest.raises((ConfigError, UnknownNameError), match=match):
        load_recipe(written(tmp_path, paper=PAPER.replace(old, new)))


def test_a_paper_s_file_must_be_there(tmp_path: Path):
    with pytest.raises(DataError, match=r"published\.yaml cannot be read \(No such file"):
        load_recipe(written(tmp_path, paper=None))


def test_the_example_in_the_docs(tmp_path: Path):
    docs = (ROOT.parent / "docs" / "training.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(table:.*?)```", docs, flags=re.DOTALL)
    lines = GOOD.splitlines(keepends=True)
    made = load_recipe(
        written(
            tmp_path,
            "".join(
                [
                    lines[0],
                    example.replace("insertion/table", "table"),
                    *lines[4:7],
                    "  rte: {preset: rte}\n",
                    *lines[7:],
                ]
            ),
        )
    )
    assert made.figure[0].facet is not None
    assert made.table[0].published is not None


# The recipes that come along

CELLS: dict[Path, list[tuple[int, int]]] = {
    INSERTION / "table-1.yaml": [(10, 7)],
    INSERTION / "table-2-cnn-dailymail.yaml": [(11, 3)],
    INSERTION / "table-2-wmt16-en-ro.yaml": [(11, 1)],
    INSERTION / "later-runs.yaml": [(6, 2)],
    INSERTION / "table-3-imagenet.yaml": [(7, 1)],
    INSERTION / "table-3-cifar100.yaml": [(7, 1)],
    INSERTION / "table-4.yaml": [(3, 2)],
    INSERTION / "table-5.yaml": [(5, 2)],
    INSERTION / "table-9.yaml": [(16, 6)],
    DWATT / "table-2.yaml": [(5, 1)],
    DWATT / "table-3.yaml": [(4, 1)],
    **{
        ADA / f"{task}-{model}.yaml": [(2, 1)] * 2 + [(26, 1)] * (model == "roberta-large")
        for task in ("imdb", "cola", "conll")
        for model in ("roberta-large", "bart")
    },
}


@pytest.mark.parametrize("path", CELLS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_tables_have_the_rows_and_columns_of_the_papers(path: Path):
    made = recipe(path)
    assert [tuple(map(len, row_and_column_names(made, table))) for table in made.table] == CELLS[path]
    assert all(table.published is not None and table.published.values for table in made.table)


@pytest.mark.parametrize(
    ("path", "empty"),
    [
        (INSERTION / f"table-{name}.yaml", 0)
        for name in ("1", "2-cnn-dailymail", "2-wmt16-en-ro", "3-imagenet", "4", "9")
    ],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_every_cell_of_a_printed_table_has_its_number(path: Path, empty: int):
    (table,) = recipe(path).table
    assert table.published is not None
    rows, columns = row_and_column_names(recipe(path), table)
    assert sum(column not in table.published.values.get(row, {}) for row in rows for column in columns) == empty


def test_numbers_as_the_papers_print_them():
    """Those by which the others were checked too: corners, misprints and the last of each file."""

    def printed(path: Path, row: str, column: str, table: int = 0) -> Any:
        published = recipe(path).table[table].published
        assert published is not None
        return {**published.values, **published.others}[row][column]

    assert printed(INSERTION / "table-1.yaml", "without the method, both", "stsb") == 31.30
    assert printed(INSERTION / "table-1.yaml", "frozen, attention", "cola") == 0
    assert printed(INSERTION / "table-1.yaml", "proposed, ffn", "wnli") == 95.77
    assert printed(INSERTION / "table-9.yaml", "proposed, both", "rte") == 83.03
    assert printed(INSERTION / "table-5.yaml", "unit", "cola") == 85.85
    assert printed(INSERTION / "table-2-cnn-dailymail.yaml", "proposed, ffn", "CNN/DM, rougeLsum") == 40.15
    assert printed(INSERTION / "table-3-cifar100.yaml", "ViT-base of the ViT paper", "cifar100") == 91.67
    assert printed(DWATT / "table-2.yaml", "Concat", "millions of parameters") == 25.18
    assert printed(DWATT / "table-3.yaml", "DWAtt", "wikitext2") == 2.91
    assert printed(ADA / "conll-bart.yaml", "AdaLayers", "conll2003") == 89.3
    assert printed(ADA / "conll-roberta-large.yaml", "AdaLayers", "conll2003", 1) == 3.21


@pytest.mark.parametrize("paper", [ADA, DWATT, INSERTION, REINIT], ids=lambda path: path.name)
def test_every_published_entry_is_named_by_a_recipe(paper: Path):
    named = set()
    for path in paper.glob("*.yaml"):
        fields = read_yaml(path).fields
        for key in ("table", "figure"):
            given = fields.get(key, [])
            named |= {item.get("published") for item in (given if isinstance(given, list) else [given])}
    entries = read_yaml(PAPERS / f"{paper.name}.yaml").fields
    assert named - {None} == {f"{paper.name}/{entry}" for entry in entries}


OTHERS = {INSERTION / "figure-5.yaml", DWATT / "figure-3-discussed-mixes.yaml"}  # of weights; of no figure of a paper
DRAWN = [path for path in PATHS if "figure" in path.stem and path not in OTHERS]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_recipe_of_a_figure_draws_it(path: Path):
    made = recipe(path)
    assert len(made.figure) == 1 + (path.stem in ("figures-8-and-9",) or path == REINIT / "figure-2.yaml")
    assert all(figure.published is not None for figure in made.figure)


def xs(path: Path, number: int = 0) -> list[Any]:
    made = recipe(path)
    axis = made.figure[number].x
    found = (x_value(axis, place) for place in all_coordinates(made, {axis.key}))
    return sorted({x for x in found if isinstance(x, int)})


def test_the_x_of_a_figure_is_the_paper_s_number():
    assert xs(REINIT / "figure-1a.yaml") == list(range(13))
    assert xs(REINIT / "figure-2.yaml") == list(range(1, 13))
    assert xs(INSERTION / "figure-3.yaml") == [4, 8, 12, 16, 20, 24]
    assert xs(DWATT / "figure-3.yaml") == [8, 16, 32, 64, 128]
    assert xs(ADA / "imdb-roberta-large.yaml") == list(range(25))
    assert xs(ROOT / "small" / "three-tasks.yaml") == list(range(7))
