"""The page: what it holds, what it never holds, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from tests.support.studied import EVIL, probe, saved, wrong_answers

from lamina.errors import ConfigError, DataError, LaminaError, MissingExtraError, StoreError
from lamina.report import write_page
from lamina.report.study_section import marked_parts, study_section
from lamina.studies.study import Figure, Study


class Reader(HTMLParser):
    """The scripts of a page, everything that is loaded from somewhere, and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.policy = ""
        self._script = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        fields = dict(attrs)
        self._script = tag == "script"
        if self._script:
            self.scripts.append((fields, ""))
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset", "action", "data") and value]
        if fields.get("http-equiv") == "Content-Security-Policy":
            self.policy = fields["content"]

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        else:
            self.text.append(data)


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def data_of(reader: Reader) -> dict[str, Any]:
    (data,) = (json.loads(text) for fields, text in reader.scripts if fields.get("id") == "page-data")
    return data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    runs = [
        saved(probe(task=EVIL), folder / "first"),
        saved(probe(layers=6), folder / "second"),
        saved(wrong_answers(), folder / "errors"),
    ]
    written = write_page(runs, folder / "page.html", title="My <page>", as_files=True)
    return written, read(written.path), runs


def test_the_page_says_what_the_studies_concluded_before_it_shows_anything(page: Any):
    written, reader, _ = page
    text = " ".join(" ".join(reader.text).split())
    assert text.index("film: read at layer 3.") < text.index("Read on top.") < text.index("Settings and seeds")
    assert "No conclusion is drawn from errors" in text
    assert "Mean of 3 seeds, with its 95 % confidence interval; n = 872 rows" in text
    assert (written.runs, written.charts) == (["first", "second", "errors"], 10)
    assert "epochs" in text


def test_charts_of_one_name_stand_side_by_side_on_one_scale(page: Any):
    _, reader, _ = page
    charts = data_of(reader)["charts"]
    assert [chart["file"] for chart in charts[:2]] == ["01-first-by-layer", "02-second-by-layer"]
    assert len(charts) == 10
    shared = [domains_of(chart["spec"], "y") for chart in charts[:2]]
    assert shared[0] == shared[1]
    assert shared[0][0][1] > 0.85  # which only the second study reaches


def domains_of(spec: Any, axis: str) -> list[Any]:
    """The domains that a chart, or any part of it, gives to an axis."""
    if isinstance(spec, list):
        return [domain for part in spec for domain in domains_of(part, axis)]
    if not isinstance(spec, dict):
        return []
    scale = spec[axis].get("scale") if isinstance(spec.get(axis), dict) else None
    own = [scale["domain"]] if isinstance(scale, dict) and "domain" in scale else []
    return own + [domain for part in spec.values() for domain in domains_of(part, axis)]


def test_nothing_is_loaded_and_only_our_scripts_may_run(page: Any):
    _, reader, _ = page
    assert {link for link in reader.links if not link.startswith("#")} == {"data:,"}
    allowed = re.search(r"script-src ([^;]*)", reader.policy)
    assert allowed is not None
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for fields, text in reader.scripts
        if fields.get("type") != "application/json"
    ]
    assert sorted(allowed[1].split()) == sorted(f"'sha256-{digest}'" for digest in digests)
    assert "default-src 'none'" in reader.policy
    assert "unsafe-eval" not in reader.policy


def test_texts_from_data_are_texts(page: Any):
    written, reader, _ = page
    html = written.path.read_text(encoding="utf-8")
    assert "<script>document.title" not in html
    assert "<img src=x" not in html
    assert "<page>" not in html
    assert EVIL in " ".join(reader.text)
    assert EVIL in data_of(reader)["tables"][0]["columns"][0]["levels"]


def test_errors_are_shown_with_their_spans_marked(page: Any):
    written, _, _ = page
    html = written.path.read_text(encoding="utf-8")
    assert '<mark class="missed">Anna<span class="tag">PER missed</span></mark> lives here' in html
    assert '<mark class="extra">here<span class="tag">LOC extra</span></mark>' in html


