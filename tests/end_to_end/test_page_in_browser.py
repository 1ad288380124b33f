"""The page in a real browser: it draws, sorts, filters and turns dark, loads nothing, and runs its own scripts only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import missing, prefer, resize, wait
from tests.support.studied import EVIL, probe, saved, wrong_answers

from lamina.report import write_page

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DRAWN = """return [...document.querySelectorAll('[data-chart]')].map(box => ({
    marks: box.querySelectorAll('svg .mark-symbol path, svg .mark-rect path, svg .mark-line path').length,
    theme: box.dataset.drawn, width: box.scrollWidth, room: box.clientWidth}))"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = [saved(probe(task=EVIL), folder / "first"), saved(wrong_answers(), folder / "errors")]
    return write_page(runs, folder / "page.html", title="Layers").path


@pytest.fixture
def page(browser: Any, path: Path) -> Any:
    """The page as it is opened for the first time, so tall that every chart is near."""
    browser.get("about:blank")
    browser.get_log("performance")
    prefer(browser, "light")
    resize(browser, 1280, 6000)
    browser.get(path.as_uri())
    browser.execute_script("localStorage.clear()")
    browser.get(path.as_uri())
    wait(lambda: all(chart["theme"] == "light" for chart in browser.execute_script(DRAWN)))
    return browser


def texts(page: Any, table: int, column: int) -> list[str]:
    script = """const table = document.querySelectorAll('[data-table]')[arguments[0]];
        return [...table.querySelectorAll('tbody tr')].map(row => row.cells[arguments[1]].textContent)"""
    return page.execute_script(script, table, column)


def requests(page: Any) -> set[str]:
    """The addresses that were asked for since the log was last read."""
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    sent = (event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent")
    return {url for url in sent if not url.startswith(("data:", "blob:"))}


@pytest.mark.long
def test_every_chart_has_marks_and_nothing_goes_wrong(page: Any, path: Path):
    charts = page.execute_script(DRAWN)
    assert len(charts) == 5
    assert all(chart["marks"] > 0 for chart in charts)
    assert [entry for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert requests(page) == {path.as_uri()}
    assert page.title == "Layers"
    assert page.execute_script("return [...document.querySelectorAll('img, iframe, object')].length") == 0
    assert EVIL in page.execute_script("return document.querySelector('#examples').textContent")


@pytest.mark.long
def test_a_script_that_got_into_the_page_would_not_run(page: Any):
    script = "const s = document.createElement('script'); s.textContent = 'document.title = 1'; document.body.append(s)"
    page.execute_script(script)
    page.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 2\">')")
    time.sleep(0.3)
    assert page.title == "Layers"
    assert [entry for entry in page.get_log("browser") if "Content Security Policy" in entry["message"]]


@pytest.mark.long
def test_headings_sort_both_ways_and_by_the_keyboard(page: Any):
    from selenium.webdriver import Keys

    heads = page.find_elements("css selector", "[data-table='0'] th button")
    mean = [head.text for head in heads].index("mean")
    heads[mean].click()
    numbers = [float(text) for text in texts(page, 0, mean)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3
    cell = heads[mean].find_element("xpath", "..")
    assert cell.get_attribute("aria-sort") == "ascending"
    heads[mean].send_keys(Keys.ENTER)
    assert [float(text) for text in texts(page, 0, mean)] == numbers[::-1]
    assert cell.get_attribute("aria-sort") == "descending"


@pytest.mark.long
def test_filters(page: Any):
    card = page.find_element("css selector", "[data-table='0']")
    card.find_element("css selector", "input[type=search]").send_keys("mlp")
    assert set(texts(page, 0, 2)) == {"mlp"}
    assert card.find_element("css selector", "[role=status]").text == "8 of 8 rows, filtered from 16"
    card.find_element("css selector", "[aria-label='Filter mean']").send_keys(">0.5")
    assert len(texts(page, 0, 4)) == 4
    assert all(float(text) > 0.5 for text in texts(page, 0, 4))
    chosen = card.find_element("css selector", "[aria-label='Filter layer']")
    chosen.find_element("xpath", "option[.='3']").click()
    assert set(texts(page, 0, 1)) == {"3"}
    assert EVIL in texts(page, 0, 0)


@pytest.mark.long
def test_the_theme_follows_the_system_until_the_switch_is_used(page: Any):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(colour)
    switch = page.find_element("id", "theme")
    assert switch.get_attribute("aria-pressed") == "false"
    switch.click()
    wait(lambda: all(chart["theme"] == "dark" for chart in page.execute_script(DRAWN)))
    assert page.execute_script(colour) != light
    assert switch.get_attribute("aria-pressed") == "true"
    page.refresh()
    wait(lambda: all(chart["theme"] == "dark" for chart in page.execute_script(DRAWN)))
    page.execute_script("localStorage.clear()")
    page.refresh()
    assert page.execute_script(colour) == light
    prefer(page, "dark")
    wait(lambda: all(chart["theme"] == "dark" for chart in page.execute_script(DRAWN)))
    assert page.execute_script(colour) != light


@pytest.mark.long
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Any):
    resize(page, 390, 9000)
    wait(lambda: all(chart["theme"] and chart["room"] < 390 for chart in page.execute_script(DRAWN)))
    wait(lambda: all(chart["width"] <= chart["room"] + 1 for chart in page.execute_script(DRAWN)))
    assert page.execute_script("return document.documentElement.scrollWidth") == 390
    resize(page, 1280, 6000)


@pytest.mark.long
def test_charts_and_tables_are_saved_from_the_page(page: Any, tmp_path: Path):
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find_element("css selector", "[data-save=png]").click()
    page.find_element("css selector", "[data-save=svg]").click()
    for button in page.find_elements("css selector", "[data-table='0'] .actions button"):
        button.click()
    names = {f"01-first-by-layer.{kind}" for kind in ("png", "svg")}
    names |= {f"first-probe-means-over-seeds.{kind}" for kind in ("csv", "md", "tex")}
    wait(lambda: names <= {path.name for path in tmp_path.iterdir()})
    assert (tmp_path / "01-first-by-layer.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "first-probe-means-over-seeds.csv").read_text().splitlines()
    assert lines[0] == "task,layer,probe,rows,mean,low,high,seeds"
    assert len(lines) == 17
    assert r"\begin{longtable}{llllllll}" in (tmp_path / "first-probe-means-over-seeds.tex").read_text()
    assert len((tmp_path / "first-probe-means-over-seeds.md").read_text().splitlines()) == 18
