from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.studied import probe, saved

Lamina = Callable[..., Any]
RECIPE = """\
model: {base}
seeds: [0, 1]
fit: {{epochs: 1, batch_size: 8, progress: false}}
table: {{rows: method, digits: 2, published: {{source: a paper, values: {{last: {{film: 0.75}}}}}}}}
figure: {{title: All layers, x: fusion.layer}}
tasks:
  film:
    text: sentence
    files: {{train: train.tsv, validation: train.tsv}}
    readers:
      last: {{fusion: last_layer, head: {{pooling: mean}}}}
      one: {{fusion: {{name: single_layer, dim: 4}}, head: {{pooling: mean}}, grid: {{fusion.layer: [0, 1, 2]}}}}
"""


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "the film is good\tyes\nthe film is bad\tno\n" * 2)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(base=base))
    return tmp_path / "recipe.yaml"


def train(lamina: Lamina, recipe: Path, *more: object) -> Any:
    return lamina("train", recipe, "--data", recipe.parent, "-o", recipe.parent / "out", *more)


def test_training_draws_and_the_report_prints_the_paper_s_table(lamina: Lamina, recipe: Path):
    ran, out = train(lamina, recipe), recipe.parent / "out"
    assert ran.code == 0
    assert ran.out.splitlines()[-1].endswith(
        f"saved in {out}, report.md, report.tex, figure-1.png; lamina report {out} -o page.html shows it"
    )
    assert (out / "figure-1.png").read_bytes().startswith(b"\x89PNG")
    recipe.unlink()
    again = lamina("report", out, "--format", "svg")
    assert (again.code, again.err) == (0, "")
    assert "paper" in again.out
    assert "0.75" in again.out
    assert "- one (film): fusion.layer=" in again.out
    assert again.out.splitlines()[-1] == f"{out}: report.md, report.tex, figure-1.svg"
    assert not (out / "figure-1.png").exists()
    assert "All layers" in (out / "figure-1.svg").read_text()


def test_json(lamina: Lamina, recipe: Path):
    found = json.loads(train(lamina, recipe, "--json").out)
    assert found.keys() == {"table", "seconds", "steps", "output", "failures"}
    found = json.loads(lamina("report", recipe.parent / "out", "--json").out)
    assert found.keys() == {"tables", "figures", "monitors", "files", "format"}
    assert {(point["series"], point["x"]) for point in found["figures"][0]["points"]} == {
        ("last", None),
        *(("one", layer) for layer in (0, 1, 2)),
    }
    assert all(cell["runs"] == 2 for cell in found["tables"][0]["cells"])


def test_without_the_packages_that_draw_there_is_one_sentence(
    lamina: Lamina, recipe: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "altair", None)
    ran = train(lamina, recipe)
    assert ran.code == 0
    *others, told = ran.err.splitlines()
    assert told.startswith("warning: no figure was drawn; ")
    assert "lamina[report]" in told
    assert all("validation rows, which can hardly tell" in line for line in others)
    assert (recipe.parent / "out" / "report.md").is_file()


def test_a_run_without_the_keys_is_reported_when_it_is_asked(lamina: Lamina, recipe: Path):
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith(("table", "figure"))]
    recipe.write_text("\n".join(lines))
    out = recipe.parent / "out"
    assert (
        train(lamina, recipe)
        .out.splitlines()[-1]
        .endswith(f"saved in {out}; lamina report {out} -o page.html shows it")
    )
    assert not (out / "report.md").exists()
    assert "Best of every method" in lamina("report", out).out


def test_a_folder_without_a_report(lamina: Lamina, tmp_path: Path):
    ran = lamina("report", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "holds no report.json" in ran.err


def test_a_study_by_itself_is_told_of_the_page(lamina: Lamina, tmp_path: Path):
    ran = lamina("report", saved(probe(), tmp_path / "probe"))
    assert (ran.code, ran.out) == (2, "")
    assert "is a study, whose report is a page. Add -o page.html." in ran.err


def test_one_page_of_a_run_and_a_study(lamina: Lamina, recipe: Path):
    out, page = recipe.parent / "out", recipe.parent / "page.html"
    assert train(lamina, recipe).code == 0
    study = saved(probe(), recipe.parent / "probe")
    ran = lamina("report", out, study, "-o", page, "--title", "Both")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{page}: 7 charts from 2 runs\n"
    html = page.read_text(encoding="utf-8")
    assert "<h1>Both</h1>" in html
    assert re.search(r"<strong>film:</strong> .* accuracy \d", html)
    assert html.index("read at layer 3.") < html.index('id="kind-1"')  # before all charts but the leading one
    told = json.loads(lamina("report", out, "-o", page, "--files", "--json").out)
    assert (told["runs"], told["charts"], len(told["files"])) == (["out"], 2, 8)
    assert (recipe.parent / "page_files" / "01-out-figure-1.png").is_file()


def test_a_page_of_what_is_no_run_is_one_sentence(lamina: Lamina, tmp_path: Path):
    ran = lamina("report", tmp_path, "-o", tmp_path / "page.html")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert "is empty: it belongs to no study or training run, or to one that has not ended" in ran.err


def test_options_of_the_page_and_of_a_folder_do_not_mix(lamina: Lamina, tmp_path: Path):
    for options, said in (
        (("a", "b"), "2 runs are given without a page. Add -o page.html."),
        (("a", "--files"), "--files is given without a page"),
        (("a", "-o", tmp_path / "page.html", "--format", "png"), "with -o give more RUNs"),
    ):
        ran = lamina("report", *options)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