def test_errors_say_how_sure_of_them_the_probe_was_and_of_which_layer_and_task_it_is(page: Any):
    text = " ".join(" ".join(page[1].text).split())
    assert "film · layer 1 · row 7 · confidence 0.980" in text
    assert "film · layer 1 · row 3 · error 1.250" in text
    assert "3 of 3 wrong answers" in text


@pytest.mark.parametrize(("layers", "tasks"), [(5, 2), (25, 3)])
def test_examples_of_errors_are_spread_over_layers_and_tasks(layers: int, tasks: int):
    places = [(f"t{task}", layer, rank) for task in range(tasks) for layer in range(layers) for rank in range(50)]
    rows = [
        {"task": task, "layer": at, "measure": "error", "row": rank, "score": 1 - rank / 100}
        for task, at, rank in places
    ]
    table = pd.DataFrame(rows).assign(metric="confidence", text="a", true="b", predicted="c")
    shown = study_section(Study("errors", table, {}), "errors").examples
    count = Counter(example.where.rsplit(" · row ", 1)[0] for example in shown)
    assert len(shown) == 40
    assert len(count) == min(40, layers * tasks)
    assert max(count.values()) - min(count.values()) <= 1
    assert {name[:2] for name in count} == {f"t{task}" for task in range(tasks)}
    assert all(int(example.where.rsplit(" ", 1)[1]) < 4 for example in shown)  # the surest


def test_spans_that_overlap_or_are_empty_mark_once():
    spans = [{"start": 4, "end": 9, "label": "A"}, {"start": 6, "end": 12}, {"start": 12, "end": 12}]
    assert marked_parts("the cat sat on", spans) == [("the ", "", ""), ("cat s", "A", "wrong"), ("at on", "", "")]


@pytest.mark.long
def test_files_beside_the_page(page: Any, tmp_path: Path):
    written, _, runs = page
    names = [path.name for path in written.files]
    assert {path.parent.name for path in written.files} == {"page_files"}
    assert all(path.is_file() for path in written.files)
    assert (names[0], names[1]) == ("01-first-by-layer.svg", "01-first-by-layer.png")
    assert "Probes" in written.files[0].read_text()
    assert written.files[1].read_bytes().startswith(b"\x89PNG")
    assert len([name for name in names if name.endswith(".tex")]) == 5
    again = write_page(runs[2:] + runs[:1], tmp_path / "page.html", as_files=True)
    (tmp_path / "page_files" / "mine.txt").write_text("mine")
    fewer = write_page(runs[:1], tmp_path / "page.html", as_files=True)
    left = {path.name for path in (tmp_path / "page_files").iterdir()}
    assert left == {path.name for path in fewer.files} | {"mine.txt", "lamina_page.json"}
    assert len(again.files) > len(fewer.files)


def refused(error: type[LaminaError], match: str, runs: list[Path], path: Path) -> None:
    with pytest.raises(error, match=match):
        write_page(runs, path)
    assert not path.exists()


def test_bad_runs(tmp_path: Path):
    page = tmp_path / "page.html"
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "checkpoints").mkdir(parents=True)
    whole = saved(probe(), tmp_path / "whole")
    refused(StoreError, "there is no folder .*nowhere", [tmp_path / "nowhere"], page)
    refused(StoreError, "empty is empty: it belongs to no study", [tmp_path / "empty"], page)
    refused(
        StoreError,
        r"half holds neither lamina_study\.json nor report\.json: .*has not ended",
        [tmp_path / "half"],
        page,
    )
    refused(ConfigError, "whole is given twice", [whole, tmp_path / "whole"], page)
    refused(ConfigError, "no run is given", [], page)
    refused(ConfigError, r"the page is 'page\.pdf'; its name must end in \.html", [whole], tmp_path / "page.pdf")
    nothing = saved(Study("probe", pd.DataFrame({"layer": [], "score": []})), tmp_path / "nothing")
    refused(DataError, "nothing has an empty table", [nothing], page)
    bare = saved(Study("probe", pd.DataFrame({"layer": [1], "score": [1.0]})), tmp_path / "bare")
    refused(DataError, "bare: there is nothing that can be drawn", [bare], page)
    (whole / "lamina_study.json").write_text(
        json.dumps(json.loads((whole / "lamina_study.json").read_text()) | {"format": 2})
    )
    refused(StoreError, "has format 2; this version of lamina reads format 1", [whole], page)


