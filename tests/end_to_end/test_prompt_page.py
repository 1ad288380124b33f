"""The served page for a model that writes, in a real browser: tokens coloured by score, flags, stops and errors."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.support.browser import missing, prefer, resize, wait
from tests.support.causal import TEMPLATE
from tests.support.serving import served
from tests.support.writing import PROMPT, writing_bank

from lamina.bank import ReaderBank
from lamina.monitors import EMA, LastScore, Monitor

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
TWO = ("odd", "mood")  # the readers of the page


def scores(bank: ReaderBank, count: int) -> list[float]:
    monitor = Monitor("odd", "odd", LastScore())
    steps = bank.stream(bank.model, PROMPT, monitors=[monitor], max_new_tokens=count, do_sample=False)
    return [step.score["odd"] for step in steps][:-1]


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    bank = writing_bank(None, TWO, ())
    own = scores(bank, 12)
    bank.keep_monitor(Monitor("odd", "odd", LastScore(), threshold=max(own[2:]), name="sharp"))
    bank.keep_monitor(Monitor("mood", "bad", EMA(3), name="quiet"))
    return bank


def opened(browser: Any, address: str, **fields: str) -> Any:
    browser.get("about:blank")
    browser.get_log("browser")
    prefer(browser, "light")
    resize(browser, 1280, 900)
    browser.get(f"{address}/#{urlencode(fields)}")
    wait(lambda: browser.find_element("id", "modes").is_displayed())
    return browser


def write(page: Any, prompt: str, tokens: int, *, stop: bool = False) -> None:
    fill = "for (const [id, value] of Object.entries(arguments[0])) document.getElementById(id).value = value"
    page.execute_script(fill, {"prompt": prompt, "tokens": tokens, "temperature": 0})
    if stop:
        page.find_element("id", "stop-on-flag").click()
    page.find_element("css selector", "#write button.main").click()


def is_written(page: Any) -> bool:
    return page.find_element("id", "written").get_attribute("aria-busy") == "false"


def tokens(page: Any, panel: str) -> list[dict[str, Any]]:
    script = """return [...document.querySelectorAll(`[data-panel=${arguments[0]}] .token`)].map(e => ({
        text: e.textContent, score: e.dataset.score, over: e.matches('.over'), flagged: e.matches('.flagged'),
        share: +e.style.getPropertyValue('--share')}))"""
    return page.execute_script(script, panel)


@pytest.mark.long
def test_tokens_are_coloured_by_score_with_the_flag_where_it_fired(browser: Any, bank: ReaderBank, address: str):
    page = opened(browser, address)
    assert not page.find_element("id", "ask").is_displayed()
    write(page, PROMPT, 12)
    wait(lambda: is_written(page))
    steps = list(bank.stream(bank.model, PROMPT, max_new_tokens=12, do_sample=False))
    shown = tokens(page, "sharp")
    assert [panel.text for panel in page.find_elements("css selector", ".panel h2")] == ["sharp", "quiet"]
    own = [step.score["sharp"] for step in steps]
    assert [float(token["score"]) for token in shown[:-1]] == pytest.approx(own[:-1], abs=6e-4)
    assert shown[-1]["score"] == "no score"  # no step reads the last token
    assert "".join(token["text"] for token in shown) == "".join(step.text for step in steps)
    threshold = bank.monitors["sharp"].threshold
    assert threshold is not None
    (at,) = (place for place, token in enumerate(shown) if token["flagged"])
    assert at == next(place for place, score in enumerate(own) if score >= threshold)
    assert [token["over"] for token in shown[:-1]] == [score >= threshold for score in own[:-1]]
    assert shown[at]["share"] >= 0.5 > min(token["share"] for token in shown[:-1])
    said = page.find_element("css selector", "[data-panel=sharp] .flag").text
    written = "".join(token["text"] for token in shown[: at + 1]).strip()
    assert said.startswith(f"Flagged at token {at + 1}, “")
    assert written.endswith(said.partition("“")[2].partition("”")[0].removeprefix("… "))
    assert not page.find_element("css selector", "[data-panel=quiet] .flag").is_displayed()
    tops = "return [...document.querySelectorAll('.scores')].map(chart => chart.getBoundingClientRect().top)"
    assert len(set(page.execute_script(tops))) == 1  # panels side by side are aligned
    assert "12 tokens in " in page.find_element("id", "progress").text
    assert page.get_log("browser") == []


@pytest.mark.long
def test_a_text_stops_at_a_flag_and_in_a_chat_too(browser: Any, address: str):
    page = opened(browser, address)
    write(page, PROMPT, 12, stop=True)
    wait(lambda: is_written(page))
    assert page.find_element("id", "progress").text.endswith("it ends because a monitor flagged it.")
    assert len(tokens(page, "sharp")) < 12
    chatting = writing_bank(TEMPLATE, TWO, ())
    chatting.keep_monitor(Monitor("odd", "odd", LastScore(), threshold=1e-6, name="sharp"))
    with served(chatting) as other:
        page = opened(browser, other)
        assert page.find_element("id", "chat").is_selected()
        write(page, PROMPT, 12, stop=True)
        wait(lambda: is_written(page))
        assert page.find_element("id", "progress").text.endswith("it ends because a monitor flagged it.")
        assert len(tokens(page, "sharp")) == 2
        assert page.get_log("browser") == []


@pytest.mark.long
def test_without_monitors_each_reader_of_tokens_has_a_panel_and_a_finished_text_is_judged(browser: Any):
    with served(writing_bank(None, TWO, ())) as address:
        page = opened(browser, address, prompt=PROMPT)
        assert page.find_element("id", "prompt").get_attribute("value") == PROMPT
        assert not page.find_element("id", "stopping").is_displayed()
        write(page, PROMPT, 3)
        wait(lambda: is_written(page))
        assert [panel.text for panel in page.find_elements("css selector", ".panel h2")] == ["odd", "mood"]
        page.find_element("css selector", "[data-mode=read]").click()
        assert not page.find_element("id", "written").is_displayed()
        page.find_element("id", "text").send_keys(PROMPT)
        page.find_element("css selector", "#ask button.main").click()
        wait(lambda: page.find_elements("css selector", ".layers"))
        assert page.get_log("browser") == []


@pytest.mark.long
def test_errors_are_shown_and_a_text_is_never_markup(browser: Any, address: str):
    page = opened(browser, address)
    write(page, " ", 3)
    assert page.find_element("id", "problem").text == "Type a prompt first."
    write(page, PROMPT, 0)
    assert page.find_element("id", "problem").text.startswith("The number of tokens")
    write(page, "film " * 80, 3)
    wait(lambda: page.find_element("id", "problem").is_displayed() and is_written(page))
    assert "tokens" in page.find_element("id", "problem").text
    write(page, "<img src=x onerror=\"document.title='gone'\">", 3)
    wait(lambda: is_written(page) and len(tokens(page, "sharp")) == 3)
    assert page.find_elements("css selector", "main img") == []
    assert page.title != "gone"


STREAM = """const body = arguments[0].map(event => `data: ${JSON.stringify(event)}\n\n`).join("");
    window.fetch = async () => new Response(body)"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("last", "problem", "why"),
    [
        (None, "The server closed the connection before the text was complete.", "an error came"),
        ({"error": "serve: the model broke."}, "The model broke.", "an error came"),
        ({"details": {"finish_reason": "length", "drift": {"sharp": "Replies differ."}}}, "", "the limit of tokens"),
    ],
)
def test_a_text_that_breaks_off_says_so_and_drift_is_shown(
    browser: Any, address: str, last: Any, problem: str, why: str
):
    page = opened(browser, address)
    token = {"token": {"id": 1, "text": "film", "special": False}, "monitors": {"sharp": -9.0}, "flagged": []}
    page.execute_script(STREAM, [{**token, "details": None}] + [last] * (last is not None))
    write(page, PROMPT, 3)
    wait(lambda: is_written(page) and tokens(page, "sharp"))
    assert page.find_element("id", "problem").text == problem
    assert f"1 token in 0.0 s; it ends because {why}" in page.find_element("id", "progress").text
    assert page.find_element("css selector", "[data-panel=sharp] .flag").text == "Not flagged."
    assert [said.text for said in page.find_elements("css selector", ".drift")] == ["Replies differ."] * (not problem)


