"""Tables of the page, packed, as Markdown and as LaTeX."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from tests.support.studied import probe

from lamina.report.sections import DataTable, Section
from lamina.report.study_section import tables_of

TABLE = DataTable("Scores | all", ["task", "n & m", "score"], [["a|b_c", 3, 0.12345], ["a|b_c", None, 2.0]], "50 %")


def test_packed_cells_come_back():
    packed = json.loads(json.dumps(TABLE.compact()))
    task, count, score = packed["columns"]
    assert [task["levels"][code] for code in task["codes"]] == ["a|b_c", "a|b_c"]
    assert (count["cells"], score["cells"]) == ([3, None], [0.12345, 2.0])
    assert [column["name"] for column in packed["columns"]] == TABLE.columns


def test_markdown():
    assert TABLE.markdown().splitlines() == [
        r"## Scores \| all",
        "",
        "| task | n & m | score |",
        "|---|---:|---:|",
        r"| a\|b\_c | 3 | 0.1235 |",
        r"| a\|b\_c |  | 2 |",
        "",
        "50 %",
    ]


def test_latex():
    text = TABLE.latex()
    assert r"\begin{longtable}{lrr}" in text
    assert r"task & n \& m & score \\" in text
    assert r"a|b\_c & 3 & 0.1235 \\" in text
    assert r"\caption{Scores | all. 50 \%} \\" in text


def test_numbers_that_are_an_axis_are_no_measure():
    rows = [{"share": share, "seed": seed, "score": share + seed / 10} for share in (0.01, 0.1, 1.0) for seed in (0, 1)]
    frame = pd.DataFrame(rows)
    means, _ = tables_of(frame, "Shares", {"share"})
    assert [row[:2] for row in means.rows] == [[0.01, 0.06], [0.1, 0.15], [1.0, 1.05]]
    assert len(tables_of(frame, "Shares")) == 1  # nothing tells the rows apart


def test_means_over_seeds_come_first():
    means, whole = tables_of(probe().table, "Probe")
    assert means.columns == ["task", "layer", "probe", "rows", "mean", "low", "high", "seeds"]
    assert (len(means.rows), len(whole.rows)) == (16, 48)
    assert means.rows[0][:4] == ["film", 0, "linear", 872]
    assert means.rows[0][4] == 0.31
    assert [table.title for table in tables_of(probe(seeds=1).table, "Probe")] == ["Probe"]


@pytest.mark.parametrize("tasks", [["mood: film", "mood"], ["a: b: c"]])
def test_a_task_whose_name_has_a_colon_has_its_own_verdict(tasks: list[str]):
    sentences = [f"{task}: layer {number} is best." for number, task in enumerate(tasks)]
    section = Section("s", "probe", [*sentences, f"{tasks[0]}: more.", "All: of them."], tasks=tasks)
    assert section.verdicts == [
        *((task, f"layer {number} is best.") for number, task in enumerate(tasks)),
        ("", "All: of them."),
    ]
    assert section.details == [f"{tasks[0]}: more."]
