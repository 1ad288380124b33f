"""The docs as a site, opened from disk in a real browser."""

from __future__ import annotations

import html
import inspect
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tests.support.browser import missing, prefer, resize
from tests.support.documented import ROOT, blocks

import lamina
from lamina.cli.command_line import COMMANDS

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.long]  # see `make test-long`


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the packages of lamina[check]")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=quiet, check=True, capture_output=True, text=True)
    return folder


def opened(browser: Any, page: Path) -> Any:
    browser.get(page.as_uri())
    return browser


def addresses(browser: Any) -> set[str]:
    """What was asked for since the log was last read."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    return {address for address in asked if not address.startswith(("data:", "about:", "blob:"))}


@pytest.mark.parametrize("step", [4])
def test_pages_fit_a_phone_and_ask_nobody_for_anything(step: int, site: Path, browser: Any):
    resize(browser, 400, 900)
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 30
    for scheme in ("light", "dark"):
        prefer(browser, scheme)
        opened(browser, pages[0]).execute_script("localStorage.clear()")  # it keeps what it was when first opened
        for page in pages[::step] if scheme == "light" else pages[:1]:
            opened(browser, page)
            wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{page.name} is wider than a phone"
        colours = browser.execute_script("return document.body.dataset.mdColorScheme")
        assert colours == {"light": "default", "dark": "slate"}[scheme]
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert {"http", "https", "ws", "wss"}.isdisjoint(address.partition("://")[0] for address in addresses(browser))


def test_search_finds_a_word_without_a_server(site: Path, browser: Any):
    resize(browser, 1280, 900)
    page = opened(browser, site / "index.html")
    field = page.find_element("css selector", "input.md-search__input")
    page.execute_script("arguments[0].focus()", field)
    field.send_keys("AttentionMean")
    end = time.monotonic() + 30
    while not (found := page.find_elements("css selector", ".md-search-result__link")):
        assert time.monotonic() < end, "nothing was found"
        time.sleep(0.1)
    where = [link.get_attribute("href").rpartition("/")[2].partition("?")[0] for link in found]
    assert {"api.html", "generation.html"} <= set(where)


def test_every_command_has_its_help(site: Path):
    text = (site / "commands.html").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f'<h2 id="{name}">' in text
        assert f"Usage: lamina {name} " in text


def test_a_page_is_a_notebook_too(site: Path):
    notebooks = sorted(site.rglob("*.ipynb"))
    assert len(notebooks) > 5
    for path in notebooks:
        page = path.with_suffix(".html").read_text(encoding="utf-8")
        assert f'href="{path.name}"' in page
        code = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        wanted = [block.code.strip() for block in blocks(ROOT / "docs" / path.relative_to(site).with_suffix(".md"))]
        assert [re.sub("^%%writefile.*\n", "", cell) for cell in code] == wanted


def test_a_notebook_runs(site: Path, tmp_path: Path):
    """The Python of every page runs in test_docs.py; this starts a kernel of Jupyter too."""
    notebook = nbformat.read(site / "files.ipynb", 4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if output.name == "stdout"]
    assert "bank/readers/mood/model.safetensors" in printed[0]


def test_every_public_name_is_shown_as_what_it_is(site: Path):
    text = (site / "api.html").read_text(encoding="utf-8")
    headings = re.findall(r'<h3 id="[^"]+" class="doc doc-heading">(.*?)</h3>', text, flags=re.DOTALL)
    shown = [html.unescape(re.sub(r"<[^>]+>", "", heading)).split("(")[0].split()[0] for heading in headings]
    wanted = {f"lamina.{name}" for name in lamina.__all__}
    assert wanted <= set(shown)
    functions = [name for name in wanted if inspect.isfunction(getattr(lamina, name.removeprefix("lamina.")))]
    sections = dict(zip(shown, re.split(r'<h3 id="[^"]+" class="doc doc-heading">', text)[1:], strict=True))
    short = {name for name in functions if "Parameters:" not in sections[name]}
    assert short <= {"lamina.edits"}  # a sentence says it