@pytest.mark.long
def test_runs_of_one_name_are_told_apart(tmp_path: Path):
    runs = [saved(probe(tasks=1, seeds=1), tmp_path / name / "probe") for name in ("a", "b")]
    assert write_page(runs, tmp_path / "page.html").runs == ["a/probe", "b/probe"]


def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = r"report: needs the package 'jinja2', .*lamina\[report\]"
    refused(MissingExtraError, said, [tmp_path], tmp_path / "page.html")


def test_what_a_page_cannot_write(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        write_page([saved(probe(tasks=1), tmp_path / "run")], tmp_path / "file" / "page.html")


def test_a_page_that_cannot_be_written_leaves_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, page = saved(probe(tasks=1), tmp_path / "run"), tmp_path / "page.html"
    page.mkdir()
    with pytest.raises(StoreError, match=r"page\.html is a folder. Give the path of a file."):
        write_page(run, page, as_files=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html"}
    page.rmdir()
    page.write_text("an older page")
    monkeypatch.setattr("lamina.report.html_page._write_charts", Mock(side_effect=StoreError("the disk is full")))
    with pytest.raises(StoreError, match="the disk is full"):
        write_page(run, page, as_files=True)
    assert page.read_text() == "an older page"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html"}


def test_the_title_says_what_was_studied(tmp_path: Path):
    run = saved(probe(tasks=1), tmp_path / "run")
    page = write_page(run, tmp_path / "page.html").path
    assert "<title>What each layer of tiny knows about film</title>" in page.read_text(encoding="utf-8")
    page = write_page([run, saved(wrong_answers(), tmp_path / "errors")], tmp_path / "page.html").path
    assert "<title>2 studies of tiny: film</title>" in page.read_text(encoding="utf-8")


def test_few_lines_have_their_names_at_their_ends(tmp_path: Path):
    charts = data_of(read(write_page(saved(probe(), tmp_path / "run"), tmp_path / "page.html").path))["charts"]
    rows = charts[0]["spec"]["data"]["values"]
    named = [row for row in rows if "label_y" in row]
    assert [(row["facet"], row["colour"], row["x"]) for row in named] == [
        ("film", "linear", 3), ("film", "mlp", 3), ("task 1", "linear", 3), ("task 1", "mlp", 3),
    ]  # fmt: skip
    assert '"legend": {' not in json.dumps(charts[0]["spec"])


def test_layer_by_token_maps_have_their_words(tmp_path: Path):
    columns = {"position": [0, 1] * 2, "token": ["a", EVIL] * 2, "layer": [0, 0, 1, 1], "predicted": list("wxyz")}
    table = pd.DataFrame({**columns, "score": [0.1, 0.2, 0.3, 0.4]})
    figure = Figure("heat", x="position", y="layer", label="predicted", x_label="token", title="Words")
    run = saved(Study("lens_tokens", table, {}, {"words": figure}), tmp_path / "lens")
    (chart,) = data_of(read(write_page([run], tmp_path / "page.html").path))["charts"]
    rows = [(row["label"], row["x_label"]) for row in chart["spec"]["data"]["values"]]
    assert set(rows) == set(zip("wxyz", columns["token"], strict=True))
    assert chart["layout"] == {"panels": 0, "marks": 4, "columns": 2, "step": 62, "margin": 43}
    assert "datum.value" in json.dumps(chart["spec"])
