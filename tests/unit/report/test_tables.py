"""Tables of a report as texts, Markdown and LaTeX."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.recipes.report_file import Cell, Curves, PivotTable
from lamina.report.run_report import _image, chosen, escaped, grid, heads, latex, markdown, markdown_text, remarks


def cell(row: str, column: str, mean: float, interval: float | None = None, runs: int = 1, **settings: Any) -> Cell:
    return Cell(row, column, "mcc", mean, 0.0, interval, runs, settings)


TABLE = PivotTable(
    "GLUE & more_50%",
    "validation",
    rows=["no insertion", "new, attention", "new, ffn"],
    columns=["cola", "wnli"],
    cells=[
        cell("no insertion", "cola", 75.126, 1.5, 3, learning_rate=1e-4),
        cell("new, attention", "cola", 0.0, layers="1-4"),
        cell("new, attention", "wnli", 56.34, layers="1-4"),
    ],
    digits=2,
    scale=100.0,
    source="a paper, Table 1",
    published={"no insertion": {"cola": 75.9}, "new, attention": {"cola": 0}},
    others={"T5*": {"cola": 51.155}},
    notes=["one is a misprint"],
)


def test_printed_numbers_stand_beside_ours_and_missing_ones_are_empty():
    assert heads(TABLE) == [("cola", False), ("cola", True), ("wnli", False)]
    assert grid(TABLE) == [
        ["no insertion", "75.13 ± 1.50", "75.90", ""],
        ["new, attention", "0.00", "0", "56.34"],
        ["new, ffn", "", "", ""],
        ["T5*", "", "51.155", ""],
    ]


def test_what_stands_below():
    below = "Validation scores x 100; ± is half a 95 % interval over 1 to 3 runs."
    assert remarks(TABLE) == [below, "'paper': a paper, Table 1.", "one is a misprint."]
    assert chosen(TABLE) == ["no insertion (cola): learning_rate=0.0001", "new, attention (cola; wnli): layers=1-4"]
    plain = PivotTable("t", "test", ["a"], ["b"], [cell("a", "b", 0.5)])
    assert (remarks(plain), chosen(plain)) == (["Test scores."], [])


def test_a_table_of_parameters_says_so():
    sizes = [Cell("a", "b", "parameters", 1.59, 0.0, None, 1, {})]
    assert remarks(PivotTable("t", "test", ["a"], ["b"], sizes, scale=1e-6)) == ["Trained parameters x 1e-06."]


def test_a_figure_has_its_source_and_notes_below():
    figure = Curves("f*", "test", "layer", [], source="a paper, Figure 3", notes=["no numbers are printed"])
    assert _image(figure, "figure-1.png") == ("![f\\*](figure-1.png)\n\na paper, Figure 3. no numbers are printed.\n")
    assert _image(Curves("f", "test", "layer", []), "figure-1.png") == "![f](figure-1.png)\n"


def test_markdown():
    lines = markdown(TABLE).splitlines()
    assert lines[:5] == [
        "## GLUE & more\\_50%",
        "",
        "|  | cola | cola (paper) | wnli |",
        "|---|---:|---:|---:|",
        "| no insertion | 75.13 ± 1.50 | 75.90 |  |",
    ]
    assert lines[7] == "| T5\\* |  | 51.155 |  |"
    assert lines[-1] == "- new, attention (cola; wnli): layers=1-4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("R&D &amp; &#38;", r"R&D \&amp; \&\#38;"),
        ("~~a~~ C#", r"\~\~a\~\~ C\#"),
        ("- a", r"\- a"),
        ("a\n---", "a\n\\---"),
        ("12. a", r"12\. a"),
        ("  - a\n\t- b", "  \\- a\n\t\\- b"),
        ("  12) x\n3.", "  12\\) x\n3\\."),
        ("a\n  ---", "a\n  \\---"),
        (" -0.12\n 1.5 a", " -0.12\n 1.5 a"),
        ("-0.12 - 1.5", "-0.12 - 1.5"),
    ],
)
def test_markdown_text_reads_as_it_was_written(text: str, expected: str):
    assert markdown_text(text) == expected


def test_latex_is_booktabs_with_every_sign_escaped():
    text = latex(TABLE)
    assert text.count(r"\midrule") == 2
    assert r"\begin{tabular}{lrrr}" in text
    assert "no insertion & 75.13 $\\pm$ 1.50 & 75.90 &  \\\\\n" in text
    assert r"\caption{GLUE \& more\_50\%. Validation scores x 100; $\pm$ is half a 95 \% interval" in text
    assert text.count("{table}") == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b & 50 % #1 $2 {x}", r"a\_b \& 50 \% \#1 \$2 \{x\}"),
        ("\\ ~ ^ ±", r"\textbackslash{} \textasciitilde{} \textasciicircum{} $\pm$"),
    ],
)
def test_signs_of_latex(text: str, expected: str):
    assert escaped(text) == expected