@pytest.mark.long
def test_a_server_with_a_key_shows_no_prompt_without_it(browser: Any, bank: ReaderBank):
    with served(bank, api_key="s3cret") as address:
        browser.get("about:blank")
        browser.get(address)
        browser.execute_script("sessionStorage.clear()")
        wait(lambda: browser.find_element("id", "unlock").is_displayed())
        assert not browser.find_element("id", "write").is_displayed()
        browser.find_element("id", "key").send_keys("s3cret")
        browser.find_element("css selector", "#unlock button").click()
        wait(lambda: browser.find_element("id", "write").is_displayed())
        write(browser, PROMPT, 3)
        wait(lambda: is_written(browser))
        assert len(tokens(browser, "sharp")) == 3


@pytest.mark.long
def test_a_running_text_is_stopped_by_hand(browser: Any):
    bank = writing_bank(None, TWO, ())
    release = bank.model.register_forward_pre_hook(lambda *_: time.sleep(0.15))
    with served(bank) as address:
        page = opened(browser, address)
        write(page, PROMPT, 25)
        wait(lambda: tokens(page, "odd"))
        page.find_element("id", "halt").click()
        wait(lambda: is_written(page))
        release.remove()
        assert page.find_element("id", "progress").text.endswith("it ends because you stopped it.")
        assert len(tokens(page, "odd")) < 25


@pytest.mark.long
def test_dark_theme_and_the_width_of_a_phone(browser: Any, address: str):
    page = opened(browser, address)
    write(page, PROMPT, 12)
    wait(lambda: is_written(page))
    colour = "return getComputedStyle(document.querySelector('.token:not(.over)')).backgroundColor"
    pale = page.execute_script(colour)
    prefer(page, "dark")
    assert page.execute_script(colour) != pale
    columns = """return getComputedStyle(document.getElementById('written')).gridTemplateColumns.split(' ')
        .filter(width => width !== '0px').length"""
    assert page.execute_script(columns) == 2  # side by side
    resize(page, 360, 800)
    assert page.execute_script(columns) == 1
    assert page.execute_script("return document.documentElement.scrollWidth") == 360
